"""Rows, changes and paired differences of made-up answers, against formulas and enumeration."""

import itertools
import json
import math

import curve_runs
import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvprobe import records
from kvprobe.curves import Settings, summarise
from kvprobe.curves.summary import worst_receipt
from kvprobe.eviction import policy

NAMES = ("snapkv+two_stage", "streaming", "snapkv")
CACHES = ("0.4", "1/5")


def settings(names=NAMES, caches=CACHES, seed=0):
    return Settings(tuple(policy(name) for name in names), caches, seed=seed)


def made(n=6, seed=0, caches=CACHES, **more):
    rng = np.random.default_rng(seed)
    scores = {name: [list(rng.integers(0, 5, n) / 4) for _ in caches] for name in NAMES} | {"full": [[1.0] * n]}
    logprobs = {name: [list(rng.normal(-5, 2, n)) for _ in by] for name, by in scores.items()}
    return scores, logprobs, curve_runs.answers(scores, logprobs, caches=caches, **more)


def test_one_row_a_policy_and_size_in_the_order_asked_for():
    _, _, answers = made()
    rows = summarise(answers, settings())["rows"]
    assert [(row["policy"], row["cache"]) for row in rows] == [(name, c) for name in NAMES for c in (0.4, 0.2)]
    assert all({"score", "ci_low", "ci_high", "n", "method", "kept", "delta_logprob"} <= set(row) for row in rows)


