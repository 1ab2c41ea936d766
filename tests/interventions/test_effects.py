"""ValueGate, KVPatch, ResidualAblation and Inject against plain transformers with loops, alone and together."""

import catalogue
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, HEADS, LAYERS, SUFFIX, N
from edit_oracle import CellEdit, Edited
from torch.testing import assert_close

from kvprobe import Inject, KVMask, KVPatch, Prompt, ResidualAblation, ValueGate, intervene, prefill
from kvprobe.interventions import fwd_hooks

every_family = pytest.mark.parametrize("family", families.FAMILIES)
IDS, DONOR = catalogue.ids(), catalogue.ids(seed=7)
TOTAL = N + len(CONTINUED)
PROMPT, GIVER = Prompt.from_ids(IDS, {"needle": (14, 17)}), Prompt.from_ids(DONOR)
SUFFIX_ROWS, ALL = list(range(N - SUFFIX, TOTAL)), list(range(TOTAL))
D = 48


@pytest.fixture(scope="module")
def edited(tiny_folder):
    made = {}

    def of(family):
        if family not in made:
            made[family] = Edited(tiny_folder(family))
        return made[family]

    return of


def vectors(rows, seed=3):
    return {layer: torch.randn(rows, D, generator=torch.Generator().manual_seed(seed + layer)) for layer in (0, 2)}


def cells(columns, rows, heads=HEADS, layers=LAYERS, **what):
    return CellEdit(list(columns), list(rows), list(heads), list(layers), **what)


def donated(oracle, family, there, here, what="kv"):
    """Keys at their new places, and values, of donor span ``there``: from a donor that was run at shifted positions."""
    shift = 0 if family == "gpt2" else here[0] - there[0]
    cache = oracle.cache(DONOR, shift)
    keys = {layer: cache[layer][0][:, slice(*there)] for layer in LAYERS}
    values = {layer: cache[layer][1][:, slice(*there)] for layer in LAYERS}
    return {"keys": keys if "k" in what else {}, "values": values if "v" in what else {}}


def cases(model, oracle, family):
    """name → (arm, cell edits, stream edits)."""
    donor = prefill(model, GIVER)
    few = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    swap = lambda there, here, what="kv": donated(oracle, family, there, here, what)  # noqa: E731
    rows = range(N - SUFFIX, TOTAL)
    return {
        "gate": ([ValueGate("needle")], [cells(range(14, 17), rows, scale=0.0)], []),
        "gate of some heads, from the first key on": (
            [ValueGate([(2, 5), (20, 22)], 0.3, layers=[0, 1], heads=[1, 4], queries="after")],
            [
                cells(range(2, 5), range(5, TOTAL), [1, 4], [0, 1], scale=0.3),
                cells(range(20, 22), range(22, TOTAL), [1, 4], [0, 1], scale=0.3),
            ],
            [],
        ),
        "gate at three rows": (
            [ValueGate((14, 19), 2.5, queries=(15, 18, 27), heads={1: (0, 5)})],
            [cells(range(14, 19), (15, 18, 27), [0, 5], [1], scale=2.5)],
            [],
        ),
        "patch": ([KVPatch("needle", donor)], [cells(range(14, 17), rows, **swap((14, 17), (14, 17)))], []),
        "patch that moves": (
            [KVPatch((12, 17), donor, (3, 8))],
            [cells(range(12, 17), rows, **swap((3, 8), (12, 17)))],
            [],
        ),
        "patch of keys that move back": (
            [KVPatch([(6, 9), (13, 16)], donor, [(15, 18), (1, 4)], "k", queries="after")],
            [
                cells(range(6, 9), range(9, TOTAL), **swap((15, 18), (6, 9), "k")),
                cells(range(13, 16), range(16, TOTAL), **swap((1, 4), (13, 16), "k")),
            ],
            [],
        ),
        "patch of values of a head": (
            [KVPatch((13, 19), donor, what="v", layers=1, heads=[3])],
            [cells(range(13, 19), rows, [3], [1], **swap((13, 19), (13, 19), "v"))],
            [],
        ),
        "patch of own keys": (
            [KVPatch((19, 24), donor, queries=(21, 22, 25))],
            [cells(range(19, 24), (21, 22, 25), **swap((19, 24), (19, 24)))],
            [],
        ),
        "no block": ([ResidualAblation()], [], [(i, "block", rows, None) for i in LAYERS]),
        "no attention at two rows": (
            [ResidualAblation("attention", [0, 2], (9, 24))],
            [],
            [(0, "attention", (9, 24), None), (2, "attention", (9, 24), None)],
        ),
        "no mlp": ([ResidualAblation("mlp", 1)], [], [(1, "mlp", rows, None)]),
        "inject": (
            [Inject(vectors(len(rows)), queries=list(rows))],
            [],
            [(layer, "attention", rows, vectors(len(rows))[layer]) for layer in (0, 2)],
        ),
        "inject one vector": ([Inject({1: few[0]})], [], [(1, "attention", rows, few[0])]),
        "inject at three rows": (
            [Inject({1: few}, queries=(2, 20, 28))],
            [],
            [(1, "attention", (2, 20, 28), few)],
        ),
        "mask and gate": (
            [KVMask((14, 16)), ValueGate((15, 19), 0.5)],
            [cells(range(14, 16), rows, bias=-torch.inf), cells(range(15, 19), rows, scale=0.5)],
            [],
        ),
        "gate upon a patch, and a dose": (
            [ValueGate((13, 16), 0.5), KVPatch((12, 17), donor, (3, 8)), KVMask((15, 18), beta=0.7)],
            [
                cells(range(13, 16), rows, scale=0.5),
                cells(range(12, 17), rows, **swap((3, 8), (12, 17))),
                cells(range(15, 18), rows, bias=-0.7),
            ],
            [],
        ),
        "inject where attention was removed": (
            [Inject({1: few[1]}), ResidualAblation("attention", 1), KVMask("needle", queries="after")],
            [cells(range(14, 17), range(17, TOTAL), bias=-torch.inf)],
            [(1, "attention", rows, None), (1, "attention", rows, few[1])],
        ),
    }


