"""The capability check: is what this model computes what transformers computes, and does a mask bite on every layer?

It runs once, at load, on a short random prompt: a few forward passes. What it finds is kept in ``model.report`` and
printed by ``kvprobe check``. A check that fails is a :class:`~kvprobe.errors.ModelError`, never a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.capability import LayerReport, Report
from kvprobe.errors import CapabilityError, ModelError
from kvprobe.interventions.hooks import score_hook
from kvprobe.interventions.mask import KVMask
from kvprobe.interventions.plan import Scene, compile_arms
from kvprobe.twopart import LayerSpec, layer_logits, visible
from kvprobe.versions import versions

MASKED_KEY = 2


def probe_ids(hf: Any) -> Tensor:
    """A short fixed-seed prompt [1, n], longer than a small sliding window so that the window is exercised."""
    config = hf.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    length = 16 if not window or window > 64 else int(window) + 12
    generator = torch.Generator().manual_seed(0)
    device = next(iter(hf.parameters())).device
    return torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)


def reference_logits(hf: Any, ids: Tensor) -> Tensor:
    """transformers' own eager logits [n, vocab], taken before TransformerLens wraps the modules."""
    with torch.no_grad():
        return hf(input_ids=ids, use_cache=False).logits[0].float()


def run(label: str, hf: Any, twin: Any, bridge: Any, ids: Tensor, reference: Tensor) -> tuple[dict[str, Any], Report]:
    """All checks, cheapest first; returns the geometry as a mapping and the report.

    Raises
    ------
    CapabilityError
        Naming model, class, layer where there is one, versions, and a way out.
    """
    try:
        return _run(label, hf, twin, bridge, ids, reference)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        have = ", ".join(f"{name} {version}" for name, version in versions().items())
        raise CapabilityError(
            f"{label} ({type(hf).__name__}): kvprobe cannot run its attention ({reason}); allowed: classes with plain "
            f"multi-head, grouped-query or multi-query attention [{have}]"
        ) from error


def _run(label: str, hf: Any, twin: Any, bridge: Any, ids: Tensor, reference: Tensor) -> tuple[dict[str, Any], Report]:
    dtype = next(iter(twin.parameters())).dtype
    check = _Check(label, type(hf).__name__, twin, bridge, ids, reference, _tolerance(reference, dtype))
    observed, cache, outputs = check.observe()
    geometry = _geometry(twin, observed, cache, check.n_layers)
    check.windows(geometry["windows"])
    check.logits()
    check.projection(observed, outputs, geometry["n_heads"])
    check.cached()
    check.masked(geometry)
    # Half precision rounds a logit of 30 by up to 0.1, and an attention weight with it.
    check.rows(observed, cache, max(1e-4, 32 * torch.finfo(dtype).eps))
    shared = check.shared()
    layers = tuple(
        LayerReport(i, _attention_class(bridge, i), True, s.window, s.softcap, s.sink is not None)
        for i, s in sorted(observed.specs.items())
    )
    plain = all(spec.plain for spec in observed.specs.values())
    report = Report(
        ok=True,
        model=label,
        architecture=check.architecture,
        attention="sdpa" if plain else "exact, in chunks of queries (window, soft-cap or learned sink)",
        layers=layers,
        tolerance=check.tolerance,
        shared_parameters=shared,
        processing="folded (compatibility mode)" if getattr(bridge, "compatibility_mode", False) else "raw",
        versions=versions(),
        **check.found,
    )
    return geometry, report


