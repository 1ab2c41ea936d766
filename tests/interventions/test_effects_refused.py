"""What effects refuse, in one line that names what was given and what is allowed."""

import math
from dataclasses import replace

import catalogue
import numpy as np
import pytest
import torch
from catalogue import SUFFIX

from kvprobe import Inject, KVMask, KVPatch, Prompt, ResidualAblation, ValueGate, intervene, prefill
from kvprobe.errors import CapabilityError, InterventionError
from kvprobe.interventions import fwd_hooks
from kvprobe.interventions.plan import Scene, compile_arms

D = 48
PROMPT, GIVER = Prompt.from_ids(catalogue.ids(), {"needle": (14, 17)}), Prompt.from_ids(catalogue.ids(seed=7))
NAN = float("nan")
ROW = torch.ones(D)


@pytest.fixture(scope="module")
def donor(tiny):
    return prefill(tiny("llama"), GIVER)


def refused(model, arm, says, **options):
    options = {"suffix": SUFFIX} | options
    with pytest.raises(InterventionError, match=says) as caught:
        intervene(model, PROMPT, [(), arm if isinstance(arm, tuple) else (arm,)], **options)
    assert "\n" not in str(caught.value)


SELECTORS = [
    ({"layers": 3}, "layer 3 does not exist: the model has layers 0 … 2"),
    ({"layers": -1}, "layer -1 does not exist"),
    ({"layers": "all"}, "layers='all' is not allowed: give a whole number or several"),
    ({"layers": 1.0}, "layers=1.0 is not allowed"),
    ({"layers": True}, "layers=True is not allowed"),
    ({"layers": [0, True]}, r"layers=\[0, True\] is not allowed"),
    ({"layers": []}, "name no (head|layer): allowed is at least one"),
    ({"queries": "sufix"}, "queries='sufix' is not one of suffix"),
    ({"queries": None}, "queries=None is not allowed"),
    ({"queries": []}, r"query positions \[\] are not allowed"),
    ({"queries": (-1,)}, r"query positions \[-1\] are not allowed"),
    ({"queries": 2.5}, "queries=2.5 is not allowed"),
    ({"queries": True}, "queries=True is not allowed"),
]
HEADS = [
    ({"heads": 6}, "head 6 does not exist: the model has heads 0 … 5"),
    ({"heads": -1}, "head -1 does not exist"),
    ({"heads": "0"}, "heads='0' is not allowed"),
    ({"heads": False}, "heads=False is not allowed"),
    ({"heads": []}, "name no head"),
    ({"heads": {}}, "name no head"),
    ({"heads": {5: [0]}}, "layer 5 does not exist"),
    ({"heads": {0: "x"}}, "heads='x' is not allowed"),
    ({"heads": {"a": [1]}}, "heads' layers=.* is not allowed"),
    ({"heads": {1: [0]}, "layers": 2}, "none of layers=2"),
    ({"keys": None}, "keys must hold .start, stop. pairs or span names, not None"),
    ({"keys": "haystack"}, "the prompt has no span 'haystack'; it has .'needle'."),
    ({"keys": (4, 4)}, r"key span \(4, 4\) does not fit the prompt: allowed is 0 ≤ start < stop ≤ 26"),
    ({"keys": (20, 27)}, "does not fit the prompt"),
    ({"keys": [(-3, 2)]}, "does not fit the prompt"),
    ({"keys": [(1.0, 2.0)]}, "keys must hold"),
    ({"keys": [(True, 3)]}, "keys must hold"),
    ({"keys": [3, 4, 5]}, "keys must hold"),
]


@pytest.mark.parametrize(("change", "says"), SELECTORS + HEADS)
def test_selectors_of_gates_and_patches(tiny, donor, change, says):
    refused(tiny("llama"), ValueGate(**{"keys": (3, 5), **change}), says)
    refused(tiny("llama"), KVPatch(**{"keys": (3, 5), "donor": donor, **change}), says)


@pytest.mark.parametrize(("change", "says"), SELECTORS)
def test_selectors_of_ablations(tiny, change, says):
    refused(tiny("llama"), ResidualAblation(**change), says)


@pytest.mark.parametrize(("change", "says"), [each for each in SELECTORS if "queries" in each[0]])
def test_rows_of_injections(tiny, change, says):
    refused(tiny("llama"), Inject({0: ROW}, **change), says)


def test_a_suffix_rule_needs_a_suffix(tiny, donor):
    for arm in (ValueGate((3, 5)), KVPatch((3, 5), donor), ResidualAblation(), Inject({0: ROW})):
        refused(tiny("llama"), arm, "queries='suffix' needs suffix=…", suffix=None)
    refused(tiny("llama"), ResidualAblation(queries="after"), "queries='after' is not one of suffix, generated")
    refused(tiny("llama"), Inject({0: ROW}, queries="after"), "queries='after' is not one of suffix, generated")


@pytest.mark.parametrize("scale", [NAN, math.inf, -math.inf, "0", None, True, 1e7, -1e30, torch.ones(()), [0.5]])
def test_scales(tiny, scale):
    refused(tiny("llama"), ValueGate((3, 5), scale), "scale=.* is not allowed: give")


