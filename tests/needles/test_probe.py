"""One probed item against slow, independent computations."""

import numpy as np
import pytest
import torch

from kvprobe import KVMask, intervene, needles, observe, span_stats
from kvprobe.errors import TaskError
from kvprobe.needles.settings import from_command


@pytest.mark.slow
def test_features_are_the_span_statistics_of_the_teacher_forced_answer(reader, probes):
    _, (probe, _) = probes
    item = probe.item
    trace = observe(reader, item.prompt.extended(item.answer_ids), list(probe.queries))
    table = span_stats(trace, probe.spans)
    for name in ("mass", "value_mass", "bound", "centred_bound", "perturbation"):
        assert np.array_equal(probe.features[name].reshape(-1), table[name].to_numpy(), equal_nan=True)
    before = table[table["query"] == item.context_stop - 1]["mass"].to_numpy()
    last = table[table["query"] == len(item.prompt) - 1]["mass"].to_numpy()
    shape = probe.features["mass"].shape
    assert np.allclose(probe.features["delta_mass"][:, :, 1], (last - before).reshape(shape[0], shape[1], shape[3]))


def test_observation_points_are_context_end_last_prompt_token_and_every_answer_token(probes):
    _, (probe, _) = probes
    n, answer = len(probe.item.prompt), len(probe.item.answer_ids)
    assert probe.queries == (probe.item.context_stop - 1, n - 1, *range(n, n + answer))
    assert probe.where[:2] == ("context_end", "last") and len(probe.where) == 2 + answer


def test_labels_follow_the_item(probes):
    _, (probe, _) = probes
    assert [int(probe.is_label(label).sum()) for label in ("evidence", "hard", "decoy", "distractor")] == [1, 3, 2, 5]
    assert probe.spans[0] == probe.item.spans["evidence"][0]


def test_the_clean_arm_is_zero_and_every_arm_is_its_own_run(reader, probes):
    _, (probe, _) = probes
    item, clean = probe.item, probe.clean
    assert (clean.label, clean.delta_logprob, clean.kl) == ("clean", 0.0, 0.0)
    for arm in (probe.arms[1], probe.arms[4], probe.arms[-1]):
        outcome = intervene(
            reader,
            item.prompt,
            KVMask(keys=list(arm.spans)),
            suffix=len(item.prompt) - item.context_stop,
            continuation=list(item.answer_ids),
        )
        rows = outcome.logits[-len(item.answer_ids) - 1 : -1].double().log_softmax(-1)
        logprob = sum(float(rows[k, token]) for k, token in enumerate(item.answer_ids))
        assert arm.logprob == pytest.approx(logprob, abs=1e-3)
        assert arm.delta_logprob == pytest.approx(arm.logprob - clean.logprob)


def test_an_arm_equals_transformers_with_a_four_dimensional_mask(reader, probes, tmp_path):
    """Independent: plain eager transformers, one run, the span's columns at −inf for question and answer rows."""
    from transformers import AutoModelForCausalLM

    _, (probe, _) = probes
    item, arm = probe.item, probe.arms[1]
    reader.twin.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.cat([item.prompt.ids, torch.tensor(item.answer_ids)])[None]
    n = ids.shape[1]
    mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)
    for start, stop in arm.spans:
        mask[item.context_stop :, start:stop] = -torch.inf
    with torch.no_grad():
        logits = plain(input_ids=ids, attention_mask=mask[None, None]).logits[0, len(item.prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(item.answer_ids)[:, None]).sum()
    assert arm.logprob == pytest.approx(float(expected), abs=2e-3)


def test_attention_shift_is_the_difference_of_bucket_masses(reader, probes):
    """Raw Δ from two separate observations: masked by its own run, clean by another."""
    _, (probe, _) = probes
    item = probe.item
    answer = list(item.answer_ids)
    common = {"suffix": len(item.prompt) - item.context_stop, "continuation": answer}
    masked = intervene(reader, item.prompt, KVMask(keys=item.spans["evidence"]), **common)
    rows = list(range(len(item.prompt) - 1, len(item.prompt) + len(answer)))
    clean = observe(reader, item.prompt.extended(item.answer_ids), rows)
    raw = [
        float((masked.attention(i)[:, -len(rows) :, :4].sum(-1) - clean.layer(i).attention[..., :4].sum(-1)).mean())
        for i in range(clean.n_layers)
    ]
    assert probe.shift["first4"]["raw"] == pytest.approx(np.mean(raw), abs=1e-5)
    # Correction takes the inflation out of survivors, so it can only lower the reading.
    assert probe.shift["first4"]["corrected"] <= probe.shift["first4"]["raw"]
    assert probe.shift["content"]["corrected"] <= probe.shift["content"]["raw"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "niah_single_9"}, "niah_single_1"),
        ({"gate_contrast": "easy"}, "hard, distractor"),
        ({"gate_score": "loss"}, "mass, delta_mass"),
        ({"p": 3}, "1, 2"),
    ],
)
def test_settings_name_what_is_allowed(change, said):
    with pytest.raises(TaskError, match=said):
        needles.Settings(**change)


def test_settings_from_the_command_line():
    given = dict.fromkeys(("distractors", "new_tokens", "haystack", "preset"))
    given |= {"task": "niah_single_1", "length": 900, "items": 2, "seed": 3, "decoys": 4, "norm": 2, "needles": 7}
    given |= {
        "gate_contrast": "hard",
        "gate_score": "mass",
        "gate_at": "last",
        "exclude_layers": "1,0",
        "template": "ruler",
    }
    settings = from_command(given)
    assert (settings.exclude_layers, settings.p, settings.options) == ((0, 1), 2, {"template": "ruler", "needles": 7})
    unsaid = given | dict.fromkeys(("length", "items", "decoys"))
    preset = from_command(unsaid | {"preset": "ruler32k"})
    assert (preset.length, preset.items, preset.decoys) == (32_768, 100, 0)
    assert from_command(given | {"preset": "ruler32k"}).length == 900
    default = from_command(unsaid)
    assert (default.length, default.items, default.decoys) == (1500, 6, 4)
    with pytest.raises(TaskError, match="whole numbers"):
        from_command(given | {"exclude_layers": "first"})
    with pytest.raises(TaskError, match="ruler32k"):
        from_command(given | {"preset": "ruler"})
