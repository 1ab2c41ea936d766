"""What a table of epsilon_sensitivity says, a sentence an ε."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def conclusions(rows: pd.DataFrame, reference: float) -> pd.DataFrame:
    """One sentence an ε, and the verdicts that it is made of."""
    import pandas as pd

    found = []
    for epsilon, mine in rows.groupby("epsilon", sort=False):
        at = {(row["quantity"], row["cache"]): row for row in mine.to_dict("records") if row["cache"] == row["cache"]}
        plain = {row["quantity"]: row for row in mine.to_dict("records") if row["cache"] != row["cache"]}
        row = {"epsilon": epsilon, "evidence_first4": _more(plain["evidence / first4"], "first4")}
        row |= {"evidence_other": _more(plain["evidence / other"], "other")}
        row["auroc"] = _side(plain["auroc"])
        row["ratio"] = "value" if plain["value"]["mean"] > plain["rarity"]["mean"] else "rarity"
        row["selector"] = _selector(at)
        found.append(row | {"text": _sentence(row, plain, at, reference)})
    return pd.DataFrame(found)


def _more(row: dict[str, Any], other: str) -> str:
    """Who has more, if the interval over items says so."""
    return "evidence" if row["low"] > 0 else other if row["high"] < 0 else "undecided"


def _side(row: dict[str, Any]) -> str:
    return "evidence" if row["low"] > 0.5 else "first4" if row["high"] < 0.5 else "undecided"


def _selector(at: dict[tuple[str, float], dict[str, Any]]) -> str:
    """Whether the second stage lowers L at all cache sizes, at some, or raises it."""
    gains = [row for (name, _), row in at.items() if name == "gain"]
    lower, higher = (sum(test) for test in ([row["high"] < 0 for row in gains], [row["low"] > 0 for row in gains]))
    sides = {"lower": lower, "higher": higher, "undecided": len(gains) - lower - higher}
    return " and ".join(name for name, count in sides.items() if count)


def _sentence(row: dict[str, Any], plain: dict[str, Any], at: dict[Any, Any], reference: float) -> str:
    mean = {name: each["mean"] for name, each in plain.items()}
    kept = ", ".join(
        f"at {100 * cache:g} % cache L {_form(at['change', cache]['mean'], '+.1f', ' %')} and "
        f"{_form(100 * each['mean'], '.0f', ' %')} the same"
        for (name, cache), each in at.items()
        if name == "kept_second"
    )
    return (
        f"s^val: {_said(row['evidence_first4'], 'first4')}, {_said(row['evidence_other'], 'other')}; AUROC above "
        f"first4 {_form(mean['auroc'], '.2f')} ({row['auroc']}). Order as at 0: {_form(mean['order'], '.2f')}; "
        f"top shared: in a head {100 * mean['top_heads']:.0f} %, pooled {100 * mean['top_pooled']:.0f} %. ρ_ε follows "
        f"{row['ratio']} (m {mean['value']:+.2f}, −s {mean['rarity']:+.2f}). Second stage against ε = {reference:g}: "
        f"{kept}; its L against none: {row['selector']}."
    )


def _form(value: float, form: str, unit: str = "") -> str:
    return "undefined" if value != value else f"{value:{form}}{unit}"


def _said(more: str, other: str) -> str:
    """Who has more, in words."""
    less = other if more == "evidence" else "evidence"
    return f"evidence or {other} undecided" if more == "undecided" else f"{more} has more than {less}"