@dataclass
class _Check:
    """One model under examination; ``found`` collects the differences that the report lists."""

    model: str
    architecture: str
    twin: Any
    bridge: Any
    ids: Tensor
    reference: Tensor
    tolerance: float
    found: dict[str, float] = field(default_factory=dict)
    twin_logits: Tensor = field(init=False)

    @property
    def n_layers(self) -> int:
        return int(self.twin.config.get_text_config().num_hidden_layers)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            have = ", ".join(f"{name} {version}" for name, version in versions().items())
            raise CapabilityError(f"{self.model} ({self.architecture}): {what} [{have}]")

    def within(self, name: str, value: float, what: str, tolerance: float | None = None) -> None:
        """Record a difference and refuse one above tolerance (NaN is above)."""
        limit = self.tolerance if tolerance is None else tolerance
        self.found[name] = value
        self.expect(value <= limit, what.format(f"{value:.3g} (tolerance {limit:.2g})"))

    def observe(self) -> tuple[Run, Any, dict[int, Tensor]]:
        """One run of the twin that keeps all query rows, head outputs and the attention modules' own outputs."""
        outputs: dict[int, Tensor] = {}
        run = Run(capture=torch.arange(self.ids.shape[1]), outputs={})
        cache, handles = engine.new_cache(), []
        for index, module in enumerate(engine.attention_modules(self.twin, self.n_layers)):
            handles.append(module.register_forward_hook(partial(_keep_output, outputs, index)))
        try:
            self.twin_logits = engine.forward(self.twin, self.ids, run, cache)[0].float()
        finally:
            for handle in handles:
                handle.remove()
        heard = sorted(run.specs)
        self.expect(
            heard == list(range(self.n_layers)),
            f"only layers {heard} of {self.n_layers} called the registered attention function",
        )
        return run, cache, outputs

    def windows(self, heard: tuple[int | None, ...]) -> None:
        """Layers that the config calls sliding told their window: a long one does not show on a short prompt."""
        config = self.twin.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.n_layers
        sliding = [kind == "sliding_attention" and bool(config.sliding_window) for kind in kinds]
        silent = [layer for layer, slides in enumerate(sliding) if slides and heard[layer] is None]
        self.expect(
            not silent,
            f"layer(s) {silent} slide over {getattr(config, 'sliding_window', None)} tokens, but their attention call "
            "does not say so: a long prompt would see too much; allowed: classes that pass sliding_window on",
        )

    def logits(self) -> None:
        """Twin and bridge against transformers' own eager logits."""
        self.within("twin_max_diff", _diff(self.twin_logits, self.reference), "the twin's logits differ by {}")
        bridged = _bridge_logits(self.bridge, self.ids)
        self.within("logits_max_diff", _diff(bridged, self.reference), "TransformerLens' logits differ by {}")

    def projection(self, run: Run, outputs: Mapping[int, Tensor], n_heads: int) -> None:
        """Z W_O + bias is what the attention module returned: W_O is the projection meant in the theory."""
        assert run.outputs is not None
        worst = []
        for layer, module in enumerate(engine.attention_modules(self.twin, self.n_layers)):
            w_o, bias = engine.output_weights(module, n_heads).float(), engine.output_bias(module)
            mine = torch.einsum("bthd,hdD->btD", run.outputs[layer].float(), w_o)
            worst.append(_diff(mine if bias is None else mine + bias.float(), outputs[layer]))
        self.within("output_max_diff", _worst(worst), "the output projection is not a plain one: z W_O is off by {}")

    def cached(self) -> None:
        """A run in two pieces through the cache equals a run in one, on the twin and on the bridge."""
        cut = self.ids.shape[1] // 2
        pieces = (_cached_twin(self.twin, self.ids, cut), _cached_bridge(self.bridge, self.ids, cut))
        self.within(
            "cached_max_diff",
            _worst([_diff(logits, self.reference[cut:]) for logits in pieces]),
            "a cached run differs from an uncached one by {}: this pair of transformers and transformer-lens mistakes "
            "the KV cache (transformers 5.24 renamed the attention argument past_key_values); install "
            "transformers>=5.9,<5.24",
        )

    def masked(self, geometry: Mapping[str, Any]) -> None:
        """A score edit bites on every layer of the bridge, and the fast path under the same mask equals it."""
        logits, ignored = _bridge_masked(self.bridge, self.ids, geometry)
        kind = _attention_class(self.bridge, ignored[0]) if ignored else ""
        self.expect(
            not ignored,
            f"a score edit does not bite on layer(s) {ignored} ({kind}): TransformerLens' adapter drops it; use a "
            "model whose bridge computes attention step by step",
        )
        mine = _twin_masked(self.twin, self.ids, geometry)
        self.within("mask_max_diff", _diff(mine, logits), "under a mask the fast path differs from hooks by {}")

    def rows(self, run: Run, cache: Any, slack: float) -> None:
        """Attention rows equal TransformerLens' patterns and sum to 1, a learned sink counted."""
        difference, error = _pattern(self.bridge, self.ids, run, cache)
        self.within("pattern_max_diff", difference, "attention rows differ from TransformerLens' by {}", slack)
        self.within("row_sum_max_error", error, "attention rows miss a sum of 1 by {}", slack)

    def shared(self) -> int:
        """Every parameter of the twin lies in the bridge's storage."""
        theirs = {parameter.data_ptr() for parameter in self.bridge.original_model.parameters()}
        mine = [parameter.data_ptr() in theirs for parameter in self.twin.parameters()]
        self.expect(all(mine), f"only {sum(mine)} of {len(mine)} parameters are shared with the twin")
        return sum(mine)


