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


@pytest.mark.parametrize(
    ("family", "words"),
    [("mistral", "--items 1"), ("gpt_oss", "--items 2 --exclude-layers 1"), ("gemma2", "--items 1 --exclude-layers 1")],
)
def test_what_the_windows_of_all_layers_hide_is_a_dash(family, words, tmp_path):
    import tiny

    model = tiny.save(family, tmp_path / "tiny", max_position_embeddings=4096)
    given = ["--model", model, "--length", "700", "--distractors", "0", "--json", "--out", tmp_path / "out"]
    status, lines, errors = run_sinks(*given, *words.split())
    assert status == 0, errors
    summary, text = strict(lines[-1]), "\n".join(lines[:-1])
    row = summary["buckets"]["first4"]
    assert row["share"] == 0 and row["n"] == summary["n_items"]
    assert [row[name] for name in ("mass_per_token", "value_mass_per_token", "ratio", "relative_ratio")] == [None] * 4
    assert all(place[name] is None for place in summary["positions"] for name in ("mass", "value_mass", "ratio"))
    assert all(each["value_mass_per_token"]["first4"] is None for each in summary["epsilon_sweep"])
    said = next(line for line in lines if "first 4 positions" in line and "│" in line)
    assert said.count("–") == 4 and "0.0 %" in said and "nan" not in text.lower() and "None" not in text
    assert "the chosen rows of no input see tokens of both" in text and "documents have no" not in text
    shares = [each["share"] for each in summary["buckets"].values() if each]
    assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_layers_left_out_lend_nothing_to_secondary_sinks(small_model):
    words = ["--model", small_model, "--items", "1", "--length", "1300", "--distractors", "3", "--json"]
    summaries = [strict(run_sinks(*words, *more)[1][-1]) for more in ([], ["--exclude-layers", "1,2"])]
    whole, part = ({n: r["n_positive"] for n, r in s["secondary"]["recovery"].items()} for s in summaries)
    labelled = summaries[0]["secondary"]["layer_keys"]["label"]
    assert (whole["all_four"], part["all_four"]) == (sum(labelled), labelled[0])
    judged = [s["secondary"]["recovery"]["residual_only"] for s in summaries]
    candidates = summaries[0]["secondary"]["layer_keys"]["candidates"]
    assert judged[0]["n_positive"] + judged[0]["n_negative"] == sum(candidates)
    assert judged[1]["n_positive"] + judged[1]["n_negative"] == candidates[0]


def test_one_of_a_thing_has_no_plural_and_one_length_is_one_number(small_model):
    words = ["--items", "1", "--length", "1300", "--distractors", "3", "--exclude-layers", "0"]
    _, lines, _ = run_sinks("--model", small_model, *words)
    text = "\n".join(lines)
    (tokens,) = {word for word in text.split() if word.isdigit() and f": 1 item of {word} tokens, seed" in text}
    assert int(tokens) > 500 and "layer left out, as stated before the run: 0" in text
    assert "1 items" not in text and "in 0 of 1 input" in text and "over 1 item]" in text


def secondary_summary(elsewhere):
    recovered = {name: {"auroc": {"ratio": {"n": 0}}} for name in ("all_four", "residual_only")}
    return {
        "secondary": {
            "texts": [["a", 3]],
            "n_tokens": {"mean": 9.5},
            "n_tokens_in_other_buckets": elsewhere,
            "n_inputs_with": 2,
            "n_inputs": 2,
            "recovery": recovered,
            "note": "note",
        }
    }


def test_secondary_sinks_in_the_evidence_are_told_apart():
    from kvprobe.commands.sinking import _secondary_lines

    said = _secondary_lines(secondary_summary(1.5))[0]
    assert "9.5 tokens an input (1.5 of them counted as evidence, which has a token first), in 2 of 2 inputs" in said
    assert "9.5 tokens an input, in 2 of 2 inputs" in _secondary_lines(secondary_summary(0.0))[0]


REFUSED = [
    ("--docs essays --task niah_single_2", "--docs reads documents and --task"),
    ("--chat", "--chat goes with --docs; allowed: --docs essays"),
    ("--documents 2", "--documents goes with --docs; allowed: --docs essays"),
    ("--join 2", "--join goes with --docs; allowed: --docs essays"),
    ("--template none", "--template goes with --docs; allowed: --docs essays"),
    ("--epsilon 1e308", "epsilon=1e+308; allowed: a number from 0 to 1e+06"),
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
    said = " ".join("\n".join(lines).replace("│", " ").split())
    assert said.count("With --docs:") == 4 and "128 tokens" in said
