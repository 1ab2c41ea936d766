"""Eviction: what choosing the entries costs beside the prefill, and what a compacted cache saves on every token.

``selection_over_prefill_l1``, ``_l2``: seconds of scores + norms + two-stage selection on all layers over the seconds
of the rest of the same pass, which is the prefill. Numerator and denominator are parts of *one* pass, told apart by the
clock inside it: the difference of two whole passes, measured beside it (``…_difference``), contains the noise of both,
which is as large as the bar of the L2 norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from timing import once
from torch import Tensor

import kvprobe as kp
from kvprobe import engine
from kvprobe.eviction import Choice, KeepMask, Measured, PackedCache, Policy, chunked_prefill, compact, measure
from kvprobe.eviction.measuring import Watch

TASK = "niah_single_1"
CACHE = "0.4"
CHUNKED = ("snapkv", "snapkv+two_stage")
TOLERANCE = 5e-4
SPARE, SMALLEST = 64, 1024  # an item ends with the sentence that still fits into its length; no item is shorter


def text_ids(model: Any, n: int, seed: int = 0) -> Tensor:
    """The first n tokens of a generated item: text, not noise, so that attention is what it is in use."""
    length = max(n + SPARE, SMALLEST)
    item = kp.tasks.make(TASK, model, length=length, seed=seed, tokens_to_generate=0, decoys=0, distractors=0)
    ids = item.prompt.ids[item.prompt.pad :]
    assert len(ids) >= n, f"an item of length {length} has {len(ids)} tokens, fewer than {n}"
    return ids[:n]


class Selection:
    """A prefill alone, and the same prefill with a policy choosing what stays of it."""

    def __init__(self, model: Any, ids: Tensor, policy: Policy, cache: str = CACHE) -> None:
        self.model, self.ids, self.policy, self.cache = model, ids, policy, cache
        self.prompt = kp.Prompt.from_ids(ids)

    def prefill(self) -> engine.Prefix:
        """The context alone."""
        return _finished(self.model, kp.prefill(self.model, self.prompt))

    def select(self) -> Choice:
        """Prefill, scores on the way, budgets and kept sets: what a user calls."""
        measured = measure(self.model, self.ids, [self.policy])
        return _finished(self.model, self.policy.choose(measured.scored(self.policy), self.cache))

    def apart(self) -> tuple[float, float, Choice]:
        """One such pass with the clock inside: seconds of scores, norms and selection, seconds of the rest, choice."""
        watch, spent = Watch(self.model, [self.policy], len(self.ids), 0), [0.0]

        def timed(*layer: Any) -> None:
            _finished(self.model)  # an accelerator's earlier work is the prefill's, not the scorer's
            spent[0] += once(lambda: _finished(self.model, watch(*layer)))

        begun = time.perf_counter()
        prefix, _ = engine.prefill(self.model.twin, self.ids, observer=timed)
        _finished(self.model)
        chosen = time.perf_counter()
        scored = Measured(prefix, watch.seen).scored(self.policy)
        choice = _finished(self.model, self.policy.choose(scored, self.cache))
        ended = time.perf_counter()
        own = spent[0] + ended - chosen
        return own, ended - begun - own, choice

    def gate(self) -> None:
        """The taken-apart pass chooses what the plain one does, as many entries as were asked for."""
        plain, (_, _, apart) = self.select(), self.apart()
        assert torch.equal(plain.keep, apart.keep), f"{self.policy.name}: timing a pass changed what it keeps"
        wanted = kp.eviction.entries(len(self.ids), self.cache)
        found = float(plain.keep.sum(-1).float().mean())
        assert abs(found - wanted) < 1e-3, f"{self.policy.name} keeps {found} entries a head, asked for {wanted}"

    def rounds(self, count: int) -> list[dict[str, float]]:
        """``prefill_s``, ``whole_s`` and of a third pass ``own_s``, ``rest_s``, in turn; the gate was the warm-up."""
        found = []
        for _ in range(count):
            plain, whole = once(self.prefill), once(self.select)
            own, rest, _ = self.apart()
            found.append({"prefill_s": plain, "whole_s": whole, "own_s": own, "rest_s": rest})
        return found


class Decoding:
    """Steps of greedy length behind a whole cache and behind a compacted one, by one loop.

    Every row of a batch is a context of its own with a cache of its own; the loop is transformers' own (a
    ``DynamicCache`` filled with [B, K, n, d], one token a step), positions continue where the text is.
    """

    def __init__(
        self, model: Any, n: int, batch: int, policy: Policy, cache: str = CACHE, steps: int = 4, seed: int = 0
    ) -> None:
        self.model, self.steps = model, steps
        self.n, self.ids = n, torch.stack([text_ids(model, n + steps, seed + row) for row in range(batch)])
        self.keep, self._masked, full, kept = [], [], [], []
        for ids in self.ids:
            measured = measure(model, ids[: self.n], [policy])
            keep = policy.choose(measured.scored(policy), cache).keep
            arms = [kp.KVMask(keys=[]), KeepMask(keep)]
            with_prefix = {"suffix": steps, "prefix": measured.prefix, "keep_trace": False}
            self._masked.append(
                [out.logits for out in kp.intervene(model, kp.Prompt.from_ids(ids), arms, **with_prefix)]
            )
            full.append(measured.prefix.layers)
            kept.append(compact(model, measured.prefix, keep).layers)
        self.layers = {"full": _rows(full), "compacted": _rows(kept)}

    def n_bytes(self, which: str) -> int:
        """Bytes of keys and values of all rows before the first step."""
        return sum(part.numel() * part.element_size() for pair in self.layers[which] for part in pair)

    def cache(self, which: str) -> Any:
        """A cache of transformers that holds the same tensors, not copies: it grows by concatenation."""
        cache = engine.new_cache()
        for index, (keys, values) in enumerate(self.layers[which]):
            cache.update(keys[:, :, :0], values[:, :, :0], index)
            cache.layers[index].keys, cache.layers[index].values = keys, values
        return cache

    def decode(self, cache: Any) -> Tensor:
        """Run the ``steps`` tokens one by one; logits [B, steps, vocab]."""
        rows = []
        for step in range(self.n, self.n + self.steps):
            at = torch.full((len(self.ids), 1), step, device=self.model.device)
            with torch.no_grad():
                out = self.model.twin(
                    self.ids[:, step : step + 1].to(self.model.device),
                    position_ids=at,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            rows.append(out.logits[:, -1])
        return _finished(self.model, torch.stack(rows, 1))

    def gate(self) -> float:
        """Largest difference from the same tokens behind masks (nothing masked, and what was evicted masked)."""
        worst = 0.0
        for arm, which in enumerate(("full", "compacted")):
            mine = self.decode(self.cache(which))
            theirs = torch.stack([logits[arm] for logits in self._masked]).to(mine.device)
            worst = max(worst, float((mine - theirs).abs().max()))
        assert worst <= TOLERANCE, f"decoding: loop and masks differ by {worst:.2g}, allowed {TOLERANCE}"
        return worst

    def rounds(self, count: int) -> list[dict[str, float]]:
        """Seconds a step of both caches, in turn; the gate was the warm-up."""
        found = []
        for _ in range(count):
            caches = {which: self.cache(which) for which in self.layers}
            found.append({w: once(lambda c=cache: self.decode(c)) / self.steps for w, cache in caches.items()})
        return found


class Chunking:
    """A context read in chunks by a cache that never evicts, and by ones that evict after each chunk.

    ``n_bytes`` holds what each cache weighs at the end, once the gate has run.
    """

    def __init__(
        self, model: Any, ids: Tensor, chunk: int | None, cache: str, policies: Sequence[str] = CHUNKED
    ) -> None:
        self.model, self.ids, self.cache, self.n_bytes = model, ids, cache, {}
        self.chunk = len(ids) if chunk is None else chunk
        self.policies = {name: kp.eviction.policy(name) for name in policies}

    def read(self, which: str) -> PackedCache:
        """A cache at the end of the context."""
        if which == "full":
            return self._whole()[0]
        policy = self.policies[which]
        cache = chunked_prefill(self.model, self.ids, policy, self.cache, self.chunk, physical=True)
        return _finished(self.model, cache)

    def _whole(self) -> tuple[PackedCache, Tensor]:
        """The same chunks through the same code, and the last row of logits."""
        cache, logits = PackedCache(self.model, kp.eviction.policy("snapkv")), torch.zeros(0)
        for start in range(0, len(self.ids), self.chunk):
            logits = cache.feed(self.ids[start : start + self.chunk], rows=1)
        return _finished(self.model, cache), logits[-1]

    def gate(self) -> float:
        """Largest difference of the uncut logits from a plain prefill's; every head holds what was asked for."""
        cache, logits = self._whole()
        plain = kp.prefill(self.model, kp.Prompt.from_ids(self.ids)).next_logits
        worst = float((logits - plain).abs().max())
        assert worst <= TOLERANCE, f"chunked: logits differ from a plain prefill's by {worst:.2g}, allowed {TOLERANCE}"
        self.n_bytes["full"] = cache.n_bytes
        wanted = {kp.eviction.entries(len(self.ids), self.cache)}
        for name in self.policies:
            cache = self.read(name)
            held = {keys.shape[1] for keys, _ in cache.layers}
            assert held == wanted, f"chunked: heads of {name} hold {sorted(held)} entries, asked for {sorted(wanted)}"
            self.n_bytes[name] = cache.n_bytes
        return worst

    def rounds(self, count: int) -> list[dict[str, float]]:
        """Seconds of every contender, in turn; the gate was the warm-up."""
        return [{which: once(lambda w=which: self.read(w)) for which in ("full", *self.policies)} for _ in range(count)]


