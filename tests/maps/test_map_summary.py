"""What is said of a map, against scipy, statsmodels and loops; a run against the public functions."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import small_documents as small
from scipy.stats import wilcoxon
from statsmodels.stats.multitest import multipletests

from kvprobe import eviction, maps, published, records, stats
from kvprobe.cells import Pair
from kvprobe.cells.reading import Reading
from kvprobe.errors import EvictionError, KVProbeError, StatisticsError
from kvprobe.maps import Settings
from kvprobe.maps.settings import from_command

NAMES = ("L", "bound", "centred", "mass")


def table(seed=0, docs=9, layers=3, heads=4, shift=-0.1, caches=(0.2,)):
    """A made-up table of ``per_head``."""
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product(
        [[f"d{i:02}" for i in range(docs)], caches, range(layers), range(heads)],
        names=["doc", "cache", "layer", "head"],
    )
    found = index.to_frame(index=False)[["doc", "layer", "head", "cache"]]
    own = rng.normal(0, 0.2, (layers, heads))[found["layer"], found["head"]]
    for name in NAMES:
        base = rng.lognormal(0, 0.5, len(found))
        found[f"{name}_base"] = base
        found[f"{name}_ours"] = base * np.exp(rng.normal(shift, 0.3, len(found)) + own)
    return found


def of(found, layer, head):
    return found[(found["layer"] == layer) & (found["head"] == head)].sort_values("doc")


@pytest.mark.parametrize("shuffled", [False, True])
def test_head_rows_against_loops_and_scipy(shuffled):
    given = table()
    found = maps.head_rows(given.sample(frac=1, random_state=1) if shuffled else given)
    assert found[["layer", "head"]].to_numpy().tolist() == [[ly, h] for ly in range(3) for h in range(4)]
    ps = []
    for row in found.to_dict("records"):
        mine = of(given, row["layer"], row["head"])
        base, ours = mine["L_base"].tolist(), mine["L_ours"].tolist()
        ps.append(wilcoxon(np.subtract(ours, base)).pvalue)
        for name in NAMES:
            for side in ("base", "ours"):
                column = f"{name}_{side}"
                assert row[column] == pytest.approx(math.fsum(mine[column]) / 9)
        difference = math.fsum(ours) / 9 - math.fsum(base) / 9
        assert row["difference"] == pytest.approx(difference) and row["reduced"] == (difference < 0)
        assert row["log2_ratio"] == pytest.approx(math.log2(math.fsum(ours) / math.fsum(base)))
        assert row["n_docs"] == 9 and row["p_attainable"] == 0.5**8
    np.testing.assert_allclose(found["p_wilcoxon"], ps)
    np.testing.assert_allclose(found["p_bh"], multipletests(ps, method="fdr_bh")[1])
    assert len({*found["reduced"]}) == 2 and len({*ps}) > 3


def test_share_reduced_is_the_share_of_means_below_zero():
    for seed in range(5):
        given = table(seed)
        for name in NAMES:
            found = maps.share_reduced(given, name)
            lower = [
                math.fsum(of(given, ly, h)[f"{name}_ours"] - of(given, ly, h)[f"{name}_base"]) < 0
                for ly in range(3) for h in range(4)
            ]  # fmt: skip
            assert found["share"] == pytest.approx(sum(lower) / 12) and found["n_heads"] == 12 and found["n_docs"] == 9
            assert found["ci_low"] <= found["share"] <= found["ci_high"] and found["n_equal"] == 0


def swapped(given):
    return given.rename(columns=lambda c: c.replace("base", "@").replace("ours", "base").replace("@", "ours"))


def test_swapping_the_policies_negates():
    given = table(3)
    one, other = maps.head_rows(given), maps.head_rows(swapped(given))
    np.testing.assert_allclose(one["difference"], -other["difference"])
    np.testing.assert_allclose(one["log2_ratio"], -other["log2_ratio"])
    np.testing.assert_allclose(one["p_wilcoxon"], other["p_wilcoxon"])
    assert (one["reduced"] != other["reduced"]).all()
    mine, theirs = maps.share_reduced(given), maps.share_reduced(swapped(given))
    assert mine["share"] + theirs["share"] == pytest.approx(1)
    assert mine["ci_low"] + theirs["ci_high"] == pytest.approx(1)
    a, b = maps.decomposition(one), maps.decomposition(other)
    for name in ("median_log_ratio", "median_log_mass", "median_log_distance"):
        assert a[name] == pytest.approx(-b[name])
    assert a["share_more_mass"] + b["share_more_mass"] == pytest.approx(1)
    first, second = (maps.budget_rows(g).to_dict("records")[0] for g in (given, swapped(given)))
    assert first["reduction"] == pytest.approx(-second["reduction"]) and first["base"] == second["ours"]


def test_equal_policies_reduce_nothing():
    given = table()
    for name in NAMES:
        given[f"{name}_ours"] = given[f"{name}_base"]
    found = maps.head_rows(given)
    assert not found["reduced"].any() and (found["p_wilcoxon"] == 1).all() and (found["log2_ratio"] == 0).all()
    share = maps.share_reduced(given)
    assert share["share"] == 0 and share["n_equal"] == 12


def test_layer_rows_are_means_with_their_interval():
    rng = np.random.default_rng(5)
    given = pd.DataFrame(
        [{"doc": f"d{i}", "layer": ly, "cache": 0.2, "base": rng.lognormal(), "ours": rng.lognormal()}
         for i in range(12) for ly in range(3)]
    )  # fmt: skip
    found = maps.layer_rows(given.sample(frac=1, random_state=0), seed=4)
    assert list(found) == ["layer", "base", "ours", "reduction", "ci_low", "ci_high", "n_docs"]
    for row in found.to_dict("records"):
        mine = given[given["layer"] == row["layer"]].sort_values("doc")
        reduction = (mine["base"] - mine["ours"]).to_numpy()
        interval = stats.mean_interval(reduction, seed=4)
        assert row["base"] == pytest.approx(mine["base"].mean()) and row["ours"] == pytest.approx(mine["ours"].mean())
        assert row["reduction"] == pytest.approx(row["base"] - row["ours"])
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((interval.low, interval.high))
        assert row["n_docs"] == 12


def test_budget_rows_are_means_over_heads_then_documents():
    given = table(6, docs=12, caches=(0.4, 0.1))
    found = maps.budget_rows(given, seed=2)
    assert found["cache"].tolist() == [0.1, 0.4]
    for row in found.to_dict("records"):
        mine = given[given["cache"] == row["cache"]]
        docs = [mine[mine["doc"] == name] for name in sorted(set(mine["doc"]))]
        change = [math.fsum(each["L_base"] - each["L_ours"]) / 12 for each in docs]
        assert row["base"] == pytest.approx(mine["L_base"].mean()) and row["ours"] == pytest.approx(
            mine["L_ours"].mean()
        )
        assert row["reduction"] == pytest.approx(math.fsum(change) / 12)
        interval = stats.mean_interval(change, seed=2)
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((interval.low, interval.high))
        assert row["heads_reduced"] == maps.share_reduced(mine)["share"] and row["n_docs"] == 12


def test_the_decomposition_adds_up_head_by_head():
    """ln L's ratio = ln the masses' ratio + ln the distances' ratio, distance = mean L over mean mass."""
    rows = maps.head_rows(table(7))
    found = maps.decomposition(rows)
    mass = [math.log(r["mass_ours"] / r["mass_base"]) for r in rows.to_dict("records")]
    distance = [
        math.log((r["L_ours"] / r["mass_ours"]) / (r["L_base"] / r["mass_base"])) for r in rows.to_dict("records")
    ]
    total = [math.log(r["L_ours"] / r["L_base"]) for r in rows.to_dict("records")]
    np.testing.assert_allclose(np.add(mass, distance), total)
    assert found["median_log_mass"] == pytest.approx(np.median(mass))
    assert found["median_log_distance"] == pytest.approx(np.median(distance))
    assert found["median_log_ratio"] == pytest.approx(np.median(total))
    assert found["share_more_mass"] == pytest.approx(np.mean(np.array(mass) > 0))
    assert found["share_nearer"] == pytest.approx(np.mean(np.array(distance) < 0)) and found["n_heads"] == 12
    one = maps.decomposition(rows.iloc[:1])
    assert one["median_log_mass"] + one["median_log_distance"] == pytest.approx(one["median_log_ratio"])


