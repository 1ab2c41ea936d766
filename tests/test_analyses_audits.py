"""The analyses of bounds, of Assumption 3.4 and of the second stage's settings at their smallest."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from test_analyses import ROOT, script

from kvprobe import audits
from kvprobe.audits.sweeps import scores
from kvprobe.cells import pairs_of

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

NAMES = ("table9_bound_tightness", "fig8_assumption", "table8_alpha", "fig9_distance")
SMALL = {"documents": 3, "length": 220}
READ = {"n": 3, "length": 220}
ITEMS = {"items": 2, "item_length": 700}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with room for a whole item."""
    import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("audits") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def model(folder):
    from kvprobe import models

    return models.load(folder)


def computed(model, name, **asked):
    module = script("analyses", name)
    return module.compute(model, module.plan(model, **SMALL, **asked))


@pytest.fixture(scope="module")
def table9(model):
    return computed(model, "table9_bound_tightness", caches="0.3,0.6")


@pytest.fixture(scope="module")
def fig8(model):
    return computed(model, "fig8_assumption", caches="0.3,0.6")


@pytest.fixture(scope="module")
def table8(model):
    return computed(model, "table8_alpha", caches=("0.3", "0.6"), alphas=("0", "0.75", "1"), **ITEMS)


@pytest.fixture(scope="module")
def fig9(model):
    return computed(model, "fig9_distance", base="snapkv", presets=("paper",), caches=("0.3",), items=0)


def policies(base, preset):
    (pair,) = pairs_of(base, f"{base}+two_stage", (preset,))
    return pair.base, pair.ours


@pytest.mark.parametrize("base", ["snapkv", "adakv"])
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_bounds_are_those_of_the_audit(model, table9, base, preset):
    for level in ("layer", "head"):
        plain, ours = policies(base, preset)
        direct = audits.audit(model, None, [plain, ours], [0.3, 0.6], level, **READ)
        for cache in (0.3, 0.6):
            wanted = direct[(direct["policy"] == ours.name) & (direct["cache"] == cache)]
            theirs = direct[(direct["policy"] == plain.name) & (direct["cache"] == cache)]
            chosen = table9[(table9["base"] == plain.name) & (table9["preset"] == preset)]
            (row,) = chosen[(chosen["level"] == level) & (chosen["cache"] == cache)].to_dict("records")
            for column in ("actual", "centred_bound", "bound"):
                assert row[column] == pytest.approx(wanted[column].mean(), rel=1e-9)
            assert row["bound_over_actual"] == pytest.approx(wanted["bound"].mean() / wanted["actual"].mean(), rel=1e-9)
            assert row["base_actual"] == pytest.approx(theirs["actual"].mean(), rel=1e-9)
            assert row["actual"] < row["centred_bound"] < row["bound"]
            assert (row["n_docs"], row["violations"]) == (3, 0)


def test_bounds_have_every_row_once_and_the_layers_beside_them(table9):
    assert len(table9) == 2 * 2 * 2 * 2
    assert not table9.duplicated(["preset", "base", "cache", "level"]).any()
    layers = table9.attrs["tables"]["layers"]
    assert len(layers) == 2 * 2 * 2 * 3 and set(layers["layer"]) == {0, 1, 2}
    mean = layers.groupby(["preset", "base", "cache"])["actual"].mean()
    rows = table9[table9["level"] == "layer"].set_index(["preset", "base", "cache"])["actual"]
    np.testing.assert_allclose(rows.sort_index(), mean.sort_index())


def test_sigma_is_that_of_the_audit(model, fig8):
    plain, ours = policies("adakv", "paper")
    direct = audits.audit(model, None, [ours], [0.3], "head", **READ)
    mine = fig8[(fig8["base"] == plain.name) & (fig8["preset"] == "paper") & (fig8["cache"] == 0.3)]
    grouped = direct.groupby(["layer", "head"])
    for column in ("sigma", "sigma_oracle"):
        np.testing.assert_allclose(mine[column], grouped[column].mean())
        name = column.replace("sigma", "fails")
        np.testing.assert_allclose(mine[name], grouped[column].apply(lambda values: (values <= 0.5).mean()))
    held = audits.assumption(direct)
    shares = fig8.attrs["tables"]["shares"].set_index(["base", "preset", "cache"]).loc[(plain.name, "paper", 0.3)]
    for reading in ("selected", "oracle"):
        assert shares[f"share_{reading}"] == pytest.approx(held[f"share_{reading}"])
    failing = mine[mine["sigma"] <= 0.5][["layer", "head"]].to_dict("records")
    assert failing == [{"layer": each["layer"], "head": each["head"]} for each in held["failing_heads"]]
    assert (mine["sigma_oracle"] >= mine["sigma"]).all()


def test_alpha_is_the_sweep_and_the_scores_of_the_library(model, table8):
    assert len(table8) == 2 * 2 * 3 and (table8["base"] == "snapkv+adakv").all()
    for preset in ("paper", "released"):
        (pair,) = pairs_of("adakv", "adakv+two_stage", (preset,))
        what = audits.Sweep("alpha", pair, (0.0, 0.75, 1.0))
        direct = audits.sweep(model, None, what, ("0.3", "0.6"), **READ)
        mine = table8[table8["preset"] == preset].reset_index(drop=True)
        pd.testing.assert_frame_equal(pd.DataFrame(mine[direct.columns].to_dict("list")), direct, check_dtype=False)
        answers = scores(model, what, ("0.3", "0.6"), items=2, length=700)
        known = answers[answers["value"].notna()].sort_values(["cache", "value"])
        mine = mine.sort_values(["cache", "value"])
        for column, name in (("score", "score"), ("ci_low", "score_low"), ("delta_logprob", "delta_logprob")):
            np.testing.assert_allclose(mine[name], known[column], atol=1e-9)
    assert (table8["items"] == 2).all() and (table8["task"] == "niah_single_1").all()


