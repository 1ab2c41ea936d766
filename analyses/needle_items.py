"""What the analyses of interventions share: needle items from options, and what is said of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.tasks.items import Item

ITEMS = ("task", "length", "items", "needles", "haystack", "seed")
"""Options that say which items are made."""
SEMANTICS = "prefill-then-evict: the context is prefilled exactly, interventions act on question and answer tokens"


@dataclass(frozen=True)
class Made:
    """Items of one task, and the words that they were asked for with."""

    items: tuple[Item, ...]
    task: str
    length: int
    seed: int

    def about(self, model: Any) -> dict[str, Any]:
        """What a figure and a manifest say of them."""
        tokens = [len(item.prompt) for item in self.items]
        return {
            "model": model.name,
            "task": self.task,
            "length": self.length,
            "seed": self.seed,
            "n_items": len(self.items),
            "tokens": {"min": min(tokens), "max": max(tokens)},
            "needles": self.items[0].settings["needles"],
            "semantics": SEMANTICS,
        }


def options(parser: argparse.ArgumentParser, items: int) -> None:
    """Which items are made."""
    parser.add_argument("--task", default="niah_multikey_1", help="a needle task (%(default)s)")
    parser.add_argument("--length", type=int, default=1500, help="tokens of an item (%(default)s)")
    parser.add_argument("--items", type=int, default=items, help="number of items (%(default)s)")
    parser.add_argument("--needles", type=int, help="needles planted (the task's own number)")
    parser.add_argument("--haystack", help="file or folder of the user's own text (the task's own)")


def made(model: Any, asked: dict[str, Any], items: int) -> Made:
    """Take the items' part out of ``asked`` and make them: a mistake shows before anything is run."""
    from kvprobe.errors import TaskError
    from kvprobe.needles.settings import Settings

    given: dict[str, Any] = {
        "task": "niah_multikey_1",
        "length": 1500,
        "items": items,
        "needles": None,
        "haystack": None,
        "seed": 0,
    }
    given |= {name: asked.pop(name) for name in ITEMS if name in asked}
    if given["items"] < 1:
        raise TaskError(f"items is {given['items']}, must be at least 1")
    wanted = {"needles": given["needles"], "path": given["haystack"]}
    more = {name: value for name, value in wanted.items() if value is not None}
    plain = {name: given[name] for name in ("task", "length", "items", "seed")}
    settings = Settings(**plain, decoys=0, distractors=0, options=more)
    found = tuple(settings.item(model, index) for index in range(settings.items))
    return Made(found, settings.task, settings.length, settings.seed)


def ran(model: Any, item: Item, arms: Sequence[Any], prefix: Any = None, keep_trace: bool = False) -> list[Any]:
    """All arms of an item in one call over one prefix; logits are those of the teacher-forced answer and one more."""
    from kvprobe import runs

    found: list[Any] = runs.intervene(
        model,
        item.prompt,
        arms,
        suffix=len(item.prompt) - item.context_stop,
        continuation=list(item.answer_ids),
        prefix=prefix,
        logits="continuation",
        keep_trace=keep_trace,
    )
    return found


def subtitle(about: dict[str, Any]) -> str:
    """Model, task, sizes, seed."""
    from kvprobe.plots.style import plural

    tokens = about["tokens"]
    return (
        f"{about['model']} · {about['task']}, {plural(about['needles'], 'needle')} · "
        f"{tokens['min']}–{tokens['max']} tokens · n = {about['n_items']} items · seed {about['seed']}"
    )


def ends(low: float, high: float, form: str) -> str:
    """``[low, high]``, or that there is none."""
    return "[no interval]" if low != low else f"[{low:{form}}, {high:{form}}]"


def entered(about: dict[str, Any]) -> str:
    """The same, with the items that enter means."""
    return f"{subtitle(about)} · {about['entering']} enter, {about['answered']} answered by the clean run"


def numbers(name: str, texts: Sequence[str], kind: type) -> list[Any]:
    """The numbers that words stand for."""
    from kvprobe.errors import TaskError

    try:
        return [kind(text) for text in texts]
    except ValueError:
        raise TaskError(f"{name} is {','.join(texts)!r}, must be numbers, comma-separated") from None


def beside(item: Item, first: int, length: int) -> list[int]:
    """Where a window of ``length`` tokens can begin: in the context, behind the ``first`` positions, off the needle."""
    from kvprobe.errors import TaskError

    free = range(item.prompt.pad + first, item.context_stop - length + 1)
    starts = [at for at in free if all(at + length <= a or b <= at for a, b in item.spans["evidence"])]
    if length < 1 or not starts:
        allowed = f"allowed: 1 or more that fit beside the needle of a {len(item.prompt)}-token item"
        raise TaskError(f"windows of {length} tokens; {allowed}")
    return starts
