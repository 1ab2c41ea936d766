"""A million random (logits, values, mask) triples: is θ ≥ θ_c ≥ L within the rounding that the dtype allows?

``make stress`` prints a line a batch of shapes, a table by dtype and kind, and one JSON object on the last line:
``n`` triples, ``violations`` of an inequality, ``nan`` numbers that are not finite, ``undone`` the worst error of a
corrected row. Exit status 1 if anything is violated, not finite, or not undone to 1e-6.

What is stored has the dtype of the case (fp16, bf16, fp32, fp64): logits, values, projection. What is computed from it
is fp32, and fp64 for fp64, by the functions of :mod:`kvprobe.theory` as users call them; the oracle is a softmax in
float64 of the same stored numbers, and L as the norm of a difference of outputs that are centred on the survivors.

The slack, by the standard model of floating point (Higham, *Accuracy and Stability of Numerical Algorithms*, ch. 3),
with u = 2⁻²⁴ for rows in fp32 and 2⁻⁵³ in fp64:

* a weight e^{s − max}: u·|s − max| of the difference, two ulp of exp; a total of n + 1 positive terms and a quotient:
  every A_i is right within α = (2G + n + 10) u, G = the largest |s − max| that does not underflow;
* sums over S and over the kept keys, their products and the quotient a_S / R: within 3α + (3n + 8) u;
* a norm ‖x W_O‖₁ is right within (d + D) u of ‖|x| |W_O|‖₁; ‖x W_O‖₂ = √(x G xᵀ), formed in fp64, within
  u + √((D + 2d + 4) 2⁻⁵³) of ‖|x| |W_O|‖₂;
* what underflows is lost: ω = 2⁻¹²⁵ (2⁻¹⁰²¹) a key and a product, which counts n·ω / R where R itself is that small.

All of θ, θ_c and L are at most Θ = Σ_S A_i N_i + (a_S / R) Σ_kept A_i N_i, N_i = ‖|V_i| |W_O|‖_p, and so is what an
error is relative to: each may be off by ρΘ, ρ = 3α + (3n + d + D + 12) u + the norm's + underflow, and an inequality of
two of them by 2ρΘ. Nothing here is fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from multiprocessing import get_context

import torch
from random_triples import Case, Triples, batches
from torch import Tensor

from kvprobe import theory

UNDONE = 1e-6


@dataclass(frozen=True)
class Tally:
    """What a batch showed; ``used`` is the largest share of its slack that an inequality used."""

    n: int
    violations: int
    nan: int
    undone: float
    used: float

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.n + other.n,
            self.violations + other.violations,
            self.nan + other.nan,
            max(self.undone, other.undone),
            max(self.used, other.used),
        )


NOTHING = Tally(0, 0, 0, 0.0, 0.0)


def examine(case: Case, given: Triples) -> Tally:
    """Bounds as users compute them, of every head and of the layer, against the float64 oracle."""
    rows, sink = given.logits, None if given.sink is None else given.sink.to(given.logits.dtype)
    A, mass = theory.attention(rows, sink)
    V, W_O, keep = given.V[:, torch.arange(case.heads[0]) // (case.heads[0] // case.heads[1])], given.W_O, given.keep
    L = theory.perturbation(A, V, W_O, keep, case.p, mass)
    centred = theory.centred_bound(A, V, W_O, keep, case.p, mass)
    m = theory.value_norms(V, W_O, case.p)
    theta = theory.bound(A, m, keep, mass)
    exact, whole, size, largest = oracle(given, V, case.p)
    slack = slack_of(case, given, theory.retained(A, keep, mass), size, largest)
    excess = torch.stack([exact - centred, centred - theta, (exact - L).abs()])
    layer = theory.layer_perturbation(A, given.V, W_O, keep, case.p, mass)
    of_layer = torch.stack([whole - theory.layer_bound(A, m, keep, mass), (whole - layer).abs()])
    used = torch.cat([_share(excess, slack).flatten(), _share(of_layer, slack.sum(-1)).flatten()])
    undone, rest = undo(A, mass, given, sink)
    nan = sum(int((~x.isfinite()).sum()) for x in (A, L, centred, theta, layer, rest))
    return Tally(exact.numel(), int((~(used <= 1)).sum()), nan, undone, float(used.nan_to_num().max()))


def _share(excess: Tensor, slack: Tensor) -> Tensor:
    """Of twice the slack, what an inequality that is broken uses; 0 where it holds as it stands."""
    return torch.where(excess <= 0, 0.0, excess / (2 * slack))


def undo(A: Tensor, mass: Tensor | None, given: Triples, sink: Tensor | None) -> tuple[float, Tensor]:
    """The worst |Ã′ − N ⊙ A|, for a row that was renormalised and for one whose logits were masked."""
    R = theory.retained(A, given.keep, mass)
    renormalised = theory.renormalise(A, given.keep, mass)
    masked, _ = theory.attention(torch.where(given.keep, given.logits, -torch.inf), sink)
    errors = [float((theory.correct(row, R) - A * given.keep).abs().max()) for row in (renormalised, masked)]
    return max(errors), torch.cat([renormalised, masked])


def oracle(given: Triples, V: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, from the stored numbers: L ``[B, H]``, L of the layer ``[B]``, Θ, and the largest N."""
    rows = given.logits.double()
    whole = rows if given.sink is None else torch.cat([rows, given.sink.double().unsqueeze(-1)], -1)
    weights = (whole - whole.amax(-1, keepdim=True)).softmax(-1)
    A, kept = weights[..., : rows.shape[-1]], torch.where(given.keep, whole[..., : rows.shape[-1]], -torch.inf)
    whole = kept if given.sink is None else torch.cat([kept, given.sink.double().unsqueeze(-1)], -1)
    after = whole.softmax(-1)[..., : rows.shape[-1]]  # a softmax of the masked logits: no quotient by R
    values, W = V.double(), given.W_O.double()
    centre = (after.unsqueeze(-2) @ values).squeeze(-2)
    evicted = A * ~given.keep
    shift = evicted.sum(-1, keepdim=True) * centre - (evicted.unsqueeze(-2) @ values).squeeze(-2)
    moved = (shift.unsqueeze(-2) @ W).squeeze(-2)
    L, layer = (torch.linalg.vector_norm(x, p, dim=-1) for x in (moved, moved.sum(-2)))
    N = torch.linalg.vector_norm(values.abs() @ W.abs(), p, dim=-1)
    return L, layer, (evicted * N).sum(-1) + evicted.sum(-1) * (after * N).sum(-1), N.amax(-1)


