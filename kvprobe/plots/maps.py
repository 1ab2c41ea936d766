"""The figures of a perturbation map: which heads, layers and cache sizes one policy perturbs less than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvprobe.maps.tables import MEASURES
from kvprobe.plots import perturbations as panels
from kvprobe.plots.heads import DASHED_CELLS
from kvprobe.plots.style import WIDTH, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.image import AxesImage

    Frames = list[tuple[str, pd.DataFrame]]

PROBES = {
    "first_decoded": "the first decoded token's query",
    "last_prompt": "the question's last query",
    "next_token": "the text's last query",
}


def map_figures(
    heads: pd.DataFrame, layers: pd.DataFrame, budgets: pd.DataFrame, summary: Mapping[str, Any]
) -> dict[str, Sheet]:
    """Name → figure of one map, in the manner of CriticalKV's Figures 4, 5 and 6.

    Parameters
    ----------
    heads, layers, budgets
        What ``head_rows()``, ``layer_rows()`` and ``budget_rows()`` of :class:`kvprobe.maps.Result` return.
    summary
        What ``kvprobe map`` prints with ``--json``; a summary read back from its file does, too.
    """
    return {
        "head_perturbation": perturbation_heads(heads, summary),
        "layer_perturbation": perturbation_layers(layers, summary),
        "budget_perturbation": perturbation_budgets(budgets, summary),
    }


@styled
def perturbation_heads(heads: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Layer × head map of log2(L_ours / L_base), and how that ratio is distributed over heads; one row a preset.

    Colours end at ±limit, one for all presets; heads beyond it have the end's colour and are counted in the note.

    Parameters
    ----------
    heads
        ``preset``, ``layer``, ``head``, ``log2_ratio``, ``difference``, ``reduced``, ``p_bh``, ``p_attainable``,
        ``n_docs``.
    summary
        See :func:`map_figures`; ``presets`` → ``heads_reduced`` has each share's interval over documents.
    """
    frames, limit = _frames(heads), panels.limit_of(heads["log2_ratio"].to_numpy(float))
    tall = min(max(5.0 * (heads["head"].max() + 1) / (heads["layer"].max() + 1), 1.6), 3.2)
    figure = sheet(WIDTH, len(frames) * (tall + 0.75) + 1.9)
    axes = figure.subplots(len(frames), 2, width_ratios=(2.7, 1), squeeze=False, sharex="col", sharey="col")
    found = [_found(frame, summary, preset) for preset, frame in frames]
    for (left, right), (preset, frame), share in zip(axes, frames, found, strict=True):
        image = panels.ratio_map(left, frame, limit)
        left.set_title(f"preset {preset}: {_significance(frame)}")
        panels.ratio_curve(right, frame, share, limit)
        right.set_title(f"L falls in {share['text']}")
    _bottom_only(axes)
    _colour_bar(figure, image, axes[:, 0], heads["log2_ratio"], limit)
    each = ", ".join(f"{share['text']} ({preset})" for (preset, _), share in zip(frames, found, strict=True))
    title = f"Perturbation L falls in {each} of {plural(len(frames[0][1]), 'head')}, n = {summary['n_docs']}"
    note = _heads_note(heads, summary, limit)
    headline(figure, title, _about(summary, summary.get("cache")), note, _heads_keys(frames), ncols=2)
    return figure


