"""What ``kvprobe sinks`` calls things, and the captions of its tables."""

from __future__ import annotations

NAMES = {
    "first4": "first 4 positions",
    "evidence": "evidence",
    "secondary_sink": "secondary sinks",
    "other": "other context",
    "recent": "question, answer",
    "learned_sink": "learned sink",
}
MEASURES = {
    "ratio": "ρ, pooled",
    "relative_ratio": "ρ, relative",
    "norm": "m alone",
    "relative_norm": "m, relative",
    "mass": "mass s",
    "value_mass": "value mass",
}
BUCKETS_CAPTION = (
    "means over layers, heads and inputs. attention: share of a row, adds up to 100 %; an input without the bucket "
    "counts as 0. All else: over the n inputs that have it; –: no row sees it. s: mean attention of one key over the "
    "rows that see it. value mass: (s + ε) m, m = ‖V W_O‖. ρ: Σ A m / Σ A over heads and layers, no ε; relative: m in "
    "units of its head's median"
)
AUROC_CAPTION = (
    "0.5: no difference; above: evidence tokens have more; below: the first 4 have more. Within a head ρ is m: what ρ "
    "gains or loses against m alone comes from pooling heads. First position alone: the same against position 0 only, "
    "since the other three may be tokens like any (table above)"
)
EPSILON_CAPTION = (
    "E, F: Σ (s + ε) m over the bucket's keys, mean over heads, layers, inputs. E, F or open: which has more, where "
    "the interval over inputs excludes 0. per mass: Σ (s + ε) m / Σ s, which is ρ at ε = 0 alone. AUROC: P(value mass "
    "of an evidence token > of a first4 token). –: no row sees one of the two"
)
SIDES = {"evidence": "E", "first4": "F", "open": "open", None: "–"}
AFTER_CAPTION = (
    "corrected: A′ R − A, what survivors get without the arithmetic gain 1 / R; conditional: change of shares among "
    "survivors; raw: A′ − A, inflated by 1 / R with no mechanism, never to be read alone. An item without the bucket "
    "counts as 0. ρ: corrected, over the items that have it"
)
RECOVERED = {"ratio": "low ρ", "relative_ratio": "low relative ρ", "norm": "low m", "mass": "high s"}
COURSES = {"distractor": "other sentences (D)", "hard": "other needles", "decoy": "decoys", "generated": "generated"}
COURSES_CAPTION = (
    "the row that predicts the token; shares add up to 100 %: an item without the bucket counts as 0 (ρ: items with "
    "it). The JSON has every token, the table courses every layer and head"
)
SINKY = "heads whose s of the first position (mean over the rows that see it; 0 where none does) exceeds"
