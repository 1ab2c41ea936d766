"""Arithmetic traces: a word problem and its solution, in which every quantity is derived once and one is used again.

The problem gives seven or more products to work out (``14 boxes with 23 pencils``); the solution derives them one by
one (``14 * 23 = 322``) and then comes back to one of them several times, sometimes by working it out once more. A value
names one quantity, and the derivations of all others are as long as that of the probed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvprobe.errors import TaskError
from kvprobe.prompts import alignment
from kvprobe.tasks.needles import Streams
from kvprobe.tasks.options import whole_number
from kvprobe.tasks.trace_text import FACTORS, THINGS, Page, Writer
from kvprobe.tasks.traces import Marks, TraceItem, build, shown

TASKS = ("trace_memory",)
FEWEST = 6
MOST_MENTIONS = 12


@dataclass(frozen=True)
class Options:
    """What can be set of a trace.

    Attributes
    ----------
    mentions : int
        How often the probed value stands in the trace, the first derivation included; 2 to 12.
    quantities : int
        How many other quantities are derived (the placebo pool); 6 to 11.
    digits : int
        Digits of every derived value; 3 to 6.
    rederive : int
        At how many of the later mentions the value is worked out again; 0, 1 or 2, and at least one later mention stays
        plain.
    """

    mentions: int = 5
    quantities: int = 6
    digits: int = 3
    rederive: int = 1


def make(name: str, model: Any, *, length: int | None = None, seed: int, **options: Any) -> TraceItem:
    """Generate one trace.

    The same task, seed and options give the same text; the tokenizer decides nothing but where its tokens lie.

    Parameters
    ----------
    name
        One of :data:`TASKS`.
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    length
        Most tokens of the trace; None: as many as the model reads. A trace is never padded or cut.
    seed
        Any whole number.
    **options
        See :class:`Options`.

    Returns
    -------
    TraceItem
        ``target`` is the first derivation (``14 * 23 = 322``), ``hard`` are those of all other quantities, ``protect``
        are the target's factors in the problem, and the later mentions.

    Raises
    ------
    TaskError
        For an unknown task or option, a value that is not allowed, a trace longer than ``length``, or a tokenizer
        whose tokens hold more than the value.
    """
    if name not in TASKS:
        raise TaskError(f"no trace task {name!r}, must be one of {', '.join(TASKS)}")
    chosen, seed = resolve(name, options), whole_number("seed", seed)
    length = None if length is None else whole_number("length", length, 1, " or None")
    writer = Writer(Streams(name, seed), **asdict(chosen))
    page = writer.written()
    item = build(name, seed, model, page.text, _marks(page), asdict(chosen) | _facts(writer))
    if length is not None and len(item.prompt) > length:
        raise TaskError(f"length is {length}, this trace has {len(item.prompt)} tokens: give at least that many")
    _verify(item, model.tokenizer)
    return item


def resolve(task: str, given: Mapping[str, Any]) -> Options:
    """The options of a trace, checked.

    Raises
    ------
    TaskError
        For an unknown option, or a value that is not one of those allowed.
    """
    known = [option.name for option in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TaskError(f"{task} has no option {unknown[0]!r}, must be one of {', '.join(known)}")
    options = Options(**{name: whole_number(name, value) for name, value in given.items()})
    bounds = {
        "mentions": (2, MOST_MENTIONS),
        "quantities": (FEWEST, len(THINGS) - 1),
        "digits": (min(FACTORS), max(FACTORS)),
        "rederive": (0, 2),
    }
    for name, (low, high) in bounds.items():
        if not low <= getattr(options, name) <= high:
            raise TaskError(f"{name} is {getattr(options, name)}, must be from {low} to {high}")
    if options.rederive and options.rederive > options.mentions - 2:
        least = options.rederive + 2
        raise TaskError(f"rederive is {options.rederive}, needs mentions of at least {least}, not {options.mentions}")
    return options


def _marks(page: Page) -> Marks:
    """The page's marks; a value has its k by its place in the text."""
    found = page.marked
    stop = page.text.index("\n\n")
    return Marks(
        target=found["target"],
        mentions=[(*span, k) for k, span in enumerate(found["mention"], 1)],
        rederive=found.get("again", ()),
        hard=found["hard"],
        protect=found["operands"],
        sections={"problem": (0, stop), "solution": (stop + 2, len(page.text))},
    )


def _facts(writer: Writer) -> dict[str, Any]:
    """What the item stores besides its options."""
    each = writer.target
    return {
        "things": each.things,
        "factors": [each.a, each.b],
        "value": each.value,
        "others": {other.things: other.value for other in writer.quantities if other is not each},
        "place": writer.probed,
    }


def _verify(item: TraceItem, tokenizer: Any) -> None:
    """Decode every mention again: it must be the value and nothing else, or log-probabilities would be of more."""
    value = str(item.settings["value"])
    for mention in item.mentions:
        decoded = alignment.decode(tokenizer, item.prompt.ids[slice(*mention.span)].tolist())
        if "".join(decoded.split()) != value:
            found = shown(tokenizer, item.prompt, mention.span)
            raise TaskError(f"the tokens of the value {value!r} are {found}, must be the value alone")
