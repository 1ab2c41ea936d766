"""``kvprobe sinks`` in process: keys of the JSON, files, what is printed, one line for each mistake."""

import contextlib
import io
import json

import pandas as pd
import pytest

from kvprobe import cli

WORDS = "The heron stood in the reeds and watched a slow grey river turn under the bridge."
TASK = ["--items", "2", "--length", "1300", "--distractors", "3", "--epsilons", "0,1e-3", "--seed", "4"]


def run_sinks(*words):
    """Exit status, stdout's lines and stderr, of ``kvprobe sinks``."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(["sinks", *map(str, words)])
    return status, said.getvalue().splitlines(), complained.getvalue()


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    import tiny

    return str(tiny.save("llama", tmp_path_factory.mktemp("sinks") / "tiny", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"text{i}.txt").write_text(f"{WORDS} {i} {WORDS}")
    return folder


@pytest.fixture(scope="module")
def of_task(small_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("sinks") / "task"
    status, lines, errors = run_sinks("--model", small_model, *TASK, "--json", "--out", out)
    assert status == 0, errors
    return lines, out


@pytest.fixture(scope="module")
def of_documents(small_model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("sinks") / "docs"
    words = ["--docs", texts, "--documents", "2", "--seed", "4"]
    status, lines, errors = run_sinks("--model", small_model, *words, "--json", "--out", out)
    assert status == 0, errors
    return lines, out


def test_every_promised_key_is_there(of_task):
    summary = strict(of_task[0][-1])
    for bucket in ("first4", "evidence", "other", "recent"):
        row = summary["buckets"][bucket]
        assert all(isinstance(row[name], float) for name in ("mass", "value_mass", "ratio")) and row["n"] == 2
    found = summary["auroc_ratio_first4_vs_evidence"]
    assert {"mean", "ci_low", "ci_high", "n"} <= set(found) and found["higher"] == "evidence"
    assert found["ci_low"] <= found["mean"] <= found["ci_high"]
    assert {"mass", "value_mass", "norm", "ratio", "relative_ratio"} <= set(summary["auroc"])
    assert {"mass", "value_mass", "ratio", "relative_norm"} <= set(summary["first_position"])
    assert [row["epsilon"] for row in summary["epsilon_sweep"]] == [0, 1e-3]
    sides = {"evidence", "first4", "open"}
    assert all(set(row["verdict"].values()) <= sides for row in summary["epsilon_sweep"])
    assert 0 <= summary["heads_sinky"]["share"] <= 1 and summary["seed"] == 4
    assert {"model", "settings", "semantics", "layers", "secondary", "after", "courses"} <= set(summary)
    assert summary["status"].startswith("exploratory") and summary["settings"]["options"]["distractors"] == 3


def test_what_is_printed_holds_the_numbers_their_directions_and_no_nan(of_task):
    lines, out = of_task
    summary, text = strict(lines[-1]), "\n".join(lines[:-1])
    assert "nan" not in text.lower() and "None" not in text and "…" not in text
    assert "exploratory" in text and str(out) in text and "P(evidence token > first4 token)" in text
    assert f"{summary['auroc']['ratio']['mean']:.3f}" in text
    assert f"{100 * summary['heads_sinky']['share']:.1f} %" in text
    assert max(map(len, lines[3:10])) <= 120


def test_files_and_tables(of_task, of_documents):
    for (lines, out), more, without in (
        (of_task, {"after", "courses"}, set()),
        (of_documents, set(), {"after.parquet", "courses.parquet", "courses.png", "epsilon_sweep.png"}),
    ):
        names = {path.name for path in out.iterdir()}
        tables = {"items", "buckets", "tokens", "sinks", "epsilon"} | more
        assert {f"{name}.parquet" for name in tables} | {"summary.json", "manifest.json"} <= names
        assert {"mass_value_mass.png", "token_strip.png", "sink_map.png"} <= names and not without & names
        assert json.loads((out / "summary.json").read_text()) == strict(lines[-1])
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["status"] == "complete" and manifest["command"] == "sinks" and manifest["seed"] == 4
    assert {"courses.png", "epsilon_sweep.png"} <= {path.name for path in of_task[1].iterdir()}
    sinks = pd.read_parquet(of_task[1] / "sinks.parquet")
    share = strict(of_task[0][-1])["heads_sinky"]["share"]
    assert len(sinks) == 2 * 18 and share == pytest.approx(sinks["sinky"].mean())


def test_documents_say_that_nothing_was_compared(of_documents):
    lines, _ = of_documents
    summary, text = strict(lines[-1]), "\n".join(lines[:-1])
    assert (summary["n_items"], summary["unit"], summary["queries"]) == (2, "document", "all")
    assert summary["buckets"]["evidence"] is None and summary["auroc_ratio_first4_vs_evidence"]["n"] == 0
    assert "no evidence" in text and "nan" not in text.lower() and "None" not in text


def test_the_same_words_give_the_same_numbers(of_documents, small_model, texts):
    words = ["--docs", texts, "--documents", "2", "--seed", "4", "--json"]
    status, again, _ = run_sinks("--model", small_model, *words)
    one, other = strict(of_documents[0][-1]), strict(again[-1])
    for name in ("timings_s", "peak_rss_mib"):
        del one[name], other[name]
    assert status == 0 and one == other


@pytest.mark.parametrize(
    "words",
    [
        "--items 1 --no-secondary --no-after",
        "--items 1 --no-courses --queries answer --norm 2",
        "--items 1 --queries all",
    ],
)
def test_what_cannot_be_known_is_not_printed_as_a_number(words, small_model):
    given = ["--model", small_model, "--length", "1300", "--distractors", "3", "--json"]
    status, lines, errors = run_sinks(*given, *words.split())
    assert status == 0, errors
    strict(lines[-1])
    text = "\n".join(lines[:-1])
    assert "nan" not in text.lower() and "None" not in text and "no interval" in text


REFUSED = [
    ("--docs essays --task niah_single_2", "--docs reads documents and --task"),
    ("--docs essays --courses", "courses needs an answer"),
    ("--task nothing", "nothing"),
    ("--docs /no/such/folder", "/no/such/folder"),
    ("--queries some", "'some'"),
    ("--epsilon -1", "epsilon=-1"),
    ("--epsilons a", "'a'"),
    ("--threshold 1", "threshold is 1"),
    ("--exclude-layers 7", "[7]"),
    ("--exclude-layers x", "'x'"),
    ("--norm 3", "3"),
    ("--items 0", "0"),
    ("--length 50", "length 50 is too small"),
    ("--model nowhere/at-all", "nowhere/at-all"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_mistake_is_one_line_before_anything_is_written(words, said, small_model, tmp_path):
    given = words.split()
    given += [] if "--model" in given else ["--model", small_model]
    status, lines, error = run_sinks(*given, "--out", tmp_path / "run")
    assert status == 2 and said in error and error.count("\n") == 1 and not lines
    assert not (tmp_path / "run").exists()


def test_help_names_every_option():
    status, lines, _ = run_sinks("--help")
    options = "task docs items documents length decoys needles haystack join template chat queries epsilon epsilons"
    options += " threshold secondary courses after exclude-layers norm model out seed json distractors"
    assert status == 0 and all(f"--{name}" in "\n".join(lines) for name in options.split())
