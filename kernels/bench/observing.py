"""Prefill, span statistics and memory of an observation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from ablation import Setting
from timing import in_turn

import kvprobe as kp
from kvprobe.records import peak_rss_mib

LONG = 8192


def run(model: Any) -> tuple[dict[str, float], dict[str, float]]:
    """``prefill_over_hf`` and ``span_stats_over_prefill`` with the seconds behind them."""
    setting = Setting(model)

    def theirs() -> None:
        model.twin.set_attn_implementation("sdpa")
        setting.prefill()
        model.twin.set_attn_implementation("kvprobe")

    def ours() -> Any:
        return kp.prefill(model, setting.prompt, setting.start)

    mine, hf, prefill_ratio = in_turn(ours, theirs, 5)
    trace = kp.observe(model, setting.prompt)
    _gate(trace)
    spans, _, span_ratio = in_turn(lambda: kp.spans.all_spans(trace, 20), ours, 5)
    ratios = {"prefill_over_hf": prefill_ratio, "span_stats_over_prefill": span_ratio}
    return ratios, {"prefill_s": mine, "hf_prefill_s": hf, "all_spans_s": spans}


def _gate(trace: Any) -> None:
    """The sweep over all spans equals the span-by-span statistics."""
    chosen = [(0, 20), (1, 21), (700, 720), (trace.n - 20, trace.n)]
    every = kp.spans.all_spans(trace, 20)
    table = kp.span_stats(trace, chosen, centred=False)
    for name in ("mass", "value_mass", "bound", "perturbation"):
        reference = torch.tensor(table[name].to_numpy()).view(trace.n_layers, trace.n_heads, 1, len(chosen))
        fast = torch.as_tensor(getattr(every, name))[..., [start for start, _ in chosen]].double()
        slack = 1e-4 * (reference.abs() + 1e-3 * reference.abs().max())
        worst = float(((fast - reference).abs() / slack).max())
        assert worst <= 1, f"all_spans: {name} off by {worst:.2g} times the tolerance"


def memory() -> tuple[dict[str, float], dict[str, float]]:
    """``peak_over_hf``: an 8K-token observation and transformers' own SDPA forward, each in a process of its own."""
    peaks = {who: _child(who) for who in ("ours", "hf")}
    assert abs(peaks["ours"]["top"] - peaks["hf"]["top"]) <= 5e-3, "the two processes do not predict the same"
    ratio = peaks["ours"]["peak_mib"] / peaks["hf"]["peak_mib"]
    return {"peak_over_hf": ratio}, {f"{who}_peak_mib": found["peak_mib"] for who, found in peaks.items()}


def _child(who: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, who], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _ids(vocab: int) -> torch.Tensor:
    return torch.randint(3, vocab, (LONG,), generator=torch.Generator().manual_seed(0))


def _ours() -> float:
    model = kp.load()
    ids = _ids(model.geometry.vocab)
    trace = kp.observe(model, kp.Prompt.from_ids(ids))
    for view in trace.layers():
        assert view.attention.shape[-1] == LONG
    return float(kp.prefill(model, kp.Prompt.from_ids(ids[:64])).next_logits.max())


def _hf() -> float:
    from transformers import AutoModelForCausalLM

    from kvprobe import embedded

    model = AutoModelForCausalLM.from_pretrained(str(embedded.ensure()), attn_implementation="sdpa")
    ids = _ids(model.config.vocab_size)[None]
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
        return float(model(ids[:, :64], logits_to_keep=1).logits.max())


if __name__ == "__main__":
    top = _ours() if sys.argv[1] == "ours" else _hf()
    print(json.dumps({"peak_mib": peak_rss_mib(), "top": top}))