NAMES = [
    "gate", "gate of some heads, from the first key on", "gate at three rows", "patch", "patch that moves",
    "patch of keys that move back", "patch of values of a head", "patch of own keys", "no block",
    "no attention at two rows", "no mlp", "inject", "inject one vector", "inject at three rows", "mask and gate",
    "gate upon a patch, and a dose", "inject where attention was removed",
]  # fmt: skip


@every_family
def test_every_effect_equals_plain_transformers_with_loops(family, tiny, edited):
    """In one batch, beside clean arms: what one arm does never reaches another."""
    model, oracle = tiny(family), edited(family)
    made = cases(model, oracle, family)
    assert list(made) == NAMES
    arms = [(), *(tuple(arm) for arm, _, _ in made.values()), (KVMask([]),)]
    outs = intervene(model, PROMPT, arms, suffix=SUFFIX, continuation=CONTINUED)
    tokens = [*IDS, *CONTINUED]
    clean = oracle(tokens)[N - SUFFIX :]
    assert_close(outs[0].logits, clean, atol=1e-4, rtol=1e-5)
    assert torch.equal(outs[0].logits, outs[-1].logits)
    for name, out in zip(NAMES, outs[1:-1], strict=True):
        expected = oracle(tokens, made[name][1], made[name][2])[N - SUFFIX :]
        assert_close(out.logits, expected, atol=1e-4, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert (expected - clean).abs().max() > 1e-3, name


@every_family
def test_order_and_batch_change_nothing(family, tiny, edited):
    model = tiny(family)
    arms = [tuple(arm) for arm, _, _ in cases(model, edited(family), family).values()]
    outs = intervene(model, PROMPT, arms, suffix=SUFFIX, continuation=CONTINUED)
    back = intervene(model, PROMPT, arms[::-1], suffix=SUFFIX, continuation=CONTINUED, batch=3)[::-1]
    for name, one, other in zip(NAMES, outs, back, strict=True):
        assert_close(one.logits, other.logits, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert one.receipt.sites == other.receipt.sites


@every_family
def test_hooks_in_transformer_lens_equal_the_fast_path(family, tiny, edited):
    model = tiny(family)
    whole = Prompt.from_ids([*IDS, *CONTINUED], {"needle": (14, 17)})
    for name, (arm, _, _) in cases(model, edited(family), family).items():
        suffix = SUFFIX + len(CONTINUED)
        hooks = fwd_hooks(model, whole, arm, suffix)
        with torch.no_grad():
            hooked = model.bridge.run_with_hooks(whole.ids[None], fwd_hooks=hooks, prepend_bos=False)
        out = intervene(model, whole, [tuple(arm)], suffix=suffix)[0]
        assert_close(out.logits, hooked[0, -suffix:], atol=2e-4, rtol=1e-5, msg=lambda t, name=name: f"{name}: {t}")


@every_family
def test_decoding_under_effects_equals_runs_without_any_cache(family, tiny, edited):
    """Greedy tokens and step receipts: what holds for a row of the prompt holds for one that is decoded."""
    model, oracle = tiny(family), edited(family)
    few = torch.randn(1, D, generator=torch.Generator().manual_seed(1))[0]
    made = [
        ([ValueGate((14, 19), 0.0)], lambda n: ([cells(range(14, 19), range(N - SUFFIX, n), scale=0.0)], [])),
        ([ResidualAblation("mlp", 1)], lambda n: ([], [(1, "mlp", range(N - SUFFIX, n), None)])),
        ([Inject({1: few}, queries="generated")], lambda n: ([], [(1, "attention", range(N, n), few)])),
    ]
    outs = intervene(model, PROMPT, [tuple(arm) for arm, _ in made], suffix=SUFFIX, generate=5)
    for (_, edits), out in zip(made, outs, strict=True):
        ids, found = list(IDS), []
        for _ in range(5):
            token = int(oracle(ids, *edits(len(ids)))[-1].argmax())
            if token == 2:
                break
            found.append(token)
            ids.append(token)
        assert out.generated == found
        assert all(count.expected == count.reached > 0 for count in out.receipt.sites.values())
