"""What interventions are addressed by: layers × query heads × query rows × key spans, resolved against a scene."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.plan import Rows, Scene

Keys = Sequence[Any]
RULES = ("suffix", "after", "generated")


class Layered:
    """Layers and query rows of an intervention. A dataclass that inherits has the fields ``layers`` and ``queries``."""

    layers: int | Sequence[int] | None
    queries: str | int | Sequence[int]
    rules: tuple[str, ...] = ("suffix", "generated")

    def selected_layers(self, scene: Scene) -> Sequence[int]:
        """Layer indices as given; all of them for None."""
        return range(scene.n_layers) if self.layers is None else indices("layers", self.layers)

    def check_layers(self, scene: Scene, named: Iterable[int]) -> None:
        """Refuse layers that the model does not have."""
        for layer in sorted(set(named)):
            if not 0 <= layer < scene.n_layers:
                raise InterventionError(f"layer {layer} does not exist: the model has layers 0 … {scene.n_layers - 1}")

    def rows(self, scene: Scene, span_stop: int = 0) -> Rows:
        """The query rows that are touched, in real positions."""
        if isinstance(self.queries, str):
            if self.queries not in self.rules:
                raise InterventionError(
                    f"queries={quote(self.queries)} is not one of {', '.join(self.rules)} or a list of positions"
                )
            first = {"suffix": scene.n - scene.suffix, "after": span_stop, "generated": scene.n}[self.queries]
            return Rows(first)
        positions = sorted({*indices("queries", self.queries)})
        total = scene.n + scene.offset
        bad = [q for q in positions if q < scene.offset]
        if bad or not positions:
            raise InterventionError(
                f"query positions {bad or positions} are not allowed: give {scene.offset} … {total - 1} or later"
            )
        real = tuple(q - scene.offset for q in positions)
        return Rows(real[0], real)

    def check_rows(self, scene: Scene) -> None:
        """Refuse rows that cannot be, and ``"suffix"`` where no suffix was given."""
        self.rows(scene)
        if isinstance(self.queries, str) and self.queries == "suffix" and not scene.suffix:
            raise InterventionError(
                "queries='suffix' needs suffix=…, the number of trailing prompt tokens that run under the mask"
            )


class Selective(Layered):
    """Key spans and query heads, too: fields ``keys`` and ``heads``."""

    keys: Keys
    heads: int | Sequence[int] | Mapping[int, Sequence[int]] | None
    rules = RULES

    def selected_layers(self, scene: Scene) -> Sequence[int]:
        """Layers as given, else those that ``heads`` names, else all."""
        if self.layers is None and isinstance(self.heads, Mapping):
            return indices("heads' layers", [*self.heads])
        return super().selected_layers(scene)

    def selected_heads(self, layer: int) -> tuple[int, ...] | None:
        """Query heads of one layer; None for all alike."""
        if self.heads is None:
            return None
        heads = indices("heads", self.heads.get(layer, ()) if isinstance(self.heads, Mapping) else self.heads)
        return tuple(sorted({*heads}))

    def check_selection(self, scene: Scene) -> None:
        """Refuse selectors that name what the model or the prompt does not have, or nothing at all."""
        layers = self.selected_layers(scene)
        named = [*self.heads] if isinstance(self.heads, Mapping) else []
        if named and not set(named) & set(layers):
            raise InterventionError(
                f"heads names layers {quote(named)}, none of layers={quote(self.layers)}; allowed are layers in both"
            )
        if not layers or (self.heads is not None and not any(self.selected_heads(layer) for layer in layers)):
            raise InterventionError(
                f"layers={quote(self.layers)}, heads={quote(self.heads)} name no head: allowed is at least one "
                "(the arm that masks nothing is keys=[])"
            )
        self.check_layers(scene, {*layers, *indices("heads' layers", named)})
        for layer in {*layers, *indices("heads' layers", named)}:
            for head in self.selected_heads(layer) or ():
                if not 0 <= head < scene.n_heads:
                    raise InterventionError(f"head {head} does not exist: the model has heads 0 … {scene.n_heads - 1}")
        if self.spans(scene):
            self.check_rows(scene)
        else:
            self.rows(scene)

    def applies(self, layer: int, scene: Scene) -> bool:
        """Whether this layer is selected with at least one head."""
        return layer in self.selected_layers(scene) and self.selected_heads(layer) != ()

    def given_spans(self, scene: Scene) -> list[tuple[int, int]]:
        """Spans in real positions, in the order given."""
        return resolve(self.keys, scene)

    def spans(self, scene: Scene) -> list[tuple[int, int]]:
        """Real, merged, sorted spans: overlapping keys are touched once."""
        return merge(self.given_spans(scene))


def resolve(keys: Any, scene: Scene) -> list[tuple[int, int]]:
    """Spans and span names as real spans, in the order given; one span may be given bare."""
    named = dict(scene.spans)
    if not isinstance(keys, Iterable):
        raise InterventionError(f"keys must hold (start, stop) pairs or span names, not {quote(keys)}")
    given: list[Any] = [keys] if isinstance(keys, str) or bare(keys) else list(keys)
    spans: list[tuple[int, int]] = []
    for item in given:
        if isinstance(item, str):
            if item not in named:
                raise InterventionError(f"the prompt has no span {quote(item)}; it has {sorted(named) or 'none'}")
            item = named[item]
        if not bare(item):
            raise InterventionError(f"keys must hold (start, stop) pairs or span names, not {quote(item)}")
        spans.append(scene.real(int(item[0]), int(item[1])))
    return spans


def pairs(given: Any, name: str) -> list[tuple[int, int]]:
    """One (start, stop) pair or several, without names and not yet held against any length."""
    several: list[Any] = [given] if bare(given) else [*given] if isinstance(given, Iterable) else [None]
    if isinstance(given, str) or not all(bare(item) for item in several):
        raise InterventionError(f"{name}={quote(given)} is not allowed: give (start, stop) pairs")
    return [(operator.index(item[0]), operator.index(item[1])) for item in several]


def indices(name: str, given: Any) -> tuple[int, ...]:
    """One whole number or several, of whatever integer type (tables hand out NumPy's)."""
    try:
        return (_index(given),)
    except TypeError:
        pass
    try:
        return tuple(_index(value) for value in given)
    except TypeError:
        raise InterventionError(f"{name}={quote(given)} is not allowed: give a whole number or several") from None


def bare(keys: Any) -> bool:
    """Whether ``keys`` is one (start, stop) pair itself."""
    return isinstance(keys, Sequence) and len(keys) == 2 and all(_integer(value) for value in keys)


def merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans, overlapping ones joined (those that only touch stay apart)."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _index(value: Any) -> int:
    """``operator.index`` without bools: layers=True is a mistake, not layer 1."""
    if isinstance(value, bool):
        raise TypeError("a bool is no index")
    return operator.index(value)


def _integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
