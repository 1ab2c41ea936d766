"""What evicting a span of keys would do, read off one clean forward pass for every layer, head and query.

Mass, value mass, the bounds and the exact perturbation of a span are sums over its keys and over all others; the
formulas are those of :mod:`kvprobe.theory`, the sums those that do not cancel.
"""

from kvprobe.spans.inputs import LayerLike, TraceLike, check_spans
from kvprobe.spans.ragged import layer_perturbation, span_stats
from kvprobe.spans.sweep import AllSpans, all_spans

__all__ = ["AllSpans", "LayerLike", "TraceLike", "all_spans", "check_spans", "layer_perturbation", "span_stats"]
