"""What the analyses over documents share: options, and the steps from a command line to a run folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DOCUMENTS = ("docs", "documents", "length", "join", "template", "chat", "probe")
"""Options that say which documents are read and how."""


@dataclass(frozen=True)
class Analysis:
    """One question as a script.

    Attributes
    ----------
    name
        File name without its ending: that of the figure and of the run.
    question
        First line of ``--help``.
    options
        Adds the script's own options to a parser.
    plan
        (model, **asked) → everything that is decided, checked: nothing is written before the input is accepted.
    compute
        (model, plan) → the table that is drawn; other tables to be stored stand in ``attrs["tables"]``, facts for the
        manifest in ``attrs["about"]``.
    plot, report
        The figure; what is printed for a person.
    """

    name: str
    question: str
    options: Callable[[argparse.ArgumentParser], None]
    plan: Callable[..., Any]
    compute: Callable[[Any, Any], pd.DataFrame]
    plot: Callable[[pd.DataFrame], Figure]
    report: Callable[[pd.DataFrame], None]

    def main(self, words: Sequence[str] | None = None) -> int:
        """Plan, compute, print and, with ``--out``, write a run folder; 2 for a mistake in the input."""
        given = self._parser().parse_args(words)
        from kvprobe.errors import KVProbeError
        from kvprobe.models import load

        asked = {key: value for key, value in vars(given).items() if key not in ("model", "out")}
        try:
            model = load(given.model)
            planned = self.plan(model, **asked)
            if given.out is None:
                self.report(self.compute(model, planned))
            else:
                self._store(model, planned, given)
        except KVProbeError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 2
        return 0

    def _store(self, model: Any, planned: Any, given: argparse.Namespace) -> None:
        from kvprobe import records

        with records.run(
            given.out, command=self.name, arguments=vars(given), seed=given.seed, model=given.model
        ) as run:
            table = self.compute(model, planned)
            self.report(table)
            run.table(plain(table), "rows.parquet")
            for name, each in table.attrs.get("tables", {}).items():
                run.table(plain(each), f"{name}.parquet")
            run.figure(self.plot(table), f"{self.name}.png")
            run.update(weight_processing=model.report.processing, **table.attrs.get("about", {}))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=self.question)
        parser.add_argument(
            "--model", default="smollm2-135m", help="a name that kvprobe.load understands (%(default)s)"
        )
        self.options(parser)
        parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
        parser.add_argument("--out", type=Path, help="folder for tables, figure and manifest")
        return parser


def words(text: str) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def document_options(parser: argparse.ArgumentParser, join: int = 1) -> None:
    """Which documents are read, and which row is looked at."""
    docs = "folder of .txt, .txt or .jsonl file, multi_news, or hub:OWNER/NAME:FILE (the shipped essays)"
    parser.add_argument("--docs", help=docs)
    parser.add_argument("--documents", type=int, help="number of documents (all)")
    parser.add_argument("--length", type=int, help="most tokens of a prompt; longer texts are cut at their end")
    parser.add_argument("--join", type=int, default=join, help="consecutive texts that make one document (%(default)s)")
    parser.add_argument("--template", help="multi_news, none, or a text with {context} (multi_news)")
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the tokenizer's chat template")
    parser.add_argument(
        "--probe", default="first_decoded", help="first_decoded, last_prompt or next_token (%(default)s)"
    )


def reading(asked: dict[str, Any], join: int = 1) -> Any:
    """Take the documents' part out of ``asked``: what :func:`document_options` gave, or its defaults."""
    from kvprobe.cells.reading import from_command

    usual = {"docs": None, "documents": None, "length": None, "join": join, "template": None, "chat": False}
    given = usual | {"probe": "first_decoded"} | {name: asked.pop(name) for name in DOCUMENTS if name in asked}
    return from_command(given)


def progress(what: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A bar on a terminal, nothing elsewhere."""
    from kvprobe.commands.console import progress as bar

    return bar(what)


def plain(table: pd.DataFrame) -> pd.DataFrame:
    """The table without its ``attrs``, which parquet would try to store."""
    copy = table.copy()
    copy.attrs = {}
    return copy
