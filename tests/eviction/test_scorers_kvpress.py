"""Scores of the embedded model against those that kvpress 0.5.5 computed (tests/goldens/README.md)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe import engine
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import H2O, TOVA, ExpectedAttention, Knorm, SnapKV
from kvprobe.rotary import Rotary

GOLDENS = Path(__file__).parents[1] / "goldens" / "kvpress.npz"
SCORERS = {
    "knorm": Knorm(),
    "tova": TOVA(),
    "snapkv_w32_avg5": SnapKV(pool="avg", kernel=5),
    "snapkv_w64_avg5": SnapKV(window=64, pool="avg", kernel=5),
    "observed_attention": H2O(norm="queries_seen"),
    "expected_attention": ExpectedAttention(),
    "expected_attention_eps1e-2": ExpectedAttention(epsilon=1e-2),
    "expected_attention_novnorm": ExpectedAttention(vnorm=False),
}
UNPROTECTED = {"knorm": True, "observed_attention": True}
"""Nothing holds a fill value there (what kvprobe's H2O protects, kvpress scores)."""


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as file:
        return {
            name: torch.from_numpy(file[name].astype(np.int64 if "ids" in name else np.float32))
            for name in file.files
            if name.startswith(("ids", "score_"))
        }


@pytest.fixture(scope="module")
def layers(smol, goldens):
    """Document → the layers that scores were stored for, every query row kept."""
    rotary, cache = Rotary.of(smol), {}

    def get(document):
        if document not in cache:
            ids = goldens[f"ids__{document}"]
            n, seen = len(ids), {}

            def observe(index, query, key, value, spec):
                if index in goldens["score_layers"].tolist():
                    at = torch.arange(n).expand(key.shape[1], -1)
                    seen[index] = Layer(
                        index, 30, key[0], value[0], smol.w_o(index), query[0], spec, at, n, rotary=rotary
                    )

            engine.prefill(smol.twin, ids, observer=observe)
            cache[document] = [seen[index] for index in goldens["score_layers"].int().tolist()]
        return cache[document]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("document", ["a", "b"])
@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_kvpress(layers, goldens, document, name):
    scorer = SCORERS[name]
    for layer, stored in zip(layers(document), goldens[f"score__{document}__{name}"], strict=True):
        ours = layer.per_set(scorer.score(layer))
        free = torch.ones_like(ours, dtype=torch.bool)
        if name not in UNPROTECTED:
            free = ~scorer.protected(layer, torch.full((layer.n_sets,), 64))
        error = ((ours - stored).abs() / stored.abs())[free].max()
        assert float(error) < 5e-5, f"layer {layer.index}: relative error {float(error):.1e}"
        filled = stored[~free]
        assert torch.equal(filled, filled.max().expand_as(filled)) if len(filled) else True
