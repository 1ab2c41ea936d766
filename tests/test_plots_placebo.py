"""The figures of a placebo run say what the tables say; values are read back from the axes."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from map_tables import words
from matplotlib.colors import to_hex
from PIL import Image
from placebo_tables import KAPPAS, MATCHINGS, NAMES, VARIABLES, make_arms, make_balance, make_case, make_summary
from test_plots_niah import drawn_texts

from kvprobe import plots, records, stats
from kvprobe.errors import StatisticsError
from kvprobe.plots.doses import FULL
from kvprobe.plots.effects import ARMS


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return request.param, *make_case(request.param)


def marked(ax, label):
    """All points of lines of this label, as a set of rounded pairs."""
    lines = [line for line in ax.lines if line.get_label() == label]
    return {(round(float(x), 9), round(float(y), 9)) for line in lines for x, y in zip(*line.get_data(), strict=True)}


def heights(ax, label):
    return sorted(float(y) for line in ax.lines if line.get_label() == label for y in line.get_ydata())


def ticks(ax):
    return [label.get_text().splitlines() for label in ax.get_xticklabels()]


def test_no_text_over_text_or_beyond_the_edge(case, monkeypatch):
    for name, figure in case[3].items():
        texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
        out = [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())]
        assert texts and out == [], name
        boxes = [(text, box.padded(-1)) for text, box in texts]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == [], name


@pytest.mark.parametrize("name", ["usual", "some unmatched", "undefined"])
def test_files_are_no_wider_than_ten_inches(name, tmp_path):
    for file, figure in make_case(name)[2].items():
        with Image.open(records.write_figure(figure, tmp_path / f"{file}.png")) as image:
            width, height = image.size
        assert 9 * 150 < width <= 10 * 150 and height <= 10 * 150


def test_which_figures_a_run_has(case):
    absent = {"all no_overlap": {"love", "doses"}, "one item": {"love"}, "no doses": {"doses"}}
    expected = [name for name in ("love", "effects", "doses") if name not in absent.get(case[0], ())]
    assert list(case[3]) == expected
    for figure in case[3].values():
        assert "tiny/model · niah_multikey_1 · 1500 tokens · seed 7" in words(figure)


def test_without_effects_there_is_no_figure():
    arms = make_arms(2)
    assert plots.placebo_figures({"arms": arms.assign(delta_logprob=np.nan)}, make_summary()) == {}
    clean = {"arms": arms[arms["arm"].isin(["clean", "identity"])], "balance": make_balance()}
    assert list(plots.placebo_figures(clean, {})) == ["love"]


def test_a_love_plot_has_both_points_of_every_variable(case):
    _, tables, _, figures = case
    if "love" not in figures:
        assert not np.isfinite(tables["balance"][["smd_before", "smd_after"]].to_numpy(float)).any()
        return
    balance = tables["balance"]
    names = list(dict.fromkeys(balance["match_on"]))
    assert len(figures["love"].axes) == len(names)
    for ax, name in zip(figures["love"].axes, names, strict=True):
        rows = balance[balance["match_on"] == name].set_index("variable")
        labels = {label.get_text(): y for label, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)}
        assert list(labels.values()) == [6, 5, 4, 3, 2, 1, 0] and len(labels) == len(VARIABLES)
        for place, variable in zip(labels.values(), VARIABLES, strict=True):
            for label, column, shift in (("before", "smd_before", 0.15), ("after", "smd_after", -0.15)):
                value = rows.loc[variable, column]
                assert ((round(value, 9), place + shift) in marked(ax, label)) is bool(np.isfinite(value))
        low, high = ax.get_xlim()
        finite = rows[["smd_before", "smd_after"]].to_numpy(float)
        finite = finite[np.isfinite(finite)]
        assert low < min(finite.min(), -0.25) and max(finite.max(), 0.25) < high
        assert {line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1} >= {-0.25, 0.0, 0.25}


def test_love_marks_intervals_where_there_are_any():
    balance = make_balance(MATCHINGS[:1])
    balance.loc[balance["variable"] == "mass", "after_low"] = np.nan
    (ax,) = plots.love(balance).axes
    spans = {
        tuple(line.get_xdata()) for line in ax.lines if line.get_label().startswith("_") and line.get_ydata()[0] % 1
    }
    expected = {(row.before_low, row.before_high) for row in balance.itertuples()}
    expected |= {(row.after_low, row.after_high) for row in balance.itertuples() if row.variable != "mass"}
    assert spans == expected and len(spans) == 13


def test_love_sets_the_matched_variable_apart():
    balance = make_balance()
    for ax, name in zip(plots.love(balance).axes, MATCHINGS, strict=True):
        rows = balance[balance["match_on"] == name].set_index("variable")
        bold = [label.get_text() for label in ax.get_yticklabels() if label.get_fontweight() == "bold"]
        assert bold == [{"bound": "θ, bound", "perturbation": "L, perturbation"}[name]]
        assert [t.get_text() for t in ax.texts] == [f"max |ln ratio|\n{rows.loc[name, 'max_abs_ln_ratio']:.3g}"]
        assert ax.texts[0].xy[1] == {"bound": 6, "perturbation": 5}[name]
        assert "n = 12 items" in ax.get_title("left")
    both = balance.assign(n=[8 + place % 5 for place in range(len(balance))])
    assert "n = 8–12 items" in plots.love(both, "bound").axes[0].get_title("left")


def test_love_hollow_before_filled_after():
    (ax,) = plots.love(make_balance(), "bound").axes
    faces = {line.get_label(): to_hex(line.get_markerfacecolor()) for line in ax.lines if line.get_marker() == "o"}
    assert faces == {"before": "#ffffff", "after": "#d55e00"}


def test_love_shows_infinite_and_flagged_at_the_edge():
    balance = make_balance(MATCHINGS[:1])
    balance.loc[balance["variable"] == "length", ["smd_before", "smd_after", "flagged"]] = [-math.inf, 0.0, True]
    figure = plots.love(balance)
    (ax,) = figure.axes
    (mark,) = [line for line in ax.lines if line.get_label() == "before, infinite"]
    assert mark.get_marker() == "<" and mark.get_xdata()[0] == ax.get_xlim()[0] and mark.get_ydata()[0] == 1.15
    assert "length (tokens)†" in [label.get_text() for label in ax.get_yticklabels()] and "†: no spread" in words(
        figure
    )
    assert "†" not in words(plots.love(make_balance()))


def test_love_scale_is_plain_where_all_is_near():
    near = make_balance(MATCHINGS[:1])
    columns = ["smd_before", "before_low", "before_high"]
    assert plots.love(near).axes[0].get_xscale() == "symlog"
    assert plots.love(near.assign(**{name: near[name] / 10 for name in columns})).axes[0].get_xscale() == "linear"


def test_love_keeps_other_variables_and_leaves_out_undefined_ones():
    balance = make_balance(MATCHINGS[:1])
    extra = balance[balance["variable"] == "mass"].assign(variable="contiguity")
    undefined = balance[balance["variable"] == "mass"].assign(variable="nothing", smd_before=np.nan, smd_after=np.nan)
    (ax,) = plots.love(pd.concat([extra, undefined, balance])).axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(names) == 8 and names[-1] == "contiguity" and names[0] == "θ, bound"


def test_love_refuses_what_is_not_there():
    with pytest.raises(StatisticsError, match=r"match_on='mass': no such rows of balance; it has \['bound', 'pert"):
        plots.love(make_balance(), "mass")
    with pytest.raises(StatisticsError, match="it has none"):
        plots.love(make_balance()[:0])


def drawn_arms(tables, name, measure="delta_logprob"):
    arms = tables["arms"]
    rows = arms[arms["match_on"].isin(["", name]) & arms["arm"].isin(list(ARMS))]
    return rows[np.isfinite(rows[measure])]


def matchings(tables):
    found = set(tables["arms"].loc[tables["arms"]["arm"] == "placebo", "match_on"])
    return [name for name in MATCHINGS if name in found] or ["perturbation"]


def test_every_arm_is_a_point_at_its_place(case):
    _, tables, _, figures = case
    names = matchings(tables)
    assert len(figures["effects"].axes) == len(names)
    for ax, name in zip(figures["effects"].axes, names, strict=True):
        rows = drawn_arms(tables, name)
        present = [arm for arm in ARMS if (drawn_arms(tables, name)["arm"] == arm).any()]
        assert [lines[0] for lines in ticks(ax)] == [ARMS[arm].name for arm in present]
        for x, arm in enumerate(present):
            of_arm, some = rows[rows["arm"] == arm], rows["answered"].any()
            for label, kind in (("counted", True), ("not answered", False)):
                values = of_arm.loc[(of_arm["answered"] | (not some)) == kind, "delta_logprob"]
                assert heights(ax, f"{ARMS[arm].name}, {label}") == sorted(values)
                points = marked(ax, f"{ARMS[arm].name}, {label}")
                assert all(abs(at - x) < 0.17 for at, _ in points)


def test_lines_join_the_means_of_an_item(case):
    _, tables, _, figures = case
    for ax, name in zip(figures["effects"].axes, matchings(tables), strict=True):
        rows = drawn_arms(tables, name)
        for item, of_item in rows.groupby("item"):
            means = [of_item.loc[of_item["arm"] == arm, "delta_logprob"].mean() for arm in ARMS]
            (line,) = [line for line in ax.lines if line.get_label() == f"item {item}"]
            assert line.get_ydata() == pytest.approx([value for value in means if not math.isnan(value)])
        shades = {answered: set() for answered in (True, False)}
        for item, answered in rows.groupby("item")["answered"].all().items():
            shades[answered] |= {line.get_alpha() for line in ax.lines if line.get_label() == f"item {item}"}
        if all(shades.values()):
            assert max(shades[False]) < 0.5 * min(shades[True])


def test_means_are_of_answered_items_with_their_interval(case):
    _, tables, _, figures = case
    for ax, name in zip(figures["effects"].axes, matchings(tables), strict=True):
        rows = drawn_arms(tables, name)
        rows = rows[rows["answered"]] if rows["answered"].any() else rows
        items = rows.groupby(["arm", "item"])["delta_logprob"].mean()
        found = [stats.mean_interval(items[arm].to_numpy()) for arm in ARMS if arm in items]
        assert sorted(heights(ax, "mean")) == pytest.approx(sorted(each.mean for each in found))
        bars = [line.get_ydata() for line in ax.lines if line.get_linewidth() == 1.4 and len(line.get_ydata()) == 2]
        spread = [each for each in found if not each.degenerate]
        assert np.sort(bars, axis=0).ravel() == pytest.approx(
            np.sort([(each.low, each.high) for each in spread], axis=0).ravel()
        )
        assert len(ax.texts) == len(found)


def test_ticks_count_items_sets_and_remedies():
    figure = plots.effects(make_arms(12, 4))
    target, placebo, length_only, gate = ticks(figure.axes[0])
    assert target == ["target", "n = 8 items", "(+ 4 not answered)"] and gate[1:] == target[1:]
    assert placebo[1:] == ["n = 8 items, 32 sets", "(+ 4 not answered)", "hard_set: 9 items", "contiguous: 3 items"]
    assert length_only[1:] == ["n = 8 items, 32 sets", "(+ 4 not answered)"]
    alone = plots.effects(make_arms(1, 1))
    assert [lines[1] for lines in ticks(alone.axes[0])] == ["n = 1 item"] * 4
    assert "no interval, of one item" in words(alone) and "95 %" not in words(alone)


def test_titles_count_targets_without_a_placebo():
    unmatched = plots.effects(make_arms(unmatched=(1, 5, 6))).axes[0].get_title("left")
    assert unmatched == "placebos matched on L, perturbation; 3 of 12 targets without a matched placebo"
    assert plots.effects(make_arms()).axes[0].get_title("left") == "placebos matched on L, perturbation"


def test_contrasts_stand_above_their_panel():
    contrast = {"estimand": "content at equal blow", "mean": -16.5, "ci_low": -17.4, "ci_high": -15.6, "n": 8}
    contrast |= {"p_permutation": 0.00021, "match_on": "perturbation"}
    total = {"estimand": "total", "mean": -16.0, "ci_low": None, "ci_high": None, "p_permutation": None}
    first, second = plots.effects(make_arms(), MATCHINGS, contrast=[contrast, total]).axes
    said = "content at equal blow: −16.50 [−17.40, −15.60], permutation p = 0.00021, n = 8 items"
    assert second.get_title("left").splitlines()[1:] == [said, "total: −16.00"]
    assert first.get_title("left").splitlines()[1:] == ["total: −16.00"]
    alone = plots.effects(make_arms(), contrast=contrast).axes[0].get_title("left")
    assert alone.splitlines()[1] == said
    undefined = plots.effects(make_arms(), contrast={"mean": math.nan}).axes[0].get_title("left")
    assert undefined.splitlines()[1] == "contrast: undefined"


def test_long_contrasts_are_wrapped(monkeypatch):
    estimand = "content at equal L: the target's own Δo against other directions of its norm, both injected by us"
    row = {"estimand": estimand, "mean": -1.0, "ci_low": -2.0, "ci_high": 0.0, "p_permutation": 0.04, "n": 12}
    figure = plots.effects(make_arms(), contrast=[row])
    title = figure.axes[0].get_title("left")
    assert " ".join(title.split()).endswith(f"{estimand}: −1.00 [−2.00, +0.00], permutation p = 0.04, n = 12 items")
    page = figure.bbox.padded(1)
    assert all(page.contains(*corner) for _, box in drawn_texts(figure, monkeypatch) for corner in box.corners())


def test_figures_show_the_confirmatory_outcome():
    tables, summary, figures = make_case("usual")
    other = plots.placebo_figures(tables, summary | {"outcome": "kl"})
    for name, of_kl in ((name, kl) for name in ("effects", "doses") for kl in (False, True)):
        ax = (other if of_kl else figures)[name].axes[0]
        assert ax.get_ylabel().startswith("KL" if of_kl else "change of the gold")
    above = [each["effects"].axes[0].get_title("left").splitlines()[1:] for each in (figures, other)]
    assert (
        above[0][0].startswith("content at equal blow: −15.70")
        and above[0][1].startswith("total")
        and len(above[0]) == 2
    )
    assert [line[:28] for line in above[1]] == ["content at equal blow: +7.70"]


def test_other_measures_and_missing_columns():
    arms = make_arms().assign(score=1.0)
    ax = plots.effects(arms, measure="kl").axes[0]
    assert ax.get_ylabel() == "KL(clean ‖ arm)\nat the answer (nats)" and ax.get_yscale() == "symlog"
    assert heights(ax, "target, counted") == sorted(arms[(arms["arm"] == "target") & arms["answered"]]["kl"])
    assert plots.effects(arms, measure="score").axes[0].get_yscale() == "linear"
    bare = plots.effects(arms.drop(columns=["answered", "match_on", "remedy"]))
    assert len(heights(bare.axes[0], "placebo, counted")) == 96  # of both matchings: nothing tells them apart
    with pytest.raises(StatisticsError, match="column 'speed': the table of arms has"):
        plots.effects(arms, measure="speed")
    with pytest.raises(StatisticsError, match="no arm with a delta_logprob to draw"):
        plots.effects(arms[arms["arm"] == "clean"])
    with pytest.raises(StatisticsError, match="column 'kappa'"):
        plots.dose_response(arms.drop(columns="kappa"))
    with pytest.raises(StatisticsError, match="perturbation > 0"):
        plots.dose_response(arms.assign(perturbation=0.0))


def test_what_has_no_number_is_counted():
    arms = make_arms(doses=False).reset_index(drop=True)
    assert "Not drawn" not in words(plots.effects(arms))
    arms.loc[arms["arm"] == "gate", "delta_logprob"] = np.nan
    figure = plots.effects(arms)
    assert "Not drawn: 12 arms without a value" in words(figure)
    assert [lines[0] for lines in ticks(figure.axes[0])] == ["target", "placebo", "length only"]
    doses = make_arms()
    assert "Not drawn" not in words(plots.dose_response(doses))
    doses.loc[doses["kappa"] == 0.25, "perturbation"] = 0.0
    assert "Not drawn: 24 arms without strength" in words(plots.dose_response(doses))


def dosed(tables, name):
    arms = tables["arms"]
    rows = arms[arms["match_on"].isin(["", name]) & arms["arm"].isin([*FULL, *FULL.values()])]
    return rows[np.isfinite(rows["delta_logprob"]) & (rows["perturbation"] > 0)]


def test_full_masks_stand_at_their_strength(case):
    _, tables, _, figures = case
    if "doses" not in figures:
        assert not tables["arms"]["kappa"].notna().any()
        return
    for ax, name in zip(figures["doses"].axes, matchings(tables), strict=True):
        rows = dosed(tables, name)
        for side in FULL:
            of_side = rows[rows["arm"] == side]
            points = marked(ax, f"{side}, full mask") | marked(ax, f"{side}, full mask, not answered")
            pairs = zip(of_side["perturbation"], of_side["delta_logprob"], strict=True)
            assert points == {(round(x, 9), round(y, 9)) for x, y in pairs}
        assert ax.get_xscale() == "log"
        low, high = ax.get_xlim()
        assert low < rows["perturbation"].min() and rows["perturbation"].max() < high


def test_a_curve_is_one_set_from_its_weakest_dose_to_the_full_mask():
    arms = make_arms(4, 3)
    (ax,) = plots.dose_response(arms).axes
    for item in range(4):
        of_item = arms[(arms["item"] == item) & arms["match_on"].isin(["", "perturbation"])]
        for side, dose in FULL.items():
            (line,) = [line for line in ax.lines if line.get_label() == f"{side}, item {item}"]
            rows = of_item[of_item["arm"] == dose].sort_values("kappa")
            full = of_item[(of_item["arm"] == side) & (of_item["number"] == 0)]
            assert line.get_xdata() == pytest.approx([*rows["perturbation"], *full["perturbation"]])
            assert line.get_ydata() == pytest.approx([*rows["delta_logprob"], *full["delta_logprob"]])


def test_mean_curves_average_answered_items_at_each_dose():
    arms = make_arms(7, 3)
    (ax,) = plots.dose_response(arms, "bound").axes
    for side, dose in FULL.items():
        (line,) = [line for line in ax.lines if line.get_label() == f"{side}, mean"]
        mine = arms[arms["answered"] & arms["match_on"].isin(["", "perturbation"]) & (arms["number"] == 0)]
        grid = [mine[(mine["arm"] == dose) & (mine["kappa"] == kappa)] for kappa in KAPPAS] + [
            mine[mine["arm"] == side]
        ]
        assert [len(rows) for rows in grid] == [5] * 4  # items 2 and 5 are not answered
        assert line.get_xdata() == pytest.approx([math.exp(np.log(rows["bound"]).mean()) for rows in grid])
        assert line.get_ydata() == pytest.approx([rows["delta_logprob"].mean() for rows in grid])
        bars = {tuple(bar.get_ydata()) for bar in ax.lines if bar.get_linewidth() == 1.4}
        found = stats.mean_interval(grid[0]["delta_logprob"].to_numpy())
        assert any(bar == pytest.approx((found.low, found.high)) for bar in bars) and len(bars) == 8
    assert ax.get_xlabel().startswith("strength θ")


def test_an_items_sets_are_averaged_before_items_are():
    arms = make_arms(3, 1).assign(answered=True)
    more = [arms[(arms["item"] == 0) & arms["arm"].isin(["placebo", "dose_placebo"])]] * 5
    copies = [rows.assign(spans=f"{place}:9", delta_logprob=-9.0) for place, rows in enumerate(more)]
    (ax,) = plots.dose_response(pd.concat([arms, *copies])).axes
    (line,) = [line for line in ax.lines if line.get_label() == "placebo, mean"]
    full = arms[(arms["arm"] == "placebo") & (arms["match_on"] == "perturbation")].set_index("item")["delta_logprob"]
    assert line.get_ydata()[-1] == pytest.approx(((5 * -9.0 + full[0]) / 6 + full[1] + full[2]) / 3)


def test_the_panels_of_a_figure_share_their_scales():
    tables, _, figures = make_case("usual")
    for name in ("effects", "doses"):
        first, second = figures[name].axes
        assert first.get_ylim() == second.get_ylim()
        lows, highs = zip(*(ax.dataLim.intervaly for ax in (first, second)), strict=True)
        assert first.get_ylim()[0] < min(lows) and first.get_ylim()[1] > max(highs)
    assert figures["doses"].axes[0].get_xlim() == figures["doses"].axes[1].get_xlim()
    assert "κ (share of the full mask's L): 0.25, 0.5, 0.75, 1." in words(figures["doses"])
    legend = [text.get_text() for text in figures["doses"].legends[0].texts]
    assert legend[0] == "target, κ = 1 (12 items, 12 sets)" and "placebo, κ = 1 (12 items, 48 sets)" in legend
    assert "not answered: in no mean" in legend and len(tables["arms"]) > 0


def test_legends_explain_what_occurs_and_no_more():
    def said(figure):
        return " ".join(text.get_text() for text in figure.legends[0].texts)

    everyone, some = make_arms().assign(answered=True), make_arms()
    for draw in (plots.effects, plots.dose_response):
        assert "not answered" in said(draw(some)) and "not answered" not in said(draw(everyone))
    only_target = some[some["arm"].isin(["target", "dose_target"])]
    assert "placebo" not in said(plots.dose_response(only_target))
    before = said(plots.love(make_balance().assign(smd_after=np.nan)))
    assert "before" in before and "after" not in before


def test_drawing_leaves_the_tables_as_they_were():
    tables, summary, _ = make_case("undefined")
    kept = {name: table.copy() for name, table in tables.items()}
    plots.placebo_figures(tables, summary)
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, kept[name])
