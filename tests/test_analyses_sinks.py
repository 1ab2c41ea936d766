"""The analyses of sinks and heads: measures and choices against loops, sums against arithmetic by hand, files."""

import itertools
import json
import math
import subprocess
import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sink_traces import TRACES, row_trace
from test_analyses import ROOT, script

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

NAMES = ("sink_or_search", "head_roles", "epsilon_sensitivity")
SMALL = {"length": 760, "items": 2}
MORE = {
    NAMES[0]: {"task": "niah_single_2,niah_multikey_1"},
    NAMES[1]: {"lengths": ("760",), "depths": ("0", "100"), "recall": -1.0, "knockouts": 1},
    NAMES[2]: {"epsilons": ("0", "1e-4", "1e-2"), "caches": ("0.2", "0.4")},
}
WORDS = {
    NAMES[0]: ["--task", "niah_multikey_1"],
    NAMES[1]: ["--lengths", "760", "--depths", "50", "--recall", "-1", "--knockouts", "1"],
    NAMES[2]: ["--epsilons", "0,1e-4", "--caches", "0.3"],
}
TABLES = {
    NAMES[0]: {"rows", "items", "heads", "kinds", "secondary"},
    NAMES[1]: {"rows", "items", "pairs"},
    NAMES[2]: {"rows", "items", "conclusions"},
}
HELPERS = ("sink_items", "epsilon_overlaps", "epsilon_verdicts")
search, roles, epsilons = (script("analyses", name) for name in NAMES)
shared, overlaps, verdicts = (script("analyses", name) for name in HELPERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("sinks") / "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(folder):
    from kvprobe import models

    return models.load(folder)


@pytest.fixture(scope="module")
def tables(model):
    """Name → (plan, table) of an analysis, computed once."""

    @cache
    def table(name):
        module = script("analyses", name)
        planned = module.ANALYSIS.plan(model, **SMALL, **MORE[name])
        return planned, module.compute(model, planned)

    return table


def row_of(table, **where):
    found = table[np.logical_and.reduce([table[name] == value for name, value in where.items()])]
    assert len(found) == 1
    return found.iloc[0]


def slow_auroc(more, less):
    """Every pair by itself; None without a pair."""
    wins = [(a > b) + (a == b) / 2 for a in more for b in less if not (math.isnan(a) or math.isnan(b))]
    return sum(wins) / len(wins) if wins else math.nan


@pytest.mark.parametrize("kind", TRACES)
def test_measures_are_those_of_loops(kind):
    """Pooled over all heads, and over those of a layer: sums of A m and of A over single rows, heads and keys."""
    from kvprobe import sinks

    scores = sinks.scores(row_trace(**TRACES[kind]), epsilon=0.01)
    found = shared.measures(scores)
    L, H, n = scores.shape
    for place, layers in enumerate([range(L), *([layer] for layer in range(L))]):
        for j in range(n):
            seen = [layer for layer in layers if scores.seen[layer, j]]
            above = {"ratio": 0.0, "relative_ratio": 0.0}
            below, means = 0.0, {name: [] for name in ("mass", "value_mass", "norm", "relative_norm")}
            for layer in seen:
                of_heads = {name: 0.0 for name in means}
                for h in range(H):
                    visible = [scores.norms[layer, h, k] for k in range(n) if scores.seen[layer, k]]
                    m, s = scores.norms[layer, h, j], scores.mass[layer, h, j]
                    relative, rows = m / float(np.median(visible)), scores.seen[layer, j]
                    above["ratio"] += rows * s * m
                    above["relative_ratio"] += rows * s * relative
                    below += rows * s
                    values = {"mass": s, "value_mass": (s + 0.01) * m, "norm": m, "relative_norm": relative}
                    for name, value in values.items():
                        of_heads[name] += value / H
                for name, value in of_heads.items():
                    means[name].append(value)
            for name, value in above.items():
                wanted = value / below if below > 0 else math.nan
                assert found[name][place, j] == pytest.approx(wanted, rel=1e-9, nan_ok=True), (name, place, j)
            for name, values in means.items():
                wanted = sum(values) / len(values) if values else math.nan
                assert found[name][place, j] == pytest.approx(wanted, rel=1e-9, nan_ok=True), (name, place, j)
    assert set(found) == set(search.MEASURES)


def test_aurocs_are_counted_pair_by_pair_where_both_are_seen():
    from kvprobe import sinks

    scores = sinks.scores(row_trace(window=6, pad=4))
    keys = {"evidence": [9, 10, 35, 36], "first": [4], "first4": [4, 5, 6, 7], "secondary_sink": [], "hard": [20, 21]}
    keys["other"] = [12, 13, 14, 38]
    found, values = search.aurocs(scores, keys), shared.measures(scores)
    assert len(found) == 6 * 5 * 3
    for row in found.to_dict("records"):
        x = values[row["measure"]][row["layer"] + 1]
        wanted = slow_auroc(x[keys["evidence"]], x[keys[row["contrast"]]])
        assert row["auroc"] == pytest.approx(wanted, nan_ok=True), row
    assert found.loc[found["contrast"] == "secondary_sink", "auroc"].isna().all()
    assert np.isnan(values["mass"][2]).any()  # some keys are behind the window of layer 1


def test_classes_share_no_key_and_are_the_context(tables):
    planned, _ = tables(NAMES[0])
    for made, hard in zip(planned.made, (False, True), strict=True):
        for item in made.items:
            n, (low, high) = len(item.prompt) + len(item.answer_ids), item.spans["evidence"][0]
            keys = shared.sorted_keys(item, n, [3, 40, low, n - 1])
            first, every = keys.pop("first"), [key for part in keys.values() for key in part]
            assert len(every) == len(set(every)) and set(every) == set(range(item.context_stop))
            assert first == [0] and keys["first4"] == [0, 1, 2, 3] and keys["evidence"] == list(range(low, high))
            assert keys["secondary_sink"] == [40] and bool(keys["hard"]) == hard
            planted = {key for start, stop in item.spans.get("hard", []) for key in range(start, stop)}
            assert set(keys["hard"]) == planted - {40}


def test_answer_rows_predict_the_answer(model, tables):
    """Teacher forcing: the row t of the whole prompt is the one whose next token is t + 1."""
    planned, _ = tables(NAMES[0])
    for item in planned.made[0].items:
        whole, rows = item.prompt.extended(item.answer_ids), shared.answer_rows(item)
        assert [int(whole.ids[row + 1]) for row in rows] == list(item.answer_ids)
        assert set(rows) <= set(shared.observed(model, item)[1].queries)


def test_head_masses_are_sums_over_keys():
    from kvprobe import sinks

    scores = sinks.scores(row_trace(window=6, pad=4))
    table = search.head_masses(scores, {"evidence": [9, 10, 35], "hard": []})
    assert len(table) == 12 and (table["hard"] == 0).all()
    for row in table.to_dict("records"):
        mass = scores.mass[row["layer"], row["head"]]
        assert row["first"] == pytest.approx(0.0 if math.isnan(mass[4]) else mass[4])
        assert row["evidence"] == pytest.approx(sum(x for x in mass[[9, 10, 35]] if not math.isnan(x)))


def test_heads_are_counted_with_what_chance_would_give():
    masses = pd.DataFrame(
        {
            "task": "t",
            "rows": "suffix",
            "item": [0] * 4 + [1] * 4,
            "layer": [0, 0, 1, 1] * 2,
            "head": [0, 1] * 4,
            "first": [0.5, 0.2, 0.1, 0.4, 0.5, 0.2, 0.3, 0.6],
            "evidence": [0.3, 0.0, 0.1, 0.02, 0.1, 0.0, 0.3, 0.05],
            "hard": 0.0,
        }
    )
    asked = search.Plan((), sink=0.3, search=0.1)
    heads, kinds = search.by_head(masses, asked, seed=0)
    assert heads["first"].tolist() == pytest.approx([0.5, 0.2, 0.2, 0.5])
    assert heads["sink"].tolist() == [True, False, False, True]
    assert heads["search"].tolist() == [True, False, True, False]
    (row,) = kinds.to_dict("records")
    assert (row["sink"], row["search"], row["both"], row["n_heads"]) == (2, 2, 1, 4)
    assert row["expected"] == 1 and row["lift"] == 1 and row["rho_n"] == 2
    assert row["rho_mean"] == pytest.approx((0.4 + 0.2) / 2)  # ranks 4213 × 4132 and 3124 × 3142, by hand


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=20))
def test_rank_correlation_is_scipys(pairs):
    from scipy.stats import spearmanr

    x, y = (np.array(side, float) for side in zip(*pairs, strict=True))
    found = shared.spearman(x, y)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        assert math.isnan(shared.spearman(np.append(x, np.nan), np.append(y, 1.0)))