def run(
    model: Any, short: int = 1500, tokens: int = 4096, rounds: int = 5
) -> tuple[dict[str, float], dict[str, float]]:
    """Correctness gates, then ratios and the seconds behind them; selection at a short context and at a long one."""
    ratios, measured = {}, {}
    for length, name, count in ((tokens, "", max(1, rounds // 2)), (short, "_short", rounds)):
        for norm in (1, 2):
            selection = Selection(model, text_ids(model, length), kp.eviction.policy("snapkv+two_stage", p=norm))
            selection.gate()
            found = selection.rounds(count)
            label = f"l{norm}{name}"
            ratios[f"selection_over_prefill_{label}"] = _median([row["own_s"] / row["rest_s"] for row in found])
            measured |= {
                f"selection_{label}_s": _median([row["own_s"] for row in found]),
                f"selection_{label}_prefill_s": _median([row["prefill_s"] for row in found]),
                f"selection_{label}_difference": _median([row["whole_s"] / row["prefill_s"] - 1 for row in found]),
            }
    measured |= {"selection_tokens": tokens, "selection_short_tokens": short}
    for batch, name in ((1, ""), (4, "_batch4")):
        decoding = Decoding(model, tokens, batch, kp.eviction.policy("snapkv+two_stage"))
        measured[f"compacted_decode{name}_max_abs_diff"] = decoding.gate()
        steps = decoding.rounds(rounds)
        ratios[f"compacted_decode_speedup{name}"] = _median([row["full"] / row["compacted"] for row in steps])
        for which in decoding.layers:
            measured[f"decode_{which}{name}_s_per_step"] = _median([row[which] for row in steps])
            measured[f"decode_{which}{name}_cache_mib"] = decoding.n_bytes(which) / 2**20
    return ratios, measured


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _rows(contexts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """Contexts' layers [K, n, d] as rows of one cache, [B, K, n, d] a layer."""
    return [tuple(torch.stack(parts) for parts in zip(*pairs, strict=True)) for pairs in zip(*contexts, strict=True)]


def _finished(model: Any, result: Any = None) -> Any:
    """``result`` once its computation is over: an accelerator returns from a call before that."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return result
