"""The figures of the analyses of interventions, drawn from their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from needle_items import ends, entered, subtitle

from kvprobe.plots import headline, sheet
from kvprobe.plots.style import GREY, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Looks = dict[str, tuple[str, dict[str, Any]]]

READINGS: Looks = {
    "raw": ("raw: A′ − A", {"color": "#E69F00", "marker": "o", "linestyle": "-"}),
    "mechanism": ("corrected: A′R − A", {"color": "#56B4E9", "marker": "s", "linestyle": "--"}),
    "shares": ("among survivors: A′ − A/R", {"color": "#0072B2", "marker": "^", "linestyle": ":"}),
}
GROSS: Looks = {
    "gross_own": ("arithmetic's share, corrected split", {"color": "#56B4E9", "marker": "D", "linestyle": "--"}),
    "gross_conditional": (
        "arithmetic's share, survivors' split",
        {"color": "#0072B2", "marker": "v", "linestyle": ":"},
    ),
}
ARMS: Looks = {
    "mask": ("mask: not in the cache", {"color": "#D55E00", "marker": "o", "linestyle": "-"}),
    "gate": ("value gate at 0: there, but silent", {"color": "#009E73", "marker": "s", "linestyle": "--"}),
    "difference": ("mask − gate", {"color": "#0072B2", "marker": "D", "linestyle": "-", "mfc": "white"}),
    "refill": ("‖a_S z′ W_O‖: what survivors put in the place", {"color": GREY, "marker": "^", "linestyle": ":"}),
}
LINEAR = 0.1
LEVEL = 0.05
"""Of tests by layer after Benjamini–Hochberg."""


@styled
def renormalisation(df: pd.DataFrame, buckets: Mapping[str, str]) -> Figure:
    """A column a bucket; change of its mass by evicted mass above, arithmetic's share of the movement below."""
    figure = sheet(9.8, 7.4)
    axes = figure.subplots(2, len(buckets), sharex=True, sharey="row", squeeze=False)
    rows = df[(df["bin"] != "any") & (df["layers"] == "deeper")]
    for column, (bucket, title) in enumerate(buckets.items()):
        mine = rows[rows["bucket"] == bucket]
        _changes(axes[0, column], mine)
        axes[0, column].set_title(f"{title}, layers after the first masked one")
        _shares(axes[1, column], mine)
        axes[1, column].set_xlabel("mass masked in the same layer and head, a_S (mean of a bin)")
    axes[0, 0].set_ylabel("change of the bucket's mass\n(percentage points of attention)")
    axes[1, 0].set_ylabel("arithmetic's share\nof all movement (%)")
    handles = [Line2D([], [], **look, label=name) for name, look in (*READINGS.values(), *GROSS.values())]
    about = df.attrs["about"]
    headline(
        figure, "How much of a change of attention is only rescaling?", subtitle(about), _rescaling(about), handles
    )
    return figure


def _rescaling(about: Mapping[str, Any]) -> str:
    return (
        "Raw A′ − A includes the rescaling by 1/R; corrected A′R − A takes it out by the run's own R; among survivors "
        "A′ − A/R compares shares. Arithmetic's share: Σ arithmetic / Σ (arithmetic + |effect|), sizes row by row; an "
        "effect is that of all masked layers before, too. On the first masked layer it is 100 % everywhere (effect "
        f"measured: at most {about['first_mechanism_max']:.1g}). Bars: 95 % over items. All layers are masked, for "
        f"question and answer tokens. Changes: linear scale within ±{LINEAR:g} points, logarithmic outside."
    )


def _changes(ax: Any, rows: pd.DataFrame) -> None:
    ax.axhline(0, color="black", linewidth=0.8)
    for number, (name, (_, look)) in enumerate(READINGS.items()):
        _line(ax, rows, name, look, 1.08 ** (number - 1))
    ax.set_xscale("log")
    _linear_at_zero(ax)


def _linear_at_zero(ax: Any) -> None:
    """A scale that is linear within ±LINEAR and logarithmic outside."""
    ax.set_yscale("symlog", linthresh=LINEAR)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))


def _shares(ax: Any, rows: pd.DataFrame) -> None:
    ax.axhline(50, color="black", linewidth=0.8, linestyle=":")
    for number, (name, (_, look)) in enumerate(GROSS.items()):
        _line(ax, rows, name, look, 1.08 ** (number - 0.5))
    ax.set_ylim(0, 103)