@pytest.mark.filterwarnings("error")
def test_a_head_that_evicts_nothing_is_no_part_of_the_decomposition():
    rows = maps.head_rows(table(7))
    rows.loc[0, ["mass_base", "mass_ours", "L_base", "L_ours"]] = 0.0
    assert maps.decomposition(rows)["n_heads"] == 11
    rows[["mass_base", "mass_ours", "L_base", "L_ours"]] = 0.0
    nothing = maps.decomposition(rows)
    assert nothing["n_heads"] == 0 and all(math.isnan(v) for k, v in nothing.items() if k != "n_heads")


def pairs(*names):
    base = eviction.policy("snapkv", **small.SMALL)
    two = lambda **more: eviction.policy("snapkv+two_stage", **small.SMALL, **more)  # noqa: E731
    made = {"a": Pair(base, two(), "a"), "b": Pair(base, two(alpha=0.25), "b")}
    return tuple(made[name] for name in names)


def settings(docs, **more):
    given = {"pairs": pairs("a", "b"), "cache": "0.25", "budgets": ("0.5", "0.125"), "reading": Reading(docs)}
    return Settings(**given | more)


@pytest.fixture(scope="module")
def ran(tiny):
    docs = [small.document(i) for i in range(4)]
    return docs, maps.run(tiny("llama"), settings(docs, norm=2, measure="hidden"))


