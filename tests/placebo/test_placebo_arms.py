"""Every arm of the table, judged by the same intervention run by itself, and by loops over the clean attention."""

import math

import numpy as np
import placebo_items
import pytest
import torch

import kvprobe as kp
from kvprobe import placebo
from kvprobe.interventions import Inject, ValueGate
from kvprobe.outcomes import settle
from kvprobe.placebo.arms import Design
from kvprobe.placebo.memory import trace_design
from kvprobe.placebo.probe import item_design

MEASURES = ["bound", "perturbation", "centred", "value_mass", "mass"]


def rows_of(item):
    return list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))


def clean_trace(reader, item):
    return kp.observe(reader, item.prompt.extended(item.answer_ids), rows_of(item))


def run_alone(reader, item, parts, generate=0):
    """One arm in a call of its own, from the first token of the question on, without a prefix handed in."""
    return kp.intervene(
        reader,
        item.prompt,
        [parts],
        suffix=len(item.prompt) - item.context_stop,
        continuation=list(item.answer_ids),
        generate=generate,
        streams=len(item.answer_ids) + 1,
    )[0]


def shift(view, keys):
    """Δo [Q, D] of one layer in fp64: attention rows without ``keys``, renormalised, minus the rows as they are."""
    A, V, W = view.attention.double(), view.values.double(), view.w_o.double()
    kept = A.clone()
    for start, stop in keys:
        kept[..., start:stop] = 0
    lacking = 1 - A.sum(-1)
    total = 0
    for h in range(len(A)):
        R = kept[h].sum(-1) + torch.where(lacking[h] > 1e-6, lacking[h], 0.0)
        total = total + (kept[h] / R[:, None] - A[h]) @ V[h * len(V) // len(A)] @ W[h]
    return total


def parts_of(row, trace, target, settings):
    """The intervention that a row of the table names."""
    keys = placebo_items.spans_of(row["spans"])
    if row["arm"] == "clean":
        return ()
    if row["arm"] == "gate":
        return (ValueGate(keys, 0.0),)
    if row["arm"] in ("injected", "injected_target"):
        found = {}
        for view in trace.layers():
            own, away = shift(view, target), shift(view, keys)
            size = own.abs().sum(-1, keepdim=True)
            found[view.index] = (size * away / away.abs().sum(-1, keepdim=True)).float()
        return (Inject(found, queries=list(trace.queries)),)
    beta = row["beta"] if math.isfinite(row["beta"]) else math.inf
    return (kp.KVMask(keys, beta=beta),)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 2])
def test_every_row_of_the_table_is_its_intervention_run_alone(reader, own_items, ran, index):
    item, table = own_items[index], ran.arms()
    table = table[table["item"] == index]
    trace, target = clean_trace(reader, item), sorted(item.spans["evidence"])
    k = len(item.answer_ids)
    clean = run_alone(reader, item, ())
    p = clean.logits[-k - 1 : -1].double().softmax(-1)
    for _, row in table.iterrows():
        graded = row["arm"].startswith("dose")
        out = run_alone(reader, item, parts_of(row, trace, target, ran.settings), 0 if graded else k + 8)
        q = out.logits[-k - 1 : -1].double().softmax(-1)
        logprob = sum(math.log(q[j, token]) for j, token in enumerate(item.answer_ids))
        assert row["logprob"] == pytest.approx(logprob, abs=2e-3), row["arm"]
        assert row["logprob_per_token"] == pytest.approx(logprob / k, abs=2e-3)
        assert row["kl"] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-3), row["arm"]
        assert row["flips"] == int((p.argmax(-1) != q.argmax(-1)).sum())
        assert row["match"] == (q.argmax(-1).tolist() == list(item.answer_ids))
        assert row["delta_logprob"] == row["logprob"] - table["logprob"].iloc[0]
        if graded:
            assert math.isnan(row["settling_depth"]) and math.isnan(row["score"]) and row["text"] == ""
            continue
        depth = settle(reader, out, slice(0, k), 0.32, "stays").depth
        assert row["settling_depth"] == float(depth.double().mean())
        assert row["deep"] == float((depth >= 2).double().mean())  # ⌈0.6 · 3⌉
        if not row["arm"].startswith("inject"):  # of these, rows behind the answer get nothing
            assert row["text"] == reader.tokenizer.decode(out.generated, skip_special_tokens=True)
        wanted = item.references
        assert row["score"] == sum(word.lower() in row["text"].lower() for word in wanted) / len(wanted)


