"""The figures of a perturbation map say what the tables say; values are read back from the axes."""

import io
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from test_plots_niah import drawn_texts

from kvprobe import plots, records
from kvprobe.plots import perturbations as panels

PRESETS = ("paper", "released")
CACHES = (0.025, 0.05, 0.1, 0.2, 0.4)


def make_heads(presets=PRESETS, layers=30, heads=9, docs=22, scale=0.4, shift=0.1, seed=0):
    """Rows in no order: L, its log ratio, its p."""
    rng, n = np.random.default_rng(seed), layers * heads
    parts = []
    for preset in presets:
        base, ratio = rng.lognormal(0, 2, n), rng.normal(shift, scale, n)
        p_bh = rng.choice([0.001, 0.05, 0.0500001, 0.7], n)
        table = pd.DataFrame({"layer": np.repeat(np.arange(layers), heads), "head": np.tile(np.arange(heads), layers)})
        table = table.assign(L_base=base, L_ours=base * 2**ratio, log2_ratio=ratio, p_bh=p_bh)
        table = table.assign(difference=table["L_ours"] - base, p_attainable=0.5 ** (docs - 1), n_docs=docs)
        parts.append(table.assign(reduced=table["difference"] < 0, preset=preset).sample(frac=1, random_state=seed))
    return pd.concat(parts, ignore_index=True)


def make_layers(presets=PRESETS, layers=30, docs=22, seed=1):
    """Layers over four orders of magnitude, reductions on both sides of zero."""
    rng, parts = np.random.default_rng(seed), []
    for preset in presets:
        base = np.geomspace(0.1, 1000, layers) * rng.lognormal(0, 0.3, layers)
        reduction = base * rng.normal(0, 0.1, layers)
        half = base * 0.05 if docs > 1 else np.full(layers, np.nan)
        table = pd.DataFrame({"layer": np.arange(layers), "base": base, "ours": base - reduction})
        table = table.assign(reduction=reduction, ci_low=reduction - half, ci_high=reduction + 1.5 * half, n_docs=docs)
        parts.append(table.assign(preset=preset).iloc[::-1])
    return pd.concat(parts, ignore_index=True)


def make_budgets(presets=PRESETS, caches=CACHES, docs=22, seed=2):
    table = make_layers(presets, len(caches), docs, seed).rename(columns={"layer": "cache"})
    table["cache"] = [caches[place] for place in table["cache"]]
    share = np.random.default_rng(seed).uniform(0.1, 0.9, len(table))
    half = 0.04 if docs > 1 else np.nan
    return table.assign(heads_reduced=share, heads_low=share - half, heads_high=share + 2 * half)


def make_summary(heads, **more):
    """What ``kvprobe map`` would have printed."""
    docs, presets = int(heads["n_docs"].max()), {}
    for preset, frame in heads.groupby("preset", sort=False):
        share = float((frame["difference"] < 0).mean())
        ends = (max(share - 0.04, 0), min(share + 0.06, 1)) if docs > 1 else (math.nan, math.nan)
        found = {"share": share, "ci_low": ends[0], "ci_high": ends[1], "method": "hull", "n_heads": len(frame)}
        presets[preset] = {"heads_reduced": found | {"n_docs": docs}}
    about = {
        "model": "tiny/model",
        "policy": "snapkv",
        "against": "snapkv+two_stage",
        "presets": presets,
        "n_docs": docs,
        "docs": "shipped essays",
        "tokens": {"min": 738, "max": 783},
        "truncated": 0,
        "probe": "first_decoded",
        "cache": 0.2,
        "caches_left_out": [],
        "measure": "attn_out",
        "norm": 1,
        "published": {"source": "a paper, Fig. 4", "share": {"Big-8B": 0.92}},
    }
    return about | more


