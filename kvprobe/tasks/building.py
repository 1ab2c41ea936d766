"""From a plan (needles, depths, question) to an item: fit the haystack to the length, locate and check every span."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from kvprobe.errors import TaskError
from kvprobe.prompts import Prompt, encoding
from kvprobe.prompts.alignment import Range
from kvprobe.tasks import distractors, fitting
from kvprobe.tasks.haystacks import Piece
from kvprobe.tasks.items import Item, answer_ids, joined, verify
from kvprobe.tasks.options import Options
from kvprobe.tasks.planting import Context, Planting

#: No search for the smallest length goes beyond this many haystack units.
_UNITS = 1 << 17


@dataclass(frozen=True)
class Plan:
    """Everything about an item that does not depend on how much haystack it gets.

    Attributes
    ----------
    task, seed, options
        As resolved.
    planting : Planting
        Needles and decoys, their depths, and the haystack.
    asked : list of list of int
        For each query, which planted pieces answer it.
    instruction, question, prefix : str
        What stands before and after the context, and the beginning of the answer.
    facts : dict
        What the item stores besides.
    """

    task: str
    seed: int
    options: Options
    planting: Planting
    asked: list[list[int]]
    instruction: str
    question: str
    prefix: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def evidence(self) -> list[int]:
        """Planted pieces asked about."""
        return [number for group in self.asked for number in group]

    def text(self, context: str) -> str:
        """All of the prompt but the beginning of the answer."""
        return f"{self.instruction}\n{context}\n{self.question}"


@dataclass(frozen=True)
class Draft:
    """An item with ``units`` of haystack, before distractors are chosen among ``tiles``."""

    units: int
    context: Context
    prompt: Prompt
    planted: list[Range]
    others: list[Range]
    tiles: list[Range]

    def tokens(self, numbers: list[int]) -> int:
        """Mean number of tokens of some planted pieces, rounded."""
        return round(sum(self.planted[i][1] - self.planted[i][0] for i in numbers) / len(numbers))


class Builder:
    """Builds one plan's item with one tokenizer."""

    def __init__(self, plan: Plan, tokenizer: Any) -> None:
        self.plan = plan
        # Lengths beyond the model's are looked at, too, to find the smallest that works: no limit here.
        self.model = SimpleNamespace(tokenizer=tokenizer, max_length=None)
        count = plan.options.distractors
        self.wanted = 0 if count == "max" else int(count or 0)

    def count(self, units: int) -> int:
        """Tokens of the prompt with so much haystack."""
        plan, tokenizer = self.plan, self.model.tokenizer
        text = plan.text(plan.planting.text(units))
        rendered = encoding.render(tokenizer, text, chat=plan.options.chat, prefill=plan.prefix)
        return len(encoding.encode(tokenizer, rendered, offsets=False).ids)

    def draft(self, units: int) -> Draft:
        """The item with so much haystack, all spans located."""
        plan = self.plan
        context = plan.planting.compose(units)
        text, at = plan.text(context.text), len(plan.instruction) + 1
        end = at + len(context.text)
        groups = {"planted": context.planted, "other": [chars for _, chars in context.others]}
        groups |= {f"run {i}": run for i, run in enumerate(context.runs)}
        wanted = {f"{group} {i}": (a + at, b + at) for group, chars in groups.items() for i, (a, b) in enumerate(chars)}
        wanted |= {"instruction": (0, at - 1), "context": (at, end), "question": (end + 1, len(text))}
        prompt = Prompt.from_text(self.model, text, wanted, chat=plan.options.chat, prefill=plan.prefix)
        found = {group: [prompt[f"{group} {i}"] for i in range(len(chars))] for group, chars in groups.items()}
        draft = Draft(units, context, prompt, found.pop("planted"), found.pop("other"), [])
        draft.tiles.extend(self._tiles(draft, list(found.values())))
        return draft

    def _tiles(self, draft: Draft, runs: list[list[Range]]) -> list[Range]:
        """Candidates for distractors: content of the context that shares no token with anything else."""
        tokens, prompt = draft.tokens(self.plan.evidence), draft.prompt
        if self.plan.options.distractor == "window":
            tiles = distractors.window_tiles(runs, tokens, self.plan.planting.streams("windows"))
        else:
            tiles = distractors.sentence_tiles(runs, tokens)
        blocked = [*draft.planted, *draft.others, prompt["instruction"], (prompt["question"][0], len(prompt))]
        return [tile for tile in tiles if not any(tile[0] < stop and start < tile[1] for start, stop in blocked)]

    def fitted(self, length: int, limit: int | None) -> Draft:
        """The draft with as much haystack as the length holds, or a TaskError that names a length that works."""
        low, budget = self.plan.planting.minimum, length - self.plan.options.tokens_to_generate
        if self.count(low) > budget:
            found = self._first_length(low, limit)
            raise TaskError(
                f"length {length} is too small for {self.plan.task}: the smallest length that works is {found}"
            )
        draft = self.draft(fitting.largest(self.count, budget, low))
        fit = len(draft.tiles)
        if fit < self.wanted:
            found = self._first_length(draft.units + 1, limit)
            raise TaskError(
                f"length {length} holds {fit} of the {self.wanted} distractors asked for: the smallest longer length "
                f"that works is {found}; or ask for distractors={fit} or 'max'"
            )
        return draft

    def _first_length(self, units: int, limit: int | None) -> str:
        """The smallest length with at least so many units that works, as text."""
        enough = fitting.smallest(lambda n: not self.wanted or len(self.draft(n).tiles) >= self.wanted, units, _UNITS)
        if enough is None:
            return "beyond all bounds"
        length = self.count(enough) + self.plan.options.tokens_to_generate
        return f"{length} (the model reads at most {limit})" if limit is not None and length > limit else str(length)

    def finished(self, draft: Draft, length: int) -> Item:
        """The item with its distractors, all spans decoded and checked."""
        plan, pieces = self.plan, self.plan.planting.pieces
        order = [i for group in plan.asked for i in sorted(group, key=lambda i: draft.planted[i])]
        evidence = [draft.planted[i] for i in order]
        count = len(draft.tiles) if plan.options.distractors == "max" else self.wanted
        chosen = distractors.choose(draft.tiles, evidence, count, plan.planting.streams("distractors"))
        shown = _shown(draft, pieces, order) | {"distractor": [(span, "") for span in chosen]}
        values = [piece.value for piece in _needles(draft, pieces)]
        verify(self.model.tokenizer, draft.prompt, shown, values)
        spans = {label: [span for span, _ in pairs] for label, pairs in shown.items()}
        sections = {name: draft.prompt[name] for name in ("context", "question")}
        prompt = Prompt(draft.prompt.ids, sections, 0, draft.prompt.text)
        references = tuple(pieces[i].value for i in order)
        answer = f" {joined(references)}"
        ids, border = answer_ids(self.model, prompt, answer)
        settings = self._settings(draft, order, spans) | {"tokens": len(prompt), "answer_border": border}
        stop = prompt["question"][0]
        return Item(plan.task, plan.seed, length, prompt, answer, ids, references, stop, spans, settings)

    def _settings(self, draft: Draft, order: list[int], spans: dict[str, list[Range]]) -> dict[str, Any]:
        """What the item was made with, ready for JSON."""
        plan, depths = self.plan, draft.context.depths
        chosen = asdict(plan.options) | {"path": None if plan.options.path is None else str(plan.options.path)}
        del chosen["depth"]  # now the first of the depths
        placed = sorted(range(len(depths)), key=lambda i: draft.planted[i])
        labels = [piece.label for piece in plan.planting.pieces]
        by_label = {label: [depths[i] for i in placed if labels[i] == label] for label in ("hard", "decoy")}
        more = {
            "depths": {"evidence": [depths[i] for i in order], **by_label},
            "distractors": len(spans["distractor"]),
            "distractor_tokens": draft.tokens(order),
            "balance": distractors.balance(spans["evidence"], spans["distractor"], draft.prompt["context"]),
        }
        return chosen | plan.facts | more | plan.planting.haystack.facts(draft.units)


def _needles(draft: Draft, pieces: Any) -> list[Piece]:
    """All needles, planted or not."""
    return [piece for piece in pieces if piece.label != "decoy"] + [piece for piece, _ in draft.context.others]


def _shown(draft: Draft, pieces: Any, order: list[int]) -> dict[str, list[tuple[Range, str]]]:
    """Label → spans, and what decoding each must show."""
    found = list(zip(draft.planted, pieces, strict=True))
    found += zip(draft.others, (piece for piece, _ in draft.context.others), strict=True)
    shown = {"evidence": [(draft.planted[i], pieces[i].value) for i in order]}
    for label in ("hard", "decoy"):
        shown[label] = sorted((span, piece.value) for span, piece in found if piece.label == label)
    return shown