def test_the_table_holds_every_arm_once(ran):
    for _, rows in ran.arms().groupby("item"):
        assert rows["arm"].tolist()[:4] == ["clean", "identity", "target", "gate"]
        counts = rows.groupby(["arm", "match_on"]).size().to_dict()
        assert counts == {
            **{(name, ""): 1 for name in ("clean", "identity", "target", "gate", "injected_target")},
            **{(name, ""): 3 for name in ("length_only", "injected")},
            **{("placebo", name): 3 for name in ("bound", "perturbation")},
            ("dose_target", ""): 2,
            ("dose_placebo", "perturbation"): 6,
        }
        for name in ("placebo", "length_only", "injected"):
            for _, some in rows[rows["arm"] == name].groupby("match_on"):
                assert some["number"].tolist() == [0, 1, 2]


def test_placebos_are_the_matched_sets_and_their_strengths_those_of_the_clean_run(reader, own_items, ran):
    table = ran.arms()
    for probe, item in zip(ran.probes, own_items, strict=True):
        rows = table[table["item"] == probe.index]
        trace = clean_trace(reader, item)
        for match_on in ("bound", "perturbation"):
            placebos = rows[(rows["arm"] == "placebo") & (rows["match_on"] == match_on)]
            found = placebo.match(
                trace,
                item.spans["evidence"],
                3,
                match_on,
                hard=item.spans["hard"],
                protect=item.spans["protect"],
                seed=probe.index,
                stop=item.context_stop,
            )
            assert found.matched and [placebo_items.spans_of(text) for text in placebos["spans"]] == [
                [*keys] for keys in found.placebos
            ]
            assert set(placebos["remedy"]) == {found.remedy}
            own = float(rows[rows["arm"] == "target"][match_on].iloc[0])
            assert np.allclose(placebos["ln_ratio"], np.log(placebos[match_on] / own), atol=1e-6)
            assert (placebos["ln_ratio"].abs() <= ran.settings.caliper).all()
        cut = rows[rows["arm"].isin(["target", "placebo", "length_only"])]
        wanted = placebo.set_strengths(trace, [placebo_items.spans_of(text) for text in cut["spans"]])
        assert np.allclose(cut[MEASURES], wanted[MEASURES], rtol=1e-6)
        assert cut["length"].tolist() == wanted["length"].tolist()
        gate = rows[rows["arm"] == "gate"].iloc[0]
        assert gate["mass"] == cut["mass"].iloc[0] and math.isnan(gate["bound"]) and math.isnan(gate["perturbation"])


def test_tokens_settle_at_different_layers(ran, traced):
    """Were all depths the same, no test of them could fail."""
    assert len(set(ran.arms()["settling_depth"].dropna())) > 2 < len(set(traced.arms()["settling_depth"]))
    assert (ran.arms()["delta_settling"].abs() > 0).any() and (traced.mentions()["effect"].abs() > 0).any()


def test_positions_are_mean_depths_of_the_keys(own_items, ran):
    for _, row in ran.arms().iterrows():
        held = [at for start, stop in placebo_items.spans_of(row["spans"]) for at in range(start, stop)]
        if held:
            assert row["length"] == len(held)
            assert row["position"] == pytest.approx(np.mean(held) / own_items[row["item"]].context_stop)
        else:
            assert row["arm"] in ("clean", "identity") and math.isnan(row["position"]) and row["length"] == 0


def test_length_only_windows_keep_off_everything_that_means_something(own_items, ran):
    table = ran.arms()
    for index, item in enumerate(own_items):
        barred = {at for name in ("evidence", "hard", "protect") for span in item.spans[name] for at in range(*span)}
        barred |= {0, 1, 2, 3}
        size = sum(stop - start for start, stop in item.spans["evidence"])
        rows = table[(table["item"] == index) & (table["arm"] == "length_only")]
        windows = [placebo_items.spans_of(text) for text in rows["spans"]]
        held = [at for ((start, stop),) in windows for at in range(start, stop)]
        assert len(held) == len(set(held)) == 3 * size and max(held) < item.context_stop
        assert not barred & set(held)


