"""The figures of an audit say what its tables say: values are read back from the artists."""

import itertools

import numpy as np
import pandas as pd
import pytest
from audit_tables import audit
from matplotlib.collections import LineCollection, PolyCollection
from test_plots_niah import drawn_texts

from kvprobe import plots
from kvprobe.plots import audits, sweeps

ONE = {"presets": ("released",), "bases": ("snapkv",), "caches": (0.2,)}
CASES = {
    "usual": {},
    "no head is valid": {"valid": False},
    "one document": {"docs": 1},
    "one of each": ONE | {"levels": ("head",), "kinds": ("alpha",), "scored": False},
    "no sweeps": {"kinds": ()},
    "large": ONE | {"layers": 100, "heads": 128, "docs": 2},
    "all hold": {"low": 0.51},
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    result, summary = audit(**CASES[request.param])
    return request.param, result, summary, plots.audit_figures(result, summary)


def said(figure):
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def panels(figure):
    return [ax for ax in figure.axes if ax.get_title(loc="left")]


def overlaps(figure, monkeypatch):
    """Texts beyond the edge, and pairs of texts that overlap."""
    texts, page = drawn_texts(figure, monkeypatch), figure.bbox.padded(1)
    beyond = [text for text, box in texts if not all(page.contains(*corner) for corner in box.corners())]
    boxes = [(text, box.padded(-1)) for text, box in texts]
    return beyond, [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)]


def segments(ax):
    found = [part for each in ax.collections if isinstance(each, LineCollection) for part in each.get_segments()]
    return [part for part in found if len(part) == 2 and np.isfinite(part).all()]


def vertical(ax):
    """(low, high) of every vertical bar."""
    return sorted((round(a[1], 9), round(b[1], 9)) for a, b in segments(ax) if abs(a[0] - b[0]) < 1e-12)


def test_there_is_a_figure_a_question(case):
    _, result, _, figures = case
    swept = [] if result.sweeps is None else [f"sweep_{kind}" for kind in dict.fromkeys(result.sweeps["sweep"])]
    assert list(figures) == ["bounds", "tightness_by_layer", "assumption", *swept]
    assert all(isinstance(figure, plots.Sheet) for figure in figures.values())


def test_every_figure_names_its_run(case):
    _, _, summary, figures = case
    for figure in figures.values():
        docs = "1 document" if summary["n_docs"] == 1 else f"{summary['n_docs']} documents"
        about = f"tiny/model, {docs} (given texts) of 90–120 tokens, 2 cut, probe first_decoded, L1 norm"
        assert about in said(figure)
        assert ("none, of one document" if summary["n_docs"] == 1 else f"95 % over {docs}") in said(figure)


def test_no_text_over_text_or_beyond_the_edge(case, monkeypatch):
    for name, figure in case[3].items():
        assert (name, *overlaps(figure, monkeypatch)) == (name, [], [])


def test_bounds_stand_where_the_table_says_and_each_kind_in_its_own_panel(case):
    name, result, summary, figures = case
    rows, axes = result.rows(), panels(figures["bounds"])
    levels = list(dict.fromkeys(rows["level"]))
    assert len(axes) == 2 * len(levels)
    assert all(
        left.get_position().x1 < right.get_position().x0 for left, right in zip(axes[::2], axes[1::2], strict=True)
    )
    for ax, (level, series) in zip(axes, itertools.product(levels, (audits.ALL, audits.VALID)), strict=True):
        mine = rows[rows["level"] == level].reset_index(drop=True)
        assert ax.get_yscale() == "log" and f"by {level}" in ax.get_title(loc="left")
        assert ("only heads with σ > ½" in ax.get_title(loc="left")) is (series is audits.VALID)
        drawn = {line.get_label(): line for line in ax.lines}
        assert set(drawn) == {f"{c} {b} {p}" for c in series for b, p in zip(mine["base"], mine["preset"], strict=True)}
        for (base, preset), part in mine.groupby(["base", "preset"]):
            for column in series:
                x, y = drawn[f"{column} {base} {preset}"].get_data()
                np.testing.assert_allclose(y, part[column])
                assert [ax.get_xticklabels()[int(at)].get_text() for at in x] == [
                    f"{100 * c:g} %" for c in part["cache"]
                ]
        texts = {text.get_text() for text in ax.texts}
        if series is audits.ALL:
            assert texts == {f"{value:.1f}×" for value in mine["bound_over_actual"]}
            ends = [
                (mine["actual"] * mine[f"{s}_over_actual_{e}"]).tolist()
                for e in ("low", "high")
                for s in ("bound", "centred")
            ]
            wanted = (
                []
                if summary["n_docs"] == 1
                else sorted(zip(np.round(ends[0] + ends[1], 9), np.round(ends[2] + ends[3], 9), strict=True))
            )
            assert vertical(ax) == wanted
        elif name == "no head is valid":
            assert texts == {"no head has σ > ½: nothing to average"}
        else:
            assert texts == {f"{100 * value:.0f} %" for value in mine["ratio"]}


