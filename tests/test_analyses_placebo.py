"""The analyses of random spans at their smallest: placebos, calibration, rank correlations, files, and refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_analyses import ROOT
from test_analyses_calibrating import helper

from kvprobe import placebo, runs

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

CALIBRATION, STRENGTH = "placebo_calibration", "strength_predicts_effect"
LENGTH = 1100  # bytes, which are the tiny tokenizer's tokens
SMALL = {
    CALIBRATION: {"items": 2, "noise_items": 1, "length": LENGTH, "needles": 4, "crowd": 6, "windows": 12, "unions": 8}
    | {"deals": 2, "blocks": 1, "placebos": 2, "draws": 20, "permutations": 99, "caliper": 1.0},
    STRENGTH: {"items": 2, "length": LENGTH, "needles": 3, "windows": 6},
}


def options(name, **more):
    return [w for key, v in (SMALL[name] | more).items() for w in (f"--{key.replace('_', '-')}", str(v))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("placebos") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def model(folder):
    from kvprobe import models

    return models.load(folder)


@pytest.fixture(scope="module")
def tables(model):
    @cache
    def table(name):
        module = helper(name)
        return module.compute(model, module.plan(model, **SMALL[name]))

    return table


# ---- rank correlations


def slow_spearman(x, y):
    """Correlation of midranks, by counting."""

    def ranks(values):
        return np.array([sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values])

    a, b = (ranks(values) - (len(x) + 1) / 2 for values in (x, y))
    return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=15))
@settings(max_examples=60, deadline=None)
def test_rank_correlation_is_that_of_midranks(pairs):
    x, y = np.array(pairs, dtype=float).T
    found = helper(STRENGTH).spearman(x, y)
    if len({*x}) == 1 or len({*y}) == 1:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(slow_spearman(x, y))


def test_correlations_are_within_an_item_and_never_pooled():
    """Falling in each item, rising over all: Simpson's case."""
    module, rows = helper(STRENGTH), []
    for item in (0, 1, 2):
        for i in range(5):
            values = dict.fromkeys(module.MEASURES, 10.0 * item + i) | dict.fromkeys(module.OUTCOMES, 100.0 * item - i)
            rows.append({"task": "t", "item": item, "kind": "hard" if i == 4 else "haystack"} | values)
    by_item = module.correlations(pd.DataFrame(rows))
    assert np.allclose(by_item["rho"], -1) and {*by_item["n_spans"]} == {4, 5}
    table = module.summary(by_item, 0)
    assert np.allclose(table["rho"], -1) and (table["n"] == 3).all() and (table["undefined"] == 0).all()


def test_items_without_variation_are_counted_and_left_out():
    module = helper(STRENGTH)
    named = {"task": "t", "spans": "all", "measure": "bound", "outcome": "kl"}
    rows = pd.DataFrame([named | {"item": i, "rho": rho} for i, rho in enumerate([0.2, np.nan, 0.4])])
    (row,) = module.summary(rows, 0).to_dict("records")
    assert row["rho"] == pytest.approx(0.3) and row["n"] == 2 and row["undefined"] == 1
    (row,) = module.summary(rows.assign(rho=np.nan), 0).to_dict("records")
    assert row["n"] == 0 and row["undefined"] == 3 and np.isnan(row["rho"])


