"""Sink or search: how much attention a token takes, and how much it carries.

>>> import kvprobe as kp                                                             # doctest: +SKIP
>>> scores = kp.sinks.scores(trace)                                                  # doctest: +SKIP
>>> scores.mass[20, 3, 0], scores.ratio()[20, 3, 0]                                  # doctest: +SKIP

Everything here is exploratory: mass and value mass always stand side by side, never one instead of the other.
"""

from kvprobe.sinks.after import READINGS, after
from kvprobe.sinks.buckets import BUCKETS, Buckets, buckets
from kvprobe.sinks.courses import courses
from kvprobe.sinks.epsilon import EPSILONS, epsilon_sweep
from kvprobe.sinks.pooling import by_bucket
from kvprobe.sinks.rates import THRESHOLD, share, sink_rates
from kvprobe.sinks.recovery import recovery
from kvprobe.sinks.scores import EPSILON, Scores, scores
from kvprobe.sinks.secondary import Secondary, SecondaryOptions, secondary_sinks
from kvprobe.sinks.settings import Settings
from kvprobe.sinks.summary import summarise
from kvprobe.sinks.tables import Result, run, validate

__all__ = [
    "BUCKETS",
    "EPSILON",
    "EPSILONS",
    "READINGS",
    "THRESHOLD",
    "Buckets",
    "Result",
    "Scores",
    "Secondary",
    "SecondaryOptions",
    "Settings",
    "after",
    "buckets",
    "by_bucket",
    "courses",
    "epsilon_sweep",
    "recovery",
    "run",
    "scores",
    "secondary_sinks",
    "share",
    "sink_rates",
    "summarise",
    "validate",
]
