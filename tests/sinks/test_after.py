"""Scores after a mask against float64 loops over plain attention rows, read three ways."""

import sys

import catalogue
import numpy as np
import pytest

from kvprobe import KVMask, KVPatch, ValueGate, intervene, observe, prefill, sinks
from kvprobe.errors import InterventionError, TheoryError
from kvprobe.prompts import Prompt

N, SUFFIX = 26, 8
FORCED = (41, 300, 7)
FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss")
CUT = [(3, 6), (12, 16)]


def prompt(pad=0):
    ids = catalogue.ids(3, N)
    return Prompt.from_ids([0] * pad + ids, attention_mask=[0] * pad + [1] * N)


def arms(model, pad=0, cut=CUT, **more):
    given = prompt(pad)
    spans = [(start + pad, stop + pad) for start, stop in cut]
    masks = [KVMask(keys=[]), KVMask(keys=spans, **more)]
    return given, intervene(model, given, masks, suffix=SUFFIX, continuation=list(FORCED))


def loops(outcome, clean, rows, p):
    """Reading → (before, after), each (mass [L, H, n], norms, learned [L, H]), one row, head and key at a time."""
    arm, base = outcome.trace, clean.trace
    L, H, n = arm.n_layers, arm.n_heads, arm.n
    found = {name: (np.zeros((L, H, n)), np.zeros((L, H))) for name in ("clean", "corrected", "shares", "masked")}
    norms = {"before": np.zeros((L, H, n)), "after": np.zeros((L, H, n))}
    seen = np.zeros((L, n))
    for layer in range(L):
        mine, theirs = arm.layer(layer), base.layer(layer)
        keep = outcome.keep(layer)
        for head in range(H):
            for when, view in (("before", theirs), ("after", mine)):
                V = view.values[head * len(view.values) // H].double() @ view.w_o[head].double()
                norms[when][layer, head] = V.abs().sum(-1) if p == 1 else V.square().sum(-1).sqrt()
            for row in rows:
                a, b = arm.queries.index(row), base.queries.index(row)
                own, clean_logits = mine.logits[head, a].double().numpy(), theirs.logits[head, b].double().numpy()
                kept = keep[head, a].numpy()
                sink = -np.inf if mine.sink is None else float(mine.sink[head])
                plus, plus_sink = softmax(own, sink)
                base_row, base_sink = softmax(clean_logits, sink)
                cut_row, cut_sink = softmax(np.where(kept, own, -np.inf), sink)
                R = base_row[kept].sum() + base_sink
                add = {
                    "clean": (base_row, base_sink),
                    "corrected": (plus * kept, plus_sink),
                    "shares": (base_row * kept / R, base_sink / R),
                    "masked": (cut_row, cut_sink),
                }
                for name, (values, learned) in add.items():
                    found[name][0][layer, head] += values
                    found[name][1][layer, head] += learned / len(rows)
                seen[layer] += (clean_logits > -np.inf) / H
    mean = np.where(seen > 0, 1 / np.maximum(seen, 1), np.nan)[:, None]
    made = {name: (mass * mean, learned) for name, (mass, learned) in found.items()}
    pairs = {"corrected": ("clean", "corrected"), "conditional": ("shares", "masked"), "raw": ("clean", "masked")}
    return {
        reading: ((*made[one], norms["before"]), (*made[other], norms["after"]))
        for reading, (one, other) in pairs.items()
    }


def softmax(logits, sink):
    top = max(logits.max(), sink)
    weights = np.exp(logits - top)
    total = weights.sum() + np.exp(sink - top)
    return weights / total, np.exp(sink - top) / total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [0, 3])
def test_all_readings_equal_loops(tiny, family, pad):
    _, (clean, masked) = arms(tiny(family), pad)
    found = sinks.after(masked, clean, p=2 if pad else 1)
    rows = [row for row in masked.trace.queries if row in clean.trace.queries]
    slow = loops(masked, clean, rows, 2 if pad else 1)
    assert list(found) == ["corrected", "conditional", "raw"]
    for reading, pair in found.items():
        for scores, (mass, learned, norms) in zip(pair, slow[reading], strict=True):
            assert np.allclose(scores.mass, mass, atol=2e-6, equal_nan=True)
            assert np.allclose(scores.learned, learned, atol=2e-6)
            assert np.allclose(scores.norms[..., pad:], norms[..., pad:], rtol=1e-4, atol=1e-6)
            assert scores.queries == tuple(rows) and scores.pad == pad


def test_before_is_what_scores_say_of_the_clean_trace(tiny):
    model = tiny("gemma2")
    given, (clean, masked) = arms(model)
    trace = observe(model, given.extended(FORCED), list(range(N - SUFFIX, N + len(FORCED))))
    plain = sinks.scores(trace)
    for other in (clean, clean.trace, trace):
        before, _ = sinks.after(masked, other)["corrected"]
        assert np.allclose(before.mass, plain.mass, atol=1e-6, equal_nan=True)
        assert np.allclose(before.norms, plain.norms, rtol=1e-5) and np.array_equal(before.seen, plain.seen)


