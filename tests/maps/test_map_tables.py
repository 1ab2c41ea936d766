"""Maps of heads, layers and sizes against loops over plain transformers, two runs of it, and the cells."""

import numpy as np
import pandas as pd
import pytest
import small_documents as small
import torch
from plain_streams import plain_streams
from small_documents import behind

from kvprobe import cells, eviction, maps
from kvprobe.errors import EvictionError, PromptError, TaskError, TheoryError

FAMILIES = ("llama", "gemma2", "gpt_oss")
families = pytest.mark.parametrize("family", FAMILIES)
both_norms = pytest.mark.parametrize("p", [1, 2])
CACHES = (0.25, 0.5)
BASE, OURS = (eviction.policy(name, **small.SMALL) for name in ("snapkv", "snapkv+two_stage"))
SIDES = {"base": BASE, "ours": OURS}


def forbid(monkeypatch):
    """Nothing may be run."""

    def run(*given, **more):
        raise AssertionError("a document was run")

    monkeypatch.setattr(cells, "probe", run)
    monkeypatch.setattr("kvprobe.engine.prefill", run)


@families
@both_norms
def test_heads_are_loops_over_plain_transformers(family, p, tiny, plain):
    model, docs = tiny(family), small.documents_for(family, 2)
    table = maps.per_head(model, docs, BASE, OURS, list(CACHES), p=p)
    names = {"L": "perturbation", "bound": "bound", "centred": "centred_bound", "mass": "mass"}
    assert list(table) == ["doc", "layer", "head", "cache", *(f"{name}_{side}" for name in names for side in SIDES)]
    assert len(table) == len(docs) * len(CACHES) * 18 and not table.isna().any(axis=None)
    for doc in docs:
        ids, stop = small.whole(plain(family), doc)
        layers = small.rows_of(plain(family), ids)
        for side, policy in SIDES.items():
            for cache in CACHES:
                keep = policy.select(model, ids[:stop], cache)
                for layer, (A, V, W) in enumerate(layers):
                    for head in range(6):
                        kept = behind(keep[layer, head * keep.shape[1] // 6], len(ids))
                        truth = small.head_measures(A[head], V[head * len(V) // 6], W[head], kept, p)
                        at = (table["doc"] == doc.name) & (table["cache"] == cache)
                        row = table[at & (table["layer"] == layer) & (table["head"] == head)]
                        mine = [row[f"{name}_{side}"].item() for name in names]
                        if truth["retained"] > 1e-3:  # below, an fp32 row has lost the sink's digits
                            np.testing.assert_allclose(mine, [truth[n] for n in names.values()], rtol=5e-3, atol=1e-3)
    differ = (table["L_base"] - table["L_ours"]).abs() > 1e-3
    assert differ.sum() > 5


@families
@both_norms
@pytest.mark.parametrize("measure", ["attn_out", "hidden"])
def test_layers_are_two_runs_of_plain_transformers(family, p, measure, tiny, plain):
    """Everything behind the context loses what was evicted, on all layers, under a 4-D mask made by loops."""
    model, docs = tiny(family), small.documents_for(family, 2)
    table = maps.per_layer(model, docs, BASE, OURS, 0.25, measure=measure, p=p)
    assert list(table) == ["doc", "layer", "cache", "base", "ours"] and len(table) == 2 * 3
    moved = 0.0
    for doc in docs:
        ids, stop = small.whole(plain(family), doc)
        place = ("attn_out", "hidden").index(measure)
        whole = plain_streams(plain(family), ids)[place][:, -1].double()
        for side, policy in SIDES.items():
            mask = small.table_of(policy.select(model, ids[:stop], 0.25), len(ids), 6)
            change = plain_streams(plain(family), ids, mask)[place][:, -1].double() - whole
            expected = [small.size(each.numpy(), p) for each in change]
            mine = table[table["doc"] == doc.name].sort_values("layer")[side]
            np.testing.assert_allclose(mine, expected, rtol=5e-3, atol=5e-3)
            moved = max(moved, *expected)
    assert moved > 0.5


def test_local_layers_are_the_cells_and_not_the_run(tiny):
    docs = small.documents_for("llama", 2)
    local, ran = (maps.per_layer(tiny("llama"), docs, BASE, OURS, 0.25, measure=m) for m in ("local", "attn_out"))
    for doc in docs:
        for side, policy in SIDES.items():
            probed = cells.probe(tiny("llama"), doc, [policy])
            expected = cells.measure(probed, [cells.Arm(policy, "0.25")]).layers["perturbation"]
            np.testing.assert_allclose(local[local["doc"] == doc.name][side], expected, rtol=1e-5)
    assert np.abs(local["base"] - ran["base"]).max() > 1e-2


def test_the_first_layer_of_a_bare_last_token_changes_by_the_closed_form(tiny):
    """Before any layer has evicted the inputs are those of the whole cache: run and closed form agree there."""
    docs = small.documents_for("llama", 3)
    tables = [maps.per_layer(tiny("llama"), docs, BASE, OURS, CACHES, measure=m) for m in ("local", "attn_out")]
    local, ran = (table[table["layer"] == 0] for table in tables)
    np.testing.assert_allclose(ran[["base", "ours"]], local[["base", "ours"]], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("probe", cells.PROBES)
def test_every_probe_runs_and_layers_agree_with_heads(probe, tiny):
    docs = [small.document(i, n=24 if probe == "next_token" else 26, stop=24) for i in range(2)]
    heads = maps.per_head(tiny("llama"), docs, BASE, OURS, 0.25, probe=probe)
    local = maps.per_layer(tiny("llama"), docs, BASE, OURS, 0.25, measure="local", probe=probe)
    sums = heads.groupby(["doc", "layer"])[["L_base", "L_ours"]].sum().to_numpy()
    assert (local[["base", "ours"]].to_numpy() <= sums * (1 + 1e-9)).all()
    ran = maps.per_layer(tiny("llama"), docs, BASE, OURS, 0.25, probe=probe)
    first = ran["layer"] == 0
    np.testing.assert_allclose(ran[first][["base", "ours"]], local[first][["base", "ours"]], rtol=1e-3, atol=1e-4)


def test_swapping_base_and_ours_swaps_every_column(tiny):
    docs = small.documents_for("llama", 2)
    for call in (
        lambda a, b: maps.per_head(tiny("llama"), docs, a, b, list(CACHES)),
        lambda a, b: maps.per_layer(tiny("llama"), docs, a, b, list(CACHES)),
    ):
        one, other = call(BASE, OURS), call(OURS, BASE)
        swapped = other.rename(columns=lambda c: c.replace("base", "@").replace("ours", "base").replace("@", "ours"))
        pd.testing.assert_frame_equal(one, swapped[list(one)], rtol=1e-6)


def test_sizes_are_means_over_heads(tiny):
    docs = small.documents_for("llama", 2)
    heads = maps.per_head(tiny("llama"), docs, BASE, OURS, list(CACHES))
    table = maps.per_budget(tiny("llama"), docs, BASE, OURS, list(CACHES))
    assert list(table) == ["doc", "cache", "base", "ours", "heads_lower"] and len(table) == 4
    for row in table.to_dict("records"):
        mine = heads[(heads["doc"] == row["doc"]) & (heads["cache"] == row["cache"])].to_dict("records")
        assert len(mine) == 18
        assert row["base"] == pytest.approx(sum(each["L_base"] for each in mine) / 18)
        assert row["ours"] == pytest.approx(sum(each["L_ours"] for each in mine) / 18)
        assert row["heads_lower"] == pytest.approx(sum(each["L_ours"] < each["L_base"] for each in mine) / 18)


def test_documents_and_sizes_do_not_matter_to_each_other(tiny):
    docs = small.documents_for("llama", 3)
    whole = maps.per_head(tiny("llama"), docs, BASE, OURS, ["0.5", 0.25])
    for doc in docs:
        for cache in CACHES:
            alone = maps.per_head(tiny("llama"), [doc], BASE, OURS, cache)
            at = whole[(whole["doc"] == doc.name) & (whole["cache"] == cache)].reset_index(drop=True)
            pd.testing.assert_frame_equal(at, alone, rtol=1e-6)


def test_progress_wraps_the_documents(tiny):
    seen = []

    def bar(documents):
        for doc in documents:
            seen.append(doc.name)
            yield doc

    maps.per_head(tiny("llama"), small.documents_for("llama", 2), BASE, OURS, 0.5, progress=bar)
    assert seen == ["doc-0", "doc-1"]


TEXT = "The heron stood in the reeds. " * 4


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: maps.per_head(m, [TEXT], BASE, BASE), EvictionError, "held against itself"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, 0), EvictionError, "cache ratio '0'; allowed: a share"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, []), EvictionError, "no cache ratio was given"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, [0.5, "1/2"]), EvictionError, "given twice"),
        (lambda m: maps.per_head(m, [TEXT, "Two words."], "snapkv", OURS), EvictionError, "32"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, 0.001), EvictionError, "no entry at all"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, p=3), TheoryError, "p = 3"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, probe="answer"), PromptError, "probe='answer'"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, template="no context"), TaskError, "template"),
        (lambda m: maps.per_head(m, [TEXT], BASE, OURS, n=2), TaskError, "n is 2"),
        (lambda m: maps.per_layer(m, [TEXT], BASE, OURS, measure="values"), EvictionError, "measure='values'; allowed"),
        (lambda m: maps.per_layer(m, [TEXT], BASE, OURS, p="1"), TheoryError, "p = '1'"),
        (lambda m: maps.per_budget(m, [TEXT], BASE, OURS, []), EvictionError, "no cache ratio was given"),
        (lambda m: maps.per_budget(m, [small.document(0)], BASE, OURS, [0.01]), EvictionError, "no entry at all"),
        (
            lambda m: maps.per_head(m, [TEXT], "oracle", BASE, 0.5, template="none"),
            EvictionError,
            "oracle looks at the tokens after the context",
        ),
    ],
)  # fmt: skip
def test_refused_in_one_line_before_anything_is_run(call, error, said, tiny, monkeypatch):
    model = tiny("llama")
    forbid(monkeypatch)
    with pytest.raises(error, match=said) as caught:
        call(model)
    assert "\n" not in str(caught.value)