def test_doses_are_shares_of_the_full_strength(reader, own_items, ran):
    table = ran.arms()
    rows = table[table["item"] == 1]
    trace = clean_trace(reader, own_items[1])
    full = {row["spans"]: row["perturbation"] for _, row in rows[rows["arm"].isin(["target", "placebo"])].iterrows()}
    doses = rows[rows["arm"].str.startswith("dose")]
    assert set(doses[doses["arm"] == "dose_target"]["spans"]) == {rows[rows["arm"] == "target"]["spans"].iloc[0]}
    placebos = rows[(rows["arm"] == "placebo") & (rows["match_on"] == "perturbation")]
    assert doses[doses["arm"] == "dose_placebo"]["spans"].tolist() == [
        spans for spans in placebos["spans"] for _ in range(2)
    ]
    for _, row in doses.iterrows():
        assert row["perturbation"] == pytest.approx(row["kappa"] * full[row["spans"]], rel=1e-5)
        (dose,) = placebo.doses(trace, placebo_items.spans_of(row["spans"]), [row["kappa"]])
        assert row["beta"] == pytest.approx(dose.beta, rel=1e-5) and 0 < row["beta"] < 10
        assert row["bound"] == pytest.approx(dose.strengths["bound"], rel=1e-5)
    assert doses["kappa"].tolist() == [0.25, 0.75] * 4


def design_of(reader, item, **changes):
    settings = placebo.Settings(**{"inject": "always", "placebos": 2, **changes})
    return item_design(reader, clean_trace(reader, item), settings, item, 0)


def injected(design):
    return [arm for arm in design.full() if arm.arm.startswith("injected")]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("direction", ["placebo", "random"])
def test_injected_vectors_have_the_targets_norm_in_every_layer_and_row(reader, own_items, direction, p):
    design = design_of(reader, own_items[0], direction=direction, p=p)
    trace, target = design.trace, design.target
    first, *others = injected(design)
    assert first.arm == "injected_target" and [arm.arm for arm in others] == ["injected"] * 2
    for view in trace.layers():
        own = shift(view, target)
        assert torch.allclose(first.parts[0].vectors[view.index].double(), own, atol=1e-5)
        for arm in others:
            vectors = arm.parts[0].vectors[view.index].double()
            assert torch.allclose(vectors.norm(p=p, dim=-1), own.norm(p=p, dim=-1), rtol=1e-4)
            cosine = torch.cosine_similarity(vectors, shift(view, arm.keys), dim=-1)
            if direction == "placebo":
                assert bool((cosine > 1 - 1e-4).all()) and arm.keys in [*design.windows]
            else:
                assert bool((cosine < 0.9).all())
    strength = {arm.strengths["perturbation"] for arm in (first, *others)}
    assert len(strength) == 1 and set(first.parts[0].queries) == set(trace.queries)


def test_by_head_only_the_targets_own_vectors_have_a_known_strength(reader, own_items):
    first, *others = injected(design_of(reader, own_items[0], level="head"))
    by_layer, *_ = injected(design_of(reader, own_items[0]))
    assert first.strengths == by_layer.strengths and all(not arm.strengths for arm in others)
    assert all(
        torch.allclose(first.parts[0].vectors[layer], by_layer.parts[0].vectors[layer], atol=1e-5) for layer in range(3)
    )


@pytest.mark.parametrize(
    ("inject", "caliper", "wanted"),
    [("always", 0.25, True), ("unmatched", 0.25, False), ("unmatched", 1e-9, True), ("never", 1e-9, False)],
)
def test_vectors_are_injected_where_asked_for(reader, own_items, inject, caliper, wanted):
    design = design_of(reader, own_items[0], inject=inject, caliper=caliper)
    assert all(match.matched for match in design.matches.values()) == (caliper == 0.25)
    assert bool(injected(design)) == wanted
    assert not injected(design_of(reader, own_items[0], caliper=caliper, inject=inject, arms=("placebo", "gate")))


