"""The table of laws: what must hold of every family, head layout and dtype, each against plain transformers or loops.

A law takes a case and raises AssertionError where it does not hold. Laws that need two runs to agree bit by bit, or to
1e-4, are fp32 laws; the others judge half precision by transformers' own error in it (``Case.near``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conformance.cases import DONOR, GIVER, IDS, NEEDLE, PROMPT, SUFFIX, Case, N
from edit_oracle import CellEdit
from torch.testing import assert_close

from kvprobe import KVMask, KVPatch, Prompt, ValueGate, eviction, intervene, observe, prefill, span_stats
from kvprobe.errors import CapabilityError
from kvprobe.eviction import KeepMask
from kvprobe.interventions import fwd_hooks

MASK = KVMask("needle", queries="after")
ROWS = range(N - SUFFIX, N)
STILL = 5e-5
"""Two fp32 runs of the same numbers in other shapes."""


def logits_are_transformers(case: Case) -> None:
    """Clean logits of every row, of the fast path and of TransformerLens."""
    (clean,) = intervene(case.model, PROMPT, [()], suffix=N)
    case.agree(clean.logits, None)
    with torch.no_grad():
        case.agree(case.model.bridge(torch.tensor([IDS]), prepend_bos=False)[0], None)


def rows_are_transformers(case: Case) -> None:
    """Observed rows of every layer and head = output_attentions; a window's hidden keys hold exactly 0."""
    trace, (exact, naive) = observe(case.model, PROMPT, slice(None)), case.clean
    for view in trace.layers():
        assert view.attention.dtype == torch.float32
        hidden = ~case.exact.visible(view.index, N)
        assert bool((view.attention[:, hidden] == 0).all())
        if case.half:
            case.near(view.attention, exact.attention[view.index], naive.attention[view.index])
        else:
            assert_close(view.attention, exact.attention[view.index], atol=2e-5, rtol=1e-4)


def masks_bite(case: Case) -> None:
    """All heads lose a span: logits = transformers under a 4-D mask, weights exactly 0, and the receipt holds."""
    out = intervene(case.model, PROMPT, MASK, suffix=SUFFIX)
    case.agree(out.logits, case.table(), slice(N - SUFFIX, N))
    receipt, geometry = out.receipt, case.model.geometry
    seen = [case.exact.visible(layer, N)[NEEDLE.stop :, list(NEEDLE)].sum() for layer in range(geometry.n_layers)]
    assert receipt.layers_fired == tuple(range(geometry.n_layers)) and receipt.masked_weight == 0
    assert receipt.cells_reached == receipt.cells_expected == int(sum(seen)) * geometry.n_heads
    for layer in range(geometry.n_layers):
        assert bool((out.attention(layer)[..., list(NEEDLE)] == 0).all())
    (clean,) = intervene(case.model, PROMPT, [()], suffix=N - NEEDLE.stop)
    (longer,) = intervene(case.model, PROMPT, [MASK], suffix=N - NEEDLE.stop)
    assert float((longer.logits[0].float() - clean.logits[0].float()).abs().max()) > 0.05


