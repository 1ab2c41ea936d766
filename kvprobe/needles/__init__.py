"""Needles: which heads re-read the evidence, and what the answer loses when it is cut out of the cache.

``run`` probes a list of generated items and returns tables (``items``, ``spans``, ``heads``, ``arms``) and a summary;
the command ``kvprobe niah`` prints and stores them.
"""

from kvprobe.needles.probe import ItemProbe, probe_item
from kvprobe.needles.settings import FEATURES, Settings
from kvprobe.needles.summary import summarise
from kvprobe.needles.tables import Result, run, validate

__all__ = ["FEATURES", "ItemProbe", "Result", "Settings", "probe_item", "run", "summarise", "validate"]
