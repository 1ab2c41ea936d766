"""fp16 and bf16 models: what kvprobe tells of them errs at most twice as much as transformers itself does.

The truth is the same weights, already rounded, run in float64. Whatever is measured, logits rows and masses are fp32 or
more: a 16-bit pattern has lost its small remainders before anything is made of it.
"""

from functools import cache

import catalogue
import numpy as np
import pytest
import torch
from oracles import Plain, bias_table

from kvprobe import intervene, observe
from kvprobe import models as kvmodels
from kvprobe.errors import PromptError
from kvprobe.interventions import KVMask
from kvprobe.prompts import Prompt
from kvprobe.spans import span_stats

FAMILIES = ("gpt2", "llama", "mistral", "gemma2")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IDS, N = catalogue.ids(0), catalogue.N
PROMPT = Prompt.from_ids(IDS)
SPANS = [(0, 1), (3, 6), (22, 25)]
every = pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in DTYPES])


@pytest.fixture(scope="module")
def low(tiny_folder, tmp_path_factory):
    """(family, dtype) → kvprobe's model, transformers' own in that dtype, and the same rounded weights in float64."""

    def make(family, name):
        rounded = Plain(tiny_folder(family), DTYPES[name])
        folder = tmp_path_factory.mktemp("rounded") / family
        rounded.hf.save_pretrained(folder)
        for part in tiny_folder(family).glob("tokenizer*"):
            (folder / part.name).write_bytes(part.read_bytes())
        return kvmodels.load(folder, dtype=DTYPES[name]), rounded, Plain(folder, torch.float64)

    return cache(make)


def error(mine, truth):
    """Root mean square and largest difference."""
    difference = (mine.detach().double() - truth).abs()
    return float(difference.square().mean().sqrt()), float(difference.max())


def at_most_twice(mine, theirs, truth, what):
    """Twice the error of transformers: on average (what rounding has), and for the worst cell of all (with luck, 3)."""
    (mean, worst), (their_mean, their_worst) = error(mine, truth), error(theirs, truth)
    assert mean <= 2 * their_mean and worst <= 3 * their_worst, (what, mean, their_mean, worst, their_worst)


@every
def test_logits_and_attention_masses(family, name, low):
    model, rounded, truth = low(family, name)
    reference, theirs = truth(IDS), rounded(IDS)
    out = intervene(model, PROMPT, [()], suffix=N)[0]
    at_most_twice(out.logits, theirs.logits, reference.logits, "logits")
    trace = observe(model, PROMPT, slice(None))
    rows = torch.stack([view.attention for view in trace.layers()])
    assert rows.dtype == torch.float32 and all(view.logits.dtype == torch.float32 for view in trace.layers())
    at_most_twice(rows, theirs.attention, reference.attention, "attention")
    assert float((rows.double().sum(-1) - 1).abs().max()) < 1e-6  # transformers' own 16-bit rows miss it by 1e-3


def masses(attention, span):
    return attention[..., slice(*span)].double().sum(-1)


@every
def test_span_statistics(family, name, low):
    """Masses against transformers' pattern; θ and L against the same formulas on 16-bit patterns and values."""
    model, rounded, truth = low(family, name)
    queries = [12, 20, N - 1]
    frame = span_stats(observe(model, PROMPT, queries), SPANS)
    exact, naive = (slow_stats(plain, queries) for plain in (truth, rounded))
    for column in ("mass", "bound", "perturbation"):
        mine = torch.tensor(frame[column].to_numpy())
        at_most_twice(mine, naive[column], exact[column], column)