@styled
def perturbation_layers(layers: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Perturbation of every layer under both policies, its reduction, and that by size; one column a preset.

    Layers differ by orders of magnitude: absolutes stand on a logarithmic axis; the reduction on a linear one, where
    large layers decide, and once more relative to each layer's own mean.

    Parameters
    ----------
    layers
        ``preset``, ``layer``, ``base``, ``ours``, ``reduction``, ``ci_low``, ``ci_high``, ``n_docs``.
    summary
        See :func:`map_figures`; ``measure`` says what the perturbation is of.
    """
    frames = _frames(layers.sort_values("layer"))
    figure = sheet(WIDTH, 7.4)
    axes = figure.subplots(3, len(frames), sharex=True, sharey="row", squeeze=False, height_ratios=(1.15, 1, 1))
    for column, (preset, frame) in zip(axes.T, frames, strict=True):
        panels.absolutes(column[0], frame, _names(summary))
        for ax, relative in zip(column[1:], (False, True), strict=True):
            panels.reductions(ax, frame["layer"].to_numpy(), frame, relative=relative)
        column[0].set_title(f"preset {preset}: {_verdict(frame, 'layer')}")
        column[2].set_xlabel("layer")
        panels.whole_numbers(column[2].xaxis, layers["layer"].nunique())
    norm = f"L{summary.get('norm', 1)} norm"
    labels = (f"perturbation ({norm}, log)", f"base − ours ({norm})", "base − ours (% of base)")
    for ax, label in zip(axes[:, 0], labels, strict=True):
        ax.set_ylabel(label)
    note = (
        f"Perturbation of {MEASURES.get(summary.get('measure', ''), 'the layer')}: {norm} of evicting − whole cache. "
        f"Points: means over documents. Bars: {_interval(summary)} of the paired reduction, each layer by itself, not "
        "corrected for their number; at the bottom, points and bars divided by the layer's mean under base."
    )
    keys = [*_policies(summary), *_verdict_keys(layers)]
    about = _about(summary, summary.get("cache"))
    headline(figure, "Perturbation by layer, and what it is reduced by", about, note, keys, ncols=3)
    return figure


@styled
def perturbation_budgets(budgets: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Mean L over heads and the share of heads reduced, against the share of the cache kept; one row a preset.

    Parameters
    ----------
    budgets
        ``preset``, ``cache``, ``base``, ``ours``, ``reduction``, ``ci_low``, ``ci_high``, ``heads_reduced``,
        ``heads_low``, ``heads_high``, ``n_docs``.
    summary
        See :func:`map_figures`.
    """
    frames, caches = _frames(budgets.sort_values("cache")), sorted(set(budgets["cache"]))
    figure = sheet(WIDTH, 2.4 * len(frames) + 1.9)
    axes = figure.subplots(len(frames), 3, squeeze=False, sharex=True, sharey="col")
    for row, (preset, frame) in zip(axes, frames, strict=True):
        place, *_ = (panels.cache_axis(ax, caches) for ax in row)
        x = np.array([place[cache] for cache in frame["cache"]])
        panels.means(row[0], x, frame, _names(summary))
        panels.reductions(row[1], x, frame, relative=True)
        panels.shares(row[2], x, frame)
        row[0].set(title=f"preset {preset}", ylabel=f"mean L over heads (L{summary.get('norm', 1)} norm)")
        row[1].set(title=_verdict(frame, "size"), ylabel="base − ours (% of base)")
        row[2].set_title("line: half of the heads")
    _bottom_only(axes)
    tops = budgets[["base", "ours"]].to_numpy(float)
    axes[0, 0].set_ylim(0, 1.06 * max(tops[tops > 0], default=1.0))
    title, keys = "Perturbation against the share of the cache kept", [*_policies(summary), *_verdict_keys(budgets)]
    headline(figure, title, _about(summary), _budgets_note(summary, caches), keys, ncols=3)
    return figure


def _frames(table: pd.DataFrame) -> Frames:
    """One table a preset, in the order of the rows."""
    return [(str(preset), table[table["preset"] == preset]) for preset in dict.fromkeys(table["preset"])]


def _bottom_only(axes: Any) -> None:
    """The x axis is named below the last row only."""
    for ax in axes[:-1].flat:
        ax.set_xlabel("")


def _names(summary: Mapping[str, Any]) -> tuple[str, str]:
    return summary.get("policy", "base"), summary.get("against", "ours")


def _about(summary: Mapping[str, Any], cache: float | None = None) -> str:
    """Model, documents, policies, size, probe and norm: what a figure must not be shown without."""
    base, ours = _names(summary)
    tokens, cut = summary.get("tokens") or {}, summary.get("truncated")
    length = f" of {tokens['min']}–{tokens['max']} tokens" if tokens else ""
    parts = [
        str(summary.get("model", "model not named")),
        f"n = {plural(summary['n_docs'], 'document')}{length}" + (f", {cut} cut short" if cut else ""),
        *([f"{summary['docs']}"] if summary.get("docs") else []),
        f"ours = {ours}, base = {base}",
        *([f"{100 * cache:.6g} % of the context's entries kept"] if cache else []),
        f"probe: {PROBES.get(summary.get('probe', ''), 'one query')}",
        f"L{summary.get('norm', 1)} norm",
    ]
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _interval(summary: Mapping[str, Any]) -> str:
    return "95 % interval over documents" if summary["n_docs"] > 1 else "no interval, of one document,"


def _found(frame: pd.DataFrame, summary: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The share of heads that falls with its interval and as a text; without one where the summary has none."""
    stored = (summary.get("presets") or {}).get(preset, {}).get("heads_reduced")
    found = dict(stored or {"share": float(frame["reduced"].mean())})
    low, high = (100 * panels.number(found.get(name)) for name in ("ci_low", "ci_high"))
    text = f"{100 * found['share']:.1f} %"
    if str(found.get("method", "")).startswith("degenerate"):
        return found | {"text": f"{text} [no spread]"}
    return found | {"text": f"{text} [{low:.1f}, {high:.1f}]" if np.isfinite(low + high) else f"{text} [no interval]"}


def _significance(frame: pd.DataFrame) -> str:
    """How many heads are significant and in which direction, or that none could be."""
    smallest, difference = frame["p_attainable"].min(), frame["difference"]
    if smallest > panels.LEVEL:
        return f"with {plural(int(frame['n_docs'].max()), 'document')} no head could be significant, p ≥ {smallest:.3g}"
    significant = panels.significant(frame)
    lower, higher = int((significant & (difference < 0)).sum()), int((significant & (difference > 0)).sum())
    return f"of {plural(len(frame), 'head')}, {lower} significantly lower, {higher} higher"


def _verdict(frame: pd.DataFrame, unit: str) -> str:
    """How many intervals lie beyond zero; without intervals, how many points."""
    if not np.isfinite(frame[["ci_low", "ci_high"]]).all(axis=1).any():
        return f"lower in {int((frame['reduction'] > 0).sum())} of {plural(len(frame), unit)} (no intervals)"
    kinds = panels.verdicts(frame)
    falls, rises = (int((kinds == name).sum()) for name in ("falls", "rises"))
    return f"of {plural(len(frame), unit)}, {falls} lower, {rises} higher (95 %)"


def _colour_bar(figure: Sheet, image: AxesImage, axes: Any, ratios: pd.Series[float], limit: float) -> None:
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    beyond = bool((ratios < -limit).any()), bool((ratios > limit).any())
    bar = figure.colorbar(image, ax=list(axes), pad=0.01, aspect=25, extend=extend[beyond])
    bar.ax.set_ylabel("log2 ratio (−1 = halved)", fontsize=8)
    bar.set_ticks([-limit, -limit / 2, 0, limit / 2, limit])
    bar.ax.tick_params(labelsize=8)


def _key(label: str, **look: Any) -> Line2D:
    return Line2D([], [], **{"linestyle": "none", "color": "black"} | look, label=label)


def _heads_keys(frames: Frames) -> list[Any]:
    """Explain the marks that occur, and no others."""
    ratios, few = [frame["log2_ratio"] for _, frame in frames], all(len(frame) <= DASHED_CELLS for _, frame in frames)
    keys: list[Any] = [_key("share of heads that falls", marker="s", color=panels.OURS["color"])]
    if few and any((each > 0).any() for each in ratios):
        keys.append(_key("rises", marker="_"))
    if few and any(panels.significant(frame).any() for _, frame in frames):
        keys.append(_key("p ≤ 0.05: signed ranks over documents, Benjamini–Hochberg", marker="o", mfc="none"))
    if any(each.isna().any() for each in ratios):
        keys.append(Patch(facecolor=panels.UNDEFINED, label="undefined: L is 0 under both"))
    return keys


def _policies(summary: Mapping[str, Any]) -> list[Any]:
    return [
        _key(f"{side}: {name}", **look)
        for side, name, look in zip(("base", "ours"), _names(summary), (panels.BASE, panels.OURS), strict=True)
    ]


def _verdict_keys(rows: pd.DataFrame) -> list[Any]:
    kinds = panels.verdicts(rows)
    known = np.isfinite(rows.loc[kinds == "open", ["ci_low", "ci_high"]]).all(axis=1)
    none = "interval holds 0" if known.all() else "interval holds 0, or none" if known.any() else "no interval"
    labels = {"falls": "lower under ours", "rises": "higher under ours", "open": none}
    return [_key(labels[name], markersize=5, **look) for name, look in panels.VERDICTS.items() if name in kinds]


def _heads_note(heads: pd.DataFrame, summary: Mapping[str, Any], limit: float) -> str:
    beyond = int((heads["log2_ratio"].abs() > limit).sum())
    many = " Too many heads to mark single ones." if len(heads) > DASHED_CELLS * heads["preset"].nunique() else ""
    paper = summary.get("published") or {}
    said = ", ".join(f"{100 * share:.3g} % ({model})" for model, share in paper.get("share", {}).items())
    reported = f" The paper reports, of other models and documents, {said}: {paper['source']}." if said else ""
    return (
        "log2 of mean L under ours ÷ mean L under base; L: what evicting does to the head's output, each layer by "
        f"itself. Colours end at ±{limit:g} ({plural(beyond, 'head')} beyond).{many} Right: share of all heads at or "
        f"below a ratio; bar: {_interval(summary)} of the share that falls.{reported}"
    )


def window_note(summary: Mapping[str, Any], caches: Sequence[float]) -> str:
    """At which sizes half of the entries or more are the window that is always kept: little is left to choose."""
    n = (summary.get("compressed_tokens") or {}).get("min", 0)
    parts = [part["scorer"] for pair in summary.get("policies") or () for part in pair]
    window = max((part.get("window", 0) for part in parts), default=0)
    crowded = ", ".join(f"{100 * cache:.6g} %" for cache in caches if 0 < cache * n <= 2 * window)
    return f"At {crowded}, the window ({window} entries, always kept) is half or more of the cache." if crowded else ""


def _budgets_note(summary: Mapping[str, Any], caches: Sequence[float]) -> str:
    left_out = ", ".join(f"{100 * cache:.6g} %" for cache in summary.get("caches_left_out") or ())
    more = f" Left out: {left_out}, fewer entries than the policies always keep." if left_out else ""
    crowded = window_note(summary, caches)
    more += f" {crowded}" if crowded else ""
    return (
        "Left: means over heads and documents. Middle: their paired difference; bars: "
        f"{_interval(summary)}, both divided by the mean under base. Right: heads whose mean over documents falls, by "
        "however little; bars: interval over documents. They can disagree: heads with a large L decide the mean, every "
        f"head counts as one on the right.{more}"
    )
