"""What α, ε and the norm of the value term change: the perturbation of every head, and a task's score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from kvprobe import cells, curves, stats
from kvprobe import parts as kept
from kvprobe.audits.tables import Progress
from kvprobe.cells import Arm, Cells, Pair, matrix
from kvprobe.cells.reading import reading_of
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction import Policy
from kvprobe.eviction.policies import ratio
from kvprobe.tasks.document import Document

VALUES: dict[str, tuple[float, ...]] = {
    "alpha": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "epsilon": (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    "norm": (1, 2),
}
"""What is swept, and over which values: α, ε, and the p of m = ‖V W_O‖_p in the selector."""
FIELDS = {"alpha": "alpha", "epsilon": "epsilon", "norm": "p"}
CACHES = ("0.1", "0.2")
HEAD = ["layer", "head"]


@dataclass(frozen=True)
class Sweep:
    """One setting of the second stage, and the values that it takes.

    Attributes
    ----------
    kind
        ``"alpha"``, ``"epsilon"`` or ``"norm"``.
    pair
        The policy without a second stage, and with it; all other settings are those of the latter.
    values
        None for :data:`VALUES`.
    """

    kind: str
    pair: Pair
    values: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in VALUES:
            raise EvictionError(f"sweep={quote(self.kind)}; allowed: {', '.join(VALUES)}")
        if not hasattr(self.pair.ours.selector, FIELDS[self.kind]):
            raise EvictionError(
                f"{self.pair.ours.name} has no {self.kind} to sweep; allowed: a policy with a second stage"
            )
        if not self.taken or len(set(self.taken)) < len(self.taken):
            raise EvictionError(f"values {quote(self.taken)}; allowed: one or more, each once")
        _ = self.policies  # a selector refuses what it cannot take

    @property
    def taken(self) -> tuple[float, ...]:
        """The values."""
        return VALUES[self.kind] if self.values is None else self.values

    @property
    def policies(self) -> list[Policy]:
        """One policy a value, named after it."""
        ours = self.pair.ours
        field = FIELDS[self.kind]
        return [
            replace(
                ours,
                selector=replace(ours.selector, **{field: value}),
                label=f"{ours.name} {self.kind}={value:g}",
            )
            for value in self.taken
        ]


def sweep(
    model: Any,
    docs: Any,
    what: Sweep,
    caches: Sequence[Any] = CACHES,
    *,
    probe: str = "first_decoded",
    p: int = 1,
    seed: int = 0,
    progress: Progress = iter,
    keep: kept.Keep = kept.afresh,
    **reading: Any,
) -> pd.DataFrame:
    """Perturbation of every head under each value, against the policy without a second stage.

    Parameters
    ----------
    docs, probe, p, progress, **reading
        As in :func:`kvprobe.maps.per_head`.
    what
        The setting and its values.
    caches
        Shares of the context's entries to keep.

    Returns
    -------
    DataFrame
        One row a cache × value: ``L`` (mean over documents and heads), ``centred_bound``, ``bound``, ``base_L``;
        ``change`` = L − base_L with ``ci_low``, ``ci_high`` (95 % over documents); ``heads_reduced`` with
        ``heads_low``, ``heads_high``; ``n_tokens`` (mean of the contexts), ``epsilon_n`` (ε · n, whatever is swept),
        ``n_docs``.
    """
    documents = reading_of(docs, probe=probe, **reading).documents(model)
    heads = sweep_cells(model, documents, what, caches, probe=probe, norms=(p,), progress=progress, keep=keep)[p]
    return sweep_rows(heads, what, caches, [cells.fitting(model, each, probe)[0] for each in documents], seed)


def sweep_cells(
    model: Any,
    documents: Sequence[Document],
    what: Sweep,
    caches: Sequence[Any] = CACHES,
    *,
    probe: str = "first_decoded",
    norms: Sequence[int] = (1,),
    progress: Progress = iter,
    keep: kept.Keep = kept.afresh,
) -> dict[int, pd.DataFrame]:
    """The cells by head behind a sweep, in each norm of L; one pass a document."""
    arms = refuse_sweep(model, documents, what, probe, caches)
    policies = [what.pair.base, *what.policies]

    def measured(document: Document) -> list[Cells]:
        probed = cells.probe(model, document, policies, probe)
        choices = cells.choose(probed, arms)
        return [cells.measure(probed, arms, p=p, choices=choices) for p in norms]

    parts = [
        keep(f"document {number}", partial(measured, document)) for number, document in enumerate(progress(documents))
    ]
    return {p: cells.joined(part[place] for part in parts).heads for place, p in enumerate(norms)}


def sweep_rows(
    heads: pd.DataFrame, what: Sweep, caches: Sequence[Any], stops: Sequence[int], seed: int = 0
) -> pd.DataFrame:
    """The table of :func:`sweep` from cells; ``stops`` are the compressed tokens of each document."""
    found = []
    for cache in caches:
        at = heads[heads["cache"] == float(ratio(cache))]
        base = at[at["policy"] == what.pair.base.name]
        for value, policy in zip(what.taken, what.policies, strict=True):
            about = {"sweep": what.kind, "preset": what.pair.preset, "base": what.pair.base.name}
            row = about | {"cache": float(ratio(cache)), "value": value}
            found.append(row | _row(base, at[at["policy"] == policy.name], seed) | _size(policy, stops))
    return pd.DataFrame(found)


def refuse_sweep(
    model: Any, documents: Sequence[Document], what: Sweep, probe: str, caches: Sequence[Any] = CACHES
) -> list[Arm]:
    """The arms of a sweep, refused before anything is run if they cannot be done with these documents."""
    if not isinstance(what, Sweep):
        raise EvictionError(f"{quote(what)} is no sweep; allowed: Sweep(kind, pair)")
    if not isinstance(caches, (list, tuple)) or not caches:
        raise EvictionError(f"caches={quote(caches)}; allowed: a list of shares, one or more")
    arms = [Arm(policy, str(cache)) for policy in (what.pair.base, *what.policies) for cache in caches]
    cells.refuse(model, *cells.extent(model, documents, probe), arms)
    return arms


def _row(base: pd.DataFrame, ours: pd.DataFrame, seed: int) -> dict[str, Any]:
    mine, theirs = (matrix(table, "perturbation", HEAD) for table in (ours, base))
    change = stats.mean_interval((mine - theirs).mean(1), seed=seed)
    reduced = stats.share_interval(mine - theirs, seed=seed).interval
    return {
        "L": float(mine.mean()),
        "centred_bound": float(ours["centred_bound"].mean()),
        "bound": float(ours["bound"].mean()),
        "base_L": float(theirs.mean()),
        "change": change.mean,
        "ci_low": change.low,
        "ci_high": change.high,
        "heads_reduced": reduced.mean,
        "heads_low": reduced.low,
        "heads_high": reduced.high,
        "n_docs": len(mine),
    }


def _size(policy: Policy, stops: Sequence[int]) -> dict[str, float]:
    n = sum(stops) / len(stops)
    return {"n_tokens": n, "epsilon_n": getattr(policy.selector, "epsilon", 0.0) * n}


def scores(
    model: Any,
    what: Sweep,
    caches: Sequence[Any] = CACHES,
    *,
    progress: Progress = iter,
    keep: kept.Keep = kept.afresh,
    **asked: Any,
) -> pd.DataFrame:
    """A task's score under each value (the base policy has the value NaN, the whole cache is in ``attrs["full"]``).

    Parameters
    ----------
    **asked
        ``task=``, ``items=``, ``length=``, ``seed=``, ``setting=`` of :func:`score_settings`.

    Returns
    -------
    DataFrame
        One row a cache × value: ``score`` with ``ci_low``, ``ci_high``; ``delta_logprob`` (nats, the gold answer's
        log-probability against the whole cache) with ``logprob_low``, ``logprob_high``; ``n``.
    """
    policies = (what.pair.base, *what.policies)
    settings = score_settings(what, caches, **asked)
    result = curves.run(model, settings, progress, keep)
    answers, table = result.answers(), result.rows()
    whole = answers[answers["policy"] == "full"].set_index("item")["logprob"]
    values = dict(zip((policy.name for policy in policies), (float("nan"), *what.taken), strict=True))
    found = []
    for row in table.to_dict("records"):
        mine = answers[(answers["policy"] == row["policy"]) & (answers["cache"].map(_share) == row["cache"])]
        lost = mine.set_index("item")["logprob"] - whole
        interval = stats.mean_interval(lost.to_numpy(), seed=settings.seed)
        about = {"sweep": what.kind, "preset": what.pair.preset, "task": settings.task, "value": values[row["policy"]]}
        ends = {"logprob_low": interval.low, "logprob_high": interval.high}
        kept = {name: row[name] for name in ("cache", "score", "ci_low", "ci_high", "delta_logprob", "n")}
        found.append(about | kept | ends)
    scored = pd.DataFrame(found)
    scored.attrs["full"] = result.summary["full"]
    return scored


def score_settings(
    what: Sweep,
    caches: Sequence[Any] = CACHES,
    *,
    task: str = "niah_single_1",
    items: int = 10,
    length: int = 1000,
    seed: int = 0,
    setting: str = "context",
) -> curves.Settings:
    """What :func:`scores` asks of :mod:`kvprobe.curves`; ``setting="joint"`` compresses the question, too."""
    policies = (what.pair.base, *what.policies)
    return curves.Settings(policies, tuple(str(cache) for cache in caches), task, length, items, seed, setting)


def _share(cache: str) -> float:
    return float(ratio(cache))
