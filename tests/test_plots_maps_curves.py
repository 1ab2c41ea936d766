"""Figures of layers and of cache sizes: what is drawn is what the table says."""

import math

import numpy as np
import pytest
from map_tables import (
    CACHES,
    NAMES,
    PRESETS,
    drawn_bars,
    grid_axes,
    lines,
    make_budgets,
    make_case,
    make_heads,
    make_layers,
    make_summary,
    presets_of,
    words,
)

from kvprobe import plots
from kvprobe.plots import perturbations as panels


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return make_case(request.param)


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