def test_rows_are_means_with_t_intervals_and_changes_within_the_item():
    scores, logprobs, answers = made(n=6)
    for row in summarise(answers, settings())["rows"]:
        place = [0.4, 0.2].index(row["cache"])
        values = np.array(scores[row["policy"]][place])
        half = scipy_stats.t.ppf(0.975, 5) * values.std(ddof=1) / math.sqrt(6)
        assert row["score"] == pytest.approx(sum(values) / 6) and row["n"] == 6 and row["method"] == "t"
        assert row["ci_low"] == pytest.approx(max(0, values.mean() - half))
        assert row["ci_high"] == pytest.approx(min(1, values.mean() + half))
        pairs = zip(logprobs[row["policy"]][place], logprobs["full"][0], strict=True)
        assert row["delta_logprob"] == pytest.approx(sum(a - b for a, b in pairs) / 6)
        assert row["kept"] == pytest.approx(np.mean([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))


def test_items_that_all_agree_have_an_honest_interval():
    _, logprobs, answers = made(n=5)
    full = summarise(answers, settings())["full"]
    assert (full["score"], full["ci_high"], full["n"]) == (1.0, 1.0, 5)
    assert full["ci_low"] == pytest.approx(0.025 ** (1 / 5))  # Clopper–Pearson: the share for which 5 of 5 is 2.5 %
    assert full["method"].startswith("Clopper-Pearson") and full["logprob"] == pytest.approx(np.mean(logprobs["full"]))


def test_ten_items_or_more_have_a_bootstrap_interval():
    scores, _, answers = made(n=14, seed=3)
    row = summarise(answers, settings())["rows"][0]
    sample = (np.array(scores[NAMES[0]][0]),)
    theirs = scipy_stats.bootstrap(sample, np.mean, method="BCa", n_resamples=20_000, rng=1).confidence_interval
    assert row["method"] == "BCa" and row["n"] == 14
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_pairs_are_differences_within_items_with_every_sign_enumerated():
    scores, logprobs, answers = made(n=6, seed=1)
    pairs = summarise(answers, settings())["pairs"]
    asked = [(row["policy"], row["base"], row["cache"], row["measure"]) for row in pairs]
    assert asked == [("snapkv+two_stage", "snapkv", c, m) for c in (0.4, 0.2) for m in ("score", "logprob")]
    for row in pairs:
        table, place = {"score": scores, "logprob": logprobs}[row["measure"]], [0.4, 0.2].index(row["cache"])
        both = zip(table["snapkv+two_stage"][place], table["snapkv"][place], strict=True)
        values = np.array([ours - theirs for ours, theirs in both])
        half = scipy_stats.t.ppf(0.975, 5) * values.std(ddof=1) / math.sqrt(6)
        assert row["difference"] == pytest.approx(values.mean()) and row["n"] == 6
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((values.mean() - half, values.mean() + half))
        signs = [abs(np.dot(each, values)) for each in itertools.product((-1, 1), repeat=6)]
        extreme = [each >= abs(values.sum()) - 1e-12 for each in signs]
        assert row["p_sign_flip"] == pytest.approx(sum(extreme) / 64)
        assert row["p_attainable"] == pytest.approx(sum(each >= max(signs) - 1e-12 for each in signs) / 64)


@pytest.mark.parametrize(
    ("names", "bases"),
    [
        (("snapkv", "streaming"), []),
        (("snapkv+two_stage", "streaming"), []),
        (("adakv+two_stage", "snapkv", "adakv", "snapkv+two_stage"), ["snapkv+adakv", "snapkv"]),
    ],
)
def test_only_policies_that_differ_in_the_second_stage_are_paired(names, bases):
    asked = settings(names, ("0.2",))
    scores = {name: [[0.5, 1.0, 0.0]] for name in asked.names} | {"full": [[1.0, 1.0, 1.0]]}
    logprobs = {name: [[-1.0, -2.0, -3.0]] for name in scores}
    pairs = summarise(curve_runs.answers(scores, logprobs, caches=("0.2",)), asked)["pairs"]
    assert [row["base"] for row in pairs[::2]] == bases and len(pairs) == 2 * len(bases)
    assert all(row["difference"] == 0 and row["p_sign_flip"] == 1 for row in pairs)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_json_holds_no_nan(n):
    found = strict(records.to_json(summarise(made(n=n)[2], settings())))
    assert all(row["n"] == n for row in found["rows"])
    if n == 1:
        assert all(row["ci_low"] is None and row["ci_high"] is None for row in [*found["rows"], found["full"]])
        assert all(row["ci_low"] is None for row in found["pairs"])


def test_notes_are_told_as_they_are_or_as_their_mean_over_items():
    def notes(policy, cache, item):
        if policy == "streaming":
            return {"fallback": cache == "0.4" or item == 0, "share": 0.2 + 0.1 * item, "streaming_heads": 3}
        return {}

    rows = summarise(made(n=4, notes=notes)[2], settings())["rows"]
    assert [row.get("notes") for row in rows[:2] + rows[4:]] == [None] * 4
    always, partly = (row["notes"] for row in rows[2:4])
    assert always["fallback"] is True and partly["fallback"] == 0.25  # one item of four
    assert always["streaming_heads"] == partly["streaming_heads"] == 3
    assert always["share"] == pytest.approx(0.35)


def test_the_seed_is_that_of_the_run():
    """Bootstrap intervals follow from the run's seed, and from nothing else."""
    _, _, answers = made(n=14, seed=3)
    ends = [summarise(answers, settings(seed=seed))["rows"][0]["ci_low"] for seed in (0, 0, 1)]
    assert ends[0] == ends[1] != ends[2]


def test_the_worst_receipt_is_the_smallest(tiny):
    from kvprobe import curves

    asked = curve_runs.settings(policies=curve_runs.policies()[:2], caches=("0.5", "1"))
    result = curves.run(tiny("llama"), asked)
    every = [answer.smallest_retained for item in result.items for answer in item.answers]
    assert result.summary["smallest_retained"] == worst_receipt([a for i in result.items for a in i.answers])
    assert result.summary["smallest_retained"] == min(every) < 1.0


def test_a_run_lays_every_answer_out_once(tiny):
    from kvprobe import curves

    asked = curve_runs.settings(policies=curve_runs.policies()[:2], caches=("0.5", "1"))
    result = curves.run(tiny("llama"), asked)
    table, rows, pairs = result.answers(), result.rows(), result.pairs()
    assert len(table) == 3 * (1 + 2 * 2) and len(rows) == 4 and len(pairs) == 4
    assert list(table.columns) == ["item", "policy", "cache", "kept", "score", "logprob", "text", "smallest_retained"]
    wanted = {"policy", "cache", "score", "ci_low", "ci_high", "n"}
    assert wanted <= set(rows) and wanted <= set(strict(records.to_json(result.summary))["rows"][0])
    about = result.summary
    assert (about["task"], about["n_items"], about["setting"]) == ("niah_single_1", 3, "context")
    assert about["semantics"].startswith("prefill-then-evict") and about["policies"][1]["selector"]["alpha"] == 0.5
    assert all(
        about["timings_s"][name] >= 0 for name in ("prefill_and_scores_s", "selection_s", "answers_s", "items_s")
    )
    again = curves.run(tiny("llama"), asked)
    assert result.answers().equals(again.answers()) and about["rows"] == again.summary["rows"]
