"""The mathematics of eviction, as pure functions of tensors: renormalisation, exact perturbation, and its bounds.

Conventions, for one head and any leading dimensions:

==========  ==============  ==================================================================================
``A``       ``[..., n]``    attention rows over the visible keys, 0 at invisible ones; float32 or float64
``keep``    ``[..., n]``    bool, True = kept; S is the evicted set, N the kept one
``V``       ``[..., n, d]``  values of kv head h // G, G = query heads / kv heads
``W_O``     ``[..., d, D]``  this *query* head's slice of the output projection
``m``       ``[..., n]``    projected value norms ‖V_i W_O‖_p
sink_mass   ``[...]``       mass of a learned sink, 1 − Σ A: one more key, always kept, with value 0 and m = 0
a_S, R      ``[...]``       evicted and retained mass; w_S, w_N and u_S, u_N are the same sums of A m and of A V
==========  ==============  ==================================================================================

The dtype of ``A`` is that of the result. Inputs outside a formula's domain raise
:class:`kvprobe.errors.TheoryError`. CriticalKV is Feng et al., *CriticalKV: Optimizing KV Cache Eviction from an Output
Perturbation Perspective*, arXiv 2502.03805; what is not in that paper is marked "derived for kvprobe".
"""

from kvprobe.theory.attention import (
    ConditionalSplit,
    OwnSplit,
    attention,
    conditional,
    correct,
    renormalise,
    renormalise_soft,
    retained,
    split_conditional,
    split_own,
)
from kvprobe.theory.bounds import bound, centred_bound, layer_bound, relaxed_bound, stage2_bound, value_mass
from kvprobe.theory.consequences import Consequences, consequences
from kvprobe.theory.dose import fractional_bound, kappa, kappa_inverse
from kvprobe.theory.norms import gram, projected_norms, value_norms
from kvprobe.theory.perturbation import (
    layer_perturbation,
    per_query_head,
    perturbation,
    perturbation_vector,
    value_gate,
    value_gate_vector,
)

__all__ = [
    "ConditionalSplit",
    "Consequences",
    "OwnSplit",
    "attention",
    "bound",
    "centred_bound",
    "conditional",
    "consequences",
    "correct",
    "fractional_bound",
    "gram",
    "kappa",
    "kappa_inverse",
    "layer_bound",
    "layer_perturbation",
    "per_query_head",
    "perturbation",
    "perturbation_vector",
    "projected_norms",
    "relaxed_bound",
    "renormalise",
    "renormalise_soft",
    "retained",
    "split_conditional",
    "split_own",
    "stage2_bound",
    "value_gate",
    "value_gate_vector",
    "value_mass",
    "value_norms",
]
