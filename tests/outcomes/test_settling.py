"""Settling of an arm: plain transformers' hidden states, a lens by hand in float64, and scipy's divergence."""

import math

import catalogue
import pytest
import torch
from catalogue import ARMS, CONTINUED, SUFFIX
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import Peak
from plain_lens import lens_by_hand
from plain_streams import plain_streams
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr
from tiny import FAMILIES
from torch.testing import assert_close

from kvprobe import Prompt, intervene
from kvprobe.errors import InterventionError, TheoryError
from kvprobe.outcomes import Lens, jensen_shannon, lens_logits, settle, settling_depth
from kvprobe.outcomes.settling import _divergences
from kvprobe.streams import Streams

families = pytest.mark.parametrize("family", FAMILIES)
NAMES = ("clean", "in the prefix", "across the border", "heads by layer", "two masks that overlap")
PROMPT = Prompt.from_ids(catalogue.ids())
K = len(CONTINUED) + 1


@pytest.fixture(scope="module")
def outcomes(tiny):
    done = {}

    def run(family):
        if family not in done:
            arms = [catalogue.arm(name) for name in NAMES]
            options = {"suffix": SUFFIX, "continuation": CONTINUED, "streams": K, "logits": "continuation"}
            done[family] = dict(zip(NAMES, intervene(tiny(family), PROMPT, arms, **options), strict=True))
        return done[family]

    return run


def divergence_by_hand(logits, final):
    """[L, T] bits in float64, from logits [L, T, V] and [T, V], a pair of rows at a time."""
    p, q = logits.double().softmax(-1).numpy(), final.double().softmax(-1).numpy()
    rows = [[bits_by_hand(a, b) for a, b in zip(layer, q, strict=True)] for layer in p]
    return torch.tensor(rows, dtype=torch.float64)


def bits_by_hand(p, q):
    """Scipy's distance is the root of this, and NaN where rounding leaves a negative sum."""
    m = (p + q) / 2
    return float(rel_entr(p, m).sum() + rel_entr(q, m).sum()) / (2 * math.log(2))


def by_logaddexp(logits, final):
    """The formula as it is written: ½ KL(p ‖ m) + ½ KL(q ‖ m) in bits, ln m by logaddexp, fp32."""
    a, b = logits.log_softmax(-1), final.log_softmax(-1)
    mixed = torch.logaddexp(a, b) - math.log(2)
    return ((a.exp() * (a - mixed)).sum(-1) + (b.exp() * (b - mixed)).sum(-1)) / (2 * math.log(2))


@families
@pytest.mark.parametrize("name", NAMES)
def test_divergences_are_those_of_plain_transformers(family, name, outcomes, plain, tiny):
    table = catalogue.table(name) if ARMS[name] else None
    _, resid = plain_streams(plain(family), [*PROMPT.ids.tolist(), *CONTINUED], table)
    logits = lens_by_hand(family, plain(family).hf, resid[:, -K:]).detach()
    expected = divergence_by_hand(logits, logits[-1])
    found = settle(tiny(family), outcomes(family)[name])
    assert found.divergence.shape == (3, K) and found.depth.shape == (K,)
    assert_close(found.divergence.double(), expected, atol=1e-4, rtol=1e-3)
    assert bool((found.divergence[-1] == 0).all())
    one, other = (row.softmax(-1).numpy() for row in (logits[0, 1], logits[-1, 1]))
    assert float(found.divergence[0, 1]) == pytest.approx(jensenshannon(one, other, base=2) ** 2, rel=1e-3, abs=1e-4)
    clear = (expected - 0.5).abs().amin(0) > 1e-3
    for rule in ("first", "stays"):
        depth = settle(tiny(family), outcomes(family)[name], rule=rule).depth
        assert depth[clear].tolist() == settling_depth(expected, 0.5, rule)[clear].tolist()


@families
def test_rows_streams_and_thresholds(family, outcomes, tiny):
    model, out = tiny(family), outcomes(family)["in the prefix"]
    whole = settle(model, out)
    assert (whole.threshold, whole.rule) == (0.5, "first")
    assert_close(settle(model, out.streams).divergence, whole.divergence, atol=0, rtol=0)
    for rows in (slice(-1), slice(1, 3), [0, 2], [3, -4, 1], torch.tensor([1]), [], range(2)):
        chosen = list(range(K))[rows] if isinstance(rows, slice) else [int(row) for row in rows]
        some = settle(model, out, rows)
        # a product of other rows rounds differently; the divergence itself is good to 5e-6 bits
        assert_close(some.divergence, whole.divergence[:, chosen], atol=1e-5, rtol=0)
        assert some.depth.tolist() == whole.depth[chosen].tolist()
    middle = float(whole.divergence[:-1].median())
    for rule in ("first", "stays"):
        again = settle(model, out, threshold=middle, rule=rule)
        assert again.depth.tolist() == settling_depth(whole.divergence, middle, rule).tolist()
    assert settle(model, out, threshold=middle).depth.tolist() != whole.depth.tolist() or family == "gpt2"


