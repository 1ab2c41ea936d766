"""Figures: each function takes a tidy table and an Axes, and draws what the table says.

Figures are plain :class:`matplotlib.figure.Figure` objects made without pyplot: nothing is registered, no backend is
chosen, and they show by themselves as the last line of a notebook cell (see :class:`Sheet`). Classes of spans differ by
colour (Okabe and Ito's, for the colour-blind) and by shape, so that every figure also reads in black and white.
"""

from kvprobe.plots.arms import answer_by_arm
from kvprobe.plots.assumption import assumption_map
from kvprobe.plots.audits import audit_figures, bounds_and_actual, tightness_by_layer
from kvprobe.plots.budgets import score_against_cache, score_curves
from kvprobe.plots.changes import attention_change
from kvprobe.plots.doses import dose_response
from kvprobe.plots.effects import effects
from kvprobe.plots.heads import head_map
from kvprobe.plots.love import love
from kvprobe.plots.maps import map_figures, perturbation_budgets, perturbation_heads, perturbation_layers
from kvprobe.plots.masses import mass_against_value_mass, span_means
from kvprobe.plots.niah import niah_figures, subtitle
from kvprobe.plots.placebos import placebo_figures
from kvprobe.plots.rows import head_spans
from kvprobe.plots.scans import scan_figures, single_heads
from kvprobe.plots.sinks import sink_figures
from kvprobe.plots.strips import token_strip
from kvprobe.plots.style import Sheet, headline, sheet
from kvprobe.plots.sweeps import sweep_curves

__all__ = [
    "Sheet",
    "answer_by_arm",
    "assumption_map",
    "attention_change",
    "audit_figures",
    "bounds_and_actual",
    "dose_response",
    "effects",
    "head_map",
    "head_spans",
    "headline",
    "love",
    "map_figures",
    "mass_against_value_mass",
    "niah_figures",
    "perturbation_budgets",
    "perturbation_heads",
    "perturbation_layers",
    "placebo_figures",
    "scan_figures",
    "score_against_cache",
    "score_curves",
    "sheet",
    "single_heads",
    "sink_figures",
    "span_means",
    "subtitle",
    "sweep_curves",
    "tightness_by_layer",
    "token_strip",
]
