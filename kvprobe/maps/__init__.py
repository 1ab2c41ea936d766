"""Maps: how much two eviction policies perturb every head, every layer, at every cache size.

CriticalKV's Figures 4, 5 and 6, for any two policies on any documents: the context is compressed before the question is
known, and one row is looked at, that of the first decoded token unless told otherwise.

>>> import kvprobe as kp                                                             # doctest: +SKIP
>>> df = kp.maps.per_head(model, None, "snapkv", "snapkv+two_stage", cache=0.2)      # doctest: +SKIP
"""

from kvprobe.cells.pairs import Pair, pairs_of
from kvprobe.cells.reading import Reading
from kvprobe.maps.look import look
from kvprobe.maps.run import Result, run, validate
from kvprobe.maps.settings import Settings
from kvprobe.maps.summary import budget_rows, decomposition, head_rows, layer_rows, share_reduced
from kvprobe.maps.tables import CACHES, MEASURES, per_budget, per_head, per_layer

__all__ = [
    "CACHES",
    "MEASURES",
    "Pair",
    "Reading",
    "Result",
    "Settings",
    "budget_rows",
    "decomposition",
    "head_rows",
    "layer_rows",
    "look",
    "pairs_of",
    "per_budget",
    "per_head",
    "per_layer",
    "run",
    "share_reduced",
    "validate",
]
