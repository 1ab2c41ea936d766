"""Table 9, Assumption 3.4 and their intervals, by loops over tables; a run against the public function."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import small_documents as small

import kvprobe
from kvprobe import audits, eviction, records, stats
from kvprobe.audits import Settings
from kvprobe.audits.settings import from_command
from kvprobe.audits.tables import by_head, by_layer
from kvprobe.cells import Cells, Pair
from kvprobe.cells.reading import Reading
from kvprobe.errors import KVProbeError

CACHES = (0.25, 0.5)


def pair(preset="a", alpha=0.5, base="snapkv"):
    two = eviction.policy(f"{base}+two_stage", alpha=alpha, **small.SMALL)
    return Pair(eviction.policy(base, **small.SMALL), two, preset)


PAIR = pair()


def made_up(seed=0, docs=12, layers=3, heads=4, pairs=(PAIR,), caches=CACHES):
    """Cells of both policies of every pair; σ is of the pair and size, as it is in a run."""
    rng = np.random.default_rng(seed)
    rows = []
    for each in pairs:
        for cache in caches:
            sigma = np.clip(
                rng.uniform(0.3, 0.8, (layers, heads)) + rng.uniform(-0.2, 0.2, (docs, layers, heads)), 0, 1
            )
            best = np.minimum(1.0, sigma + rng.uniform(0, 0.3, sigma.shape))
            for policy in each.policies:
                for d, ly, h in np.ndindex(sigma.shape):
                    chain = np.cumsum(rng.uniform(0.1, 1, 6))
                    valid = sigma[d, ly, h] > 0.5
                    row = {"doc": f"d{d:02}", "policy": policy.name, "cache": cache, "layer": ly, "head": h}
                    row |= dict(zip(("perturbation", "centred_bound", "bound"), chain[:3], strict=True))
                    stages = chain[3:] if valid else [np.nan] * 3
                    row |= dict(zip(("stage2_bound", "relaxed_candidates", "relaxed_bound"), stages, strict=True))
                    row |= {"sigma": sigma[d, ly, h], "sigma_oracle": best[d, ly, h], "mass": rng.uniform()}
                    rows.append(row | {"kept": 5, "stage1": 2})
    table = pd.DataFrame(rows)
    keys = ["doc", "policy", "cache", "layer"]
    layered = table.groupby(keys, sort=False)["perturbation"].sum().mul(0.7).reset_index()
    return Cells(table, layered)


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def test_rows_are_ratios_of_averages_by_loops():
    pairs = (pair("a"), pair("b", 0.25))
    found = made_up(pairs=pairs)
    heads, layers = by_head(found), by_layer(found)
    rows = audits.rows(heads, layers, pairs, audits.LEVELS, seed=3)
    assert [(r["preset"], r["base"], r["cache"], r["level"]) for r in rows] == [
        (p, "snapkv", c, level) for p in ("a", "b") for c in CACHES for level in ("layer", "head")
    ]
    for row in rows:
        which = next(each for each in pairs if each.preset == row["preset"])
        table = heads if row["level"] == "head" else layers
        base, ours = (
            table[(table["policy"] == policy.name) & (table["cache"] == row["cache"])].to_dict("records")
            for policy in which.policies
        )
        theta = "bound" if row["level"] == "head" else "bound_valid"
        there = [i for i in range(len(ours)) if not math.isnan(ours[i]["stage2_bound"])]
        assert len(there) > 0 and (row["level"] == "layer" or len(there) < len(ours))
        assert row["actual"] == pytest.approx(mean(r["actual"] for r in ours))
        assert row["bound"] == pytest.approx(mean(r["bound"] for r in ours))
        assert row["centred_bound"] == pytest.approx(mean(r["centred_bound"] for r in ours))
        assert row["stage2_bound"] == pytest.approx(mean(ours[i]["stage2_bound"] for i in there))
        assert row["previous_bound"] == pytest.approx(mean(base[i]["relaxed_bound"] for i in there))
        assert row["bound_same_heads"] == pytest.approx(mean(ours[i][theta] for i in there))
        assert row["base_actual"] == pytest.approx(mean(r["actual"] for r in base))
        assert row["ratio"] == pytest.approx(row["stage2_bound"] / row["previous_bound"])
        assert row["ratio_bound"] == pytest.approx(row["bound_same_heads"] / row["previous_bound"])
        assert row["bound_over_actual"] == pytest.approx(row["bound"] / row["actual"])
        assert row["centred_over_actual"] == pytest.approx(row["centred_bound"] / row["actual"])
        per_doc = {
            name: [mean(r[name] for r in ours if r["doc"] == f"d{d:02}") for d in range(12)]
            for name in ("actual", "bound")
        }
        interval = stats.ratio_interval(per_doc["bound"], per_doc["actual"], seed=3)
        assert (row["bound_over_actual_low"], row["bound_over_actual_high"]) == pytest.approx(
            (interval.low, interval.high)
        )
        assert row["violations"] == 0 and row["n_docs"] == 12 and row["n_cells"] == 2 * len(ours)
        mine = heads[(heads["policy"] == which.policies[1].name) & (heads["cache"] == row["cache"])]
        assert row["share_valid"] == pytest.approx((mine["sigma"] > 0.5).mean())
        assert row["assumption"] == audits.assumption(mine, 3)


def test_violations_are_those_of_both_policies():
    given = made_up()
    given.heads.loc[given.heads["policy"] == "snapkv (a)", "perturbation"] *= 100
    rows = audits.rows(by_head(given), by_layer(given), (pair(),), ("head",), 0)
    assert [row["violations"] for row in rows] == [144, 144]


def test_the_assumption_by_loops():
    heads = by_head(made_up(docs=7))
    mine = heads[(heads["policy"] == "snapkv+two_stage (a)") & (heads["cache"] == 0.25)]
    found = audits.assumption(mine.sample(frac=1, random_state=0), seed=2)
    for reading, column in (("selected", "sigma"), ("oracle", "sigma_oracle")):
        passes = [mean(mine[mine["doc"] == f"d{d:02}"][column] > 0.5) for d in range(7)]
        assert found[f"share_{reading}"] == pytest.approx(mean(passes))
        assert found[f"share_{reading}"] == pytest.approx(mean(mine[column] > 0.5))
        assert found[f"share_{reading}_low"] <= found[f"share_{reading}"] <= found[f"share_{reading}_high"]
        failing = []
        for layer in range(3):
            for head in range(4):
                own = mine[(mine["layer"] == layer) & (mine["head"] == head)][column].tolist()
                if mean(own) <= 0.5:
                    failing.append((layer, head, mean(own), mean(s <= 0.5 for s in own)))
        listed = found["failing_heads" if reading == "selected" else "failing_heads_oracle"]
        assert [(f["layer"], f["head"]) for f in listed] == [f[:2] for f in failing]
        np.testing.assert_allclose([[f["sigma"], f["share_of_docs"]] for f in listed], [f[2:] for f in failing])
        assert found[f"heads_{reading}"] == pytest.approx(1 - len(failing) / 12)
    assert found["failing_heads"] and found["share_oracle"] >= found["share_selected"]
    assert audits.failing_heads(mine, "oracle") == found["failing_heads_oracle"]


def test_exactly_one_half_does_not_pass():
    heads = by_head(made_up(docs=4)).assign(sigma=0.5, sigma_oracle=0.5)
    mine = heads[(heads["policy"] == "snapkv (a)") & (heads["cache"] == 0.25)]
    found = audits.assumption(mine)
    assert found["share_selected"] == found["heads_oracle"] == 0.0 and len(found["failing_heads"]) == 12


def test_layer_rows_by_loops():
    found = made_up()
    layers = by_layer(found)
    rows = audits.layer_rows(layers, (pair(),), seed=1)
    assert rows[["cache", "layer"]].to_numpy().tolist() == [[c, ly] for c in CACHES for ly in range(3)]
    for row in rows.to_dict("records"):
        at = (layers["policy"] == "snapkv+two_stage (a)") & (layers["cache"] == row["cache"])
        mine = layers[at & (layers["layer"] == row["layer"])]
        for name in ("actual", "bound", "centred_bound"):
            assert row[name] == pytest.approx(mean(mine[name]))
        assert row["bound_over_actual"] == pytest.approx(mean(mine["bound"]) / mean(mine["actual"]))
        assert row["centred_over_actual"] == pytest.approx(mean(mine["centred_bound"]) / mean(mine["actual"]))
        assert row["centred_over_bound"] == pytest.approx(mean(mine["centred_bound"]) / mean(mine["bound"]))
        interval = stats.ratio_interval(mine["bound"], mine["actual"], seed=1)
        assert (row["bound_over_actual_low"], row["bound_over_actual_high"]) == pytest.approx(
            (interval.low, interval.high)
        )


def settings(docs, **more):
    given = {"pairs": (pair(), pair("b", 0.25)), "caches": ("0.25", "0.5"), "reading": Reading(docs)}
    return Settings(**given | more)


@pytest.fixture(scope="module")
def ran(tiny):
    docs = [small.document(i) for i in range(4)]
    return docs, audits.run(tiny("llama"), settings(docs))


@pytest.mark.slow
def test_a_runs_tables_are_the_public_function(ran, tiny):
    """With the first-stage share of Algorithm 1 on both sides."""
    docs, result = ran
    policies = [policy for each in result.settings.pairs[:1] for policy in each.policies]
    names = [policy.name for policy in policies]
    for level, table in (("head", result.heads), ("layer", result.layers)):
        mine = table[table["policy"].isin(names)].reset_index(drop=True)
        expected = kvprobe.audit(tiny("llama"), docs, policies, list(CACHES), level)
        pd.testing.assert_frame_equal(mine, expected, rtol=1e-5, atol=1e-7)


def test_both_policies_of_a_pair_have_one_first_stage(ran):
    _, result = ran
    for each, places in zip(result.settings.pairs, ({0.25: 3, 0.5: 6}, {0.25: 1, 0.5: 3}), strict=True):
        base, ours = (result.heads[result.heads["policy"] == p.name].reset_index(drop=True) for p in each.policies)
        for name in ("stage1", "sigma", "sigma_oracle"):
            assert base[name].equals(ours[name])
        assert ours.groupby("cache")["stage1"].unique().map(list).to_dict() == {c: [n] for c, n in places.items()}


def test_a_runs_summary_is_that_of_its_tables(ran):
    _, result = ran
    summary = result.summary
    expected = audits.rows(result.heads, result.layers, result.settings.pairs, audits.LEVELS, 0)
    assert records.to_json(summary["rows"]) == records.to_json(expected)
    assert summary["violations"] == 0 and summary["n_docs"] == 4 and summary["caches"] == [0.25, 0.5]
    assert (summary["presets"], summary["sweeps"], summary["scores"]) == (["a", "b"], [], [])
    assert len(result.rows()) == 8 and "failing_heads" not in result.rows() and "share_oracle" in result.rows()
    assert len(result.layer_rows()) == 2 * 2 * 3
    json.loads(records.to_json(summary))


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_layer_whose_window_sees_nothing_of_the_context_changes_nothing(family, tiny):
    """No ratio of such a layer exists; that is no reason to lose the whole audit."""
    docs = [small.document(i, n=34) for i in range(3)]
    result = audits.run(tiny(family), settings(docs, pairs=(pair(),)))
    silent = result.layer_rows()
    blind = silent[silent["actual"] == 0]
    assert len(blind) >= 2 and blind["bound_over_actual"].isna().all() and (blind["bound"] == 0).all()
    json.loads(records.to_json(result.summary))


def test_a_layer_that_changes_nothing_in_one_document_has_a_ratio_of_averages():
    found = made_up()
    layers = by_layer(found)
    still = (layers["doc"] == "d03") & (layers["layer"] == 1)
    layers.loc[still, ["actual", "sum_heads", "centred_bound", "bound"]] = 0.0
    rows = audits.layer_rows(layers, (pair(),))
    at = layers[(layers["policy"] == "snapkv+two_stage (a)") & (layers["cache"] == 0.25) & (layers["layer"] == 1)]
    assert rows[rows["layer"] == 1]["bound_over_actual"].iloc[0] == pytest.approx(
        mean(at["bound"]) / mean(at["actual"])
    )


def test_the_whole_cache_has_an_audit_without_ratios(tiny):
    docs = [small.document(i) for i in range(2)]
    result = audits.run(tiny("llama"), settings(docs, caches=("1",), pairs=(pair(),)))
    assert all(
        row["actual"] == row["bound"] == 0 and math.isnan(row["bound_over_actual"]) for row in result.summary["rows"]
    )


def test_where_no_head_passes_there_is_no_ratio():
    found = made_up()
    found.heads[["stage2_bound", "relaxed_bound", "relaxed_candidates"]] = np.nan
    found.heads["sigma"] = 0.4
    for row in audits.rows(by_head(found), by_layer(found), (pair(),), audits.LEVELS):
        assert all(math.isnan(row[name]) for name in ("ratio", "ratio_bound", "stage2_bound", "previous_bound"))
        assert row["share_valid"] == 0 and row["assumption"]["share_selected"] == 0 and row["bound_over_actual"] > 1


WORDS = {
    "base": "snapkv,adakv", "preset": "paper,released", "alpha": None, "epsilon": None, "cache": "0.1,0.2",
    "level": "layer,head", "sweep": "", "task": "niah_single_1", "items": 10, "norm": 1, "seed": 0, "docs": None,
    "setting": "context", "sweep_cache": "0.1,0.2",
    "documents": None, "length": None, "join": 1, "template": None, "chat": False, "probe": "first_decoded",
}  # fmt: skip


def test_words_of_the_command():
    found = from_command(WORDS | {"alpha": 0.25, "sweep": "alpha, norm", "base": "snapkv, tova"})
    assert [(p.preset, p.base.name) for p in found.pairs] == [
        ("paper", "snapkv"),
        ("as given", "tova"),
        ("released", "snapkv"),
    ]
    assert all(
        each.ours.name == each.base.name + "+two_stage" and each.ours.selector.alpha == 0.25 for each in found.pairs
    )
    assert {arm.alpha for arm in found.arms} == {0.25} and found.sweeps == ("alpha", "norm")
    first = [(sweep.kind, sweep.pair.preset) for sweep in found.swept()]
    assert first == [(k, p) for k in ("alpha", "norm") for p in ("paper", "as given", "released")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": "snapkv+two_stage"}, "has a second stage already"),
        ({"base": "snapkv + two_stage"}, "second stage already|two selectors"),
        ({"base": "streaming"}, "streaming has no first stage"),
        ({"base": ""}, "allowed"),
        ({"base": "snapkv,nonsense"}, "nonsense"),
        ({"preset": "papers"}, "preset='papers'"),
        ({"preset": ""}, "preset"),
        ({"cache": ""}, "cache"),
        ({"cache": "0.1,x"}, "cache ratio 'x'"),
        ({"level": "model"}, "level model; allowed: layer, head, each once"),
        ({"level": ""}, "level none; allowed"),
        ({"sweep": "beta"}, "sweep beta; allowed: alpha, epsilon, norm, each once"),
        ({"sweep": "alpha,alpha"}, "each once"),
        ({"task": "qa"}, "no task 'qa'"),
        ({"norm": 0}, "p = 0"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"probe": "x"}, "probe='x'"),
    ],
)  # fmt: skip
def test_words_that_are_refused(change, said):
    with pytest.raises(KVProbeError, match=said) as caught:
        from_command(WORDS | change)
    assert "\n" not in str(caught.value)
