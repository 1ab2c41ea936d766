"""Statistics of paired designs: the unit is the item, the pairing within it is kept, every random step takes a seed.

Within-item AUROC and its interval (`auroc`, `item_auroc`, `auroc_interval`), intervals of a mean (`mean_interval`),
the primary test (`permutation_within_item`), its family-wise twin (`max_t_within_item`), the tests that stand beside
it (`sign_flip`, `wilcoxon`) and corrections (`holm`, `benjamini_hochberg`). A p-value never travels without the
smallest one that its test could have attained. scipy is imported on use: importing this module costs numpy only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvprobe.errors import StatisticsError

Floats = NDArray[np.float64]
Statistic = Literal["mean_difference", "auroc"]

# Sums that differ by less than this share of the data's magnitude are equal: adding the same numbers in another order
# moves a float sum by about 1e-16 of it, and a tie split by rounding would make a p-value too small.
_NOISE = 1e-12
_TABLE = 4_000_000  # floats held at once by a chunk of draws (32 MB)


class Record:
    """A frozen dataclass that can be written to a manifest."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values (arrays and tuples become lists, nested results become dicts)."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True)
class Interval(Record):
    """A mean over items with its confidence interval.

    `method` says how low and high were made, `beside` is the same interval by the other method. `degenerate` is True
    where the interval must not be read as precision: fewer than two items (low and high NaN), identical values
    (zero width), or an undefined BCa.
    """

    mean: float
    low: float
    high: float
    n: int
    method: str
    beside: Interval | None = None
    degenerate: bool = False
    level: float = 0.95
    seed: int | None = None
    resamples: int | None = None


@dataclass(frozen=True)
class ItemAuroc(Record):
    """Within-item AUROCs of the items that hold both classes; `kept` are their positions in the input."""

    values: Floats
    kept: NDArray[np.int64]
    n: int
    n_excluded: int


@dataclass(frozen=True)
class TestResult(Record):
    """A two-sided test over items. `cannot_reject_at` is True if p could not have been <= 0.05 whatever was observed.

    `n` counts the items used, `n_excluded` those with one class only, `n_zero` zero differences (sign tests);
    `degenerate` flags data for which every assignment gives the same |statistic| (p is then 1).
    """

    __test__ = False  # not a test class, whatever its name makes pytest believe

    statistic: float
    p: float
    p_attainable: float
    n: int
    exact: bool
    method: str
    cannot_reject_at: bool
    n_excluded: int = 0
    n_zero: int = 0
    degenerate: bool = False
    seed: int | None = None
    draws: int | None = None


@dataclass(frozen=True, eq=False)
class MaxTResult(Record):
    """A family of heads under one joint permutation. Arrays are [heads].

    `statistic` is the mean over items (AUROC uncentred), `z` the centred one over its permutation standard deviation,
    `p` the single-step max-|T| adjusted p, `p_unadjusted` the head's own. `degenerate` heads (no variation within any
    item) have z = 0, p = 1.
    """

    statistic: Floats
    z: Floats
    p: Floats
    p_unadjusted: Floats
    degenerate: NDArray[np.bool_]
    p_attainable: float
    n: int
    exact: bool
    method: str
    cannot_reject_at: bool
    n_excluded: int = 0
    seed: int | None = None
    draws: int | None = None


# ---------------------------------------------------------------------------------------------------------- input


def _numbers(values: ArrayLike, name: str, *, ndim: int | None = 1, finite: bool = True) -> Floats:
    """Values as float64, refused when NaN (or infinite, where sums are taken) or of the wrong number of axes."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise StatisticsError(f"{name} must be numbers, got {values!r:.80}") from error
    if ndim is not None and array.ndim != ndim:
        raise StatisticsError(f"{name} must have {ndim} axis(es), got shape {array.shape}")
    bad = ~np.isfinite(array) if finite else np.isnan(array)
    if bad.any():
        kind = "NaN or infinite" if finite else "NaN"
        raise StatisticsError(f"{name}: {int(bad.sum())} of {array.size} values are {kind}; drop and count them first")
    return array


def _check(level: float = 0.95, seed: int = 0, **counts: int) -> None:
    if not 0 < level < 1:
        raise StatisticsError(f"level={level!r}: allowed are 0 < level < 1")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise StatisticsError(f"seed={seed!r}: allowed are integers >= 0 (a result must be reproducible)")
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise StatisticsError(f"{name}={count!r}: allowed are integers >= 1")


def _choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise StatisticsError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


# ---------------------------------------------------------------------------------------------------------- AUROC


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Mann-Whitney AUROC, P(s+ > s-) + P(s+ = s-)/2, from exact integer counts; NaN when a class is empty.

    Parameters
    ----------
    positive, negative
        Scores [P], [N]; infinities only order, NaN is refused (StatisticsError).
    """
    pos, neg = _numbers(positive, "positive", finite=False), _numbers(negative, "negative", finite=False)
    if not pos.size or not neg.size:
        return math.nan
    ordered = np.sort(neg)
    twice = np.searchsorted(ordered, pos, "left") + np.searchsorted(ordered, pos, "right")  # 2 below + 1 equal
    return float(twice.sum() / (2 * pos.size * neg.size))


