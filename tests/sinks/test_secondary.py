"""Secondary sinks: every condition against loops over plain transformers' own hidden states and attention."""

import sys

import catalogue
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import mannwhitneyu
from tiny import FAMILIES

from kvprobe import Prompt, observe, sinks
from kvprobe.errors import PromptError, TheoryError
from kvprobe.sinks import streaming
from kvprobe.sinks.recovery import LABELS
from kvprobe.sinks.secondary import CONDITIONS, judge, residual_geometry

families = pytest.mark.parametrize("family", FAMILIES)
LOOSE = {"quantile": 0.4, "times": 0.5, "persistence": 0.4, "cosine": -0.1, "norm": 0.8, "min_seen": 3, "first": 2}
OPTIONS = sinks.SecondaryOptions(**LOOSE)


def measured(model, ids, queries=slice(None), options=OPTIONS, pads=0):
    prompt = Prompt.from_ids([0] * pads + ids, attention_mask=[0] * pads + [1] * len(ids))
    trace = observe(model, prompt, queries)
    found = sinks.scores(trace)
    return trace, found, sinks.secondary_sinks(model, prompt, trace, found, options)


def layer_inputs(reference, ids):
    """[L, n, D] of plain transformers: hidden_states[i] is what enters layer i."""
    with torch.no_grad():
        return torch.stack(reference.hf(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states)[:-1, 0]


@families
@pytest.mark.parametrize("queries", [slice(None), [4, 9, 22, 23, 24, 25]], ids=["all", "six"])
def test_the_four_conditions_by_loops(family, queries, tiny, plain):
    ids, reference = catalogue.ids(5), plain(family)
    trace, _, made = measured(tiny(family), ids, queries)
    A, x = reference(ids).attention.double().mean(1), layer_inputs(reference, ids).double()
    for layer in range(3):
        visible = reference.visible(layer, len(ids))
        size = [float(x[layer, j].norm()) for j in range(len(ids))]
        s, share, seen = [], [], []
        for j in range(len(ids)):
            who = [q for q in trace.queries if visible[q, j]]
            often = [float(A[layer, q, j]) * int(visible[q].sum()) >= 0.5 for q in who]
            seen.append(len(who))
            s.append(sum(float(A[layer, q, j]) for q in who) / len(who) if who else np.nan)
            share.append(sum(often) / len(who) if who else np.nan)
            cosine = float(x[layer, j] @ x[layer, 0]) / (size[j] * size[0])
            assert made.cosine[layer, j] == pytest.approx(cosine, abs=1e-5)
            assert made.norm[layer, j] == pytest.approx(size[j] / np.median(size), rel=1e-4)
        assert (made.seen[layer] == seen).all()
        assert_allclose(made.mass[layer], s, rtol=2e-4, atol=2e-6)
        assert_allclose(made.share[layer], share, atol=1e-12)
        judged = [j >= 2 and seen[j] >= 3 for j in range(len(ids))]
        assert made.candidates[layer].tolist() == judged
        limit = np.quantile([made.mass[layer, j] for j in range(len(ids)) if judged[j]], 0.4)
        for j in range(len(ids)):
            conditions = (
                judged[j] and made.mass[layer, j] >= limit,
                seen[j] > 0 and share[j] >= 0.4,
                made.cosine[layer, j] >= -0.1,
                made.norm[layer, j] >= 0.8,
            )
            assert tuple(getattr(made, name)[layer, j] for name in CONDITIONS) == conditions
            assert made.label[layer, j] == (judged[j] and all(conditions))
    assert made.label.any() and not made.label[made.candidates].all()
    assert set(made.keys) == set(np.nonzero(made.label)[1].tolist())


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_left_pads_are_nothing(family, tiny):
    ids = catalogue.ids(6)
    _, _, one = measured(tiny(family), ids)
    _, _, other = measured(tiny(family), ids, pads=3)
    for name in ("cosine", "norm", "share", "mass"):
        assert np.isnan(getattr(other, name)[:, :3]).all()
        assert_allclose(getattr(other, name)[:, 3:], getattr(one, name), rtol=1e-4, atol=1e-6)
    for name in ("candidates", *CONDITIONS, "label"):
        assert not getattr(other, name)[:, :3].any()
        assert (getattr(other, name)[:, 3:] == getattr(one, name)).all()
    assert other.keys == tuple(key + 3 for key in one.keys)


def test_chunks_change_nothing(tiny, monkeypatch):
    whole = measured(tiny("mistral"), catalogue.ids(7))[2]
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 1)
    monkeypatch.setattr(streaming, "MIN_ROWS", 3)
    parts = measured(tiny("mistral"), catalogue.ids(7))[2]
    assert_allclose(parts.share, whole.share) and (parts.label == whole.label).all()
    assert_allclose(parts.mass, whole.mass, rtol=1e-12)


