"""How attention moves when a span is masked, read three ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READINGS = {
    "raw": ("raw: A′ − A", "#E69F00", ""),
    "corrected": ("corrected: A′R − A", "#56B4E9", "////"),
    "conditional": ("among survivors: A′ − A/R", "#0072B2", ""),
}
BUCKETS = {"first4": "first 4 positions\n(attention sink)", "content": "rest of the context\nwithout the masked span"}
