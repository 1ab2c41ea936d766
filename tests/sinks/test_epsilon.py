"""The ε sweep: value masses that grow as ε Σ m, and a ratio that ε turns into rarity, against scipy and loops."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import mannwhitneyu, spearmanr
from sink_traces import TRACES, row_trace, slow_scores

from kvprobe import sinks
from kvprobe.errors import TheoryError

EVIDENCE = [(8, 13), (20, 22)]


def made(kind, layers=None, epsilons=sinks.EPSILONS):
    trace = row_trace(**kind)
    found = sinks.scores(trace)
    sorted_ = sinks.buckets(40, evidence=EVIDENCE, pad=kind.get("pad", 0))
    return trace, found, sorted_, sinks.epsilon_sweep(found, sorted_, epsilons, layers)


@pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
@pytest.mark.parametrize("layers", [None, [1]])
def test_against_scipy_and_loops(kind, layers):
    trace, _, sorted_, sweep = made(kind, layers)
    mass, m, seen, _ = slow_scores(trace)
    chosen = [0, 1] if layers is None else layers
    assert [row["epsilon"] for row in sweep] == [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    for row in sweep:
        e = row["epsilon"]
        for name in ("first4", "evidence", "other"):
            keys = sorted_.keys[name]
            sums, tokens = [], []
            for layer in chosen:
                for h in range(trace.n_heads):
                    each = [(mass[layer, h, j] + e) * m[layer, h, j] for j in keys if seen[layer, j]]
                    sums.append(sum(each))
                    tokens.append(sum(each) / len(each))
            assert_allclose(row["value_mass"][name], np.mean(sums), rtol=1e-9)
            assert_allclose(row["value_mass_per_token"][name], np.mean(tokens), rtol=1e-9)
        pooled = [
            np.mean([np.mean((mass[la, :, j] + e) * m[la, :, j]) for la in chosen if seen[la, j]] or [np.nan])
            for j in range(40)
        ]
        E, F = ([pooled[j] for j in sorted_.keys[name] if pooled[j] == pooled[j]] for name in ("evidence", "first4"))
        assert_allclose(row["auroc"], mannwhitneyu(E, F).statistic / (len(E) * len(F)), rtol=1e-12)
        found = {"spearman_value_mass": [], "spearman_ratio_mass": [], "spearman_ratio_norm": []}
        for layer in chosen:
            for h in range(trace.n_heads):
                s, n = (x[layer, h, seen[layer] > 0] for x in (mass, m))
                found["spearman_value_mass"].append(spearmanr((s + e) * n, s * n).statistic)
                found["spearman_ratio_mass"].append(spearmanr(n * (1 + e / s), -s).statistic)
                found["spearman_ratio_norm"].append(spearmanr(n * (1 + e / s), n).statistic)
        for name, values in found.items():
            assert_allclose(row[name], np.mean(values), rtol=1e-9)


def test_no_epsilon_is_the_ratio_itself_and_a_large_one_is_rarity():
    _, _, _, (none, large) = made({}, epsilons=(0, 1e6))
    assert none["spearman_value_mass"] == pytest.approx(1) and none["spearman_ratio_norm"] == pytest.approx(1)
    assert large["spearman_ratio_mass"] > 0.8 > none["spearman_ratio_mass"]


def test_value_mass_is_linear_in_epsilon():
    _, found, _, (zero, one, three) = made({"window": 6}, epsilons=(0, 1, 3))
    for name, base in zero["value_mass"].items():
        assert_allclose(three["value_mass"][name] - base, 3 * (one["value_mass"][name] - base), rtol=1e-12)
    assert set(zero["value_mass"]) == {"first4", "evidence", "other"}
    assert found.epsilon == 1e-4  # the sweep leaves the scores as they were


def test_without_evidence_there_is_nothing_to_compare():
    found = sinks.scores(row_trace())
    row = sinks.epsilon_sweep(found, sinks.buckets(40), [0.1])[0]
    assert row["auroc"] is None and "evidence" not in row["value_mass"]


def test_a_learned_sink_carries_nothing_at_any_epsilon():
    _, _, _, sweep = made({"sink": True})
    assert {row["value_mass"]["learned_sink"] for row in sweep} == {0.0}


def test_a_bucket_that_no_row_sees():
    """Behind a window: no value mass, and no mean per token instead of a 0."""
    found = sinks.scores(row_trace(window=6), rows=[38, 39])
    row = sinks.epsilon_sweep(found, sinks.buckets(40, evidence=EVIDENCE), [0.1], layers=[1])[0]
    assert row["value_mass"]["first4"] == 0 and row["value_mass_per_token"]["first4"] is None
    assert row["auroc"] is None


def test_ranks_that_do_not_vary():
    mass, norms = np.full((1, 2, 3), 1 / 3), np.ones((1, 2, 3))
    flat = sinks.Scores(mass, norms, np.ones((1, 3), dtype=int), np.zeros((1, 2)), (2,))
    row = sinks.epsilon_sweep(flat, sinks.buckets(3), [1e-4])[0]
    assert [row[name] for name in row if name.startswith("spearman")] == [None] * 3


def test_what_is_refused():
    found = sinks.scores(row_trace())
    with pytest.raises(TheoryError, match="epsilons is empty; allowed: a list of one or more"):
        sinks.epsilon_sweep(found, sinks.buckets(40), [])
    for single in (1e-4, "1e-4", None, {1e-4}):
        with pytest.raises(TheoryError, match=r"epsilons=.*; allowed: a list of one or more numbers from 0 to 1e\+06"):
            sinks.epsilon_sweep(found, sinks.buckets(40), single)
    for wrong in (-1, 1e7, "x"):
        with pytest.raises(TheoryError, match=r"epsilon=.*; allowed: a number from 0 to 1e\+06"):
            sinks.epsilon_sweep(found, sinks.buckets(40), [0, wrong])
    for layers in ([9], [], [0, 0], 1, ["0"]):
        with pytest.raises(TheoryError, match=r"layers=.*; allowed: one or more of 0 … 1, each once"):
            sinks.epsilon_sweep(found, sinks.buckets(40), layers=layers)
    for scores, buckets, name in (("x", sinks.buckets(40), "scores"), (found, "x", "buckets")):
        with pytest.raises(TheoryError, match=f"{name}='x'; allowed: what sinks.{name} returns"):
            sinks.epsilon_sweep(scores, buckets)
