"""Items and traces of the user's own, from JSON lines. All lines are checked before any is used.

Positions in a line are half-open pairs of **characters** of its ``text``; tokens are found from them.
"""

from __future__ import annotations

import os
import string
from typing import Any

from kvprobe.errors import DataError
from kvprobe.prompts import Prompt
from kvprobe.prompts.alignment import Range
from kvprobe.tasks.items import Item, answer_ids
from kvprobe.tasks.lines import Line, read
from kvprobe.tasks.traces import Marks, TraceItem, build, disjoint, located, shown

NAME = "user"
ITEM_FIELDS = ("text", "target", "answer", "protect", "hard", "question", "references", "id", "meta")
TRACE_FIELDS = ("text", "target", "mentions", "rederive", "hard", "protect", "id", "meta")
_ALNUM = string.ascii_letters + string.digits


def items(path: str | os.PathLike[str], model: Any) -> list[Item]:
    """Prompts with a target, an answer and, if given, placebos.

    Every line is an object with

    ``text``
        The whole prompt.
    ``target``
        What is ablated: a part of the text that occurs exactly once, a pair ``[start, stop]`` of characters, or a list
        of either.
    ``answer``
        What follows the text, teacher-forced. Where a letter, a digit or one of ``.,:;?!`` would be followed by a
        letter or digit (ASCII), a space is put between them; all else follows as written.
    ``protect``, ``hard`` (optional)
        Spans (as ``target``) that no placebo may touch, and those that are the first to serve as placebos.
    ``question`` (optional)
        The end of the text: masks hold from its first token on. Without it they hold for the last token of the prompt
        and for the answer.
    ``references`` (optional)
        Texts that count as the right answer; by default the answer.
    ``id`` (optional)
        What tables call the line: a text or whole number that no other line has.
    ``meta`` (optional)
        Anything; it is kept in the settings.

    Parameters
    ----------
    path
        A UTF-8 file of JSON lines; blank lines are skipped.
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).

    Returns
    -------
    list of Item
        In the order of the lines. Spans are ``"evidence"`` (the target), ``"hard"`` and ``"protect"``.

    Raises
    ------
    DataError
        One line that names file, line, field, what was given and what is allowed.

    Examples
    --------
    A file's line:

    >>> {"text": "The code of Ann is 17. The code of Bob is 52. The code of Ann is",
    ...  "target": "The code of Ann is 17.", "hard": ["The code of Bob is 52."],
    ...  "question": "The code of Ann is", "answer": "17"}    # doctest: +SKIP
    """
    return [_item(line, model) for line in read(path, ITEM_FIELDS)]


def traces(path: str | os.PathLike[str], model: Any) -> list[TraceItem]:
    """Teacher-forced texts in which a quantity is derived once and mentioned again.

    Every line is an object with

    ``text``
        The whole trace.
    ``target``
        The first derivation, as in :func:`items`.
    ``mentions``
        A list of ``[start, stop, k]``: the characters of every mention of the value, and which mention it is: 1 for the
        first derivation's own, 2 and more behind the target; k does not go back along the text.
    ``rederive`` (optional)
        A list of ``[start, stop]`` characters: mentions within them are places at which the value is worked out again.
    ``hard``, ``protect``, ``id``, ``meta`` (optional)
        As in :func:`items`; ``hard`` must end before the first later mention. Later mentions are protected anyway.

    Parameters
    ----------
    path, model
        As in :func:`items`.

    Returns
    -------
    list of TraceItem
        In the order of the lines.

    Raises
    ------
    DataError
        One line that names file, line, field, what was given and what is allowed.
    """
    return [_trace(line, model) for line in read(path, TRACE_FIELDS)]