@pytest.mark.parametrize(
    ("bases", "rotated"), [(("snapkv", "tova"), False), (("snapkv", "adakv", "h2o", "tova"), True)]
)
def test_many_policies_and_sizes_do_not_overlap(bases, rotated, monkeypatch):
    result, summary = audit(bases=bases, caches=(0.05, 0.1, 0.2, 0.3, 0.4), levels=("head",), kinds=(), layers=1)
    figure = plots.bounds_and_actual(result.rows(), summary)
    over = overlaps(figure, monkeypatch)
    assert over == ([], [])
    all_heads, valid = panels(figure)
    assert all_heads.get_position().y0 > valid.get_position().y1  # below each other, at full width
    assert (not all_heads.texts) is rotated


def test_bounds_have_units_and_say_whose_averages_they_are(case):
    figure, rows = case[3]["bounds"], case[1].rows()
    labels = [ax.get_ylabel() for ax in panels(figure) if ax.get_ylabel()]
    assert labels and all("L1 norm" in label and "output" in label for label in labels)
    assert "average different heads" in said(figure) and "previous: under the base itself" in said(figure)
    shares = {f"{100 * share:.3g} %" for share in (rows["share_selected"].min(), rows["share_selected"].max())}
    titles = [ax.get_title(loc="left") for ax in panels(figure) if "σ > ½" in ax.get_title(loc="left")]
    assert all(share in title for share in shares for title in titles)


def test_bounds_read_without_colour():
    looks = [(marker, filled) for _, _, marker, filled in (audits.ALL | audits.VALID).values()]
    assert len(set(looks)) == 6
    names = [name for name, *_ in (audits.ALL | audits.VALID).values()]
    result, summary = audit()
    legend = plots.bounds_and_actual(result.rows(), summary).legends[0]
    assert [text.get_text() for text in legend.texts] == names


def test_tightness_is_that_of_the_table_with_its_band(case):
    _, result, summary, figures = case
    rows, axes = result.layer_rows(), panels(figures["tightness_by_layer"])
    bases, caches, presets = (list(dict.fromkeys(rows[name])) for name in ("base", "cache", "preset"))
    assert len(axes) == len(bases) * len(caches)
    for ax, (base, cache) in zip(axes, itertools.product(bases, caches), strict=True):
        assert ax.get_title(loc="left") == f"{base}+two_stage · cache {100 * cache:g} %"
        mine = rows[(rows["base"] == base) & (rows["cache"] == cache)]
        wanted = [
            (part["layer"].tolist(), part[f"{short}_over_actual"].tolist())
            for _, part in mine.groupby("preset", sort=False)
            for short in ("bound", "centred")
        ]
        *drawn, one = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
        assert drawn == wanted and one[1] == [1, 1]
        bands = [each for each in ax.collections if isinstance(each, PolyCollection)]
        assert len(bands) == (0 if summary["n_docs"] == 1 else 2 * len(presets))
        ends = mine[[f"{s}_over_actual_{e}" for s in ("bound", "centred") for e in ("low", "high")]].to_numpy()
        if bands:
            corners = np.concatenate([band.get_paths()[0].vertices[:, 1] for band in bands])
            assert (corners.min(), corners.max()) == pytest.approx((ends.min(), ends.max()))
    looks = {(line.get_linestyle(), line.get_marker(), line.get_markerfacecolor()) for line in axes[0].lines[:-1]}
    assert len(looks) == 2 * len(presets)


