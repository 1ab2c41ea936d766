"""Sweeps of α, ε and the norm: every value against the cells of that policy, and a task's score beside them."""

import math

import curve_runs
import numpy as np
import pandas as pd
import pytest
import small_documents as small

from kvprobe import audits, cells, eviction, maps, stats
from kvprobe.audits import Settings, Sweep, sweep
from kvprobe.audits.sweeps import VALUES, scores
from kvprobe.cells import Pair
from kvprobe.cells.reading import Reading
from kvprobe.errors import EvictionError, KVProbeError

BASE, OURS = (eviction.policy(name, **small.SMALL) for name in ("snapkv", "snapkv+two_stage"))
PAIR = Pair(BASE, OURS, "small")
CACHES = (0.25, 0.5)


@pytest.fixture(scope="module")
def docs():
    return [small.document(i, n=26 + i, stop=24 - i) for i in range(3)]


@pytest.fixture(scope="module")
def swept(tiny, docs):
    return {
        kind: sweep(tiny("llama"), docs, Sweep(kind, PAIR, values), CACHES, seed=3)
        for kind, values in (("alpha", (0.0, 0.25, 1.0)), ("epsilon", (0.0, 1e-2)), ("norm", (1, 2)))
    }


@pytest.mark.parametrize(("kind", "field"), [("alpha", "alpha"), ("epsilon", "epsilon"), ("norm", "p")])
def test_every_row_is_the_map_of_that_policy(kind, field, swept, tiny, docs):
    table = swept[kind]
    assert table["value"].tolist() == [*table["value"].unique()] * 2 and table["cache"].unique().tolist() == [0.25, 0.5]
    for row in table.to_dict("records"):
        value = int(row["value"]) if kind == "norm" else row["value"]
        policy = eviction.policy("snapkv+two_stage", **small.SMALL, **{field: value})
        heads = maps.per_head(tiny("llama"), docs, BASE, policy, row["cache"])
        change = heads.assign(change=heads["L_ours"] - heads["L_base"])
        by_doc = change.groupby("doc")["change"].mean()
        by_head = change.groupby(["layer", "head"])["change"].mean()
        assert row["L"] == pytest.approx(heads["L_ours"].mean(), rel=1e-5)
        assert row["base_L"] == pytest.approx(heads["L_base"].mean(), rel=1e-5)
        assert row["bound"] == pytest.approx(heads["bound_ours"].mean(), rel=1e-5)
        assert row["centred_bound"] == pytest.approx(heads["centred_ours"].mean(), rel=1e-5)
        assert row["change"] == pytest.approx(row["L"] - row["base_L"], abs=1e-9)
        interval = stats.mean_interval(by_doc.to_numpy(), seed=3)
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((interval.low, interval.high), rel=1e-3, abs=1e-6)
        assert row["heads_reduced"] == pytest.approx((by_head < -1e-12).mean())
        assert (row["sweep"], row["preset"], row["n_docs"]) == (kind, "small", 3)
        assert row["n_tokens"] == 23 and row["epsilon_n"] == pytest.approx(23 * policy.selector.epsilon)


def test_alpha_one_is_the_base(swept):
    last = swept["alpha"][swept["alpha"]["value"] == 1.0]
    assert len(last) == 2 and (last["L"] == last["base_L"]).all()
    assert (last[["change", "ci_low", "ci_high", "heads_reduced"]] == 0).all(axis=None)
    first = swept["alpha"][swept["alpha"]["value"] == 0.0]
    assert (first["L"] != first["base_L"]).all()


def test_epsilon_times_n_is_what_is_swept(swept):
    assert swept["epsilon"]["epsilon_n"].tolist() == [0.0, 0.23] * 2
    assert swept["alpha"]["epsilon_n"].unique().tolist() == pytest.approx([23e-4])


@pytest.mark.parametrize(("kind", "own"), [("alpha", 0.5), ("epsilon", 1e-4), ("norm", 1)])
def test_the_usual_values_hold_the_published_one(kind, own):
    found = Sweep(kind, PAIR)
    assert own in found.taken and found.taken == VALUES[kind] and len(found.policies) == len(VALUES[kind])
    assert len({policy.name for policy in found.policies}) == len(found.policies)
    at = found.policies[found.taken.index(own)]
    assert at.selector == OURS.selector and at.scorer == OURS.scorer


def test_the_other_settings_are_those_of_the_pair():
    pair = Pair(BASE, eviction.policy("snapkv+two_stage", **small.SMALL, alpha=0.3, epsilon=0.7, p=2))
    for policy in Sweep("alpha", pair).policies:
        assert (policy.selector.epsilon, policy.selector.p, policy.scorer) == (0.7, 2, BASE.scorer)
    for policy in Sweep("epsilon", pair).policies:
        assert policy.selector.alpha == 0.3


