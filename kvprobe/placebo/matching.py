"""Placebos for a target: other keys whose removal is an equally strong blow, or the finding that there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.errors import InterventionError, quote
from kvprobe.placebo.finder import REMEDIES, Finder, Match
from kvprobe.placebo.keysets import KeySet, key_set, span_list
from kvprobe.placebo.pools import whole
from kvprobe.placebo.scope import Indices, PerLayer, Scope
from kvprobe.placebo.strength import MEASURES, measure
from kvprobe.spans.inputs import TraceLike


def match(
    trace: TraceLike,
    target: Any,
    k: int = 4,
    match_on: str = "bound",
    *,
    caliper: float = 0.25,
    hard: Any = (),
    protect: Any = (),
    remedies: Sequence[str] = REMEDIES,
    seed: int = 0,
    layers: Indices = None,
    heads: PerLayer = None,
    p: int = 1,
    after: bool = False,
    layer_weights: Any = None,
    position_caliper: float | None = None,
    profile_weight: float = 0.0,
    first: int = 4,
    stop: int | None = None,
    boundaries: Any = None,
) -> Match:
    """Find ``k`` placebos of ``target``: key sets whose removal is as strong a blow in ``match_on``.

    Pools are tried in order, and all placebos come from the first that holds ``k`` within the caliper: ``contiguous``,
    windows of the target's length; ``hard``, single labelled spans; ``hard_set``, unions of 2 to 5 of them, matched in
    strength, not in length; ``token_set``, as many single tokens (or beginnings of sentences) as the target has.

    Parameters
    ----------
    trace : TraceLike
        The clean run; its rows are those that the masks will touch.
    target : key set
        A span, a list of disjoint spans, or names of the trace's spans.
    k : int
        Placebos wanted.
    match_on : {"bound", "perturbation", "centred", "value_mass", "mass"}
        The strength that is matched.
    caliper : float
        Largest |ln ratio| of a placebo's strength to the target's.
    hard, protect : spans
        Labelled competitors, which only their own pools use; tokens that no placebo may hold.
    remedies : sequence of str
        Pools to try, in order.
    seed : int
        Of the unions that are drawn where there are more than 1,024.
    layers, heads, p, after, layer_weights
        As in :func:`kvprobe.placebo.window_strengths`.
    position_caliper : float, optional
        Largest difference in mean position, as a share of ``stop``.
    profile_weight : float
        Weight of the distance between profiles of ln θ over layers × heads, beside |ln ratio|, in the order of choice.
    first, stop : int
        Placebos lie in [first, stop). ``stop`` defaults to the first row (with ``after``, to the end).
    boundaries : spans, optional
        Sentences; pieces of a token set then begin where sentences do, if that reaches the target's strength.

    Returns
    -------
    Match
        With ``remedy`` None and no placebos where no pool holds k.

    Raises
    ------
    PromptError
        Spans that do not fit the trace.
    InterventionError
        Unknown measures or remedies, numbers out of range, layers or heads that the trace does not have.
    TheoryError
        A target that no row sees, or one that leaves some row without attention (R = 0).

    Notes
    -----
    Derived for kvprobe. Everything comes from the clean run, before any outcome is known.
    """
    scope = Scope(trace, layers, heads, p, after, layer_weights)
    finder = _finder(
        scope,
        target,
        k,
        match_on,
        caliper=caliper,
        hard=hard,
        protect=protect,
        seed=seed,
        position_caliper=position_caliper,
        profile_weight=profile_weight,
        first=first,
        stop=stop,
        boundaries=boundaries,
    )
    return finder.match(_remedies(remedies))


def match_each(
    scope: Scope,
    target: Any,
    k: int,
    match_on: Sequence[str],
    remedies: Sequence[str],
    also: Sequence[KeySet],
    **how: Any,
) -> tuple[dict[str, Match], pd.DataFrame]:
    """:func:`match` in several measures, with everything shared that can be, and the strengths of other sets.

    ``how`` holds :func:`match`'s further words. Returns the matches, and all measures of ``[target, *also]``.
    """
    pools = _remedies(remedies)
    found = {name: replace(_finder(scope, target, k, name, **how), tabulate=False).match(pools) for name in match_on}
    own = next(iter(found.values())).target
    sets = list(dict.fromkeys([own, *(keys for one in found.values() for keys in one.placebos), *also]))
    table, number = measure(scope, sets, MEASURES), {keys: i for i, keys in enumerate(sets)}

    def rows(chosen: Sequence[KeySet]) -> pd.DataFrame:
        return table.iloc[[number[keys] for keys in chosen]].reset_index(drop=True)

    matches = {name: replace(one, strengths=rows([own, *one.placebos])) for name, one in found.items()}
    return matches, rows([own, *also])


def _remedies(given: Sequence[str]) -> list[str]:
    if isinstance(given, str) or not given:
        raise InterventionError(f"remedies={quote(given)}; allowed: a list of {', '.join(REMEDIES)}")
    return [_one_of("remedies", name, REMEDIES) for name in given]


def _finder(
    scope: Scope,
    target: Any,
    k: int,
    match_on: str,
    *,
    caliper: float = 0.25,
    hard: Any = (),
    protect: Any = (),
    seed: int = 0,
    position_caliper: float | None = None,
    profile_weight: float = 0.0,
    first: int = 4,
    stop: int | None = None,
    boundaries: Any = None,
) -> Finder:
    """One target and one measure, everything checked."""
    trace = scope.trace
    named = getattr(trace, "spans", None)
    return Finder(
        scope,
        target=key_set(target, trace.n, "target", named),
        k=whole("k", k),
        match_on=_one_of("match_on", match_on, MEASURES),
        caliper=_number("caliper", caliper),
        profile_weight=_number("profile_weight", profile_weight, zero=True),
        position_caliper=None if position_caliper is None else _number("position_caliper", position_caliper),
        hard=span_list(hard, trace.n, "hard", named),
        protect=span_list(protect, trace.n, "protect", named),
        boundaries=span_list(boundaries, trace.n, "boundaries", named),
        first=whole("first", first, 0),
        given_stop=None if stop is None else whole("stop", stop),
        seed=whole("seed", seed, 0),
    )


def _one_of(name: str, given: Any, allowed: Sequence[str]) -> str:
    if given not in allowed:
        raise InterventionError(f"{name}={quote(given)}; allowed: {', '.join(allowed)}")
    return str(given)


def _number(name: str, given: Any, zero: bool = False) -> float:
    good = isinstance(given, Real) and given is not True and given is not False and np.isfinite(float(given))
    if not good or float(given) < 0 or (float(given) == 0 and not zero):
        raise InterventionError(f"{name}={quote(given)}; allowed: a finite number {'>= 0' if zero else '> 0'}")
    return float(given)
