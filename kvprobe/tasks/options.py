"""Options of the needle tasks, checked and completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvprobe.errors import TaskError

HAYSTACKS = ("noise", "essay", "needle")
TEMPLATES = ("ruler", "criticalkv")
DISTRACTORS = ("sentence", "window")
DEFAULT_DISTRACTORS = 20


@dataclass(frozen=True)
class Options:
    """What can be set of a needle task; None is the task's own value.

    Attributes
    ----------
    needles, values, queries : int
        Keys hidden, values a key, keys asked for (at least as many keys as are asked for are hidden).
    decoys : int
        Unrelated facts planted like needles; 0 is RULER's protocol.
    distractors : int or "max"
        Stretches of haystack content to compare with; by default 20, and 0 in a haystack made of needles.
    distractor : str
        ``"sentence"`` (default on essays) or ``"window"`` (default on noise).
    template : str
        ``"ruler"``, or ``"criticalkv"``: the plural question for a single value, too.
    haystack, path : str
        ``"noise"``, ``"essay"`` or ``"needle"``; a file or folder of the user's own text for ``"essay"``.
    tokens_to_generate : int
        Tokens of the asked length that are left free for the answer.
    depth : float
        Depth of the needle in per cent, where one value is asked for.
    depths : sequence of float
        Depths of all needles in per cent, key by key; the keys asked for come first.
    chat : bool or str
        Whether (and by which template) the prompt is a chat message; the answer's beginning then stands in the
        assistant's turn.
    """

    needles: int | None = None
    values: int | None = None
    queries: int | None = None
    decoys: int = 0
    distractors: int | str | None = None
    distractor: str | None = None
    template: str = "ruler"
    haystack: str | None = None
    path: Any = None
    tokens_to_generate: int = 128
    depth: float | None = None
    depths: Sequence[float] | None = None
    chat: bool | str = False


@dataclass(frozen=True)
class Variant:
    """One of RULER's needle tasks: haystack, kinds of keys and values, and how many of what."""

    haystack: str
    keys: str
    kind: str
    needles: int
    values: int
    queries: int


def resolve(task: str, variant: Variant, given: Mapping[str, Any]) -> Options:
    """The options of an item with everything filled in.

    Raises
    ------
    TaskError
        For an unknown option, or a value that is not one of those allowed.
    """
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TaskError(f"{task} has no option {unknown[0]!r}, must be one of {', '.join(known)}")
    options = _filled(Options(**given), variant)
    _check_choices(options)
    return _check_depths(_check_counts(task, options, given))


def _filled(options: Options, variant: Variant) -> Options:
    haystack = options.haystack or ("essay" if options.path is not None else variant.haystack)
    queries = variant.queries if options.queries is None else options.queries
    needles = options.needles
    if needles is None:
        needles = max(variant.needles, whole_number("queries", queries, 1))
    count = options.distractors
    return replace(
        options,
        haystack=haystack,
        queries=queries,
        needles=needles,
        values=variant.values if options.values is None else options.values,
        distractor=options.distractor or ("sentence" if haystack == "essay" else "window"),
        distractors=(0 if haystack == "needle" else DEFAULT_DISTRACTORS) if count is None else count,
    )


def _check_choices(options: Options) -> None:
    for name, allowed in (("haystack", HAYSTACKS), ("template", TEMPLATES), ("distractor", DISTRACTORS)):
        if getattr(options, name) not in allowed:
            raise TaskError(f"{name} is {getattr(options, name)!r}, must be {' or '.join(map(repr, allowed))}")
    if options.path is not None and options.haystack != "essay":
        raise TaskError(f"path={str(options.path)!r} is for haystack='essay', not {options.haystack!r}")


def _check_counts(task: str, options: Options, given: Mapping[str, Any]) -> Options:
    least = {"needles": 1, "values": 1, "queries": 1, "decoys": 0, "tokens_to_generate": 0}
    counts: dict[str, Any] = {name: whole_number(name, getattr(options, name), low) for name, low in least.items()}
    if options.distractors != "max":
        counts["distractors"] = whole_number("distractors", options.distractors, 0, " or 'max'")
    options = replace(options, **counts)
    if counts["queries"] > counts["needles"]:
        raise TaskError(f"queries is {options.queries}, must be at most the {options.needles} needles")
    if options.haystack == "needle" and given.get("needles") is not None:
        raise TaskError(f"needles={options.needles}: the haystack of {task} is needles, as many as the length holds")
    if options.haystack == "needle" and options.distractors not in (0, "max"):
        raise TaskError(f"distractors={options.distractors}: 0 fit a haystack of needles; compare with the hard ones")
    return options


def _check_depths(options: Options) -> Options:
    """Depths of the first needles, ``depth`` included."""
    assert options.needles is not None and options.values is not None and options.queries is not None
    asked, planted = options.queries * options.values, options.needles * options.values
    if options.depth is not None and (options.depths is not None or asked > 1):
        raise TaskError(f"depth={options.depth!r} is for one needle asked for: give depths (a list of {planted})")
    depths = options.depths if options.depth is None else [options.depth]
    if options.depths is not None and (isinstance(depths, str) or len(options.depths) != planted):
        raise TaskError(f"depths is {options.depths!r}, must be {planted} numbers, one a needle")
    for depth in depths or ():
        if isinstance(depth, bool | str) or not hasattr(depth, "__float__") or not 0 <= float(depth) <= 100:
            raise TaskError(f"depth is {depth!r}, must be a number from 0 to 100 (per cent)")
    return replace(options, depths=tuple(float(depth) for depth in depths or ()))


def whole_number(name: str, value: Any, least: int | None = None, otherwise: str = "") -> int:
    """``value`` as an int (numpy's too) of at least ``least``, else a TaskError."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else value.__index__()
    if number is None or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise TaskError(f"{name} is {value!r}, must be a whole number{at_least}{otherwise}")
    return number
