"""Interventions on the cache: each is one small frozen dataclass that compiles to per-layer key biases."""

from kvprobe.interventions.keep import KeepMask
from kvprobe.interventions.mask import KVMask

__all__ = ["KVMask", "KeepMask"]