def auroc_many(positive: ArrayLike, negative: ArrayLike) -> Floats:
    """`auroc` of many columns at once: [P, ...] and [N, ...] -> [...], equal to it bit for bit; empty class -> NaN.

    Steps over the smaller class, never over columns; memory is one [max(P, N), ...] comparison.
    """
    pos = _numbers(positive, "positive", ndim=None, finite=False)
    neg = _numbers(negative, "negative", ndim=None, finite=False)
    if not pos.ndim or not neg.ndim or pos.shape[1:] != neg.shape[1:]:
        raise StatisticsError(f"positive {pos.shape} and negative {neg.shape} must be [P, ...] and [N, ...], same ...")
    if not len(pos) or not len(neg):
        return np.full(pos.shape[1:], np.nan)
    twice = np.zeros(pos.shape[1:], dtype=np.int64)
    if len(pos) <= len(neg):
        for row in pos:
            twice += (neg < row).sum(0) + (neg <= row).sum(0)
    else:
        for row in neg:
            twice += (pos > row).sum(0) + (pos >= row).sum(0)
    return np.asarray(twice / (2 * len(pos) * len(neg)), dtype=np.float64)


def item_auroc(items: Sequence[tuple[ArrayLike, ArrayLike]]) -> ItemAuroc:
    """Within-item AUROC of (positive, negative) pairs; items with an empty class are excluded and counted.

    The values are what `auroc_interval` resamples: the unit is the item, never the pair or the span
    (single class: scikit-learn#30079).
    """
    values = np.array([auroc(positive, negative) for positive, negative in items], dtype=np.float64)
    kept = np.flatnonzero(~np.isnan(values))
    return ItemAuroc(values[kept], kept, len(kept), len(values) - len(kept))


# ------------------------------------------------------------------------------------------------------ intervals