def slow_stats(plain, queries):
    """By definition, in float64 from whatever the model itself computed: rows, values and projection."""
    answer = plain(IDS)
    with torch.no_grad():
        cache_ = plain.hf(input_ids=torch.tensor([IDS]), use_cache=True, past_key_values=_whole()).past_key_values
    found = {"mass": [], "bound": [], "perturbation": []}
    for layer, module in enumerate(plain._modules()):
        weight = module.c_proj.weight if hasattr(module, "c_proj") else module.o_proj.weight.T
        values = cache_.layers[layer].values[0].double()
        for head in range(6):
            projected = values[head // (6 // values.shape[0])] @ weight.detach().double()[head * 8 : head * 8 + 8]
            norms = projected.abs().sum(-1)
            for query in queries:
                a = answer.attention[layer][head, query].double()
                for span in SPANS:
                    gone = torch.zeros(N, dtype=torch.bool)
                    gone[slice(*span)] = True
                    gone &= a > 0
                    mass, kept = a[gone].sum(), a[~gone].sum()
                    found["mass"].append(mass)
                    found["bound"].append((a * norms)[gone].sum() + mass / kept * (a * norms)[~gone].sum())
                    shift = (torch.where(gone, 0.0, a) / kept - a) @ projected
                    found["perturbation"].append(shift.abs().sum())
    return {column: torch.stack(cells) for column, cells in found.items()}


def _whole():
    from transformers import DynamicCache

    return DynamicCache()


@every
def test_masked_logits_and_retained_mass(family, name, low):
    model, rounded, truth = low(family, name)
    cut = [(KVMask((3, 6)), (3, 6)), (KVMask((20, 23), queries="after"), (20, 23))]
    for mask, span in cut:
        table = bias_table([catalogue.mask(span, queries=mask.queries)[1]], N, n=N, suffix=8, n_layers=3, n_heads=6)
        out = intervene(model, PROMPT, mask, suffix=8)
        theirs, reference = rounded(IDS, table), truth(IDS, table.double())
        at_most_twice(out.logits, theirs.logits[-8:], reference.logits[-8:], mask)
        assert out.receipt.masked_weight == 0
        # R of the run's own unmasked row, by definition on the float64 truth; on transformers' own 16-bit rows.
        exact, naive = (retained(plain, table, span) for plain in (truth, rounded))
        mine = out.receipt.retained[:, :, -3:]
        at_most_twice(mine, naive[..., -3:], exact[..., -3:], "retained")


def retained(plain, table, span):
    """[L, H, n]: layer by layer, the row under the masks of all earlier layers and without its own."""
    rows = []
    for layer in range(3):
        earlier = table.clone()
        earlier[layer:] = 0
        attention = plain(IDS, earlier.to(torch.float64)).attention[layer].double()
        rows.append(attention.sum(-1) - masses(attention, span))
    return torch.stack(rows)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("family", ["mistral", "llama", "gpt2"])
def test_lengths_at_the_edges(family, name, low):
    """One token, the window, one more, the context limit; one beyond it is refused in one line."""
    model, rounded, truth = low(family, name)
    limit = model.max_length
    for n in (1, 2, 5, 6, limit):
        ids = (IDS * (limit // N + 1))[:n]
        out = intervene(model, Prompt.from_ids(ids), [()], suffix=min(n, 4))[0]
        rows = min(n, 4)
        if n <= 6:
            at_most_twice(out.logits, rounded(ids).logits[-rows:], truth(ids).logits[-rows:], n)
        assert bool(out.logits.isfinite().all())
        frame = span_stats(observe(model, Prompt.from_ids(ids)), [(0, 1)])
        assert not frame["mass"].isna().any()
        own = frame["mass"].to_numpy()[frame["visible"].to_numpy()]
        assert n > 1 or np.all(own == 1.0)
    with pytest.raises(PromptError, match=f"^{limit + 1} tokens do not fit the model's context of {limit}$"):
        observe(model, Prompt.from_ids((IDS * 100)[: limit + 1]))
    with pytest.raises(PromptError, match=f"do not fit the model's context of {limit}"):
        intervene(model, Prompt.from_ids((IDS * 100)[:limit]), KVMask((0, 1)), suffix=2, generate=1)


@pytest.mark.parametrize("name", DTYPES)
def test_a_whole_window_masked_in_half_precision(name, low):
    """The row is silenced, on window layers only, without a NaN and without a look at later tokens."""
    model, _, _ = low("mistral", name)
    changed = Prompt.from_ids([*IDS[:22], *catalogue.ids(5)[22:]])
    mask = KVMask((16, 21), queries=[20], on_empty="zero")
    one, two = (intervene(model, prompt, mask, suffix=8) for prompt in (PROMPT, changed))
    assert {(layer, query) for layer, _, query in one.receipt.silenced} == {(layer, 20) for layer in range(3)}
    assert bool(one.logits.isfinite().all()) and torch.equal(one.logits[:4], two.logits[:4])
    assert bool((one.receipt.retained[..., one.receipt.retained.shape[-1] - 6] == 0).all())
