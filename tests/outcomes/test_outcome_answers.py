"""Answers read off logits: log-probabilities, matches, flips and divergences, against loops."""

import catalogue
import pytest
import torch
from catalogue import CONTINUED, SUFFIX

from kvprobe import KVMask, Prompt, intervene
from kvprobe.errors import TheoryError
from kvprobe.outcomes import answer_logprobs, answer_match, argmax_flips, kl_divergence

PROMPT = Prompt.from_ids(catalogue.ids())


@pytest.fixture(scope="module")
def outcomes(tiny):
    """Two arms of the catalogue on a tiny Llama."""
    options = {"suffix": SUFFIX, "continuation": CONTINUED}
    names = ("clean", "in the prefix")
    found = intervene(tiny("llama"), PROMPT, [catalogue.arm(name) for name in names], **options)
    return dict(zip(names, found, strict=True))


def test_answer_logprobs_are_a_loop(outcomes):
    out = outcomes["in the prefix"]
    rows = out.logits[SUFFIX - 1 : -1].double()
    slow = [float(row[token] - row.exp().sum().log()) for row, token in zip(rows, CONTINUED, strict=True)]
    for ids in (list(CONTINUED), torch.tensor(CONTINUED)):
        assert answer_logprobs(out.logits[SUFFIX - 1 : -1], ids).tolist() == pytest.approx(slow, rel=1e-5)
    half = answer_logprobs(out.logits[SUFFIX - 1 : -1].bfloat16(), CONTINUED)
    assert half.dtype == torch.float32
    assert answer_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("shape", "ids", "says"),
    [
        ((3, 5), [1, 2], r"2 answer tokens for logits \[3, 5\]; allowed: one row a token"),
        ((5,), [1], r"logits \[5\]"),
        ((2, 5), [1, 5], r"answer tokens \[1, 5\]; allowed: 0 … 4"),
        ((2, 5), [-1, 2], r"answer tokens \[-1, 2\]"),
    ],
)
def test_an_answer_that_does_not_fit_its_rows_is_refused(shape, ids, says):
    with pytest.raises(TheoryError, match=says):
        answer_logprobs(torch.zeros(shape), ids)
    with pytest.raises(TheoryError, match=says):
        answer_match(torch.zeros(shape), ids)


def test_kl_divergence_is_a_loop(outcomes):
    clean, masked = outcomes["clean"].logits, outcomes["in the prefix"].logits
    mine = kl_divergence(clean, masked)
    for row, value in enumerate(mine.tolist()):
        p, q = (logits[row].double().softmax(-1) for logits in (clean, masked))
        assert value == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4, abs=1e-6)
    assert bool((mine > 0).all()) and bool((kl_divergence(clean, clean) == 0).all())
    with pytest.raises(TheoryError, match=r"logits \[11, 320\] and \[1, 320\]; allowed: two of one shape"):
        kl_divergence(clean, masked[:1])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("start", [0, 5])
def test_an_answer_matches_as_far_as_greedy_decoding_would_write_it(family, start, tiny):
    """Teacher-force what was decoded, then the same with one token changed: everything before it still matches."""
    model, prompt = tiny(family), Prompt.from_ids(catalogue.ids(start))
    mask = KVMask(keys=(3, 9))
    free = intervene(model, prompt, mask, suffix=4, generate=5).generated
    for wrong in (None, 0, 3):
        forced = [token + (17 if place == wrong else 0) for place, token in enumerate(free)]
        forced = [token % 320 for token in forced]
        out = intervene(model, prompt, mask, suffix=4, continuation=forced, logits="continuation")
        match = answer_match(out.logits[:-1], forced)
        assert match.dtype == torch.bool and match.shape == (len(free),)
        if wrong is None:
            assert bool(match.all())
        else:
            assert bool(match[:wrong].all()) and not bool(match[wrong])


def test_matches_and_flips_are_loops():
    generator = torch.Generator().manual_seed(0)
    clean, ablated = (torch.randn(40, 7, generator=generator) for _ in range(2))
    best = [max(range(7), key=row.tolist().__getitem__) for row in clean]
    other = [max(range(7), key=row.tolist().__getitem__) for row in ablated]
    ids = torch.randint(0, 7, (40,), generator=generator)
    assert answer_match(clean, ids).tolist() == [mine == int(wanted) for mine, wanted in zip(best, ids, strict=True)]
    flips = argmax_flips(clean, ablated)
    assert flips.dtype == torch.bool
    assert flips.tolist() == [mine != theirs for mine, theirs in zip(best, other, strict=True)]
    assert 0 < int(flips.sum()) < 40
    assert not bool(argmax_flips(clean, 3 * clean + 1).any())  # what no softmax changes the order of
    assert argmax_flips(clean, ablated).equal(argmax_flips(ablated, clean))
    assert answer_match(torch.tensor([[1.0, 2.0, 2.0]]), [1]).tolist() == [True]  # a tie goes to the smallest id
    assert answer_match(torch.zeros(0, 7), torch.zeros(0, dtype=torch.long)).tolist() == []
    with pytest.raises(TheoryError, match=r"logits \[40, 7\] and \[1, 7\]; allowed: two of one shape"):
        argmax_flips(clean, ablated[:1])
