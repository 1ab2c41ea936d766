"""The figures of ``kvprobe sinks`` say what the tables say; values are read back from the axes."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PatchCollection
from PIL import Image
from test_plots_niah import drawn_texts

from kvprobe import plots, records
from kvprobe.errors import TheoryError
from kvprobe.plots import strips
from kvprobe.plots.sink_looks import CLASSES, about, left_in

WORDS = (
    "The",
    " heron",
    " stood",
    "\n",
    " in",
    " the",
    " reeds",
    " and",
    " watched",
    " it",
    " $x_1$",
    " 漢字",
    "é",
    " ",
)
NAMES = ("long", "short", "documents", "one", "wide")


def make_tokens(n, evidence, item, rng):
    bucket = np.array(["other"] * n, dtype=object)
    bucket[:4], bucket[-6:] = "first4", "recent"
    if evidence:
        bucket[evidence : evidence + 5] = "evidence"
        bucket[20] = "secondary_sink"
    mass = 10 ** rng.uniform(-5, -1, n)
    norm = 10 ** rng.uniform(1, 3, n)
    mass[10] = np.nan if item else 0.0
    return pd.DataFrame(
        {
            "item": item,
            "position": range(n),
            "text": [WORDS[i % len(WORDS)] for i in range(n)],
            "bucket": bucket,
            "n_rows": 5,
            "mass": mass,
            "value_mass": (mass + 1e-4) * norm,
            "value": mass * norm,
            "ratio": norm,
        }
    )


def make_summary(name, tables, n_items, layers):
    task = name != "documents"
    aurocs = {
        "mean": 0.3,
        "ci_low": None if n_items == 1 else 0.1,
        "ci_high": None if n_items == 1 else 0.5,
        "n": n_items,
    }
    none = {"mean": None, "ci_low": None, "ci_high": None, "n": 0}
    sweep = [
        {
            "epsilon": epsilon,
            "value_mass_per_token": {"first4": 10.0, "other": 0.1 + epsilon} | ({"evidence": 1.0} if task else {}),
            "auroc": aurocs,
            "spearman_value_mass": 1 - 10 * epsilon,
            "spearman_ratio_mass": 0.1,
            "spearman_ratio_norm": None if n_items == 1 else 0.5,
        }
        for epsilon in (0.0, 1e-4, 1e-2)
    ]
    courses = None
    if task:
        means = tables["courses"].groupby(["bucket", "token"])[["mass", "value"]].mean()
        values = {
            bucket: {
                "mass": means.loc[bucket]["mass"].tolist(),
                "value": means.loc[bucket]["value"].tolist(),
                "ratio": (means.loc[bucket]["value"] / means.loc[bucket]["mass"]).tolist(),
            }
            for bucket in ("first4", "evidence", "other")
        }
        courses = {"n_items": n_items, "n": [n_items] * 6, "buckets": values}
    return {
        "model": "a/model",
        "task": "niah_single_2" if task else None,
        "docs": None if task else "essays",
        "unit": "item" if task else "document",
        "n_items": n_items,
        "tokens": {"min": 100, "max": 200},
        "rows": "question and teacher-forced answer",
        "seed": 3,
        "epsilon": 1e-4,
        "settings": {"p": 1},
        "layers": {"excluded": [1] if name == "wide" else []},
        "auroc": {"mass": aurocs if task else none},
        "epsilon_sweep": sweep,
        "heads_sinky": {"share": 0.25, "ci_low": aurocs["ci_low"], "ci_high": aurocs["ci_high"], "threshold": 0.3}
        | {"n_heads": layers * 4},
        "courses": courses,
    }


def make_case(name):
    rng = np.random.default_rng(1)
    n_items, layers, n = {"one": 1, "wide": 3}.get(name, 2), {"wide": 80}.get(name, 5), 900 if name == "long" else 90
    tokens = pd.concat([make_tokens(n, 0 if name == "documents" else 40, i, rng) for i in range(n_items)])
    grid = list(itertools.product(range(n_items), range(layers), range(4)))
    sinks = pd.DataFrame(grid, columns=["item", "layer", "head"]).assign(first=rng.uniform(0, 1, len(grid)))
    rows = list(itertools.product(range(n_items), ("first4", "evidence", "other"), range(6), range(layers)))
    courses = pd.DataFrame(rows, columns=["item", "bucket", "token", "layer"]).assign(
        mass=rng.uniform(0.1, 0.4, len(rows)), value=rng.uniform(1, 9, len(rows))
    )
    items = pd.DataFrame({"index": range(n_items), "name": [f"item {i}" for i in range(n_items)]})
    tables = {"items": items, "tokens": tokens, "sinks": sinks, "courses": courses}
    summary = make_summary(name, tables, n_items, layers)
    return tables, summary, plots.sink_figures(tables, summary)


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return request.param, *make_case(request.param)


def test_names_of_the_figures(case):
    name, _, _, figures = case
    more = [] if name == "documents" else ["epsilon_sweep", "courses"]
    assert list(figures) == ["mass_value_mass", "token_strip", "sink_map", *more]


def test_no_text_over_text_or_beyond_the_edge(case, monkeypatch):
    for figure in case[3].values():
        texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
        out = [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())]
        assert texts and out == []
        boxes = [(text, box.padded(-1.5)) for text, box in texts]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == []


def test_files_are_no_wider_than_ten_inches(case, tmp_path):
    for name, figure in case[3].items():
        width, height = Image.open(records.write_figure(figure, tmp_path / f"{name}.png")).size
        assert 9 * 150 < width <= 10 * 150 and height <= 10 * 150


def test_every_figure_says_that_it_is_exploratory(case):
    for figure in case[3].values():
        assert "exploratory" in " ".join(text.get_text() for text in figure.texts)


def test_points_are_tokens_with_mass_and_diagonals_have_their_ratio(case):
    _, tables, _, figures = case
    (ax,) = figures["mass_value_mass"].axes
    tokens = tables["tokens"]
    drawn = {line.get_label(): line for line in ax.get_lines()}
    for name in CLASSES:
        rows = tokens[(tokens["bucket"] == name) & (tokens["mass"] > 0)]
        assert (name in drawn) == bool(len(rows))
        if len(rows):
            assert sorted(drawn[name].get_xdata()) == sorted(rows["mass"])
            assert sorted(drawn[name].get_ydata()) == sorted(rows["value"])
    ratios = [line.get_ydata() / line.get_xdata() for line in ax.get_lines() if line.get_label() == "_ratio"]
    said = {float(text.get_text().split("ρ")[1]) for text in ax.texts if "ρ" in text.get_text()}
    assert ratios and all(np.allclose(pair, pair[0]) for pair in ratios)
    assert said and all(any(math.isclose(value, pair[0]) for pair in ratios) for value in said)


def test_the_map_is_the_mean_over_inputs_with_a_dot_above_the_threshold(case):
    _, tables, _, figures = case
    ax = figures["sink_map"].axes[0]
    means = tables["sinks"].groupby(["head", "layer"])["first"].mean()
    grid = ax.images[0].get_array()
    assert all(grid[head, layer] == pytest.approx(value) for (head, layer), value in means.items())
    dots = next(line for line in ax.get_lines() if line.get_label() == "sinky")
    found = set(zip(dots.get_ydata(), dots.get_xdata(), strict=True))
    assert found == {key for key, value in means.items() if value > 0.3}


def test_strip_shows_all_of_a_short_text_and_the_places_that_matter_of_a_long_one(case):
    name, tables, _, figures = case
    tokens = tables["tokens"][tables["tokens"]["item"] == 0].reset_index(drop=True)
    rows = [row for piece in strips.shown(tokens) for row in piece]
    assert rows == sorted(set(rows))
    if name == "long":
        assert set(range(strips.LEAD)) <= set(rows) and len(tokens) - 1 in rows and len(rows) < strips.MOST
        assert set(range(40 - strips.AROUND, 45 + strips.AROUND)) <= set(rows)
        said = " ".join(text.get_text() for text in figures["token_strip"].axes[0].texts)
        assert f"{len(tokens) - len(rows)} tokens" in said
    else:
        assert rows == list(range(len(tokens)))
    patches = [part for part in figures["token_strip"].axes[0].collections if isinstance(part, PatchCollection)]
    for part, column in zip(patches, ("mass", "value_mass", "ratio"), strict=True):
        values, usable = part.get_array(), np.nan_to_num(tokens[column].to_numpy()[rows]) > 0
        assert np.array_equal(~np.ma.getmaskarray(values), usable)
        assert np.allclose(values[usable], tokens[column].to_numpy()[rows][usable])


def test_courses_and_the_sweep_draw_the_summary(case):
    _, _, summary, figures = case
    if summary["courses"] is None:
        return
    for ax, column in zip(figures["courses"].axes, ("mass", "value", "ratio"), strict=True):
        lines = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
        for name, label in (("first4", "first 4 positions"), ("evidence", "evidence"), ("other", "other context")):
            assert np.allclose(lines[label], summary["courses"]["buckets"][name][column])
    left, middle, right = figures["epsilon_sweep"].axes
    rows = summary["epsilon_sweep"]
    drawn = {line.get_label(): line.get_ydata() for line in left.get_lines()}
    assert np.allclose(drawn["other context"], [row["value_mass_per_token"]["other"] for row in rows])
    points = next(line for line in middle.get_lines() if line.get_label() == "AUROC").get_ydata()
    assert np.allclose(points, [row["auroc"]["mean"] for row in rows])
    assert len(right.get_lines()) == 4


def texts_of(figure):
    """All that stands on a figure, on one line."""
    found = [text.get_text() for text in figure.texts]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        found += [ax.get_ylabel(), *(text.get_text() for text in ax.texts)]
    return " ".join(" ".join(found).split()).replace("\N{NO-BREAK SPACE}", " ")


def test_where_windows_differ_a_diagonal_is_no_rho(case):
    _, tables, summary, figures = case
    plain = texts_of(figures["mass_value_mass"])
    assert "value per mass ρ is the same" in plain and "constant ρ" in plain and "windows" not in plain
    other = tables["tokens"].assign(ratio=tables["tokens"]["ratio"] * 1.1)
    said = texts_of(plots.sink_figures(tables | {"tokens": other}, summary)["mass_value_mass"])
    assert "constant value / mass" in said and "it is not quite ρ" in said and "constant ρ" not in said
    for each in (plain, said):
        assert "means over the rows that see the token" in each and "Whether it is read, this does not show" in each


def test_the_map_says_which_rows_count(case):
    said = texts_of(case[3]["sink_map"])
    assert "mean over the rows that see it" in said and "have s above 0.3" in said and "of a row" not in said


def test_the_strip_has_one_name_for_the_value_mass(case):
    said = texts_of(case[3]["token_strip"])
    assert "(s+ε)m" in said and "s·m" not in said


def test_words_for_one_and_many():
    assert left_in({"layers": {"excluded": [3]}}) == " (without layer 3, excluded beforehand)"
    assert left_in({"layers": {"excluded": [0, 1]}}) == " (without layers 0, 1, excluded beforehand)"
    given = {"model": "m", "task": "t", "n_items": 1, "unit": "item", "rows": "r", "settings": {"p": 1}, "seed": 0}
    for tokens, words in (((322, 322), "322 tokens"), ((300, 322), "300–322 tokens"), ((1, 1), "1 token")):
        parts = about(given | {"tokens": dict(zip(("min", "max"), tokens, strict=True))}).split(" · ")
        assert parts[3].replace("\N{NO-BREAK SPACE}", " ") == words and parts[2].endswith("1\N{NO-BREAK SPACE}item")


def test_what_no_row_sees_is_not_drawn():
    tables, summary, _ = make_case("short")
    hidden = {"first4": None, "other": 0.1}
    for row in summary["epsilon_sweep"]:
        row["value_mass_per_token"] = hidden
    left = plots.sink_figures(tables, summary)["epsilon_sweep"].axes[0]
    assert [line.get_label() for line in left.get_lines()] == ["other context"]


def test_titles_are_no_conclusions(case):
    for figure in case[3].values():
        assert not figure.texts[0].get_text().startswith("Which")


def test_a_strip_of_several_inputs_is_refused(case):
    _, tables, summary, _ = case
    both = pd.concat([tables["tokens"], tables["tokens"]])
    with pytest.raises(TheoryError, match="one input"):
        plots.token_strip(both, CLASSES, summary, "")