def test_another_final_distribution(outcomes, tiny):
    """The run's own logits change nothing; the clean run's leave the last layer a distance, and settled."""
    model, out, clean = tiny("llama"), outcomes("llama")["in the prefix"], outcomes("llama")["clean"]
    own = settle(model, out)
    assert_close(settle(model, out, final=out.logits).divergence, own.divergence, atol=2e-5, rtol=1e-4)
    far = settle(model, out, rows=[0, 2], final=clean.logits[[0, 2]], threshold=0.0)
    expected = divergence_by_hand(lens_logits(model, out.streams.resid_post)[:, [0, 2]], clean.logits[[0, 2]])
    assert_close(far.divergence.double(), expected, atol=1e-5, rtol=1e-4)
    assert bool((far.divergence[-1] > 1e-3).all()) and far.depth.tolist() == [3, 3]


@pytest.mark.parametrize(("chunk", "cached"), [(1, 1), (4 * 320 * 2, 1), (4 * 320 * 5, 4 * 320 * 3), (1 << 20, 1)])
@pytest.mark.parametrize("final", [False, True])
def test_chunks_change_nothing(chunk, cached, final, outcomes, tiny, monkeypatch):
    model, streams = tiny("gemma2"), outcomes("gemma2")["clean"].streams
    wide = Streams(streams.attn_out, torch.cat([streams.resid_post, 2 * streams.resid_post[:, :3]], 1))
    last = torch.randn(K + 3, 320, generator=torch.Generator().manual_seed(0)) if final else None
    whole, sizes = settle(model, wide, final=last).divergence, []
    monkeypatch.setattr("kvprobe.outcomes.settling.CHUNK_BYTES", chunk)
    monkeypatch.setattr("kvprobe.outcomes.settling.CACHED_BYTES", cached)
    call = Lens.__call__
    monkeypatch.setattr(Lens, "__call__", lambda lens, resid: sizes.append(resid[..., 0].numel()) or call(lens, resid))
    assert_close(settle(model, wide, final=last).divergence, whole, atol=1e-5, rtol=0)
    assert max(sizes) <= max(1, chunk // (4 * 320)) and sum(sizes) == 3 * (K + 3)


def test_memory_is_bounded():
    """600 rows of 4 layers over 50,000 tokens are 480 MB of logits."""
    generator = torch.Generator().manual_seed(0)
    lens = Lens((), torch.randn(50_000, 4, generator=generator), None, 4, 1.0, None, 0.0)
    resid = torch.randn(4, 600, 4, generator=generator)
    with Peak() as memory:
        found = _divergences(lens, resid, None)
    assert memory.peak <= 256 << 20
    some = [0, 450, 599]
    logits = lens(resid[:, some])
    assert_close(found[:, some].double(), divergence_by_hand(logits, logits[-1]), atol=1e-5, rtol=1e-4)


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([2, 7, 320, 3000]),
    st.floats(0, 60),
    st.floats(0, 60),
    st.floats(0, 1),
    st.floats(-200, 200),
)
def test_the_fast_form_is_the_one_with_logaddexp(seed, vocab, scale, other, alike, shift):
    """From near equal to disjoint, flat to one-hot: to 1e-5 bits, and to scipy in fp64."""
    generator = torch.Generator().manual_seed(seed)
    one, noise = (torch.randn(4, vocab, generator=generator) for _ in range(2))
    logits, final = scale * one, other * (alike * one + (1 - alike) * noise) + shift
    fast = jensen_shannon(logits, final)
    assert_close(fast, by_logaddexp(logits, final), atol=1e-5, rtol=0)
    assert_close(fast.double(), divergence_by_hand(logits[None], final)[0], atol=1e-5, rtol=0)
    assert_close(fast, jensen_shannon(final, logits), atol=4e-6, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("change", [0.0, 1e-3, 0.1, 3.0])
def test_the_fast_form_over_a_whole_vocabulary(scale, change):
    generator = torch.Generator().manual_seed(1)
    final = scale * torch.randn(6, 49_152, generator=generator)
    logits = final + change * torch.randn(6, 49_152, generator=generator)
    fast = jensen_shannon(logits, final)
    assert_close(fast, by_logaddexp(logits, final), atol=1e-5, rtol=0)
    assert_close(fast.double(), divergence_by_hand(logits[None], final)[0], atol=1e-5, rtol=0)


def test_ends_of_the_divergence():
    """Disjoint: 1 bit, without the NaN of 0 ln 0 where both underflow. Equal: 0 up to rounding."""
    apart = torch.full((2, 50), -300.0)
    apart[0, 3] = apart[1, 4] = 300.0
    assert jensen_shannon(apart[:1], apart[1:]).tolist() == pytest.approx([1.0], abs=1e-6)
    assert jensen_shannon(apart, apart).tolist() == pytest.approx([0.0, 0.0], abs=2e-6)
    with pytest.raises(TheoryError, match=r"logits \[2, 50\] and \[1, 50\]; allowed: two of one shape, \[\.\.\., V\]"):
        jensen_shannon(apart, apart[:1])


@pytest.mark.slow
def test_the_embedded_model_settles_as_plain_transformers_says(smol, smol_path):
    """A trained model, whose layers pass the threshold: hidden states of transformers, its own norm, head, scipy."""
    from transformers import AutoModelForCausalLM

    ids = smol.tokenizer("The capital of France is Paris, and the capital of Italy is")["input_ids"]
    answer = smol.tokenizer(" Rome, of course")["input_ids"]
    out = intervene(smol, Prompt.from_ids(ids), [()], suffix=2, continuation=answer, streams=len(answer) + 1)[0]
    found = settle(smol, out, slice(-1))
    hf = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32)
    with torch.no_grad():
        run = hf(input_ids=torch.tensor([ids + answer]), output_hidden_states=True)
        rows = slice(len(ids) - 1, -1)
        hidden = [hf.model.norm(state[0, rows]) for state in run.hidden_states[1:-1]] + [run.hidden_states[-1][0, rows]]
        logits = torch.stack([state.double() @ hf.lm_head.weight.double().T for state in hidden])
    expected = divergence_by_hand(logits, run.logits[0, rows])
    assert_close(found.divergence.double(), expected, atol=1e-4, rtol=1e-3)
    assert found.depth.tolist() == settling_depth(expected).tolist()
    assert min(found.depth.tolist()) > 1 and len(set(found.depth.tolist())) > 1


