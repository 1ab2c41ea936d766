"""``kvprobe map`` in process: keys of the JSON, files, what is printed, one line for each mistake."""

import contextlib
import io
import json

import pandas as pd
import pytest

from kvprobe import cli

WORDS = ["The heron", "stood in", "the reeds", "and watched", "a slow", "grey river", "turn under", "the bridge."]
MAPPED = ["--cache", "0.5", "--budgets", "0.4,0.6", "--length", "240", "--seed", "4"]


def run_map(*words):
    """Exit status, stdout's lines and stderr, of ``kvprobe map``."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(["map", *map(str, words)])
    return status, said.getvalue().splitlines(), complained.getvalue()


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    import tiny

    return str(tiny.save("llama", tmp_path_factory.mktemp("map") / "tiny"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three documents of different words."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"text{i}.txt").write_text(" ".join(WORDS[i:] + WORDS[:i] + WORDS[::-1]) + f" {i}")
    return folder


@pytest.fixture(scope="module")
def mapped(small_model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("map") / "run"
    status, lines, errors = run_map("--model", small_model, "--docs", texts, *MAPPED, "--json", "--out", out)
    assert status == 0, errors
    return lines, out


HEADS = "share ci_low ci_high n_heads significantly_lower significantly_higher"


def test_every_promised_key_is_there(mapped):
    lines, _ = mapped
    summary = strict(lines[-1])
    assert {"heads_reduced", "layers", "budgets", "preset", "probe", "n_docs", "model"} <= set(summary)
    assert set(HEADS.split()) <= set(summary["heads_reduced"])
    assert set(["base", "ours", "reduction"]) <= set(summary["layers"])
    assert (summary["n_docs"], summary["preset"], summary["probe"]) == (3, "paper", "first_decoded")
    assert summary["heads_reduced"]["n_heads"] == 18 and list(summary["presets"]) == ["paper", "released"]
    for block in (summary, *summary["presets"].values()):
        layers = block["layers"]
        for base, ours, reduction in zip(layers["base"], layers["ours"], layers["reduction"], strict=True):
            assert reduction == pytest.approx(base - ours, abs=1e-9)
        assert len(layers["base"]) == 3 and [row["cache"] for row in block["budgets"]] == [0.4, 0.6]
    assert summary["seed"] == 4 and summary["measure"] == "attn_out" and summary["timings_s"]["total_s"] > 0
    assert summary["tokens"]["max"] <= 240 and summary["semantics"].startswith("prefill-then-evict")


def test_what_is_printed_holds_the_numbers_and_no_nan(mapped):
    lines, out = mapped
    summary, text = strict(lines[-1]), "\n".join(lines[:-1])
    assert "nan" not in text.lower().replace("finance", "") and "None" not in text
    share = summary["heads_reduced"]["share"]
    assert f"{100 * share:.3g} %" in text and "3 documents" in text and str(out) in text
    assert "no head could be significant at this number of documents" in text


def test_files_and_tables(mapped):
    lines, out = mapped
    tables = {"cells", "runs", "heads", "layers", "budgets"}
    names = {path.name for path in out.iterdir()}
    assert {f"{name}.parquet" for name in tables} | {"summary.json", "manifest.json"} <= names
    assert any(name.endswith(".png") for name in names)
    assert json.loads((out / "summary.json").read_text()) == strict(lines[-1])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == "map" and manifest["seed"] == 4
    assert manifest["settings"]["cache"] == "0.5" and manifest["settings"]["reading"]["length"] == 240
    assert manifest["semantics"].startswith("prefill-then-evict")
    heads = pd.read_parquet(out / "heads.parquet")
    assert len(heads) == 2 * 18 and len(pd.read_parquet(out / "cells.parquet")) == 2 * 3 * 3 * 18
    assert len(pd.read_parquet(out / "layers.parquet")) == 6 and len(pd.read_parquet(out / "budgets.parquet")) == 4
    assert len(pd.read_parquet(out / "runs.parquet")) == 2 * 3 * 3 * 3
    summary = strict(lines[-1])
    mine = heads[heads["preset"] == "paper"]
    assert summary["heads_reduced"]["share"] == pytest.approx((mine["difference"] < -1e-12).mean())


def test_the_same_words_give_the_same_numbers(mapped, small_model, texts):
    lines, _ = mapped
    status, again, _ = run_map("--model", small_model, "--docs", texts, *MAPPED, "--json")
    one, other = strict(lines[-1]), strict(again[-1])
    for name in ("timings_s", "peak_rss_mib"):
        del one[name], other[name]
    assert status == 0 and one == other


@pytest.mark.parametrize(
    "words",
    ["--cache 1", "--cache 0.5 --budgets 1", "--cache 0.5 --documents 1",
     "--cache 0.5 --probe last_prompt --measure local",
     "--cache 0.5 --probe next_token --measure hidden", "--cache 0.5 --policy tova --against tova+two_stage --norm 2"],
)  # fmt: skip
def test_what_cannot_be_known_is_not_printed_as_a_number(words, small_model, texts):
    given = ["--model", small_model, "--docs", texts, "--length", "240", "--json"]
    status, lines, errors = run_map(*given, *words.split())
    assert status == 0, errors
    strict(lines[-1])
    text = "\n".join(lines[:-1]).lower()
    assert "nan" not in text and "none" not in text


def test_a_context_that_no_usual_size_fits_still_has_maps(small_model, texts, tmp_path):
    """40 % of 70 tokens are fewer than the window of 32, 60 % are not."""
    out = tmp_path / "run"
    words = ["--cache", "0.6", "--template", "none", "--length", "70", "--json", "--out", out]
    status, lines, errors = run_map("--model", small_model, "--docs", texts, *words)
    assert status == 0, errors
    assert [row["cache"] for row in strict(lines[-1])["budgets"]] == [0.6] and (out / "heads.parquet").exists()


REFUSED = [
    ("--cache 0", "cache ratio '0'"),
    ("--cache x", "cache ratio 'x'"),
    ("--cache 0.05", "fewer than the 32 that snapkv"),
    ("--budgets 0.01", "cache 0.01"),
    ("--budgets 0.5,0.5", "given twice"),
    ("--policy nonsense", "nonsense"),
    ("--against snapkv", "held against itself"),
    ("--policy tova --against random --alpha 0.5", "setting alpha"),
    ("--preset papers", "papers"),
    ("--measure all", "measure='all'"),
    ("--probe all", "probe='all'"),
    ("--probe next_token --template multi_news", "has a question"),
    ("--documents 4", "n is 4"),
    ("--length 9000", "9000"),
    ("--length 20", "smallest length"),
    ("--template context", "template"),
    ("--join 5", "join is 5"),
    ("--norm 3", "3"),
    ("--documents 0", "0"),
    ("--docs /no/such/folder", "/no/such/folder"),
    ("--model nowhere/at-all", "nowhere/at-all"),
    ("--chat", "chat"),
    ("--policy oracle --against random --template none", "oracle"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_mistake_is_one_line_before_anything_is_written(words, said, small_model, texts, tmp_path, monkeypatch):
    from kvprobe import cells

    def compute(*given, **more):
        raise AssertionError("a document was run")

    monkeypatch.setattr(cells, "probe", compute)
    out = tmp_path / "run"
    given = words.split()
    usual = {"--model": small_model, "--docs": str(texts), "--cache": "0.5", "--length": "240"}
    for name, value in usual.items():
        given += [] if name in given else [name, value]
    status, lines, error = run_map(*given, "--out", out)
    assert status == 2, error
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not lines
    assert not out.exists()


def test_a_mistake_leaves_an_earlier_run_as_it_was(mapped, small_model, texts):
    _, out = mapped
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for words in (["--cache", "0.01"], ["--cache", "0.5", "--measure", "x"], ["--cache", "0.5", "--documents", "9"]):
        status, _, error = run_map("--model", small_model, "--docs", texts, *words, "--out", out)
        assert status == 2 and error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_help_names_every_option():
    status, lines, _ = run_map("--help")
    text = "\n".join(lines)
    options = (
        "docs cache policy against budgets measure preset alpha epsilon probe documents length join template chat norm"
    )
    assert status == 0 and all(f"--{name}" in text for name in options.split())