def case_tables(name):
    heads, layers, budgets = make_heads(), make_layers(), make_budgets()
    if name == "one preset":
        return make_heads(PRESETS[:1]), make_layers(PRESETS[:1]), make_budgets(PRESETS[:1]), {}
    if name == "one layer":
        return make_heads(layers=1), make_layers(layers=1), make_budgets(caches=(0.2,)), {}
    if name == "one of each":
        one = ("as given",)
        return make_heads(one, 1, 1), make_layers(one, 1), make_budgets(one, (0.025,)), {}
    if name == "large":
        tenths = tuple(np.arange(1, 11) / 10)
        return make_heads(layers=100, heads=128), make_layers(layers=100), make_budgets(caches=tenths), {}
    if name == "one document":
        return make_heads(docs=1), make_layers(docs=1), make_budgets(docs=1), {}
    if name in ("all reduced", "none reduced"):
        sign = -1 if name == "all reduced" else 1
        heads = heads.assign(log2_ratio=sign * heads["log2_ratio"].abs(), difference=sign * heads["difference"].abs())
        return heads.assign(reduced=sign < 0), layers, budgets, {}
    if name == "equal":
        zero = {"reduction": 0.0, "ci_low": 0.0, "ci_high": 0.0}
        heads = heads.assign(log2_ratio=0.0, difference=0.0, reduced=False, p_bh=1.0)
        return heads, layers.assign(ours=layers["base"], **zero), budgets.assign(ours=budgets["base"], **zero), {}
    if name == "nothing evicted":
        zero = {"base": 0.0, "ours": 0.0, "reduction": 0.0, "ci_low": 0.0, "ci_high": 0.0}
        heads = heads.assign(log2_ratio=np.nan, difference=0.0, reduced=False, p_bh=1.0)
        return heads, layers.assign(**zero), budgets.assign(**zero), {}
    if name == "undefined":
        heads.loc[heads["layer"] == 2, "log2_ratio"] = np.nan
        heads.loc[heads["layer"] == 3, "log2_ratio"] = np.inf
        layers.loc[layers["layer"] == 0, ["base", "ours"]] = 0.0
        budgets.loc[0, ["heads_low", "heads_high", "ci_low", "ci_high"]] = np.nan
        return heads, layers, budgets, {}
    long = {"model": "a/" + "very-long-name-" * 12, "against": "expected_attention+layer_global+two_stage"}
    if name == "two presets":
        return heads, layers, budgets, {}
    return heads, layers, budgets, long | {"policy": "expected_attention+layer_global", "caches_left_out": [0.025]}


NAMES = ("one preset", "one layer", "one of each", "large", "one document", "all reduced", "none reduced", "equal")
NAMES = ("two presets", *NAMES, "nothing evicted", "undefined", "long names")


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    heads, layers, budgets, more = case_tables(request.param)
    summary = make_summary(heads, **more)
    return heads, layers, budgets, summary, plots.map_figures(heads, layers, budgets, summary)


def grid_axes(figure, columns):
    """[rows, columns] of the panels; colour bars are left out."""
    axes = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    return np.array(axes, dtype=object).reshape(-1, columns)


def presets_of(table):
    return [(preset, table[table["preset"] == preset]) for preset in dict.fromkeys(table["preset"])]


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def drawn_bars(ax):
    """{x: (low, high)} of every bar."""
    parts = [part for each in ax.collections if isinstance(each, LineCollection) for part in each.get_segments()]
    return {round(part[0][0], 9): (part[0][1], part[1][1]) for part in parts if part[0][0] == part[1][0]}


def words(figure):
    return " ".join(" ".join(each.get_text() for each in figure.texts).replace("\N{NO-BREAK SPACE}", " ").split())


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


def test_layers_stand_where_the_table_says(case):
    layers, figure = case[1], case[4]["layer_perturbation"]
    frames = presets_of(layers)
    for (_, frame), (absolute, reduction, relative) in zip(frames, grid_axes(figure, len(frames)).T, strict=True):
        frame, drawn = frame.sort_values("layer"), lines(absolute)
        assert absolute.get_yscale() == ("log" if (frame[["base", "ours"]] > 0).any(axis=None) else "linear")
        for column, name in (("base", case[3]["policy"]), ("ours", case[3]["against"])):
            values = [value if value > 0 else np.nan for value in frame[column]]
            np.testing.assert_array_equal(drawn[name].get_ydata(), values)
            assert drawn[name].get_xdata().tolist() == frame["layer"].tolist()
        check_reductions(reduction, frame["layer"].tolist(), frame, [1.0] * len(frame))
        check_reductions(relative, frame["layer"].tolist(), frame, percent_of_base(frame))


def percent_of_base(frame):
    return [100 / base if base > 0 else math.nan for base in frame["base"]]


def check_reductions(ax, places, frame, scale):
    """Every row's point in the class of its interval, and its bar; a line at zero."""
    points = {x: (name, y) for name in panels.VERDICTS for x, y in zip(*lines(ax)[name].get_data(), strict=True)}
    bars, seen = drawn_bars(ax), 0
    assert any((np.asarray(line.get_ydata()) == 0).all() and line.get_linestyle() == "-" for line in ax.lines)
    for x, row, factor in zip(places, frame.itertuples(), scale, strict=True):
        name, y = points[x]
        assert name == ("falls" if row.ci_low > 0 else "rises" if row.ci_high < 0 else "open")
        assert y == pytest.approx(row.reduction * factor, nan_ok=True)
        if math.isfinite(row.ci_low * factor):
            seen += 1
            assert bars[round(x, 9)] == pytest.approx((row.ci_low * factor, row.ci_high * factor))
    assert len(bars) == seen and len(points) == len(frame)


def test_layers_are_counted_by_their_intervals(case):
    layers, figure = case[1], case[4]["layer_perturbation"]
    frames = presets_of(layers)
    for (_, frame), ax in zip(frames, grid_axes(figure, len(frames))[0], strict=True):
        lower, higher = (frame["ci_low"] > 0).sum(), (frame["ci_high"] < 0).sum()
        counts = f"{lower} lower, {higher} higher (95 %)"
        bare = f"lower in {(frame['reduction'] > 0).sum()} of {len(frame)} layer"
        assert (counts if frame["ci_low"].notna().any() else bare) in ax.get_title("left")


