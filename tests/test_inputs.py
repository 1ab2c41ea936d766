"""Every mistake in calling prefill, observe and intervene is one line that quotes it and says what is allowed."""

import catalogue
import pytest
import torch

from kvprobe import KVMask, Prompt, intervene, observe, prefill
from kvprobe.errors import InterventionError, ModelError, PromptError

PROMPT = Prompt.from_ids(catalogue.ids(), {"needle": (4, 7)})


def options(**kwargs):
    return {"arms": KVMask("needle"), "suffix": 3} | kwargs


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"arms": None}, InterventionError, "a non-empty list of them, not None"),
        ({"arms": []}, InterventionError, r"not \[\]"),
        ({"arms": [5]}, InterventionError, "5 is not an intervention: allowed are KVMask"),
        ({"arms": "needle"}, InterventionError, "'n' is not an intervention"),
        ({"arms": [(KVMask("needle"), "needle")]}, InterventionError, "'needle' is not an intervention"),
        ({"suffix": None}, InterventionError, "queries='suffix' needs suffix=…"),
        ({"suffix": 0}, InterventionError, "suffix=0 is not allowed: give a whole number, 1 … 26"),
        ({"suffix": 27}, InterventionError, "suffix=27"),
        ({"suffix": -1}, InterventionError, "suffix=-1"),
        ({"suffix": 2.5}, InterventionError, "suffix=2.5"),
        ({"suffix": "3"}, InterventionError, "suffix='3'"),
        ({"suffix": True}, InterventionError, "suffix=True"),
        ({"generate": -1}, InterventionError, "generate=-1 is not allowed: give a whole number, 0 or more"),
        ({"generate": 1.0}, InterventionError, "generate=1.0"),
        ({"batch": 0}, InterventionError, "batch=0 is not allowed: give a whole number, 1 or more"),
        ({"batch": "all"}, InterventionError, "batch='all'"),
        ({"logits": "last"}, InterventionError, "logits='last': allowed are 'all', and 'continuation'"),
        ({"logits": "continuation"}, InterventionError, "with a continuation given"),
        ({"continuation": [320]}, PromptError, "token id 320 is outside the model's vocabulary 0 … 319"),
        ({"continuation": [-1]}, PromptError, r"continuation \[-1\]: ids hold -1, must be 0 or more"),
        ({"continuation": "yes"}, PromptError, "continuation 'yes': ids must be one-dimensional whole numbers"),
        ({"continuation": [1.5]}, PromptError, r"continuation \[1.5\]"),
        ({"continuation": torch.ones(2, 3, dtype=torch.int64)}, PromptError, r"ids have shape \[2, 3\]"),
        ({"continuation": 5}, PromptError, "continuation 5"),
        ({"continuation": [5] * 487}, PromptError, "513 tokens do not fit the model's context of 512"),
        ({"generate": 487}, PromptError, "513 tokens do not fit"),
        ({"prefix": 5}, PromptError, "prefix=5 is not a prefilled context"),
        ({"prompt": "text"}, PromptError, "'text' is not a prompt: allowed is a Prompt"),
        ({"prompt": Prompt.from_ids([1, 2, 320])}, PromptError, "token id 320"),
        ({"prompt": Prompt.from_ids([1] * 513)}, PromptError, "513 tokens"),
        ({"model": "llama"}, ModelError, r"'llama' is not a loaded model: allowed is what kvprobe.load\(…\) returns"),
    ],
)
def test_a_mistake_in_intervene_is_one_line(given, error, says, tiny):
    kwargs = options(**given)
    model, prompt = kwargs.pop("model", None) or tiny("llama"), kwargs.pop("prompt", PROMPT)
    with pytest.raises(error, match=says) as caught:
        intervene(model, prompt, kwargs.pop("arms"), **kwargs)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 240


@pytest.mark.parametrize(
    "queries", [None, [], 26, -27, [3, 26], "all", 1.5, [1.5], slice(5, 5), slice(30, 40), object()]
)
def test_a_mistake_in_observe_is_one_line(queries, tiny):
    with pytest.raises(PromptError, match=r"^queries .*allowed") as caught:
        observe(tiny("llama"), PROMPT, queries)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 27, -1, "3", 2.0])
def test_a_mistake_in_prefill_is_one_line(length, tiny):
    with pytest.raises(PromptError, match=r"cannot prefill .* tokens of a prompt of 26: allowed is 1 … 26"):
        prefill(tiny("llama"), PROMPT, length)


def test_a_prefix_of_other_tokens_is_refused(tiny):
    model = tiny("llama")
    other = prefill(model, Prompt.from_ids(catalogue.ids(1)))
    with pytest.raises(PromptError, match="prefilled from other tokens"):
        intervene(model, PROMPT, KVMask("needle"), suffix=3, prefix=other)
    with pytest.raises(PromptError, match="prefilled from other tokens"):
        observe(model, PROMPT, prefix=other)
    with pytest.raises(PromptError, match="position 0 leaves no prefix"):
        observe(model, PROMPT, 0, prefix=prefill(model, PROMPT))
