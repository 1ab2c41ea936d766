"""The figures of a needle run: whole pages, from tables to files."""

import io
import itertools
import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from needle_tables import LABELS, axes, make_summary, make_tables, points
from PIL import Image

from kvprobe import plots, records

CASES = {
    "multikey": (3, LABELS, 1),
    "multivalue": (2, {"evidence": 4, "distractor": 5}, 4),
    "one item": (1, LABELS, 1),
    "no haystack spans": (2, {"evidence": 1, "hard": 3}, 1),
}


@pytest.fixture(scope="module", params=CASES)
def run(request):
    items, labels, together = CASES[request.param]
    tables, summary = make_tables(items, labels, together), make_summary(items)
    return tables, summary, plots.niah_figures(tables, summary)


def drawn_texts(figure, monkeypatch):
    """(text, box) of every text that reaches the page; ticks out of sight do not."""
    seen, draw = [], Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (seen.append(text), draw(text, renderer)))
    FigureCanvasAgg(figure).draw()
    monkeypatch.undo()
    return [
        (text.get_text(), text.get_window_extent()) for text in seen if text.get_visible() and text.get_text().strip()
    ]


def test_niah_figures_name_their_run(run):
    _, summary, figures = run
    assert list(figures) == ["auroc_heads", "mass_value_mass", "answer_by_arm"]
    items = "1 item" if summary["n_items"] == 1 else f"{summary['n_items']} items"
    about = (
        f"tiny/model · niah_multikey_1 · 1500 tokens · n = {items} · seed 7 · RULER's protocol, items generated here"
    )
    for figure in figures.values():
        assert about in " ".join(" ".join(text.get_text() for text in figure.texts).split())  # line breaks or not


def test_niah_figures_have_no_text_over_text_or_beyond_the_edge(run, monkeypatch):
    for figure in run[2].values():
        texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
        beyond = [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())]
        assert texts and beyond == []
        boxes = [(text, box.padded(-1)) for text, box in texts]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == []


def test_niah_masses_fill_both_panels_and_lie_inside(run):
    tables, _, figures = run
    means = pd.concat([plots.span_means(tables["spans"], where) for where in ("last", "answer")])
    for ax in figures["mass_value_mass"].axes:
        for limits, values in ((ax.get_xlim(), means["mass"]), (ax.get_ylim(), means["value_mass"])):
            assert values.min() / 3 < limits[0] < values.min() and values.max() < limits[1] < 3 * values.max()


def test_niah_head_panels_say_what_the_needle_is_compared_with():
    tables = make_tables()
    ranked = {"mass": {"mean": 0.55, "ci_low": 0.25, "ci_high": 1.0}}
    figures = plots.niah_figures(tables, make_summary(auroc={"vs_hard": ranked, "vs_distractor": None}))
    titles = [ax.get_title("left").split("\n") for ax in figures["auroc_heads"].axes[:4]]
    assert titles[0][:2] == ["against 3 other needles + 2 decoys", "at the last prompt token, mean 0.55 [0.25, 1.00]"]
    assert titles[1][1] == "at the answer tokens"
    assert titles[2][:2] == ["against 5 haystack spans", "at the last prompt token"]
    alone = plots.niah_figures(make_tables(1), make_summary(1))["auroc_heads"].axes[0].get_title("left")
    assert alone.endswith("no head could be significant: with 1 item, p is at least 0.167")  # 1 needle among 6 spans


def test_niah_figures_without_anything_to_compare_with_have_no_map():
    figures = plots.niah_figures(make_tables(labels={"evidence": 1}), make_summary())
    assert list(figures) == ["mass_value_mass", "answer_by_arm"]


def test_niah_masses_leave_out_excluded_layers():
    tables, summary = make_tables(), make_summary()
    summary["settings"]["exclude_layers"] = [0, 2]
    kept = tables["spans"][tables["spans"]["layer"].isin([1, 3])]
    figure = plots.niah_figures(tables, summary)["mass_value_mass"]
    expected = plots.span_means(kept).query("label == 'evidence'")[["mass", "value_mass"]]
    np.testing.assert_array_equal(points(figure.axes[0], "evidence"), expected)
    assert "means over 2 layers (without 0, 2, excluded beforehand)" in figure.texts[-1].get_text().replace("\n", " ")


def test_files_are_no_wider_than_ten_inches(tmp_path):
    summary = make_summary(model="a/" + "very-long-name-" * 12)
    for name, figure in plots.niah_figures(make_tables(), summary).items():
        width, _ = Image.open(records.write_figure(figure, tmp_path / f"{name}.png")).size
        assert 9 * 150 < width <= 10 * 150


@pytest.mark.parametrize(
    ("limits", "ticks"),
    [
        ((0.0006, 0.03), [0.001, 0.002, 0.005, 0.01, 0.02]),
        ((0.0002, 4.0), [0.001, 0.01, 0.1, 1]),
        ((0.0021, 0.0036), [0.0025, 0.003, 0.0035]),
    ],
)
def test_mass_axes_have_few_round_ticks(limits, ticks):
    ax = axes()
    plots.mass_against_value_mass(ax, make_tables()["spans"])
    ax.set_xlim(limits)
    assert [tick for tick in ax.get_xticks() if limits[0] <= tick <= limits[1]] == pytest.approx(ticks)


def test_figures_do_not_depend_on_the_users_settings():
    def bytes_of():
        buffer = io.BytesIO()
        plots.niah_figures(make_tables(), make_summary())["answer_by_arm"].savefig(buffer, format="png", dpi=50)
        return buffer.getvalue()

    plain = bytes_of()
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "axes.facecolor": "red"}):
        assert bytes_of() == plain
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.slow  # IPython comes with what runs the notebooks
def test_figures_show_in_a_notebook_with_and_without_the_inline_backend():
    from IPython.core.formatters import DisplayFormatter

    figure = plots.sheet(4, 3)
    figure.subplots().plot([0, 1])
    formatter = DisplayFormatter()
    data, metadata = formatter.format(figure)
    assert Image.open(io.BytesIO(data["image/png"])).size == (600, 450)
    assert metadata["image/png"] == {"width": 384}
    formatter.formatters["image/png"].for_type(Figure, lambda shown: b"inline")  # what the inline backend does
    assert formatter.format(figure)[0]["image/png"] == b"inline"


def test_plots_leave_pyplot_alone():
    code = "import sys; from kvprobe import plots; plots.sheet(); assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
