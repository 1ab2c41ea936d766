"""The analyses at their smallest: what their tables say, what their figures show, and the files that they write."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

ROOT = Path(__file__).parents[1]
LONG = 700  # bytes, which are the tiny tokenizer's tokens


@cache
def script(folder, name):
    """A script of the repository as a module; neither folder is a package."""
    path = ROOT / folder / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with room for a whole item."""
    import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("analyses") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def model(folder):
    from kvprobe import models

    return models.load(folder)


SCORES = {"tasks": ("niah_single_1",), "policies": ("snapkv", "snapkv+two_stage", "oracle"), "caches": ("0.1", "0.5")}
SCORES |= {"items": 2, "length": LONG}


@pytest.fixture(scope="module")
def scores(model):
    return script("analyses", "fig2_eviction_scores").compute(model, **SCORES)


@pytest.mark.slow
def test_scores_has_one_row_a_setting_policy_and_cache(scores):
    names = ["full", *np.repeat(SCORES["policies"], 2)]
    assert scores["policy"].tolist() == names * 2
    assert scores["setting"].tolist() == ["context"] * 7 + ["joint"] * 7
    assert scores["cache"].tolist() == [1.0, *[0.1, 0.5] * 3] * 2
    wanted = "task setting policy cache kept score ci_low ci_high n method delta_logprob"
    assert set(scores.columns) == set(wanted.split())
    assert (scores["n"] == 2).all() and scores["score"].between(0, 1).all()


@pytest.mark.slow
def test_scores_count_what_is_kept_and_compare_with_the_whole_cache(scores):
    full = scores["policy"] == "full"
    assert (scores.loc[full, "kept"] == 1).all() and (scores.loc[full, "delta_logprob"] == 0).all()
    rest = scores[~full]
    assert (rest["kept"] <= rest["cache"]).all() and (rest["kept"] > rest["cache"] - 1 / 500).all()
    assert (rest["delta_logprob"].abs() > 1e-6).all()


@pytest.mark.slow
def test_scores_are_those_of_the_command(model, scores):
    from kvprobe import curves, eviction

    policies = tuple(eviction.policy(name) for name in SCORES["policies"])
    plan = curves.Settings(policies, SCORES["caches"], "niah_single_1", LONG, 2, 0, "joint")
    theirs = curves.run(model, plan).rows()
    mine = scores[(scores["setting"] == "joint") & (scores["policy"] != "full")]
    assert mine["delta_logprob"].tolist() == pytest.approx(theirs["delta_logprob"].tolist(), abs=1e-9)
    assert mine["kept"].tolist() == theirs["kept"].tolist()


@pytest.mark.slow
def test_scores_figure_has_a_panel_a_setting_and_every_policy_once(scores):
    figure = script("analyses", "fig2_eviction_scores").plot(scores)
    assert [ax.get_title(loc="left").split(":")[0] for ax in figure.axes] == ["niah_single_1"] * 2
    assert sorted(text.get_text() for text in figure.legends[0].texts) == sorted(["full cache", *SCORES["policies"]])
    for ax, setting in zip(figure.axes, ("context", "joint"), strict=True):
        drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
        for policy in SCORES["policies"]:
            here = scores[(scores["setting"] == setting) & (scores["policy"] == policy)]
            assert np.array_equal(drawn[policy], here["score"])


@pytest.mark.parametrize(("option", "said"), [("--tasks niah_9", "niah_9"), ("--policies snap", "snap")])
def test_scores_refuse_in_one_line_before_a_folder_is_made(folder, tmp_path, capsys, option, said):
    out = tmp_path / "run"
    words = ["--model", str(folder), "--length", str(LONG), *option.split(), "--out", str(out)]
    assert script("analyses", "fig2_eviction_scores").main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not out.exists()