def test_scales_of_any_real_kind_are_taken(tiny):
    outs = intervene(tiny("llama"), PROMPT, [ValueGate((3, 5), c) for c in (0, np.float32(0), 0.0)], suffix=SUFFIX)
    assert torch.equal(outs[0].logits, outs[1].logits) and torch.equal(outs[0].logits, outs[2].logits)


@pytest.mark.parametrize("beta", [True, NAN, None, "1"])
def test_doses(tiny, beta):
    refused(tiny("llama"), KVMask((3, 5), beta=beta), "beta=.* must be positive")


@pytest.mark.parametrize("what", ["qkv", None, 1, ["block"]])
def test_parts(tiny, donor, what):
    refused(tiny("llama"), ResidualAblation(what), "what=.* is not one of attention, mlp, block")
    refused(tiny("llama"), KVPatch((3, 5), donor, what=what), "what=.* is not one of kv, k, v")


@pytest.mark.parametrize("given", [None, "donor", 3, GIVER])
def test_donors_that_are_none(tiny, given):
    refused(tiny("llama"), KVPatch((3, 5), given), "donor=.* is not a prefilled context: give kp.prefill")


@pytest.mark.parametrize(
    ("keys", "there", "says"),
    [
        ((3, 5), (3, 6), r"keys have lengths \[2\], donor_keys \[3\]"),
        ([(3, 5), (7, 10)], [(7, 10), (3, 5)], r"keys have lengths \[2, 3\], donor_keys \[3, 2\]"),
        ((3, 5), [], r"keys have lengths \[2\], donor_keys \[\]"),
        ([(3, 5), (4, 6)], None, "overlap: allowed are spans that do not"),
        ((3, 5), (25, 27), r"donor span \(25, 27\) does not fit the donor: allowed is 0 ≤ start < stop ≤ 26"),
        ((3, 5), (-2, 0), r"donor span \(-2, 0\) does not fit the donor"),
        ((3, 5), "needle", r"donor_keys='needle' is not allowed: give \(start, stop\) pairs"),
        ((3, 5), ["needle"], "donor_keys=.* is not allowed"),
        ((3, 5), 5, "donor_keys=5 is not allowed"),
        ((3, 5), NAN, "donor_keys=nan is not allowed"),
        ((3, 5), [(3.0, 5.0)], "donor_keys=.* is not allowed"),
        ((3, 5), [3, 4, 5], "donor_keys=.* is not allowed"),
    ],
)
def test_donor_keys(tiny, donor, keys, there, says):
    refused(tiny("llama"), KVPatch(keys, donor, there), says)


def test_donors_that_are_too_short_or_of_another_model(tiny, tiny_folder, donor):
    model = tiny("llama")
    refused(model, KVPatch((9, 12), prefill(model, GIVER, 10)), r"donor span \(9, 12\) does not fit the donor: .* ≤ 10")
    fewer = replace(donor, layers=donor.layers[:2])
    refused(model, KVPatch((3, 5), fewer), "the donor has 2 layers, the model 3")
    thin = replace(donor, layers=[(keys[:, :, :4], values) for keys, values in donor.layers])
    refused(model, KVPatch((3, 5), thin), "the donor's keys are 2 kv heads × 4, the model's 2 × 8")
    refused(model, KVPatch((3, 5), prefill(tiny("gpt2"), GIVER)), "the donor's keys are 6 kv heads × 8, the model's")


def test_keys_do_not_move_where_layers_rotate_differently(tmp_path):
    """At the same positions nothing has to rotate; elsewhere the reason is said."""
    import tiny as families
    import transformers

    from kvprobe import models

    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **families.SIZES, **families.HEADS, sliding_window=5, query_pre_attn_scalar=8
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    model = models.load(tmp_path)
    donor = prefill(model, GIVER)
    assert intervene(model, PROMPT, KVPatch((20, 22), donor), suffix=SUFFIX).receipt.sites["cache"].reached > 0
    assert intervene(model, PROMPT, KVPatch((20, 22), donor, (3, 5), "v"), suffix=SUFFIX)
    with pytest.raises(CapabilityError, match="rotates its local and global layers differently"):
        intervene(model, PROMPT, KVPatch((20, 22), donor, (3, 5)), suffix=SUFFIX)


