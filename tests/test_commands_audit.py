"""``kvprobe audit`` in process: keys of the JSON, files, what is printed, one line for each mistake."""

import contextlib
import io
import json

import pandas as pd
import pytest

from kvprobe import cli

WORDS = ["The heron", "stood in", "the reeds", "and watched", "a slow", "grey river", "turn under", "the bridge."]
ROW = (
    "cache level base actual bound centred_bound stage2_bound previous_bound ratio bound_over_actual "
    "centred_over_actual violations assumption"
)


def run_audit(*words):
    """Exit status, stdout's lines and stderr, of ``kvprobe audit``."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(["audit", *map(str, words)])
    return status, said.getvalue().splitlines(), complained.getvalue()


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    import tiny

    return str(tiny.save("llama", tmp_path_factory.mktemp("audit") / "tiny", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"text{i}.txt").write_text(" ".join((WORDS[i:] + WORDS[:i] + WORDS[::-1]) * 2) + f" {i}")
    return folder


@pytest.fixture(scope="module")
def audited(small_model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "run"
    words = [
        "--cache",
        "0.4,0.2",
        "--length",
        "460",
        "--seed",
        "4",
        "--sweep",
        "norm",
        "--items",
        "0",
        "--preset",
        "paper",
    ]
    status, lines, errors = run_audit("--model", small_model, "--docs", texts, *words, "--json", "--out", out)
    assert status == 0, errors
    return lines, out


@pytest.mark.slow
def test_every_promised_key_is_there(audited):
    lines, _ = audited
    summary = strict(lines[-1])
    assert {"rows", "n_docs", "model", "violations", "probe", "semantics", "norm", "seed"} <= set(summary)
    assert summary["n_docs"] == 3 and summary["violations"] == 0 and summary["seed"] == 4
    assert {(r["preset"], r["base"], r["cache"], r["level"]) for r in summary["rows"]} == {
        ("paper", base, cache, level)
        for base in ("snapkv", "snapkv+adakv")
        for cache in (0.2, 0.4)
        for level in ("layer", "head")
    }
    assert len(summary["rows"]) == 8
    for row in summary["rows"]:
        assert set(ROW.split()) <= set(row)
        assert {"share_selected", "share_oracle", "failing_heads"} <= set(row["assumption"])
        assert 0 < row["actual"] <= row["centred_bound"] <= row["bound"] and row["violations"] == 0
        assert row["bound_over_actual"] == pytest.approx(row["bound"] / row["actual"])
        assert row["centred_over_actual"] == pytest.approx(row["centred_bound"] / row["actual"])
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(row["stage2_bound"] / row["previous_bound"])
        assert 0 <= row["assumption"]["share_selected"] <= row["assumption"]["share_oracle"] <= 1
    assert [row["value"] for row in summary["sweeps"]] == [1, 2] * 2 and summary["scores"] == []


def test_what_is_printed_holds_the_numbers_and_no_nan(audited):
    lines, out = audited
    summary, text = strict(lines[-1]), "\n".join(lines[:-1])
    assert "nan" not in text.lower() and "None" not in text and str(out) in text
    n_cells = sum(row["n_cells"] for row in summary["rows"])
    assert f"0 violations in {n_cells} cells" in text and "3 documents" in text
    assert f"{summary['rows'][0]['bound_over_actual']:.3g}" in text


def test_files_and_tables(audited):
    lines, out = audited
    names = {path.name for path in out.iterdir()}
    tables = {f"{name}.parquet" for name in ("rows", "layers", "heads", "cells", "sweeps")}
    assert tables | {"summary.json", "manifest.json"} <= names and "scores.parquet" not in names
    assert any(name.endswith(".png") for name in names)
    assert json.loads((out / "summary.json").read_text()) == strict(lines[-1])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == "audit"
    assert manifest["settings"]["caches"] == ["0.4", "0.2"] and manifest["settings"]["sweeps"] == ["norm"]
    heads = pd.read_parquet(out / "heads.parquet")
    assert len(heads) == 3 * 4 * 2 * 18 and len(pd.read_parquet(out / "cells.parquet")) == 3 * 4 * 2 * 3
    rows = pd.read_parquet(out / "rows.parquet")
    assert len(rows) == 8 and "share_selected" in rows
    first = rows[(rows["level"] == "head") & (rows["cache"] == 0.4) & (rows["base"] == "snapkv")].iloc[0]
    mine = heads[(heads["policy"] == "snapkv+two_stage (paper)") & (heads["cache"] == 0.4)]
    assert first["actual"] == pytest.approx(mine["actual"].mean())
    assert first["share_selected"] == pytest.approx((mine["sigma"] > 0.5).mean())


@pytest.mark.parametrize(
    "words",
    ["--cache 0.5 --alpha 0", "--cache 1", "--cache 0.5 --documents 1 --level head", "--cache 0.5 --probe next_token",
     "--cache 0.5 --base tova --norm 2 --level layer"],
)  # fmt: skip
def test_what_cannot_be_known_is_not_printed_as_a_number(words, small_model, texts):
    given = ["--model", small_model, "--docs", texts, "--length", "240", "--json"]
    status, lines, errors = run_audit(*given, *words.split())
    assert status == 0, errors
    strict(lines[-1])
    text = "\n".join(lines[:-1]).lower()
    assert "nan" not in text and "none" not in text


@pytest.mark.parametrize("family", ["gemma2"])
def test_layers_whose_window_is_shorter_than_the_question(family, texts, tmp_path):
    """Nothing of the context is seen there: L, θ and θ_c are 0 and have no ratio."""
    import tiny

    model = tiny.save(family, tmp_path / "tiny")
    out = tmp_path / "run"
    status, lines, errors = run_audit(
        "--model", model, "--docs", texts, "--cache", "0.5", "--base", "tova", "--length", "240", "--json", "--out", out
    )
    assert status == 0, errors
    assert strict(lines[-1])["violations"] == 0 and "nan" not in "\n".join(lines[:-1]).lower()


@pytest.mark.slow
def test_scores_of_a_sweep(small_model, texts, tmp_path):
    """One value's worth of the real thing: a needle task of 1000 tokens, one item."""
    out = tmp_path / "run"
    words = [
        "--cache",
        "0.6",
        "--base",
        "tova",
        "--level",
        "head",
        "--sweep",
        "norm",
        "--items",
        "1",
        "--length",
        "240",
    ]
    status, lines, errors = run_audit("--model", small_model, "--docs", texts, *words, "--json", "--out", out)
    assert status == 0, errors
    summary = strict(lines[-1])
    assert len(summary["sweeps"]) == 4 and len(summary["scores"]) == 6
    assert [row["value"] for row in summary["scores"] if row["value"] is None] == [None, None]
    assert len(pd.read_parquet(out / "scores.parquet")) == 6
    assert "nan" not in "\n".join(lines[:-1]).lower()


