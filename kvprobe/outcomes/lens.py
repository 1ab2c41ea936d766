"""The logit lens: what a hidden state would predict if the model ended there, proven on the last layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.errors import CapabilityError, TheoryError
from kvprobe.streams import tapped
from kvprobe.versions import versions

PROBE = 8
"""Random tokens on which a lens is proven."""

HEAD_BYTES = 64 << 20
"""A head in half precision is upcast in blocks of this size."""

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
SOFTCAP = "final_logit_softcapping"
"""What transformers' classes call what they do behind the head: Cohere, Falcon-H1; Granite; Gemma."""

_proven: WeakKeyDictionary[Any, Lens] = WeakKeyDictionary()


@dataclass(frozen=True)
class Lens:
    """Hidden states after a layer → logits, in fp32: head(norm(h)), scaled and soft-capped as the model does it.

    The norm is the model's own and is applied **once**: hidden states are those that leave a layer (``resid_post``).
    transformers' ``hidden_states[-1]`` has been through it already, and does not belong here.

    Attributes
    ----------
    modules
        What runs between the last layer and the head: the final norm, and a projection where the class has one.
    weight, bias
        The head's, [V, D] and [V] or None; shared with the model.
    width
        D of the hidden states.
    scale, softcap
        Behind the head: softcap · tanh(scale · logits / softcap).
    max_diff
        Largest difference to the model's own logits when the lens was proven.

    Source
    ------
    nostalgebraist, *interpreting GPT: the logit lens*, 2020.
    """

    modules: tuple[Any, ...]
    weight: Tensor
    bias: Tensor | None
    width: int
    scale: float
    softcap: float | None
    max_diff: float

    @classmethod
    def of(cls, model: Any) -> Lens:
        """The lens of a model, proven on the first call and kept for as long as the model is.

        Raises
        ------
        CapabilityError
            If the lens of the last layer is not what the model itself computes.
        """
        if model.twin not in _proven:
            _proven[model.twin] = _prove(model)
        return _proven[model.twin]

    @property
    def vocab(self) -> int:
        """Number of logits a row."""
        return int(self.weight.shape[0])

    def __call__(self, resid: Tensor) -> Tensor:
        """Logits [..., V] in fp32 of hidden states [..., D], on the head's device.

        Raises
        ------
        TheoryError
            If the hidden states are not floating point or not as wide as the model.
        """
        if not resid.is_floating_point() or resid.dim() < 1 or resid.shape[-1] != self.width:
            given = f"{str(resid.dtype).removeprefix('torch.')} {list(resid.shape)}"
            raise TheoryError(f"hidden states are {given}; allowed: floating point, [..., {self.width}]")
        with torch.no_grad():
            hidden = resid.float()
            for module in self.modules:
                hidden = module(hidden.to(_device(module, hidden)))
            logits = self._head(hidden.to(self.weight.device))
            if self.scale != 1.0:
                logits.mul_(self.scale)
            return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def _head(self, hidden: Tensor) -> Tensor:
        """[..., V]; weights in half precision are upcast block by block, never as a whole."""
        if self.weight.dtype == torch.float32:
            return functional.linear(hidden, self.weight, self.bias)
        logits = hidden.new_empty(*hidden.shape[:-1], self.vocab)
        rows = max(1, HEAD_BYTES // (4 * self.weight.shape[1]))
        for start in range(0, self.vocab, rows):
            block = slice(start, start + rows)
            logits[..., block] = functional.linear(hidden, self.weight[block].float())
        return logits if self.bias is None else logits.add_(self.bias.float())


def lens_logits(model: Any, resid: Tensor) -> Tensor:
    """Logits [..., V] in fp32 that the model would give if it ended with these hidden states [..., D].

    Parameters
    ----------
    resid
        Hidden states after any layer, before the final norm: ``Outcome.streams.resid_post``.

    Raises
    ------
    CapabilityError
        If the model's lens cannot be proven (see :class:`Lens`).
    TheoryError
        If the hidden states are not floating point or not as wide as the model.
    """
    return Lens.of(model)(resid)


def _prove(model: Any) -> Lens:
    """Build the lens from what was seen to run behind the last layer, and compare it with the model's own logits."""
    try:
        called, resid, logits = _watched(model.twin, model.geometry.n_layers)
        lens = _built(model, called)
        difference = float((lens(resid) - logits).abs().max())
    except (TheoryError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise _refused(model, " ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    # As in the capability check: noise in fp32, and 8 ulp of the largest logit in half precision.
    tolerance = max(5e-4, 8 * torch.finfo(model.dtype).eps * float(logits.abs().max()))
    if not difference <= tolerance:
        names = ", ".join(type(module).__name__ for module in called)
        raise _refused(
            model,
            f"the last layer's hidden states through {names} differ from the model's own logits by {difference:.3g} "
            f"(tolerance {tolerance:.2g})",
        )
    return replace(lens, max_diff=difference)


def _watched(twin: Any, n_layers: int) -> tuple[list[Any], Tensor, Tensor]:
    """The modules that run behind the last layer, in order, its hidden states [n, D] and the logits [n, V]."""
    called: list[Any] = []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, twin.get_input_embeddings().weight.shape[0], (1, PROBE), generator=generator)
    with tapped(twin, n_layers, PROBE) as tap:

        def note(module: Any, args: Any) -> None:
            inside = any(module is part for outer in called for part in outer.modules())
            if n_layers - 1 in tap.resid_post and not inside:
                called.append(module)

        handles = [module.register_forward_pre_hook(note) for module in twin.modules()]
        try:
            logits = engine.forward(twin, ids, Run(), engine.new_cache())[0].float()
        finally:
            for handle in handles:
                handle.remove()
    return called, tap.resid_post[n_layers - 1][0], logits


def _built(model: Any, called: list[Any]) -> Lens:
    """A lens that is not proven yet."""
    head = model.twin.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not called or called[-1] is not head or not isinstance(weight, Tensor) or not weight.is_floating_point():
        names = ", ".join(type(module).__name__ for module in called) or "nothing"
        raise _refused(model, f"{names} runs behind the last layer; allowed: modules that end in a floating-point head")
    scale, softcap = _behind_the_head(vars(model.twin.config.get_text_config()))
    bias, width = getattr(head, "bias", None), model.geometry.d_model
    modules = tuple(_in_fp32(module) for module in called[:-1])
    return Lens(modules, weight.detach(), None if bias is None else bias.detach(), width, scale, softcap, torch.inf)


def _behind_the_head(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """(scale, soft-cap) that a config names; whether its class uses them is for the proof to say."""
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= config.get(name) or 1.0
    for name in DIVISORS:
        scale /= config.get(name) or 1.0
    return scale, config.get(SOFTCAP) or None


def _in_fp32(module: Any) -> Any:
    """The module itself, or a copy where its weights are in another precision."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    return copy.deepcopy(module).float()


def _device(module: Any, hidden: Tensor) -> torch.device:
    weight = next(iter(module.parameters()), hidden)
    return weight.device


def _refused(model: Any, reason: str) -> CapabilityError:
    have = ", ".join(f"{name} {version}" for name, version in versions().items())
    return CapabilityError(
        f"{model.name} ({type(model.twin).__name__}) has no logit lens that kvprobe can prove: {reason}; allowed: "
        f"classes whose logits are head(norm(hidden states)), scaled and soft-capped as their config says [{have}]"
    )