def test_masks_and_gates_stay_on_the_chosen_layers(reader, own_items):
    item = own_items[1]
    design = design_of(reader, item, layers=(0, 2), kappas=(0.5,))
    kinds = {}
    for arm in [*design.full(), *design.graded()]:
        kinds[arm.arm] = arm
        for part in arm.parts:
            named = set(part.vectors) if isinstance(part, Inject) else set(part.layers)
            assert named == {0, 2}, arm.arm
    own = {name: 0.0 for name in MEASURES}
    for layer in (0, 2):
        found = placebo.set_strengths(design.trace, [design.target], layers=layer).iloc[0]
        own = {name: own[name] + found[name] for name in MEASURES}
    assert all(kinds["target"].strengths[name] == pytest.approx(own[name], rel=1e-6) for name in MEASURES)


def test_of_a_trace_every_row_behind_the_target_gets_a_vector_of_its_norm(reader, own_traces):
    """A later window is not seen by rows before it: they get a random direction, by layer as by head."""
    settings = placebo.Settings("trace_memory", placebos=2, inject="always", rows=20)
    design = trace_design(reader, settings, own_traces[0], 0)
    behind = design.target[-1][1]
    trace = kp.observe(reader, own_traces[0].prompt, slice(behind, None))
    first, *others = injected(design)
    assert any(arm.keys[0][0] > behind for arm in others)
    for view in trace.layers():
        own = shift(view, design.target)
        assert torch.allclose(first.parts[0].vectors[view.index].double(), own, atol=1e-5)
        for arm in others:
            vectors, stop = arm.parts[0].vectors[view.index].double(), arm.keys[-1][1]
            assert arm.parts[0].queries == [*range(behind, trace.n)] and len(vectors) == trace.n - behind
            assert torch.allclose(vectors.norm(p=1, dim=-1), own.norm(p=1, dim=-1), rtol=1e-4)
            sees = [q for q, row in enumerate(trace.queries) if row >= stop]
            cosine = torch.cosine_similarity(vectors[sees], shift(view, arm.keys)[sees], dim=-1)
            assert bool((cosine > 1 - 1e-4).all())
    again = injected(trace_design(reader, settings, own_traces[0], 0))
    for one, two in zip((first, *others), again, strict=True):
        assert all(torch.equal(one.parts[0].vectors[layer], two.parts[0].vectors[layer]) for layer in range(3))


def test_by_head_rows_that_see_the_direction_agree_with_those_of_a_run_that_sees_it_everywhere(reader, own_traces):
    settings = placebo.Settings("trace_memory", placebos=2, inject="always", rows=20, level="head")
    design = trace_design(reader, settings, own_traces[0], 0)
    (arm, *_) = [arm for arm in injected(design) if arm.arm == "injected" and arm.keys[0][0] > design.target[-1][1]]
    stop = arm.keys[-1][1]
    late = kp.observe(reader, own_traces[0].prompt, slice(stop, None))
    wanted = placebo.injection(late, design.target, arm.keys, level="head", after=True)
    for layer in range(3):
        vectors = arm.parts[0].vectors[layer][-(late.n - stop) :]
        assert torch.allclose(vectors, wanted[layer], atol=1e-4, rtol=1e-4)
        assert float(arm.parts[0].vectors[layer][0].abs().sum()) > 0


def test_a_window_that_ends_before_the_direction_gets_a_random_one(loaded, own_items):
    """Mistral's rows see the last 200 keys: windows at the beginning of the prompt are out of sight of some."""
    reader = loaded("mistral", sliding_window=200)
    settings = placebo.Settings(inject="always", placebos=3)
    item = own_items[2]
    design = item_design(reader, clean_trace(reader, item), settings, item, 5)
    unseen = [arm for arm in injected(design) if arm.keys[-1][1] <= item.context_stop - 200]
    assert unseen, "no window lies out of sight: choose another seed"
    for view in design.trace.layers():
        own = shift(view, design.target)
        for arm in injected(design):
            vectors = arm.parts[0].vectors[view.index].double()
            assert torch.allclose(vectors.norm(p=1, dim=-1), own.norm(p=1, dim=-1), rtol=1e-4, atol=1e-6)


def test_a_design_without_doses_or_kappas_has_no_graded_arms(reader, own_items):
    assert design_of(reader, own_items[0], arms=("placebo",)).graded() == []
    design = design_of(reader, own_items[0], kappas=())
    assert isinstance(design, Design) and design.graded() == []
