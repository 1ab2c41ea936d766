"""Triton kernels on a CUDA GPU: right first, then timed. ``python kernels/bench/gpu_check.py FOLDER``.

A wrong result ends the run with status 1 before anything is timed. Sizes are Llama-3.1-8B's layer, bfloat16. Times are
medians between CUDA events; the JSON holds the machine and the versions with them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprobe_kernels import projected_norm, two_stage_select, window_scores

HEADS, KV_HEADS, WIDTH, MODEL, WINDOW = 32, 8, 128, 4096, 32
LENGTHS = (4096, 32768, 131072)
ODD = ((1, 64, 33), (123, 80, 576), (507, 128, 4096), (255, 256, 1000))


def main(folder: str) -> int:
    """Check, time, write ``gpu_check.json``; 0 right, 1 wrong, 2 no GPU."""
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA GPU here, nothing was checked or timed")
        return 2
    torch.manual_seed(0)
    wrong = [line for check in (check_norm, check_select, check_window) for line in check()]
    if wrong:
        print("\n".join(wrong))
        return 1
    print("correct: projected_norm, two_stage_select, window_scores; timing")
    rows = [row for n in LENGTHS for measure in (time_norm, time_select, time_window) for row in measure(n)]
    for row in rows:
        print("{op:18s} {contender:16s} n {n:7d}  {ms:9.4f} ms  peak {peak_mib:9.1f} MiB".format(**row))
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "gpu_check.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A standard normal tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def check_norm() -> list[str]:
    """Every dtype, norm, group, centre and layout against the float64 loop."""
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n, d, D in ODD:
            V, weight, centre = draw(2, 2, n, d, dtype=dtype), draw(D, 4 * d, dtype=dtype), draw(2, 4, D)
            for W_O in (weight.view(D, 4, d).permute(1, 2, 0), weight.T.contiguous().view(4, d, D)):
                for p, group, c in ((1, "mean", None), (1, "none", centre), (2, "none", None), (2, "mean", centre)):
                    found = projected_norm(V, W_O, p, group, centre=c, backend="triton")
                    truth = projected_norm(V.double(), W_O.double(), p, group, centre=c, backend="reference")
                    off = float(((found - truth).abs() / truth).max())
                    # float32 accumulation of exact products; relative, since no norm here is small. NaN fails as well.
                    if not off <= 1e-5:
                        wrong.append(f"projected_norm {dtype} n={n} d={d} D={D} p={p} {group}: off by {off:.3g}")
    return wrong


def check_select() -> list[str]:
    """The same sets, bit for bit, ties included."""
    wrong = []
    for n in (1, 255, 4096, 5001):
        scores = (torch.rand(3, 4, n, device="cuda") * 50).round() / 50
        norms, protected = torch.rand(3, 4, n, device="cuda"), torch.arange(n, device="cuda") >= n - min(n, 8)
        for budget in {min(n, 8), max(min(n, 8), n // 2), n}:
            for m, marked in ((norms, None), (norms, protected), (None, protected)):
                found, truth = (
                    two_stage_select(scores, m, budget, 0.5, protected=marked, backend=backend)
                    for backend in ("triton", "reference")
                )
                if not torch.equal(found.cpu(), truth.cpu()):
                    wrong.append(
                        f"two_stage_select n={n} budget={budget}: {int((found != truth).sum())} entries differ"
                    )
    return wrong


def check_window() -> list[str]:
    """Every dtype, pooling and reduction against the float64 loop, with and without dead keys."""
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n, w, d in ((33, 32, 64), (507, 32, 80), (3000, 8, 128)):
            Q, K = draw(2, 4, w, d, dtype=dtype), draw(2, 2, n, d, dtype=dtype)
            dead = torch.rand(2, 2, n, device="cuda") > 0.3
            for pool, group, alive in (("avg", "mean", None), ("max", "max", dead), ("none", "none", dead)):
                found, truth = (
                    window_scores(q, k, pool, 5, group, alive=alive, backend=backend)
                    for q, k, backend in ((Q, K, "triton"), (Q.double(), K.double(), "reference"))
                )
                off = float((found - truth).abs().max() / truth.max())
                if not off <= 1e-4:
                    wrong.append(f"window_scores {dtype} n={n} w={w} d={d} {pool} {group}: off by {off:.3g}")
    return wrong


def time_norm(n: int) -> list[dict[str, Any]]:
    """Against a product of the same FLOPs, without any norm, and the unfused loop."""
    V, W_O = draw(KV_HEADS, n, WIDTH), draw(HEADS, WIDTH, MODEL)
    G = HEADS // KV_HEADS
    flat = W_O.view(KV_HEADS, G, WIDTH, MODEL)
    into = torch.empty(n, MODEL, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for h in range(HEADS):
            torch.mm(V[h // G], W_O[h], out=into)

    def loop() -> Tensor:
        norms = [(V[h // G] @ W_O[h]).norm(p=1, dim=-1) for h in range(HEADS)]
        return torch.stack(norms).unflatten(0, flat.shape[:2]).mean(1)

    contenders = {"triton": lambda: projected_norm(V, W_O, backend="triton")}
    contenders |= {"triton p=2": lambda: projected_norm(V, W_O, 2, backend="triton")}
    contenders |= {"torch": lambda: projected_norm(V, W_O), "products alone": products, "unfused loop": loop}
    flops = 2.0 * HEADS * n * WIDTH * MODEL
    return [timed("projected_norm", name, n, work) | {"flops": flops} for name, work in contenders.items()]


def time_select(n: int) -> list[dict[str, Any]]:
    """Against two calls of ``torch.topk``, which is neither stable nor two-stage."""
    scores, norms = torch.rand(2, KV_HEADS, n, device="cuda").unbind(0)
    budget = n // 5
    contenders: dict[str, Callable[[], object]] = {
        "triton": lambda: two_stage_select(scores, norms, budget, backend="triton"),
        "torch": lambda: two_stage_select(scores, norms, budget),
        "2 x topk": lambda: (scores.topk(budget // 2), (scores * norms).topk(budget - budget // 2)),
    }
    return [timed("two_stage_select", name, n, work) for name, work in contenders.items()]


def time_window(n: int) -> list[dict[str, Any]]:
    """Against the product of its logits alone, and the plain softmax over repeated keys."""
    Q, K = draw(HEADS, WINDOW, WIDTH), draw(KV_HEADS, n, WIDTH)
    grouped = Q.view(KV_HEADS, -1, WIDTH)

    def plain() -> Tensor:
        logits = Q @ K.repeat_interleave(HEADS // KV_HEADS, 0).mT * WIDTH**-0.5
        return logits.float().softmax(-1)[..., :-WINDOW].mean(-2)

    contenders: dict[str, Callable[[], object]] = {
        "triton": lambda: window_scores(Q, K, backend="triton"),
        "torch": lambda: window_scores(Q, K),
        "logits alone": lambda: torch.bmm(grouped, K.mT),
        "plain softmax": plain,
    }
    return [timed("window_scores", name, n, work) for name, work in contenders.items()]


def timed(op: str, contender: str, n: int, work: Callable[[], object]) -> dict[str, Any]:
    """Median milliseconds between CUDA events, and peak memory above what was there before."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(10):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"op": op, "contender": contender, "n": n, "ms": statistics.median(times), "peak_mib": peak}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "out/gpu"))