def test_means_leave_undefined_items_out_and_keep_their_range():
    row = shared.averaged([0.5, None, 1.0, math.nan], 0, "part")
    assert row["mean"] == 0.75 and row["n"] == 2 and row["excluded"] == 2 and row["high"] == 1
    assert shared.averaged([0.9, 1.0], 0, "correlation")["high"] == 1 < shared.averaged([0.9, 1.0], 0)["high"]
    same = [shared.averaged([1.0, 1.0, 1.0], 0, kind) for kind in ("auroc", "part", "mean")]
    assert [row["low"] == 1 for row in same] == [False, True, True]
    assert math.isnan(shared.averaged([None], 0)["mean"]) and shared.averaged([None], 0)["excluded"] == 1


def test_search_is_the_library_asked_directly(model, tables):
    from kvprobe import runs, sinks, stats

    planned, table = tables(NAMES[0])
    made = planned.made[1]
    aurocs = []
    for item in made.items:
        whole = item.prompt.extended(item.answer_ids)
        trace = runs.observe(model, whole, list(range(item.context_stop, len(whole))))
        ratio = sinks.scores(trace).ratio("all", relative=True)
        evidence = [key for start, stop in item.spans["evidence"] for key in range(start, stop)]
        aurocs.append(slow_auroc(ratio[evidence], ratio[:4]))
    row = row_of(table, task="niah_multikey_1", contrast="first4", measure="relative_ratio", layer=-1)
    interval = stats.auroc_interval(aurocs, seed=0)
    assert (row["mean"], row["low"], row["high"], row["n"]) == pytest.approx(
        (interval.mean, interval.low, interval.high, 2), abs=1e-9
    )
    assert set(table["layer"]) == {-1, 0, 1, 2} and (table["n"] > 0).all()
    assert "hard" in set(table.loc[table["task"] == "niah_multikey_1", "contrast"])
    assert "hard" not in set(table.loc[table["task"] == "niah_single_2", "contrast"])
    heads = table.attrs["tables"]["heads"]
    assert len(heads) == 2 * 2 * 3 * 6 and set(heads["rows"]) == {"suffix", "answer"}


