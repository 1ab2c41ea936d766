"""From rows of arms to numbers: matched or not, balance, effects, the contrast with its tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import stats
from kvprobe.placebo.finder import REMEDIES
from kvprobe.placebo.probe import Probed
from kvprobe.placebo.settings import MATCH_ON, Settings

if TYPE_CHECKING:
    import pandas as pd

EFFECTS = {"logprob": "delta_logprob", "kl": "kl", "settling_depth": "delta_settling"}
LOGGED = ("bound", "perturbation", "centred", "value_mass", "mass")
VARIABLES = (*LOGGED, "length", "position")
SPANS, INJECTED = "spans", "injected"
EVERY, VECTORS = ("target", "placebo", "length_only", "gate"), ("injected_target", "injected")
Measure = str


def contrasts(
    probes: Sequence[Probed], arms: pd.DataFrame, balance: pd.DataFrame, settings: Settings, outcome: Measure
) -> dict[str, Any]:
    """Both contrasts of a run; ``outcome`` is the one that is confirmatory."""
    return {match_on: _contrast(probes, arms, balance, match_on, settings, outcome) for match_on in MATCH_ON}


def _contrast(
    probes: Sequence[Probed], arms: pd.DataFrame, balance: pd.DataFrame, match_on: str, settings: Settings, outcome: str
) -> dict[str, Any]:
    matches = {probe.index: probe.matches[match_on] for probe in probes}
    remedies = [match.remedy for match in matches.values()]
    unmatched = [match for match in matches.values() if not match.matched]
    kind, chosen = estimand(arms, match_on)
    column = EFFECTS[outcome]
    spans = {"bound": "θ", "perturbation": "L"}[match_on]
    counts: dict[str, int] = {name: remedies.count(name) for name in REMEDIES}
    # Injection is a remedy of the targets without placebos, whatever else was injected beside.
    counts[INJECTED] = len(unmatched) if (arms["arm"] == INJECTED).any() else 0
    return {
        "matched": len(matches) - len(unmatched),
        "unmatched": len(unmatched),
        "matched_answered": len(_items(arms, match_on, SPANS)),
        "caliper": settings.caliper,
        "within_caliper": {name: _median([m.tried.get(name, math.nan) for m in unmatched]) for name in REMEDIES},
        "no_overlap_ratio": _median([match.strongest.get("contiguous", math.nan) for match in unmatched]),
        "strongest": {name: _median([m.strongest.get(name, math.nan) for m in matches.values()]) for name in REMEDIES},
        "remedy": counts,
        "kind": kind,
        "estimand": {
            SPANS: f"content at equal {spans}: target against matched key sets, both cut out",
            INJECTED: "content at equal L: the target's own Δo against other directions of its norm, both injected",
        }.get(kind, "none: no answered item has placebos"),
        "balance": _balance_rows(balance, match_on),
        "effect": {
            name: {each: _mean_effect(arms, name, match_on, chosen, EFFECTS[each]) for each in EFFECTS}
            for name in (*EVERY, *(VECTORS if kind == INJECTED else ()))
        },
        "contrast": contrast(arms, match_on, kind, chosen, column, settings.seed),
        "by_outcome": {each: contrast(arms, match_on, kind, chosen, EFFECTS[each], settings.seed) for each in EFFECTS},
        "injected_against_mask": contrast(arms, match_on, INJECTED, chosen, column, settings.seed, target="target")
        if kind == INJECTED
        else None,
    }


def estimand(arms: pd.DataFrame, match_on: str) -> tuple[str, list[int]]:
    """Whether key sets or injected vectors are the control, and the answered items that have it.

    The two are never mixed: where any answered item has matched key sets, those items alone are the contrast.
    """
    for kind in (SPANS, INJECTED):
        items = _items(arms, match_on, kind)
        if items:
            return kind, items
    return "none", []


def _items(arms: pd.DataFrame, match_on: str, kind: str) -> list[int]:
    answered = arms[arms["answered"]]
    found = answered[_is_control(answered, match_on, kind)]
    return sorted(int(item) for item in found["item"].unique())


def _is_control(arms: pd.DataFrame, match_on: str, kind: str) -> Any:
    if kind == INJECTED:
        return arms["arm"] == "injected"
    return (arms["arm"] == "placebo") & (arms["match_on"] == match_on)


def values(
    arms: pd.DataFrame, match_on: str, kind: str, items: Sequence[int], column: str, target: str | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One number a target, and the numbers of its placebos."""
    own = target or ("injected_target" if kind == INJECTED else "target")
    controls = arms[_is_control(arms, match_on, kind)]
    mine = arms[arms["arm"] == own].set_index("item")[column]
    return (
        np.array([float(mine.loc[item]) for item in items]),
        [controls.loc[controls["item"] == item, column].to_numpy(float) for item in items],
    )


