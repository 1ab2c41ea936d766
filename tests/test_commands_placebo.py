"""``kvprobe placebo`` in process: every word, keys of the JSON, files, what is printed, one line for each mistake."""

import contextlib
import io
import json

import pandas as pd
import placebo_items
import pytest

from kvprobe import cli

FIGURES = {"love.png", "effects.png", "doses.png"}
TABLES = {"items.parquet", "arms.parquet", "balance.parquet", "contrasts.parquet"}
RECORDS = {"summary.json", "manifest.json"}


def run_placebo(*words):
    """Exit status, and the lines that were printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main(["placebo", *map(str, words)])
    return status, said.getvalue().splitlines()


def loads(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("placebo")


@pytest.fixture(scope="module")
def small_model(folder):
    import tiny

    return str(tiny.save("llama", folder / "tiny", max_position_embeddings=1024))


@pytest.fixture(scope="module")
def own(folder, small_model):
    """Three items of the user's own, answered by the tiny model."""
    from kvprobe.models import load

    rows = [placebo_items.item_row(i) for i in range(3)]
    return placebo_items.answered(load(small_model), folder / "own.jsonl", *rows)


@pytest.fixture(scope="module")
def own_traces(folder):
    rows = [placebo_items.trace_row(0), placebo_items.trace_row(1)]
    return placebo_items.written(folder / "traces.jsonl", *rows)


@pytest.fixture(scope="module")
def items_run(small_model, own, folder):
    out = folder / "items"
    words = ["--model", small_model, "--file", own, "--placebos", "2", "--inject", "always", "--seed", "3"]
    return (*run_placebo(*words, "--json", "--out", out), out)


@pytest.fixture(scope="module")
def traces_run(small_model, own_traces, folder):
    out = folder / "traces"
    words = ["--model", small_model, "--file", own_traces, "--task", "trace_memory", "--placebos", "2"]
    return (*run_placebo(*words, "--caliper", "0.6", "--kappas", "0.5", "--json", "--out", out), out)


def test_placebo_hands_over_every_word(monkeypatch):
    """No option of the command is dropped on the way to the settings, and no default differs from theirs."""
    from kvprobe import commands, placebo

    seen = []
    monkeypatch.setattr(commands, "placebo", lambda *given: (seen.append(given), ({}, None))[1])
    monkeypatch.setattr(commands, "print_placebo", lambda summary, out: None)
    assert cli.main(["placebo"]) == 0
    assert seen[0][:3] == ("smollm2-135m", placebo.Settings(), None)
    words = "--task niah_single_2 --needles 1 --decoys 2 --length 800 --items 3 --placebos 2 --caliper 0.5 "
    words += "--position-caliper 0.2 --profile-weight 0.1 --remedies token_set,hard --inject always "
    words += "--direction random --level head --kappas 0.5 --threshold 0.4 --rule stays --rho 0.5 --layers 3,1 "
    words += "--residual-norm --haystack texts --new-tokens 9 --norm 2 --model tiny --seed 5 --out run"
    assert cli.main(["placebo", *words.split()]) == 0
    name, found, out, arguments = seen[1]
    wanted = placebo.Settings(
        task="niah_single_2",
        length=800,
        items=3,
        seed=5,
        placebos=2,
        caliper=0.5,
        position_caliper=0.2,
        profile_weight=0.1,
        remedies=("token_set", "hard"),
        inject="always",
        direction="random",
        level="head",
        kappas=(0.5,),
        threshold=0.4,
        rule="stays",
        rho=0.5,
        layers=(1, 3),
        residual_norm=True,
        new_tokens=9,
        p=2,
        options={"needles": 1, "decoys": 2, "path": "texts"},
    )
    assert (name, str(out), found) == ("tiny", "run", wanted)
    assert cli.main(["placebo", "--file", "own.jsonl", "--task", "trace_memory"]) == 0
    assert seen[2][1] == placebo.Settings("user_traces", length=None, path="own.jsonl")
    assert {"file", "json", *wanted.__dataclass_fields__} - set(arguments) == {"path", "options", "rows", "p", "arms"}


def test_items_of_a_file_run_and_print_every_promised_key(items_run):
    status, lines, _ = items_run
    assert status == 0
    summary = loads(lines[-1])
    wanted = "n_items contrasts identity_max_abs seed model dtype processing settings semantics timings_s versions "
    assert set((wanted + "peak_rss_mib task length accuracy n_answered outcome").split()) <= set(summary)
    assert (summary["task"], summary["length"], summary["n_items"], summary["seed"]) == ("user", None, 3, 3)
    assert (
        summary["identity_max_abs"] == 0
        and summary["n_answered"] == 3 == summary["contrasts"]["bound"]["contrast"]["n"]
    )
    for found in summary["contrasts"].values():
        assert {"matched", "unmatched", "no_overlap_ratio", "remedy", "balance", "effect", "contrast"} <= set(found)
        for variable in ("bound", "perturbation", "centred", "value_mass", "length", "position"):
            assert {"max_abs_ln_ratio", "smd_before", "smd_after"} <= set(found["balance"][variable])
        assert set(found["effect"]) == {"target", "placebo", "length_only", "gate"}
        contrast = "mean ci_low ci_high p_permutation p_signflip p_wilcoxon p_attainable n"
        assert set(contrast.split()) <= set(found["contrast"])
    assert summary["timings_s"]["total_s"] > summary["timings_s"]["load_s"] > 0