def test_rows_of_the_scores_are_the_queries(tiny):
    """Scores of some rows only: persistence is judged on the same ones."""
    model, prompt = tiny("llama"), Prompt.from_ids(catalogue.ids(8))
    trace = observe(model, prompt, slice(None))
    some = sinks.secondary_sinks(model, prompt, trace, sinks.scores(trace, rows=[20, 22, 25]), OPTIONS)
    other = observe(model, prompt, [20, 22, 25])
    alone = sinks.secondary_sinks(model, prompt, other, sinks.scores(other), OPTIONS)
    assert (some.seen == alone.seen).all() and (some.share[:, :20] == alone.share[:, :20]).all()
    assert (some.label == alone.label).all() and set(np.unique(some.share[:, :20]).tolist()) <= {0, 1 / 3, 2 / 3, 1}


def test_blocks_of_hidden_rows_change_nothing_and_no_hook_stays(tiny, monkeypatch):
    model, prompt = tiny("llama"), Prompt.from_ids(catalogue.ids(9))
    whole = residual_geometry(model, prompt)
    monkeypatch.setattr(
        sys.modules["kvprobe.sinks.secondary"], "row_blocks", lambda n, *_: [slice(i, i + 4) for i in range(0, n, 4)]
    )
    for one, other in zip(whole, residual_geometry(model, prompt), strict=True):
        assert_allclose(other, one, rtol=1e-12)
    assert not any(module._forward_pre_hooks for module in model.twin.modules())


def by_hand(**changes):
    """One layer of ten keys, all of them sinks but for what is changed: key → value."""
    rows = {name: np.full((1, 10), value) for name, value in (("mass", 0.1), ("share", 1.0), ("cosine", 1.0))}
    rows |= {"norm": np.array([[9.0, 1, 1, 1, 1, 1, 3, 3, 3, 1]]), "seen": np.full((1, 10), 20)}
    for name, values in changes.items():
        for key, value in values.items():
            rows[name][0, key] = value
    attended, residual = (rows["mass"], rows["share"], rows["seen"]), (rows["cosine"], rows["norm"])
    return judge(sinks.SecondaryOptions(quantile=0.5), attended, residual, 0, range(10))


def test_each_condition_alone_takes_the_label_away():
    assert by_hand().keys == (6, 7, 8)
    assert by_hand(mass={7: 0.0}).keys == (6, 8)
    assert by_hand(share={7: 0.49}).keys == (6, 8) and by_hand(share={7: 0.5}).keys == (6, 7, 8)
    assert by_hand(cosine={7: 0.89}).keys == (6, 8) and by_hand(cosine={7: 0.9}).keys == (6, 7, 8)
    assert by_hand(norm={7: 1.99}).keys == (6, 8) and by_hand(norm={7: 2.0}).keys == (6, 7, 8)
    assert by_hand(seen={7: 15}).keys == (6, 8) and by_hand(seen={7: 16}).keys == (6, 7, 8)
    assert by_hand(norm={0: 1.0, 3: 9.0}).keys == (6, 7, 8)  # 3 is one of the first four
    assert by_hand(norm={0: 1.0, 4: 9.0}).keys == (4, 6, 7, 8)
    assert by_hand(seen=dict.fromkeys(range(10), 1)).keys == ()


def test_names_tables_and_counts():
    made = by_hand(share={7: 0.1})
    assert made.meets("aligned", "outlying")[0].nonzero()[0].tolist() == [6, 7, 8]
    assert made.positions([0]) == made.keys == (6, 8)
    with pytest.raises(TheoryError, match="condition 'sunk'; allowed: high, persistent, aligned, outlying"):
        made.meets("sunk")
    counts = made.counts()
    expected = {"candidates": [6], "high": [6], "persistent": [5], "aligned": [6], "outlying": [3], "label": [2]}
    assert counts == {"by_layer": expected, "tokens": 2, "n": 10}
    frame, everything = made.table(), made.table(everything=True)
    assert frame["position"].tolist() == frame["id"].tolist() == [6, 8] and frame["label"].all()
    assert everything["position"].tolist() == [4, 5, 6, 7, 8, 9]
    assert everything["label"].tolist() == [False, False, True, False, True, False]
    assert everything["norm"].tolist() == [1, 1, 3, 3, 3, 1] and everything["share"].tolist() == [1, 1, 1, 0.1, 1, 1]


