"""From rows of arms to numbers: every number again from a made-up table, in a few lines."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from kvprobe import placebo, records
from kvprobe.placebo import summary
from kvprobe.placebo.tables import balance_frame

OUTCOMES = ("delta_logprob", "kl", "delta_settling")
STRENGTHS = ("bound", "perturbation", "centred", "value_mass", "mass")


def made(items=4, k=3, answered=None, matched=None, injected=(), seed=0):
    """A table of arms with random numbers; ``matched``: match_on → items with placebos."""
    rng = np.random.default_rng(seed)
    matched = matched or {name: range(items) for name in placebo.MATCH_ON}
    rows = []
    for item in range(items):
        arms = [("clean", "", 0), ("target", "", 0), ("gate", "", 0)]
        arms += [("placebo", on, n) for on in placebo.MATCH_ON if item in matched[on] for n in range(k)]
        arms += [("length_only", "", n) for n in range(k)]
        if item in injected:
            arms += [("injected_target", "", 0), *(("injected", "", n) for n in range(k))]
        for arm, on, number in arms:
            row = {"item": item, "arm": arm, "match_on": on, "number": number}
            row |= {name: rng.normal(-5.0 if "target" in arm else 0.0, 2.0) for name in OUTCOMES}
            row |= {name: math.exp(rng.normal(1.0, 0.5)) for name in STRENGTHS}
            row |= {"length": int(rng.integers(5, 30)), "position": rng.random(), "tested": True}
            rows.append(row | {"answered": item in (range(items) if answered is None else answered)})
    return pd.DataFrame(rows)


def probes(items=4, remedies=None, ratios=None):
    """What the summary reads off probed items: their matches."""
    remedies, ratios = remedies or {}, ratios or {}
    return [
        SimpleNamespace(
            index=i,
            matches={
                on: SimpleNamespace(
                    remedy=remedies.get((on, i), "contiguous"),
                    matched=remedies.get((on, i), "contiguous") is not None,
                    strongest=ratios.get((on, i), {"contiguous": 1.0 + i}),
                    tried={"contiguous": i},
                )
                for on in placebo.MATCH_ON
            },
        )
        for i in range(items)
    ]


def summed(arms, given=None, outcome="logprob", **changes):
    settings = placebo.Settings(**changes)
    return summary.contrasts(given or probes(), arms, balance_frame(arms, settings), settings, outcome)


def pick(arms, item, arm, column, on=""):
    rows = arms[(arms["item"] == item) & (arms["arm"] == arm) & (arms["match_on"] == on)]
    return rows[column].to_numpy(float)


def differences(arms, items, column, on, own="target", control="placebo"):
    named = on if control == "placebo" else ""
    return np.array([pick(arms, i, own, column)[0] - pick(arms, i, control, column, named).mean() for i in items])


def brute_force(arms, items, column, on, own="target", control="placebo"):
    """p and its smallest value: every way to name one set of each item the target."""
    named = on if control == "placebo" else ""
    every = []
    for i in items:
        x = np.concatenate([pick(arms, i, own, column), pick(arms, i, control, column, named)])
        every.append([x[j] - np.delete(x, j).mean() for j in range(len(x))])
    means = np.array([np.mean(chosen) for chosen in itertools.product(*every)])
    seen = abs(np.mean([values[0] for values in every]))
    largest = np.abs(means).max()
    return (np.abs(means) >= seen - 1e-9).mean(), (np.abs(means) >= largest - 1e-9).mean()


@pytest.mark.parametrize("on", placebo.MATCH_ON)
@pytest.mark.parametrize(("outcome", "column"), [("logprob", "delta_logprob"), ("settling_depth", "delta_settling")])
def test_the_contrast_is_target_minus_the_mean_of_its_placebos(on, outcome, column):
    arms = made()
    found = summed(arms, outcome=outcome)[on]
    row, d = found["contrast"], differences(arms, range(4), column, on)
    assert row["mean"] == pytest.approx(d.mean()) and row["n"] == 4
    half = scipy_stats.t.ppf(0.975, 3) * d.std(ddof=1) / 2
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((d.mean() - half, d.mean() + half))
    p, attainable = brute_force(arms, range(4), column, on)
    assert (row["p_permutation"], row["p_attainable"]) == pytest.approx((p, attainable))
    signs = np.array([*itertools.product((1, -1), repeat=4)])
    assert row["p_signflip"] == pytest.approx((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean())
    assert row["p_wilcoxon"] == pytest.approx(scipy_stats.wilcoxon(d, method="exact").pvalue)
    assert found["by_outcome"][outcome] == row and set(found["by_outcome"]) == {"logprob", "kl", "settling_depth"}
    kl = differences(arms, range(4), "kl", on)
    assert found["by_outcome"]["kl"]["mean"] == pytest.approx(kl.mean())
    assert found["kind"] == "spans" and found["injected_against_mask"] is None


def test_only_answered_items_enter():
    arms = made(answered=(0, 2, 3))
    found = summed(arms)["bound"]
    assert found["contrast"]["n"] == 3 == found["matched_answered"] and found["matched"] == 4
    assert found["contrast"]["mean"] == pytest.approx(differences(arms, (0, 2, 3), "delta_logprob", "bound").mean())
    assert found["balance"]["bound"]["n"] == 3
    for name, on in (("target", ""), ("length_only", ""), ("gate", ""), ("placebo", "bound")):
        for outcome, column in zip(("logprob", "kl", "settling_depth"), OUTCOMES, strict=True):
            wanted = np.mean([pick(arms, i, name, column, on).mean() for i in (0, 2, 3)])
            assert found["effect"][name][outcome] == pytest.approx(wanted)


def test_items_with_few_placebos_weigh_as_much_as_others():
    arms = made(items=3)
    arms = arms.drop(arms[(arms["item"] == 1) & (arms["arm"] == "placebo") & (arms["number"] > 0)].index)
    found = summed(arms, probes(3))["bound"]
    wanted = np.mean([pick(arms, i, "placebo", "delta_logprob", "bound").mean() for i in range(3)])
    assert found["effect"]["placebo"]["logprob"] == pytest.approx(wanted)
    assert found["contrast"]["p_permutation"] == pytest.approx(brute_force(arms, range(3), "delta_logprob", "bound")[0])


def test_matched_unmatched_and_remedies_are_counted():
    remedies = {("bound", 1): "hard", ("bound", 2): None, ("bound", 3): None, ("perturbation", 0): "hard_set"}
    ratios = {
        ("bound", 2): {"contiguous": 0.2, "hard": 0.5},
        ("bound", 3): {"contiguous": 0.4, "hard": math.nan, "token_set": 0.9},
    }
    arms = made(matched={"bound": (0, 1), "perturbation": range(4)}, injected=(2, 3))
    found = summed(arms, probes(4, remedies, ratios))
    one, two = found["bound"], found["perturbation"]
    assert (one["matched"], one["unmatched"], two["matched"], two["unmatched"]) == (2, 2, 4, 0)
    assert one["remedy"] == {"contiguous": 1, "hard": 1, "hard_set": 0, "token_set": 0, "injected": 2}
    assert two["remedy"] == {"contiguous": 3, "hard": 0, "hard_set": 1, "token_set": 0, "injected": 0}
    assert one["no_overlap_ratio"] == pytest.approx(0.3) and two["no_overlap_ratio"] is None
    assert one["strongest"] == {
        "contiguous": np.median([1.0, 2.0, 0.2, 0.4]),
        "hard": 0.5,
        "hard_set": None,
        "token_set": 0.9,
    }
    without = summed(made(matched={"bound": (0, 1), "perturbation": range(4)}), probes(4, remedies, ratios))
    assert without["bound"]["remedy"]["injected"] == 0


def test_spans_and_injected_vectors_are_never_mixed():
    arms = made(matched={"bound": (1,), "perturbation": ()}, injected=range(4))
    remedies = {("bound", i): None for i in (0, 2, 3)} | {("perturbation", i): None for i in range(4)}
    found = summed(arms, probes(4, remedies))
    spans, vectors = found["bound"], found["perturbation"]
    assert (spans["kind"], spans["contrast"]["n"]) == ("spans", 1)
    assert spans["contrast"]["mean"] == pytest.approx(differences(arms, (1,), "delta_logprob", "bound")[0])
    assert (vectors["kind"], vectors["contrast"]["n"]) == ("injected", 4) and "injected" in vectors["estimand"]
    d = differences(arms, range(4), "delta_logprob", "", "injected_target", "injected")
    assert vectors["contrast"]["mean"] == pytest.approx(d.mean())
    p, _ = brute_force(arms, range(4), "delta_logprob", "", "injected_target", "injected")
    assert vectors["contrast"]["p_permutation"] == pytest.approx(p)
    against = differences(arms, range(4), "delta_logprob", "", "target", "injected")
    assert vectors["injected_against_mask"]["mean"] == pytest.approx(against.mean())
    wanted = np.mean([pick(arms, i, "injected", "kl").mean() for i in range(4)])
    assert vectors["effect"]["injected"]["kl"] == pytest.approx(wanted)
    assert vectors["effect"]["placebo"]["kl"] is None  # key sets and vectors are never mixed
    assert vectors["balance"] == {}


def test_vectors_of_unanswered_items_are_no_control():
    arms = made(matched={"bound": (), "perturbation": ()}, injected=(0, 1), answered=(1, 2))
    found = summed(arms, probes(4, {(on, i): None for on in placebo.MATCH_ON for i in range(4)}))["bound"]
    assert (found["kind"], found["contrast"]["n"]) == ("injected", 1)


def test_balance_is_that_of_a_few_lines():
    arms = made(items=5, answered=(0, 1, 2, 4))
    table = balance_frame(arms, placebo.Settings())
    assert table["match_on"].tolist() == ["bound"] * 7 + ["perturbation"] * 7
    items = (0, 1, 2, 4)
    for _, row in table.iterrows():
        name, on = row["variable"], row["match_on"]
        f = np.log if name in STRENGTHS else np.asarray
        own = f([pick(arms, i, "target", name)[0] for i in items])
        before = np.array([f(pick(arms, i, "length_only", name)) for i in items])
        after = np.array([f(pick(arms, i, "placebo", name, on)) for i in items])
        sd = math.sqrt((own.var(ddof=1) + before.ravel().var(ddof=1)) / 2)
        assert row["smd_before"] == pytest.approx((own - before.mean(1)).mean() / sd)
        assert row["smd_after"] == pytest.approx((own - after.mean(1)).mean() / sd)
        assert row["before_low"] < row["smd_before"] < row["before_high"]
        assert row["after_low"] < row["smd_after"] < row["after_high"]
        assert (row["matched"], row["n"], row["flagged"]) == (name == on, 4, False)
        if name == "position":
            assert math.isnan(row["max_abs_ln_ratio"])
        else:
            raw = [np.log(pick(arms, i, "placebo", name, on) / pick(arms, i, "target", name)) for i in items]
            assert row["max_abs_ln_ratio"] == pytest.approx(np.abs(raw).max())


def test_a_window_without_strength_is_left_out_and_flagged():
    arms = made()
    whole = balance_frame(arms, placebo.Settings()).set_index(["match_on", "variable"])
    blind = (arms["arm"] == "length_only") & (arms["item"] == 2) & (arms["number"] == 1)
    unseen = balance_frame(arms.assign(bound=arms["bound"].where(~blind, 0.0)), placebo.Settings())
    unseen = unseen.set_index(["match_on", "variable"])
    fewer = balance_frame(arms[~blind], placebo.Settings()).set_index(["match_on", "variable"])
    numbers = ["smd_before", "smd_after"]
    key = ("bound", "bound")
    assert unseen.loc[key, "flagged"] and not whole.loc[key, "flagged"] and not unseen.loc[("bound", "mass"), "flagged"]
    assert np.allclose(unseen.loc[key, numbers].astype(float), fewer.loc[key, numbers].astype(float))
    assert np.isfinite(unseen.loc[key, numbers].astype(float)).all()


def test_without_an_answered_item_there_is_no_contrast():
    arms = made(answered=())
    found = summed(arms)["bound"]
    assert found["kind"] == "none" and found["contrast"]["n"] == 0 and found["balance"] == {}
    assert found["contrast"]["method"] == "no answered item has placebos" and found["contrast"]["cannot_reject"]
    assert all(found["contrast"][name] is None for name in ("mean", "ci_low", "ci_high", "p_permutation"))
    assert all(value is None for row in found["effect"].values() for value in row.values())
    assert json.loads(records.to_json(found)) == found
    rows = summary.contrast_rows({"contrasts": {"bound": found}, "outcome": "logprob"})
    assert [row["confirmatory"] for row in rows] == [True, False, False]


def test_answered_items_without_placebos_still_show_their_effects():
    arms = made(matched={"bound": (), "perturbation": ()}, answered=(0, 1))
    found = summed(arms, probes(4, {(on, i): None for on in placebo.MATCH_ON for i in range(4)}))["bound"]
    assert found["kind"] == "none" and found["effect"]["placebo"]["logprob"] is None
    wanted = np.mean([pick(arms, i, "target", "delta_logprob")[0] for i in (0, 1)])
    assert found["effect"]["target"]["logprob"] == pytest.approx(wanted)


def test_one_item_has_a_contrast_without_an_interval():
    arms = made(items=1)
    found = summed(arms, probes(1))["perturbation"]
    row = found["contrast"]
    assert row["mean"] == pytest.approx(differences(arms, (0,), "delta_logprob", "perturbation")[0])
    assert (row["ci_low"], row["ci_high"], row["n"]) == (None, None, 1) and row["cannot_reject"]
    assert row["p_attainable"] == 0.25 and found["balance"]["bound"]["before_low"] is None
    assert json.loads(records.to_json(found)) == found


def test_the_contrasts_table_has_a_row_for_each_matching_and_outcome():
    found = summed(made(), outcome="kl")
    rows = summary.contrast_rows({"contrasts": found, "outcome": "kl"})
    assert [(row["match_on"], row["outcome"]) for row in rows] == [
        (on, outcome) for on in placebo.MATCH_ON for outcome in ("logprob", "kl", "settling_depth")
    ]
    assert [row["confirmatory"] for row in rows] == [False, True, False] * 2
    assert all(row["mean"] == found[row["match_on"]]["by_outcome"][row["outcome"]]["mean"] for row in rows)


def test_the_promised_keys_are_there_and_every_value_is_json(ran, traced):
    for result in (ran, traced):
        text = records.to_json(result.summary)
        found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert {"n_items", "contrasts", "identity_max_abs", "seed", "settings", "semantics", "outcome"} <= set(found)
        assert set(found["contrasts"]) == {"bound", "perturbation"}
        for each in found["contrasts"].values():
            assert {"matched", "unmatched", "no_overlap_ratio"} <= set(each)
            assert set(each["remedy"]) == {"contiguous", "hard", "hard_set", "token_set", "injected"}
            if each["balance"]:
                named = {"bound", "perturbation", "centred", "value_mass", "length", "position"}
                assert named <= set(each["balance"])
                rows = each["balance"].values()
                assert all({"max_abs_ln_ratio", "smd_before", "smd_after"} <= set(row) for row in rows)
            assert set(each["effect"]) == {"target", "placebo", "length_only", "gate"}
            assert all(set(row) == {"logprob", "kl", "settling_depth"} for row in each["effect"].values())
            wanted = "mean ci_low ci_high p_permutation p_signflip p_wilcoxon p_attainable n"
            assert set(wanted.split()) <= set(each["contrast"])
    assert {"by_k", "selectivity", "deep_ratio"} <= set(found)
    assert all({"k", "effect", "ci_low", "ci_high", "n"} <= set(row) for row in found["by_k"])
    assert ran.summary["contrasts"]["bound"]["contrast"]["n"] == 2  # of three items, two are answered


def test_of_a_run_the_contrast_is_that_of_its_table(ran):
    arms = ran.arms()
    for on in placebo.MATCH_ON:
        found = ran.summary["contrasts"][on]
        d = differences(arms, (0, 1), "delta_logprob", on)
        p, attainable = brute_force(arms, (0, 1), "delta_logprob", on)
        row = found["contrast"]
        assert (row["mean"], row["p_permutation"], row["p_attainable"]) == pytest.approx((d.mean(), p, attainable))
        table = ran.contrasts()
        mine = table[(table["match_on"] == on) & table["confirmatory"]].iloc[0]
        assert mine["mean"] == row["mean"] and mine["outcome"] == "logprob"


def test_the_primary_test_permutes_among_placebos_that_share_no_key():
    """Mean and interval are of all placebos; p is that of a table without those that share keys."""
    arms = made(items=4, k=3)
    few = arms.assign(tested=(arms["arm"] != "placebo") | (arms["number"] + arms["item"] % 2 < 2))
    found = summed(few)["bound"]["contrast"]
    whole = summed(arms)["bound"]["contrast"]
    alone = summed(few[few["tested"]])["bound"]["contrast"]
    assert [found[name] for name in ("mean", "ci_low", "ci_high", "p_signflip", "p_wilcoxon")] == pytest.approx(
        [whole[name] for name in ("mean", "ci_low", "ci_high", "p_signflip", "p_wilcoxon")]
    )
    assert found["p_permutation_all"] == whole["p_permutation"] != found["p_permutation"]
    assert (found["p_permutation"], found["p_attainable"]) == (alone["p_permutation"], alone["p_attainable"])
    assert (found["tested"], whole["tested"]) == (1.5, 3.0)