def mean_interval(
    values: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Confidence interval of a mean over items: t for n < 10 with BCa beside it, from n >= 10 BCa with t beside it.

    t: mean +- t_{n-1} s/sqrt(n). BCa (Efron 1987): bootstrap percentiles of the mean, corrected for bias and
    acceleration; it covers only 83-88 % at n = 6, hence the t-interval there. n < 2 gives NaN bounds, identical values
    a zero width (scipy#14351: BCa NaN): both with `degenerate=True`. For shares and AUROCs use `auroc_interval`.

    Parameters
    ----------
    values
        [n], one finite number an item (StatisticsError otherwise: exclude and count first).
    bounds
        Range of the values, to which the t-interval is clipped; values outside it are refused.
    """
    _check(level, seed, resamples=resamples)
    x = _numbers(values, "values")
    if bounds is not None and x.size and (x.min() < bounds[0] or x.max() > bounds[1]):
        raise StatisticsError(f"values span [{x.min():g}, {x.max():g}]: allowed by bounds is {tuple(bounds)}")
    if x.size < 2:
        mean = float(x[0]) if x.size else math.nan
        return Interval(mean, math.nan, math.nan, x.size, "undefined: n < 2", None, True, level, seed)
    mean = float(x.mean())
    if _identical(x[:, None])[0]:
        return Interval(mean, mean, mean, x.size, "degenerate: identical values", None, True, level, seed)
    t = _t_interval(x, level, bounds)
    low, high, _ = bca_many(x[:, None], level, seed, resamples)
    undefined = bool(np.isnan(low[0]))
    bca = Interval(mean, low.item(), high.item(), x.size, "BCa", None, undefined, level, seed, resamples)
    main, other = (t, bca) if x.size < 10 or undefined else (bca, t)
    return Interval(mean, main.low, main.high, x.size, main.method, other, False, level, main.seed, main.resamples)


def _t_interval(x: Floats, level: float, bounds: tuple[float, float] | None) -> Interval:
    from scipy.stats import t as student

    mean = float(x.mean())
    half = float(student.ppf(0.5 + level / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size))
    low, high = bounds if bounds is not None else (-math.inf, math.inf)
    return Interval(mean, max(mean - half, low), min(mean + half, high), x.size, "t", level=level)


def _identical(columns: Floats) -> NDArray[np.bool_]:
    return np.asarray(np.ptp(columns, axis=0) <= _NOISE * np.abs(columns).max(axis=0))


def bca_many(
    values: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """BCa intervals of the column means of values [n, H] -> low [H], high [H], degenerate [H].

    All columns share the resampled items (the pairing is kept). With a_ = sum d^3 / (6 (sum d^2)^1.5), d = x - mean,
    z0 = Phi^-1(P(m* < m) + P(m* = m)/2): percentiles Phi(z0 + (z0 + z)/(1 - a_(z0 + z))). Equals
    `scipy.stats.bootstrap(..., method="BCa", rng=seed)` but for resamples equal to the mean, which are ties here even
    when rounding moves them. Identical columns: low = high = mean, flagged; n < 2: NaN, flagged.
    Source: Efron & Tibshirani 1993, eq. 14.10.
    """
    from scipy.special import ndtr, ndtri

    _check(level, seed, resamples=resamples)
    x = _numbers(values, "values", ndim=2)
    n, width = x.shape
    if n < 2:
        return np.full(width, np.nan), np.full(width, np.nan), np.ones(width, dtype=bool)
    picks = np.random.default_rng(seed).integers(0, n, (resamples, n))
    flat = (picks + n * np.arange(resamples)[:, None]).ravel()
    weights = np.bincount(flat, minlength=resamples * n).reshape(resamples, n).astype(np.float64)
    mean, degenerate = x.mean(axis=0), _identical(x)
    low, high = mean.copy(), mean.copy()
    for start in range(0, width, max(1, _TABLE // resamples)):
        live = np.flatnonzero(~degenerate[start : start + max(1, _TABLE // resamples)]) + start
        means = np.sort(weights @ x[:, live] / n, axis=0)
        slack = _NOISE * np.abs(x[:, live]).max(axis=0)
        below, upto = (means < mean[live] - slack).mean(axis=0), (means <= mean[live] + slack).mean(axis=0)
        z0, d = ndtri((below + upto) / 2), x[:, live] - mean[live]
        acceleration = (d**3).sum(axis=0) / (6 * (d**2).sum(axis=0) ** 1.5)
        for bound, z in ((low, ndtri(0.5 - level / 2)), (high, ndtri(0.5 + level / 2))):
            with np.errstate(invalid="ignore"):  # an infinite z0 gives NaN, which is flagged below
                share = ndtr(z0 + (z0 + z) / (1 - acceleration * (z0 + z)))
            bound[live] = _quantile(means, share)
    return low, high, degenerate | np.isnan(low) | np.isnan(high)


def _quantile(ordered: Floats, share: Floats) -> Floats:
    """Linear quantile of each sorted column at its own share; NaN where z0 was infinite (all resamples on one side)."""
    place = np.where(np.isfinite(share), share, 0) * (len(ordered) - 1)
    floor = np.minimum(place.astype(int), max(len(ordered) - 2, 0))
    column = np.arange(ordered.shape[1])
    left, right = ordered[floor, column], ordered[np.minimum(floor + 1, len(ordered) - 1), column]
    return np.asarray(np.where(np.isfinite(share), left + (place - floor) * (right - left), np.nan))


def clopper_pearson(k: int, n: int, level: float = 0.95) -> Interval:
    """Exact interval of a share k/n from beta quantiles (Clopper & Pearson 1934); n = 0 gives [0, 1], flagged."""
    _check(level)
    whole = all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in (k, n))
    if not whole or not 0 <= k <= n:
        raise StatisticsError(f"k={k!r}, n={n!r}: allowed are integers with 0 <= k <= n")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0, "Clopper-Pearson", None, True, level)
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = 0.0 if k == 0 else float(beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k == n else float(beta.ppf(1 - tail, k + 1, n - k))
    return Interval(k / n, low, high, int(n), "Clopper-Pearson", level=level)


def auroc_interval(values: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 9999) -> Interval:
    """`mean_interval` of values in [0, 1] (AUROCs, shares) that stays honest when all items agree.

    All n at one value c: the share of items at c is n/n with Clopper-Pearson lower limit L = (alpha/2)^(1/n); any other
    item lies in [0, 1], so the mean lies in [c L, 1 - (1 - c) L]. At c = 1 that is [L, 1], the interval of the share
    itself. `degenerate` stays True and `method` says so. (A c other than 0 or 1 is read off the data, so the level is
    approximate below n = 5.)
    """
    plain = mean_interval(values, level, seed, resamples, bounds=(0.0, 1.0))
    if not plain.degenerate or plain.n < 2:
        return plain
    limit, c = clopper_pearson(plain.n, plain.n, level).low, plain.mean
    method = f"Clopper-Pearson on the share of items at {c:.4g} (all {plain.n} are)"
    return Interval(c, c * limit, 1 - (1 - c) * limit, plain.n, method, plain, True, level)


# --------------------------------------------------------------------------------------------- permutation tests


def cannot_reject(p_attainable: float, level: float = 0.05, family: int = 1) -> bool:
    """True if no data could give p <= level: print "cannot reject", never "not significant".

    With `family` hypotheses the smallest Holm- (or Bonferroni-) adjusted p is family * p_attainable.
    """
    _check(level, family=family)
    return bool(p_attainable * family > level * (1 + _NOISE))


@dataclass(frozen=True)
class _Design:
    """Informative items. Target sets S_i have the centred mean statistic unit * sum_i sum_{t in S_i} x_it."""

    x: list[Floats]  # [spans, heads] an item
    mask: list[NDArray[np.bool_]]  # [spans] an item
    unit: float
    slack: Floats  # [heads]: rounding noise of a sum over items
    n_excluded: int

    @property
    def sizes(self) -> list[int]:
        return [int(mask.sum()) for mask in self.mask]

    def observed(self) -> Floats:
        return _sum([x[mask].sum(axis=0) for x, mask in zip(self.x, self.mask, strict=True)])


def _sum(parts: Iterable[Floats]) -> Floats:
    """Sum of arrays one by one (np.sum would stack all items first)."""
    return functools.reduce(np.add, parts)


def _design(scores: Sequence[ArrayLike], is_target: Sequence[ArrayLike], statistic: str, ndim: int) -> _Design:
    """Check the items, drop single-class ones, and write either statistic as a sum over the target's spans.

    mean difference: sum_S (w - mean w) n / (m (n - m));  AUROC - 1/2: sum_S (r - (n + 1)/2) / (m (n - m)), r midranks.
    Midranks are doubled and brought to a common denominator, so that AUROC sums are integers and ties exact.
    """
    _choice("statistic", statistic, ("mean_difference", "auroc"))
    if len(scores) != len(is_target):
        raise StatisticsError(f"scores has {len(scores)} items, is_target {len(is_target)}: they must be equal")
    items = [_item(s, m, i, ndim, statistic) for i, (s, m) in enumerate(zip(scores, is_target, strict=True))]
    if len({w.shape[1] for w, _ in items}) > 1:
        raise StatisticsError(f"scores must have one number of heads, got {sorted({w.shape[1] for w, _ in items})}")
    live = [(w, mask) for w, mask in items if 0 < mask.sum() < mask.size]
    denominators = [2 * int(m.sum()) * int((~m).sum()) for _, m in live]
    common = math.lcm(*denominators)
    common = common if common * len(live) < 1e9 else 1  # past that, floats; the slack takes over
    x, slack = [], np.zeros(items[0][0].shape[1] if items else 0)
    for (w, _), d in zip(live, denominators, strict=True):
        if statistic == "auroc":
            x.append(_doubled_midranks(w) * (common // d if common > 1 else 1 / d))
            slack = slack + _NOISE * common / 2
        else:
            x.append((w - w.mean(axis=0)) * (2 * len(w) / d))
            slack = slack + _NOISE * 2 * np.abs(w).max(axis=0)
    unit = 1 / max(len(live), 1) / (common if statistic == "auroc" else 1)
    return _Design(x, [mask for _, mask in live], unit, slack, len(items) - len(live))


def _item(scores: ArrayLike, is_target: ArrayLike, i: int, ndim: int, statistic: str) -> tuple[Floats, Any]:
    w = _numbers(scores, f"scores of item {i}", ndim=ndim, finite=statistic == "mean_difference")
    mask = np.asarray(is_target)
    if mask.shape != w.shape[:1] or not np.isin(mask, (0, 1)).all():
        raise StatisticsError(f"is_target of item {i}: {mask!r:.80}; allowed are {len(w)} booleans, one a span")
    return (w[:, None] if ndim == 1 else w), mask.astype(bool)


def _doubled_midranks(w: Floats) -> Floats:
    """2 midrank - (n + 1) of each column [spans, heads]: integers that sum to zero."""
    from scipy.stats import rankdata

    return np.asarray(2 * rankdata(w, axis=0) - (len(w) + 1))


def _subsets(n: int, m: int) -> NDArray[np.int64]:
    return np.array(list(combinations(range(n), m)), dtype=np.int64)


def _joint(sums: Sequence[Floats], limit: int) -> tuple[Floats, Floats] | None:
    """Exact (support, weight) of sum_i s_i, each s_i uniform over its array; None past `limit` sums in a step.

    Items are independent, so the joint distribution is the convolution of theirs; equal sums are merged as it grows,
    which is what makes large integer (AUROC) designs exact. Weights are whole counts while these fit a double.
    """
    count = math.prod(s.size for s in sums) <= 2**53
    support, weight = np.zeros(1), np.ones(1)
    for s in sums:
        atoms, times = np.unique(s, return_counts=True)
        if support.size * atoms.size > limit:
            return None
        grown = weight[:, None] * (times if count else times / s.size)
        support, place = np.unique((support[:, None] + atoms).ravel(), return_inverse=True)
        weight = np.bincount(place, weights=grown.ravel()).astype(np.float64)
    return support, weight


def _tails(joint: tuple[Floats, Floats], observed: float, slack: float) -> tuple[float, float]:
    """P(|T| >= |observed|) and P(|T| = max |T|), the smallest attainable p."""
    size, weight = np.abs(joint[0]), joint[1]
    p, attainable = (weight[size >= bar - slack].sum() / weight.sum() for bar in (abs(observed), size.max()))
    return float(p), float(attainable)


def _draw(design: _Design, seed: int, draws: int) -> list[NDArray[np.int64]]:
    """Random target sets, one array [draws, m] an item: m of its spans, every subset equally likely."""
    rng, chosen = np.random.default_rng(seed), []
    for x, m in zip(design.x, design.sizes, strict=True):
        if m == 1:
            chosen.append(rng.integers(len(x), size=(draws, 1)))
            continue
        rows = max(1, _TABLE // len(x))
        keys = (rng.random((min(rows, draws - start), len(x))) for start in range(0, draws, rows))
        chosen.append(np.concatenate([k.argpartition(m - 1, axis=1)[:, :m] for k in keys]))
    return chosen


def _enumerate(design: _Design, total: int) -> list[NDArray[np.int64]]:
    """All joint target sets, one array [total, m] an item."""
    chosen, stride = [], 1
    for x, m in zip(design.x, design.sizes, strict=True):
        table = _subsets(len(x), m)
        chosen.append(table[np.arange(total) // stride % len(table)])
        stride *= len(table)
    return chosen


def _totals(design: _Design, chosen: list[NDArray[np.int64]], rows: slice) -> Floats:
    """sum_i sum_{t in S_i} x_t for these assignments: [rows, heads]."""
    return _sum(x[index[rows]].sum(axis=1) for x, index in zip(design.x, chosen, strict=True))


def _extreme_share(x: Sequence[Floats], sizes: Sequence[int], slack: float) -> float:
    """Share of assignments with the largest |T|, without enumeration: the maximum of a sum is the sum of the maxima."""

    def side(sign: int) -> tuple[float, float]:
        top, share = 0.0, 1.0
        for values, m in zip(x, sizes, strict=True):
            ordered = np.sort(sign * values)
            above = int((ordered > ordered[-m] + slack).sum())
            tied = int((np.abs(ordered - ordered[-m]) <= slack).sum())
            top, share = top + ordered[-m:].sum(), share * math.comb(tied, m - above) / math.comb(len(ordered), m)
        return float(top), share

    (high, share_high), (low, share_low) = side(1), side(-1)
    if max(high, low) <= slack:
        return 1.0  # every assignment gives T = 0
    if abs(high - low) <= slack:
        return share_high + share_low
    return share_high if high > low else share_low


def permutation_within_item(
    scores: Sequence[ArrayLike],
    is_target: Sequence[ArrayLike],
    statistic: Statistic = "mean_difference",
    seed: int = 0,
    draws: int = 9999,
    exact_limit: int = 100_000,
) -> TestResult:
    """Primary test: is the target exchangeable with the other spans of its item?

    T = mean over items of the within-item statistic, centred (AUROC - 1/2, or mean(target) - mean(rest)); under the
    null every item's target set is uniform over its subsets of that size. Two-sided, p = P(|T| >= |t|): exact where the
    joint distribution can be built with at most `exact_limit` sums a step (for AUROC nearly always, T being a lattice),
    else Monte Carlo, p = (b + 1)/(draws + 1) (Phipson & Smyth 2010). Sums equal up to rounding are ties.

    `p_attainable` is the smallest p that these scores allow: the share of assignments whose |T| is the largest
    (1/prod C(n_i, m_i) for generic scores, twice that if both extremes tie, as for AUROC with one target, more with
    ties); for Monte Carlo not below 1/(draws + 1).

    Parameters
    ----------
    scores, is_target
        One [spans] array of numbers and one of booleans an item. Items without both classes are excluded and counted.
        NaN is refused (StatisticsError); infinities are allowed for "auroc", which only ranks.
    """
    _check(seed=seed, draws=draws, exact_limit=exact_limit)
    design = _design(scores, is_target, statistic, ndim=1)
    n, centre = len(design.x), 0.5 if statistic == "auroc" else 0.0
    if not n:
        return TestResult(math.nan, 1.0, 1.0, 0, True, "no item holds both classes", True, design.n_excluded)
    x, slack, observed = [v[:, 0] for v in design.x], float(design.slack[0]), float(design.observed()[0])
    small = all(math.comb(len(v), m) <= exact_limit for v, m in zip(x, design.sizes, strict=True))
    sums = [v[_subsets(len(v), m)].sum(axis=1) for v, m in zip(x, design.sizes, strict=True)] if small else []
    joint = _joint(sums, exact_limit) if small else None
    if joint is not None:
        p, attainable = _tails(joint, observed, slack)
    else:
        drawn = np.abs(_drawn_totals(design, seed, draws)[:, 0])
        attainable = max(1 / (draws + 1), _extreme_share(x, design.sizes, slack))
        # the true p cannot be below the share at the extreme, so chance must not put the estimate there either
        p = max(float((np.sum(drawn >= abs(observed) - slack) + 1) / (draws + 1)), attainable)
    method = f"permutation of the target within item, {statistic}, two-sided, {'exact' if joint else 'Monte Carlo'}"
    value = centre + observed * design.unit
    used = (None, None) if joint else (seed, draws)
    hopeless, flat = cannot_reject(attainable), attainable >= 1
    return TestResult(value, p, attainable, n, joint is not None, method, hopeless, design.n_excluded, 0, flat, *used)


def _drawn_totals(design: _Design, seed: int, draws: int) -> Floats:
    chosen, rows = _draw(design, seed, draws), max(1, _TABLE // max(design.sizes))
    return np.concatenate([_totals(design, chosen, slice(s, s + rows)) for s in range(0, draws, rows)])


def max_t_within_item(
    scores: Sequence[ArrayLike],
    is_target: Sequence[ArrayLike],
    statistic: Statistic = "auroc",
    seed: int = 0,
    draws: int = 9999,
    exact_limit: int = 20_000,
) -> MaxTResult:
    """Family of heads: single-step max-|T| adjusted p under one joint permutation of the target within item.

    z_h = T_h / sd_h, T as in `permutation_within_item`, sd_h its exact permutation standard deviation
    (sampling without replacement: Var sum_S x = m (n - m) / (n (n - 1)) sum_t x_t^2 an item, x centred).
    p_h = P(max_g |z_g| >= |z_h|): family-wise error control that keeps the dependence between heads
    (Westfall & Young 1993). All joint assignments where there are at most `exact_limit`, else (b + 1)/(draws + 1).
    `p_attainable`: share of assignments with the largest max |z|; for Monte Carlo a lower limit of it, at least
    1/(draws + 1).

    Parameters
    ----------
    scores, is_target
        One [spans, heads] array and one [spans] array of booleans an item.
    """
    _check(seed=seed, draws=draws, exact_limit=exact_limit)
    if not len(scores):
        raise StatisticsError("scores holds no item: at least one is needed")
    design = _design(scores, is_target, statistic, ndim=2)
    heads, n = len(design.slack), len(design.x)
    if not heads:
        raise StatisticsError("scores hold no head: allowed are [spans, heads] arrays with heads >= 1")
    ones, word = np.ones(heads), f"max-|T| over {heads} heads, permutation of the target within item, {statistic}"
    if not n:
        nan, none, why = np.full(heads, np.nan), np.ones(heads, dtype=bool), "no item holds both classes"
        return MaxTResult(nan, nan, ones, ones, none, 1.0, 0, True, why, True, design.n_excluded)
    sd, observed = _permutation_sd(design), design.observed()
    flat = sd <= design.slack
    scale = np.where(flat, np.inf, sd)  # heads without variation never reach the maximum
    total = math.prod(math.comb(len(x), m) for x, m in zip(design.x, design.sizes, strict=True))
    exact = total <= exact_limit
    chosen = _enumerate(design, total) if exact else _draw(design, seed, draws)
    bar = np.abs(observed) / scale - design.slack / scale - _NOISE
    peak, own = _peaks(design, chosen, scale, bar, total if exact else draws)
    reached, extra = len(peak) - np.searchsorted(np.sort(peak), bar, "left"), 0 if exact else 1
    attainable = float(np.mean(peak >= peak.max() - 1e-9)) if exact else _family_attainable(design, scale, draws)
    p, own_p = ((b + extra) / (len(peak) + extra) for b in (reached, own))
    p = np.maximum(p, attainable)
    centre = 0.5 if statistic == "auroc" else 0.0
    return MaxTResult(
        centre + observed * design.unit, observed / scale, np.where(flat, 1.0, p), np.where(flat, 1.0, own_p), flat,
        attainable, n, exact, f"{word}, {'exact' if exact else 'Monte Carlo'}", cannot_reject(attainable),
        design.n_excluded, None if exact else seed, None if exact else draws,
    )  # fmt: skip


def _permutation_sd(design: _Design) -> Floats:
    parts = zip(design.x, design.sizes, strict=True)
    variance = _sum((x**2).sum(axis=0) * (m * (len(x) - m) / (len(x) * (len(x) - 1))) for x, m in parts)
    return np.asarray(np.sqrt(variance))


def _peaks(
    design: _Design, chosen: list[NDArray[np.int64]], scale: Floats, bar: Floats, total: int
) -> tuple[Floats, NDArray[np.int64]]:
    """max over heads of |z| for each assignment, and how often each head's own |z| reaches its bar; in chunks."""
    peak, own = np.empty(total), np.zeros(len(scale), dtype=np.int64)
    rows = max(1, _TABLE // (len(scale) * max(design.sizes)))
    for start in range(0, total, rows):
        z = np.abs(_totals(design, chosen, slice(start, start + rows))) / scale
        peak[start : start + rows] = z.max(axis=1)
        own += (z >= bar).sum(axis=0)
    return peak, own


def _family_attainable(design: _Design, scale: Floats, draws: int) -> float:
    """The head that can reach the largest |z| bounds the share of assignments at the family's maximum from below."""
    ordered = [np.sort(x, axis=0) for x in design.x]
    high = _sum(x[-m:].sum(axis=0) for x, m in zip(ordered, design.sizes, strict=True))
    low = _sum(x[:m].sum(axis=0) for x, m in zip(ordered, design.sizes, strict=True))
    best = int(np.argmax(np.maximum(high, -low) / scale))
    share = _extreme_share([x[:, best] for x in design.x], design.sizes, float(design.slack[best]))
    return max(1 / (draws + 1), share)


# ------------------------------------------------------------------------------------------- tests of differences


def _differences(differences: ArrayLike) -> tuple[Floats, Floats]:
    """All differences, and the nonzero ones (zero up to rounding of the largest)."""
    d = _numbers(differences, "differences")
    size = np.abs(d)
    return d, d[size > _NOISE * size.max(initial=0.0)]


def sign_flip(differences: ArrayLike, seed: int = 0, draws: int = 9999) -> TestResult:
    """Sign-flip test of paired differences [n], two-sided on the mean. It stands beside the primary test.

    Null: each difference is symmetric about 0, which T - mean(placebos) is not when outcomes are skewed (size 0.11 at
    nominal 0.05, n = 8, log-normal). Zeros carry no sign: they stay in the mean, are counted in `n_zero` and do not
    help to reach p_attainable = 2/2^(n - n_zero). Exact up to 16 nonzero differences, then (b + 1)/(draws + 1).
    All zero: p = 1, `degenerate`.
    """
    _check(seed=seed, draws=draws)
    d, live = _differences(differences)
    zeros, mean = d.size - live.size, float(d.mean()) if d.size else math.nan
    if not live.size:
        return TestResult(mean, 1.0, 1.0, d.size, True, "sign flip: all differences are zero", True, 0, zeros, True)
    slack, observed = _NOISE * float(np.abs(live).sum()), abs(float(live.sum()))
    joint = _joint([np.array([-v, v]) for v in live], 2**16) if live.size <= 16 else None
    if joint is not None:
        p, attainable = _tails(joint, observed, slack)
    else:
        signs = np.random.default_rng(seed).integers(0, 2, (draws, live.size)) * 2 - 1
        p = float((np.sum(np.abs(signs @ live) >= observed - slack) + 1) / (draws + 1))
        attainable = max(1 / (draws + 1), 2.0 ** (1 - live.size))
    method = f"sign flip, two-sided, {'exact' if joint else 'Monte Carlo'}, {zeros} of {d.size} differences zero"
    hopeless, used = cannot_reject(attainable), (None, None) if joint else (seed, draws)
    return TestResult(mean, p, attainable, d.size, joint is not None, method, hopeless, 0, zeros, False, *used)


def wilcoxon(differences: ArrayLike) -> TestResult:
    """Wilcoxon signed-rank test of paired differences [n], two-sided on W+ - W-. Beside the primary test.

    Zeros are dropped and counted (`n_zero`), tied sizes share their midrank. Up to 50 nonzero differences exact:
    scipy's exact p, and given ties, where scipy approximates from n = 14 on, the conditional one. Beyond that scipy's
    normal approximation; `exact` says which. The statistic is min(W+, W-); `p_attainable` is the p
    of the same method had all signs agreed (2/2^n when exact). All zero: p = 1, `degenerate`.
    """
    d, live = _differences(differences)
    zeros = d.size - live.size
    if not live.size:
        return TestResult(math.nan, 1.0, 1.0, d.size, True, "Wilcoxon: all differences are zero", True, 0, zeros, True)
    from scipy.stats import rankdata
    from scipy.stats import wilcoxon as scipy_wilcoxon

    live = np.round(live / np.abs(live).max(), 12)  # ranks only: rounding must not split tied sizes
    ranks = rankdata(np.abs(live))
    up, down, exact = float(ranks[live > 0].sum()), float(ranks[live < 0].sum()), live.size <= 50
    if exact:
        joint = _joint([np.array([-r, r]) for r in ranks], 2**16)  # at most 2 n (n + 1) sums
        assert joint is not None
        p, attainable = _tails(joint, up - down, 0.0)  # midranks are halves, their sums exact
    else:
        p, attainable = (float(scipy_wilcoxon(v, method="asymptotic").pvalue) for v in (live, np.abs(live)))
    method = f"Wilcoxon signed rank, two-sided, {'exact' if exact else 'asymptotic'}, {zeros} of {d.size} zeros dropped"
    hopeless = cannot_reject(attainable)
    return TestResult(min(up, down), p, attainable, d.size, exact, method, hopeless, 0, zeros)


# ---------------------------------------------------------------------------------------------------- corrections


def _p_values(p: ArrayLike) -> Floats:
    values = _numbers(p, "p")
    if values.size and (values.min() < 0 or values.max() > 1):
        raise StatisticsError(f"p spans [{values.min():g}, {values.max():g}]: allowed is [0, 1]")
    return values


def holm(p: ArrayLike) -> Floats:
    """Holm's step-down adjusted p-values [m]: running maximum of (m - i) p_(i), capped at 1 (Holm 1979)."""
    values = _p_values(p)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1)), 1)
    return adjusted


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Benjamini-Hochberg adjusted p-values [m]: running minimum from the top of m p_(i)/i (1995); FDR, not FWER."""
    values = _p_values(p)
    order = np.argsort(values, kind="stable")[::-1]
    ranks = np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.minimum.accumulate(values[order] * values.size / ranks), 1)
    return adjusted
