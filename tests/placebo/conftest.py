"""Tiny random models that read bytes, and one whole placebo run of three items: every arm, vectors injected, too."""

import pytest


@pytest.fixture(scope="package")
def loaded(tmp_path_factory):
    """(family, changes) → a tiny random model with room for a few hundred bytes."""
    from functools import cache

    import tiny

    from kvprobe.models import load

    def made(family="llama", seed=0, **changes):
        folder = tmp_path_factory.mktemp("placebo") / family
        return load(tiny.save(family, folder, seed, max_position_embeddings=2048, **changes))

    return cache(made)


@pytest.fixture(scope="package")
def reader(loaded):
    return loaded()


@pytest.fixture(scope="package")
def own_items(reader, tmp_path_factory):
    """Three items, the last of which is not answered."""
    import placebo_items

    from kvprobe.tasks import user

    path = tmp_path_factory.mktemp("placebo") / "own.jsonl"
    rows = [placebo_items.item_row(i) for i in range(3)]
    return user.items(placebo_items.answered(reader, path, *rows, but=(2,)), reader)


@pytest.fixture(scope="package")
def ran(reader, own_items):
    from kvprobe import placebo

    # With these, tokens of a tiny model settle at different layers.
    settling = {"threshold": 0.32, "rule": "stays", "rho": 0.6}
    settings = placebo.Settings(inject="always", placebos=3, kappas=(0.25, 0.75), **settling)
    return placebo.run(reader, own_items, settings=settings)


@pytest.fixture(scope="package")
def own_traces(reader, tmp_path_factory):
    import placebo_items

    from kvprobe.tasks import user

    path = tmp_path_factory.mktemp("placebo") / "traces.jsonl"
    rows = [placebo_items.trace_row(0), placebo_items.trace_row(1), placebo_items.trace_row(2, rederive=False)]
    return user.traces(placebo_items.written(path, *rows), reader)


@pytest.fixture(scope="package")
def traced(reader, own_traces):
    from kvprobe import placebo

    settings = placebo.Settings(
        "trace_memory", placebos=2, kappas=(0.5,), rows=40, caliper=0.6, threshold=0.23, rho=0.6
    )
    return placebo.run(reader, own_traces, settings=settings)