def _item(line: Line, model: Any) -> Item:
    text, answer = line.text("text"), line.text("answer")
    groups = {"evidence": line.spans("target", text, 1), "hard": line.spans("hard", text)}
    groups["protect"] = line.spans("protect", text)
    references = _references(line, answer)
    sections = _sections(line, text)
    with line.naming():
        prompt, found = located(model, text, groups, sections)
    prompt, stop = _context(line, prompt)
    spans = {label: sorted(given) for label, given in found.items()}
    _check_spans(line, model.tokenizer, prompt, spans, stop)
    spaced = _spaced(prompt.text or text, answer)
    with line.naming("answer"):
        ids, border = answer_ids(model, prompt, spaced)
    _check_length(line, len(prompt), len(ids), model.max_length)
    settings = _settings(line) | {"tokens": len(prompt), "answer_border": border, "answer_space": spaced != answer}
    return Item(NAME, 0, len(prompt), prompt, spaced, ids, references, stop, spans, settings)


def _trace(line: Line, model: Any) -> TraceItem:
    text = line.text("text")
    if "mentions" not in line.row:
        raise line.refuse("mentions", "a list of [start, stop, k]")
    mentions = [(a, b, k) for a, b, k in line.ranges("mentions", text, 3, "[start, stop, k]")]
    rederive = [(a, b) for a, b in line.ranges("rederive", text, 2, "[start, stop]")]
    target, hard, protect = (line.spans(field, text, field == "target") for field in ("target", "hard", "protect"))
    marks = Marks(target, mentions, rederive, hard, protect)
    with line.naming():
        return build(NAME, 0, model, text, marks, _settings(line))


def _references(line: Line, answer: str) -> tuple[str, ...]:
    given = line.row.get("references", [answer.strip()])
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one.strip() for one in given):
        raise line.refuse("references", "a list of texts, none of them empty")
    return tuple(given)


def _sections(line: Line, text: str) -> dict[str, Range]:
    """Characters of context and question, where there is a question."""
    if "question" not in line.row:
        return {}
    question = line.text("question")
    start = len(text) - len(question)
    if not text.endswith(question) or not text[:start].strip():
        raise line.refuse("question", "the end of the text, with something before it")
    return {"context": (0, start), "question": (start, len(text))}


def _context(line: Line, prompt: Prompt) -> tuple[Prompt, int]:
    """The prompt with the spans of context and question, and the first token of the question."""
    stop = prompt["question"][0] if "question" in prompt.spans else len(prompt) - 1
    if stop < 1:
        raise line.refuse("text", "at least two tokens: one to mask, and one that predicts the answer")
    first = prompt.spans.get("context", (0, 0))[0]
    sections = {"context": (first, stop), "question": (stop, len(prompt))}
    return Prompt(prompt.ids, sections, 0, prompt.text), stop


def _check_spans(line: Line, tokenizer: Any, prompt: Prompt, spans: dict[str, list[Range]], stop: int) -> None:
    """Target and placebos lie before the tokens for which they are masked; nothing overlaps."""
    named = {"target": spans["evidence"], "hard": spans["hard"]}
    for label, given in named.items():
        for span in given:
            if span[1] > stop:
                text = f"{label} {shown(tokenizer, prompt, span)} must end before the {_border(line)}, at token {stop}"
                raise DataError(f"{line.where}: {text}")
    with line.naming():
        disjoint(tokenizer, prompt, named)
        for one in spans["protect"]:  # these may overlap each other
            disjoint(tokenizer, prompt, named | {"protect": [one]})


def _border(line: Line) -> str:
    return "question" if "question" in line.row else "prompt's last token (or give a question)"


def _check_length(line: Line, prompt: int, answer: int, limit: int | None) -> None:
    if limit is not None and prompt + answer > limit:
        raise line.refuse("answer", f"short enough: {prompt} + {answer} tokens, the model reads at most {limit}")


def _spaced(text: str, answer: str) -> str:
    """The answer, with a space before it where a word would otherwise be glued to what it follows."""
    glued = text[-1:] in (*_ALNUM, *".,:;?!") and answer[0] in _ALNUM
    return f" {answer}" if glued else answer


def _settings(line: Line) -> dict[str, Any]:
    """Where a line comes from; JSON-ready."""
    kept = {"meta": line.row["meta"]} if "meta" in line.row else {}
    return {"id": line.name, "line": line.number, **kept}