def test_both_ends_of_a_sweep_of_one_value(tiny, docs):
    one = sweep(tiny("llama"), docs, Sweep("alpha", PAIR, (0.25,)), CACHES, seed=3)
    many = sweep(tiny("llama"), docs, Sweep("alpha", PAIR, (1.0, 0.25)), CACHES, seed=3)
    pd.testing.assert_frame_equal(one, many[many["value"] == 0.25].reset_index(drop=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sweep("beta", PAIR), "sweep='beta'; allowed: alpha, epsilon, norm"),
        (lambda: Sweep("alpha", Pair(OURS, BASE)), "snapkv has no alpha to sweep"),
        (lambda: Sweep("alpha", PAIR, ()), "allowed: one or more, each once"),
        (lambda: Sweep("alpha", PAIR, (0.5, 0.5)), "allowed: one or more, each once"),
        (lambda: Sweep("alpha", PAIR, (1.5,)), "alpha=1.5"),
        (lambda: Sweep("norm", PAIR, (3,)), "p=3"),
    ],
)
def test_refusals(make, said):
    with pytest.raises(EvictionError, match=said):
        make()


@pytest.mark.parametrize(("more", "said"), [({}, "always keeps"), ({"task": "niah_multikey_1", "items": 1}, "512")])
def test_what_a_sweep_cannot_do_is_known_before_the_audit_runs(more, said, tiny, monkeypatch):
    """Its sizes (10 and 20 %) are not those of the audit, and its task is longer than this model reads."""
    wide = Pair(eviction.policy("snapkv", window=6, kernel=3), eviction.policy("snapkv+two_stage", window=6, kernel=3))
    pair = PAIR if more else wide
    given = {"items": 0} | more
    asked = Settings((pair,), ("0.5",), sweeps=("alpha",), reading=Reading([small.document(0, n=40, stop=38)]), **given)

    def run(*things, **named):
        raise AssertionError("a document was run")

    monkeypatch.setattr(cells, "probe", run)
    with pytest.raises(KVProbeError, match=said):
        audits.validate(tiny("llama"), asked)


def test_a_sweep_over_a_context_that_is_too_short_is_refused_before_it_runs(tiny, monkeypatch):
    monkeypatch.setattr(cells, "probe", None)
    with pytest.raises(EvictionError, match="no entry at all"):
        sweep(tiny("llama"), [small.document(0)], Sweep("alpha", PAIR), ["0.01"])


@pytest.mark.parametrize(
    ("what", "caches", "said"),
    [
        ("alpha", ["0.5"], "'alpha' is no sweep"),
        (Sweep("alpha", PAIR), [], "caches=.*one or more"),
        (Sweep("alpha", PAIR), 0.2, "caches=0.2; allowed: a list"),
    ],
)
def test_what_is_no_sweep_or_no_list_is_refused_before_it_runs(what, caches, said, tiny, monkeypatch):
    monkeypatch.setattr(cells, "probe", None)
    with pytest.raises(EvictionError, match=said):
        sweep(tiny("llama"), [small.document(0)], what, caches)


def test_scores_stand_beside_the_values(tiny, monkeypatch):
    """Rows against the run's own; the base under NaN, the whole cache apart."""
    from kvprobe.audits import sweeps

    class Small(curve_runs.Small):
        def __init__(self, policies, caches, task, length, items, seed, setting):
            given = {"task": task, "length": length, "items": items, "seed": seed, "setting": setting}
            super().__init__(policies=policies, caches=caches, **given)

    monkeypatch.setattr(sweeps.curves, "Settings", Small)
    what = Sweep("alpha", PAIR, (0.0, 1.0))
    table = scores(tiny("llama"), what, ("0.5", "0.8"), items=3)
    values = table["value"].tolist()
    assert len(table) == 6 and sum(map(math.isnan, values)) == 2 and set(table["sweep"]) == {"alpha"}
    base, last = table[table["value"].isna()], table[table["value"] == 1.0]
    columns = ["cache", "score", "delta_logprob", "logprob_low", "logprob_high"]
    pd.testing.assert_frame_equal(
        base[columns].reset_index(drop=True), last[columns].reset_index(drop=True), rtol=1e-4, atol=1e-4
    )
    assert sorted(base["cache"]) == [0.5, 0.8] and (table["n"] == 3).all()
    assert (table["logprob_low"] <= table["delta_logprob"]).all() and (
        table["delta_logprob"] <= table["logprob_high"]
    ).all()
    assert set(table.attrs["full"]) >= {"score"} and np.isfinite(table["delta_logprob"]).all()


def test_a_runs_sweeps_are_of_the_first_pair_of_every_preset(tiny, docs):
    tova = Pair(eviction.policy("tova"), eviction.policy("tova+two_stage"), "small")
    other = Pair(BASE, OURS, "other")
    asked = Settings((PAIR, tova, other), ("0.5",), sweeps=("norm",), items=0, reading=Reading(docs))
    assert [(each.kind, each.pair) for each in asked.swept()] == [("norm", PAIR), ("norm", other)]
    result = audits.run(tiny("llama"), asked)
    expected = [sweep(tiny("llama"), docs, each) for each in asked.swept()]
    pd.testing.assert_frame_equal(result.sweeps, pd.concat(expected, ignore_index=True), rtol=1e-6)
    assert result.scores is None and len(result.summary["sweeps"]) == 8 and result.summary["scores"] == []
