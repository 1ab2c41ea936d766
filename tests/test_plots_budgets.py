"""The figure of ``kvprobe evict``: what stands where, that it reads without colour, and that nothing overlaps."""

import io
import itertools

import curve_runs
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image
from test_plots_niah import drawn_texts

from kvprobe import plots, records
from kvprobe.plots import budgets

SIX = ("snapkv", "snapkv+two_stage", "snapkv+adakv", "snapkv+adakv+two_stage", "streaming", "random")
NINE = (*SIX, "h2o", "knorm", "expected_attention+layer_global+two_stage")
TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
CASES = {
    "six by six": (SIX, TENTHS),
    "nine": (NINE, TENTHS),
    "one policy": (SIX[:1], TENTHS),
    "one size": (SIX, (0.2,)),
    "one of each": (SIX[1:2], (0.025,)),
    "uneven": (SIX, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "close": (SIX, (0.1, 0.11, 0.12, 0.9)),
    "fifteen": (tuple("abcdefghijklmno"), TENTHS),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    rows = curve_runs.curves(*CASES[request.param])
    return rows, plots.score_against_cache(rows, curve_runs.summary(rows))


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}


def bars(ax):
    """(x, low, high) of every interval that is drawn."""
    segments = [part for each in ax.collections for part in each.get_segments() if len(part)]
    return [(part[0, 0], part[0, 1], part[1, 1]) for part in segments if np.isfinite(part).all()]


def test_every_score_and_interval_stands_where_the_table_says(case):
    rows, figure = case
    drawn = lines(figure)
    assert list(drawn) == [*dict.fromkeys(rows["policy"]), "full cache"]
    segments = {tuple(np.round(bar, 9)) for bar in bars(figure.axes[0])}
    for policy, mine in rows.groupby("policy", sort=False):
        mine = mine.sort_values("cache")
        x, y = drawn[policy].get_data()
        np.testing.assert_allclose(y, mine["score"])
        for place, low, high in zip(x, mine["ci_low"], mine["ci_high"], strict=True):
            assert (round(place, 9), round(low, 9), round(high, 9)) in segments
    np.testing.assert_allclose(drawn["full cache"].get_ydata(), 0.9)


def test_points_of_one_size_stand_side_by_side_around_their_tick(case):
    rows, figure = case
    ax = figure.axes[0]
    ticks, policies = ax.get_xticks(), list(dict.fromkeys(rows["policy"]))
    x = np.array([lines(figure)[policy].get_xdata() for policy in policies])
    np.testing.assert_allclose(x.mean(axis=0), ticks, atol=1e-12)
    assert (np.diff(x, axis=0) > 0).all()
    if len(ticks) > 1:  # nearer to their own tick than to any other
        assert (np.abs(x - ticks) < np.diff(ticks).min() / 4).all()
    low, high = ax.get_xlim()
    assert low < x.min() and x.max() < high


def test_ticks_are_the_sizes_in_per_cent(case):
    rows, figure = case
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    caches = sorted(set(rows["cache"]))
    assert [float(label.removesuffix(" %")) / 100 for label in labels] == pytest.approx(caches)
    assert all(len(label) <= 5 for label in labels)  # 10 %, 2.5 %: no digits that say nothing


def test_whole_per_cents_have_no_decimals_and_others_keep_theirs():
    rows = curve_runs.curves(("snapkv",), (0.025, 0.07, 0.29, 0.57, 1.0))
    ax = plots.sheet().subplots()
    plots.score_curves(ax, rows)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2.5 %", "7 %", "29 %", "57 %", "100 %"]


def test_an_axis_that_is_not_to_scale_says_so():
    for caches, even in (((0.025, 0.05, 0.1, 0.2, 0.4, 0.8), True), (TENTHS, False), ((0.1, 0.12), False)):
        ax = plots.sheet().subplots()
        plots.score_curves(ax, curve_runs.curves(SIX, caches))
        assert ("not to scale" in ax.get_xlabel()) is even
        assert (list(ax.get_xticks()) == list(range(len(caches)))) is even
        assert even or ax.get_xticks() == pytest.approx(caches)


def test_no_text_over_text_or_beyond_the_edge(case, monkeypatch):
    texts, page = drawn_texts(case[1], monkeypatch), case[1].bbox.padded(1)
    assert texts and [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())] == []
    boxes = [(text, box.padded(-1)) for text, box in texts]
    assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == []


def test_the_legend_stands_clear_of_the_axes(case):
    _, figure = case
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    label = figure.axes[0].xaxis.label.get_window_extent()
    assert legend.y1 <= label.y0 and legend.x1 <= figure.bbox.x1
    assert all(legend.y0 >= text.get_window_extent().y1 for text in figure.texts[2:])


