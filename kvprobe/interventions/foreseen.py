"""What positions alone decide, before any compute: rows that would lose every key, and keys that no query sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvprobe.errors import InterventionError
from kvprobe.interventions.scene import ArmBias, Scene


def _groups(
    layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene
) -> Iterable[tuple[list[int], ArmBias, int | None]]:
    """Layers of an arm that share bias and window (all layers of most arms do): each case is worked out once."""
    groups: dict[tuple[int, int | None], tuple[list[int], ArmBias]] = {}
    for layer, by_arm in layers.items():
        if arm in by_arm:
            key = (id(by_arm[arm]), scene.windows[layer])
            groups.setdefault(key, ([], by_arm[arm]))[0].append(layer)
    for (_, window), (numbers, bias) in groups.items():
        yield numbers, bias, window


def silenced(layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene) -> Iterable[tuple[int, int, int]]:
    """(layer, head, query) rows left without a single unbiased visible key; queries count pads, as users do.

    A row always sees itself, so only queries whose own key is cut can be silenced: those are looked at one by one.
    With a learned sink no row is ever silenced.
    """
    if scene.has_sink:
        return
    for numbers, bias, window in _groups(layers, arm, scene):
        for query, heads, finite in _full_rows(bias, window, scene):
            if finite or _raises(bias, query, heads):
                what = "gives the same finite bias to" if finite else "removes"
                raise InterventionError(
                    f"the mask {what} every key that query {query + scene.offset} sees (layer {numbers[0]}, "
                    f"head {heads[0]}): there is no attention row left; allowed: keys that leave one key visible, or "
                    "on_empty='zero' (head output 0) or on_empty='keep_self'"
                )
            yield from ((layer, head, query + scene.offset) for layer in numbers for head in heads)


def _raises(bias: ArmBias, query: int, heads: Sequence[int]) -> bool:
    """Whether a cut that took part in silencing these heads at this query refuses silence."""
    at = torch.tensor([query])
    return any(
        cut.on_empty == "raise" and bool(cut.rows.touches(at)) and (cut.heads is None or bool({*heads} & {*cut.heads}))
        for cut in bias.cuts
    )


def _full_rows(bias: ArmBias, window: int | None, scene: Scene) -> Iterable[tuple[int, list[int], bool]]:
    columns = bias.columns
    own = columns[columns < scene.n]
    touched = torch.stack([cut.rows.touches(own) for cut in bias.cuts]).any(0)
    for query in own[touched].tolist():
        low = 0 if window is None else max(0, query - window + 1)
        if int(((columns >= low) & (columns <= query)).sum()) < query - low + 1:
            continue
        values = bias.at(torch.tensor([query]))[:, 0, (columns >= low) & (columns <= query)]
        full = (values < 0).all(-1)
        if not full.any():
            continue
        heads = full.nonzero().flatten().tolist()
        heads = list(range(bias.n_heads)) if values.shape[0] == 1 else heads
        yield query, heads, bool((values[full] > -torch.inf).any())


def unseen(layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene) -> dict[int, int]:
    """layer → number of cut keys that no touched query sees (causal order or window): cutting them changes nothing."""
    result: dict[int, int] = {}
    for numbers, bias, window in _groups(layers, arm, scene):
        last = torch.full_like(bias.columns, scene.n + scene.follow - 1)
        if window is not None:
            last = torch.minimum(last, bias.columns + window - 1)
        met = torch.zeros(len(last), dtype=torch.bool)
        for cut in bias.cuts:
            met |= torch.isin(bias.columns, cut.columns) & cut.rows.meets(bias.columns, last)
        hidden = int((~met).sum())
        result.update({layer: hidden for layer in numbers if hidden})
    return result