def test_the_legend_says_what_hollow_points_are():
    def said(missing):
        layers = make_layers(PRESETS[:1], 4).assign(reduction=1.0, ci_low=-1.0, ci_high=3.0)
        layers.loc[layers.index[:missing], ["ci_low", "ci_high"]] = np.nan
        figure = plots.perturbation_layers(layers, make_summary(make_heads(PRESETS[:1])))
        return [text.get_text() for text in figure.legends[0].texts][2:]

    assert said(0) == ["interval holds 0"]
    assert said(1) == ["interval holds 0, or none"]
    assert said(4) == ["no interval"]


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(
    ("measure", "said"),
    [
        ("attn_out", "attention output, all layers evicting"),
        ("hidden", "hidden state after the layer, all layers evicting"),
        ("local", "attention output, this layer alone evicting"),
    ],
)
def test_layers_say_what_the_perturbation_is_of(measure, said, norm):
    summary = make_summary(make_heads(), measure=measure, norm=norm)
    figure = plots.perturbation_layers(make_layers(), summary)
    labels = [ax.get_ylabel() for ax in grid_axes(figure, 2)[:, 0]]
    assert labels == [f"perturbation (L{norm} norm, log)", f"base − ours (L{norm} norm)", "base − ours (% of base)"]
    assert said in words(figure)


def test_budgets_stand_where_the_table_says(case):
    budgets, summary, figure = case[2], case[3], case[4]["budget_perturbation"]
    for (_, frame), (mean, reduction, share) in zip(presets_of(budgets), grid_axes(figure, 3), strict=True):
        frame = frame.sort_values("cache")
        places = mean.get_xticks()
        for column, name in (("base", summary["policy"]), ("ours", summary["against"])):
            np.testing.assert_array_equal(lines(mean)[name].get_data(), [places, frame[column]])
        check_reductions(reduction, places, frame, percent_of_base(frame))
        np.testing.assert_array_equal(lines(share)["heads reduced"].get_data(), [places, 100 * frame["heads_reduced"]])
        assert any(list(line.get_ydata()) == [50, 50] for line in share.lines)
        known = frame["heads_low"].notna().to_numpy()
        wanted = {
            round(x, 9): (100 * row.heads_low, 100 * row.heads_high)
            for x, row, drawn in zip(places, frame.itertuples(), known, strict=True)
            if drawn
        }
        assert drawn_bars(share) == {x: pytest.approx(ends) for x, ends in wanted.items()}
        low, high = mean.get_ylim()
        assert low == 0 and high > max(frame["base"].max(), frame["ours"].max())


def test_sizes_are_labelled_and_to_scale_where_there_is_room():
    for caches, even in ((CACHES, False), ((0.2,), False), ((0.1, 0.11, 0.12, 0.9), True)):
        figure = plots.perturbation_budgets(make_budgets(caches=caches), make_summary(make_heads()))
        for ax in grid_axes(figure, 3)[-1]:
            ticks = ax.get_xticks()
            assert [float(label.get_text()) / 100 for label in ax.get_xticklabels()] == pytest.approx(caches)
            assert ticks == pytest.approx(np.arange(len(caches)) if even else np.log2(caches))
            assert ("not to scale" in ax.get_xlabel()) is even and ("log scale" in ax.get_xlabel()) is not even


def test_more_sizes_than_labels_fit_leave_labels_out():
    ax = plots.sheet().subplots()
    panels.cache_axis(ax, [place / 40 for place in range(1, 31)])
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert len(labels) == 30 and 5 < sum(map(bool, labels)) <= panels.LABELS


def test_sizes_left_out_are_named():
    summary = make_summary(make_heads(), caches_left_out=[0.025])
    assert "Left out: 2.5 %" in words(plots.perturbation_budgets(make_budgets(), summary))
    assert "Left out" not in words(plots.perturbation_budgets(make_budgets(), make_summary(make_heads())))


def test_sizes_that_the_window_fills_are_named():
    snapkv, plain = {"scorer": {"name": "snapkv", "window": 32}}, {"scorer": {"name": "knorm"}}
    about = {"compressed_tokens": {"min": 1440, "max": 1500}, "policies": [[plain, snapkv]]}
    text = words(plots.perturbation_budgets(make_budgets(), make_summary(make_heads(), **about)))
    assert "At 2.5 %, the window (32 entries, always kept) is half or more of the cache." in text
    about["compressed_tokens"]["min"] = 640
    text = words(plots.perturbation_budgets(make_budgets(), make_summary(make_heads(), **about)))
    assert "At 2.5 %, 5 %, 10 %, the window" in text
    about["policies"] = [[plain, plain]]
    assert "window" not in words(plots.perturbation_budgets(make_budgets(), make_summary(make_heads(), **about)))


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
