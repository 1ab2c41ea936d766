"""Padded batches as tokenizers give them: each row is the row alone, whatever the pad id and the side."""

import numpy as np
import pytest
import tokenizers_of_all_makes as makes
import torch
from torch.testing import assert_close

from kvprobe import intervene, observe
from kvprobe.errors import PromptError
from kvprobe.interventions import KVMask, ValueGate
from kvprobe.prompts import Prompt
from kvprobe.spans import span_stats

ROWS = [[5, 9, 9, 40, 7, 31, 9, 300], [9, 8, 9], [250, 9, 9, 9, 12]]


def batch(side, pad, kind=torch.tensor):
    """Rows padded to one length with an id that real tokens have too."""
    width = max(map(len, ROWS))
    blank = [[pad] * (width - len(row)) for row in ROWS]
    ids = [fill + row if side == "left" else row + fill for row, fill in zip(ROWS, blank, strict=True)]
    gaps = [[0] * len(fill) for fill in blank]
    ones = [[1] * len(row) for row in ROWS]
    mask = [gap + one if side == "left" else one + gap for gap, one in zip(gaps, ones, strict=True)]
    return {"input_ids": kind(ids), "attention_mask": kind(mask)}


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch(side, kind):
    lead = [8 - len(row) if side == "left" else 0 for row in ROWS]
    spans = [{"x": (at + 1, at + 3)} for at in lead]
    prompts = Prompt.from_batch(batch(side, 9, kind), spans)
    for prompt, row, at in zip(prompts, ROWS, lead, strict=True):
        assert prompt.ids[prompt.pad :].tolist() == row and prompt.pad == at and prompt["x"] == (at + 1, at + 3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 9])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_every_measure_of_a_row_is_that_of_the_row_alone(family, pad, side, tiny):
    model = tiny(family)
    for prompt, row in zip(Prompt.from_batch(batch(side, pad)), ROWS, strict=True):
        alone, at = Prompt.from_ids(row), prompt.pad
        frame, reference = (
            span_stats(observe(model, prompt), [(at, at + 2)]),
            span_stats(observe(model, alone), [(0, 2)]),
        )
        for name in ("query", "start", "stop"):
            frame[name] -= at
        np.testing.assert_array_equal(frame.to_numpy(float), reference.to_numpy(float))
        for moved, plain in ((KVMask((at, at + 1)), KVMask((0, 1))), (ValueGate((at, at + 2)), ValueGate((0, 2)))):
            mine = intervene(model, prompt, moved, suffix=2, continuation=[9, 9], generate=3)
            theirs = intervene(model, alone, plain, suffix=2, continuation=[9, 9], generate=3)
            assert torch.equal(mine.logits, theirs.logits) and mine.generated == theirs.generated
            assert_close(mine.receipt.retained, theirs.receipt.retained)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["byte", "byte fallback"])
def test_what_a_tokenizer_pads(side, kind):
    tokenizer = makes.make(kind, pad="</s>")
    texts = ["The number is 4718.</s>", "花子", "no one"]
    encoded = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    prompts = Prompt.from_batch(encoded, [{"n": "4718"}, {"n": "花子"}, None], tokenizer=tokenizer)
    for prompt, text in zip(prompts, texts, strict=True):
        assert prompt.ids[prompt.pad :].tolist() == tokenizer(text)["input_ids"]
    for prompt, needle in zip(prompts[:2], ("4718", "花子"), strict=True):
        assert needle in tokenizer.decode(prompt.ids[slice(*prompt["n"])])


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([[1, 2, 3]], [[1, 0, 1]], "row 0 of the batch: attention_mask is"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "row 1 of the batch: attention_mask is"),
        ([[1, 2], [3, 4]], [[1, 1]], "allowed: the same"),
        ([[1, 2]], [[1, 1, 1]], "allowed: the same"),
        ([1, 2], [1, 1], "input_ids of the batch are"),
        ([], [], "input_ids of the batch are"),
        ([[]], [[]], "input_ids of the batch are"),
        ([[1, 2]], [[1, 2]], "attention_mask is"),
        ([[1.5, 2]], [[1, 1]], "row 0 of the batch: ids are"),
    ],
)
def test_other_batches_are_one_line(ids, mask, says):
    with pytest.raises(PromptError) as caught:
        Prompt.from_batch({"input_ids": ids, "attention_mask": mask})
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [None, 3, {"input_ids": [[1]]}, {"attention_mask": [[1]]}, [[1, 2]]])
def test_what_is_no_batch(given):
    with pytest.raises(PromptError, match=r"without (input_ids|attention_mask); allowed: what tokenizer"):
        Prompt.from_batch(given)
    with pytest.raises(PromptError, match="a batch of 3 rows has 1 mappings of spans"):
        Prompt.from_batch(batch("left", 0), [{}])