def test_bands_below_the_axis_are_explained_and_no_others():
    result, summary = audit(docs=3)
    rows = result.layer_rows()
    assert "no ratio is below 1" not in said(plots.tightness_by_layer(rows, summary))
    rows.loc[3, "centred_over_actual_low"] = -2.0
    figure = plots.tightness_by_layer(rows, summary)
    assert "no ratio is below 1" in said(figure)
    assert figure.axes[0].get_ylim()[0] == audits.LOWEST


def test_maps_hold_the_mean_sigma_of_every_head_and_cross_those_that_fail(case):
    _, result, _, figures = case
    rows, cells = result.rows(), result.sigmas()
    drawn, failing = {}, 0
    for ax in panels(figures["assumption"]):
        title = ax.get_title(loc="left").replace("\n", " ")
        head, rest = title.split(": ", 1)
        base, presets = head.split(", ")
        column, reading = ("sigma_oracle", "oracle") if "best set" in rest else ("sigma", "selected")
        cache = float(rest.split(", ")[1].split(" %")[0]) / 100
        for preset in presets.split(" + "):
            mine = cells[(cells["base"] == base) & (cells["preset"] == preset) & (cells["cache"] == cache)]
            means = mine.groupby(["head", "layer"])[column].mean().unstack("layer").to_numpy()
            np.testing.assert_allclose(ax.images[0].get_array(), means)
            drawn[base, preset, cache, reading] = True
        row = rows[(rows["base"] == base) & (rows["preset"] == preset) & (rows["cache"] == cache)].iloc[0]
        low, high = row[f"share_{reading}_low"], row[f"share_{reading}_high"]
        ends = "" if low != low else f" [{100 * low:.1f}, {100 * high:.1f}]"
        fails = {(int(layer), int(head)) for head, layer in np.argwhere(means <= 0.5)}
        assert f"σ > ½: {100 * row[f'share_{reading}']:.1f} %{ends}; {len(fails)} head" in title
        assert {tuple(np.round(part.mean(0)).astype(int)) for part in segments(ax)} == fails
        failing += len(fails)
    assert len(drawn) == 2 * len(rows.drop_duplicates(["base", "preset", "cache"]))
    assert bool(figures["assumption"].legends) is (failing > 0)
    assert ("No head's mean σ is ½ or less" in said(figures["assumption"])) is (failing == 0)


def test_a_head_at_one_half_fails_and_maps_that_agree_are_drawn_once():
    result, summary = audit(**ONE | {"docs": 2, "presets": ("paper", "released")})
    rows, cells = result.rows(), result.sigmas().assign(sigma_oracle=0.6)
    first = (cells["layer"] == 1) & (cells["head"] == 2)
    cells.loc[:, "sigma"] = np.where(first, 0.5, 0.9)
    figure = plots.assumption_map(cells, rows, summary)
    titles = [ax.get_title(loc="left") for ax in panels(figure)]
    assert [title.split(":")[0] for title in titles] == ["snapkv, paper + released"] * 2
    assert "1 head fails" in titles[0] and "0 heads fail" in titles[1]
    assert {tuple(part.mean(0)) for part in segments(panels(figure)[0])} == {(1.0, 2.0)}
    assert "mean σ of the head is ½ or less" in figure.legends[0].texts[0].get_text()
    cells.loc[first & (cells["preset"] == "paper"), "sigma"] = 0.4
    assert len(panels(plots.assumption_map(cells, rows, summary))) == 3


