"""The capability check: is what this model computes what transformers computes, and does a mask bite on every layer?

It runs once, at load, on a short random prompt: a few forward passes. What it finds is kept in ``model.report`` and
printed by ``kvprobe check``. A check that fails is a :class:`~kvprobe.errors.ModelError`, never a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import LayerSpec, Run, layer_logits, visible
from kvprobe.errors import ModelError
from kvprobe.interventions.mask import KVMask, score_hook
from kvprobe.interventions.plan import Scene, compile_arms
from kvprobe.versions import versions

MASKED_KEY = 2


@dataclass(frozen=True)
class LayerReport:
    """One layer: its attention class, whether a score edit bit, and what shapes its softmax."""

    index: int
    kind: str
    maskable: bool
    window: int | None
    softcap: float | None
    sink: bool


@dataclass(frozen=True)
class Report:
    """Largest absolute differences in logits unless said otherwise.

    ``logits_max_diff`` bridge − transformers; ``twin_max_diff`` twin − transformers; ``cached_max_diff`` a cached run − an
    uncached one (the larger of twin and bridge); ``mask_max_diff`` the fast path under a mask − TransformerLens hooks;
    ``pattern_max_diff`` attention rows of twin − bridge; ``row_sum_max_error`` |Σ − 1|, learned sink counted;
    ``output_max_diff`` z W_O (+ bias) − the attention module's own output.
    """

    ok: bool
    model: str
    architecture: str
    attention: str
    layers: tuple[LayerReport, ...]
    logits_max_diff: float
    twin_max_diff: float
    cached_max_diff: float
    mask_max_diff: float
    pattern_max_diff: float
    row_sum_max_error: float
    output_max_diff: float
    tolerance: float
    shared_parameters: int
    processing: str
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers], "versions": dict(self.versions)}


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


def run(
    label: str, hf: Any, twin: Any, bridge: Any, ids: Tensor, reference: Tensor
) -> tuple[dict[str, Any], Report]:
    """All checks; returns the geometry as a mapping and the report."""
    modules, outputs, handles = {}, {}, []
    observed = Run(capture=torch.arange(ids.shape[1]), outputs={})
    cache = engine.new_cache()
    n_layers = twin.config.get_text_config().num_hidden_layers
    for index, module in enumerate(engine.attention_modules(twin, n_layers)):
        modules[index] = module
        handles.append(module.register_forward_hook(lambda m, a, out, i=index: outputs.__setitem__(i, out[0])))
    try:
        logits = engine.forward(twin, ids, observed, cache)[0].float()
    finally:
        for handle in handles:
            handle.remove()
    tolerance = _tolerance(reference, next(iter(twin.parameters())).dtype)
    names = _Names(label, type(hf).__name__)
    _expect(sorted(observed.specs) == list(range(n_layers)), names,
            f"only layers {sorted(observed.specs)} of {n_layers} called the registered attention function")
    geometry = _geometry(twin, observed, cache, n_layers)
    diffs = {"twin_max_diff": _diff(logits, reference)}
    diffs["output_max_diff"] = max(_output_diff(modules[i], observed, outputs, geometry, i) for i in range(n_layers))
    diffs["logits_max_diff"] = _diff(_bridge_logits(bridge, ids), reference)
    for what, who in (("twin_max_diff", "the fast twin's"), ("logits_max_diff", "TransformerLens'")):
        _expect(diffs[what] <= tolerance, names, f"{who} logits differ from transformers' by {diffs[what]:.3g} "
                f"(tolerance {tolerance:.2g})")
    _expect(diffs["output_max_diff"] <= tolerance, names, f"z W_O differs from the attention module's output by "
            f"{diffs['output_max_diff']:.3g}: its output projection is not a plain one")
    diffs["cached_max_diff"] = max(_cached_twin(twin, ids, reference), _cached_bridge(bridge, ids, reference))
    _expect(diffs["cached_max_diff"] <= tolerance, names, f"a cached run differs from an uncached one by "
            f"{diffs['cached_max_diff']:.3g}: this pair of transformers and transformer-lens ignores or mistakes the KV "
            "cache (transformers 5.24 renamed the attention argument past_key_values); install transformers>=5.9,<5.24")
    pattern, masked, unmaskable = _bridge_masked(bridge, ids, geometry)
    _expect(not unmaskable, names, f"a score edit does not bite on layer(s) {unmaskable} "
            f"({_attention_class(bridge, unmaskable[0] if unmaskable else 0)}): TransformerLens' adapter drops it; use a "
            "model whose bridge computes attention step by step, see `kvprobe check`")
    diffs["mask_max_diff"] = _diff(_twin_masked(twin, ids, geometry), masked)
    _expect(diffs["mask_max_diff"] <= tolerance, names,
            f"the fast path under a mask differs from TransformerLens hooks by {diffs['mask_max_diff']:.3g}")
    diffs["pattern_max_diff"], diffs["row_sum_max_error"] = _pattern(bridge, ids, observed, cache)
    slack = max(1e-4, 8 * torch.finfo(next(iter(twin.parameters())).dtype).eps)
    _expect(diffs["pattern_max_diff"] <= slack, names,
            f"attention rows differ from TransformerLens' by {diffs['pattern_max_diff']:.3g}")
    _expect(diffs["row_sum_max_error"] <= slack, names, f"attention rows sum to 1 ± {diffs['row_sum_max_error']:.3g}")
    shared = _shared(twin, bridge)
    _expect(shared == len(list(twin.parameters())), names, f"only {shared} of {len(list(twin.parameters()))} parameters are shared with the twin")
    layers = tuple(
        LayerReport(i, _attention_class(bridge, i), True, s.window, s.softcap, s.sink is not None)
        for i, s in sorted(observed.specs.items())
    )
    plain = all(spec.plain for spec in observed.specs.values())
    how = "sdpa" if plain else "exact two-part attention, queries chunked (window, soft-cap or learned sink)"
    processing = "folded (compatibility mode)" if getattr(bridge, "compatibility_mode", False) else "raw"
    return geometry, Report(True, label, type(hf).__name__, how, layers, tolerance=tolerance, shared_parameters=shared,
                            processing=processing, versions=versions(), **diffs)


@dataclass(frozen=True)
class _Names:
    model: str
    architecture: str


def _expect(holds: bool, names: _Names, what: str) -> None:
    if not holds:
        have = ", ".join(f"{name} {version}" for name, version in versions().items())
        raise ModelError(f"{names.model} ({names.architecture}): {what} [{have}]")


def _diff(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


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
    }


def _output_diff(module: Any, run: Run, outputs: Mapping[int, Tensor], geometry: Mapping[str, Any], layer: int) -> float:
    """z W_O + bias against what the attention module returned: proves that W_O is the projection meant in the theory."""
    assert run.outputs is not None
    w_o = engine.output_weights(module, geometry["n_heads"]).float()
    mine = torch.einsum("bthd,hdD->btD", run.outputs[layer].float(), w_o)
    bias = engine.output_bias(module)
    return _diff(mine if bias is None else mine + bias.float(), outputs[layer])


def _bridge_logits(bridge: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return bridge(ids, prepend_bos=False)[0].float()


def _cached_twin(twin: Any, ids: Tensor, reference: Tensor) -> float:
    cut = ids.shape[1] // 2
    prefix, _ = engine.prefill(twin, ids[0, :cut])
    logits = engine.forward(twin, ids[:, cut:], Run(prefix=prefix.layers, start=cut), engine.new_cache())
    return _diff(logits[0], reference[cut:])


def _cached_bridge(bridge: Any, ids: Tensor, reference: Tensor) -> float:
    cut = ids.shape[1] // 2
    with torch.no_grad():
        _, cache = bridge(ids[:, :cut], return_type="logits_and_cache", use_cache=True, prepend_bos=False)
        logits = bridge(ids[:, cut:], past_key_values=cache, prepend_bos=False)
    return _diff(logits[0], reference[cut:])


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


def _bridge_masked(bridge: Any, ids: Tensor, geometry: Mapping[str, Any]) -> tuple[dict[int, Tensor], Tensor, list[int]]:
    """Mask one key on all layers through TransformerLens; returns patterns, logits after the key, layers that ignored it."""
    scene = _scene(ids, geometry)
    plan = compile_arms([[_mask()]], scene)
    patterns: dict[int, Tensor] = {}
    hooks: list[Any] = []
    for layer, by_arm in plan.layers.items():
        hooks.append((f"blocks.{layer}.attn.hook_attn_scores", score_hook(by_arm[0], scene)))
        hooks.append((f"blocks.{layer}.attn.hook_pattern", lambda p, hook, i=layer: patterns.__setitem__(i, p.detach())))
    with torch.no_grad():
        logits = bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    at = torch.arange(ids.shape[1], device=ids.device)
    ignored = []
    for layer in range(geometry["n_layers"]):
        sees = visible(at, at, geometry["windows"][layer])[:, MASKED_KEY] & (at > MASKED_KEY)
        pattern = patterns.get(layer)
        if pattern is None or bool((pattern[0][:, sees, MASKED_KEY] != 0).any()) or not _rows_whole(pattern, geometry):
            ignored.append(layer)
    return patterns, logits[0, MASKED_KEY + 1 :], ignored


def _rows_whole(pattern: Tensor, geometry: Mapping[str, Any]) -> bool:
    """Rows still sum to 1 after the edit (an edit of a finished pattern would leave them short)."""
    sums = pattern.float().sum(-1)
    slack = max(1e-4, 8 * torch.finfo(pattern.dtype).eps)
    return bool((sums <= 1 + slack).all()) and (geometry["has_sink"] or bool((sums >= 1 - slack).all()))


def _pattern(bridge: Any, ids: Tensor, run: Run, cache: Any) -> tuple[float, float]:
    patterns: dict[int, Tensor] = {}
    hooks = [
        (f"blocks.{i}.attn.hook_pattern", lambda p, hook, i=i: patterns.__setitem__(i, p.detach())) for i in run.specs
    ]
    with torch.no_grad():
        bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    difference = error = 0.0
    for layer, (keys, _) in enumerate(engine.cached_layers(cache)):
        rows, sums = _rows(run.queries[layer][0], keys[0], run.specs[layer])
        difference = max(difference, _diff(rows, patterns[layer][0]))
        error = max(error, float((sums - 1).abs().max()))
    return difference, error


def _rows(query: Tensor, keys: Tensor, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """Attention rows and their sums with the learned sink's share added back."""
    logits = layer_logits(query, keys, spec, torch.arange(query.shape[1]))
    if spec.sink is None:
        rows = logits.softmax(-1)
        return rows, rows.sum(-1)
    extra = spec.sink.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)
    whole = torch.cat([logits, extra], -1).softmax(-1)
    return whole[..., :-1], whole.sum(-1)


def _attention_class(bridge: Any, layer: int) -> str:
    return type(bridge.blocks[layer].attn).__name__


def _shared(twin: Any, bridge: Any) -> int:
    """Number of the twin's parameters whose storage is also the bridge's."""
    mine = {parameter.data_ptr() for parameter in bridge.original_model.parameters()}
    return sum(parameter.data_ptr() in mine for parameter in twin.parameters())