def one_head_is_one_head(case: Case) -> None:
    """A mask of one query head: 4-D mask of that head, and no other head of that layer changes by a bit."""
    last = case.model.geometry.n_heads - 1
    for head in (last,) if case.half else (0, last // 2, last):
        arm = KVMask("needle", layers=1, heads=[head], queries="after")
        masked, clean = intervene(case.model, PROMPT, [arm, ()], suffix=N - NEEDLE.stop)
        case.agree(masked.logits, case.table([1], [head]), slice(NEEDLE.stop, N))
        mine, theirs = masked.attention(1), clean.attention(1)
        others = [each for each in range(case.model.geometry.n_heads) if each != head]
        assert torch.equal(mine[others], theirs[others])
        assert bool((mine[head][:, list(NEEDLE)] == 0).all()) and bool((theirs[head][0, list(NEEDLE)] > 0).any())
        assert torch.equal(masked.attention(0), clean.attention(0))


def caches_change_nothing(case: Case) -> None:
    """A prefilled context of any length, and greedy decoding, equal one uncached run of plain transformers."""
    for cut in (10,) if case.half else (1, 10, N - SUFFIX):
        outs = intervene(case.model, PROMPT, [MASK, ()], suffix=SUFFIX, prefix=prefill(case.model, PROMPT, cut))
        for out, table in zip(outs, (case.table(), None), strict=True):
            case.agree(out.logits, table, slice(N - SUFFIX, N))
    if not case.half:
        out = intervene(case.model, PROMPT, MASK, suffix=SUFFIX, generate=4)
        assert out.generated == case.exact.greedy(IDS, 4, lambda n: case.table(n=n), {2})


def batches_change_nothing(case: Case) -> None:
    """Arms in one batch = one by one; A, B = B, A; a batch smaller than the arms = one as large."""
    arms = [(), MASK, KVMask((2, 4), layers=[0, 2], heads=[1]), ValueGate((5, 9), 0.5), KVMask((12, 16), beta=0.7)]
    options = {"suffix": SUFFIX, "logits": "all"}
    together = intervene(case.model, PROMPT, arms, **options)
    alone = [intervene(case.model, PROMPT, [arm], **options)[0] for arm in arms]
    swapped = intervene(case.model, PROMPT, arms[::-1], **options)[::-1]
    pairs = intervene(case.model, PROMPT, arms, batch=2, **options)
    for one, *others in zip(together, alone, swapped, pairs, strict=True):
        for other in others:
            assert_close(other.logits, one.logits, atol=STILL, rtol=1e-5)


def left_pads_change_nothing(case: Case) -> None:
    """The same prompt behind pads: logits and rows equal, pads are never attended to."""
    padded = Prompt.from_ids([0] * 3 + IDS, {"needle": (12, 15)}, attention_mask=[0] * 3 + [1] * N)
    here = intervene(case.model, PROMPT, [MASK, ()], suffix=SUFFIX)
    there = intervene(case.model, padded, [MASK, ()], suffix=SUFFIX)
    for mine, theirs in zip(there, here, strict=True):
        assert torch.equal(mine.logits, theirs.logits)
        assert_close(mine.attention(1)[..., 3:], theirs.attention(1), atol=1e-6, rtol=1e-5)
        assert bool((mine.attention(1)[..., :3] == 0).all())


def span_stats_are_loops(case: Case) -> None:
    """Mass, bound and perturbation of spans by definition, in fp64, from transformers' rows, values and W_O."""
    from oracles import PROJECTIONS, Plain

    slow, spans, queries = Plain(case.folder, torch.float64), [(0, 3), (4, 9), (19, 24)], [3, N - 1]
    frame = span_stats(observe(case.model, PROMPT, queries), spans)
    rows = slow(IDS).attention
    with torch.no_grad():
        cache = slow.hf(input_ids=torch.tensor([IDS]), use_cache=True, past_key_values=_whole()).past_key_values
    heads = case.model.geometry.n_heads
    for row in frame.itertuples():
        module = slow._modules()[row.layer]
        child = next(getattr(module, name) for name in PROJECTIONS if hasattr(module, name))
        w_o = child.weight if type(child).__name__ == "Conv1D" else child.weight.T
        values = cache.layers[row.layer].values[0].repeat_interleave(heads // len(cache.layers[0].values[0]), 0)
        projected = values[row.head] @ w_o.detach().unflatten(0, (heads, -1))[row.head]
        a = rows[row.layer][row.head, row.query]
        gone = torch.zeros(N, dtype=torch.bool)
        gone[row.start : row.stop] = True
        sink = float(1 - a.sum()) if slow.sinks else 0.0
        mass, kept = float(a[gone].sum()), float(a[~gone].sum()) + sink
        assert row.mass == pytest.approx(mass, abs=1e-5)
        if kept < 1e-6:
            continue
        shift = (a.masked_fill(gone, 0.0) / kept - a) @ projected
        value_mass, rest = (float((a * projected.abs().sum(-1))[part].sum()) for part in (gone, ~gone))
        size = float(projected.abs().sum(-1).max())
        assert row.value_mass == pytest.approx(value_mass, abs=2e-5 * size)
        assert row.perturbation == pytest.approx(float(shift.abs().sum()), rel=1e-4, abs=1e-4 * size)
        assert row.bound == pytest.approx(value_mass + mass / kept * rest, rel=1e-4, abs=1e-4 * size)


def gates_are_loops(case: Case) -> None:
    """Values of a span halved for some heads: attention by loops over plain transformers."""
    heads = [0, case.model.geometry.n_heads - 1]
    arm = ValueGate("needle", 0.5, heads=heads, queries="after")
    out = intervene(case.model, PROMPT, [arm, ()], suffix=SUFFIX)[0]
    rows, layers = list(range(NEEDLE.stop, N)), list(range(case.model.geometry.n_layers))
    edit = CellEdit(list(NEEDLE), rows, heads, layers, scale=0.5)
    wanted = case.loops(IDS, [edit])[list(ROWS)]
    assert_close(out.logits, wanted, atol=1e-4, rtol=1e-5)
    assert out.receipt.sites["weights"].reached == out.receipt.sites["weights"].expected > 0


def moved_keys_are_keys_made_there(case: Case) -> None:
    """A donor's keys from other positions: as if the donor had stood there, on every layer; or refused in words."""
    donor = prefill(case.model, GIVER)
    arm = KVPatch((12, 17), donor, (3, 8), "k", queries="after")
    shift = 9 if case.model.geometry.rotary else 0
    keys = {layer: part[0][:, 3:8] for layer, part in case.loops.cache(DONOR, shift).items()}
    every = list(range(case.model.geometry.n_heads))
    edit = CellEdit(list(range(12, 17)), list(range(17, N)), every, list(keys), keys=keys)
    out = intervene(case.model, PROMPT, arm, suffix=SUFFIX)
    assert_close(out.logits, case.loops(IDS, [edit])[list(ROWS)], atol=1e-4, rtol=1e-5)


def kept_sets_are_a_mask(case: Case) -> None:
    """What a policy keeps, as KeepMask and as a smaller cache: transformers under the 4-D mask that lacks the rest."""
    model, context = case.model, N - SUFFIX
    ragged, uniform = eviction.policy("snapkv+adakv", window=4, pool="max", kernel=3), eviction.policy("knorm")
    for policy in (uniform,) if case.half else (ragged, uniform):
        keep = policy.select(model, IDS[:context], "0.5")
        assert int(keep.sum()) == keep.shape[0] * keep.shape[1] * (context // 2)
        gone = ~keep.repeat_interleave(model.geometry.n_heads // keep.shape[1], 1)
        table = case.table(layers=[])
        for layer, head, key in gone.nonzero().tolist():
            table[layer, head, context:, key] = -torch.inf
        out = intervene(model, PROMPT, KeepMask(keep), suffix=SUFFIX)
        case.agree(out.logits, table, slice(context, N))
        assert out.receipt.masked_weight == 0 and out.receipt.cells_reached == out.receipt.cells_expected
    assert out.receipt.cells_reached > 0  # knorm drops recent entries too, which a small window still sees
    if not any(model.geometry.windows):
        smaller = eviction.compact(model, prefill(model, PROMPT, context), keep)
        answer, _ = eviction.continue_from(model, smaller, IDS[context:])
        case.agree(answer, table, slice(context, N))


def hooks_are_the_fast_path(case: Case) -> None:
    """A mask, a gate and both as TransformerLens hooks in ``run_with_hooks``."""
    mask = KVMask("needle", layers=[0, 2], heads=[0, case.model.geometry.n_heads - 1], queries="after")
    for arm in ([MASK], [mask, ValueGate((13, 16), 0.3)]):
        if case.half and len(arm) > 1:
            continue
        with torch.no_grad():
            hooks = fwd_hooks(case.model, PROMPT, arm, SUFFIX)
            hooked = case.model.bridge.run_with_hooks(torch.tensor([IDS]), fwd_hooks=hooks, prepend_bos=False)[0]
        if len(arm) == 1:
            case.agree(hooked[-SUFFIX:], case.table(), slice(N - SUFFIX, N))
        else:
            out = intervene(case.model, PROMPT, [tuple(arm)], suffix=SUFFIX)[0]
            assert_close(hooked[-SUFFIX:], out.logits, atol=1e-4, rtol=1e-5)


def _whole():
    """A cache that keeps what a window layer will not see again, as transformers' default one does not."""
    from transformers import DynamicCache

    return DynamicCache()


@dataclass(frozen=True)
class Law:
    """A law, the column of the support table that it earns, and the dtypes that it speaks of."""

    holds: Callable[[Case], None]
    earns: str
    half: bool = True
    experts_in_half: bool = True

    def applies(self, case: Case) -> bool:
        """Whether the law speaks of this case."""
        return not case.half or (self.half and (self.experts_in_half or not case.flips))


LAWS = [
    Law(logits_are_transformers, "mask"),
    Law(rows_are_transformers, "observe"),
    Law(span_stats_are_loops, "observe", half=False),
    Law(masks_bite, "mask"),
    Law(one_head_is_one_head, "mask", experts_in_half=False),
    Law(caches_change_nothing, "mask", experts_in_half=False),
    Law(batches_change_nothing, "mask", half=False),
    Law(left_pads_change_nothing, "mask", experts_in_half=False),
    Law(hooks_are_the_fast_path, "mask"),
    Law(gates_are_loops, "gate", half=False),
    Law(kept_sets_are_a_mask, "eviction", experts_in_half=False),
    Law(moved_keys_are_keys_made_there, "moved keys", half=False),
]


def refusal(case: Case, law: Law) -> str | None:
    """Run one law; None where it holds, the reason where what it is about is refused in words."""
    try:
        law.holds(case)
    except CapabilityError as error:
        assert "\n" not in str(error)
        return str(error)
    return None