def _line(ax: Any, rows: pd.DataFrame, name: str, look: dict[str, Any], apart: float) -> None:
    """Means with intervals, in per cent; ``apart`` sets intervals side by side."""
    x, y, low, high = (rows[column].to_numpy() for column in ("mass", name, f"{name}_low", f"{name}_high"))
    ax.plot(x * apart, 100 * y, **look, markersize=4.5, linewidth=1.2, label=name)
    ax.vlines(x * apart, 100 * low, 100 * high, colors=look["color"], linewidth=1.2)


@styled
def mask_and_gate(df: pd.DataFrame, designs: Mapping[str, str], forms: Sequence[str]) -> Figure:
    """A column a design: both effects, their difference; below, the closed forms of the clean run."""
    figure = sheet(9.8, 8.6)
    rows = df[df["outcome"] == "delta_logprob"].sort_values("layer")
    grid = figure.add_gridspec(3, len(designs), height_ratios=(1.0, 0.85, 0.85))
    for place, names in enumerate((("mask", "gate"), ("difference",))):
        before: Any = None
        for column, (design, title) in enumerate(designs.items()):
            before = ax = figure.add_subplot(grid[place, column], sharey=before)
            _curves(ax, rows[rows["design"] == design], names)
            _linear_at_zero(ax)
            ax.set(xlabel="layer", xlim=(-1, rows["layer"].max() + 1), title=f"on {title}" if not place else "")
            ax.tick_params(labelleft=not column)
    figure.axes[0].set_ylabel("change of the answer's\nlog-probability (nats)")
    figure.axes[len(designs)].set_ylabel("mask − gate (nats)")
    _forms(figure.add_subplot(grid[2, :]), rows[rows["design"] == "one"], forms, df.attrs["about"]["norm"])
    handles = [Line2D([], [], **look, label=label) for label, look in ARMS.values()]
    title = "Where do masking and silencing the asked needle differ?"
    headline(figure, title, entered(df.attrs["about"]), _disagreement(df), handles, ncols=2)
    return figure


def _disagreement(df: pd.DataFrame) -> str:
    whole = df[(df["design"] == "all") & (df["outcome"] == "delta_logprob")].iloc[0]
    interval = ends(whole["difference_low"], whole["difference_high"], "+.2f")
    said = (
        f"On all layers: mask {whole['mask']:+.2f}, gate {whole['gate']:+.2f}, difference {whole['difference']:+.2f} "
        f"{interval} nats. Bars: 95 % over items, each layer by itself. Filled diamonds: sign flip over items with "
        f"Benjamini–Hochberg over the layers of a panel, p ≤ {LEVEL:g}; smallest attainable p "
        f"{whole['p_attainable']:.2g}. Exploratory: no layer was named beforehand, and a significant difference "
        f"may be minute. Scales are linear within ±{LINEAR:g} nats, logarithmic outside."
    )
    return said.replace(" -", " −").replace("[-", "[−")


def _curves(ax: Any, rows: pd.DataFrame, names: Sequence[str]) -> None:
    ax.axhline(0, color="black", linewidth=0.8)
    for number, name in enumerate(names):
        look = ARMS[name][1]
        x = rows["layer"].to_numpy(float) + 0.36 * (number - (len(names) - 1) / 2)
        ax.plot(x, rows[name], **look, markersize=3.6, linewidth=1.0, label=name)
        ax.vlines(x, rows[f"{name}_low"], rows[f"{name}_high"], colors=look["color"], linewidth=1.0)
    found = rows[rows["p_bh"] <= LEVEL]
    if names == ("difference",) and len(found):
        look = ARMS["difference"][1] | {"linestyle": "none", "mfc": ARMS["difference"][1]["color"]}
        ax.plot(found["layer"], found["difference"], **look, markersize=4.6, label="p_bh")


def _forms(ax: Any, rows: pd.DataFrame, forms: Sequence[str], p: int) -> None:
    for form, arm in zip(forms, ("mask", "gate", "refill"), strict=True):
        ax.plot(rows["layer"], rows[form], **ARMS[arm][1], markersize=3.6, linewidth=1.0, label=form)
    ax.set(xlabel="layer", ylabel=f"change of the attention\noutput, L{p} norm", yscale="log")
    ax.set_title("closed forms on the clean run: mask ‖(a_S z′ − u_S) W_O‖, gate ‖u_S W_O‖")