def test_a_mistake_is_one_line(outcomes, tiny):
    model, out = tiny("llama"), outcomes("llama")["clean"]
    bare = intervene(model, PROMPT, [()], suffix=1)[0]
    streams = out.streams
    lost = Streams(streams.attn_out, streams.resid_post.clone())
    lost.resid_post[1, 2] = torch.nan
    for error, says, call in (
        (
            InterventionError,
            r"this outcome kept no streams: call intervene\(…, streams=k\)",
            lambda: settle(model, bare),
        ),
        (InterventionError, r"outcome=3 is not allowed: give an Outcome, or its streams", lambda: settle(model, 3)),
        (
            InterventionError,
            r"rows=\[4\]; allowed: a slice, or indices among the 4 rows",
            lambda: settle(model, out, [4]),
        ),
        (InterventionError, r"rows=\[-5\]", lambda: settle(model, out, [-5])),
        (InterventionError, r"rows=\[0\.5\]", lambda: settle(model, out, [0.5])),
        (InterventionError, r"rows=\[True, False, True, True\]", lambda: settle(model, out, [True, False, True, True])),
        (InterventionError, r"rows='all'", lambda: settle(model, out, "all")),
        (TheoryError, r"rule='max'", lambda: settle(model, out, rule="max")),
        (TheoryError, r"threshold=2; allowed: 0 … 1 bits", lambda: settle(model, out, threshold=2)),
        (
            TheoryError,
            r"final has the shape \[1, 320\]; allowed: \[4, 320\]",
            lambda: settle(model, out, final=out.logits[:1]),
        ),
        (TheoryError, r"the divergence of layer 2, row 2 is nan", lambda: settle(model, lost)),
        (
            TheoryError,
            r"hidden states are float32 \[4, 40\]",
            lambda: settle(model, Streams(streams.attn_out, streams.resid_post[..., :40])),
        ),
    ):
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