def test_roles_are_the_library_asked_directly(model, tables):
    from kvprobe import heads, runs, sinks, theory

    planned, table = tables(NAMES[1])
    scores = heads.gather(heads.scan(model, planned.grid), threshold=-1).scores
    assert table["retrieval"].to_numpy().reshape(scores.shape) == pytest.approx(scores)
    items = table.attrs["tables"]["items"]
    for index, item in enumerate(planned.made.items):
        whole = item.prompt.extended(item.answer_ids)
        trace = runs.observe(model, whole, list(range(item.context_stop, len(whole))))
        mine, (span,) = items[items["item"] == index], item.spans["evidence"]
        first = sinks.sink_rates(sinks.scores(trace))["first"]
        np.testing.assert_allclose(mine["first"], first, rtol=1e-9)
        keep = torch.ones(trace.n, dtype=torch.bool)
        keep[slice(*span)] = False
        view = trace.layer(2)
        A, _ = theory.attention(view.logits.double(), None)
        L = [float(theory.perturbation(A[4, q], view.values[1], view.w_o[4], keep)) for q in range(A.shape[1])]
        row = row_of(mine, layer=2, head=4)
        assert row["perturbation"] == pytest.approx(sum(L) / len(L), rel=1e-6)
        assert row["evidence"] == pytest.approx(float(A[4][:, ~keep].sum(-1).mean()), rel=1e-6)
        assert math.isnan(row["kl"]) == (index == 1)
    knocked = heads.knockouts(model, planned.made.items[0])
    mine = items[items["item"] == 0]
    np.testing.assert_allclose(mine["delta_logprob"], knocked["delta_logprob"], atol=2e-5)
    np.testing.assert_allclose(mine["effect"], mine["delta_logprob"].abs())
    assert table["first"].to_numpy() == pytest.approx(items.groupby(["layer", "head"])["first"].mean().to_numpy())
    assert (table["kl"].notna()).all() and (table["sink"] == (table["first"] > 0.3)).all()


def roles_of(item, **columns):
    return pd.DataFrame({"item": item, "layer": [0, 0, 0, 1, 1, 1], "head": [0, 1, 2] * 2} | columns)


