"""The figures of a perturbation map say what the tables say; values are read back from the axes."""

import io
import itertools
import json
import math

import numpy as np
import pytest
from map_tables import (
    NAMES,
    PRESETS,
    case_tables,
    drawn_bars,
    grid_axes,
    lines,
    make_case,
    make_heads,
    make_summary,
    presets_of,
    words,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from test_plots_niah import drawn_texts

from kvprobe import plots, records
from kvprobe.plots import perturbations as panels


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return make_case(request.param)


def test_no_text_over_text_or_beyond_the_edge(case, monkeypatch):
    for figure in case[4].values():
        texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
        out = [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())]
        assert texts and out == []
        boxes = [(text, box.padded(-1)) for text, box in texts]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == []


def test_files_are_no_wider_than_ten_inches(case, tmp_path):
    for name, figure in case[4].items():
        width, height = Image.open(records.write_figure(figure, tmp_path / f"{name}.png")).size
        assert 9 * 150 < width <= 10 * 150 and height <= 10 * 150


def test_names_of_the_figures(case):
    assert list(case[4]) == ["head_perturbation", "layer_perturbation", "budget_perturbation"]


def test_cells_have_the_colour_of_their_ratio(case):
    heads, figure = case[0], case[4]["head_perturbation"]
    for (preset, frame), (ax, _) in zip(presets_of(heads), grid_axes(figure, 2), strict=True):
        (image,), limit = ax.images, panels.limit_of(heads["log2_ratio"].to_numpy())
        assert (image.norm.vmin, image.norm.vmax) == (-limit, limit) and f"preset {preset}" in ax.get_title("left")
        shown, hidden = np.ma.getdata(image.get_array()), np.ma.getmaskarray(image.get_array())
        for row in frame.itertuples():
            assert hidden[row.head, row.layer] == math.isnan(row.log2_ratio)
            if not math.isnan(row.log2_ratio):
                assert shown[row.head, row.layer] == min(max(row.log2_ratio, -limit), limit)
        assert shown.size == len(frame)


def test_dashes_rise_and_circles_are_significant(case):
    heads, figure = case[0], case[4]["head_perturbation"]
    few = len(heads) / heads["preset"].nunique() <= 2000
    for (_, frame), (ax, _) in zip(presets_of(heads), grid_axes(figure, 2), strict=True):
        segments = [part for each in ax.collections if isinstance(each, LineCollection) for part in each.get_segments()]
        dashes = {(round(part[:, 0].mean()), round(part[0, 1])) for part in segments}
        circles = [each for each in ax.collections if isinstance(each, EllipseCollection)]
        rises = frame[frame["log2_ratio"] > 0]
        assert dashes == (set(zip(rises["layer"], rises["head"], strict=True)) if few else set())
        marked = {tuple(map(int, at)) for each in circles for at in each.get_offsets()}
        low = frame[frame["p_bh"] <= 0.05]
        assert marked == (set(zip(low["layer"], low["head"], strict=True)) if few else set())
    assert few or "Too many heads to mark single ones" in words(figure)


def test_circles_stand_out_from_dark_cells():
    heads = make_heads(PRESETS[:1], scale=1.0).assign(p_bh=0.01)
    limit = panels.limit_of(heads["log2_ratio"].to_numpy())
    ax = grid_axes(plots.perturbation_heads(heads, make_summary(heads)), 2)[0, 0]
    circles = next(each for each in ax.collections if isinstance(each, EllipseCollection))
    ratio = {(row.layer, row.head): row.log2_ratio for row in heads.itertuples()}
    lightness = {0.0: [], 1.0: []}
    for at, edge in zip(circles.get_offsets(), circles.get_edgecolors(), strict=True):
        cell = panels.FALLS((ratio[tuple(map(int, at))] / limit + 1) / 2)
        lightness[edge[0]].append(np.dot(cell[:3], [0.2126, 0.7152, 0.0722]))
    assert max(lightness[1.0]) < 0.65 and min(lightness[0.0]) > 0.35 and len(circles.get_facecolors()) == 0


def test_the_ends_differ_in_grey_and_from_undefined():
    grey = [np.dot(to_rgb(colour), [0.2126, 0.7152, 0.0722]) for colour in (panels.FALLS(0.0), panels.FALLS(1.0))]
    assert grey[0] < 0.2 < 0.4 < grey[1]
    assert to_hex(panels.FALLS(np.ma.masked_all(1))[0]) == panels.UNDEFINED.lower()


