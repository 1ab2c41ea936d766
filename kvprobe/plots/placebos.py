"""The figures of a placebo run, drawn from its tables and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.plots.doses import FULL, dose_response
from kvprobe.plots.effects import ARMS, effects
from kvprobe.plots.love import love
from kvprobe.plots.style import Sheet

if TYPE_CHECKING:
    import pandas as pd

ORDER = ("bound", "perturbation")
OUTCOMES = {"logprob": "delta_logprob", "kl": "kl", "settling_depth": "delta_settling"}
"""Confirmatory outcome → the column of arms that is drawn."""


def placebo_figures(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> dict[str, Sheet]:
    """Name → figure of one run, of its confirmatory outcome.

    ``love``: are the placebos like their targets? ``effects``: what does each arm do to the answer? ``doses``: effect
    against strength. A run without anything to balance (no placebo was matched) has no ``love``, one without doses no
    ``doses``, and one without any effect no figure at all.

    Parameters
    ----------
    tables
        ``arms``, ``balance`` and ``contrasts``; the latter two may be absent or empty. Contrasts of other outcomes
        (column ``outcome``) than ``summary["outcome"]`` (log-probability, where it is silent) are not shown.
    summary
        What ``kvprobe placebo`` prints with ``--json``; a summary read back from its file does, too.
    """
    arms, balance, contrasts = (tables.get(name) for name in ("arms", "balance", "contrasts"))
    outcome, figures = summary.get("outcome", "logprob"), {}
    measure = OUTCOMES[outcome]
    if balance is not None and len(balance) and balance[["smd_before", "smd_after"]].notna().any(axis=None):
        seen = balance[balance[["smd_before", "smd_after"]].notna().any(axis=1)]
        figures["love"] = love(seen, summary=summary)
    if arms is None or not _seen(arms, ARMS, measure).any():
        return figures
    rows = [] if contrasts is None else [row for _, row in contrasts.iterrows()]
    rows = [row for row in rows if row.get("outcome", outcome) == outcome]
    figures["effects"] = effects(arms, _matchings(arms, "placebo", measure), measure, rows, summary)
    if (_seen(arms, FULL.values(), measure) & (arms["perturbation"] > 0)).any():
        doses = _matchings(arms, "dose_placebo", measure)
        figures["doses"] = dose_response(arms, measure=measure, match_on=doses, summary=summary)
    return figures


def _seen(arms: pd.DataFrame, kinds: Any, measure: str) -> Any:
    return arms["arm"].isin(list(kinds)) & np.isfinite(arms[measure].astype(float))


def _matchings(arms: pd.DataFrame, arm: str, measure: str) -> list[str]:
    """Ways of matching that have this arm; where none has, the one whose panel shows the arms of no matching."""
    found = set(arms.loc[_seen(arms, [arm], measure), "match_on"])
    return [name for name in ORDER if name in found] or ["perturbation"]