def slack_of(case: Case, given: Triples, R: Tensor, size: Tensor, largest: Tensor) -> Tensor:
    """What one of θ, θ_c and L may be off by, ``[B, H]``: the derivation is in the docstring of this file."""
    top = given.logits.amax(-1) if given.sink is None else torch.maximum(given.logits.amax(-1), given.sink)
    depth = (top.unsqueeze(-1) - given.logits).amax(-1).double()
    lost = 2.0**-1021 if given.logits.dtype == torch.float64 else 2.0**-125
    rho = relative_slack(case.n, case.width, depth, case.p, given.logits.dtype) + 6 * case.n * lost / R.double()
    return rho * size + 8 * case.n * lost * largest


def relative_slack(n: int, width: tuple[int, int], depth: Tensor, p: int, dtype: torch.dtype) -> Tensor:
    """ρ without what underflows, for logits that lie up to ``depth`` below the largest."""
    (d, D), double = width, dtype == torch.float64
    u, deepest = (2.0**-53, 745.0) if double else (2.0**-24, 104.0)
    alpha = (2 * depth.clamp(max=deepest) + n + 10) * u
    norm = (d + D) * u if p == 1 else u + ((D + 2 * d + 4) * 2.0**-53) ** 0.5
    return 3 * alpha + (3 * n + d + D + 12) * u + norm


def labels(case: Case) -> list[tuple[str, str]]:
    """The lines of the table that a case counts in."""
    kinds = [f"logits {case.logits}", f"mask {case.mask}", f"values {case.values}", f"p = {case.p}"]
    kinds += [f"heads {case.heads[0]}/{case.heads[1]}", *(["learned sink"] * case.sink)]
    return [(str(case.dtype).removeprefix("torch."), kind) for kind in ("all", *kinds)]


def work(job: tuple[int, int, int]) -> dict[tuple[str, str], Tally]:
    """One worker's share: tallies by dtype and kind."""
    n, seed, largest = job
    torch.set_num_threads(1)
    found: dict[tuple[str, str], Tally] = {}
    for case, given in batches(n, seed, largest):
        tally = examine(case, given)
        for label in labels(case):
            found[label] = found.get(label, NOTHING) + tally
    return found


def run(n: int, seed: int = 0, workers: int = 1, say=print) -> dict[str, float]:
    """All shares, the table, and the summary."""
    shares, largest = max(1, min(50, n // 10_000)), 100_000
    jobs = [(n // shares + (i < n % shares), seed + i, largest) for i in range(shares)]
    started, found = time.perf_counter(), {}
    with get_context("spawn").Pool(workers) if workers > 1 else _alone() as pool:
        for done, share in enumerate(pool.imap(work, jobs), 1):
            for label, tally in share.items():
                found[label] = found.get(label, NOTHING) + tally
            say(f"{sum(job[0] for job in jobs[:done]):>9,} triples, {time.perf_counter() - started:.0f} s")
    total = sum((tally for (_, kind), tally in found.items() if kind == "all"), NOTHING)
    for line in table(found):
        say(line)
    return {field.name: getattr(total, field.name) for field in fields(total)}


class _alone:
    """A pool of one worker that is this process."""

    imap = staticmethod(map)

    def __enter__(self) -> _alone:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


def table(found: dict[tuple[str, str], Tally]) -> Iterator[str]:
    for dtype in (torch.float32, torch.float64):
        small, large = (relative_slack(n, (16, 16), torch.tensor(g), 1, dtype) for n, g in ((16, 8.0), (300, 104.0)))
        yield f"slack of {dtype} rows: {small:.1e} of Θ at 16 keys and |s - max| <= 8, {large:.1e} at 300 and 104"
    yield f"{'dtype':<9} {'kind':<15} {'n':>9} {'violations':>10} {'nan':>5} {'slack used':>10} {'undone':>8}"
    for (dtype, kind), at in sorted(found.items()):
        numbers = f"{at.n:>9,} {at.violations:>10} {at.nan:>5} {at.used:>10.2g} {at.undone:>8.1e}"
        yield f"{dtype:<9} {kind:<15} {numbers}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000, help="triples (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default 2)")
    asked = parser.parse_args(words)
    summary = run(asked.n, asked.seed, asked.workers)
    print(json.dumps(summary))
    return int(bool(summary["violations"] or summary["nan"] or summary["undone"] > UNDONE))


if __name__ == "__main__":
    sys.exit(main())