def test_alpha_of_one_is_no_second_stage(table8):
    one = table8[table8["value"] == 1]
    assert (one["L"] == one["base_L"]).all() and (one["change"] == 0).all() and (one["heads_reduced"] == 0).all()
    other = table8[table8["value"] == 0]
    assert (other["L"] != other["base_L"]).all()
    answers = table8.attrs["tables"]["scores"]
    none = answers[answers["value"].isna()].set_index(["preset", "cache"])["delta_logprob"]
    assert one.set_index(["preset", "cache"])["delta_logprob"].to_dict() == none.to_dict()


def test_norms_of_the_selector_are_measured_in_both_norms(model, fig9):
    (pair,) = pairs_of("snapkv", "snapkv+two_stage", ("paper",))
    assert fig9[["measured", "value"]].to_numpy().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    for p in (1, 2):
        direct = audits.sweep(model, None, audits.Sweep("norm", pair), ("0.3",), p=p, **READ)
        mine = fig9[fig9["measured"] == p]
        np.testing.assert_allclose(mine["L"], direct["L"])
        np.testing.assert_allclose(mine["change"], direct["change"])
    assert (fig9.loc[fig9["measured"] == 1, "L"].to_numpy() > fig9.loc[fig9["measured"] == 2, "L"].to_numpy()).all()


def test_one_norm_against_the_other_is_their_difference(fig9):
    direct = fig9.attrs["tables"]["direct"]
    wide = fig9.pivot(index="measured", columns="value", values="L")
    assert direct["measured"].tolist() == [1, 2] and direct["value"].tolist() == [2, 2]
    np.testing.assert_allclose(direct["change"], wide[2] - wide[1])
    assert (direct["ci_low"] <= direct["change"]).all() and (direct["change"] <= direct["ci_high"]).all()
    assert (direct["change"] != 0).all()


def test_figures_are_of_the_tables(table9, fig8, table8, fig9):
    bounds = script("analyses", "table9_bound_tightness").plot(table9)
    drawn = {line.get_label(): list(line.get_ydata()) for line in bounds.axes[0].lines}
    mine = table9[(table9["level"] == "layer") & (table9["base"] == "snapkv") & (table9["preset"] == "paper")]
    assert drawn["actual snapkv paper"] == mine["actual"].tolist()
    heads = script("analyses", "fig8_assumption").plot(fig8)
    first = fig8[(fig8["base"] == "snapkv") & (fig8["preset"] == "paper") & (fig8["cache"] == 0.3)]
    grid = first.pivot(index="head", columns="layer", values="sigma").to_numpy()
    np.testing.assert_allclose(heads.axes[0].images[0].get_array(), grid)
    assert len(script("analyses", "table8_alpha").plot(table8).axes) == 2 * 4
    assert len(script("analyses", "fig9_distance").plot(fig9).axes) == 4


RUNS = {
    "table9_bound_tightness": (["--caches", "0.4", "--bases", "snapkv"], {"rows", "layers"}),
    "fig8_assumption": (["--caches", "0.4", "--presets", "paper"], {"rows", "shares"}),
    "table8_alpha": (["--caches", "0.4", "--alphas", "0.5,1", "--items", "0"], {"rows"}),
    "fig9_distance": (["--caches", "0.4", "--items", "1", "--item-length", "700"], {"rows", "scores", "direct"}),
}


@pytest.mark.parametrize("name", NAMES)
def test_main_writes_a_run_folder(folder, tmp_path, capsys, name):
    words, tables = RUNS[name]
    out = tmp_path / "run"
    small = ["--documents", "2", "--length", "220", "--model", str(folder), "--out", str(out)]
    assert script("analyses", name).main([*small, *words]) == 0
    files = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert files == {f"{table}.parquet" for table in tables} | {f"{name}.png", "manifest.json"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name and manifest["n_docs"] == 2
    said = capsys.readouterr().out
    assert "2 documents" in said and "2502.03805" in said
    assert len(pd.read_parquet(out / "rows.parquet")) > 0


WRONG = [
    ("table9_bound_tightness", "--bases snapkv+two_stage", "second stage"),
    ("table9_bound_tightness", "--presets papr", "papr"),
    ("fig8_assumption", "--caches 1.4", "1.4"),
    ("fig8_assumption", "--probe last", "last"),
    ("table8_alpha", "--alphas 0.5,x", "0.5,x"),
    ("table8_alpha", "--alphas 0.5,1.5", "1.5"),
    ("table8_alpha", "--caches 0.4 --task niah_9", "niah_9"),
    ("table8_alpha", "--caches 0.4 --item-length 9000", "9000"),
    ("table8_alpha", "--caches 0.4 --items -1", "-1"),
    ("fig9_distance", "--base adakv+two_stage", "second stage"),
    ("fig9_distance", "--base streamin", "streamin"),
    ("fig9_distance", "--caches 0.001", "0.001"),
]


@pytest.mark.parametrize(("name", "option", "said"), WRONG)
def test_mistakes_are_one_line_before_a_folder_is_made(folder, tmp_path, capsys, name, option, said):
    out = tmp_path / "run"
    words = ["--documents", "1", "--length", "220", "--model", str(folder), "--out", str(out), *option.split()]
    assert script("analyses", name).main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("name", NAMES)
def test_help_is_quick_and_imports_nothing_heavy(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{name}.py', '--help']\n"
        f"sys.path.insert(0, {str(ROOT / 'analyses')!r})\n"
        f"try: runpy.run_path({str(ROOT / 'analyses' / f'{name}.py')!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage:") and said.splitlines()[-1] == "[]"
