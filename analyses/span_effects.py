"""What the analyses of random spans share: items, clean traces, candidates, and what cutting each of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from kvprobe.placebo import KeySet
    from kvprobe.tasks.items import Item

ESSAY, NOISE, MANY = "niah_single_2", "niah_single_1", "niah_multikey_1"
TASKS = (ESSAY, MANY, NOISE)


@dataclass(frozen=True, eq=False)
class Observed:
    """An item and its clean run; the trace's rows are question and teacher-forced answer, those that a mask touches."""

    model: Any
    item: Item
    trace: Any

    @staticmethod
    def of(model: Any, item: Item) -> Observed:
        """Run the item once."""
        from kvprobe import runs

        rows = list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))
        return Observed(model, item, runs.observe(model, item.prompt.extended(item.answer_ids), rows))

    @cached_property
    def evidence(self) -> KeySet:
        """The needle that is asked for."""
        return tuple(sorted(self.item.spans["evidence"]))

    @cached_property
    def hard(self) -> list[KeySet]:
        """Each needle that is not asked for."""
        return [(span,) for span in sorted(self.item.spans.get("hard", []))]

    @cached_property
    def room(self) -> Any:
        """Haystack tokens only: no needle, no instruction, none of the leading tokens, nothing of the question."""
        from kvprobe.placebo.pools import room
        from kvprobe.placebo.probe import first

        prompt = self.item.prompt
        start = prompt.spans["context"][0]
        protect = [(prompt.pad, start)] if start > prompt.pad else []
        return room(self.evidence, protect, [span for (span,) in self.hard], first(prompt), self.item.context_stop)

    @cached_property
    def length(self) -> int:
        """Tokens of the needle."""
        from kvprobe.placebo.keysets import size

        return size(self.evidence)

    def masks(self, sets: Sequence[KeySet]) -> list[Any]:
        """One arm a set: its keys are not in the cache for question and answer."""
        from kvprobe.interventions import KVMask

        return [(KVMask([*keys]),) for keys in sets]

    def effects(self, arms: Sequence[Any]) -> pd.DataFrame:
        """What each arm does to the answer, all arms over one prefix.

        Returns
        -------
        DataFrame
            ``effect``: log-prob of the gold answer minus the clean run's, nats (below 0 hurts); ``kl``: KL(clean ‖ arm)
            summed over answer positions, nats; ``flips``: positions with another most probable token.
            ``attrs["clean"]``: the clean log-prob; ``attrs["answered"]``: whether greedy decoding gives the answer.
        """
        import pandas as pd

        from kvprobe import runs
        from kvprobe.outcomes import answer_logprobs, answer_match, argmax_flips, kl_divergence

        item, answer = self.item, list(self.item.answer_ids)
        outs = runs.intervene(
            self.model,
            item.prompt,
            [(), *arms],
            suffix=len(item.prompt) - item.context_stop,
            continuation=answer,
            prefix=self.trace.prefix(item.context_stop - item.prompt.pad),
            logits="continuation",
            keep_trace=False,
        )
        clean, *logits = [out.logits[:-1] for out in outs]  # the row behind the answer predicts nothing of it
        # Differences token by token, then summed in float64: a sum in float32 would hide the smallest effects.
        own = answer_logprobs(clean, answer).double()
        rows = [
            {
                "effect": float((answer_logprobs(each, answer).double() - own).sum()),
                "kl": float(kl_divergence(clean, each).sum()),
                "flips": int(argmax_flips(clean, each).sum()),
            }
            for each in logits
        ]
        table = pd.DataFrame(rows, columns=["effect", "kl", "flips"])
        table.attrs = {"clean": float(own.sum()), "answered": bool(answer_match(clean, answer).all())}
        return table


def items(model: Any, task: str, count: int, length: int, seed: int, needles: int = 9) -> list[Item]:
    """Items as ``kvprobe placebo`` makes them."""
    from kvprobe import tasks

    # Labelled distractors are not used here; asked for, they would forbid short items.
    options: dict[str, Any] = {"distractors": 0} | ({"needles": needles} if task == MANY else {})
    return [tasks.make(task, model, length=length, seed=seed * 10_000 + i, **options) for i in range(count)]


def draw(sets: Sequence[KeySet], count: int, rng: np.random.Generator) -> list[KeySet]:
    """``count`` of the sets (all, where there are fewer), in the order given."""
    chosen = rng.permutation(len(sets))[:count]
    return [sets[i] for i in sorted(chosen.tolist())]


def spread(sets: Sequence[KeySet], strengths: np.ndarray, count: int) -> list[KeySet]:
    """``count`` mutually disjoint sets at equal steps of ln strength, as far as there is room.

    Fewer than ``count`` where everything that is left meets a set already taken.
    """
    import numpy as np

    from kvprobe.placebo.keysets import overlap

    usable = np.isfinite(strengths) & (strengths > 0)
    left, ln = np.flatnonzero(usable), np.log(np.where(usable, strengths, 1.0))
    chosen: list[int] = []
    # Both ends first: what is rare must not lose its place to what is common.
    steps = np.linspace(ln[left].min(), ln[left].max(), count) if len(left) else []
    for step in sorted(steps, key=lambda x: -abs(x - np.mean(steps))):
        if not len(left):
            break
        best = int(left[np.argmin(np.abs(ln[left] - step))])
        chosen.append(best)
        left = np.array([i for i in left.tolist() if not overlap(sets[i], sets[best])], dtype=int)
    return [sets[i] for i in sorted(chosen)]


def whole(asked: dict[str, tuple[Any, int]]) -> None:
    """Refuse sizes that are not whole numbers of at least the given one, in one line."""
    from kvprobe.errors import TaskError, quote

    for name, (given, least) in asked.items():
        if isinstance(given, bool) or not hasattr(given, "__index__") or given < least:
            raise TaskError(f"{name} is {quote(given)}, must be a whole number of at least {least}")