def test_scores_main_writes_a_run_folder(folder, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--tasks", "niah_single_1", "--settings", "context", "--policies", "snapkv,snapkv+two_stage"]
    words += ["--caches", "0.2", "--items", "2"]
    words += ["--length", str(LONG), "--model", str(folder), "--out", str(out)]
    assert script("analyses", "fig2_eviction_scores").main(words) == 0
    _written(out, {"rows", "answers", "pairs"}, "fig2_eviction_scores")
    assert len(pd.read_parquet(out / "answers.parquet")) == 2 * 3
    assert pd.read_parquet(out / "rows.parquet")["policy"].tolist() == ["full", "snapkv", "snapkv+two_stage"]
    assert pd.read_parquet(out / "pairs.parquet")["measure"].tolist() == ["score", "logprob"]
    said = capsys.readouterr().out
    assert "snapkv+two_stage" in said and "arXiv 2502.03805" in said


COSTS = {"ttft_tokens": (150, 300), "tokens": 300, "batches": (1, 2), "chunks": ("100", "whole")}
COSTS |= {"steps": 2, "rounds": 3}


@pytest.fixture(scope="module")
def costs(model):
    return script("analyses", "fig3_efficiency").compute(model, **COSTS)


def test_costs_has_one_row_a_measurement(costs):
    selections = ["snapkv", "snapkv+two_stage, L1", "snapkv+two_stage, L2"]
    chunked = ["full", "snapkv", "snapkv+two_stage"]
    assert costs["contender"].tolist() == selections * 2 + ["full", "compacted"] * 2 + chunked * 2
    assert costs["part"].tolist() == ["ttft"] * 6 + ["decode"] * 4 + ["chunked"] * 6
    assert costs["tokens"].tolist() == [150] * 3 + [300] * 13
    assert costs["batch"].tolist() == [1] * 8 + [2] * 2 + [1] * 6
    assert costs["chunk"].tolist() == [""] * 10 + ["100"] * 3 + ["whole"] * 3
    assert (costs["rounds"] == 3).all()


def test_costs_ratios_are_of_the_whole_cache_and_bounded_by_their_rounds(costs):
    full = costs[costs["contender"] == "full"]
    assert (full[["ratio", "ratio_low", "ratio_high"]] == 1).all(axis=None)
    assert (costs["ratio"].between(costs["ratio_low"], costs["ratio_high"])).all()
    assert (costs[["seconds", "baseline_s"]] > 0).all(axis=None)
    for _, group in costs[costs["part"] != "ttft"].groupby(["part", "batch", "chunk"]):
        assert (group["baseline_s"] == group["seconds"].iloc[0]).all()


def test_a_row_pairs_its_rounds():
    """The median of 2/1, 12/3 and 8/4, not the ratio of the medians 8/3, nor its inverse."""
    row = script("analyses", "fig3_efficiency")._row("decode", 9, "compacted", [2.0, 12.0, 8.0], [1.0, 3.0, 4.0])
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (2.0, 2.0, 4.0)
    assert (row["seconds"], row["baseline_s"], row["rounds"]) == (8.0, 3.0, 3)


def test_costs_of_a_selection_are_part_of_its_pass(costs):
    ttft = costs[costs["part"] == "ttft"].astype({"own_s": float, "own_ratio": float})
    assert (ttft["own_s"] > 0).all() and (ttft["own_ratio"] > 0).all()
    assert costs.loc[costs["part"] != "ttft", ["own_s", "own_ratio"]].isna().all(axis=None)


def test_costs_count_bytes_as_shapes_say(costs, model):
    entry = 2 * 4 * model.geometry.n_layers * model.geometry.n_kv_heads * model.geometry.head_dim / 2**20
    held = {"full": 300, "compacted": 120, "snapkv": 150, "snapkv+two_stage": 150}
    rest = costs[costs["part"] != "ttft"]
    wanted = [held[row.contender] * row.batch * entry for row in rest.itertuples()]
    assert rest["cache_mib"].tolist() == pytest.approx(wanted, rel=1e-12)


def test_costs_figure_has_three_panels_with_the_tables_numbers(costs):
    figure = script("analyses", "fig3_efficiency").plot(costs)
    first, second, third = figure.axes
    ttft = costs[costs["part"] == "ttft"]
    lines = {line.get_label(): line.get_ydata() for line in first.lines}
    for name, mine in ttft.groupby("contender"):
        assert np.allclose(lines[name], mine["own_ratio"].astype(float))
    for ax, part, scale in ((second, "decode", 1e3), (third, "chunked", 1.0)):
        rows = costs[costs["part"] == part]
        names = list(dict.fromkeys(rows["contender"]))
        wanted = [scale * value for name in names for value in rows.loc[rows["contender"] == name, "seconds"]]
        assert [bar.get_height() for bar in ax.patches] == pytest.approx(wanted)
        assert len(ax.texts) == len(rows)
    assert "behind 300 tokens, 40 % kept" in second.get_title(loc="left")


def test_costs_main_writes_a_run_folder(folder, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--ttft-tokens", "150", "--tokens", "150", "--batches", "1", "--chunks", "80,whole"]
    words += ["--steps", "1", "--rounds", "1"]
    assert script("analyses", "fig3_efficiency").main([*words, "--model", str(folder), "--out", str(out)]) == 0
    manifest = _written(out, {"rows"}, "fig3_efficiency")
    assert manifest["threads"] == torch.get_num_threads() and manifest["chunk_cache"] == "0.5"
    assert len(pd.read_parquet(out / "rows.parquet")) == 3 + 2 + 6
    assert "compacted" in capsys.readouterr().out


def _written(out, tables, name):
    files = {path.name for path in out.iterdir()}
    assert files == {f"{table}.parquet" for table in tables} | {f"{name}.png", "manifest.json"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name and manifest["model"]
    return manifest


def test_the_bench_measures_what_the_bars_are_set_on(model):
    ratios, measured = script("kernels/bench", "eviction").run(model, short=150, tokens=200, rounds=1)
    speedups = {"compacted_decode_speedup", "compacted_decode_speedup_batch4"}
    selection = {f"selection_over_prefill_l{p}{length}" for p in (1, 2) for length in ("", "_short")}
    assert set(ratios) == selection | speedups
    assert (measured["selection_tokens"], measured["selection_short_tokens"]) == (200, 150)
    assert all(value > 0 for value in ratios.values())
    assert measured["decode_compacted_cache_mib"] == pytest.approx(0.4 * measured["decode_full_cache_mib"])
    assert measured["decode_full_batch4_cache_mib"] == 4 * measured["decode_full_cache_mib"]
    assert measured["compacted_decode_max_abs_diff"] <= 5e-4


@pytest.fixture
def bench():
    return script("kernels/bench", "eviction")


def test_a_loop_at_other_positions_does_not_pass_the_gate(bench, model, monkeypatch):
    from kvprobe import eviction

    decoding = bench.Decoding(model, 120, 2, eviction.policy("snapkv+two_stage"), steps=2)
    assert decoding.gate() <= 5e-4
    plain = model.twin.forward
    shift = lambda *args, position_ids, **rest: plain(*args, position_ids=position_ids - 3, **rest)  # noqa: E731
    monkeypatch.setattr(model.twin, "forward", shift)
    with pytest.raises(AssertionError, match="loop and masks differ"):
        decoding.gate()


def test_a_compacted_cache_that_holds_other_entries_does_not_pass_the_gate(bench, model):
    from kvprobe import eviction

    decoding = bench.Decoding(model, 120, 1, eviction.policy("snapkv+two_stage"), steps=2)
    keys, values = decoding.layers["compacted"][0]
    decoding.layers["compacted"][0] = keys, values.roll(1, dims=2)
    with pytest.raises(AssertionError, match="loop and masks differ"):
        decoding.gate()


def test_decoding_leaves_the_caches_as_they_were(bench, model):
    from kvprobe import eviction

    decoding = bench.Decoding(model, 120, 1, eviction.policy("snapkv"), steps=2)
    before = decoding.n_bytes("full"), decoding.decode(decoding.cache("full"))
    assert torch.equal(decoding.decode(decoding.cache("full")), before[1]) and decoding.n_bytes("full") == before[0]


def test_a_pass_taken_apart_is_the_whole_pass(bench, model):
    """Own seconds and the rest add up to the pass; a scorer that sleeps shows in the former only."""
    import time

    from kvprobe import eviction

    class Sleepy(eviction.SCORERS["knorm"]):
        def score(self, layer):
            time.sleep(0.05)
            return super().score(layer)

    selection = bench.Selection(model, bench.text_ids(model, 120), eviction.policy(Sleepy()))
    begun = time.perf_counter()
    own, rest, choice = selection.apart()
    whole = time.perf_counter() - begun
    assert own >= 0.05 * model.geometry.n_layers and own + rest <= whole
    assert torch.equal(choice.keep, selection.select().keep)


def test_a_chunked_cache_of_another_size_does_not_pass_the_gate(bench, model, monkeypatch):
    chunking = bench.Chunking(model, bench.text_ids(model, 120), 70, "0.5")
    chunking.gate()
    monkeypatch.setattr(chunking, "read", lambda which: chunking._whole()[0])
    with pytest.raises(AssertionError, match="hold"):
        chunking.gate()


@pytest.mark.parametrize("name", ["fig2_eviction_scores", "fig3_efficiency"])
def test_help_is_quick_and_imports_nothing_heavy(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{name}.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'analyses' / f'{name}.py')!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage:") and said.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["fig2_eviction_scores", "fig3_efficiency"])
def test_what_the_paper_reports_is_printed_and_nothing_else(name):
    """It stands in one sentence, used once: no table or figure reads it."""
    module = script("analyses", name)
    source = (ROOT / "analyses" / f"{name}.py").read_text()
    assert "2502.03805" in module.PAPER and source.count("PAPER") == 2