def looks(policies):
    ax = plots.sheet().subplots()
    plots.score_curves(ax, curve_runs.curves(policies, TENTHS))
    return {
        line.get_label(): (line.get_color(), line.get_marker(), line.get_markerfacecolor(), line.get_linestyle())
        for line in ax.lines
        if not line.get_label().startswith("_")
    }


def test_a_second_stage_is_the_same_look_filled_and_solid():
    found = looks(SIX)
    for base in ("snapkv", "snapkv+adakv"):
        plain, staged = found[base], found[base + "+two_stage"]
        assert plain[:2] == staged[:2]
        assert (plain[2], plain[3]) == ("white", "--") and (staged[2], staged[3]) == (staged[0], "-")
    assert all(found[name][3] == "-" and found[name][2] == found[name][0] for name in ("streaming", "random"))
    assert looks(("snapkv+two_stage",))["snapkv+two_stage"][3] == "-"


@pytest.mark.parametrize("policies", [SIX, NINE, tuple("abcdefghijklmnopqrst")])
def test_policies_differ_without_colour_and_in_colour(policies):
    found = looks(policies)
    assert len(set(found.values())) == len(policies)
    if len({name.removesuffix("+two_stage") for name in policies}) <= len(budgets.MARKERS):
        assert len({(look[1], look[2] == "white") for look in found.values()}) == len(policies)


def test_neighbouring_colours_differ_for_the_colour_blind():
    """Each pair keeps a distance in red-green blindness (Viénot's matrices) or is told apart by lightness."""
    deutan = np.array([[0.625, 0.375, 0.0], [0.7, 0.3, 0.0], [0.0, 0.3, 0.7]])
    protan = np.array([[0.56667, 0.43333, 0.0], [0.55833, 0.44167, 0.0], [0.0, 0.24167, 0.75833]])
    for matrix in (np.eye(3), deutan, protan):
        seen = [matrix @ np.array(to_rgb(colour)) for colour in budgets.COLOURS]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.12


def test_the_legend_keeps_pairs_together_and_the_full_cache_last():
    rows = curve_runs.curves(SIX, TENTHS)
    figure = plots.score_against_cache(rows, curve_runs.summary(rows))
    FigureCanvasAgg(figure).draw()
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == [*SIX, "full cache"]
    left = [round(text.get_window_extent().x0) for text in texts]
    assert left[0] == left[1] < left[2] == left[3] < left[4] == left[5] < left[6]


def test_the_figure_names_its_run():
    rows = curve_runs.curves(SIX, TENTHS)
    for setting, said in (("context", "unseen when the cache is compressed"), ("joint", "together with the context")):
        figure = plots.score_against_cache(rows, curve_runs.summary(rows, setting=setting, n_items=1))
        text = " ".join(" ".join(each.get_text() for each in figure.texts).split())
        assert "niah_single_1: score against cache budget" in text and said in text
        assert "tiny/model, 1 item of 1500 tokens, seed 7" in text and "prefill-then-evict: question" in text


def test_one_item_has_points_and_no_intervals():
    rows = curve_runs.curves(SIX, TENTHS).assign(ci_low=np.nan, ci_high=np.nan)
    full = {"score": 1.0, "ci_low": float("nan"), "ci_high": float("nan")}
    figure = plots.score_against_cache(rows, curve_runs.summary(rows, full=full))
    ax = figure.axes[0]
    assert len(lines(figure)) == 7 and not ax.patches
    assert bars(ax) == []


def test_a_summary_read_back_from_its_file_draws_the_same():
    import json

    rows = curve_runs.curves(SIX, TENTHS).assign(ci_low=np.nan, ci_high=np.nan)
    full = {"score": 1.0, "ci_low": float("nan"), "ci_high": float("nan")}
    summary = curve_runs.summary(rows, full=full)
    read = json.loads(records.to_json(summary))

    def bytes_of(table, about):
        buffer = io.BytesIO()
        plots.score_against_cache(table, about).savefig(buffer, format="png", dpi=50)
        return buffer.getvalue()

    assert bytes_of(pd.DataFrame(read["rows"]), read) == bytes_of(rows, summary)


def test_the_file_is_no_wider_than_ten_inches(tmp_path):
    rows = curve_runs.curves(NINE, TENTHS)
    figure = plots.score_against_cache(rows, curve_runs.summary(rows, model="a/" + "very-long-name-" * 12))
    width, _ = Image.open(records.write_figure(figure, tmp_path / "curve.png")).size
    assert 9 * 150 < width <= 10 * 150
