"""RULER's eight needle-in-a-haystack tasks, generated here.

Protocol: RULER (Hsieh et al. 2024), its ``niah`` generator; the items are our own. Differences: keys and values are
unique within an item, the essays are ours (or the user's) in an order that depends on the seed, the haystack is fitted
to the length by single units, and every needle's tokens are known. ``template="criticalkv"`` asks in the plural for a
single value, too.
"""

from __future__ import annotations

from typing import Any

from kvprobe.errors import TaskError
from kvprobe.tasks.building import Builder, Plan
from kvprobe.tasks.haystacks import Essays, Haystack, Needles, Noise, Piece, documents
from kvprobe.tasks.items import Item, joined
from kvprobe.tasks.needles import Names, Streams, decoys, needle
from kvprobe.tasks.options import Options, Variant, resolve, whole_number
from kvprobe.tasks.planting import Planting

#: name → haystack, kind of keys, kind of values, needles k / values v / queries q
TASKS = {
    "niah_single_1": Variant("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": Variant("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": Variant("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": Variant("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": Variant("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": Variant("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": Variant("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": Variant("essay", "words", "numbers", 4, 1, 4),
}

#: (instruction, question, beginning of the answer) for several values, and for one
PLURAL = (
    "Some special magic {many} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {many} afterwards.",
    "What are all the special magic {many} for {query} mentioned in the provided text?",
    " The special magic {many} for {query} mentioned in the provided text are",
)
SINGULAR = (
    "A special magic {one} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {one} afterwards.",
    "What is the special magic {one} for {query} mentioned in the provided text?",
    " The special magic {one} for {query} mentioned in the provided text is",
)


def make(name: str, model: Any, *, length: int, seed: int, **options: Any) -> Item:
    """Generate one item of a needle task.

    Tokens of the prompt + ``tokens_to_generate`` are at most ``length``, and one more haystack unit (a word of an
    essay, a line of noise or needles) would be too many. The same task, seed, length and options give the same item.

    Parameters
    ----------
    name
        One of :data:`TASKS`.
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    length
        Tokens of prompt and generation together.
    seed
        Any whole number.
    **options
        See :class:`kvprobe.tasks.options.Options`.

    Raises
    ------
    TaskError
        For an option that does not exist or cannot be; a length beyond the model's; a length that is too small for
        what is asked: the message then names the smallest one that works.
    """
    if name not in TASKS:
        raise TaskError(f"no needle task {name!r}, must be one of {', '.join(TASKS)}")
    length, seed = whole_number("length", length, 1), whole_number("seed", seed)
    if model.max_length is not None and length > model.max_length:
        raise TaskError(f"length is {length}, the model reads at most {model.max_length}")
    builder = Builder(plan(name, resolve(name, TASKS[name], options), seed), model.tokenizer)
    return builder.finished(builder.fitted(length, model.max_length), length)


def plan(name: str, options: Options, seed: int) -> Plan:
    """Draw keys, values, depths, decoys and the order of the haystack; keys that are asked for come first."""
    streams, variant, names = Streams(name, seed), TASKS[name], Names()
    k, v, q = (int(n or 0) for n in (options.needles, options.values, options.queries))
    rng, keys, hidden = streams("needles"), list[str](), list[Piece]()
    for number in range(k):
        keys.append(names.draw(variant.keys, rng))
        label = "evidence" if number < q else "hard"
        hidden += [needle(variant.kind, keys[-1], names.draw(variant.kind, rng), label) for _ in range(v)]
    pieces = hidden + decoys(options.decoys, streams("decoys"))
    planting = Planting(_haystack(options, variant, names, streams), pieces, streams, options.depths or ())
    asked = [list(range(number * v, (number + 1) * v)) for number in range(q)]
    protocol = "RULER" if options.template == "ruler" else "CriticalKV"
    facts = {"protocol": protocol, "keys": keys[:q]}
    return Plan(name, seed, options, planting, asked, *_frame(options, variant, keys[:q]), facts)


def _haystack(options: Options, variant: Variant, names: Names, streams: Streams) -> Haystack:
    rng = streams("haystack")
    if options.haystack == "noise":
        return Noise()
    if options.haystack == "essay":
        return Essays(documents(options.path), rng)

    def line() -> Piece:
        key, value = names.draw(variant.keys, rng), names.draw(variant.kind, rng)
        return needle(variant.kind, key, value, "hard")

    return Needles(line)


def _frame(options: Options, variant: Variant, keys: list[str]) -> tuple[str, str, str]:
    """Instruction, question and beginning of the answer."""
    single = len(keys) * (options.values or 1) == 1 and options.template == "ruler"
    words = {"many": variant.kind, "one": variant.kind[:-1], "query": joined(keys)}
    instruction, question, prefix = (part.format(**words) for part in (SINGULAR if single else PLURAL))
    return instruction, question, prefix
