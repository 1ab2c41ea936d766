"""Strength-matched placebo ablations: does the target matter more than an equally strong blow elsewhere?

Data moves one way: a clean trace → ``strength`` (θ of every window at once, exact L of key sets) → ``matching``
(placebos, or how far the strongest candidates are from being one) → ``arms`` (masks, gates, doses, injections) →
``probe`` (one item: all arms over one prefix) → ``tables`` and ``summary``. ``match`` needs nothing but a trace;
``run`` does all of it.
"""

from kvprobe.placebo.dosing import Dose, doses
from kvprobe.placebo.finder import REMEDIES, Match
from kvprobe.placebo.injecting import injection
from kvprobe.placebo.keysets import KeySet
from kvprobe.placebo.matching import match
from kvprobe.placebo.pools import length_only
from kvprobe.placebo.probe import Probed
from kvprobe.placebo.settings import ARMS, MATCH_ON, Settings
from kvprobe.placebo.strength import MEASURES, Windows, set_strengths, window_strengths
from kvprobe.placebo.tables import Result, run, validate

__all__ = [
    "ARMS",
    "MATCH_ON",
    "MEASURES",
    "REMEDIES",
    "Dose",
    "KeySet",
    "Match",
    "Probed",
    "Result",
    "Settings",
    "Windows",
    "doses",
    "injection",
    "length_only",
    "match",
    "run",
    "set_strengths",
    "validate",
    "window_strengths",
]
