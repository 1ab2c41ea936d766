"""Kept sets and scores of a public peer on the embedded model, entry by entry (see tests/goldens/README.md)."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from kvprobe import eviction
from kvprobe.eviction.budgets import Allocation, Budget, Duo, Pyramid
from kvprobe.eviction.scorers import H2O, Streaming

FOLDER = Path(__file__).parents[1] / "goldens"
FIRST = np.load(FOLDER / "kvpress_smollm2.npz")
SECOND = np.load(FOLDER / "kvpress.npz")
LEAST = 0.995
OLD = {"preset": "released"}


@dataclass(frozen=True)
class AllByScore(H2O):
    """ObservedAttention: H2O's normalised sums, without its recent half."""

    name: ClassVar[str] = "all_by_score"

    def protected(self, layer, budgets):
        return torch.zeros(layer.n_sets, layer.n, dtype=torch.bool)


POLICIES = {
    "snapkv_w32_avg5": eviction.policy("snapkv", **OLD),
    "snapkv_w64_avg5": eviction.policy("snapkv", **OLD | {"window": 64}),
    "knorm": eviction.policy("knorm"),
    "tova": eviction.policy("tova"),
    "streaming_llm_s4": eviction.policy("streaming"),
    "observed_attention": eviction.policy(AllByScore(norm="queries_seen")),
    "expected_attention": eviction.policy("expected_attention"),
    "adakv_expected_attention_a0.2_eps1e-2": eviction.policy("expected_attention+adakv", epsilon=1e-2),
    "critical_expected_attention": eviction.policy(
        eviction.SCORERS["expected_attention"](vnorm=False), selector="two_stage"
    ),
    "critical_snapkv_w32": eviction.policy("snapkv+two_stage", **OLD),
    "adakv_snapkv_w32_a0.2": eviction.policy("snapkv+adakv", **OLD),
    "critical_adakv_snapkv_w32_a0.2": eviction.policy("snapkv+adakv+two_stage", **OLD),
}
SETS = [name for name in SECOND.files if "__r" in name]
OLD_SETS = {
    "snapkv_w32_avg5": "snapkv_w32_avg5",
    "knorm": "knorm",
    "adakv_snapkv_a0.2": "adakv_snapkv_w32_a0.2",
    "critical_snapkv": "critical_snapkv_w32",
}


@dataclass(frozen=True)
class Given(Budget):
    """Budgets read off a golden: what is compared is the choice, not how the peer rounds."""

    name: ClassVar[str] = "given"

    counts: torch.Tensor
    floor: int = 0

    def allocate(self, request):
        return Allocation(self.counts, self.floor, {})


def unpacked(packed, n):
    return torch.from_numpy(np.unpackbits(packed, axis=-1)[..., :n].astype(bool))


@pytest.fixture(scope="module")
def measured(smol):
    """Document → what every scorer sees of it, in one prefill."""
    scorers = [*POLICIES.values(), eviction.policy("snapkv", window=8, pool="avg", kernel=5)]
    return cache(lambda document: eviction.measure(smol, SECOND[f"ids__{document}"].tolist(), scorers))


def test_there_are_as_many_as_the_page_says():
    assert len(SETS) == 59 and {name.split("__")[1] for name in SETS} > set(POLICIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD_SETS)
def test_the_first_goldens(name, smol, measured):
    assert FIRST["ids"].tolist() == SECOND["ids__a"].tolist()
    policy = POLICIES[OLD_SETS[name]]
    keep = policy.choose(measured("a").scored(policy), 1 - float(FIRST["compression_ratio"])).keep
    assert (keep == unpacked(FIRST[name], 600)).float().mean() >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SETS if name.split("__")[1] in POLICIES])
def test_kept_sets(name, measured):
    document, method, _ = name.split("__")
    policy = POLICIES[method]
    golden = unpacked(SECOND[name], len(SECOND[f"ids__{document}"]))
    base = int(golden[0].sum()) // 3
    choice = policy.choose(measured(document).scored(policy), None, base)
    assert (choice.keep == golden).float().mean() >= (0.9998 if method != "knorm" else LEAST)
    assert int(choice.keep.sum()) == int(golden.sum())


@pytest.mark.parametrize("name", [name for name in SETS if "pyramid" in name])
def test_pyramid(name, measured):
    """The peer rounds each layer of a real ramp; ours has the exact total of ⌊b⌋ a set: at most two entries apart."""
    document, method, ratio = name.split("__")
    n = len(SECOND[f"ids__{document}"])
    golden = unpacked(SECOND[name], n)
    window = 32 if "w32" in method else 8
    policy = eviction.policy("snapkv+pyramid", window=window, pool="avg", kernel=5)
    scored = measured(document).scored(policy)
    ours = policy.choose(scored, str(round(1 - float(ratio[1:]), 3)))
    assert int((ours.budgets - golden.sum(-1)).abs().max()) <= 2
    assert ours.notes["fallback"] == bool((golden.sum(-1) == golden.sum(-1)[0, 0]).all())
    assert isinstance(policy.budget, Pyramid)
    same = eviction.policy(policy.scorer, budget=Given(golden.sum(-1)))
    assert (same.choose(scored, None, 300).keep == golden).float().mean() >= 0.9998


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SETS if "duo" in name])
def test_duo(name, smol):
    document, method, ratio = name.split("__")
    sinks, recent = (int(part[1:]) for part in method.split("_")[-2:])
    ids = SECOND[f"ids__{document}"].tolist()
    golden = unpacked(SECOND[name], len(ids))
    streaming = int((golden.sum(-1) < len(ids)).sum())
    budget = Duo(gates=torch.from_numpy(SECOND["duo_gates"]), ratio=streaming / 90, sinks=sinks, recent=recent)
    policy = eviction.policy(Streaming(sinks=sinks), budget=budget)
    assert streaming == round(90 * float(ratio[1:]))
    assert torch.equal(policy.select(smol, ids, 0.5), golden)


@pytest.mark.parametrize("name", [name for name in SECOND.files if name.startswith("score__")])
def test_scores(name, measured):
    """1e-5 of each score, except that protected entries hold a fill value there."""
    _, document, method = name.split("__")
    policies = POLICIES | {
        "snapkv_w8_avg5": eviction.policy("snapkv", window=8, pool="avg", kernel=5),
        "expected_attention_eps1e-2": POLICIES["adakv_expected_attention_a0.2_eps1e-2"],
        "expected_attention_novnorm": POLICIES["critical_expected_attention"],
    }
    for golden, layer in zip(SECOND[name], SECOND["score_layers"], strict=True):
        mine = measured(document).scored(policies[method])[layer].scores
        golden = torch.from_numpy(golden)
        free = golden < golden.max() if method not in ("knorm", "observed_attention") else torch.ones_like(golden) > 0
        assert_close(mine[free], golden[free], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("document", ["a", "b"])
def test_value_norms(document, measured):
    scored = measured(document).scored(POLICIES["critical_snapkv_w32"])
    for golden, layer in zip(SECOND[f"value_norm__{document}"], SECOND["score_layers"], strict=True):
        assert_close(scored[layer].norms(1), torch.from_numpy(golden), rtol=1e-5, atol=0)