def test_pairs_are_correlated_within_items_and_within_layers():
    from scipy.stats import spearmanr

    a, b = [1.0, 2, 3, 10, 11, 12], [3.0, 2, 1, 12, 11, 10]
    items = pd.concat(
        [
            roles_of(0, retrieval=a, first=b, effect=a),
            roles_of(1, retrieval=a, first=a, effect=math.nan),
            roles_of(2, retrieval=a, first=[0.0] * 6, effect=math.nan),
        ]
    )
    table = roles.pairs(items, seed=0)
    assert table[["first", "second"]].to_numpy().tolist() == [
        ["retrieval", "first"],
        ["retrieval", "effect"],
        ["first", "effect"],
    ]
    row = table.iloc[0]
    assert row["mean"] == pytest.approx((spearmanr(a, b).statistic + 1) / 2) and row["n"] == 2 and row["excluded"] == 1
    assert row["within_mean"] == pytest.approx((-1 + 1) / 2) and row["within_n"] == 2
    assert table.iloc[1]["n"] == 1 and table.iloc[1]["mean"] == 1 and math.isnan(table.iloc[1]["low"])


def test_within_layers_leaves_constant_layers_out():
    mine = roles_of(0, retrieval=[0.0, 0, 0, 1, 2, 3], first=[1.0, 2, 3, 1, 2, 3])
    assert roles.within_layers(mine, "retrieval", "first") == pytest.approx(1)
    assert math.isnan(roles.within_layers(mine.assign(retrieval=0.0), "retrieval", "first"))


@pytest.mark.parametrize("kind", ["causal", "window, learned sink, pads"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.1])
def test_leading_tokens_are_those_of_sorting(kind, epsilon):
    from kvprobe import sinks

    scores, share = sinks.scores(row_trace(**TRACES[kind])), 0.2
    found = overlaps.leading(scores, epsilon, share)
    L, H, n = scores.shape

    def shared_part(mine, base):
        seen = [j for j in range(n) if not math.isnan(base[j])]
        k = math.ceil(share * len(seen))
        best = [set(sorted(seen, key=lambda j: (-x[j], j))[:k]) for x in (mine, base)]
        return len(best[0] & best[1]) / k

    def mass(layer, h, at):
        return [(scores.mass[layer, h, j] + at) * scores.norms[layer, h, j] for j in range(n)]

    heads = [shared_part(mass(a, h, epsilon), mass(a, h, 0.0)) for a in range(L) for h in range(H)]
    assert found["top_heads"] == pytest.approx(sum(heads) / len(heads))
    pooled = []
    for at in (epsilon, 0.0):
        layers = np.array([np.mean([mass(a, h, at) for h in range(H)], 0) for a in range(L)])
        seen = [layers[~np.isnan(layers[:, j]), j] for j in range(n)]
        pooled.append([float(values.mean()) if values.size else math.nan for values in seen])
    assert found["top_pooled"] == pytest.approx(shared_part(*pooled))
    assert (found["top_heads"] == 1) == (epsilon == 0)


@given(st.integers(0, 10_000))
def test_overlap_counts_entries(seed):
    rng = np.random.default_rng(seed)
    mine, reference, stage1 = (rng.random((2, 3, 8)) < 0.5 for _ in range(3))
    reference[0, 0, 0], mine, reference = True, mine | stage1, reference | stage1
    found = overlaps.overlap(*map(torch.tensor, (mine, reference, stage1)), [2, 5])
    cells = list(itertools.product(range(2), range(3), range(8)))
    kept = [c for c in cells if reference[c]]
    later = [c for c in kept if not stage1[c]]
    assert found["kept"] == pytest.approx(sum(mine[c] for c in kept) / len(kept), rel=1e-6)
    wanted = sum(mine[c] for c in later) / len(later) if later else math.nan
    assert found["kept_second"] == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert found["evidence_kept"] == pytest.approx(np.mean([mine[c] for c in cells if c[2] in (2, 5)]))