def _keep_output(outputs: dict[int, Tensor], index: int, module: Any, given: Any, returned: Any) -> None:
    outputs[index] = returned[0].detach()


def _keep_pattern(patterns: dict[int, Tensor], layer: int, pattern: Tensor, hook: Any) -> None:
    patterns[layer] = pattern.detach()


def _diff(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


def _worst(values: list[float]) -> float:
    """The largest, or NaN where any is NaN (the built-in ``max`` drops a NaN that does not come first)."""
    return float(torch.tensor(values).max())


def _tolerance(reference: Tensor, dtype: torch.dtype) -> float:
    """5e-4 in fp32 (noise between shapes is 6e-5 here); in half precision 8 ulp of the largest logit."""
    return max(5e-4, 8 * torch.finfo(dtype).eps * float(reference.abs().max()))


def _geometry(twin: Any, run: Run, cache: Any, n_layers: int) -> dict[str, Any]:
    keys, _ = engine.cached_layers(cache)[0]
    specs = [run.specs[i] for i in range(n_layers)]
    sinks = {spec.sink is not None for spec in specs}
    if len(sinks) != 1:
        raise ModelError("some layers have learned sinks and some do not; kvprobe supports all or none")
    embedding = twin.get_input_embeddings().weight
    return {
        "n_layers": n_layers,
        "n_heads": int(run.queries[0].shape[1]),
        "n_kv_heads": int(keys.shape[1]),
        "head_dim": int(keys.shape[-1]),
        "d_model": int(twin.config.get_text_config().hidden_size),
        "vocab": int(embedding.shape[0]),
        "windows": tuple(None if spec.window is None else int(spec.window) for spec in specs),
        "softcaps": tuple(spec.softcap for spec in specs),
        "has_sink": sinks.pop(),
        "scales": tuple(spec.scale for spec in specs),
        "rotary": any(path.split(".")[-1].startswith("rotary_emb") for path, _ in twin.named_modules()),
    }


def _bridge_logits(bridge: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return bridge(ids, prepend_bos=False)[0].float()


def _cached_twin(twin: Any, ids: Tensor, cut: int) -> Tensor:
    prefix, _ = engine.prefill(twin, ids[0, :cut])
    return engine.forward(twin, ids[:, cut:], Run(prefix=prefix.layers, start=cut), engine.new_cache())[0]


def _cached_bridge(bridge: Any, ids: Tensor, cut: int) -> Tensor:
    with torch.no_grad():
        _, cache = bridge(ids[:, :cut], return_type="logits_and_cache", use_cache=True, prepend_bos=False)
        return bridge(ids[:, cut:], past_key_values=cache, prepend_bos=False)[0]


def _scene(ids: Tensor, geometry: Mapping[str, Any]) -> Scene:
    return Scene(ids.shape[1], 0, geometry["n_layers"], geometry["n_heads"], geometry["windows"], geometry["has_sink"])


def _mask() -> KVMask:
    return KVMask(keys=(MASKED_KEY, MASKED_KEY + 1), queries="after")


def _twin_masked(twin: Any, ids: Tensor, geometry: Mapping[str, Any]) -> Tensor:
    plan = compile_arms([[_mask()]], _scene(ids, geometry))
    start = plan.first[0]
    assert start is not None
    prefix, _ = engine.prefill(twin, ids[0, :start])
    run = Run(prefix=prefix.layers, start=start, biases=plan.select([0]))
    return engine.forward(twin, ids[:, start:], run, engine.new_cache())[0]


def _bridge_masked(bridge: Any, ids: Tensor, geometry: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Mask one key on all layers through TransformerLens; returns logits after the key, and layers that ignored it."""
    scene = _scene(ids, geometry)
    plan = compile_arms([[_mask()]], scene)
    patterns: dict[int, Tensor] = {}
    hooks: list[Any] = []
    for layer, by_arm in plan.layers.items():
        hooks.append((f"blocks.{layer}.attn.hook_attn_scores", score_hook(by_arm[0], scene)))
        hooks.append((f"blocks.{layer}.attn.hook_pattern", partial(_keep_pattern, patterns, layer)))
    with torch.no_grad():
        logits = bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    at = torch.arange(ids.shape[1], device=ids.device)
    ignored = []
    for layer in range(geometry["n_layers"]):
        sees = visible(at, at, geometry["windows"][layer])[:, MASKED_KEY] & (at > MASKED_KEY)
        pattern = patterns.get(layer)
        if pattern is None or bool((pattern[0][:, sees, MASKED_KEY] != 0).any()) or not _rows_whole(pattern, geometry):
            ignored.append(layer)
    return logits[0, MASKED_KEY + 1 :], ignored


def _rows_whole(pattern: Tensor, geometry: Mapping[str, Any]) -> bool:
    """Rows still sum to 1 after the edit (an edit of a finished pattern would leave them short)."""
    sums = pattern.float().sum(-1)
    slack = max(1e-4, 8 * torch.finfo(pattern.dtype).eps)
    return bool((sums <= 1 + slack).all()) and (geometry["has_sink"] or bool((sums >= 1 - slack).all()))


def _pattern(bridge: Any, ids: Tensor, run: Run, cache: Any) -> tuple[float, float]:
    patterns: dict[int, Tensor] = {}
    hooks = [(f"blocks.{i}.attn.hook_pattern", partial(_keep_pattern, patterns, i)) for i in run.specs]
    with torch.no_grad():
        bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    differences, errors = [], []
    for layer, (keys, _) in enumerate(engine.cached_layers(cache)):
        rows, sums = _rows(run.queries[layer][0], keys[0], run.specs[layer])
        differences.append(_diff(rows, patterns[layer][0]))
        errors.append(float((sums - 1).abs().max()))
    return _worst(differences), _worst(errors)


def _rows(query: Tensor, keys: Tensor, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """Attention rows and their sums with the learned sink's share added back."""
    logits = layer_logits(query, keys, spec, torch.arange(query.shape[1], device=query.device))
    if spec.sink is None:
        rows = logits.softmax(-1)
        return rows, rows.sum(-1)
    extra = spec.sink.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)
    whole = torch.cat([logits, extra], -1).softmax(-1)
    return whole[..., :-1], whole.sum(-1)


def _attention_class(bridge: Any, layer: int) -> str:
    return type(bridge.blocks[layer].attn).__name__
