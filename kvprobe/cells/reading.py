"""Which documents are read, and how: the part of a run's settings that maps and audits share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvprobe.cells.probing import PROBES, fitting
from kvprobe.errors import PromptError, quote
from kvprobe.tasks import documents
from kvprobe.tasks.document import Document


@dataclass(frozen=True)
class Reading:
    """Documents and the row that is looked at.

    Attributes
    ----------
    source, n, length, join, template, chat
        See :func:`kvprobe.tasks.documents`. Without a template: LongBench's MultiNews, and none for
        ``probe="next_token"``, which has no question.
    probe
        One of :data:`kvprobe.cells.PROBES`.
    """

    source: Any = None
    n: int | None = None
    length: int | None = None
    join: int = 1
    template: str | None = None
    chat: bool | str = False
    probe: str = "first_decoded"

    def __post_init__(self) -> None:
        if self.probe not in PROBES:
            raise PromptError(f"probe={quote(self.probe)}; allowed: {', '.join(PROBES)}")

    def documents(self, model: Any) -> list[Document]:
        """Read them, each checked to go with the probe."""
        usual = "none" if self.probe == "next_token" and not self._given else "multi_news"
        template = usual if self.template is None else self.template
        found: list[Document] = documents(
            model, self.source, n=self.n, length=self.length, join=self.join, template=template, chat=self.chat
        )
        for document in found:
            fitting(model, document, self.probe)
        return found

    @property
    def _given(self) -> bool:
        """Whether the source is documents already, which nothing is put around."""
        return isinstance(self.source, (list, tuple)) and all(isinstance(each, Document) for each in self.source)

    @property
    def _name(self) -> str:
        if isinstance(self.source, (list, tuple)):
            return "given texts"
        return "shipped essays" if self.source is None else str(self.source)

    def describe(self, found: list[Document], stops: list[int]) -> dict[str, Any]:
        """What a summary says about the documents: number, tokens, truncation, and what happens when."""
        tokens = [len(document.prompt) for document in found]
        return {
            "n_docs": len(found),
            "probe": self.probe,
            "docs": self._name,
            "join": self.join,
            "tokens": {"min": min(tokens), "max": max(tokens)},
            "compressed_tokens": {"min": min(stops), "max": max(stops)},
            "truncated": sum(document.truncated for document in found),
            "semantics": SEMANTICS[self.probe],
        }


def reading_of(source: Any, **given: Any) -> Reading:
    """A reading from keywords, refused by name where there is no such one."""
    allowed = [each.name for each in fields(Reading) if each.name != "source"]
    if unknown := sorted(set(given) - set(allowed)):
        raise PromptError(f"no setting {quote(unknown[0])} of documents; allowed: {', '.join(allowed)}")
    return Reading(source, **given)


_QUESTION = (
    "prefill-then-evict: instruction and context are prefilled exactly and compressed, the question is fed after"
)
SEMANTICS = {
    "first_decoded": f"{_QUESTION}; the probe row is the query of the first token that the whole cache decodes",
    "last_prompt": f"{_QUESTION}; the probe row is the query of the question's last token",
    "next_token": "prefill-then-evict: all but the last token of a bare text is compressed; which is the probe row",
}


def from_command(given: Mapping[str, Any]) -> Reading:
    """The documents' part of a command line."""
    plain = {name: given[name] for name in ("length", "join", "template", "chat", "probe")}
    return Reading(given["docs"], given["documents"], **plain)