def test_epsilon_is_the_library_asked_directly(model, tables):
    """Value masses and ρ by the sweep of kvprobe.sinks, the second stage by that of kvprobe.audits."""
    from kvprobe import audits, runs, sinks

    planned, table = tables(NAMES[2])
    items = table.attrs["tables"]["items"]
    item = planned.made.items[1]
    whole = item.prompt.extended(item.answer_ids)
    trace = runs.observe(model, whole, list(range(item.context_stop, len(whole))))
    buckets = sinks.buckets(trace.n, evidence=item.spans["evidence"], context_stop=item.context_stop)
    for wanted in sinks.epsilon_sweep(sinks.scores(trace), buckets, (0.0, 1e-4, 1e-2)):
        mine = items[(items["item"] == 1) & (items["epsilon"] == wanted["epsilon"]) & (items["part"] != "selector")]
        value = mine.set_index("quantity")["value"]
        sums, each = wanted["value_mass"], wanted["value_mass_per_token"]
        assert value["auroc"] == pytest.approx(wanted["auroc"])
        assert value["order"] == pytest.approx(wanted["spearman_value_mass"])
        assert value["rarity"] == pytest.approx(wanted["spearman_ratio_mass"])
        assert value["value"] == pytest.approx(wanted["spearman_ratio_norm"])
        assert value["mass other"] == pytest.approx(sums["other"])
        assert 2 ** value["evidence / first4"] == pytest.approx(sums["evidence"] / sums["first4"])
        assert 2 ** value["evidence / other per token"] == pytest.approx(each["evidence"] / each["other"])
    documents = [planned.document(index) for index in range(2)]
    swept = audits.sweep(model, documents, planned.sweep, planned.caches)
    for row in swept.to_dict("records"):
        where = {"epsilon": row["value"], "cache": row["cache"]}
        assert row_of(table, quantity="L", **where)["mean"] == pytest.approx(row["L"], rel=1e-6)
        assert row_of(table, quantity="kept", **where)["mean"] <= 1
    for row in audits.sweep(model, documents[1:], planned.sweep, planned.caches).to_dict("records"):
        where = {"item": 1, "epsilon": row["value"], "cache": row["cache"]}
        gain = 100 * (row["L"] / row["base_L"] - 1)
        assert row_of(items, quantity="gain", **where)["value"] == pytest.approx(gain, rel=1e-6)
    mine = table[table["part"] == "selector"]
    assert len(mine) == 6 * 3 * 2


def test_choices_are_those_of_the_policies(model, tables):
    """Kept sets chosen one policy at a time by select(); at the reference ε everything is shared."""
    from kvprobe import eviction

    planned, table = tables(NAMES[2])
    items, (item, *_) = table.attrs["tables"]["items"], planned.made.items
    keep = {
        at: eviction.policy("snapkv+two_stage", preset="paper", epsilon=at).select(
            model, item.prompt.ids[: item.context_stop], 0.2
        )
        for at in (1e-4, 1e-2)
    }
    both = float((keep[1e-4] & keep[1e-2]).sum() / keep[1e-4].sum())
    where = {"item": 0, "cache": 0.2, "epsilon": 1e-2}
    assert row_of(items, quantity="kept", **where)["value"] == pytest.approx(both) and both < 1
    second = row_of(items, quantity="kept_second", **where)["value"]
    assert second < both  # the first stage is the same under every ε
    start, stop = item.spans["evidence"][0]
    wanted = float(keep[1e-2][..., start:stop].float().mean())
    assert row_of(items, quantity="evidence_kept", **where)["value"] == pytest.approx(wanted)
    same = items[(items["epsilon"] == 1e-4) & items["quantity"].isin(["kept", "kept_second"])]
    assert (same["value"] == 1).all()
    assert (items.loc[(items["epsilon"] == 1e-4) & (items["quantity"] == "change"), "value"] == 0).all()


def test_verdicts_need_their_interval(tables):
    _, table = tables(NAMES[2])
    rows = table.copy()
    rows.attrs = {}

    def told(quantity, low, high, mean=None):
        made = rows.copy()
        at = made["quantity"] == quantity
        made.loc[at, ["low", "high"]] = low, high
        made.loc[at, "mean"] = (low + high) / 2 if mean is None else mean
        return verdicts.conclusions(made, 1e-4).iloc[-1]

    for low, high, first, other in (
        (0.1, 1, "evidence", "evidence"),
        (-1, -0.1, "first4", "other"),
        (-1, 2, None, None),
    ):
        assert told("evidence / first4", low, high)["evidence_first4"] == (first or "undecided")
        assert told("evidence / other", low, high)["evidence_other"] == (other or "undecided")
    assert [told("auroc", *ends)["auroc"] for ends in ((0.6, 1), (0.2, 0.4), (0.4, 0.6))] == [
        "evidence",
        "first4",
        "undecided",
    ]
    assert told("value", 0.9, 1.2)["ratio"] == "value" and told("value", -1.1, -1)["ratio"] == "rarity"
    assert [told("gain", *ends)["selector"] for ends in ((-2, -1), (1, 2), (-2, 1))] == ["lower", "higher", "undecided"]
    found = verdicts.conclusions(rows, 1e-4)
    assert found["epsilon"].tolist() == [0.0, 1e-4, 1e-2] and found["text"].str.contains("40 % cache").all()