@given(st.lists(st.floats(0, 100), min_size=8, max_size=60), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_spread_windows_are_disjoint_and_hold_both_ends(strengths, count):
    sets = [((start, start + 3),) for start in range(len(strengths))]
    strengths = np.array(strengths)
    found = helper("span_effects").spread(sets, strengths, count)
    starts = [keys[0][0] for keys in found]
    assert len(found) <= count and all(b - a >= 3 for a, b in pairwise(starts))
    assert all(strengths[start] > 0 for start in starts)
    if len(found) > 1:
        live = strengths[strengths > 0]
        extremes = {strengths[start] for start in starts} & {live.min(), live.max()}
        assert extremes


# ---- what is measured


def test_effects_are_those_of_one_arm_at_a_time(model, tables):
    """Log-probs from logits of single runs, in float64."""
    effects = tables(CALIBRATION).attrs["tables"]["effects"]
    item = helper("span_effects").items(model, "niah_single_2", 1, LENGTH, 0)[0]
    seen = helper("span_effects").Observed.of(model, item)
    mine = effects[(effects["design"] == "essay") & (effects["item"] == 0)]
    windows, injected = mine[mine["kind"] == "contiguous"], mine[mine["kind"] == "injected"]
    parsed = {text: tuple(map(int, text.split(":"))) for text in windows["spans"]}
    row, put = windows.iloc[3], injected.iloc[1]
    vectors = placebo.injection(seen.trace, parsed[put["target"]], parsed[put["spans"]])
    from kvprobe.interventions import Inject, KVMask

    arms = [KVMask([parsed[row["spans"]]]), Inject(vectors, queries=[*seen.trace.queries])]
    clean, *others = (_logprob(model, item, arm) for arm in (KVMask([]), *arms))
    assert [one - clean for one in others] == pytest.approx([row["effect"], put["effect"]], abs=2e-4)
    strength = placebo.set_strengths(seen.trace, [parsed[row["spans"]], parsed[put["target"]]])
    assert strength["bound"][0] == pytest.approx(row["bound"], rel=1e-5)
    assert strength["perturbation"][1] == pytest.approx(put["perturbation"], rel=1e-5)


def _logprob(model, item, arm):
    suffix = len(item.prompt) - item.context_stop
    out = runs.intervene(model, item.prompt, arm, suffix=suffix, continuation=list(item.answer_ids))
    logits = out.logits[-len(item.answer_ids) - 1 : -1].double()
    return float(torch.log_softmax(logits, -1)[range(len(item.answer_ids)), list(item.answer_ids)].sum())


def test_candidates_are_no_evidence_and_of_the_needles_length(model, tables):
    effects = tables(CALIBRATION).attrs["tables"]["effects"]
    cases = (("essay", "niah_single_2", 1), ("noise", "niah_single_1", 1), ("crowd", "niah_multikey_1", 6))
    for design, task, needles in cases:
        for index, item in enumerate(helper("span_effects").items(model, task, 1, LENGTH, 0, needles)):
            evidence = {at for span in item.spans["evidence"] for at in range(*span)}
            hard = {tuple(span) for span in item.spans.get("hard", [])}
            mine = effects[(effects["design"] == design) & (effects["item"] == index)]
            assert len(mine)
            for kind, text in zip(mine["kind"], mine["spans"], strict=True):
                spans = [tuple(map(int, part.split(":"))) for part in text.split()]
                held = {at for span in spans for at in range(*span)}
                assert not held & evidence and max(held) < item.context_stop
                if kind in ("hard", "hard_set"):
                    assert {*spans} <= hard and (len(spans) == 1) == (kind == "hard")
                else:
                    assert len(held) == len(evidence)


def test_injected_readings_differ_in_the_pseudo_targets_own_arm_alone(model):
    module, pseudo = helper(CALIBRATION), helper("pseudo_targets")
    asked = module.plan(model, **SMALL[CALIBRATION])
    probe = pseudo.Probe.of(model, "essay", asked.made["essay"][0], 0, asked)
    readings = [reading for reading in pseudo.READINGS if reading.remedy == "injected"]
    own, masked = (np.array(probe.groups(reading, asked)) for reading in readings)
    assert [reading.name for reading in readings] == [pseudo.OWN, pseudo.MASKED]
    assert own.shape == masked.shape == (3, 3) and (own[:, 1:] == masked[:, 1:]).all()
    windows = probe.tables["contiguous"]["effect"].to_numpy()
    assert masked[:, 0].tolist() == [windows[pair[0]] for pair in probe.injected]
    assert own[:, 0].tolist() == probe.tables["injected"]["effect"].tolist()[::3]
    twice = replace(probe, injected=probe.injected * 2, tables=probe.tables | {"injected": _twice(probe)})
    again = np.array(twice.groups(readings[0], asked))
    assert (again == np.concatenate([own, own])).all()  # blocks that have pseudo-targets in common
    sets = probe.sets["contiguous"]
    assert all(
        probe.tables["injected"]["spans"][3 * i] == f"{sets[p[0]][0][0]}:{sets[p[0]][0][1]}"
        for i, p in enumerate(probe.injected)
    )


def _twice(probe):
    return pd.concat([probe.tables["injected"]] * 2, ignore_index=True)


def test_calibration_has_a_row_a_reading(tables):
    table, module = tables(CALIBRATION), helper(CALIBRATION)
    rows = [*zip(table["remedy"], table["design"], table["reading"], table["match_on"], strict=True)]
    assert rows == [(r.remedy, r.design, r.name, r.match_on) for r in module.READINGS]
    assert {*table["remedy"]} == {*placebo.REMEDIES, "injected"}
    assert (table["unmatched"] <= table["targets"]).all() and (table["draws"] + table["all_zero"] <= 20).all()
    about = table.attrs["about"]
    assert "conditional on these items" in about["claim"]
    effects = table.attrs["tables"]["effects"]
    for row, design in zip(about["random_spans"], ("essay", "noise"), strict=True):
        size = effects[(effects["design"] == design) & (effects["kind"] == "contiguous")]["effect"].abs()
        assert row["spans"] == len(size) and row["largest"] == size.max() and row["exactly_0"] == (size == 0).sum()


def test_strength_table_is_that_of_its_spans(tables):
    table, module = tables(STRENGTH), helper(STRENGTH)
    spans = table.attrs["tables"]["spans"]
    assert len(table) == 3 * 2 * len(module.MEASURES) * len(module.OUTCOMES)
    assert (spans["drop"] == -spans["effect"]).all() and (spans["size"] == spans["effect"].abs()).all()
    counts = spans.groupby("task")["kind"].value_counts().to_dict()
    assert counts[("niah_multikey_1", "hard")] == 4 and counts[("niah_single_1", "evidence")] == 2
    one = table[(table["task"] == "niah_single_2") & (table["spans"] == "haystack")]
    (rho,) = one[(one["measure"] == "perturbation") & (one["outcome"] == "kl")]["rho"]
    mine = spans[(spans["task"] == "niah_single_2") & (spans["kind"] == "haystack")]
    assert rho == pytest.approx(
        np.mean([slow_spearman([*rows["perturbation"]], [*rows["kl"]]) for _, rows in mine.groupby("item")])
    )


# ---- figures, files, refusals


def test_figures_show_every_row_and_task(tables):
    rates, effects = helper(CALIBRATION).plot(tables(CALIBRATION)).axes
    assert len(rates.get_yticklabels()) == len(tables(CALIBRATION))
    assert [text.get_text() for text in effects.get_legend().get_texts()] == ["essay, 24", "noise, 12"]
    axes = helper(STRENGTH).plot(tables(STRENGTH)).axes
    titles = [ax.get_title("left").split(":")[0] for ax in axes]
    assert titles == ["niah_single_2", "niah_multikey_1", "niah_single_1"] * 2


@pytest.mark.parametrize(
    ("name", "files"), [(CALIBRATION, {"rows", "effects"}), (STRENGTH, {"rows", "items", "spans"})]
)
def test_main_writes_a_run_folder(folder, tmp_path, capsys, name, files):
    out = tmp_path / "run"
    less = {"noise_items": 0} if name == CALIBRATION else {"tasks": "niah_single_2"}
    assert helper(name).main([*options(name, **less), "--model", str(folder), "--out", str(out)]) == 0
    wanted = {f"{table}.parquet" for table in files} | {f"{name}.png", "manifest.json"}
    assert {path.name for path in out.iterdir()} == wanted
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name and "prefill-then-evict" in str(manifest)
    assert "prefill-then-evict" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        (CALIBRATION, "--items 1", "at least 2"),
        (CALIBRATION, "--draws 0", "draws is 0"),
        (CALIBRATION, "--caliper 0", "caliper is 0"),
        (CALIBRATION, "--length 100", "100"),
        (STRENGTH, "--tasks niah_9", "niah_9"),
        (STRENGTH, "--tasks niah_single_2,niah_single_2", "each once"),
        (STRENGTH, "--windows 2", "windows is 2"),
        (STRENGTH, "--length 100", "100"),
    ],
)
def test_wrong_input_is_one_line_before_a_folder_is_made(folder, tmp_path, capsys, name, option, said):
    out = tmp_path / "run"
    words = [*options(name), *option.split(), "--model", str(folder), "--out", str(out)]
    assert helper(name).main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{name}: ") and said in error and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("name", [CALIBRATION, STRENGTH])
def test_help_is_quick_and_imports_nothing_heavy(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{name}.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'analyses' / f'{name}.py')!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    path = {"PYTHONPATH": str(ROOT / "analyses")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert run.stdout.startswith("usage:") and run.stdout.splitlines()[-1] == "[]"
