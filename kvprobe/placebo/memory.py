"""Trace memory: does masking a quantity's first derivation make its later mentions settle deeper?

The mask acts on every position after the derivation (``queries="after"``): it never existed for what follows, and all
of that is computed again. The rest of the trace is teacher-forced. An effect is a change of settling depth, in layers,
of the rows that predict a mention's tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprobe import runs, stats
from kvprobe.outcomes import Outcome, answer_logprobs, answer_match, argmax_flips, deep_from, kl_divergence, settle
from kvprobe.placebo.arms import Design
from kvprobe.placebo.keysets import KeySet, Span, text
from kvprobe.placebo.pools import length_only
from kvprobe.placebo.probe import Probed, Row, described, difference_to_clean, first, matched, receipt, seed_of
from kvprobe.placebo.settings import Settings
from kvprobe.tasks.traces import TraceItem

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rows:
    """The rows that predict the tokens of all mentions, in order, among a run's last rows.

    ``at`` [T] counts from ``start``; ``tokens`` [T] are predicted; ``mention`` [T] is the mention they belong to.
    """

    start: int
    at: list[int]
    tokens: list[int]
    mention: list[int]

    @classmethod
    def of(cls, item: TraceItem) -> Rows:
        """Of one trace."""
        start = item.mentions[0].start - 1
        found = [(m, at) for m, mention in enumerate(item.mentions) for at in range(mention.start, mention.stop)]
        tokens = [int(item.prompt.ids[at]) for _, at in found]
        return cls(start, [at - 1 - start for _, at in found], tokens, [m for m, _ in found])


def probe_trace(model: Any, settings: Settings, item: TraceItem, index: int) -> Probed:
    """Match on the clean trace, run every arm, and look at every mention's tokens."""
    begun = time.perf_counter()
    design = trace_design(model, settings, item, index)
    arms = [*design.full(), *design.graded()]
    designed = time.perf_counter()
    rows = Rows.of(item)
    n = len(item.prompt)
    outcomes: list[Outcome] = runs.intervene(
        model, item.prompt, [arm.parts for arm in arms], suffix=n - rows.start, streams=n - rows.start, keep_trace=False
    )
    ran = time.perf_counter()
    looked = [_look(model, settings, rows, out, outcomes[0]) for out in outcomes]
    later = [mention.k > 1 and not mention.rederive for mention in item.mentions]
    table = [
        described(index, arm, design.stop) | _summed(rows, later, seen) | {"answered": True} | receipt(out)
        for arm, seen, out in zip(arms, looked, outcomes, strict=True)
    ]
    difference_to_clean(table)
    mentions = _mention_rows(item, rows, looked[0], looked[2], deep_from(model.geometry.n_layers, settings.rho))
    timings = {"match_s": designed - begun, "arms_s": ran - designed, "outcomes_s": time.perf_counter() - ran}
    facts = {
        "seed": item.seed,
        "task": item.task,
        "tokens": n,
        "mentions": len(item.mentions),
        "rederived": sum(mention.rederive for mention in item.mentions),
        "target": text(design.target),
        "hard": len(item.hard),
        "mention_rows": mentions,
    }
    identity = float((outcomes[1].logits - outcomes[0].logits).abs().max())
    return Probed(index, facts, design.matches, table, identity, timings)


@dataclass(frozen=True)
class TraceDesign(Design):
    """A design whose placebos end before ``stop``: every later mention comes after every arm's keys."""

    stop: int = 0
    model: Any = None
    prompt: Any = None

    @cached_property
    def rows_trace(self) -> Any:
        """The clean run at every row: vectors are injected at all of them, though strengths are means over some."""
        return runs.observe(self.model, self.prompt, slice(self.target[-1][1], None))


def trace_design(model: Any, settings: Settings, item: TraceItem, index: int) -> TraceDesign:
    """Placebos of the first derivation among what stands before the second mention."""
    target, hard, protect, stop = _spans(item)
    begin, n = first(item.prompt), len(item.prompt)
    rows = np.unique(np.linspace(begin, n - 1, min(settings.rows, n - begin)).round().astype(int)).tolist()
    trace = runs.observe(model, item.prompt, rows)
    windows = trace_windows(settings, item, index)
    weights = _residual_weights(model, item, rows) if settings.residual_norm else None
    matches, table = matched(trace, settings, target, windows, hard, protect, stop, weights, after=True)
    design = (trace, target, matches, windows, settings, "after", table, seed_of(settings, index), True, weights)
    return TraceDesign(*design, stop=stop, model=model, prompt=item.prompt)


def trace_windows(settings: Settings, item: TraceItem, index: int) -> tuple[KeySet, ...]:
    """The length-only windows of a trace, which need no run."""
    target, hard, protect, stop = _spans(item)
    return length_only(
        len(item.prompt),
        target,
        settings.placebos,
        protect=protect,
        hard=hard,
        seed=seed_of(settings, index),
        first=first(item.prompt),
        stop=stop,
    )


def _spans(item: TraceItem) -> tuple[KeySet, list[Span], list[Span], int]:
    """Target, hard spans, what no placebo may touch, and the second mention, before which all of them end."""
    target: KeySet = tuple(sorted(item.target))
    stop = min(mention.start for mention in item.mentions if mention.k > 1)
    mentions = [(mention.start, mention.stop) for mention in item.mentions if mention.stop <= stop]
    inside = {at for start, end in target for at in range(start, end)}
    protect = [*item.protect, *(span for span in mentions if span[0] not in inside)]
    return target, [span for span in sorted(item.hard) if span[1] <= stop], protect, stop