def test_figures_show_the_tables(tables):
    table = tables(NAMES[0])[1]
    figure = search.plot(table)
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles[:3:2] == ["evidence above\nthe first position", ""] and len(figure.axes) == 5 * 3 + 4 + 1
    shown = table[(table["contrast"] == "first4") & (table["task"] == "niah_single_2") & (table["layer"] >= 0)]
    panel = figure.axes[titles.index("evidence above\nthe first four positions") + 1]
    lines = {line.get_label(): line for line in panel.lines}
    for name in ("relative_ratio", "mass", "value_mass"):
        np.testing.assert_allclose(lines[name].get_ydata(), shown.loc[shown["measure"] == name, "mean"])
    table = tables(NAMES[1])[1]
    figure, pairs = roles.plot(table), table.attrs["tables"]["pairs"]
    points = figure.axes[0].collections[0].get_offsets()
    assert sorted(map(tuple, points)) == sorted(zip(table["first"], table["retrieval"], strict=True))
    drawn = [line.get_xdata()[0] for ax in figure.axes for line in ax.lines if line.get_label() == "mean"]
    np.testing.assert_allclose(drawn, pairs["mean"])
    table = tables(NAMES[2])[1]
    figure = epsilons.plot(table)
    assert len(figure.axes) == 6
    drawn = {line.get_label(): line.get_ydata() for ax in figure.axes for line in ax.lines}
    np.testing.assert_allclose(drawn["with m: value"], table.loc[table["quantity"] == "value", "mean"])
    kept = table[(table["quantity"] == "kept_second") & (table["cache"] == 0.4)]
    np.testing.assert_allclose(drawn["second stage, 40 %"], kept["mean"])