def contrast(
    arms: pd.DataFrame,
    match_on: str,
    kind: str,
    items: Sequence[int],
    column: str,
    seed: int,
    target: str | None = None,
) -> dict[str, Any]:
    """Target − mean of its placebos over items: interval, the primary test and those beside it.

    Mean, interval and the tests of differences are of all placebos. The primary test permutes the target's label among
    the ``tested`` ones, which share no key: unions of the same needles have effects that go together, and a permutation
    among all of them rejected 16 % of true nulls at a nominal 5 % (``analyses/placebo_calibration.py``). That p stands
    beside as ``p_permutation_all``.
    """
    if not items:
        return _no_contrast()
    own, controls = values(arms, match_on, kind, items, column, target)
    differences = own - np.array([group.mean() for group in controls])
    interval = stats.mean_interval(differences, seed=seed)
    _, tested = values(arms[arms["tested"]], match_on, kind, items, column, target)
    primary, everyone = (_permuted(own, groups, seed) for groups in (tested, controls))
    flip, ranks = stats.sign_flip(differences, seed=seed), stats.wilcoxon(differences)
    return {
        "mean": interval.mean,
        "ci_low": _finite(interval.low),
        "ci_high": _finite(interval.high),
        "ci_method": interval.method,
        "p_permutation": primary.p,
        "p_permutation_all": everyone.p,
        "p_signflip": flip.p,
        "p_wilcoxon": ranks.p,
        "p_attainable": primary.p_attainable,
        "p_signflip_attainable": flip.p_attainable,
        "cannot_reject": primary.cannot_reject_at,
        "n": len(items),
        "tested": sum(map(len, tested)) / len(items),
        "method": primary.method,
    }


def _permuted(own: np.ndarray, controls: Sequence[np.ndarray], seed: int) -> stats.TestResult:
    """The target's label permuted within items."""
    scores = [np.concatenate([[mine], group]) for mine, group in zip(own, controls, strict=True)]
    return stats.permutation_within_item(scores, [np.arange(len(row)) == 0 for row in scores], seed=seed)


def _no_contrast() -> dict[str, Any]:
    names = ["mean", "ci_low", "ci_high", "p_permutation", "p_signflip", "p_wilcoxon", "p_attainable"]
    names += ["p_permutation_all", "tested"]
    return dict.fromkeys(names) | {"n": 0, "cannot_reject": True, "method": "no answered item has placebos"}


def _mean_effect(arms: pd.DataFrame, name: str, match_on: str, items: Sequence[int], column: str) -> float | None:
    """Mean over items of the mean over an arm's sets, on the items of the contrast (all answered ones without any)."""
    rows = arms[arms["answered"]] if not items else arms[arms["item"].isin(items)]
    rows = rows[_is_control(rows, match_on, SPANS)] if name == "placebo" else rows[rows["arm"] == name]
    by_item = rows.groupby("item")[column].mean()
    return _finite(float(by_item.mean())) if len(by_item) else None


def balance_rows(arms: pd.DataFrame, settings: Settings) -> list[dict[str, Any]]:
    """SMD before (length-only windows) and after matching, by matching and variable, over the contrast's items."""
    rows = []
    for match_on in MATCH_ON:
        items = _items(arms, match_on, SPANS)
        rows += [_balance(arms, match_on, items, variable, settings.seed) for variable in VARIABLES if items]
    return rows


def _balance(arms: pd.DataFrame, match_on: str, items: Sequence[int], variable: str, seed: int) -> dict[str, Any]:
    own, after = values(arms, match_on, SPANS, items, variable)
    windows = arms[arms["arm"] == "length_only"]
    before = [windows.loc[windows["item"] == item, variable].to_numpy(float) for item in items]
    # A window that no row sees has no logarithm; without it the two are no worse apart than they are said to be.
    seen = [group[group > 0] if variable in LOGGED else group for group in before]
    unseen = sum(map(len, before)) - sum(map(len, seen))
    found = stats.standardised_difference(own, seen, after, log=variable in LOGGED, seed=seed)
    assert found.after is not None
    ratio = stats.max_abs_ln_ratio(own, after).value if variable in (*LOGGED, "length") else math.nan
    return {
        "match_on": match_on,
        "variable": variable,
        "matched": variable == match_on,
        "max_abs_ln_ratio": ratio,
        "smd_before": found.before.mean,
        "before_low": found.before.low,
        "before_high": found.before.high,
        "smd_after": found.after.mean,
        "after_low": found.after.low,
        "after_high": found.after.high,
        "n": found.n,
        "flagged": found.flagged or unseen > 0,
    }


def _balance_rows(balance: pd.DataFrame, match_on: str) -> dict[str, Any]:
    if not len(balance):
        return {}
    rows = balance[balance["match_on"] == match_on].to_dict("records")
    return {
        row["variable"]: {k: _finite(v) for k, v in row.items() if k not in ("match_on", "variable")} for row in rows
    }


def contrast_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The contrasts as a table: one row a matching × outcome."""
    rows = []
    for match_on, found in summary["contrasts"].items():
        for outcome, row in found["by_outcome"].items():
            named = {"match_on": match_on, "outcome": outcome, "kind": found["kind"], "estimand": found["estimand"]}
            # Injected vectors do not pass calibration: their contrast describes.
            confirmatory = outcome == summary["outcome"] and found["kind"] != INJECTED
            rows.append(named | {"confirmatory": confirmatory} | row)
    return rows


def _median(given: Sequence[float]) -> float | None:
    known = [value for value in given if not math.isnan(value)]
    return float(np.median(known)) if known else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