REFUSED = [
    ("--cache 0", "cache ratio '0'"),
    ("--cache 0.5,0.5", "given twice"),
    ("--cache 0.05", "fewer than the 32 that snapkv"),
    ("--base nonsense", "nonsense"),
    ("--base snapkv+two_stage", "second stage already"),
    ("--base random", "no first stage"),
    ("--level model", "level model"),
    ("--preset papers", "papers"),
    ("--sweep beta", "sweep beta"),
    ("--sweep norm --task qa", "no task 'qa'"),
    ("--sweep norm --items 0 --length 300 --template none --docs {short}", "32"),
    ("--sweep norm --items 1 --length 480 --model {tight}", "1000"),
    ("--items -1", "-1"),
    ("--alpha 2", "alpha=2"),
    ("--norm 0", "0"),
    ("--probe all", "probe='all'"),
    ("--documents 4", "n is 4"),
    ("--length 9000", "9000"),
    ("--docs /no/such/folder", "/no/such/folder"),
    ("--cache ,", "cache"),
]


@pytest.fixture(scope="module")
def tight_model(tmp_path_factory):
    """Reads 512 tokens: the documents, but no needle prompt of 1000."""
    import tiny

    return str(tiny.save("llama", tmp_path_factory.mktemp("audit") / "tight"))


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_mistake_is_one_line_before_anything_is_written(
    words, said, small_model, tight_model, texts, tmp_path, monkeypatch
):
    from kvprobe import cells

    def compute(*given, **more):
        raise AssertionError("a document was run")

    monkeypatch.setattr(cells, "probe", compute)
    (tmp_path / "short.txt").write_text(" ".join(WORDS))  # 10 % of it are fewer tokens than a window
    out = tmp_path / "run"
    given = words.format(short=tmp_path / "short.txt", tight=tight_model).split()
    usual = {"--model": small_model, "--docs": str(texts), "--cache": "0.5", "--length": "240"}
    for name, value in usual.items():
        given += [] if name in given else [name, value]
    status, lines, error = run_audit(*given, "--out", out)
    assert status == 2, error
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not lines
    assert not out.exists()


def test_a_mistake_leaves_an_earlier_run_as_it_was(audited, small_model, texts):
    _, out = audited
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for words in (["--cache", "0.01"], ["--cache", "0.5", "--level", "x"], ["--cache", "0.5", "--documents", "9"]):
        status, _, error = run_audit("--model", small_model, "--docs", texts, *words, "--out", out)
        assert status == 2 and error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_help_names_every_option():
    status, lines, _ = run_audit("--help")
    text = "\n".join(lines)
    options = (
        "docs cache base level sweep task items preset alpha epsilon probe documents length join template chat norm"
    )
    assert status == 0 and all(f"--{name}" in text for name in options.split())
