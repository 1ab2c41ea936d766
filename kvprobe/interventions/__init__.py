"""Interventions: each is one small frozen dataclass that compiles to per-layer edits, with one set of selectors.

=====================  ==================================================================================
`KVMask`               −∞ (or a finite −β) on logits: the token was not in the cache
`KeepMask`             the same for the ragged sets that eviction policies keep
`ValueGate`            scales values, attention untouched: its content was faint
`KVPatch`              a donor prompt's keys and/or values: its content was another's
`ResidualAblation`     takes out what a block, or its attention or MLP, adds: the layer did nothing there
`Inject`               adds vectors to attention outputs: an equal blow with other content
=====================  ==================================================================================

An arm is one of them or a tuple of several. `fwd_hooks` gives an arm to TransformerLens.
"""

from kvprobe.interventions.gate import ValueGate
from kvprobe.interventions.hooks import fwd_hooks
from kvprobe.interventions.inject import Inject
from kvprobe.interventions.keep import KeepMask
from kvprobe.interventions.mask import KVMask
from kvprobe.interventions.patch import KVPatch
from kvprobe.interventions.residual import ResidualAblation

__all__ = ["Inject", "KVMask", "KVPatch", "KeepMask", "ResidualAblation", "ValueGate", "fwd_hooks"]
