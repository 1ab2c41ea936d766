"""Which heads search: scores of heads that copy or read the evidence, profiles of them, and what masking them does."""

from kvprobe.heads.checking import Causal, causal
from kvprobe.heads.grid import Cell, Grid
from kvprobe.heads.measuring import Scan, validate
from kvprobe.heads.profiling import profile, profile_of
from kvprobe.heads.reasoning import reasoning_scores
from kvprobe.heads.repeats import Stability, stability
from kvprobe.heads.retrieval import retrieval_scores
from kvprobe.heads.rule import Rule, decide, measure
from kvprobe.heads.scanning import Gathered, Trial, gather, scan, share, top, trial
from kvprobe.heads.settings import Settings
from kvprobe.heads.single_heads import agreement, knockouts
from kvprobe.heads.stored import read_rule, write_rule
from kvprobe.heads.tables import Result, run
from kvprobe.heads.trials import Decoded, decoded, needle_tokens

__all__ = [
    "Causal",
    "Cell",
    "Decoded",
    "Gathered",
    "Grid",
    "Result",
    "Rule",
    "Scan",
    "Settings",
    "Stability",
    "Trial",
    "agreement",
    "causal",
    "decide",
    "decoded",
    "gather",
    "knockouts",
    "measure",
    "needle_tokens",
    "profile",
    "profile_of",
    "read_rule",
    "reasoning_scores",
    "retrieval_scores",
    "run",
    "scan",
    "share",
    "stability",
    "top",
    "trial",
    "validate",
    "write_rule",
]