def test_the_curve_counts_heads_and_meets_the_share(case):
    heads, _, _, summary, figures = case
    for (preset, frame), (_, ax) in zip(presets_of(heads), grid_axes(figures["head_perturbation"], 2), strict=True):
        drawn, ratios = lines(ax), frame["log2_ratio"].tolist()
        x, y = drawn["heads"].get_data()
        assert (np.diff(x) >= 0).all() and ax.get_xlim() == (x[0], x[-1]) and x[-1] == -x[0]
        for place in {0, len(x) // 3, len(x) // 2, len(x) - 1}:
            assert y[place] == pytest.approx(100 * sum(ratio <= x[place] for ratio in ratios) / len(ratios))
        found = summary["presets"][preset]["heads_reduced"]
        assert drawn["share"].get_data() == ([0], [100 * found["share"]])
        bars = drawn_bars(ax)
        if summary["n_docs"] > 1:
            assert bars[0.0] == pytest.approx((100 * found["ci_low"], 100 * found["ci_high"]))
        else:
            assert bars == {}


def test_the_title_has_each_share_with_its_interval_and_n(case):
    heads, _, _, summary, figures = case
    title = figures["head_perturbation"].texts[0].get_text()
    for preset, frame in presets_of(heads):
        found = summary["presets"][preset]["heads_reduced"]
        low, high = (f"{100 * found[end]:.1f}" for end in ("ci_low", "ci_high"))
        interval = f"[{low}, {high}]" if summary["n_docs"] > 1 else "[no interval]"
        assert f"{100 * (frame['difference'] < 0).mean():.1f} % {interval} ({preset})" in title
    count = len(presets_of(heads)[0][1])
    assert f"of {count} head" in title and title.endswith(f"n = {summary['n_docs']}")


def test_a_share_without_spread_is_no_tight_interval():
    heads = make_heads(PRESETS[:1])
    summary = make_summary(heads)
    summary["presets"]["paper"]["heads_reduced"] |= {"method": "degenerate: resamples agree", "share": 1.0}
    assert "100.0 % [no spread]" in plots.perturbation_heads(heads, summary).texts[0].get_text()
    bare = plots.perturbation_heads(heads, {"n_docs": 22}).texts[0].get_text()
    assert f"{100 * heads['reduced'].mean():.1f} % [no interval]" in bare


def test_panels_count_significant_heads_or_say_that_none_could_be(case):
    heads, figure = case[0], case[4]["head_perturbation"]
    for (_, frame), (ax, _) in zip(presets_of(heads), grid_axes(figure, 2), strict=True):
        low = frame[frame["p_bh"] <= 0.05]
        counts = f"{(low['difference'] < 0).sum()} significantly lower, {(low['difference'] > 0).sum()} higher"
        said = "no head could be significant, p ≥ 1" if frame["n_docs"].max() == 1 else counts
        assert said in ax.get_title("left")


def test_the_legend_of_heads_explains_what_occurs_and_no_more():
    def said(**columns):
        heads = make_heads(PRESETS[:1]).assign(**columns)
        return " ".join(t.get_text() for t in plots.perturbation_heads(heads, make_summary(heads)).legends[0].texts)

    assert all(word in said() for word in ("rises", "Benjamini")) and "undefined" not in said()
    assert "rises" not in said(log2_ratio=-0.1) and "Benjamini" not in said(p_bh=1.0)
    assert "undefined" in said(log2_ratio=[np.nan, *[0.1] * 269])


@pytest.mark.parametrize(("largest", "limit"), [(0.0, 0.5), (0.5, 0.5), (0.51, 1.0), (1.2, 1.5), (5.0, 6.0), (99, 8.0)])
def test_colours_end_where_nearly_all_heads_are_covered(largest, limit):
    ratios = np.array([0.1] * 97 + [-largest] * 3 + [np.nan, np.inf, -np.inf] * 9)
    assert panels.limit_of(ratios) == limit
    assert panels.limit_of(np.array([0.1] * 99 + [-largest])) == 0.5  # one in a hundred may lie beyond
    heads = make_heads(PRESETS[:1], 10, 10).assign(log2_ratio=[0.1] * 99 + [9.0])
    figure = plots.perturbation_heads(heads, make_summary(heads))
    assert "Colours end at ±0.5 (1 head beyond)" in words(figure)
    bar = next(ax for ax in figure.axes if ax.get_label() == "<colorbar>")
    assert bar.get_ylabel() == "log2 ratio (−1 = halved)"


def test_nothing_known_has_the_smallest_limit():
    assert panels.limit_of(np.array([np.nan])) == 0.5


def test_every_figure_names_its_run(case):
    summary = case[3]
    for name, figure in case[4].items():
        text = words(figure)
        n = "1 document" if summary["n_docs"] == 1 else f"{summary['n_docs']} documents"
        for said in (summary["policy"], summary["against"], f"n = {n} of 738–783 tokens", "L1 norm", "first decoded"):
            assert said in text
        assert summary["model"] in text.replace(" ", "")
        assert ("20 % of the context's entries kept" in text) is (name != "budget_perturbation")
        assert ("95 % interval" in text) is (summary["n_docs"] > 1)


def test_the_papers_share_is_a_note_with_its_source_and_no_data():
    heads = make_heads()
    with_it, without = (
        plots.perturbation_heads(heads, make_summary(heads, **more)) for more in ({}, {"published": None})
    )
    assert "92 % (Big-8B): a paper, Fig. 4" in words(with_it) and "92 %" not in words(without)

    def data(figure):
        return [line.get_xydata().tolist() for ax in figure.axes for line in ax.lines]

    assert data(with_it) == data(without)


def test_policies_differ_in_shape_and_in_line():
    assert panels.BASE["marker"] != panels.OURS["marker"] and panels.BASE["linestyle"] != panels.OURS["linestyle"]
    assert len({look["marker"] for look in panels.VERDICTS.values()}) == 3


@pytest.mark.parametrize("name", ["two presets", "one document"])
def test_a_summary_read_back_from_its_file_draws_the_same(name):
    *tables, more = case_tables(name)
    summary = make_summary(tables[0], **more)
    kept, read = (plots.map_figures(*tables, each) for each in (summary, json.loads(records.to_json(summary))))
    assert [pixels(figure) for figure in kept.values()] == [pixels(figure) for figure in read.values()]


def pixels(figure):
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
