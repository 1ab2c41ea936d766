"""A model's own rotary embedding: forwards, backwards, and on average."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.errors import CapabilityError

PROBE = 12
"""Repetitions of one token in the proof: enough for fast pairs to turn twice around."""

SHIFT = 7
"""Positions by which the proof moves a text."""

MOVING = ("dynamic", "longrope")
"""Kinds of scaling whose angles depend on the length of the text, not on the position alone."""


@dataclass(frozen=True)
class Rotary:
    """Rotation by position as one model does it: ``x_a, x_b → s (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)``.

    Pairs (a, b) are (i, i + m) or (2i, 2i + 1) of the first 2m components; the others (partial rotary) pass unchanged;
    s is the attention scaling that some length extensions put into cos and sin. Make it by :meth:`of`, which proves it.

    Attributes
    ----------
    module
        The model's ``rotary_emb``: ``(x, position_ids) → cos, sin``.
    interleaved
        Whether pairs are neighbours.
    layout
        How angles stand in cos and sin: twice in a row (``"cat"``), each one doubled (``"repeat"``), or once
        (``"bare"``).
    head_dim
        d.
    """

    module: Any
    interleaved: bool
    layout: str
    head_dim: int

    @classmethod
    def of(cls, model: Any) -> Rotary:
        """The rotation of a loaded model, proven on it.

        One token repeated gives equal queries in every row before rotation, whatever the model: the right style,
        undone, makes them equal again and the wrong one does not. Models with learned sinks are proven by layer 0 alone
        (deeper down a sink's share, and with it the hidden state, depends on the row).

        A text that stands a few positions later has the same hidden states, and keys turned by as much: on every layer
        they must be what this rotation makes of them, or some layers turn otherwise, or not at all.

        Raises
        ------
        CapabilityError
            No rotary embedding or several, angles that are no function of the position alone, or no style passes.
        """
        twin = model.twin
        module = _module(twin)
        captured = _repeated(twin)
        head_dim = next(iter(captured.values())).shape[-1]
        layout = _layout(module, captured)
        styles = [cls(module, interleaved, layout, head_dim) for interleaved in (False, True)]
        worst = [style._spread(captured) for style in styles]
        best = min((0, 1), key=lambda index: worst[index][0])
        exact = next(iter(twin.parameters())).dtype in (torch.float32, torch.float64)
        if not worst[best][0] <= (1e-3 if exact else 5e-2):
            raise CapabilityError(_unproven(twin, *worst[best], captured))
        styles[best]._prove_keys(twin, 1e-3 if exact else 5e-2)
        return styles[best]

    def rotate(self, x: Float[Tensor, "*heads n d"], positions: Int[Tensor, " n"]) -> Float[Tensor, "*heads n d"]:
        """Vectors as the model rotates them at these positions, in fp32 at least."""
        return self._turn(x, *self._tables(positions))

    def unrotate(self, x: Float[Tensor, "*heads n d"], positions: Int[Tensor, " n"]) -> Float[Tensor, "*heads n d"]:
        """The inverse of :meth:`rotate`: rotation by −θ, divided by s (cos² + sin² = s²)."""
        cos, sin = self._tables(positions)
        square = cos.square() + sin.square()
        return self._turn(x, cos / square, -sin / square)

    def mean_matrix(self, positions: Int[Tensor, " n"]) -> Float[Tensor, "d d"]:
        """The mean of the rotations at these positions: ``mean_matrix @ x`` is the mean of one x rotated at each."""
        cos, sin = (table.double().mean(0).float() for table in self._tables(positions))
        return self._turn(torch.eye(self.head_dim, device=positions.device), cos, sin).T

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """s cos θ and s sin θ of every pair, [n, m]."""
        cos, sin = _angles(self.module, positions)
        if self.layout == "bare":
            return cos, sin
        half = slice(cos.shape[-1] // 2) if self.layout == "cat" else slice(0, None, 2)
        return cos[:, half], sin[:, half]

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        cos, sin = cos.to(x.device), sin.to(x.device)  # of a model on several devices the tables are on one
        pairs = cos.shape[-1]
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)
        return torch.cat((turned, rest), -1)

    def _prove_keys(self, twin: Any, slack: float) -> None:
        """Refuse a model whose keys, on any layer, do not move as this rotation says."""
        at = torch.arange(PROBE, device=next(iter(twin.parameters())).device)
        here, there = _keys(twin, 0), _keys(twin, SHIFT)
        for layer, (keys, moved) in enumerate(zip(here, there, strict=True)):
            mine = self.rotate(self.unrotate(keys, at), at + SHIFT)
            off = float((mine - moved).norm(dim=-1).amax()) / max(float(moved.norm(dim=-1).amax()), 1e-30)
            if not off <= slack:
                still = torch.equal(keys, moved) or float((keys - moved).norm(dim=-1).amax()) <= slack
                how = "does not rotate the keys" if still else f"turns the keys otherwise ({off:.1%} apart)"
                raise CapabilityError(
                    f"{type(twin).__name__} {how} on layer {layer}; allowed: one rotation for all layers"
                )

    def _spread(self, captured: Mapping[int, Tensor]) -> tuple[float, int]:
        """Largest distance between rows that must be equal, over the largest row, and the layer where it is."""
        return max((_distance(self.unrotate(q, _steps(q))), layer) for layer, q in captured.items())


def _module(twin: Any) -> Any:
    """The one rotary module of a model whose angles depend on the position alone, or the reason why not."""
    name = type(twin).__name__
    named = [(path, module) for path, module in twin.named_modules() if path.split(".")[-1].startswith("rotary_emb")]
    if len(named) != 1:
        found = ", ".join(path for path, _ in named[:3]) or "none"
        raise CapabilityError(f"{name}: queries cannot be un-rotated (rotary_emb found: {found}); allowed: exactly one")
    module = named[0][1]
    if "layer_type" in inspect.signature(module.forward).parameters:
        raise CapabilityError(f"{name} rotates its local and global layers differently; allowed: one rotation for all")
    kind = str(getattr(module, "rope_type", "default"))
    if any(each in kind for each in MOVING):
        raise CapabilityError(
            f"{name}: {kind} scaling changes the angles with the length of the text; allowed: angles by position alone"
        )
    if "llama_4_scaling_beta" in (getattr(twin.config.get_text_config(), "rope_parameters", None) or {}):
        raise CapabilityError(f"{name} also scales queries by their position; allowed: rotation alone")
    return module


def _repeated(twin: Any) -> dict[int, Tensor]:
    """Rotated queries [H, PROBE, d] of one token repeated, for the layers where all rows stem from equal ones."""
    token = twin.config.get_text_config().vocab_size // 2
    ids = torch.full((PROBE,), token, dtype=torch.long)
    _, run = engine.prefill(twin, ids, capture=torch.arange(PROBE))
    plain = all(spec.sink is None for spec in run.specs.values())
    return {layer: q[0].float() for layer, q in sorted(run.queries.items()) if plain or layer == 0}


def _keys(twin: Any, start: int) -> list[Tensor]:
    """Rotated keys [K, PROBE, d] of each layer, of a text of different tokens that begins at a position."""
    vocab = twin.config.get_text_config().vocab_size
    ids = torch.arange(PROBE)[None] * (vocab // PROBE) % vocab
    cache = engine.new_cache()
    engine.forward(twin, ids, Run(start=start), cache, keep=1)
    return [keys[0].float() for keys, _ in engine.cached_layers(cache)]


def _angles(module: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The module's own fp32 tables [n, width]."""
    like = torch.zeros(1, device=positions.device)
    cos, sin = module(like, positions[None])
    return cos[0].float(), sin[0].float()


def _layout(module: Any, captured: Mapping[int, Tensor]) -> str:
    first = next(iter(captured.values()))
    tables = torch.stack(_angles(module, _steps(first)))
    width = tables.shape[-1]
    if width % 2 == 0 and torch.equal(tables[..., : width // 2], tables[..., width // 2 :]):
        return "cat"
    if width % 2 == 0 and torch.equal(tables[..., ::2], tables[..., 1::2]):
        return "repeat"
    return "bare"


def _steps(queries: Tensor) -> Tensor:
    return torch.arange(queries.shape[-2], device=queries.device)


def _distance(rows: Tensor) -> float:
    largest = float(rows.norm(dim=-1).amax())
    return float((rows - rows[:, :1]).norm(dim=-1).amax()) / largest if largest else float("inf")


def _unproven(twin: Any, spread: float, layer: int, captured: Mapping[int, Tensor]) -> str:
    if _distance(captured[layer]) < 1e-3:
        return (
            f"{type(twin).__name__} does not rotate the queries of layer {layer}; allowed: one rotation for all layers"
        )
    return (
        f"{type(twin).__name__}: no known style of rotation undoes its own (equal queries come out {spread:.1%} apart "
        f"on layer {layer}); allowed: half-split or interleaved pairs"
    )
