"""Eviction policies: what a compressed cache keeps, and exactly what the model answers from it.

A policy is four independent choices: a scorer (what is important) × pooling and group reduction × a budget (how many
entries a layer and head holds) × a selector (top-k, or CriticalKV's two stages).

>>> import kvprobe as kp                                                    # doctest: +SKIP
>>> policy = kp.eviction.policy("snapkv+adakv+two_stage")                   # doctest: +SKIP
>>> keep = policy.select(model, prompt, cache_ratio=0.2)                    # doctest: +SKIP
>>> out = kp.intervene(model, prompt, kp.eviction.KeepMask(keep))           # doctest: +SKIP
"""

from kvprobe.eviction.budgets import BUDGETS
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.compaction import Compacted, compact, continue_from
from kvprobe.eviction.compose import policy
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.live import LiveCache, PackedCache
from kvprobe.eviction.measuring import Measured, measure
from kvprobe.eviction.policies import Choice, Policy, entries
from kvprobe.eviction.scorers import SCORERS
from kvprobe.eviction.scorers.base import Scorer
from kvprobe.eviction.selectors import SELECTORS, Scored, Selector, TopK, TwoStage
from kvprobe.eviction.semantics import Chunked, Decode, Generated, chunked_prefill, generate
from kvprobe.interventions.keep import KeepMask

__all__ = [
    "BUDGETS",
    "SCORERS",
    "SELECTORS",
    "Allocation",
    "Budget",
    "Choice",
    "Chunked",
    "Compacted",
    "Decode",
    "Generated",
    "KeepMask",
    "Layer",
    "LiveCache",
    "Measured",
    "PackedCache",
    "Policy",
    "Request",
    "Scored",
    "Scorer",
    "Selector",
    "TopK",
    "TwoStage",
    "chunked_prefill",
    "compact",
    "continue_from",
    "entries",
    "generate",
    "measure",
    "policy",
]
