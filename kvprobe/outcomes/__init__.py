"""What one arm of an experiment came to: its attention, its answer, and the layer at which its tokens settled."""

from kvprobe.outcomes.answers import answer_logprobs, answer_match, argmax_flips, kl_divergence
from kvprobe.outcomes.lens import Lens, lens_logits
from kvprobe.outcomes.outcome import Outcome
from kvprobe.outcomes.settling import Settling, deep, deep_from, jensen_shannon, settle, settling_depth

__all__ = [
    "Lens",
    "Outcome",
    "Settling",
    "answer_logprobs",
    "answer_match",
    "argmax_flips",
    "deep",
    "deep_from",
    "jensen_shannon",
    "kl_divergence",
    "lens_logits",
    "settle",
    "settling_depth",
]
