"""Ctrl-C in the middle of a forward pass: every hook is gone, no run is served, and the next result is the same."""

import catalogue
import pytest
import torch

from kvprobe import intervene, models, observe
from kvprobe.attention import serving
from kvprobe.eviction import KeepMask
from kvprobe.heads.sharing import shared_below
from kvprobe.interventions import Inject, KVMask, KVPatch, ResidualAblation, ValueGate, fwd_hooks
from kvprobe.outcomes.lens import lens_logits
from kvprobe.prompts import Prompt
from kvprobe.runs import prefill
from kvprobe.streams import watched

N, SUFFIX, L, D = catalogue.N, catalogue.SUFFIX, 3, 48
PROMPT = Prompt.from_ids(catalogue.ids(1))


def arms(model):
    """Every kind of intervention, and two of them together."""
    donor = prefill(model, Prompt.from_ids(catalogue.ids(2)), N - SUFFIX)
    keep = torch.rand(L, model.geometry.n_kv_heads, N - SUFFIX, generator=torch.Generator().manual_seed(0)) < 0.6
    return {
        "clean": KVMask([]),
        "mask": KVMask((13, 17)),
        "finite": KVMask((13, 17), heads=[1], beta=0.5),
        "keep": KeepMask(keep),
        "gate": ValueGate((13, 17), 0.3),
        "patch": KVPatch((13, 17), donor, (3, 7)),
        "attention": ResidualAblation("attention", [0, 2]),
        "mlp": ResidualAblation("mlp"),
        "block": ResidualAblation("block", 1),
        "inject": Inject({1: torch.ones(D)}),
        "two": (KVMask((3, 6)), ResidualAblation("mlp", 2)),
    }


def of_arms(model, **more):
    found = intervene(model, PROMPT, list(arms(model).values()), suffix=SUFFIX, **more)
    return [outcome.logits for outcome in found]


def of_hooks(model):
    ids = PROMPT.ids[None]
    return [
        model.bridge.run_with_hooks(ids, fwd_hooks=fwd_hooks(model, PROMPT, arm, SUFFIX), prepend_bos=False)
        for name, arm in arms(model).items()
        if name in ("mask", "patch", "block")
    ]


def seen(model):
    found = []
    with watched(model.twin, L, lambda layer, hidden: found.append(hidden.clone())):
        prefill(model, PROMPT, N)
    return found


def shared(model):
    masks = [KVMask((3, 6), layers=2, heads=[head]) for head in range(3)]
    with shared_below(model.twin, L, 2):
        found = intervene(model, PROMPT, masks, suffix=SUFFIX, keep_trace=False)
    return [outcome.logits for outcome in found]


OPERATIONS = {
    "observe": lambda model: [observe(model, PROMPT, slice(None)).layer(1).logits],
    "prefill": lambda model: [part for pair in prefill(model, PROMPT, N).layers for part in pair],
    "intervene": of_arms,
    "streams": lambda model: of_arms(model, streams=4, keep_trace=False),
    "continued": lambda model: of_arms(model, continuation=[41, 300, 7], generate=2),
    "run_with_hooks": of_hooks,
    "watched": seen,
    "shared": shared,
}


class Bomb:
    """Counts calls of any module, and presses Ctrl-C at one of them."""

    def __init__(self, at=None):
        self.at, self.calls = at, 0

    def __call__(self, module, given, returned):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt

    def __enter__(self):
        self.handle = torch.nn.modules.module.register_module_forward_hook(self)
        return self

    def __exit__(self, *error):
        self.handle.remove()


def hooks(model):
    """Everything that is called on a pass: hooks of all modules of twin and bridge, TransformerLens' own included."""
    found = {}
    for root in (model.twin, model.bridge):
        for name, module in root.named_modules():
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks"):
                if some := vars(module).get(kind):
                    found[type(root).__name__, name, kind] = [str(each) for each in some]
    return found


def state(model):
    training = [module.training for module in model.twin.modules()]
    return hooks(model), serving(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any(training)


CASES = [*((name, "llama") for name in OPERATIONS), ("intervene", "gpt_oss"), ("run_with_hooks", "gpt_oss")]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_an_interrupted_pass_leaves_nothing_behind(name, family, tiny):
    model, operation = tiny(family), OPERATIONS[name]
    before = state(model)
    expected = operation(model)  # some things are found out once a model
    with Bomb() as counted:
        operation(model)
    assert counted.calls > 10 and state(model) == before
    for at in (counted.calls // 3, counted.calls - 1):
        with Bomb(at), pytest.raises(KeyboardInterrupt):
            operation(model)
        assert state(model) == before
    for one, other in zip(operation(model), expected, strict=True):
        assert torch.equal(one, other)


def test_the_proof_of_a_lens_leaves_nothing_behind(tiny_folder, tiny):
    model = models.load(tiny_folder("llama"))
    before, hidden = state(model), torch.ones(2, D)
    for at in (1, 9):
        with Bomb(at), pytest.raises(KeyboardInterrupt):
            lens_logits(model, hidden)
        assert state(model) == before
    assert torch.equal(lens_logits(model, hidden), lens_logits(tiny("llama"), hidden))


def test_an_interrupted_load_leaves_nothing_behind(tiny_folder):
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    with Bomb() as counted:
        expected = models.load(tiny_folder("llama"))
    with Bomb(int(counted.calls * 0.6)), pytest.raises(KeyboardInterrupt):
        models.load(tiny_folder("llama"))
    assert serving() is None and torch.is_grad_enabled() and logging.is_progress_bar_enabled() == bars
    again = models.load(tiny_folder("llama"))
    assert again.report == expected.report and list(hooks(again)) == list(hooks(expected))
