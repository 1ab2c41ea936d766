"""Everything about a run of ``kvprobe sinks`` that is decided before it, and the inputs that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe import tasks
from kvprobe.errors import TaskError, quote
from kvprobe.inputs import words
from kvprobe.prompts import Prompt
from kvprobe.sinks.epsilon import EPSILONS
from kvprobe.sinks.scores import EPSILON, check_epsilon
from kvprobe.tasks.items import Item
from kvprobe.theory.checks import check_p

TASK, ITEMS, LENGTH = "niah_single_2", 8, 1500
ESSAYS = "essays"
"""What ``docs`` calls the shipped essays."""

QUERIES = {
    "suffix": "question and teacher-forced answer",
    "answer": "rows that predict the teacher-forced answer",
    "all": "every position",
}
"""Which rows means are taken over, in words."""

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Case:
    """One input: an item of a task, or a document.

    Attributes
    ----------
    prompt
        Without any answer.
    answer_ids
        Teacher-forced behind the prompt; none for a document.
    context_stop
        First position behind the context: question and answer are ``recent``.
    spans
        Label → spans; ``evidence`` is what the answer stands in.
    """

    index: int
    name: str
    prompt: Prompt
    context_stop: int
    answer_ids: tuple[int, ...] = ()
    spans: Mapping[str, Sequence[Range]] = field(default_factory=dict)
    item: Item | None = None
    truncated: bool = False

    @property
    def whole(self) -> Prompt:
        """Prompt and answer."""
        return self.prompt.extended(self.answer_ids) if self.answer_ids else self.prompt

    @property
    def evidence(self) -> list[Range]:
        """Spans of the evidence; none in a document."""
        return list(self.spans.get("evidence", ()))

    def rows(self, queries: str) -> list[int]:
        """Positions of one of :data:`QUERIES`."""
        n, stop = len(self.prompt), len(self.prompt) + len(self.answer_ids)
        first = {"suffix": self.context_stop, "answer": n - 1, "all": self.prompt.pad}[queries]
        return list(range(first, stop - 1 if queries == "answer" else stop))


@dataclass(frozen=True)
class Settings:
    """Decided before a run, and stored with it.

    Attributes
    ----------
    task, items, options
        A needle task, the number of its items (item i is made with seed ``seed · 10000 + i``), and more options of
        :func:`kvprobe.tasks.make`.
    docs, documents, join, template, chat
        Documents instead of a task: see :func:`kvprobe.tasks.documents`; ``"essays"`` are the shipped ones. Without a
        template a document is its bare text; MultiNews' where ``queries`` is ``"suffix"``.
    length
        Most tokens of a prompt (of a task's item: with its generation); None: 1500, or of documents what the model
        reads, if that is less.
    queries
        One of :data:`QUERIES`; None: ``"suffix"`` of items, ``"all"`` of documents.
    epsilon, epsilons, p
        ε of the value mass, those swept, and the norm.
    threshold
        A head is sinky where its mass on the first position exceeds this.
    secondary
        Whether secondary sinks are looked for (one more pass with hidden states).
    courses, after
        Time courses of what the model generates, and scores with the evidence masked; items only (None: on).
    exclude_layers
        Layers left out of everything that is pooled: a rule stated before the run.
    seed
        Of items, and of the resampling behind intervals.
    """

    task: str | None = TASK
    items: int = ITEMS
    docs: Any = None
    documents: int | None = None
    join: int = 1
    template: str | None = None
    chat: bool | str = False
    length: int | None = None
    queries: str | None = None
    epsilon: float = EPSILON
    epsilons: tuple[float, ...] = EPSILONS
    threshold: float = 0.3
    p: int = 1
    secondary: bool = True
    courses: bool | None = None
    after: bool | None = None
    exclude_layers: tuple[int, ...] = ()
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_p(self.p)
        for epsilon in (self.epsilon, *self.epsilons):
            check_epsilon(epsilon)
        if not self.epsilons or len(set(self.epsilons)) < len(self.epsilons):
            raise TaskError(f"epsilons={quote(self.epsilons)}; allowed: one or more numbers, each once")
        if not 0 < self.threshold < 1:
            raise TaskError(f"threshold is {self.threshold:g}, must be between 0 and 1 (a share of a head's attention)")
        if self.items < 1:
            raise TaskError(f"items is {self.items}, must be a whole number of at least 1")
        if self.queries not in (None, *QUERIES):
            raise TaskError(f"queries is {quote(self.queries)}, must be one of {', '.join(QUERIES)}")
        self._task_or_documents()

    def _task_or_documents(self) -> None:
        if self.task is None:
            asked = [name for name in ("courses", "after") if getattr(self, name)]
            if asked or self.queries == "answer":
                what = asked[0] if asked else "queries='answer'"
                raise TaskError(f"{what} needs an answer, which documents do not have: allowed with a task")
        elif self.task not in tasks.names():
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(tasks.names())}")

    @property
    def rows(self) -> str:
        """The queries that are used."""
        return self.queries or ("all" if self.task is None else "suffix")

    @property
    def with_courses(self) -> bool:
        """Whether time courses are made."""
        return self.task is not None and self.courses is not False

    @property
    def with_after(self) -> bool:
        """Whether the evidence is masked."""
        return self.task is not None and self.after is not False

    def cases(self, model: Any) -> Sequence[Case]:
        """All inputs of this run."""
        if self.task is None:
            return self._documents(model)
        return [self._item(model, index) for index in range(self.items)]

    def _item(self, model: Any, index: int) -> Case:
        assert self.task is not None
        seed = self.seed * 10_000 + index
        item = tasks.make(self.task, model, length=self.length or LENGTH, seed=seed, **self.options)
        spans = {label: list(found) for label, found in item.spans.items()}
        return Case(index, f"item {index}", item.prompt, item.context_stop, item.answer_ids, spans, item)

    def _documents(self, model: Any) -> list[Case]:
        usual = "multi_news" if self.rows == "suffix" else "none"
        source = None if self.docs in (None, ESSAYS) else self.docs
        length = min(LENGTH, model.max_length or LENGTH) if self.length is None else self.length
        found = tasks.documents(
            model,
            source,
            n=self.documents,
            length=length,
            join=self.join,
            template=usual if self.template is None else self.template,
            chat=self.chat,
        )
        cases = [
            Case(i, each.name, each.prompt, each.context_stop, truncated=each.truncated) for i, each in enumerate(found)
        ]
        if bare := [case.name for case in cases if not case.rows(self.rows)]:
            raise TaskError(f"{bare[0]}: queries='suffix' needs a question behind the text: give a template, or 'all'")
        return cases


DOCUMENT_WORDS = ("docs", "documents", "join", "template", "chat")
TASK_WORDS = ("task", "items", "decoys", "distractors", "needles", "haystack")
UNASKED = {"join": 1, "chat": False}
"""What a word is where nobody gave it, if not None."""


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe sinks``; ``--docs`` alone chooses documents, other words say how."""
    documents, task = (
        [name for name in names if given[name] != UNASKED.get(name)] for names in (DOCUMENT_WORDS, TASK_WORDS)
    )
    if documents and task:
        raise TaskError(
            f"--{documents[0]} reads documents and --{task[0]} makes items of a task: allowed is one or the other"
        )
    if documents and given["docs"] is None:
        raise TaskError(f"--{documents[0]} goes with --docs; allowed: --docs {ESSAYS}, a folder, a file, …")
    kind = {name: given[name] for name in DOCUMENT_WORDS} | {"task": None} if documents else _task(given)
    same = {name: given[name] for name in ("queries", "epsilon", "threshold", "secondary", "courses", "after", "seed")}
    sweep: dict[str, Any] = {} if given["epsilons"] is None else {"epsilons": _numbers("epsilons", given["epsilons"])}
    layers = tuple(sorted({_whole(word) for word in words(given["exclude_layers"])}))
    return Settings(**kind, **same, **sweep, length=given["length"], p=given["norm"], exclude_layers=layers)


def _task(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {"decoys": given["decoys"] or 0}
    options |= {name: given[name] for name in ("distractors", "needles") if given[name] is not None}
    options |= {"path": str(given["haystack"])} if given["haystack"] is not None else {}
    task = TASK if given["task"] is None else given["task"]
    return {"task": task, "items": ITEMS if given["items"] is None else given["items"], "options": options}


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in words(text))
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise TaskError(f"{name} is {quote(text)}, must be numbers with commas, like 0,1e-4,1e-2")
    return found


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise TaskError(f"exclude_layers is {quote(word)}, must be whole numbers with commas, like 0,1") from None