def test_a_cut_key_has_no_mass_and_survivors_of_the_conditional_reading_sum_to_one(tiny):
    _, (clean, masked) = arms(tiny("llama"))
    found = sinks.after(masked, clean)
    cut = [key for start, stop in CUT for key in range(start, stop)]
    assert all((pair[1].mass[..., cut] == 0).all() for pair in found.values())
    assert (found["conditional"][0].mass[..., cut] == 0).all() and (found["raw"][0].mass[..., cut] > 0).all()
    for scores in found["conditional"]:
        shares = np.nan_to_num(scores.mass) * scores.seen[:, None] / len(scores.queries)
        assert np.allclose(shares.sum(-1) + scores.learned, 1, atol=1e-5)


def test_the_first_masked_layer_changes_nothing_but_by_arithmetic(tiny):
    """Its logits are the clean run's: corrected is the clean mass of what is kept, conditional does not move."""
    _, (clean, masked) = arms(tiny("gpt_oss"), layers=1)
    found = sinks.after(masked, clean)
    cut = [key for start, stop in CUT for key in range(start, stop)]
    kept = np.ones(N + len(FORCED), dtype=bool)
    kept[cut] = False
    before, behind = found["corrected"]
    assert np.allclose(before.mass[1][:, kept], behind.mass[1][:, kept], atol=1e-6, equal_nan=True)
    before, behind = found["conditional"]
    assert np.allclose(before.mass[1], behind.mass[1], atol=1e-6, equal_nan=True)
    raw = found["raw"]
    assert np.nanmax(np.abs(raw[0].mass[1][:, kept] - raw[1].mass[1][:, kept])) > 1e-4


def test_masking_nothing_changes_nothing(tiny):
    _, (clean, _) = arms(tiny("mistral"))
    for before, behind in sinks.after(clean, clean).values():
        assert np.allclose(before.mass, behind.mass, atol=1e-6, equal_nan=True)
        assert np.array_equal(before.norms, behind.norms)


def test_chosen_rows_and_chunks(tiny, monkeypatch):
    _, (clean, masked) = arms(tiny("llama"))
    rows = [20, 22, 27]
    found, slow = sinks.after(masked, clean, rows=rows), loops(masked, clean, rows, 1)
    for reading, pair in found.items():
        for scores, (mass, _, _) in zip(pair, slow[reading], strict=True):
            assert np.allclose(scores.mass, mass, atol=2e-6, equal_nan=True)
    # The package's attribute of that name is the function.
    monkeypatch.setattr(sys.modules["kvprobe.sinks.after"], "BLOCK_BYTES", 1)
    again = sinks.after(masked, clean, rows=rows)
    for reading, pair in found.items():
        for one, other in zip(pair, again[reading], strict=True):
            assert np.allclose(one.mass, other.mass, atol=1e-12, equal_nan=True)
            assert np.array_equal(one.seen, other.seen)


def test_own_tokens_have_other_values_after_a_mask(tiny):
    _, (clean, masked) = arms(tiny("llama"))
    before, behind = sinks.after(masked, clean)["corrected"]
    context = slice(0, N - SUFFIX)
    assert np.array_equal(before.norms[..., context], behind.norms[..., context])
    assert not np.allclose(before.norms[1:, :, N - SUFFIX + 1 :], behind.norms[1:, :, N - SUFFIX + 1 :])


def test_what_is_refused(tiny):
    model = tiny("llama")
    given, (clean, masked) = arms(model)
    traceless = intervene(model, given, KVMask(CUT), suffix=SUFFIX, keep_trace=False)
    refused = {
        "finite beta": dict(outcome=arms(model, beta=1.0)[1][1], clean=clean),
        "patched": dict(outcome=patched(model, given), clean=clean),
        "kept no trace": dict(outcome=traceless, clean=clean),
        "outcome=": dict(outcome=clean.trace, clean=clean),
        "clean=3": dict(outcome=masked, clean=3),
        "share no rows": dict(outcome=masked, clean=observe(model, given, [3])),
        r"rows \[2\]": dict(outcome=masked, clean=clean, rows=[2, 20]),
    }
    for said, words in refused.items():
        with pytest.raises(InterventionError, match=said):
            sinks.after(words.pop("outcome"), words.pop("clean"), **words)
    with pytest.raises(TheoryError, match="epsilon"):
        sinks.after(masked, clean, epsilon=-1)
    with pytest.raises(TheoryError, match="p"):
        sinks.after(masked, clean, p=3)


def patched(model, given):
    patch = KVPatch((3, 6), prefill(model, Prompt.from_ids(catalogue.ids(9, N))))
    return intervene(model, given, patch, suffix=SUFFIX, continuation=list(FORCED))


def test_a_value_gate_leaves_norms_ungated(tiny):
    model = tiny("llama")
    given, (clean, _) = arms(model)
    gated = intervene(model, given, ValueGate([(3, 6)], 0.0), suffix=SUFFIX, continuation=list(FORCED))
    before, behind = sinks.after(gated, clean)["corrected"]
    assert np.array_equal(before.norms[..., 3:6], behind.norms[..., 3:6])
