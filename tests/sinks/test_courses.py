"""Time courses against loops over the attention of plain, step-by-step generation."""

import sys

import catalogue
import numpy as np
import pytest
from oracles import PROJECTIONS
from small_documents import rows_of

from kvprobe import KVMask, intervene, prefill, sinks
from kvprobe.errors import InterventionError, PromptError, TheoryError
from kvprobe.prompts import Prompt

N = 24
SPANS = {"evidence": [(6, 9)], "D": [(2, 5), (8, 12)], "absent": []}
FAMILIES = ("llama", "gpt2", "mistral", "gpt_oss")
assert PROJECTIONS


def prompt(pad=0):
    ids = catalogue.ids(5, N)
    return Prompt.from_ids([0] * pad + ids, attention_mask=[0] * pad + [1] * N)


def bucket(key, first=4):
    """By hand: first4 > evidence > D > other; what was generated is no part of the prompt."""
    if key >= N:
        return "generated"
    if key < first:
        return "first4"
    return "evidence" if 6 <= key < 9 else "D" if key == 4 or 9 <= key < 12 else "other"


def generated(model, given, count=4):
    return intervene(model, given, KVMask(keys=[]), suffix=1, generate=count).generated


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [0, 2])
def test_every_row_equals_plain_transformers(tiny, plain, family, pad):
    """Row t is the last query of an eager run of the prompt and the t tokens before; float64 sums."""
    model, given = tiny(family), prompt(pad)
    spans = {name: [(a + pad, b + pad) for a, b in found] for name, found in SPANS.items()}
    tokens = generated(model, given)
    assert len(tokens) >= 2
    table = sinks.courses(model, given, spans, tokens, p=1)
    ids = given.ids[pad:].tolist()
    for token in range(len(tokens)):
        layers = rows_of(plain(family), [*ids, *tokens[:token]])
        mine = table[table["token"] == token]
        for layer, (A, V, W) in enumerate(layers):
            for head, row in enumerate(A):
                m = np.abs(V[head * len(V) // len(A)] @ W[head]).sum(-1)
                got = mine[(mine["layer"] == layer) & (mine["head"] == head)].set_index("bucket")
                for name in ("first4", "evidence", "D", "other", "generated"):
                    keys = [key for key in range(len(row)) if bucket(key) == name]
                    mass, value = sum(row[key] for key in keys), sum(row[key] * m[key] for key in keys)
                    assert got.loc[name, "mass"] == pytest.approx(mass, abs=1e-5)  # float32 runs of other shapes
                    assert got.loc[name, "value"] == pytest.approx(value, rel=1e-4, abs=1e-4)
                    if mass > 1e-4:
                        assert got.loc[name, "ratio"] == pytest.approx(value / mass, rel=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_masses_of_a_row_sum_to_one_and_a_learned_sink_is_among_them(tiny, family):
    model, given = tiny(family), prompt()
    table = sinks.courses(model, given, SPANS, [7, 8, 9])
    sums = table.groupby(["token", "layer", "head"])["mass"].sum()
    assert len(sums) == 3 * 3 * 6 and np.allclose(sums, 1, atol=1e-5)
    assert ("learned_sink" in set(table["bucket"])) == (family == "gpt_oss")
    learned = table[table["bucket"] == "learned_sink"]
    assert (learned["value"] == 0).all() and (learned["n_tokens"] == 0).all() and (learned["mass"] > 0).all()


def test_rows_predict_their_token_and_count_what_they_see(tiny):
    model, given = tiny("mistral"), prompt()  # a window of 5
    table = sinks.courses(model, given, SPANS, [70, 71, 72])
    assert list(table.columns) == [
        "token",
        "position",
        "text",
        "layer",
        "head",
        "bucket",
        "n_tokens",
        *("mass", "value", "ratio"),
    ]
    assert table.groupby("token")["position"].unique().map(list).tolist() == [[N - 1], [N], [N + 1]]
    texts = Prompt.from_ids([70, 71, 72]).tokens(model)
    assert table.groupby("token")["text"].unique().map(list).tolist() == [[text] for text in texts]
    seen = table.groupby(["token", "layer", "head"])["n_tokens"].sum()
    assert set(seen) == {5}
    assert table[table["bucket"] == "generated"].groupby("token")["n_tokens"].max().tolist() == [0, 1, 2]
    empty = table[(table["bucket"] == "first4")]
    assert (empty["mass"] == 0).all() and empty["ratio"].isna().all()
    assert "absent" not in set(table["bucket"])


def test_a_prefix_and_blocks_of_rows_change_nothing(tiny, monkeypatch):
    model, given = tiny("gemma2"), prompt()
    whole = sinks.courses(model, given, SPANS, [7, 8, 9, 10], p=2)
    shared = sinks.courses(model, given, SPANS, [7, 8, 9, 10], prefix=prefill(model, given), p=2)
    monkeypatch.setattr(sys.modules["kvprobe.sinks.courses"], "BLOCK_BYTES", 1)
    single = sinks.courses(model, given, SPANS, [7, 8, 9, 10], p=2)
    for other in (shared, single):
        assert whole.drop(columns=["mass", "value", "ratio"]).equals(other.drop(columns=["mass", "value", "ratio"]))
        for name in ("mass", "value", "ratio"):
            assert np.allclose(whole[name], other[name], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_one_token_needs_nothing_behind_the_prompt(tiny):
    model, given = tiny("llama"), prompt()
    one, many = (sinks.courses(model, given, {}, tokens) for tokens in ([7], [7, 8]))
    first = many[many["token"] == 0].reset_index(drop=True)
    assert set(one["bucket"]) == {"first4", "generated", "other"}
    assert np.allclose(one["mass"], first["mass"], atol=1e-6) and one["token"].eq(0).all()


@pytest.mark.parametrize(
    ("spans", "tokens", "p", "said"),
    [
        (SPANS, [], 1, "tokens is empty"),
        ({"other": [(1, 2)]}, [7], 1, "'other'"),
        ({"first4": [(1, 2)]}, [7], 1, "'first4'"),
        ({"E": [(3, 99)]}, [7], 1, "99"),
        (SPANS, [999], 1, "999"),
        (SPANS, ["x"], 1, "x"),
        (SPANS, [7], 3, "3"),
    ],
)
def test_what_is_refused(tiny, spans, tokens, p, said):
    with pytest.raises((PromptError, TheoryError, InterventionError), match=said):
        sinks.courses(tiny("llama"), prompt(), spans, tokens, p=p)
    with pytest.raises(TheoryError, match="prompt='x'; allowed: a Prompt"):
        sinks.courses(tiny("llama"), "x", {}, [7])
