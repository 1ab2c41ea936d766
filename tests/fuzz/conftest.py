"""A tiny model in place of any model's name, and experiments that stop where computing would begin."""

import pytest


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A tiny Llama with room for whole items."""
    import tiny

    from kvprobe import models

    return models.load(tiny.save("llama", tmp_path_factory.mktemp("fuzz") / "llama", max_position_embeddings=4096))


@pytest.fixture
def validated(small, monkeypatch):
    """Commands that load, read their settings and validate them, and then stop; returns the names that did."""
    import typer

    from kvprobe import models
    from kvprobe.commands import running

    load, done = models.load, []

    def loaded(name, *given, **more):
        return small if name == "smollm2-135m" else load(name, *given, **more)

    def perform(self, name, out, arguments):
        self.package.validate(models.load(name), self.settings)
        done.append(self.command)
        raise typer.Exit(0)

    monkeypatch.setattr(models, "load", loaded)
    monkeypatch.setattr(running.Experiment, "perform", perform)
    return done
