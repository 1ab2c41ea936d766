"""The arms of one intervene call, batch by batch: forced rows, greedy steps, outcomes with their receipts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.engine import Prefix
from kvprobe.interventions.effects import CELLS, STREAMS, stream_order
from kvprobe.interventions.plan import ArmBias, Plan, Scene
from kvprobe.outcomes import Outcome
from kvprobe.receipts import Step, collect
from kvprobe.sizes import UNLIMITED, Limits
from kvprobe.streams import Edited, Tap, edited, tapped
from kvprobe.traces import LayerData, Trace

Parts = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Key parts and value parts of one layer, each [K, ·, d], to be read as one sequence."""


@dataclass(frozen=True)
class Call:
    """Everything that the batches of one :func:`kvprobe.intervene` call have in common."""

    model: Any
    prompt: Any
    scene: Scene
    plan: Plan
    ids: Tensor
    forced: Tensor
    generate: int
    logits: str
    keep_trace: bool
    streams: int

    def run(
        self, arms: Sequence[int], start: int, shared: Prefix | None, limits: Limits = UNLIMITED
    ) -> dict[int, Outcome]:
        """One batch: the forced rows, then greedy steps; returns arm → outcome."""
        prefix = None if start == 0 or shared is None else shared.upto(start).layers
        reach = 0 if shared is None else shared.reach
        tokens = torch.cat([self.ids, self.forced])
        rows = tokens[start:].expand(len(arms), -1)
        batch = _Batch.of(self.plan, arms)
        cache = engine.new_cache()
        capture = torch.arange(rows.shape[1]) if self.keep_trace else None
        run = Run(
            prefix=prefix,
            start=start,
            biases=batch.biases,
            edits=batch.edits,
            capture=capture,
            reach=reach,
            limit=limits.logits_bytes,
        )
        keep = len(self.forced) + 1 if self.logits == "continuation" else 0
        steps: list[Step] = []
        with self._edited(batch, run) as done, self._tapped(run) as tap:  # what is tapped has been edited
            logits = engine.forward(self.model.twin, rows, run, cache, keep)
        steps.append(self._step(start, len(tokens), run, len(arms), done.rows))
        own = engine.cached_layers(cache)
        if self.generate and len(self.forced):
            cache.crop(-len(self.forced))
        generated = self._decode(logits[:, -1 - len(self.forced)], run, cache, steps, batch, len(arms))
        return {
            arm: self._outcome(arm, row, start, logits[row], run, own, steps, generated[row], tap)
            for row, arm in enumerate(arms)
        }

    def _tapped(self, run: Run) -> AbstractContextManager[Tap | None]:
        if not self.streams:
            return nullcontext()
        return tapped(self.model.twin, self.model.geometry.n_layers, self.streams, run)

    def _edited(self, batch: _Batch, run: Run) -> AbstractContextManager[Edited]:
        return edited(self.model.twin, self.model.geometry.n_layers, batch.streams, run)

    def _decode(
        self, last: Tensor, run: Run, cache: Any, steps: list[Step], batch: _Batch, arms: int
    ) -> list[list[int]]:
        """Greedy tokens of each arm, up to and without an end-of-sequence token."""
        done = [False] * arms
        texts: list[list[int]] = [[] for _ in range(arms)]
        eos = engine.end_of_sequence(self.model)
        for step in range(self.generate):
            best = last.argmax(-1)
            for row, token in enumerate(best.tolist()):
                done[row] = done[row] or token in eos
                if not done[row]:
                    texts[row].append(token)
            if all(done) or step + 1 == self.generate:
                break
            at = len(self.ids) + step
            more = Run(run.prefix, at, batch.biases, batch.edits, reach=run.reach, limit=run.limit)
            with self._edited(batch, more) as rewritten:
                last = engine.forward(self.model.twin, best[:, None], more, cache)[:, -1]
            steps.append(self._step(at, at + 1, more, arms, rewritten.rows))
        return texts

    def _step(self, start: int, stop: int, run: Run, arms: int, rows: Mapping[tuple[int, int, str], int]) -> Step:
        shape = (self.model.geometry.n_layers, arms, self.model.geometry.n_heads)
        return Step.stack(torch.arange(start, stop), run.records, shape, rows)

    def _outcome(
        self,
        arm: int,
        row: int,
        start: int,
        logits: Tensor,
        run: Run,
        own: Sequence[tuple[Tensor, Tensor]],
        steps: Sequence[Step],
        generated: list[int],
        tap: Tap | None,
    ) -> Outcome:
        geometry, pad = self.model.geometry, self.prompt.pad
        receipt = collect(self.plan, arm, row, steps, geometry.windows, geometry.n_heads)
        receipt.verify(f"arm {arm}")
        tokens = torch.cat([self.prompt.ids.to(self.forced.device), self.forced])
        positions = list(range(start + pad, len(tokens)))
        if self.scene.suffix and self.logits == "all":
            logits = logits[-self.scene.suffix - len(self.forced) :]  # a mask may begin to bite before the suffix
        trace = None
        if self.keep_trace:
            parts = parts_of(run, own, row)
            data = [
                LayerData(run.queries[i][row], keys, values, run.specs[i]) for i, (keys, values) in enumerate(parts)
            ]
            trace = Trace(tokens, positions, data, self.model.w_o, pad, dict(self.prompt.spans), self.model.meta)
        biases: dict[int, ArmBias] = {layer: by[arm] for layer, by in self.plan.layers.items() if arm in by}
        streams = None if tap is None else tap.arm(row)
        rows = positions[len(positions) - len(logits) :]
        patched = tuple(layer for layer, by in self.plan.effects.items() if _swaps(by.get(arm, ())))
        return Outcome(logits, rows, tokens, receipt, generated, trace, biases, streams, patched)


@dataclass(frozen=True)
class _Batch:
    """What the arms of one batch do, by layer and place in the batch."""

    biases: Mapping[int, Mapping[int, ArmBias]]
    edits: Mapping[int, Mapping[int, Sequence[Any]]]
    streams: Mapping[int, Mapping[int, Sequence[Any]]]

    @classmethod
    def of(cls, plan: Plan, arms: Sequence[int]) -> _Batch:
        streams = plan.select_effects(arms, STREAMS)
        ordered = {layer: {arm: stream_order(some) for arm, some in by.items()} for layer, by in streams.items()}
        return cls(plan.select(arms), plan.select_effects(arms, CELLS), ordered)


def _swaps(effects: Sequence[Any]) -> bool:
    """Whether keys or values were exchanged: the trace's own are then not those that the arm used."""
    return any(effect.site == "cache" for effect in effects)


def parts_of(run: Run, own: Sequence[tuple[Tensor, Tensor]], row: int) -> list[Parts]:
    """Key and value parts of one arm: the shared prefix (if any) and its own forced rows."""
    if run.prefix is None:
        return [((keys[row],), (values[row],)) for keys, values in own]
    pairs = zip(run.prefix, own, strict=True)
    return [((shared[0], mine[0][row]), (shared[1], mine[1][row])) for shared, mine in pairs]
