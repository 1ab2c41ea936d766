"""A dry run: the twin's own code over tensors that have a shape and no numbers.

What a pass allocates is not estimated from a formula that some architecture does not follow: the very modules run on
the meta device, every storage is counted while it lives, every matrix product by its FLOPs. What attention holds inside
is kvprobe's own arithmetic (:mod:`kvprobe.costs.inside`), and enters where the pass calls it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvprobe import attention, engine
from kvprobe.attention import Run
from kvprobe.costs.inside import Setting, inside_bytes
from kvprobe.errors import PlanError
from kvprobe.layerspec import LayerSpec

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
"""Operators whose FLOPs are 2 × (elements of the result) × (inner size)."""


@dataclass(frozen=True)
class Pass:
    """One dry pass of B × t tokens.

    Attributes
    ----------
    work_bytes
        Largest total of what is held at once, cached keys and values left out.
    flops
        Of all matrix products outside attention.
    logits_bytes
        Of the logits it returns.
    kv_bytes
        Of the keys and values that it adds to the cache.
    query_bytes
        Of all its query rows, all layers.
    heads
        (layer) → (H, K, d, d_v).
    specs
        (layer) → scale, window, soft-cap, learned sink.
    """

    work_bytes: int
    flops: int
    logits_bytes: int
    kv_bytes: int
    query_bytes: int
    heads: tuple[tuple[int, int, int, int], ...]
    specs: tuple[LayerSpec, ...]


def hollow(twin: Any) -> Any:
    """A copy of the twin whose parameters are on the meta device; its small buffers stay what they are."""
    empty = {id(each): nn.Parameter(torch.empty_like(each, device="meta"), False) for each in twin.parameters()}
    kept = {id(each): each for each in twin.buffers()}
    return copy.deepcopy(twin, {**empty, **kept})


def from_config(config: Any, dtype: torch.dtype) -> Any:
    """The transformers class of a config with nothing in it, ready for :func:`run_dry`.

    Raises
    ------
    PlanError
        There is no such class, it keeps its own attention, or its weights are quantised: a config does not say how many
        bytes those take.
    """
    from transformers import AutoModelForCausalLM

    kind = f"the config's {getattr(config, 'model_type', 'model')}"
    if getattr(config, "quantization_config", None):
        raise PlanError(
            f"{kind} has quantised weights, and a config does not say what they hold; allowed: plan the loaded model, "
            "or the config without quantization_config"
        )
    attention.register()
    try:
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        twin.set_attn_implementation(attention.NAME)
    except Exception as error:  # transformers raises many kinds here; the user needs one line
        raise PlanError(f"{kind} cannot be built ({_reason(error)}); allowed: decoder-only language models") from error
    if twin.config._attn_implementation != attention.NAME:
        raise PlanError(f"{type(twin).__name__} keeps its own attention, and kvprobe.load refuses it: no plan")
    return twin.eval()


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def run_dry(twin: Any, setting: Setting, keep: int) -> Pass:
    """Run B × t tokens through a hollow twin; ``keep`` is the number of rows whose logits are made (0: all)."""
    batch, tokens = setting.batch, setting.rows
    dtype = next(iter(twin.parameters())).dtype
    setting = replace(setting, item=dtype.itemsize)
    try:
        twin, width = _routed(twin, dtype)
        ledger, cache = _Ledger([*twin.parameters(), *twin.buffers()]), engine.new_cache()
        run = Run(dry=ledger.attending(setting, width), capture=torch.arange(tokens))
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        with torch.no_grad(), attention.active(run), ledger:
            out = twin(
                input_ids=ids,
                position_ids=torch.arange(tokens)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        pairs = engine.cached_layers(cache)
        if len(run.specs) != len(pairs) or not pairs:
            raise PlanError(f"layers {sorted(run.specs)} of {len(pairs)} attended")
    except Exception as error:  # code of any class raises what it likes; the user needs one line
        raise PlanError(
            f"{type(twin).__name__} cannot be run without numbers ({_reason(error)}); allowed: classes that "
            "kvprobe.load accepts, and whose code does not depend on the values of its tensors"
        ) from error
    queries = sum(_size(query) for query in run.queries.values())
    cached = sum(_size(part) for pair in pairs for part in pair)
    heads = tuple(
        (run.queries[i].shape[1], keys.shape[1], keys.shape[3], values.shape[3])
        for i, (keys, values) in enumerate(pairs)
    )
    held = ledger.peak - cached - queries  # captured rows are copies that an ordinary pass does not make
    return Pass(
        width * held,
        ledger.flops,
        width * _size(out.logits),
        width * cached,
        width * queries,
        heads,
        tuple(run.specs[layer] for layer in sorted(run.specs)),
    )


def _routed(twin: Any, dtype: torch.dtype) -> tuple[Any, int]:
    """Mixture-of-experts layers as grouped products, which on the meta device exist in bfloat16 only.

    Returns the twin to run, and by what its bytes count (2 where an fp32 model stands in as bf16).
    """
    if not any(parameter.dim() == 3 for parameter in twin.parameters()):
        return twin, 1
    twin = twin if dtype == torch.bfloat16 else hollow(twin).to(torch.bfloat16)
    twin.set_experts_implementation("grouped_mm")
    return twin, 2 if dtype == torch.float32 else 1


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Ledger(TorchDispatchMode):
    """Bytes of all storages alive that operators have made since it was entered, their peak, and FLOPs."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, int] = {}
        self.held = self.peak = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_as_meta, (args, kwargs))
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func.overloadpacket.__name__ in PRODUCTS:
            operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim() > 1]
            left = operands[-2] if len(operands) > 1 else operands[-1]
            self.flops += 2 * made[0].numel() * left.shape[-1]
        for tensor in made:
            self._note(tensor.untyped_storage())
        return out

    def attending(self, setting: Setting, width: int) -> Callable[[Tensor, Tensor, Tensor, LayerSpec], Tensor]:
        """Stands in for attention: a result of the right shape, and what the inside would hold beside it.

        The bytes of this ledger count ``width`` times; those of the inside are what they are.
        """

        def attend(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Tensor:
            heads = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
            out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
            self.peak = max(self.peak, self.held + inside_bytes(setting, spec, heads) // width)
            return out

        return attend

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.alive or key in self.known:
            return
        self.alive[key] = storage.nbytes()
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.held -= self.alive.pop(key)


def _as_meta(leaf: Any) -> Any:
    """Positions and rotary frequencies keep their numbers until they meet a tensor without."""
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() else leaf