def test_items_of_a_file_are_written_with_figures_and_a_manifest(items_run):
    _, lines, out = items_run
    assert {path.name for path in out.iterdir()} == TABLES | FIGURES | RECORDS
    assert all((out / name).stat().st_size > 5000 for name in FIGURES)
    summary = loads(lines[-1])
    assert loads((out / "summary.json").read_text()) == summary
    manifest = loads((out / "manifest.json").read_text())
    assert (manifest["status"], manifest["command"], manifest["seed"]) == ("complete", "placebo", 3)
    assert manifest["settings"]["placebos"] == 2 and manifest["semantics"] == summary["semantics"]
    assert set(manifest["outputs"]) == TABLES | FIGURES | {"summary.json"}
    arms = pd.read_parquet(out / "arms.parquet")
    assert (arms["arm"] == "injected").sum() == 6 and arms["item"].nunique() == 3
    contrasts = pd.read_parquet(out / "contrasts.parquet")
    assert len(contrasts) == 6 and contrasts["confirmatory"].sum() == 2
    for _, row in contrasts.iterrows():
        assert row["mean"] == summary["contrasts"][row["match_on"]]["by_outcome"][row["outcome"]]["mean"]
    assert len(pd.read_parquet(out / "balance.parquet")) == 14 and len(pd.read_parquet(out / "items.parquet")) == 3


def test_what_is_printed_for_a_person_says_what_the_numbers_are(items_run):
    _, lines, out = items_run
    text = "\n".join(lines[:-1])
    assert "3 items (3 answered), seed 3, accuracy 1.00" in text and "identity − clean: 0" in text
    assert "user on " in text and "length" not in lines[0] and str(out / "arms.parquet") in " ".join(lines)
    for words in ("prefill-then-evict", "permutation within item p ", "smallest attainable", "Balance of target"):
        assert words in text
    assert "nan" not in text and "None" not in text


def test_traces_of_a_file_run_and_are_written(traces_run):
    status, lines, out = traces_run
    assert status == 0
    summary = loads(lines[-1])
    assert {"by_k", "selectivity", "deep_ratio"} <= set(summary) and summary["accuracy"] is None
    assert (summary["task"], summary["length"], summary["outcome"]) == ("user_traces", None, "settling_depth")
    assert [row["k"] for row in summary["by_k"]] == [2, 3] and summary["selectivity"]["n"] == 2
    assert {path.name for path in out.iterdir()} == TABLES | FIGURES | RECORDS | {"mentions.parquet"}
    assert len(pd.read_parquet(out / "mentions.parquet")) == 8
    assert loads((out / "manifest.json").read_text())["semantics"].startswith("never existed")
    text = "\n".join(lines[:-1])
    assert "Masking the first derivation" in text and "selectivity (effect" in text and "answered" not in text


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--caliper", "1e-9"), "injected"),
        (("--caliper", "1e-9", "--inject", "never"), "none"),
        (("--caliper", "1e-9", "--direction", "random", "--level", "head"), "injected"),
        (("--kappas", "", "--layers", "2,0", "--norm", "2"), "spans"),
        (("--residual-norm", "--new-tokens", "1", "--remedies", "hard_set,hard", "--caliper", "3"), "none"),
        (("--placebos", "1", "--rule", "stays", "--threshold", "0", "--rho", "1", "--caliper", "3"), "spans"),
    ],
)
def test_odd_words_run_to_the_end(words, kind, small_model, own, tmp_path):
    out = tmp_path / "run"
    given = ("--model", small_model, "--file", own, "--placebos", "2", *words)
    status, lines = run_placebo(*given, "--out", out, "--json")
    summary = loads(lines[-1])
    found = summary["contrasts"]["perturbation"]
    assert status == 0 and summary["identity_max_abs"] == 0
    if "--new-tokens" not in words:  # one letter is seldom the wanted one
        assert found["kind"] == kind
    assert {path.name for path in out.iterdir()} >= TABLES | RECORDS | {"effects.png"}
    arms = pd.read_parquet(out / "arms.parquet")["arm"]
    if kind == "injected":
        assert found["no_overlap_ratio"] > 0 and found["unmatched"] == 3 == found["remedy"]["injected"]
        assert "no_overlap for 3 targets" in "\n".join(lines) and (arms == "injected").sum() == 6
    if "never" in words:
        assert "not part of the contrast" in "\n".join(lines) and not (arms == "injected").any()
    if "" in words:
        assert not arms.str.startswith("dose").any()
    assert "nan" not in "\n".join(lines[:-1])


