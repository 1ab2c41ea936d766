"""``kvprobe evict`` in process: keys of the JSON, files, what is printed, one line for each mistake."""

import json

import curve_runs
import pandas as pd
import pytest

from kvprobe import cli

ROW = {"policy", "cache", "kept", "score", "ci_low", "ci_high", "n", "method", "delta_logprob"}


def run_evict(out, *words):
    """Exit status, and what was printed, of ``kvprobe evict`` with a folder."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main(["evict", *words, "--json", "--out", str(out)])
    return status, said.getvalue().splitlines()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A tiny random model that reads bytes, with room for whole needle prompts."""
    import tiny

    return str(tiny.save("llama", tmp_path_factory.mktemp("evict") / "tiny", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def evicted(small_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("evict") / "run"
    task = ["--model", small_model, "--length", "900", "--items", "1", "--new-tokens", "3", "--seed", "4"]
    status, lines = run_evict(out, *task, "--cache", "0.5,0.125,1", "--policies", "snapkv,snapkv+two_stage,streaming")
    return status, lines, out


def test_evict_prints_every_promised_key(evicted):
    status, lines, _ = evicted
    assert status == 0

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    summary = json.loads(lines[-1], parse_constant=refuse)
    wanted = "model task length n_items seed setting semantics policies rows full pairs timings_s peak_rss_mib versions"
    assert set(wanted.split()) <= set(summary)
    assert [(row["policy"], row["cache"]) for row in summary["rows"]] == [
        (policy, cache) for policy in ("snapkv", "snapkv+two_stage", "streaming") for cache in (0.5, 0.125, 1.0)
    ]
    assert all(set(row) >= ROW and row["n"] == 1 and row["ci_low"] is None for row in summary["rows"])
    assert all(row["kept"] <= row["cache"] and row["kept"] > row["cache"] - 0.01 for row in summary["rows"])
    whole = [row for row in summary["rows"] if row["cache"] == 1]
    assert {row["delta_logprob"] for row in whole} == {0.0} and whole[0]["score"] == summary["full"]["score"]
    assert (summary["setting"], summary["semantics"].split(":")[0]) == ("context", "prefill-then-evict")
    assert (summary["task"], summary["length"], summary["seed"]) == ("niah_single_1", 900, 4)
    assert [each["name"] for each in summary["policies"]] == ["snapkv", "snapkv+two_stage", "streaming"]
    assert len(summary["pairs"]) == 6 and summary["timings_s"]["total_s"] > summary["timings_s"]["load_s"] > 0


def test_evict_writes_tables_the_figure_and_a_manifest(evicted):
    _, lines, out = evicted
    names = "answers.parquet rows.parquet pairs.parquet score_against_cache.png summary.json manifest.json"
    assert {path.name for path in out.iterdir()} == set(names.split())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == "evict" and manifest["seed"] == 4
    assert manifest["weight_processing"] == "raw" and manifest["semantics"].startswith("prefill-then-evict")
    assert manifest["settings"]["policies"] == json.loads(lines[-1])["policies"]
    assert manifest["settings"]["caches"] == ["0.5", "0.125", "1"] and manifest["arguments"]["new_tokens"] == 3
    assert json.loads((out / "summary.json").read_text()) == json.loads(lines[-1])
    assert len(pd.read_parquet(out / "answers.parquet")) == 10
    rows = pd.read_parquet(out / "rows.parquet")
    assert rows["score"].tolist() == [row["score"] for row in json.loads(lines[-1])["rows"]]
    assert len(pd.read_parquet(out / "pairs.parquet")) == 6


def test_evict_without_a_second_stage_writes_no_pairs(small_model, tmp_path):
    words = ["--model", small_model, "--length", "900", "--items", "1", "--new-tokens", "1", "--cache", "0.5"]
    status, lines = run_evict(tmp_path / "run", *words, "--policies", "random", "--setting", "joint", "--chunk", "300")
    summary = json.loads(lines[-1])
    assert status == 0 and summary["pairs"] == [] and "What the second stage changes" not in "".join(lines)
    assert summary["semantics"].startswith("chunked(300): ") and summary["setting"] == "joint"
    table = pd.read_parquet(tmp_path / "run" / "pairs.parquet")
    assert len(table) == 0 and {"policy", "base", "cache", "difference", "p_sign_flip"} <= set(table)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--length 300", "smallest"),
        ("--length 9000", "4096"),
        ("--length 900 --cache 0.5,0.01", "cache 0.01: "),
        ("--length 900 --policies random,snapkv --cache 0.04", "fewer than the 32 that snapkv always keeps"),
        ("--length 900 --chunk 20", "looks at the last 32 queries and the context has 20 tokens"),
        ("--length 900 --chunk 100 --cache 0.2", "first chunk: 20 of 100 entries are fewer than the 32"),
        ("--length 900 --chunk 100 --policies defensivekv", "defensivekv compares heads"),
        ("--length 900 --chunk 100 --policies oracle", "oracle knows what comes after"),
        ("--length 900 --new-tokens 5000", "do not fit the model's context of 4096"),
        ("--length 900 --policies duo --gates {gates} --cache 0.5", "gates of shape [1, 2]; allowed: [3, 2]"),
        (
            "--length 900 --policies headkv --profile {profile} --cache 0.5",
            "importance of shape [1, 2]; allowed: [3, 6]",
        ),
        ("--length 900 --policies duo --profile {profile} --cache 0.5", "gates of shape [1, 2]; allowed: [3, 2]"),
        ("--length 900 --policies duo --profile {other} --cache 0.5", "is a profile of 'm'; allowed: one of 'tiny'"),
    ],
)
def test_evict_refuses_what_does_not_fit_before_it_computes(words, said, small_model, capsys, tmp_path, monkeypatch):
    from kvprobe import curves

    def compute(*given):
        raise AssertionError("an item was computed")

    monkeypatch.setattr(curves.tables, "answer_item", compute)
    (tmp_path / "gates.tsv").write_text("0.1 0.2\n")
    profile = {"model": "tiny", "kind": "retrieval", "n_layers": 1, "n_heads": 2, "scores": [[1.0, 2.0]]}
    (tmp_path / "heads.json").write_text(json.dumps(profile))
    (tmp_path / "other.json").write_text(json.dumps(profile | {"model": "m"}))
    files = {"gates": tmp_path / "gates.tsv", "profile": tmp_path / "heads.json", "other": tmp_path / "other.json"}
    out = tmp_path / "run"
    given = words.format(**files).split()
    assert cli.main(["evict", "--items", "2", "--model", small_model, *given, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not out.exists()


def test_a_mistake_of_evict_leaves_an_earlier_run_as_it_was(evicted, small_model, capsys):
    _, _, out = evicted
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = ["--model", small_model, "--length", "900", "--cache", "0.01", "--out", str(out)]
    assert cli.main(["evict", *words]) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before and capsys.readouterr().err


SIX = ("snapkv", "snapkv+two_stage", "snapkv+adakv", "snapkv+adakv+two_stage", "streaming", "random")
TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def printed(capsys, monkeypatch, table, columns=120, **more):
    from rich.console import Console

    from kvprobe.commands import compression

    screen = Console(width=columns, soft_wrap=True, markup=False, highlight=False)
    monkeypatch.setattr(compression, "console", lambda: screen)
    compression.print_evict(curve_runs.summary(table, **more), None)
    return capsys.readouterr().out


def pairs_of(rows, p=0.5, attainable=0.03):
    return [
        {
            "policy": name,
            "base": name.removesuffix("+two_stage"),
            "cache": cache,
            "measure": measure,
            "difference": 3.14,
        }
        | {"ci_low": -11.5, "ci_high": 12.25, "n": 10, "p_sign_flip": p, "p_attainable": attainable}
        for name in ("snapkv+two_stage", "snapkv+adakv+two_stage")
        for cache in sorted(set(rows["cache"]))
        for measure in ("score", "logprob")
    ]


def test_tables_of_six_sizes_stay_within_120_columns_with_their_words_whole(capsys, monkeypatch):
    rows = curve_runs.curves(SIX, TENTHS)
    text = printed(capsys, monkeypatch, rows, pairs=pairs_of(rows))
    assert max(map(len, text.splitlines())) <= 120 and text.count("┏") == 2
    lines = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in text.splitlines() if "│" in line]
    for name in SIX:
        at = next(k for k, cells in enumerate(lines) if cells[0] == name)
        mine = rows[rows["policy"] == name]
        assert lines[at][1:] == [f"{score:.2f}" for score in mine["score"]]
        ends = zip(mine["ci_low"], mine["ci_high"], strict=True)
        assert lines[at + 1] == ["", *(f"{low:.2f}–{high:.2f}" for low, high in ends)]
    assert "┃      10 % ┃      20 % ┃" in text and "10 items" in text


@pytest.mark.parametrize("columns", [80, 120])
def test_more_sizes_than_fit_go_into_a_table_of_their_own(columns, capsys, monkeypatch):
    caches = tuple(k / 40 for k in range(1, 13))
    text = printed(capsys, monkeypatch, curve_runs.curves((*SIX, "expected_attention+two_stage"), caches), columns)
    body = [line for line in text.splitlines() if "│" in line or "┃" in line]
    assert max(map(len, body)) <= columns and text.count("┏") > 1
    heads = [cell.strip() for line in body if "┃" in line for cell in line.strip("┃").split("┃")[1:]]
    assert heads == [f"{2.5 * k:g} %" for k in range(1, 13)]


def test_what_cannot_be_known_is_not_printed_as_a_number(capsys, monkeypatch):
    rows = curve_runs.curves(SIX[:2], (0.025, 0.3)).assign(ci_low=None, ci_high=None)
    full = {"score": 0.5, "ci_low": float("nan"), "ci_high": float("nan")}
    pairs = [each | {"ci_low": float("nan"), "ci_high": float("nan")} for each in pairs_of(rows, None, None)]
    text = printed(capsys, monkeypatch, rows, full=full, n_items=1, pairs=pairs)
    assert "nan" not in text and "None" not in text and "1 item," in text and "[no interval]" in text
    assert "2.5 %" in text


@pytest.mark.parametrize(("attainable", "marked"), [(0.03, False), (0.05, False), (0.0625, True), (None, True)])
def test_a_p_that_could_not_have_been_small_is_marked(attainable, marked, capsys, monkeypatch):
    rows = curve_runs.curves(SIX, (0.2,))
    text = printed(capsys, monkeypatch, rows, pairs=pairs_of(rows, 0.25, attainable))
    assert text.count("0.250 †") == (4 if marked else 0) and text.count("0.250") == 4
    assert "†: none of 0.05 or less is attainable" in text


def test_facts_of_a_method_are_printed_with_its_rows(capsys, monkeypatch):
    rows = curve_runs.curves(("snapkv+pyramid", "random"), (0.2, 0.4))
    given = rows.to_dict("records")
    given[1]["notes"] = {"fallback": True, "share": 1 / 3}
    text = printed(capsys, monkeypatch, rows, rows=given)
    assert "snapkv+pyramid at 40 %: fallback True, share 0.3333" in text and text.count("fallback") == 1


@pytest.fixture(scope="module")
def smol_evicted(at_hand, tmp_path_factory):
    out = tmp_path_factory.mktemp("evict") / "smol"
    words = "--length 480 --items 2 --new-tokens 9 --cache 0.2,1 --policies streaming,snapkv+two_stage,snapkv,oracle"
    with at_hand():
        return (*run_evict(out, *words.split()), out)


@pytest.mark.slow
def test_evict_on_the_embedded_model(smol_evicted):
    """A trained model finds the needle in the whole cache; who knows the question loses least without the rest."""
    status, lines, out = smol_evicted
    summary = json.loads(lines[-1])
    assert status == 0 and summary["full"]["score"] == 1.0
    assert summary["full"]["ci_low"] == pytest.approx(0.025**0.5, abs=1e-4)  # two of two
    rows = {(row["policy"], row["cache"]): row for row in summary["rows"]}
    assert all(row["score"] == 1.0 and row["delta_logprob"] == 0.0 for key, row in rows.items() if key[1] == 1.0)
    assert rows["oracle", 0.2]["delta_logprob"] > max(
        rows[name, 0.2]["delta_logprob"] for name in ("snapkv", "streaming")
    )
    assert all(-60 < row["delta_logprob"] < 5 for row in rows.values())
    assert len(pd.read_parquet(out / "answers.parquet")) == 2 * (1 + 4 * 2)