def test_a_runs_tables_are_the_public_functions(ran, tiny):
    docs, result = ran
    for pair in result.settings.pairs:
        heads = maps.per_head(tiny("llama"), docs, pair.base, pair.ours, ["0.25", "0.5", "0.125"], p=2)
        mine = result.heads[result.heads["preset"] == pair.preset].drop(columns="preset").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, heads, rtol=1e-6)
        for measure in maps.MEASURES:
            layers = maps.per_layer(tiny("llama"), docs, pair.base, pair.ours, 0.25, measure=measure, p=2)
            at = (result.layers["preset"] == pair.preset) & (result.layers["measure"] == measure)
            mine = result.layers[at].drop(columns=["preset", "measure"]).reset_index(drop=True)
            pd.testing.assert_frame_equal(mine, layers, rtol=1e-4, atol=1e-5)


def test_a_runs_summary_is_that_of_its_tables(ran):
    _, result = ran
    summary = result.summary
    assert summary["preset"] == "a" and list(summary["presets"]) == ["a", "b"]
    assert {k: summary[k] for k in summary["presets"]["a"]} == summary["presets"]["a"]
    for name, block in summary["presets"].items():
        mine = result.heads[result.heads["preset"] == name]
        main = mine[mine["cache"] == 0.25]
        rows = maps.head_rows(main)
        held = block["heads_reduced"]
        assert held["share"] == maps.share_reduced(main)["share"] and held["n_heads"] == 18
        significant = multipletests(rows["p_wilcoxon"], method="fdr_bh")[1] <= 0.05
        lower = rows["difference"] < 0
        assert held["significantly_lower"] == int((significant & lower).sum())
        assert held["significantly_higher"] == int((significant & ~lower).sum())
        assert held["cannot_reject"] is True and rows["p_attainable"].min() == 0.125  # four documents
        assert block["by_measure"]["mass"]["share"] == maps.share_reduced(main, "mass")["share"]
        at = (result.layers["preset"] == name) & (result.layers["measure"] == "hidden")
        assert block["layers"] == maps.layer_rows(result.layers[at]).to_dict("list")
        assert [row["cache"] for row in block["budgets"]] == [0.125, 0.5]
        assert (block["policy"], block["against"]) == ("snapkv", "snapkv+two_stage")
    assert (summary["caches"], summary["caches_left_out"], summary["cache"]) == ([0.5, 0.125], [], 0.25)
    assert summary["n_docs"] == 4 and summary["tokens"] == {"min": 26, "max": 26} and summary["norm"] == 2
    assert summary["compressed_tokens"] == {"min": 24, "max": 24} and summary["published"] is None
    assert [[each["name"] for each in pair] for pair in summary["policies"]] == [["snapkv", "snapkv+two_stage"]] * 2
    json.loads(records.to_json(summary))


