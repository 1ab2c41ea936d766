"""The figures of a scan of heads say what the tables say; values are read back from the axes."""

import itertools

import numpy as np
import pandas as pd
import pytest
from test_plots_niah import drawn_texts

from kvprobe import plots

LAYERS, HEADS, SEEDS = 6, 4, (0, 1)


def make_tables(answered=(True, True, False)):
    rng = np.random.default_rng(0)
    layer, head = (grid.ravel() for grid in np.indices((LAYERS, HEADS)))
    n = layer.size
    table = pd.DataFrame({"layer": layer, "head": head, "retrieval": rng.random(n), "reasoning": rng.random(n)})
    for seed in SEEDS:
        table[f"retrieval_seed_{seed}"] = rng.random(n)
    table = table.assign(top_mass=rng.random(n), relative_entropy=rng.random(n), entropy=rng.random(n))
    cells = [(kind, length, depth) for kind in ("retrieval", "reasoning") for length in (300, 600) for depth in (0, 50)]
    trials = pd.DataFrame(cells, columns=["score", "length", "depth"]).assign(kept=[True, False] * 4)
    rows = [
        {"item": item, "arm": arm, "draw": draw, "delta_logprob": value - item, "answered": ok}
        for item, ok in enumerate(answered)
        for arm, draw, value in (("top", 0, -10.0), ("random", 0, -1.0), ("random", 1, -2.0))
    ]
    single = table[["layer", "head"]].assign(
        delta_logprob=-rng.random(n), kl=rng.random(n), perturbation=rng.random(n) * (np.arange(n) > 0)
    )
    return {
        "heads": table,
        "trials": trials,
        "layers": pd.DataFrame(),
        "causal": pd.DataFrame(rows),
        "knockouts": single,
    }


def make_summary(**changes):
    row = {"task": "niah_single_2", "threshold": 0.1, "n": 4, "n_kept": 2, "share": 0.5, "n_heads_at_threshold": 12}
    rule = {"rule_text": "as stated", "rule": {"mass": 0.5}, "excluded": [0, 1]}
    causal = {
        "k": 3,
        "n": 2,
        "short": 0,
        "cannot_reject": True,
        "draws": 2,
        "top_k": -10.5,
        "random_k": -2.0,
        "difference": -8.5,
        "p_signflip": 0.5,
    }
    stable = {"rho": 0.7, "ci_low": 0.5, "ci_high": 0.8, "n_heads": 24, "n_cells": 4}
    return {
        "model": "tiny",
        "task": "niah_single_2",
        "lengths": [300, 600],
        "norm": 1,
        "seeds": [*SEEDS],
        "retrieval": row,
        "reasoning": row | {"task": "niah_multikey_1"},
        "stability": stable,
        "causal": causal | {"ci_low": -9.0, "ci_high": -8.0},
        "knockouts": {"kl_perturbation": 0.9, "delta_perturbation": None, "tokens": 500},
        "first_layers": rule,
    } | changes


@pytest.fixture(scope="module")
def figures():
    return plots.scan_figures(make_tables(), make_summary())


def test_which_figures_a_scan_has():
    tables, summary = make_tables(), make_summary()
    assert set(plots.scan_figures(tables, summary)) == {"heads", "first_layers", "stability", "causal", "knockouts"}
    del tables["knockouts"]
    summary = make_summary(stability={"rho": None}, causal={"top_k": None})
    assert set(plots.scan_figures(tables, summary)) == {"heads", "first_layers"}


def test_no_text_over_text_or_beyond_the_edge(figures, monkeypatch):
    for name, figure in figures.items():
        texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
        assert texts and [t for t, box in texts if not all(page.contains(*c) for c in box.corners())] == [], name
        boxes = [(text, box.padded(-1)) for text, box in texts]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == [], name


def test_maps_show_every_head_and_mark_the_best(figures):
    table, axes = make_tables()["heads"], figures["heads"].axes
    shown = {ax.get_title(loc="left"): np.asarray(ax.images[0].get_array()) for ax in axes if ax.get_ylabel() == "head"}
    for kind, title in (("retrieval", "retrieval score"), ("reasoning", "reasoning score")):
        (grid,) = [values for name, values in shown.items() if name.startswith(title)]
        assert np.allclose(grid, table.pivot(index="head", columns="layer", values=kind))
    (left,) = [ax for ax in axes if ax.get_title(loc="left").startswith("retrieval score")]
    marked = set(zip(*(np.asarray(x, int).tolist() for x in left.lines[0].get_data()), strict=True))
    best = table.nlargest(10, "retrieval")
    assert marked == set(zip(best["layer"], best["head"], strict=True))


def test_a_score_without_answers_has_no_map():
    summary = make_summary(reasoning={"share": None})
    titles = [ax.get_title(loc="left") for ax in plots.scan_figures(make_tables(), summary)["heads"].axes]
    assert any(title.startswith("retrieval") for title in titles)
    assert not any(title.startswith("reasoning") for title in titles)


def test_the_check_shows_answered_items_only(figures):
    (ax,) = figures["causal"].axes
    points = {(line.get_marker(), x, y) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)}
    assert {p for p in points if p[0] == "*"} == {("*", 0, -10.0), ("*", 1, -11.0)}
    assert {p for p in points if p[0] == "s"} == {("s", 0, -1.5), ("s", 1, -2.5)}
    assert {p for p in points if p[0] == "."} == {
        (".", x + 0.16, y) for x, y in ((0, -1.0), (0, -2.0), (1, -2.0), (1, -3.0))
    }


def test_single_heads_are_drawn_where_a_log_axis_can(figures):
    table = make_tables()["knockouts"]
    ax = next(ax for ax in figures["knockouts"].axes if ax.get_ylabel() == "KL, nats")
    drawn = {tuple(point) for point in ax.collections[0].get_offsets().tolist()}
    kept = table[table["perturbation"] > 0]
    assert len(kept) == len(table) - 1
    assert drawn == set(zip(kept["perturbation"], kept["kl"], strict=True))
    titles = [ax.get_title(loc="left") for ax in figures["knockouts"].axes]
    assert "Spearman 0.90 over 24 heads" in titles and "Spearman undefined over 24 heads" in titles


def test_seeds_are_drawn_against_each_other(figures):
    table, (ax,) = make_tables()["heads"], figures["stability"].axes
    points = ax.lines[1].get_xydata()
    assert np.allclose(points, table[["retrieval_seed_0", "retrieval_seed_1"]])


def test_excluded_layers_are_hatched(figures):
    upper = figures["first_layers"].axes[0]
    hatched = sorted(patch.get_x() + 0.5 for patch in upper.patches if patch.get_hatch())
    assert hatched == [0, 1]
