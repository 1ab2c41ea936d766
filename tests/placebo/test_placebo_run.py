"""A whole placebo run: identity, what may not change it, what must, and what is refused."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import placebo_items
import pytest
import torch

import kvprobe as kp
from kvprobe import placebo, records, runs
from kvprobe.errors import KVProbeError, PromptError, TheoryError

EXACT = ["logprob", "logprob_per_token", "kl", "flips", "match", "score", "text", "settling_depth", "deep"]
CLOSE = ["logprob", "kl", "delta_logprob", "settling_depth"]
DESIGN = ["item", "arm", "match_on", "remedy", "number", "spans", "kappa", "beta", "ln_ratio"]
STRENGTHS = ["bound", "perturbation", "centred", "value_mass", "mass"]


def same_numbers(one, two):
    """Two tables of arms: the same cuts, strengths and outcomes, up to how arms were batched."""
    one, two = (table.reset_index(drop=True) for table in (one, two))
    pd.testing.assert_frame_equal(one[DESIGN + STRENGTHS], two[DESIGN + STRENGTHS], rtol=1e-9)
    assert np.allclose(one[CLOSE], two[CLOSE], atol=1e-3, equal_nan=True)


def test_identity_equals_clean_bit_for_bit(ran, traced):
    for result in (ran, traced):
        table = result.arms()
        clean, identity = (table[table["arm"] == name][EXACT].reset_index(drop=True) for name in ("clean", "identity"))
        pd.testing.assert_frame_equal(clean, identity, check_exact=True)
        assert result.summary["identity_max_abs"] == 0.0 == max(probe.identity_max_abs for probe in result.probes)
        assert (table[table["arm"] == "clean"][["delta_logprob", "delta_settling", "kl", "flips"]] == 0).all(axis=None)


def test_identity_is_compared_with_the_clean_logits(reader, own_items, monkeypatch):
    """Were the arm that masks nothing any other than clean, the number would say by how much."""
    whole = runs.intervene

    def touched(*given, **words):
        outs = whole(*given, **words)
        if len(outs) > 2:
            outs[1] = dataclasses.replace(outs[1], logits=outs[1].logits - 0.125)
        return outs

    monkeypatch.setattr(runs, "intervene", touched)
    settings = placebo.Settings(placebos=1, arms=("placebo",))
    found = placebo.run(reader, own_items[:1], settings=settings).summary["identity_max_abs"]
    assert found == pytest.approx(0.125, rel=1e-4)


def test_answered_is_what_the_clean_arm_wrote(ran):
    table = ran.arms()
    assert table.groupby("item")["answered"].unique().map(list).tolist() == [[True], [True], [False]]
    assert (ran.summary["n_answered"], ran.summary["n_items"]) == (2, 3)
    assert ran.summary["accuracy"] == pytest.approx(2 / 3)
    assert ran.items()["answered"].tolist() == [True, True, False]


@pytest.mark.parametrize("kind", ["items", "traces"])
def test_what_is_matched_does_not_depend_on_any_outcome(kind, reader, own_items, own_traces, ran, traced, monkeypatch):
    """All logits and hidden states that arms come back with are scrambled: every cut stays where it was."""
    whole, rng = runs.intervene, torch.Generator().manual_seed(3)

    def scrambled(*given, **words):
        found = []
        for out in whole(*given, **words):
            logits = torch.randn(out.logits.shape, generator=rng) * 9
            resid = torch.randn(out.streams.resid_post.shape, generator=rng) if out.streams else None
            streams = None if resid is None else dataclasses.replace(out.streams, resid_post=resid)
            found.append(dataclasses.replace(out, logits=logits, streams=streams, generated=[9, 8]))
        return found

    monkeypatch.setattr(runs, "intervene", scrambled)
    given, before = (own_items, ran) if kind == "items" else (own_traces, traced)
    after = placebo.run(reader, given, settings=before.settings).arms()
    pd.testing.assert_frame_equal(after[DESIGN + STRENGTHS], before.arms()[DESIGN + STRENGTHS], check_exact=True)
    assert not np.allclose(after["logprob"], before.arms()["logprob"], atol=0.1)


def test_the_order_of_arms_changes_nothing(reader, own_items, ran):
    arms = ("dose", "injected", "length_only", "placebo", "gate")
    turned = placebo.run(reader, own_items, arms=arms, settings=ran.settings)
    pd.testing.assert_frame_equal(turned.arms()[DESIGN + EXACT], ran.arms()[DESIGN + EXACT], check_exact=True)
    plain = [records.to_json(result.summary["contrasts"]) for result in (turned, ran)]
    assert plain[0] == plain[1]


def test_some_arms_have_the_numbers_that_they_have_among_all(reader, own_items, ran):
    some = placebo.run(reader, own_items, arms=("placebo",), settings=ran.settings)
    everything = ran.arms()
    kept = everything[everything["arm"].isin(["clean", "identity", "target", "placebo"])]
    same_numbers(some.arms(), kept)
    for match_on in ("bound", "perturbation"):
        one, two = (result.summary["contrasts"][match_on] for result in (some, ran))
        assert one["contrast"]["mean"] == pytest.approx(two["contrast"]["mean"], abs=1e-3)
        assert one["effect"]["gate"]["logprob"] is None and one["effect"]["length_only"]["kl"] is None
        assert one["balance"]["bound"]["smd_before"] is None  # without length-only windows there is no before
        assert one["remedy"] == two["remedy"] | {"injected": 0}
    one = placebo.run(reader, own_items, arms="gate", settings=ran.settings)
    assert set(one.arms()["arm"]) == {"clean", "identity", "target", "gate"}
    assert one.summary["contrasts"]["bound"]["kind"] == "none"
    json.loads(records.to_json(one.summary))


def test_each_item_is_the_same_alone_as_among_others(reader, own_items, ran):
    alone = placebo.run(reader, own_items[:1], settings=ran.settings).arms()
    same_numbers(alone, ran.arms()[ran.arms()["item"] == 0])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_one_other_windows(reader, own_items, ran):
    again, other = (
        placebo.run(reader, own_items, settings=dataclasses.replace(ran.settings, seed=seed)) for seed in (0, 1)
    )
    pd.testing.assert_frame_equal(again.arms(), ran.arms(), check_exact=True)
    now, before = (
        result.arms()[lambda table: table["arm"] == "length_only"]["spans"].tolist() for result in (other, ran)
    )
    assert all(one != two for one, two in zip(now[::3], before[::3], strict=True))
    for name in ("clean", "target", "gate"):
        one, two = (result.arms()[lambda t, name=name: t["arm"] == name][CLOSE] for result in (other, ran))
        assert np.allclose(one, two, atol=1e-3)
    assert other.summary["seed"] == 1 and len({*before}) == 9


def test_items_of_one_run_draw_windows_of_their_own(reader, own_items, ran):
    twice = placebo.run(reader, [own_items[0], own_items[0]], settings=ran.settings).arms()
    windows = [twice[(twice["item"] == i) & (twice["arm"] == "length_only")]["spans"].tolist() for i in (0, 1)]
    assert windows[0] != windows[1]


def test_the_table_of_items_says_how_each_was_matched(ran, reader, own_items):
    strict = placebo.run(reader, own_items, settings=dataclasses.replace(ran.settings, caliper=1e-9, inject="never"))
    for result in (ran, strict):
        table, arms = result.items(), result.arms()
        for _, row in table.iterrows():
            for match_on in ("bound", "perturbation"):
                mine = arms[(arms["item"] == row["item"]) & (arms["arm"] == "placebo") & (arms["match_on"] == match_on)]
                assert row[f"{match_on}_remedy"] == (mine["remedy"].iloc[0] if len(mine) else "")
                assert np.isclose(row[f"{match_on}_max_abs_ln_ratio"], mine["ln_ratio"].abs().max(), equal_nan=True)
                assert row[f"{match_on}_strongest_contiguous"] > 0
        assert table["target"].tolist() == arms[arms["arm"] == "target"]["spans"].tolist()
    assert not (strict.arms()["arm"].isin(["placebo", "injected", "dose_placebo"])).any()
    found = strict.summary["contrasts"]["bound"]
    assert (found["matched"], found["unmatched"], found["contrast"]["n"], found["remedy"]["injected"]) == (0, 3, 0, 0)


@pytest.mark.parametrize("p", [1, 2])
def test_layers_are_weighed_by_their_hidden_states_norm(reader, own_items, p):
    item, settings = own_items[0], placebo.Settings(residual_norm=True, p=p, placebos=2, kappas=(0.5,))
    result = placebo.run(reader, [item], settings=settings)
    answer = list(item.answer_ids)
    queries = list(range(item.context_stop, len(item.prompt) + len(answer)))
    out = kp.intervene(reader, item.prompt, [()], suffix=len(item.prompt), continuation=answer, streams=len(queries))[0]
    norms = [float(layer.double().pow(2).sum(-1).sqrt().mean()) for layer in out.streams.resid_post]
    trace = kp.observe(reader, item.prompt.extended(answer), queries)
    table = result.arms()
    for _, row in table[table["arm"].isin(["target", "placebo", "length_only"])].iterrows():
        keys = placebo_items.spans_of(row["spans"])
        each = [placebo.set_strengths(trace, [keys], layers=layer, p=p).iloc[0] for layer in range(3)]
        for name in ("bound", "perturbation"):
            wanted = sum(one[name] / norm for one, norm in zip(each, norms, strict=True))
            assert row[name] == pytest.approx(wanted, rel=1e-4)
    target = table[table["arm"] == "target"].iloc[0]
    dose = table[table["arm"] == "dose_target"].iloc[0]
    assert dose["perturbation"] == pytest.approx(0.5 * target["perturbation"], rel=1e-5)


def test_needle_items_run_with_decoys_and_instruction_protected(loaded):
    reader = loaded(seed=1)
    options = {"needles": 3, "decoys": 1, "tokens_to_generate": 16}
    settings = placebo.Settings(length=1000, items=1, options=options, placebos=2, kappas=(), new_tokens=2)
    (item,) = settings.make(reader)
    result = placebo.run(reader, settings=settings)
    assert (result.summary["task"], result.summary["length"]) == ("niah_multikey_1", 1000)
    barred = {at for label in ("evidence", "decoy", "hard") for span in item.spans[label] for at in range(*span)}
    barred |= {*range(item.prompt.spans["context"][0]), *range(item.context_stop, len(item.prompt))}
    table = result.arms()
    for _, row in table[table["arm"].isin(["placebo", "length_only"])].iterrows():
        held = {at for start, stop in placebo_items.spans_of(row["spans"]) for at in range(start, stop)}
        assert not held & barred or row["remedy"] in ("hard", "hard_set")
    assert set(table["text"].str.len()) <= {0, 1, 2}


def test_items_that_are_handed_in_give_the_run_its_name(own_items, ran, traced):
    assert ran.settings.task == "niah_multikey_1" and ran.settings.length == 1500
    assert (ran.summary["task"], ran.summary["length"]) == ("user", len(own_items[0].prompt))
    assert (traced.summary["task"], traced.summary["length"]) == ("user", None)


def test_a_progress_wrapper_sees_every_item(reader, own_items):
    seen = []

    def bar(things):
        for thing in things:
            seen.append(thing[0])
            yield thing

    placebo.run(reader, own_items, settings=placebo.Settings(placebos=1, kappas=()), arms=(), progress=bar)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"items": []}, "none"),
        ({"items": "niah_single_1"}, "a list of items"),
        ({"items": "mixed"}, "not both"),
        ({"items": ["text"]}, "items are ['str']"),
        ({"arms": ("placebo", "mask")}, "arms holds 'mask'"),
        ({"settings": placebo.Settings(layers=(0, 3))}, "layers names [3], the model has layers 0 … 2"),
        ({"settings": placebo.Settings(placebos=50)}, "no room for 50 disjoint windows"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(reader, own_items, own_traces, words, said):
    given = {"items": own_items, **words}
    if given["items"] == "mixed":
        given["items"] = [own_items[0], own_traces[0]]
    with pytest.raises(KVProbeError) as caught:
        placebo.run(reader, **given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_validation_refuses_what_a_run_would_refuse_in_its_midst(reader, tmp_path):
    path = placebo_items.written(tmp_path / "own.jsonl", placebo_items.item_row(0))
    settings = placebo.Settings("user", path=str(path))
    placebo.validate(reader, settings)
    with pytest.raises(PromptError, match="no room for 50 disjoint windows"):
        placebo.validate(reader, dataclasses.replace(settings, placebos=50))
    with pytest.raises(PromptError, match="do not fit the model's context of 2048"):
        placebo.validate(reader, dataclasses.replace(settings, new_tokens=2000))
    traces = placebo_items.written(tmp_path / "traces.jsonl", placebo_items.trace_row(0))
    settings = placebo.Settings("user_traces", path=str(traces), placebos=50)
    with pytest.raises(PromptError, match="no room for 50 disjoint windows"):
        placebo.validate(reader, settings)


@pytest.mark.parametrize(("family", "changes"), [("mistral", {"sliding_window": 200}), ("gpt_oss", {})])
def test_sliding_windows_and_learned_sinks_run_to_the_end(loaded, tmp_path, family, changes):
    """Windows out of sight have no strength: their logarithms are left out of the balance, which is then flagged."""
    reader = loaded(family, **changes)
    rows = [placebo_items.item_row(i + 2) for i in range(2)]  # targets near the end, in sight
    path = placebo_items.answered(reader, tmp_path / "own.jsonl", *rows)
    settings = placebo.Settings("user", path=str(path), placebos=3, inject="always", kappas=(0.5,), caliper=1.5, seed=5)
    result = placebo.run(reader, settings=settings)
    table = result.arms()
    assert result.summary["identity_max_abs"] == 0 and (table["arm"] == "injected").sum() == 6
    found = json.loads(records.to_json(result.summary))["contrasts"]["bound"]
    assert found["contrast"]["n"] == 2 and found["balance"]["bound"]["smd_after"] is not None
    unseen = table[(table["arm"] == "length_only") & (table["bound"] == 0)]
    assert (len(unseen) > 0) == (family == "mistral")
    assert bool(found["balance"]["bound"]["flagged"]) == (family == "mistral")


def test_a_target_that_no_row_sees_is_one_line(loaded, tmp_path):
    reader = loaded("mistral")
    path = placebo_items.written(tmp_path / "own.jsonl", placebo_items.item_row(0))
    with pytest.raises(TheoryError, match="allowed: a target that some row sees"):
        placebo.run(reader, settings=placebo.Settings("user", path=str(path)))


@pytest.mark.slow
def test_of_a_single_needle_the_embedded_model_has_no_equal_and_vectors_are_injected(smol):
    settings = placebo.Settings("niah_single_2", length=400, items=1, placebos=2, kappas=())
    result = placebo.run(smol, settings=settings, arms=("injected",))
    found = result.summary["contrasts"]["perturbation"]
    assert result.summary["identity_max_abs"] == 0 and (found["unmatched"], found["remedy"]["injected"]) == (1, 1)
    assert 0 < found["no_overlap_ratio"] < math.exp(-0.25) and found["kind"] == "injected"
    table = result.arms().set_index("arm")["delta_logprob"]
    assert table["target"] < -3 and table["injected_target"] < -3