def test_a_runs_rows_carry_their_preset(ran):
    _, result = ran
    for rows, each in ((result.head_rows(), 18), (result.layer_rows(), 3), (result.budget_rows(), 2)):
        assert rows["preset"].tolist() == ["a"] * each + ["b"] * each
    main = result.heads[(result.heads["preset"] == "b") & (result.heads["cache"] == 0.25)]
    mine = result.head_rows()
    pd.testing.assert_frame_equal(
        mine[mine["preset"] == "b"].drop(columns="preset").reset_index(drop=True), maps.head_rows(main)
    )


def test_significant_heads_are_counted_on_their_side():
    from kvprobe.maps.summary import _heads_reduced

    given = table(docs=12)
    given["L_ours"] = given["L_base"] * np.where(given["layer"] == 0, 0.5, 1.0)  # four heads lower
    given.loc[given["layer"] == 1, "L_ours"] *= 1.5
    given.loc[(given["layer"] == 1) & (given["head"] == 0), "L_ours"] = given["L_base"]
    found = _heads_reduced(given, 0)
    assert (found["significantly_lower"], found["significantly_higher"]) == (4, 3)
    assert found["share"] == pytest.approx(4 / 12) and found["n_equal"] == 5 and not found["cannot_reject"]


def test_the_usual_sizes_are_those_that_fit(tiny):
    model = tiny("llama")
    policies = pairs("a")
    wide = Pair(eviction.policy("snapkv", window=3, kernel=3), eviction.policy("snapkv+two_stage", window=3, kernel=3))
    assert Settings(policies, "0.5").caches(model, 24) == (["0.05", "0.1", "0.2", "0.4"], ["0.025"])
    assert Settings((wide,), "0.5").caches(model, 24) == (["0.2", "0.4"], ["0.025", "0.05", "0.1"])
    assert Settings(policies, "0.5", ("0.3",)).caches(model, 24) == (["0.3"], [])


def test_a_context_that_none_of_the_usual_sizes_fits_has_a_curve_of_the_main_one(tiny):
    """It was asked for and can be done; that no other one can is no reason to fail."""
    wide = Pair(
        eviction.policy("snapkv", window=12, kernel=3), eviction.policy("snapkv+two_stage", window=12, kernel=3)
    )
    docs = [small.document(i) for i in range(2)]
    result = maps.run(tiny("llama"), Settings((wide,), "0.5", reading=Reading(docs)))
    assert result.summary["caches"] == [0.5] and len(result.head_rows()) == 18
    assert len(result.summary["caches_left_out"]) == 5 and list(result.budget_rows()["cache"]) == [0.5]


def test_the_papers_share_stands_beside_what_it_is_of_and_nothing_else():
    usual = (("snapkv", "snapkv+two_stage"), ["paper", "released"], 0.2, "first_decoded", 1)
    assert published.heads_reduced(*usual) is published.HEADS_REDUCED
    others = (("snapkv", "streaming"), ["as given"], 0.4, "next_token", 2)
    for place, other in enumerate(others):
        assert published.heads_reduced(*usual[:place], other, *usual[place + 1 :]) is None
    assert published.audited(["paper"], "first_decoded", 1)["bounds"] is published.BOUNDS
    assert published.audited(["paper"], "last_prompt", 1) is None