@pytest.mark.parametrize("name", NAMES)
def test_main_writes_a_run_folder(folder, tmp_path, capsys, name):
    out = tmp_path / "run"
    words = ["--length", "760", "--items", "1", *WORDS[name], "--model", str(folder), "--out", str(out)]
    assert script("analyses", name).main(words) == 0
    files = {path.name for path in out.iterdir()}
    assert files == {f"{table}.parquet" for table in TABLES[name]} | {f"{name}.png", "manifest.json"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name
    assert manifest["exploratory"] is True and manifest["semantics"] and manifest["weight_processing"]
    said = capsys.readouterr().out
    assert "n = 1 items" in said and "exploratory" in said


WRONG = [("--items 0", "items is 0"), ("--task niah", "niah"), ("--length 100", "100"), ("--norm 3", "3")]
OWN = [
    (NAMES[0], "--task ,", "task is ','"),
    (NAMES[0], "--task niah_single_2,niah_single_2", "each once"),
    (NAMES[0], "--sink 1.5", "sink is 1.5"),
    (NAMES[0], "--search -1", "search is -1"),
    (NAMES[0], "--epsilon -1", "epsilon=-1"),
    (NAMES[1], "--lengths 300,x", "300,x"),
    (NAMES[1], "--lengths 90", "90"),
    (NAMES[1], "--depths 50,50", "depths"),
    (NAMES[1], "--knockouts 2", "knockouts is 2"),
    (NAMES[1], "--copy 1", "copy is 1"),
    (NAMES[1], "--task niah_multivalue", "niah_multivalue"),
    (NAMES[2], "--epsilons 0,1e-3", "reference is 0.0001"),
    (NAMES[2], "--epsilons 0,x", "0,x"),
    (NAMES[2], "--epsilons=-1,1e-4", "epsilon=-1"),
    (NAMES[2], "--epsilons 1e-4,1e-4", "each once"),
    (NAMES[2], "--caches 0.001", "cache 0.001"),
    (NAMES[2], "--base snapkv+two_stage", "second stage already"),
    (NAMES[2], "--preset other", "other"),
    (NAMES[2], "--probe other", "other"),
    (NAMES[2], "--top 1", "top is 1"),
]


@pytest.mark.parametrize(("name", "option", "said"), [(n, *case) for n in NAMES for case in WRONG] + OWN)
def test_wrong_input_is_one_line_before_a_folder_is_made(folder, tmp_path, capsys, name, option, said):
    out = tmp_path / "run"
    small = WORDS[name] if name == NAMES[1] else []
    words = ["--length", "760", "--items", "1", *small, *option.split(), "--model", str(folder), "--out", str(out)]
    assert script("analyses", name).main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{name}: ") and said in error and error.count("\n") == 1 and not out.exists()


def test_a_model_that_answers_nothing_has_no_retrieval_scores(folder, capsys):
    words = ["--length", "760", "--items", "1", "--lengths", "760", "--depths", "50", "--model", str(folder)]
    assert roles.main(words) == 2
    assert "recall > 0.5" in capsys.readouterr().err


def test_what_windows_hide_has_no_ratio_and_no_change():
    shared, sweep = script("analyses", "sink_items"), script("analyses", "epsilon_sensitivity")
    assert shared.log_ratio(8.0, 2.0) == 2
    assert all(math.isnan(shared.log_ratio(*pair)) for pair in ((None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0)))
    assert sweep.percent(3.0, 2.0) == 50 and math.isnan(sweep.percent(0.0, 0.0))


@pytest.mark.parametrize("name", ["sink_or_search", "epsilon_sensitivity"])
def test_windows_that_hide_all_evidence_end_no_run(name, tmp_path, capsys):
    import tiny

    model = tiny.save("mistral", tmp_path / "tiny", max_position_embeddings=4096)
    words = ["--model", str(model), "--items", "1", "--length", "700", "--task", "niah_single_2"]
    assert script("analyses", name).main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "nan" not in capsys.readouterr().out.lower() and (tmp_path / "out" / f"{name}.png").exists()


def test_items_of_several_tasks_are_described_at_once():
    module = script("analyses", "sink_items")
    one = {"task": "a", "needles": 1, "tokens": {"min": 300, "max": 322}}
    other = {"task": "b", "needles": 4, "tokens": {"min": 280, "max": 310}}
    found = module.together([one, other])
    assert (found["task"], found["tasks"], found["needles"]) == ("a and b", ["a", "b"], "1/4")
    assert found["tokens"] == {"min": 280, "max": 322}
    for several in ([one], [one, one | {"task": "b"}]):
        assert module.together(several)["needles"] == 1  # a number, so that one needle is no needles


@pytest.mark.parametrize("name", NAMES)
def test_help_is_quick_and_imports_nothing_heavy(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{name}.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'analyses' / f'{name}.py')!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    path = {"PYTHONPATH": str(ROOT / "analyses")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert run.stdout.startswith("usage:") and run.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_search_on_the_embedded_model(smol):
    planned = search.plan(smol, task="niah_multikey_1", items=1, length=700)
    table = search.compute(smol, planned)
    mine = table[(table["layer"] == -1) & (table["contrast"] == "first")].set_index("measure")["mean"]
    assert mine["relative_norm"] > 0.9 and mine["mass"] < 0.1  # the first position takes much and carries little
    kinds = table.attrs["tables"]["kinds"]
    assert kinds["sink"].between(60, 200).all() and (kinds["search"] > 0).all()


@pytest.mark.slow
def test_roles_on_the_embedded_model(smol):
    planned = roles.plan(smol, items=1, length=600, lengths=("300",), depths=("50",))
    table = roles.compute(smol, planned)
    best = table.loc[table["retrieval"].idxmax()]
    assert best["layer"] in (17, 18) and best["retrieval"] > 0.5 and "effect" not in table
    row = row_of(table.attrs["tables"]["pairs"], first="evidence", second="perturbation")
    assert row["mean"] > 0.5


@pytest.mark.slow
def test_epsilon_on_the_embedded_model(smol):
    planned = epsilons.plan(smol, items=1, length=600, epsilons=("0", "1e-4", "1e-2"))
    table = epsilons.compute(smol, planned)
    order = table[table["quantity"] == "order"]["mean"].tolist()
    assert order[0] == pytest.approx(1) and order[0] > order[1] > order[2]
    rarity = table[table["quantity"] == "rarity"]["mean"].tolist()
    assert rarity[0] < rarity[1] < rarity[2] and rarity[2] > 0.9
