"""The summary against scikit-learn, hand-made probes with known answers, and the tables against the probes."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from kvprobe import needles
from kvprobe.errors import TaskError
from kvprobe.needles import summary
from kvprobe.needles.tables import Result


def with_mass(probe, mass):
    """The same probe with another attention mass [S] in every head and at every observation point."""
    features = dict(probe.features)
    features["mass"] = np.broadcast_to(np.asarray(mass, dtype=float), features["mass"].shape).copy()
    return replace(probe, features=features)


def test_head_auroc_equals_scikit_learn_head_by_head(probes):
    settings, (probe, _) = probes
    for name, labels in (("vs_hard", ("hard", "decoy")), ("vs_distractor", ("distractor",))):
        chosen = probe.is_label("evidence", *labels)
        truth = probe.is_label("evidence")[chosen]
        for feature in needles.FEATURES:
            values = probe.features[feature]
            last = summary.head_auroc(probe, feature, name, "last")
            answer = summary.head_auroc(probe, feature, name, "answer")
            for layer, head in np.ndindex(values.shape[:2]):
                assert last[layer, head] == pytest.approx(roc_auc_score(truth, values[layer, head, 1, chosen]))
                each = [roc_auc_score(truth, values[layer, head, q, chosen]) for q in range(2, values.shape[2])]
                assert answer[layer, head] == pytest.approx(np.mean(each))
    assert settings.items == 2


def test_contrast_averages_heads_first_then_items_and_leaves_excluded_layers_out(probes):
    settings, both = probes
    whole = summary.contrast(both, "vs_hard", "last", settings)["mass"]
    maps = [summary.head_auroc(probe, "mass", "vs_hard", "last") for probe in both]
    assert whole["mean"] == pytest.approx(np.mean([each.mean() for each in maps]))
    assert (whole["n_heads"], whole["n_items"]) == (maps[0].size, 2)
    less = summary.contrast(both, "vs_hard", "last", replace(settings, exclude_layers=(0,)))["mass"]
    assert less["mean"] == pytest.approx(np.mean([each[1:].mean() for each in maps]))
    assert less["n_heads"] == maps[0][1:].size


def test_absent_classes_are_null(probes):
    settings, both = probes
    alone = [
        replace(probe, labels=tuple("evidence" if x != "distractor" else x for x in probe.labels)) for probe in both
    ]
    assert summary.contrast(alone, "vs_hard", "last", settings) is None
    assert summary.gate(alone, settings, "last")["verdict"] == "no_contrast"
    assert summary.ablation([replace(p, arms=p.arms[:2]) for p in both], 0)["hard"] is None


@pytest.mark.parametrize(
    ("evidence", "others", "verdict"),
    [(9.0, 1.0, "track_A"), (0.5, 1.0, "track_B")],
)
def test_gate_verdicts_of_clear_cases(probes, evidence, others, verdict):
    """Twelve items in which the evidence is always first, or always last."""
    settings, (probe, _) = probes
    mass = np.where(probe.is_label("evidence"), evidence, others + np.arange(len(probe.labels)) / 100)
    gate = summary.gate([with_mass(probe, mass)] * 12, settings, "last")
    assert gate["verdict"] == verdict
    assert gate["value"] == (1.0 if evidence > others else 0.0)


def test_a_gate_whose_interval_straddles_the_threshold_is_undecided(probes):
    settings, (probe, _) = probes
    spans = len(probe.labels)
    items = [with_mass(probe, np.roll(np.arange(spans), k)) for k in range(6)]
    gate = summary.gate(items, settings, "last")
    assert gate["ci_low"] < settings.gate_threshold < gate["ci_high"] and gate["verdict"] == "undecided"
    assert summary.gate(items[:1], settings, "last")["verdict"] == "undecided"


def test_a_perfect_score_is_never_worse_off_than_an_almost_perfect_one(probes):
    settings, (probe, _) = probes
    first = with_mass(probe, np.where(probe.is_label("evidence"), 9.0, np.arange(len(probe.labels)) / 100))
    second = with_mass(probe, np.where(probe.is_label("evidence"), 0.045, np.arange(len(probe.labels)) / 100))
    perfect = summary.gate([first] * 6, settings, "last")
    assert perfect["value"] == 1.0 and perfect["verdict"] == "track_A" and perfect["degenerate"]
    almost = summary.gate([first] * 5 + [second], settings, "last")
    assert almost["value"] < 1.0 and not almost["degenerate"]
    few = summary.gate([first] * 1, settings, "last")
    assert few["verdict"] == "undecided" and few["cannot_reject"]


def test_a_noise_haystack_is_no_content(probes):
    settings, (probe, _) = probes
    probe.item.settings["haystack"], before = "noise", probe.item.settings["haystack"]
    try:
        assert summary.gate([probe], replace(settings, gate_contrast="distractor"), "last")["verdict"] == "not_content"
    finally:
        probe.item.settings["haystack"] = before


def test_the_gate_sums_over_heads_before_it_compares(probes):
    """One loud head outweighs many quiet ones: the sum decides, not the mean of head AUROCs."""
    settings, (probe, _) = probes
    evidence = probe.is_label("evidence")
    mass = np.where(evidence, 0.0, 1e-3) * np.ones(probe.features["mass"].shape)
    mass[0, 0] = np.where(evidence, 10.0, 0.0)
    features = dict(probe.features, mass=mass)
    loud = replace(probe, features=features)
    assert summary.gate([loud], settings, "last")["value"] == 1.0
    assert summary.contrast([loud], "vs_hard", "last", settings)["mass"]["mean"] < 0.1
    excluded = replace(settings, exclude_layers=(0,))
    assert summary.gate([loud], excluded, "last")["value"] == 0.0


def test_ablation_means_within_items_first(probes):
    _, both = probes
    found = summary.ablation(both, 0)
    for label in ("evidence", "hard", "decoy", "distractor"):
        means = [np.mean([arm.delta_logprob for arm in probe.arms if arm.label == label]) for probe in both]
        assert found[label]["delta_logprob"] == pytest.approx(np.mean(means))
        assert found[label]["n_items"] == 2
    assert found["hard"]["n_spans"] == 6
    gaps = [p.arms[1].delta_logprob - np.mean([arm.delta_logprob for arm in p.arms[2:]]) for p in both]
    assert found["contrast"]["delta_logprob"] == pytest.approx(np.mean(gaps))


def test_needle_shares_sum_to_one_and_entropy_is_that_of_the_shares(reader):
    settings = needles.Settings(
        task="niah_multivalue", length=2600, items=1, decoys=0, distractors=2, options={"tokens_to_generate": 16}
    )
    probe = needles.probe_item(reader, settings, 0)
    found = summary.needles([probe])
    shares = np.array([row["share"] for row in found["needles"]])
    assert len(shares) == 4 and shares.sum() == pytest.approx(1)
    assert found["entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert probe.arms[1].spans == tuple(probe.item.spans["evidence"])  # one arm cuts all asked needles together


def test_tables_hold_every_number_once(probes):
    settings, both = probes
    result = Result(settings, tuple(both), {})
    spans, heads, arms, items = result.spans(), result.heads(), result.arms(), result.items()
    assert len(spans) == sum(probe.features["mass"].size for probe in both)
    row = spans.iloc[1234]
    probe = both[0]
    q, s = probe.queries.index(row["query"]), probe.spans.index((row["start"], row["stop"]))
    assert row["bound"] == pytest.approx(probe.features["bound"][row["layer"], row["head"], q, s], rel=1e-6)
    assert row["label"] == probe.labels[s] and row["where"] == probe.where[q]
    mass = heads.query("contrast == 'vs_hard' and where == 'last' and feature == 'mass'")
    expected = np.mean([summary.head_auroc(p, "mass", "vs_hard", "last") for p in both], axis=0)
    assert np.allclose(mass["auroc"].to_numpy().reshape(expected.shape), expected)
    assert mass["p_max_t"].between(0, 1).all()
    assert len(arms) == sum(len(probe.arms) for probe in both) and (arms["receipt_masked_weight"] == 0).all()
    assert list(items["tokens"]) == [len(probe.item.prompt) for probe in both]


def test_a_run_refuses_before_it_computes(reader):
    with pytest.raises(TaskError, match="at least 1"):
        needles.run(reader, needles.Settings(items=0))
    with pytest.raises(TaskError, match="layers 0 … 2"):
        needles.run(reader, needles.Settings(exclude_layers=(7,)))
    with pytest.raises(TaskError, match="all 3 layers"):
        needles.run(reader, needles.Settings(task="niah_single_1", length=2600, exclude_layers=(0, 1, 2), items=1))


def test_nothing_to_compare_with_is_empty_not_an_error(reader):
    settings = needles.Settings(
        task="niah_single_1", length=1200, items=1, decoys=0, distractors=0, options={"tokens_to_generate": 16}
    )
    result = needles.run(reader, settings)
    assert result.heads().empty and list(result.heads()) and result.summary["auroc"]["vs_hard"] is None
    assert result.summary["gate"]["verdict"] == "no_contrast"
