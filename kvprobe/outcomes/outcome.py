"""Outcome of one arm: its logits, its receipt, and attention that is corrected before it is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvprobe import theory
from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.plan import ArmBias
from kvprobe.receipts import Receipt
from kvprobe.streams import Streams
from kvprobe.theory import ConditionalSplit, OwnSplit
from kvprobe.traces import LayerView, Trace


@dataclass(frozen=True)
class Outcome:
    """What came out of one arm.

    Attributes
    ----------
    logits
        [rows, vocab]; row i predicts the token after ``positions[i]``.
    positions
        Absolute positions of the logits' rows, pads counted.
    ids
        Tokens of prompt and continuation.
    receipt
        Verified evidence of what the intervention did.
    generated
        Greedy tokens, if asked for.
    trace
        The arm's own rows *before* its bias (its unmasked attention A⁺), over all rows that ran.
    streams
        Attention output and hidden state of its last rows at every layer, if asked for.
    patched
        Layers on which the arm used other keys or values than its trace holds.
    """

    logits: Tensor
    positions: list[int]
    ids: Tensor
    receipt: Receipt
    generated: list[int] = field(default_factory=list)
    trace: Trace | None = None
    biases: Mapping[int, ArmBias] = field(default_factory=dict, repr=False)
    streams: Streams | None = None
    patched: tuple[int, ...] = ()

    def own_attention(self, layer: int) -> Tensor:
        """A⁺ [H, T, n]: softmax of the arm's own logits without its bias."""
        return self._unpatched(layer).attention

    def attention(self, layer: int) -> Tensor:
        """A′ [H, T, n]: the attention that the arm used. Survivors are inflated by 1/R; compare with care."""
        view = self._unpatched(layer)
        return view.rows(self._bias(layer, view.logits))[0]

    def corrected_attention(self, layer: int, reference: str = "own", clean: Trace | Outcome | None = None) -> Tensor:
        """Ã′ = A′ · R [H, T, n]: the arm's attention with the renormalisation taken out.

        R is the retained mass of the arm's own unmasked row (``reference="own"``), or of the clean run's row
        (``"clean"``, CriticalKV's literal reading; give ``clean``). In a clean run R = 1 and all three coincide.
        Sources: CriticalKV Theorem 3.2; the own-row reading is derived for kvprobe.
        """
        if reference not in ("own", "clean"):
            raise InterventionError(f"reference={reference!r} is not one of own, clean")
        view = self._trace().layer(layer)
        if reference == "own":
            row, sink_mass = view.rows()
        else:
            if clean is None:
                raise InterventionError(
                    "reference='clean' needs clean=, the clean arm's outcome or trace at these rows"
                )
            row, sink_mass = self._clean_rows(clean, layer)
        weights = self._bias(layer, view.logits).exp().expand_as(row)
        share = (row * weights).sum(-1) if sink_mass is None else (row * weights).sum(-1) + sink_mass
        return theory.correct(self.attention(layer), share)

    def keep(self, layer: int) -> Tensor:
        """Boolean [H, T, n]: True where the arm's bias is not −∞."""
        logits = self._trace().layer(layer).logits
        return (self._bias(layer, logits) > -torch.inf).expand_as(logits)

    def attention_change(self, layer: int, clean: Trace | Outcome) -> tuple[OwnSplit, ConditionalSplit]:
        """Both exact splits of A′ − A_clean at this arm's rows (see :func:`kvprobe.theory.split_own`)."""
        if any(0 > cut.bias > -torch.inf for bias in self.biases.values() for cut in bias.cuts):
            raise InterventionError("attention_change is defined for −∞ masks; this arm has a finite beta")
        A, keep, (rows, sink_mass) = self.attention(layer), self.keep(layer), self._clean_rows(clean, layer)
        own = theory.split_own(A, self.own_attention(layer), rows, keep)
        return own, theory.split_conditional(A, rows, keep, sink_mass)

    def _unpatched(self, layer: int) -> LayerView:
        if layer in self.patched:
            raise InterventionError(
                f"layer {layer} ran with patched keys or values, which the trace does not hold: its attention is not "
                "available; allowed: layers without a patch"
            )
        return self._trace().layer(layer)

    def _trace(self) -> Trace:
        if self.trace is None:
            raise InterventionError("this outcome kept no trace: call intervene(…, keep_trace=True)")
        return self.trace

    def _bias(self, layer: int, logits: Tensor) -> Tensor:
        """[H or 1, T, n] additive bias over all columns of the trace."""
        trace = self._trace()
        if layer not in self.biases:
            return logits.new_zeros(1, *logits.shape[1:])
        positions = torch.tensor(trace.queries, device=logits.device) - trace.pad
        some = self.biases[layer].at(positions)
        full = logits.new_zeros(some.shape[0], *logits.shape[1:])
        full[..., self.biases[layer].columns.to(logits.device) + trace.pad] = some
        return full

    def _clean_rows(self, clean: Trace | Outcome, layer: int) -> tuple[Tensor, Tensor | None]:
        other = clean._trace() if isinstance(clean, Outcome) else clean
        if not isinstance(other, Trace):
            raise InterventionError(f"clean={quote(clean)} is not allowed: give the clean arm's Outcome or a Trace")
        wanted, have = self._trace().queries, other.queries
        missing = sorted(set(wanted) - set(have))
        if missing or other.n != self._trace().n:
            raise InterventionError(
                f"the clean rows do not cover this arm's queries (missing {missing[:5]}, keys {other.n})"
            )
        index = torch.tensor([have.index(query) for query in wanted])
        rows, sink_mass = other.layer(layer).rows()
        return rows[:, index], None if sink_mass is None else sink_mass[:, index]
