"""The commands on the embedded model, in process: keys of the JSON, files, one line for each mistake."""

import json

import pandas as pd
import pytest

from kvprobe import cli

FEATURES = {"mass", "delta_mass", "value_mass", "bound", "centred_bound", "perturbation"}


@pytest.fixture(scope="module")
def niah(at_hand, tmp_path_factory):
    """One small run of the main command; returns its exit status, stdout lines and folder."""
    import contextlib
    import io

    out = tmp_path_factory.mktemp("niah") / "run"
    task = ["--task", "niah_multikey_1", "--length", "900", "--items", "2"]
    words = ["niah", *task, "--distractors", "4", "--decoys", "2", "--new-tokens", "12", "--json"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), at_hand():
        status = cli.main([*words, "--out", str(out)])
    return status, said.getvalue().splitlines(), out


@pytest.mark.slow
def test_niah_prints_every_promised_key(niah):
    status, lines, _ = niah
    assert status == 0
    summary = json.loads(lines[-1])
    wanted = (
        "model task length n_items seed semantics accuracy auroc auroc_answer gate ablation needles entropy timings_s"
    )
    assert set(wanted.split()) | {"peak_rss_mib", "versions"} <= set(summary)
    for place in ("auroc", "auroc_answer"):
        for contrast in ("vs_hard", "vs_distractor"):
            assert set(summary[place][contrast]) == FEATURES
            for row in summary[place][contrast].values():
                assert {"mean", "ci_low", "ci_high", "heads_at_1"} <= set(row)
    assert {"contrast", "threshold", "value", "ci_low", "ci_high", "p_permutation", "n", "verdict"} <= set(
        summary["gate"]
    )
    for label in ("evidence", "hard", "decoy", "distractor"):
        assert {"delta_logprob", "kl", "accuracy"} <= set(summary["ablation"][label])
    shift = summary["ablation"]["evidence"]["delta_attention"]
    assert all(set(shift[bucket]) == {"raw", "corrected", "conditional"} for bucket in ("first4", "content"))
    assert summary["needles"][0]["share"] == 1.0 and summary["entropy"] == 0.0


@pytest.mark.slow
def test_cutting_the_evidence_hurts_a_trained_model_and_cutting_others_does_not(niah):
    ablation = json.loads(niah[1][-1])["ablation"]
    assert ablation["evidence"]["delta_logprob"] < -3
    assert all(abs(ablation[label]["delta_logprob"]) < 2 for label in ("hard", "decoy", "distractor"))


@pytest.mark.slow
def test_niah_writes_tables_figures_and_a_manifest(niah):
    _, lines, out = niah
    names = {path.name for path in out.iterdir()}
    assert {"items.parquet", "spans.parquet", "heads.parquet", "arms.parquet", "manifest.json", "summary.json"} <= names
    assert sum(name.endswith(".png") for name in names) >= 3
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == "niah" and manifest["weight_processing"] == "raw"
    assert json.loads((out / "summary.json").read_text())["gate"] == json.loads(lines[-1])["gate"]
    assert len(pd.read_parquet(out / "items.parquet")) == 2


@pytest.mark.slow
def test_check_reports_the_embedded_model(capsys):
    assert cli.main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ok"] and len(report["layers"]) == 30 and all(layer["maskable"] for layer in report["layers"])
    assert report["logits_max_diff"] <= report["tolerance"] and report["cached_max_diff"] <= report["tolerance"]
    assert report["processing"] == "raw" and report["versions"]["transformers"]
    assert cli.main(["check"]) == 0
    assert "PositionEmbeddingsAttentionBridge" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("niah --task niah_single_9", "niah_single_1"),
        ("niah --gate-contrast easy", "hard, distractor"),
        ("niah --items 0", "items"),
        ("niah --length 60 --task niah_single_1", "smallest"),
        ("niah --length 9000", "8192"),
        ("niah --model no/such/folder/anywhere", "no/such/folder/anywhere"),
        ("check ./nowhere", "./nowhere"),
        ("niah --exclude-layers 99 --length 700 --items 1", "0 … 29"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_left_behind(words, said, at_hand, capsys, tmp_path):
    out = tmp_path / "run"
    given = words.split() + (["--out", str(out)] if words.startswith("niah") else [])
    with at_hand():
        assert cli.main(given) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ")
    assert not out.exists()


@pytest.mark.slow
def test_a_mistake_leaves_an_earlier_run_as_it_was(niah, at_hand, capsys):
    _, _, out = niah
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with at_hand():
        assert cli.main(["niah", "--length", "60", "--out", str(out)]) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert "smallest" in capsys.readouterr().err


def test_brackets_are_printed_as_they_are(capsys):
    from kvprobe.commands.console import console

    console().print("mean [no interval] in run[bold]x")
    assert capsys.readouterr().out == "mean [no interval] in run[bold]x\n"