def _residual_weights(model: Any, item: TraceItem, rows: Sequence[int]) -> list[float]:
    """1 / mean norm of the hidden state after each layer, over the observed rows."""
    kept = len(item.prompt) - rows[0]
    out = runs.intervene(model, item.prompt, [()], suffix=kept, streams=kept, keep_trace=False)[0]
    resid = out.streams.resid_post[:, [row - rows[0] for row in rows]]
    return (1 / resid.float().norm(dim=-1).mean(-1)).tolist()


@dataclass(frozen=True)
class _Seen:
    """One arm at every mention token, [T] each."""

    depth: Tensor
    logprob: Tensor
    kl: Tensor
    flips: Tensor
    match: Tensor


def _look(model: Any, settings: Settings, rows: Rows, out: Outcome, clean: Outcome) -> _Seen:
    mine, theirs = out.logits[rows.at], clean.logits[rows.at]
    return _Seen(
        settle(model, out, rows.at, settings.threshold, settings.rule).depth,
        answer_logprobs(mine, rows.tokens),
        kl_divergence(theirs, mine),
        argmax_flips(theirs, mine),
        answer_match(mine, rows.tokens),
    )


def _summed(rows: Rows, later: Sequence[bool], seen: _Seen) -> Row:
    """An arm's outcome over the tokens of later mentions that are not worked out again."""
    chosen = torch.tensor([later[mention] for mention in rows.mention])
    logprob = seen.logprob[chosen]
    return {
        "logprob": float(logprob.sum()),
        "logprob_per_token": float(logprob.mean()),
        "kl": float(seen.kl[chosen].sum()),
        "flips": int(seen.flips[chosen].sum()),
        "match": bool(seen.match[chosen].all()),
        "score": math.nan,
        "text": "",
        "settling_depth": float(seen.depth[chosen].double().mean()),
        "deep": math.nan,
    }


def _mention_rows(item: TraceItem, rows: Rows, clean: _Seen, target: _Seen, deep: int) -> list[Row]:
    """One row a mention: mean over its tokens, clean and with the first derivation masked."""
    found = []
    for number, mention in enumerate(item.mentions):
        at = torch.tensor([m == number for m in rows.mention])
        found.append(
            {
                "k": mention.k,
                "rederive": mention.rederive,
                "start": mention.start,
                "tokens": int(at.sum()),
                "depth_clean": float(clean.depth[at].double().mean()),
                "depth_masked": float(target.depth[at].double().mean()),
                "deep_clean": float((clean.depth[at] >= deep).double().mean()),
                "logprob_clean": float(clean.logprob[at].sum()),
                "logprob_masked": float(target.logprob[at].sum()),
            }
        )
    return found


def mention_frame(probes: Sequence[Probed]) -> pd.DataFrame:
    """One row an item × mention."""
    import pandas as pd

    rows = [{"item": probe.index} | row for probe in probes for row in probe.facts["mention_rows"]]
    frame = pd.DataFrame(rows)
    frame["effect"] = frame["depth_masked"] - frame["depth_clean"]
    frame["delta_logprob"] = frame["logprob_masked"] - frame["logprob_clean"]
    return frame


def memory_summary(mentions: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Effect by k, selectivity against mentions that are worked out again, and deep tokens at k = 1 and later."""
    later = mentions[(mentions["k"] > 1) & ~mentions["rederive"]]
    rows = []
    for k, some in later.groupby("k"):
        rows.append(
            {"k": int(str(k))}
            | _interval(some, "effect", seed)
            | {"delta_logprob": float(some["delta_logprob"].mean())}
        )
    again = mentions[(mentions["k"] > 1) & mentions["rederive"]]
    return {
        "by_k": rows,
        "selectivity": _selectivity(later, again, seed),
        "rederived": _interval(again, "effect", seed) if len(again) else None,
        "deep_ratio": _deep(mentions),
    }


def _interval(rows: pd.DataFrame, column: str, seed: int) -> dict[str, Any]:
    """Mean over items of the mean over an item's mentions."""
    per_item = rows.groupby("item")[column].mean().to_numpy(float)
    found = stats.mean_interval(per_item, seed=seed)
    return {"effect": found.mean, "ci_low": _finite(found.low), "ci_high": _finite(found.high), "n": found.n}


def _selectivity(later: pd.DataFrame, again: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Within item: effect on later mentions minus effect on those that are worked out again, in layers."""
    both = later.groupby("item")["effect"].mean() - again.groupby("item")["effect"].mean()
    known = both.dropna().to_numpy(float)
    if not len(known):
        return {"mean": None, "ci_low": None, "ci_high": None, "n": 0, "why": "no item has a mention worked out again"}
    found = stats.mean_interval(known, seed=seed)
    return {"mean": found.mean, "ci_low": _finite(found.low), "ci_high": _finite(found.high), "n": found.n}


def _deep(mentions: pd.DataFrame) -> dict[str, Any]:
    """Share of tokens that settle deep in the clean run: at the first mention, at later ones, and their ratio."""

    def share(rows: pd.DataFrame) -> float | None:
        return float(np.average(rows["deep_clean"], weights=rows["tokens"])) if len(rows) else None

    one = share(mentions[mentions["k"] == 1])
    later = share(mentions[(mentions["k"] > 1) & ~mentions["rederive"]])
    ratio = None if one is None or not later else one / later
    return {"first": one, "later": later, "ratio": ratio}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
