"""One model under examination: each method is one check, and raises in words what it found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.capability import LayerReport
from kvprobe.checks import distance, trials
from kvprobe.errors import CapabilityError
from kvprobe.versions import versions


@dataclass
class Check:
    """``found`` collects the differences that the report lists, ``layers`` what is known of each layer."""

    model: str
    twin: Any
    bridge: Any
    ids: Tensor
    reference: Tensor
    found: dict[str, float] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    twin_logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = next(iter(self.twin.parameters())).dtype
        self.tolerance = distance.tolerance(self.reference, self.dtype)
        self.flips = self.dtype not in (torch.float32, torch.float64) and distance.routes(self.twin)

    @property
    def architecture(self) -> str:
        """The transformers class."""
        return type(self.twin).__name__

    @property
    def n_layers(self) -> int:
        """L."""
        return int(self.twin.config.get_text_config().num_hidden_layers)

    @property
    def processing(self) -> str:
        """Whether TransformerLens folded weights into each other."""
        return "folded (compatibility mode)" if getattr(self.bridge, "compatibility_mode", False) else "raw"

    @property
    def facts(self) -> dict[str, Any]:
        """What is known so far, as plain values; a layer that no mask was tried on has maskable None."""
        layers = [asdict(layer) for layer in self.layers]
        known = {"architecture": self.architecture, "processing": self.processing, "tolerance": self.tolerance}
        return {**known, "layers": layers, **self.found}

    def refuse(self, what: str) -> CapabilityError:
        """The error that says so, naming the model, its class and what is installed."""
        have = ", ".join(f"{name} {version}" for name, version in versions().items())
        method = getattr(getattr(self.twin.config, "quantization_config", None), "quant_method", None)
        if method is not None:
            what += (
                f"; its weights are quantised ({getattr(method, 'value', method)}): allowed are those that leave "
                "activations alone and compute in the model's own dtype, or the model unquantised"
            )
        return CapabilityError(f"{self.model} ({self.architecture}): {what} [{have}]", self.facts)

    def expect(self, holds: bool, what: str) -> None:
        """Go on, or refuse."""
        if not holds:
            raise self.refuse(what)

    def within(self, name: str, value: float, what: str, tolerance: float | None = None) -> None:
        """Record a difference and refuse one above tolerance (NaN is above)."""
        limit = self.tolerance if tolerance is None else tolerance
        self.found[name] = value
        self.expect(value <= limit, what.format(f"{value:.3g} (tolerance {limit:.2g})"))

    def apart(self, mine: Tensor, theirs: Tensor) -> float:
        """The largest difference, or where rounding flips the choice of experts the typical row's."""
        return distance.typical(mine, theirs) if self.flips else distance.largest(mine, theirs)

    def observe(self) -> tuple[Run, Any, dict[int, Tensor]]:
        """One run of the twin that keeps all query rows, head outputs and the attention modules' own outputs."""
        outputs: dict[int, Tensor] = {}
        run = Run(capture=torch.arange(self.ids.shape[1]), outputs={})
        cache, handles = engine.new_cache(), []
        for index, module in enumerate(engine.attention_modules(self.twin, self.n_layers)):
            handles.append(module.register_forward_hook(partial(trials.keep_output, outputs, index)))
        try:
            self.twin_logits = engine.forward(self.twin, self.ids, run, cache)[0].float()
        finally:
            for handle in handles:
                handle.remove()
        heard = sorted(run.specs)
        self.expect(
            heard == list(range(self.n_layers)),
            f"only layers {heard} of {self.n_layers} called the registered attention function; allowed: classes whose "
            "layers all attend by transformers' AttentionInterface",
        )
        return run, cache, outputs

    def geometry(self, run: Run, cache: Any) -> dict[str, Any]:
        """Sizes and kinds as the attention calls tell them."""
        keys, _ = engine.cached_layers(cache)[0]
        specs = [run.specs[i] for i in range(self.n_layers)]
        self.layers = [
            LayerReport(i, attention_class(self.bridge, i), None, s.window, s.softcap, s.sink is not None)
            for i, s in enumerate(specs)
        ]
        self.expect(
            len({spec.sink is not None for spec in specs}) == 1,
            "some layers have learned sinks and some do not; allowed: all or none",
        )
        return {
            "n_layers": self.n_layers,
            "n_heads": int(run.queries[0].shape[1]),
            "n_kv_heads": int(keys.shape[1]),
            "head_dim": int(keys.shape[-1]),
            "d_model": int(self.twin.config.get_text_config().hidden_size),
            "vocab": int(self.twin.get_input_embeddings().weight.shape[0]),
            "windows": tuple(None if spec.window is None else int(spec.window) for spec in specs),
            "softcaps": tuple(spec.softcap for spec in specs),
            "has_sink": specs[0].sink is not None,
            "scales": tuple(spec.scale for spec in specs),
            "rotary": any(path.split(".")[-1].startswith("rotary_emb") for path, _ in self.twin.named_modules()),
        }

    def windows(self, heard: tuple[int | None, ...]) -> None:
        """Layers that slide told their window: a long one does not show on a short prompt."""
        config = self.twin.config.get_text_config()
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        if kinds:
            silent = [i for i, kind in enumerate(kinds) if kind == "sliding_attention" and window and not heard[i]]
        else:
            unheard = bool(window) and not any(heard) and trials.mask_slides(self.twin, self.ids)
            silent = list(range(self.n_layers)) if unheard else []
        self.expect(
            not silent,
            f"layer(s) {silent} slide over {window} tokens, but their attention call does not say so: a long prompt "
            "would see too much; allowed: classes that pass sliding_window on",
        )

    def logits(self) -> None:
        """Twin and bridge against transformers' own eager logits."""
        self.within("twin_max_diff", self.apart(self.twin_logits, self.reference), "the twin's logits differ by {}")
        bridged = trials.bridge_logits(self.bridge, self.ids)
        self.within("logits_max_diff", self.apart(bridged, self.reference), "TransformerLens' logits differ by {}")

    def projection(self, run: Run, outputs: Mapping[int, Tensor], n_heads: int) -> None:
        """Z W_O + bias is what the attention module returned: W_O is the projection meant in the theory."""
        assert run.outputs is not None
        found, limits = [], []
        for layer, module in enumerate(engine.attention_modules(self.twin, self.n_layers)):
            w_o, bias = engine.output_weights(module, n_heads).float(), engine.output_bias(module)
            mine = torch.einsum("bthd,hdD->btD", run.outputs[layer].float(), w_o)
            found.append(distance.largest(mine if bias is None else mine + bias.float(), outputs[layer]))
            limits.append(distance.tolerance(outputs[layer], self.dtype))
        self.within(
            "output_max_diff",
            distance.worst(found),
            "the output projection is not a plain one: z W_O is off by {}",
            distance.worst(limits),
        )

    def cached(self) -> None:
        """A run in two pieces through the cache equals a run in one, on the twin and on the bridge."""
        cut = self.ids.shape[1] // 2
        pieces = (
            trials.cached_twin(self.twin, self.ids, cut),
            trials.cached_bridge(self.bridge, self.ids, cut),
            trials.given_bridge(self.bridge, self.twin, self.ids, cut),
        )
        self.within(
            "cached_max_diff",
            distance.worst([self.apart(logits, self.reference[cut:]) for logits in pieces]),
            "a cached run differs from an uncached one by {}: " + _cause(versions("transformers")["transformers"]),
        )

    def masked(self, geometry: Mapping[str, Any]) -> None:
        """A score edit bites on every layer of the bridge, and the fast path under the same mask equals it."""
        logits, ignored = trials.bridge_masked(self.bridge, self.ids, geometry)
        self.layers = [LayerReport(**asdict(each) | {"maskable": each.index not in ignored}) for each in self.layers]
        kind = attention_class(self.bridge, ignored[0]) if ignored else ""
        self.expect(
            not ignored,
            f"a score edit does not bite on layer(s) {ignored} ({kind}): TransformerLens' adapter leaves attention to "
            "transformers' own code and drops edits of scores and of patterns; use a model whose bridge computes "
            "attention step by step",
        )
        mine = trials.twin_masked(self.twin, self.ids, geometry)
        self.within("mask_max_diff", self.apart(mine, logits), "under a mask the fast path differs from hooks by {}")

    def rows(self, run: Run, cache: Any) -> None:
        """Attention rows equal TransformerLens' patterns and sum to 1, a learned sink counted."""
        # Half precision rounds a logit of 30 by up to 0.1, and an attention weight with it.
        slack = max(1e-4, 32 * torch.finfo(self.dtype).eps)
        patterns = trials.patterns_of(self.bridge, self.ids, self.n_layers)
        differences, errors = [], []
        for layer, (keys, _) in enumerate(engine.cached_layers(cache)):
            rows, sums = trials.rows(run.queries[layer][0], keys[0], run.specs[layer])
            differences.append(self.apart(rows, patterns[layer][0]))
            errors.append(float((sums - 1).abs().max()))
        where = "attention rows differ from TransformerLens' by {}"
        self.within("pattern_max_diff", distance.worst(differences), where, slack)
        self.within("row_sum_max_error", distance.worst(errors), "attention rows miss a sum of 1 by {}", slack)

    def shared(self) -> int:
        """Every parameter of the twin lies in the bridge's storage."""
        theirs = {parameter.data_ptr() for parameter in self.bridge.original_model.parameters()}
        mine = [parameter.data_ptr() in theirs for parameter in self.twin.parameters()]
        self.expect(all(mine), f"only {sum(mine)} of {len(mine)} parameters are shared with the twin")
        return sum(mine)


def attention_class(bridge: Any, layer: int) -> str:
    """TransformerLens' class for one layer's attention."""
    return type(bridge.blocks[layer].attn).__name__


def _cause(transformers: str) -> str:
    """Why a cached run may differ, and the way out, by the version of transformers installed."""
    release = tuple(int(part) for part in re.findall(r"\d+", transformers)[:2])
    if (5, 9) <= release < (5, 24):
        return (
            "the class computes otherwise in pieces (its rotation depends on the length, for instance), or this pair "
            "of transformers and transformer-lens mistakes the KV cache; allowed: classes whose pieces make the whole"
        )
    return (
        "this pair of transformers and transformer-lens mistakes the KV cache (transformers 5.24 renamed the attention "
        "argument past_key_values); install transformers>=5.9,<5.24"
    )