def test_one_item_that_is_not_answered_is_reported_without_a_contrast(small_model, tmp_path):
    path = placebo_items.written(tmp_path / "own.jsonl", placebo_items.item_row(0, references=["never written"]))
    out = tmp_path / "run"
    status, lines = run_placebo("--model", small_model, "--file", path, "--out", out, "--json")
    summary = loads(lines[-1])
    assert status == 0 and summary["n_answered"] == 0 and summary["accuracy"] == 0.0
    assert "bound: no contrast: no answered item has placebos" in "\n".join(lines)
    assert len(pd.read_parquet(out / "balance.parquet")) == 0 and len(pd.read_parquet(out / "contrasts.parquet")) == 6


def test_generated_traces_are_refused_where_the_model_is_too_short(small_model, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["placebo", "--model", small_model, "--task", "trace_memory", "--out", str(out)]) == 2
    assert "the model reads at most 1024" in capsys.readouterr().err and not out.exists()


WRONG_WORDS = [
    ("--task niah_single_9", "no task 'niah_single_9'"),
    ("--task user", "a file goes with user or user_traces only"),
    ("--task niah_single_1 --file own.jsonl", "leave the task out, or give --task trace_memory"),
    ("--task trace_memory --needles 3", "needles: options of needle tasks"),
    ("--file own.jsonl --decoys 3", "decoys: options of needle tasks"),
    ("--file own.jsonl --length 300", "--length 300 with --file own.jsonl"),
    ("--file own.jsonl --items 3", "--items 3 with --file own.jsonl"),
    ("--remedies injected", "remedies holds ['injected'], must be some of contiguous, hard, hard_set, token_set"),
    ("--kappas 1", "kappas holds 1, must be shares between 0 and 1"),
    ("--kappas half", "kappas holds 'half', must be numbers"),
    ("--layers one", "layers holds 'one', must be whole numbers"),
    ("--layers ,", "layers names none"),
    ("--inject maybe", "unmatched, always, never"),
    ("--direction up", "placebo, random"),
    ("--level row", "layer, head"),
    ("--rule last", "first, stays"),
    ("--threshold 2", "threshold is 2, must be from 0 to 1 bits"),
    ("--rho 0", "rho is 0, must be above 0 and at most 1"),
    ("--caliper 0", "caliper is 0, must be a finite number above 0"),
    ("--caliper nan", "caliper is nan"),
    ("--position-caliper -1", "position_caliper is -1"),
    ("--profile-weight -1", "profile_weight is -1"),
    ("--norm 3", "--norm"),
    ("--placebos 0", "--placebos"),
    ("--items 0", "--items"),
    ("--length 0", "--length"),
    ("--new-tokens 0", "--new-tokens"),
    ("--seed -1", "--seed"),
    ("--caliper wide", "'wide'"),
]


@pytest.mark.parametrize(("words", "said"), WRONG_WORDS)
def test_placebo_refuses_words_before_a_model_is_loaded(words, said, capsys, tmp_path, monkeypatch):
    from kvprobe import models

    def load(name):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load", load)
    out = tmp_path / "run"
    assert cli.main(["placebo", *words.split(), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--file {own} --layers 0,3", "layers names [3], the model has layers 0 … 2"),
        ("--file {own} --layers -1", "layers names [-1]"),
        ("--file {own} --placebos 50", "no room for 50 disjoint windows"),
        ("--file {own} --new-tokens 900", "do not fit the model's context of 1024"),
        ("--file {traces} --task trace_memory --placebos 50", "no room for 50 disjoint windows"),
        ("--file {own} --task trace_memory", "own.jsonl"),
        ("--file {traces}", "traces.jsonl"),
        ("--file nowhere.jsonl", "nowhere.jsonl"),
        ("--file {broken}", "broken.jsonl"),
        ("--length 9000", "1024"),
    ],
)
def test_placebo_refuses_what_does_not_fit_before_it_computes(
    words, said, small_model, own, own_traces, capsys, tmp_path, monkeypatch
):
    from kvprobe import runs

    def compute(*given, **more):
        raise AssertionError("something was computed")

    monkeypatch.setattr(runs, "observe", compute)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "Bob has 5."}\n')
    out = tmp_path / "run"
    given = words.format(own=own, traces=own_traces, broken=broken).split()
    assert cli.main(["placebo", "--model", small_model, *given, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not out.exists()


def test_a_mistake_of_placebo_leaves_an_earlier_run_as_it_was(items_run, small_model, own, capsys):
    _, _, out = items_run
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert cli.main(["placebo", "--model", small_model, "--file", str(own), "--layers", "7", "--out", str(out)]) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before and capsys.readouterr().err
