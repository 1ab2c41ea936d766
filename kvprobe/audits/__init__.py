"""Audits: how tight the bounds are, and whether what they assume holds.

CriticalKV's Table 9 (actual perturbation, θ, θ̂ and the bound of attention-only selection) with the centred bound θ_c
beside θ, its Figure 8 (Assumption 3.4), and sweeps over α, ε and the norm.

>>> import kvprobe as kp                                                                   # doctest: +SKIP
>>> df = kp.audit(model, None, ["snapkv", "snapkv+two_stage"], cache=0.2, level="layer")   # doctest: +SKIP
"""

from kvprobe.audits.assumption import assumption, failing_heads
from kvprobe.audits.run import Result, run, validate
from kvprobe.audits.settings import SWEEPS, Settings
from kvprobe.audits.summary import layer_rows, rows
from kvprobe.audits.sweeps import Sweep, sweep
from kvprobe.audits.tables import LEVELS, audit
from kvprobe.cells.pairs import Pair, pairs_of
from kvprobe.cells.reading import Reading

__all__ = [
    "LEVELS",
    "SWEEPS",
    "Pair",
    "Reading",
    "Result",
    "Settings",
    "Sweep",
    "assumption",
    "audit",
    "failing_heads",
    "layer_rows",
    "pairs_of",
    "rows",
    "run",
    "sweep",
    "validate",
]