def slow_runs(mask):
    """Half-open runs of True by a loop."""
    found = []
    for i, kept in enumerate(mask):
        if kept and found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        elif kept:
            found.append((i, i + 1))
    return found


@pytest.mark.parametrize("pad", [0, 3])
def test_look_shows_what_each_policy_keeps_for_one_head(pad, tiny):
    doc = small.document(5, pad=pad)
    ids, stop = small.real(doc)
    for layer, head in ((0, 0), (1, 4), (2, 5)):
        trace, spans = maps.look(tiny("llama"), doc, BASE, OURS, layer, head, "0.5")
        first, second = (
            [False] * pad + p.select(tiny("llama"), ids[:stop], "0.5")[layer, head // 3].tolist() for p in (BASE, OURS)
        )
        expected = {
            "kept by both": slow_runs([a and b for a, b in zip(first, second, strict=True)]),
            "only snapkv": slow_runs([a and not b for a, b in zip(first, second, strict=True)]),
            "only snapkv+two_stage": slow_runs([b and not a for a, b in zip(first, second, strict=True)]),
            "question": [(stop + pad, len(ids) + 1 + pad)],
        }
        assert spans == {name: found for name, found in expected.items() if found}
        assert trace.n == len(ids) + 1 + pad and trace.queries == [len(ids) + pad] and not trace.spans


@pytest.mark.parametrize(("layer", "head"), [(3, 0), (-1, 0), (0, 6), (0, -1)])
def test_look_refuses_heads_that_do_not_exist(layer, head, tiny):
    from kvprobe.errors import KVProbeError

    with pytest.raises(KVProbeError, match=r"does not exist|allowed"):
        maps.look(tiny("llama"), small.document(5), BASE, OURS, layer, head, "0.5")


@pytest.mark.parametrize("mask", [[], [True], [False], [True, True, False, True], [False, True, True]])
def test_runs_of_a_mask(mask):
    from kvprobe.maps.look import runs_of

    assert runs_of(torch.tensor(mask, dtype=torch.bool)) == slow_runs(mask)