def curves(ax):
    """Label → (x, y), and the hollow marks."""
    lines = [line for line in ax.lines if len(line.get_xdata()) and line.get_label().startswith("cache")]
    hollow = [
        line.get_ydata()[0] for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_ydata())
    ]
    return {line.get_label(): line.get_data() for line in lines}, hollow


def test_sweeps_stand_where_the_tables_say(case):
    _, result, _, figures = case
    for name in (name for name in figures if name.startswith("sweep")):
        kind = name.removeprefix("sweep_")
        swept = result.sweeps[result.sweeps["sweep"] == kind]
        scores = None if result.scores is None else result.scores[result.scores["sweep"] == kind]
        tables = [(swept, sweeps.CHANGE), (swept, sweeps.REDUCED)]
        tables += [] if scores is None else [(scores, sweeps.LOGPROB), (scores, sweeps.SCORE)]
        presets = list(dict.fromkeys(swept["preset"]))
        places = itertools.product(tables, presets)
        for ax, ((table, of), preset) in zip(figures[name].axes, places, strict=True):
            mine = table[table["preset"] == preset]
            drawn, hollow = curves(ax)
            values = mine[mine["value"].notna()]
            assert sorted(hollow) == sorted(mine.loc[mine["value"].isna(), of.column])
            for cache, part in values.groupby("cache"):
                x, y = drawn[f"cache {100 * cache:g} %"]
                np.testing.assert_allclose(y, part[of.column])
                at = part["value"] if kind == "alpha" else range(len(part))
                assert np.abs(x - np.asarray(at, float)).max() < 0.2
            ends = mine[[of.low, of.high]].dropna()
            low, high = ax.get_ylim()
            assert low < mine[[of.column, of.low, of.high]].min(axis=None)
            assert mine[[of.column, of.low, of.high]].max(axis=None) < high
            assert vertical(ax) == sorted(zip(ends[of.low].round(9), ends[of.high].round(9), strict=True))


def test_sweeps_name_policy_values_and_second_labels():
    figures = plots.audit_figures(*audit())
    top = figures["sweep_epsilon"].axes
    assert [ax.get_title(loc="left") for ax in top[:2]] == ["snapkv+two_stage, paper", "snapkv+two_stage, released"]
    labels = [label.get_text() for label in top[-1].get_xticklabels()]
    assert labels == ["0\n0", "1e-06\n0.0001", "0.0001\n0.01", "0.01\n1", "none"]
    assert "not to scale" in top[-1].get_xlabel() and "ε · n" in top[-1].get_xlabel()
    assert "not to scale" not in figures["sweep_alpha"].axes[-1].get_xlabel()
    assert "α = 1 is the policy without a second stage" in said(figures["sweep_alpha"])
    assert "niah_single_1: 8 items" in said(figures["sweep_norm"]) and "100 tokens compressed" in said(
        figures["sweep_norm"]
    )
    result, summary = audit(scored=False)
    bare = plots.audit_figures(result, summary)["sweep_norm"]
    assert "items" not in said(bare) and [label.get_text() for label in bare.axes[-1].get_xticklabels()] == ["1", "2"]


def test_sweeps_tell_caches_apart_without_colour_and_norms_of_l_by_panel():
    assert len({(marker, str(style)) for _, marker, style in sweeps.CACHES}) == len(sweeps.CACHES)
    result, summary = audit(**ONE | {"caches": (0.1, 0.2)})
    swept = result.sweeps[result.sweeps["sweep"] == "norm"]
    both = pd.concat([swept.assign(measured=1), swept.assign(measured=2, change=-swept["change"])])
    figure = plots.sweep_curves(both, None, summary)
    assert ["L1" in ax.get_ylabel() for ax in figure.axes] == [True, False, True, False]
    assert ["L2" in ax.get_ylabel() for ax in figure.axes] == [False, True, False, True]
    assert "L1 and L2 norm" in said(figure)
    (one, _), (two, _) = (curves(ax) for ax in figure.axes[:2])
    np.testing.assert_allclose(one["cache 10 %"][1], -two["cache 10 %"][1])
