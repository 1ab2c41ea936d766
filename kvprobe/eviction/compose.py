"""policy(): an eviction policy from names, settings and objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets import BUDGETS
from kvprobe.eviction.policies import Policy
from kvprobe.eviction.scorers import SCORERS
from kvprobe.eviction.scorers.base import Scorer
from kvprobe.eviction.selectors import SELECTORS

KINDS: dict[str, Mapping[str, Any]] = {"scorer": SCORERS, "budget": BUDGETS, "selector": SELECTORS}
GENERAL = ("granularity", "seed", "label")
PRESETS = {"paper": {"window": 32, "pool": "max", "kernel": 7}, "released": {"window": 32, "pool": "avg", "kernel": 5}}
DUO_SINKS = 128


def policy(name: str | Scorer = "snapkv", **options: Any) -> Policy:
    """Compose an eviction policy.

    Parameters
    ----------
    name
        A scorer, or names joined by ``+`` in any order: ``"snapkv"``, ``"snapkv+adakv+two_stage"``. A budget or
        selector alone stands for the method known by that name: ``"adakv"``, ``"pyramid"``, ``"headkv"``,
        ``"two_stage"`` on SnapKV, ``"duo"`` on streaming heads.
    **options
        ``scorer=``, ``budget=``, ``selector=`` by name or object; ``granularity=``, ``seed=``, ``label=`` (another name
        for tables); ``preset=`` (``"paper"`` or ``"released"``: window and pooling of scorers that pool); and the
        settings of the parts, each sent to the part that has it:
        ``window=32, pool="max", kernel=7, alpha=0.5, epsilon=1e-4, safeguard=0.2, …``.

    Returns
    -------
    Policy

    Raises
    ------
    EvictionError
        An unknown name or setting, or a combination that makes no sense (with the reason).

    Examples
    --------
    >>> policy("snapkv", window=32, pool="max", kernel=7, budget="adakv", selector="two_stage", alpha=0.5).name
    'snapkv+adakv+two_stage'
    """
    options = dict(options)
    general = {key: options.pop(key) for key in GENERAL if key in options}
    preset = _preset(options)
    chosen = _chosen(name, options)
    built, used = {}, set()
    for kind, part in chosen.items():
        built[kind], taken = _build(part, preset, options)
        used |= taken
    if preset and not any({*preset} <= {each.name for each in fields(part)} for part in built.values()):
        raise EvictionError(
            f"{built['scorer'].name} does not pool, so that preset= chooses nothing; allowed: without it"
        )
    if unknown := sorted(set(options) - used):
        raise EvictionError(
            f"{'+'.join(str(part.name) for part in built.values())} has no setting {quote(unknown[0])}; "
            f"allowed: {', '.join(_settings(built.values()))}"
        )
    return Policy(**built, **general)


def settings_of(name: str | Scorer) -> set[str]:
    """Names of all settings that the parts of a policy have."""
    return {each.name for part in _chosen(name, {}).values() for each in fields(part)}


def _chosen(name: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The class or object of every part, from the name, then the options, then what the method implies."""
    chosen: dict[str, Any] = {}
    parts = [part.strip() for part in name.split("+")] if isinstance(name, str) else [name]
    for part in parts:
        kind, found = _find(part)
        if kind in chosen:
            raise EvictionError(f"{quote(name)} names two {kind}s; allowed: one")
        chosen[kind] = found
    for kind in KINDS:
        if (given := options.pop(kind, None)) is not None:
            if kind in chosen:
                raise EvictionError(f"{quote(name)} names a {kind}, and {kind}={quote(given)} another; allowed: one")
            chosen[kind] = _named(given, kind) if isinstance(given, str) else given
    is_duo = getattr(chosen.get("budget"), "name", None) == "duo"
    scorer = chosen.setdefault("scorer", SCORERS["streaming" if is_duo else "snapkv"])
    if is_duo and scorer is SCORERS["streaming"]:
        options.setdefault("sinks", DUO_SINKS)
    chosen.setdefault("budget", BUDGETS[getattr(scorer, "default_budget", "uniform")])
    chosen.setdefault("selector", SELECTORS["topk"])
    return chosen


def _find(part: Any) -> tuple[str, Any]:
    """Which kind of part a name or object is."""
    if not isinstance(part, str):
        return "scorer", part
    for kind, known in KINDS.items():
        if part in known:
            return kind, known[part]
    raise EvictionError(f"no policy part {quote(part)}; allowed: {_names()}")


def _named(name: str, kind: str) -> Any:
    if name not in KINDS[kind]:
        raise EvictionError(f"no {kind} {quote(name)}; allowed: {', '.join(KINDS[kind])}")
    return KINDS[kind][name]


def _names() -> str:
    return "; ".join(f"{kind}s {', '.join(known)}" for kind, known in KINDS.items())


def _build(part: Any, preset: dict[str, Any], given: dict[str, Any]) -> tuple[Any, set[str]]:
    """An object of a part, and the settings that it took; an object given by the user takes none."""
    if not isinstance(part, type):
        return part, set()
    name = getattr(part, "name", part.__name__)
    own = {each.name for each in fields(part)}
    taken = own & set(given)
    settings = (preset if own >= set(preset) else {}) | given
    try:
        return part(**{key: value for key, value in settings.items() if key in own}), taken
    except TypeError as error:
        missing = sorted(each.name for each in fields(part) if each.name not in taken and _required(each))
        if not missing:
            raise
        raise EvictionError(f"{name} needs {missing[0]}=…: {(part.__doc__ or '').splitlines()[0]}") from error


def _required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _preset(options: dict[str, Any]) -> dict[str, Any]:
    name = options.pop("preset", None)
    if name is not None and name not in PRESETS:
        raise EvictionError(f"preset={quote(name)}; allowed: {', '.join(PRESETS)}")
    return {} if name is None else PRESETS[name]


def _settings(parts: Any) -> list[str]:
    return [*sorted({each.name for part in parts for each in fields(part)}), *GENERAL, "preset"]
