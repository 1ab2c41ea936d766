"""docs/models.md, from the laws: a cell says yes only where every law that earns it was run and held.

``python tests/conformance/table.py`` writes the file; the tests compare it with what they find, row by row.
"""

from __future__ import annotations

import re
import sys
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402 (run as a script, the folder of tests is not on the path before)
import torch  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = ("mask", "observe", "gate", "eviction", "moved keys")
PINNED = ("transformers", "transformer-lens", "torch")

INTRODUCTION = """# Models

What `kvprobe.load` accepts and what it refuses, found by running it: for each family a tiny random model is built from
its transformers config, saved, loaded, and put under the laws of `tests/conformance/laws.py`. A cell says *yes* only
where every law that earns it held, for each head layout and each dtype of the row.

Versions: {versions}. `python tests/conformance/table.py` writes this file.

`kvprobe check MODEL --json` says the same of one model, with the differences that it measured.

## Accepted

- **mask**: logits are those of plain transformers, clean and under a 4-D mask; a mask of one head changes no other
  head; masked weights are exactly 0 and the receipt holds; cached = uncached, batched = one by one, left pads change
  nothing; TransformerLens' hooks = the fast path.
- **observe**: rows are transformers' `output_attentions`; span statistics are their definition in float64.
- **gate**: `ValueGate` is plain transformers with an attention by loops.
- **eviction**: a policy's kept set, as `KeepMask` and (without windows) as a smaller cache, is the 4-D mask.
- **moved keys**: `KVPatch` from other positions, and scorers that undo rotation. Where the cell says *refused*, a
  donor's keys can be patched in at their own positions only; the reason stands below the table.

In half precision an error is at most twice transformers' own error in that dtype, against fp32 of the same rounded
weights. Mixtures of experts are judged there by the median row, and the laws on batches, caches, pads, single heads and
kept sets in fp32 only: rounding flips which experts a token goes to. Gates, moved keys, span statistics and batches are
fp32 laws for all.

"""

REFUSALS = """
## Refused

Each with one line that names the reason; nothing is accepted that does not bite.

"""

REASONS = """
Why keys do not move:

"""


@lru_cache(maxsize=12)
def case(family: str, layout: str, dtype: str):
    """One model; the last few stay loaded."""
    from conformance.cases import Case

    return Case(family, layout, DTYPES[dtype])


@cache
def outcomes(family: str, layout: str, dtype: str) -> dict[str, tuple[str | None, ...]]:
    """Column → what each of its laws said of one model: None where it held, the reason where it was refused in words.

    A law that does not hold raises.
    """
    from conformance.laws import LAWS, refusal

    model = case(family, layout, dtype)
    said: dict[str, tuple[str | None, ...]] = {}
    for law in LAWS:
        if law.applies(model):
            said[law.earns] = (*said.get(law.earns, ()), refusal(model, law))
    return said


def row(family: str) -> str:
    """One family's row, earned now."""
    found = {(layout, dtype): outcomes(family, layout, dtype) for layout in tiny.layouts(family) for dtype in DTYPES}
    cells = [_cell([said for each in found.values() for said in each.get(column, ())]) for column in COLUMNS]
    name = type(case(family, next(iter(tiny.layouts(family))), "fp32").model.twin).__name__
    return _line(family, name, ", ".join(tiny.layouts(family)), ", ".join(DTYPES), *cells)


def reason(family: str) -> str | None:
    """Why a family's keys do not move, or None where they do."""
    said = outcomes(family, next(iter(tiny.layouts(family))), "fp32")["moved keys"]
    return None if said == (None,) else f"- {family}: {said[0]}."


def refused_row(family: str) -> str:
    """A refused family's row: its class, and the message of its refusal."""
    from conformance.cases import refused

    error = refused(family)
    return _line(family, error.facts.get("architecture") or _architecture(family), _words(family, str(error)))


@cache
def pinned() -> bool:
    """Whether the versions that the document speaks of are those that are installed."""
    from importlib.metadata import version

    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return all(version(name).split("+")[0] == pin for name, pin in pins if name in PINNED)


def render(rows: dict[str, str], reasons: dict[str, str], refusals: dict[str, str]) -> str:
    """The whole text."""
    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {version}" for name, version in pins if name in PINNED)
    head = [_line("family", "transformers class", "heads", "dtypes", *COLUMNS), _line(*["---"] * (4 + len(COLUMNS)))]
    below = [_line("family", "transformers class", "why"), _line(*["---"] * 3)]
    return (
        INTRODUCTION.format(versions=versions)
        + "\n".join([*head, *rows.values()])
        + "\n"
        + REASONS
        + "\n".join(reasons.values())
        + "\n"
        + REFUSALS
        + "\n".join([*below, *refusals.values()])
        + "\n"
    )


def lines(text: str, families: tuple[str, ...], start: str = "| {} |") -> dict[str, str]:
    """Family → its line of the document, for those that have one."""
    written = text.splitlines()
    starting = {family: [line for line in written if line.startswith(start.format(family))] for family in families}
    return {family: found[0] for family, found in starting.items() if len(found) == 1}


def _cell(said: list[str | None]) -> str:
    return "–" if not said else "yes" if set(said) == {None} else "refused" if None not in said else "in part"


def _words(family: str, message: str) -> str:
    """The reason without the model's name and the versions installed."""
    message = re.sub(r" \[[^\]]*\d\.\d[^\]]*\]$", "", message)
    name = _architecture(family)
    return message.removeprefix(f"{family} ({name}): ").removeprefix(f"{name}: ").replace("|", "\\|")


@cache
def _architecture(family: str) -> str:
    import transformers

    return transformers.AutoModelForCausalLM._model_mapping[type(tiny.config(family))].__name__


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def document() -> str:
    """Everything run, everything written."""
    rows = {family: row(family) for family in tiny.CONFIGS}
    reasons = {family: why for family in tiny.CONFIGS if (why := reason(family))}
    return render(rows, reasons, {family: refused_row(family) for family in tiny.REFUSED})


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT.relative_to(ROOT))