def test_one_size_and_one_measure_at_a_time():
    both = table(caches=(0.2, 0.4))
    with pytest.raises(StatisticsError, match="several rows of one document and head"):
        maps.share_reduced(both)
    with pytest.raises(StatisticsError, match="measure='foo'; allowed: L, bound, centred, mass"):
        maps.share_reduced(both[both["cache"] == 0.2], "foo")


def test_notes_of_a_policy_and_equal_heads_are_told(tiny):
    """PyramidKV falls back to uniform budgets on short contexts: the map must say so, not report a finding."""
    pair = Pair(eviction.policy("snapkv", window=8, kernel=3), eviction.policy("pyramid", window=8, kernel=3))
    docs = [small.document(i) for i in range(2)]
    result = maps.run(tiny("llama"), Settings((pair,), "0.4", ("0.4",), Reading(docs), "local"))
    note = {"policy": "snapkv+pyramid", "cache": 0.4, "fallback": True}
    assert result.summary["notes"] == [note] and result.summary["heads_reduced"]["n_equal"] == 18


def test_the_whole_cache_has_a_summary_without_a_decomposition(tiny):
    result = maps.run(tiny("llama"), settings([small.document(0), small.document(1)], cache="1"))
    why = result.summary["presets"]["a"]["why"]
    assert why["n_heads"] == 0 and result.summary["heads_reduced"]["n_equal"] == 18
    json.loads(records.to_json(result.summary))


WORDS = {
    "policy": "snapkv", "against": "snapkv+two_stage", "alpha": None, "epsilon": None, "preset": "paper,released",
    "budgets": None, "cache": "0.2", "measure": "attn_out", "norm": 1, "seed": 0, "docs": None, "documents": None,
    "length": None, "join": 1, "template": None, "chat": False, "probe": "first_decoded",
}  # fmt: skip


def test_words_of_the_command():
    found = from_command(WORDS | {"alpha": 0.25, "budgets": "0.1, 1/4", "cache": " 0.3 ", "documents": 3, "norm": 2})
    assert [pair.preset for pair in found.pairs] == ["paper", "released"]
    assert all(pair.ours.selector.alpha == 0.25 for pair in found.pairs)
    assert (found.cache, found.budgets, found.reading.n, found.norm) == ("0.3", ("0.1", "1/4"), 3, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preset": "papers"}, "preset='papers'; allowed: paper, released"),
        ({"preset": "papers", "policy": "tova", "against": "tova+two_stage"}, "preset='papers'"),
        ({"preset": ""}, "allowed"),
        ({"preset": "paper,paper"}, "each once"),
        ({"budgets": ","}, "no budget was given"),
        ({"budgets": "0.1,two"}, "cache ratio 'two'"),
        ({"cache": "0"}, "cache ratio '0'"),
        ({"cache": "0.1,0.2"}, "cache ratio '0.1,0.2'"),
        ({"measure": "all"}, "measure='all'; allowed: attn_out, hidden, local"),
        ({"norm": 3}, "p = 3"),
        ({"probe": "any"}, "probe='any'"),
        ({"against": "snapkv"}, "held against itself"),
        ({"against": "adakv", "alpha": 0.5}, "neither snapkv nor adakv has the setting alpha"),
        ({"policy": "expected_attention", "against": "adakv", "epsilon": 0.5}, "has the setting epsilon"),
    ],
)  # fmt: skip
def test_words_that_are_refused(change, said):
    with pytest.raises(KVProbeError, match=said) as caught:
        from_command(WORDS | change)
    assert "\n" not in str(caught.value)


def test_no_pairs_are_refused():
    with pytest.raises(EvictionError, match="one or more"):
        Settings(())