def test_two_donors_for_one_key(tiny, donor):
    model = tiny("llama")
    refused(model, (KVPatch((3, 6), donor), KVPatch((5, 8), donor)), "two patches of one arm give key 5 other content")
    refused(model, (KVPatch((3, 6), donor, what="v"), KVPatch((5, 8), donor, (9, 12))), "give key 5 other content")
    fine = [
        (KVPatch((3, 6), donor, what="k"), KVPatch((3, 6), donor, (9, 12), what="v")),
        (KVPatch((3, 6), donor, heads=[0, 1]), KVPatch((3, 6), donor, (9, 12), heads=[2])),
        (KVPatch((3, 6), donor, layers=0), KVPatch((3, 6), donor, (9, 12), layers=1)),
        (KVPatch((3, 6), donor, queries=(20,)), KVPatch((3, 6), donor, (9, 12), queries=(21, 22))),
    ]
    intervene(model, PROMPT, fine, suffix=SUFFIX)


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        (None, "vectors=None is not allowed: give a mapping"),
        ({}, "vectors={} is not allowed"),
        (ROW, "vectors=.* is not allowed: give a mapping"),
        ({0: ROW[:-1]}, r"layer 0: vectors are torch.float32 \[47\]; allowed: floating point \[48\] or \[R, 48\]"),
        ({0: torch.ones(2, 2, D)}, "layer 0: vectors are"),
        ({0: torch.ones(D, dtype=torch.int64)}, r"layer 0: vectors are torch.int64 \[48\]"),
        ({0: [1.0] * D}, "layer 0: vectors are"),
        ({0: "up"}, "layer 0: vectors are 'up'"),
        ({1: ROW.clone().index_fill_(0, torch.tensor(3), NAN)}, "layer 1: vectors hold NaN or infinity"),
        ({1: torch.full((D,), math.inf)}, "layer 1: vectors hold NaN or infinity"),
        ({3: ROW}, "layer 3 does not exist"),
        ({-1: ROW}, "layer -1 does not exist"),
        ({"0": ROW}, "vectors' layers=.* is not allowed"),
        ({True: ROW}, "vectors' layers=.* is not allowed"),
        ({0: torch.ones(SUFFIX - 1, D)}, "layer 0: 7 vectors for 8 touched rows; allowed: one .D. for all rows"),
    ],
)
def test_vectors(tiny, vectors, says):
    refused(tiny("llama"), Inject(vectors), says)


def test_vectors_are_as_many_as_the_rows_that_run(tiny):
    """Continuation and generated tokens count: there are no rows beyond the last vector."""
    model, arm = tiny("llama"), Inject({0: torch.ones(SUFFIX, D)})
    refused(model, arm, "8 vectors for 11 touched rows", continuation=catalogue.CONTINUED)
    refused(model, arm, "8 vectors for 12 touched rows", generate=5)
    for queries in ((20, 2), (2, 2)):
        refused(model, Inject({0: torch.ones(2, D)}, queries), "(positions that ascend, each once|2 vectors for 1)")
    refused(model, Inject({0: torch.ones(2, D)}, (20, 2)), "allowed: positions that ascend, each once")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1.0, ROW), "layers=None: give the layers"),
        ((1.0, torch.zeros(D), 0), "layer 0: the direction is 0 in some row"),
        ((-1.0, ROW, 0), "layer 0: norm=-1.0; allowed: finite numbers ≥ 0"),
        ((NAN, ROW, 0), "layer 0: norm=nan"),
        (("much", ROW, 0), "layer 0: norm='much'"),
        ((None, ROW, 0), "layer 0: norm=None"),
        (([1.0, 2.0], torch.ones(3, D), 0), "layer 0: 2 norms for 3 directions"),
        (([[1.0]], ROW, 0), "layer 0: norm="),
        ((1.0, [1.0] * D, 0), "layer 0: vectors are"),
        (({0: 1.0}, {1: ROW}), r"norm and direction name \[\] in common"),
        (({0: 1.0}, ROW, [0, 1]), r"layers=\[0, 1\]: norm and direction name \[0\] in common"),
        ((1.0, ROW, "0"), "layers='0' is not allowed"),
    ],
)
def test_norms_and_directions(arguments, says):
    with pytest.raises(InterventionError, match=says):
        Inject.of(*arguments)


@pytest.mark.parametrize("p", [0, 3, True, None, "1"])
def test_norms_of_other_kinds(p):
    with pytest.raises(InterventionError, match=r"p=.* is not allowed: give 1 or 2"):
        Inject.of(1.0, ROW, 0, p=p)


@pytest.mark.parametrize("arm", [None, 3, "mask", [3], ValueGate, [ValueGate]])
def test_hooks_of_what_is_no_arm(tiny, arm):
    with pytest.raises(InterventionError, match=r"arm=.* is not allowed: give an intervention or several"):
        fwd_hooks(tiny("llama"), PROMPT, arm, SUFFIX)


def test_hooks_of_one_bare_intervention_and_of_none(tiny):
    model = tiny("llama")
    assert [name for name, _ in fwd_hooks(model, PROMPT, ValueGate((3, 5), layers=1), SUFFIX)] == [
        "blocks.1.attn.hook_pattern"
    ]
    assert fwd_hooks(model, PROMPT, [], SUFFIX) == []
    with pytest.raises(InterventionError, match="is not a loaded model"):
        fwd_hooks(None, PROMPT, [], SUFFIX)
    with pytest.raises(InterventionError, match="is not a prompt"):
        fwd_hooks(model, "text", [], SUFFIX)


def test_a_scene_without_a_model_moves_no_keys(donor):
    scene = Scene(26, SUFFIX, 3, 6, (None,) * 3)
    assert compile_arms([[KVPatch((3, 5), donor)]], scene).effects
    with pytest.raises(InterventionError, match="this scene cannot rotate keys"):
        compile_arms([[KVPatch((3, 5), donor, (4, 6))]], scene)
