"""A tiny model loaded once, and commands that find it at once and draw nothing."""

import fault_runs
import matplotlib
import pytest
import torch

matplotlib.use("agg")
FIGURES = ("niah_figures", "placebo_figures", "sink_figures", "map_figures", "audit_figures", "scan_figures")


class Dot:
    """A figure that costs nothing."""

    def savefig(self, target, **how):
        target.write_text("a figure")


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """Name → input of the fault_runs."""
    return fault_runs.inputs(tmp_path_factory.mktemp("faults") / "inputs")


@pytest.fixture(scope="session")
def loaded(given):
    """The tiny model of the fault_runs."""
    from kvprobe import models

    return models.load(given["model"])


@pytest.fixture
def quick(given, loaded, monkeypatch):
    """Commands on the loaded model: no figures, one thread (a forked process has no others), all answers right."""
    from kvprobe import models, plots
    from kvprobe.heads import trials

    monkeypatch.setattr(models, "load", lambda name: loaded)
    for name in FIGURES:
        monkeypatch.setattr(plots, name, lambda *parts: {"figure": Dot()})
    monkeypatch.setattr(plots, "score_against_cache", lambda *parts: Dot())
    for name in ("rouge1_recall", "token_f1"):
        monkeypatch.setattr(trials, name, lambda *texts: 1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield given
    torch.set_num_threads(threads)