@families
def test_recovery_is_a_mean_of_mann_whitney(family, tiny):
    _, found, made = measured(tiny(family), catalogue.ids(5))
    answer = sinks.recovery(made, found)
    tables = {
        "ratio": -found.ratio("layer"),
        "relative_ratio": -found.ratio("layer", relative=True),
        "mass": found.mass.mean(1),
        "norm": -found.norms.mean(1),
    }
    for name, conditions in LABELS.items():
        label = made.candidates & np.all([getattr(made, each) for each in conditions], axis=0)
        for score, table in tables.items():
            expected = []
            for layer in range(3):
                yes, no = label[layer], made.candidates[layer] & ~label[layer]
                if yes.any() and no.any():
                    u = mannwhitneyu(table[layer, yes], table[layer, no]).statistic
                    expected.append(u / (yes.sum() * no.sum()))
                else:
                    assert answer[name]["by_layer"][score][layer] is None
            assert answer[name]["auroc"][score] == (pytest.approx(np.mean(expected)) if expected else None)
            assert answer[name]["n_layers"] == len(expected)
        assert answer[name]["n_positive"] == label.sum()
        assert answer[name]["n_negative"] == (made.candidates & ~label).sum()
    assert answer["all_four"]["n_layers"] > 0 and "circular" in answer["note"]


def test_recovery_of_nothing_is_none(tiny):
    _, found, made = measured(tiny("llama"), catalogue.ids(5), options=sinks.SecondaryOptions(norm=1e6))
    for name in LABELS:
        part = sinks.recovery(made, found)[name]
        assert part["auroc"] == dict.fromkeys(("ratio", "relative_ratio", "mass", "norm"))
        assert (part["n_layers"], part["n_positive"], part["n_negative"]) == (0, 0, made.candidates.sum())


@families
def test_recovery_of_some_layers_is_that_of_the_others_never_seen(family, tiny):
    """Layers that are left out lend neither counts nor AUROCs: the same as if nothing in them were a candidate."""
    _, found, made = measured(tiny(family), catalogue.ids(5))
    whole = sinks.recovery(made, found)["all_four"]
    for layers in ([1], [2, 0]):
        part = sinks.recovery(made, found, layers)["all_four"]
        kept = np.isin(np.arange(3), layers)
        assert part["n_positive"] == (made.label & kept[:, None]).sum()
        assert part["n_negative"] == (made.candidates & ~made.label & kept[:, None]).sum()
        for name, by_layer in whole["by_layer"].items():
            expected = [value if kept[layer] else None for layer, value in enumerate(by_layer)]
            assert part["by_layer"][name] == expected
            left = [value for value in expected if value is not None]
            assert part["auroc"][name] == (pytest.approx(np.mean(left)) if left else None)
    with pytest.raises(TheoryError, match=r"layers=\[3\]; allowed: one or more of 0 … 2, each once"):
        sinks.recovery(made, found, [3])
    for pair, name in (((made, None), "scores"), ((None, found), "secondary")):
        with pytest.raises(TheoryError, match=f"{name}=None; allowed: what"):
            sinks.recovery(*pair)


def test_what_does_not_belong_together(tiny):
    model, prompt = tiny("llama"), Prompt.from_ids(catalogue.ids(5))
    trace = observe(model, prompt, slice(None))
    found = sinks.scores(trace)
    with pytest.raises(PromptError, match=r"the trace has 26 tokens that are not this prompt's 26"):
        sinks.secondary_sinks(model, Prompt.from_ids(catalogue.ids(6)), trace, found)
    shorter = sinks.scores(observe(model, Prompt.from_ids(catalogue.ids(5)[:-1]), slice(None)))
    with pytest.raises(PromptError, match=r"scores of \(3, 6, 25\) layers × heads × keys; allowed.*\(3, 6, 26\)"):
        sinks.secondary_sinks(model, prompt, trace, shorter)
    with pytest.raises(PromptError, match=r"labels of \(3, 26\) layers × keys; allowed.*\(3, 25\)"):
        sinks.recovery(sinks.secondary_sinks(model, prompt, trace, found), shorter)


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantile": 1.1},
        {"persistence": -0.1},
        {"cosine": 2},
        {"norm": -1},
        {"min_seen": 0},
        {"first": 0},
        {"times": "4"},
        {"first": 2.5},
        {"min_seen": 16.0},
        {"first": True},
    ],
)
def test_options_out_of_range(wrong):
    name = next(iter(wrong))
    with pytest.raises(TheoryError, match=rf"{name}=.*; allowed: a (number from|whole number of at least)"):
        sinks.SecondaryOptions(**wrong)


@pytest.mark.slow
def test_smollm2_has_them_in_its_third_to_tenth_layer(smol):
    """What the defaults were set by: tokens `` the`` behave as the first position does, in layers 3 to 9."""
    from kvprobe import tasks

    prompt = tasks.documents(smol, n=1, length=400, template="none")[0].prompt
    trace = observe(smol, prompt, slice(None))
    found = sinks.scores(trace)
    made = sinks.secondary_sinks(smol, prompt, trace, found)
    assert {smol.tokenizer.decode([int(prompt.ids[key])]) for key in made.keys} == {" the"}
    assert set(np.flatnonzero(made.label.any(1)).tolist()) == set(range(3, 10))
    assert np.where(made.label, made.mass, 0).sum(1)[3:10].min() > 0.3
    assert sinks.recovery(made, found)["residual_only"]["auroc"]["ratio"] > 0.98
