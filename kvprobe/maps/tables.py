"""The tables of a map: how much two policies perturb every head, every layer, at every size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvprobe import cells, runs
from kvprobe.cells import Arm, Probed
from kvprobe.cells.pairs import COLUMNS, Pair
from kvprobe.cells.reading import Reading, reading_of
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction import Choice, KeepMask, Policy
from kvprobe.interventions import KVMask
from kvprobe.outcomes import Outcome
from kvprobe.theory.checks import check_p
from kvprobe.theory.perturbation import norm

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[Iterable[Any]], Iterable[Any]]
MEASURES = {
    "attn_out": "the attention output, all layers evicting",
    "hidden": "the hidden state after the layer, all layers evicting",
    "local": "the attention output, this layer alone evicting",
}
"""What a layer's perturbation is of, in words. Where all layers evict, a layer's inputs differ, too; the last one is a
closed form that no run is needed for."""
CACHES = ("0.025", "0.05", "0.1", "0.2", "0.4")


def per_head(
    model: Any,
    docs: Any,
    base: Policy | str,
    ours: Policy | str,
    cache: Any = 0.2,
    *,
    probe: str = "first_decoded",
    p: int = 1,
    progress: Progress = iter,
    **reading: Any,
) -> pd.DataFrame:
    """Exact perturbation of every head by two policies, at one probe row of every document (Fig. 4's quantity).

    L(S) = ‖(a_S z′ − u_S) W_O‖_p, S being what the policy evicts of the context, with the whole cache's attention: each
    layer is taken by itself.

    Parameters
    ----------
    model
        A loaded model.
    docs
        Documents, texts, or whatever :func:`kvprobe.tasks.documents` reads (None: the shipped essays).
    base, ours
        Policies, by name or object.
    cache
        Share of the context's entries to keep, or several.
    probe
        The row that is looked at, one of :data:`kvprobe.cells.PROBES`.
    p
        Norm of L and of the bounds.
    progress
        Wraps the documents (tqdm, for instance).
    **reading
        ``n=``, ``length=``, ``join=``, ``template=``, ``chat=`` of :func:`kvprobe.tasks.documents`.

    Returns
    -------
    DataFrame
        One row a document × cache × layer × head: ``L_base``, ``L_ours``, ``bound_…`` (θ), ``centred_…`` (θ_c),
        ``mass_…`` (a_S).

    Raises
    ------
    EvictionError, PromptError, TaskError, DataError
        Before anything is run, for whatever cannot be done with these documents.
    """
    check_p(p)
    pair, arms, documents = _prepared(model, docs, base, ours, cache, reading_of(None, probe=probe, **reading))
    found = (cells.measure(_probe(model, doc, pair, probe), arms, p=p) for doc in progress(documents))
    return pair.columns(cells.joined(found).heads, COLUMNS)


def per_layer(
    model: Any,
    docs: Any,
    base: Policy | str,
    ours: Policy | str,
    cache: Any = 0.2,
    *,
    measure: str = "attn_out",
    probe: str = "first_decoded",
    p: int = 1,
    progress: Progress = iter,
    **reading: Any,
) -> pd.DataFrame:
    """Perturbation of every layer at the probe row by two policies (Fig. 5's quantity).

    The evicting run against the whole-cache run: ‖x′ − x‖_p of the attention output or of the hidden state after the
    layer; what comes after the context is run under the eviction, on all layers at once. ``measure="local"`` is the
    closed form ‖Σ_h Δz_h W_O^h‖_p of a layer that evicts alone.

    Parameters
    ----------
    measure
        One of :data:`MEASURES`.
    model, docs, base, ours, cache, probe, p, progress, **reading
        As in :func:`per_head`.

    Returns
    -------
    DataFrame
        One row a document × cache × layer: ``base``, ``ours``.
    """
    check_p(p)
    if measure not in tuple(MEASURES):
        raise EvictionError(f"measure={quote(measure)}; allowed: {', '.join(MEASURES)}")
    pair, arms, documents = _prepared(model, docs, base, ours, cache, reading_of(None, probe=probe, **reading))
    parts = []
    for document in progress(documents):
        probed = _probe(model, document, pair, probe)
        choices = cells.choose(probed, arms)
        local = cells.measure(probed, arms, p=p, choices=choices).layers if measure == "local" else None
        parts.append(local if local is not None else changes(model, probed, arms, choices, p))
    import pandas as pd

    table = pd.concat(parts, ignore_index=True)
    column = "perturbation" if measure == "local" else measure
    return pair.columns(table, {column: ""}).rename(columns={"_base": "base", "_ours": "ours"})


def per_budget(
    model: Any,
    docs: Any,
    base: Policy | str,
    ours: Policy | str,
    caches: Sequence[Any] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Mean perturbation over all heads at every size (Fig. 6's quantity).

    Parameters
    ----------
    caches
        Shares of the context's entries to keep; None: those of :data:`CACHES` that the policies can do.
    model, docs, base, ours, **settings
        As in :func:`per_head`.

    Returns
    -------
    DataFrame
        One row a document × cache: ``base``, ``ours`` (mean of L over layers and heads), ``heads_lower`` (share of the
        heads whose L is lower under ``ours`` in this document).
    """
    if caches is None:
        reading = {name: value for name, value in settings.items() if name not in ("p", "progress")}
        documents = reading_of(docs, **reading).documents(model)
        extent = cells.extent(model, documents, reading.get("probe", "first_decoded"))
        caches = fitting_caches(model, *extent, Pair.of(base, ours).arms)
    return by_budget(per_head(model, docs, base, ours, caches, **settings))


def fitting_caches(model: Any, n: int, behind: int, arms_at: Callable[[list[str]], list[Arm]]) -> list[str]:
    """Those of :data:`CACHES` that all policies can do with contexts of ``n`` tokens."""
    kept = []
    for share in CACHES:
        try:
            cells.refuse(model, n, behind, arms_at([share]))
        except EvictionError:
            continue
        kept.append(share)
    return kept


def by_budget(heads: pd.DataFrame) -> pd.DataFrame:
    """The table of :func:`per_budget` from that of :func:`per_head`."""
    lower = heads.assign(heads_lower=(heads["L_ours"] < heads["L_base"]).astype(float))
    means = lower.groupby(["doc", "cache"], sort=False)[["L_base", "L_ours", "heads_lower"]].mean().reset_index()
    return means.rename(columns={"L_base": "base", "L_ours": "ours"})


def changes(model: Any, probed: Probed, arms: Sequence[Arm], choices: Sequence[Choice], p: int = 1) -> pd.DataFrame:
    """‖x′ − x‖_p at the probe row, per layer: ``attn_out`` and ``hidden``, one row an arm × layer.

    Runs everything behind the context under each arm's eviction, on all layers, and once with nothing evicted.
    """
    whole, *evicted = _run(model, probed, [KVMask(keys=[]), *(KeepMask(choice.keep) for choice in choices)])
    return _changes(probed, arms, whole, evicted, p)


def _run(model: Any, probed: Probed, masks: Sequence[Any]) -> list[Outcome]:
    behind = len(probed.prompt) - probed.prompt.pad - probed.context_stop
    found: list[Outcome] = runs.intervene(
        model, probed.prompt, list(masks), suffix=behind, prefix=probed.measured.prefix, keep_trace=False, streams=1
    )
    return found


def _changes(probed: Probed, arms: Sequence[Arm], whole: Outcome, evicted: Sequence[Outcome], p: int) -> pd.DataFrame:
    import pandas as pd

    from kvprobe.eviction.policies import ratio

    parts = []
    for arm, outcome in zip(arms, evicted, strict=True):
        assert outcome.streams is not None and whole.streams is not None
        attn_out = _distance(outcome.streams.attn_out, whole.streams.attn_out, p)
        hidden = _distance(outcome.streams.resid_post, whole.streams.resid_post, p)
        about = {"doc": probed.document.name, "policy": arm.policy.name, "cache": float(ratio(arm.cache))}
        parts.append(pd.DataFrame(about | {"layer": range(len(hidden)), "attn_out": attn_out, "hidden": hidden}))
    return pd.concat(parts, ignore_index=True)


def _distance(ours: Tensor, whole: Tensor, p: int) -> Any:
    return norm(ours[:, -1].double() - whole[:, -1].double(), p).numpy()


def _prepared(
    model: Any, docs: Any, base: Policy | str, ours: Policy | str, cache: Any, reading: Reading
) -> tuple[Pair, list[Arm], list[Any]]:
    """The pair, its arms and the documents, refused before anything is run if they do not go together."""
    pair = Pair.of(base, ours)
    caches = [str(each) for each in cache] if isinstance(cache, (list, tuple)) else [str(cache)]
    if not caches:
        raise EvictionError("no cache ratio was given; allowed: one or more")
    documents = replace(reading, source=docs).documents(model)
    arms = pair.arms(caches)
    cells.refuse(model, *cells.extent(model, documents, reading.probe), arms)
    return pair, arms, documents


def _probe(model: Any, document: Any, pair: Pair, kind: str) -> Probed:
    return cells.probe(model, document, pair.policies, kind)
