"""The table of an audit: what evicting really does, and every bound of it, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvprobe import cells
from kvprobe.cells import Arm, Cells
from kvprobe.cells.reading import reading_of
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction import Policy, policy
from kvprobe.theory.checks import check_p

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[Iterable[Any]], Iterable[Any]]
LEVELS = ("layer", "head")
KEYS = ["doc", "policy", "cache", "layer"]
BOUNDS = ("centred_bound", "bound", "stage2_bound", "relaxed_bound", "relaxed_candidates")


def audit(
    model: Any,
    docs: Any,
    policies: Sequence[Policy | str],
    cache: Any = 0.2,
    level: str = "layer",
    *,
    probe: str = "first_decoded",
    p: int = 1,
    progress: Progress = iter,
    **reading: Any,
) -> pd.DataFrame:
    """Actual perturbation and its bounds, at one probe row of every document.

    actual ≤ centred_bound ≤ bound ≤ stage2_bound, and stage2_bound ≤ relaxed_bound, in every cell (CriticalKV, Theorems
    3.3, 3.5, C.1; the centred bound is derived for kvprobe). Every layer is taken by itself, with the whole cache's
    attention.

    Parameters
    ----------
    model
        A loaded model.
    docs
        Documents, texts, or whatever :func:`kvprobe.tasks.documents` reads (None: the shipped essays).
    policies
        Policies, by name or object, each under its own name.
    cache
        Share of the context's entries to keep, or several.
    level
        ``"head"``: one row a query head. ``"layer"``: ``actual`` is ‖Σ_h Δz_h W_O^h‖_p, bounds are sums over heads.
    probe, p, progress, **reading
        As in :func:`kvprobe.maps.per_head`.

    Returns
    -------
    DataFrame
        One row a document × policy × cache × layer (× head): ``actual``, ``bound`` (θ), ``centred_bound`` (θ_c),
        ``stage2_bound`` (θ̂), ``relaxed_bound`` (Theorem C.1; ``relaxed_candidates`` with the smallest norm outside
        stage 1 only), ``mass`` (a_S). Heads with σ ≤ ½ have no θ̂ and no relaxed bound: NaN by head; by layer the sums
        are over the other heads, ``valid_heads`` of ``n_heads``, and ``bound_valid`` is θ of the same. By head also
        ``sigma`` and ``sigma_oracle``, by layer ``sum_heads`` (Σ_h L_h) and ``sigma`` (the least of any head).

    Raises
    ------
    EvictionError, PromptError, TaskError, DataError
        Before anything is run, for whatever cannot be done with these documents.
    """
    check_p(p)
    if level not in LEVELS:
        raise EvictionError(f"level={quote(level)}; allowed: {', '.join(LEVELS)}")
    if not isinstance(policies, (list, tuple)) or not policies:
        raise EvictionError(f"policies={quote(policies)}; allowed: a list of names or policies")
    chosen = [policy(each) if isinstance(each, str) else each for each in policies]
    for each in chosen:
        if not isinstance(each, Policy):
            raise EvictionError(f"{quote(each)} is no policy; allowed: a name, or what eviction.policy(…) returns")
    caches = [str(each) for each in cache] if isinstance(cache, (list, tuple)) else [str(cache)]
    if not caches:
        raise EvictionError("no cache ratio was given; allowed: one or more")
    arms = [Arm(each, share) for each in chosen for share in caches]
    documents = reading_of(docs, probe=probe, **reading).documents(model)
    cells.refuse(model, *cells.extent(model, documents, probe), arms)
    parts = (
        cells.measure(cells.probe(model, doc, chosen, probe), arms, p=p, stages=True) for doc in progress(documents)
    )
    found = cells.joined(parts)
    return by_head(found) if level == "head" else by_layer(found)


def by_head(found: Cells) -> pd.DataFrame:
    """The cells as rows of an audit."""
    names = ["actual", *BOUNDS, "mass", "kept", "stage1", "sigma", "sigma_oracle"]
    table: pd.DataFrame = found.heads.rename(columns={"perturbation": "actual"})[[*KEYS, "head", *names]]
    return table


def by_layer(found: Cells) -> pd.DataFrame:
    """Sums over the heads of each layer, beside the layer's own perturbation."""
    heads = found.heads
    valid = heads["stage2_bound"].notna()
    summed = heads.assign(
        sum_heads=heads["perturbation"],
        valid_heads=valid.astype(int),
        n_heads=1,
        bound_valid=heads["bound"].where(valid, 0.0),
    )
    least = heads.groupby(KEYS, sort=False)["sigma"].min().to_numpy()
    columns = ["sum_heads", *BOUNDS, "n_heads", "valid_heads", "bound_valid"]
    table = summed.groupby(KEYS, sort=False)[columns].sum().reset_index()
    whole = found.layers[KEYS].equals(table[KEYS])
    assert whole, "layers come in the same order as their heads"
    table.insert(len(KEYS), "actual", found.layers["perturbation"].to_numpy())
    table["mass"] = heads.groupby(KEYS, sort=False)["mass"].mean().to_numpy()
    none = table["valid_heads"] == 0
    for name in ("stage2_bound", "relaxed_bound", "relaxed_candidates", "bound_valid"):
        table[name] = table[name].mask(none)
    return table.assign(sigma=least)


TOLERANCE = 1e-9
"""Relative slack for rounding in float64, where two sides are equal in exact arithmetic (a single evicted key)."""


def violations(table: pd.DataFrame) -> int:
    """Cells of :func:`audit` where one of actual ≤ θ_c ≤ θ ≤ θ̂ ≤ relaxed does not hold.

    θ̂ and the relaxed bound may be NaN (σ ≤ ½); the others exist in every cell, and NaN there counts.
    """
    theta = table["bound_valid"] if "bound_valid" in table else table["bound"]
    actual = table["sum_heads"] if "sum_heads" in table else table["actual"]
    chain = [
        (table["actual"], actual),
        (actual, table["centred_bound"]),
        (table["centred_bound"], table["bound"]),
        (theta, table["stage2_bound"]),
        (table["stage2_bound"], table["relaxed_candidates"]),
        (table["relaxed_candidates"], table["relaxed_bound"]),
    ]
    broken = table[["actual", "centred_bound", "bound"]].isna().any(axis=1).to_numpy(copy=True)
    for low, high in chain:
        broken |= (low > high * (1 + TOLERANCE)).to_numpy()
    return int(broken.sum())
