"""The analyses of perturbation maps at their smallest: tables, figures, files, and what is refused."""

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest
from test_analyses import ROOT, script

from kvprobe import maps

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

NAMES = ("fig4_head_perturbation", "fig5_layer_perturbation", "fig6_budget_perturbation")
SMALL = {"documents": 2, "length": 220}
SIZES = ("0.3", "0.5")
OPTIONS = {NAMES[0]: ["--cache", "0.3"], NAMES[1]: ["--cache", "0.3"], NAMES[2]: ["--caches", ",".join(SIZES)]}
TABLES = {NAMES[0]: {"cells", "shares"}, NAMES[1]: {"runs"}, NAMES[2]: {"cells"}}
PRESETS = ["paper", "released"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    from kvprobe import models

    return models.load(tiny_folder("llama"))


@pytest.fixture(scope="module")
def tables(model):
    """Name → the table of an analysis, computed once."""

    @cache
    def table(name):
        asked = {"caches": SIZES} if name == NAMES[2] else {"cache": "0.3"}
        module = script("analyses", name)
        return module.compute(model, module.ANALYSIS.plan(model, **asked, **SMALL))

    return table


def direct(model, function, preset, cache, **more):
    """The same from the library: one preset at a time."""
    (pair,) = maps.pairs_of("snapkv", "snapkv+two_stage", (preset,))
    given = {"n": SMALL["documents"], "length": SMALL["length"]} | more
    return function(model, None, pair.base, pair.ours, cache, **given)


def of(table, preset):
    return table[table["preset"] == preset].drop(columns="preset").reset_index(drop=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_heads_are_those_of_the_library(model, tables, preset):
    table = tables(NAMES[0])
    cells = direct(model, maps.per_head, preset, 0.3)
    pd.testing.assert_frame_equal(of(table.attrs["tables"]["cells"], preset), cells, rtol=1e-9)
    rows = of(pd.DataFrame(table.to_dict("list")), preset)
    means = cells.groupby(["layer", "head"])[["L_base", "L_ours"]].mean().reset_index()
    for name in ("layer", "head", "L_base", "L_ours"):
        np.testing.assert_allclose(rows[name], means[name], rtol=1e-9)
    np.testing.assert_allclose(rows["log2_ratio"], np.log2(means["L_ours"] / means["L_base"]), rtol=1e-6, atol=1e-9)
    shares = table.attrs["tables"]["shares"].set_index(["preset", "measure"])
    assert shares.loc[(preset, "L"), "share"] == pytest.approx((means["L_ours"] < means["L_base"]).mean())
    assert (shares["n_docs"] == 2).all() and (shares["n_heads"] == 18).all()


@pytest.mark.parametrize(("preset", "measure"), [("paper", "attn_out"), ("released", "hidden"), ("paper", "local")])
def test_layers_are_those_of_the_library(model, tables, preset, measure):
    table, keys = tables(NAMES[1]), ["doc", "layer"]
    runs = table.attrs["tables"]["runs"]
    assert set(runs["measure"]) == set(maps.MEASURES)
    mine = of(runs[runs["measure"] == measure], preset).drop(columns="measure")
    wanted = direct(model, maps.per_layer, preset, 0.3, measure=measure)
    mine, wanted = (each.sort_values(keys).reset_index(drop=True) for each in (mine, wanted))
    pd.testing.assert_frame_equal(mine, wanted, rtol=1e-6)
    if measure == "attn_out":
        means, rows = wanted.groupby("layer")[["base", "ours"]].mean(), of(pd.DataFrame(table.to_dict("list")), preset)
        np.testing.assert_allclose(rows[["base", "ours"]], means, rtol=1e-6)
        np.testing.assert_allclose(rows["reduction"], means["base"] - means["ours"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_budgets_are_those_of_the_library(model, tables, preset):
    table = tables(NAMES[2])
    rows = of(pd.DataFrame(table.to_dict("list")), preset)
    wanted = direct(model, maps.per_budget, preset, list(SIZES), join=2).groupby("cache")[["base", "ours"]].mean()
    assert rows["cache"].tolist() == wanted.index.tolist() == [0.3, 0.5]
    np.testing.assert_allclose(rows[["base", "ours"]], wanted, rtol=1e-9)
    assert (rows["n_docs"] == 2).all()


def test_two_texts_make_one_document_of_the_budgets_alone(model):
    joins = [script("analyses", name).ANALYSIS.plan(model, documents=2, length=220).reading.join for name in NAMES[:2]]
    assert joins == [1, 1]
    planned = script("analyses", NAMES[2]).plan(model, caches=SIZES, **SMALL)
    assert planned.reading.join == 2 and planned.budgets == SIZES
    assert script("analyses", NAMES[2]).plan(model, caches=SIZES, join=1, **SMALL).reading.join == 1


def test_one_size_is_computed_where_one_is_drawn(tables):
    for name in NAMES[:2]:
        assert tables(name).attrs["summary"]["caches"] == [0.3]
    assert set(tables(NAMES[0]).attrs["tables"]["cells"]["cache"]) == {0.3}
    assert set(tables(NAMES[2]).attrs["tables"]["cells"]["cache"]) == {0.3, 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_figures_have_a_panel_a_preset(tables, name):
    figure = script("analyses", name).plot(tables(name))
    titles = [ax.get_title("left") for ax in figure.axes]
    for preset in PRESETS:
        assert sum(title.startswith(f"preset {preset}") for title in titles) == 1
    assert "n = 2 documents" in figure.texts[1].get_text().replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")


@pytest.mark.parametrize("name", NAMES)
def test_main_writes_a_run_folder(tiny_folder, tmp_path, capsys, name):
    out = tmp_path / "run"
    words = ["--documents", "2", "--length", "220", "--presets", "released", *OPTIONS[name], "--norm", "2"]
    assert script("analyses", name).main([*words, "--model", str(tiny_folder("llama")), "--out", str(out)]) == 0
    files = {path.name for path in out.iterdir()}
    assert files == {f"{table}.parquet" for table in TABLES[name] | {"rows"}} | {f"{name}.png", "manifest.json"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name and manifest["settings"]["norm"] == 2
    assert manifest["settings"]["n_docs"] == 2 and "prefill-then-evict" in manifest["semantics"]
    assert manifest["weight_processing"] and len(manifest["settings"]["policies"]) == 1
    assert set(pd.read_parquet(out / "rows.parquet")["preset"]) == {"released"}
    said = capsys.readouterr().out
    assert "snapkv+two_stage against snapkv" in said and "2 documents of" in said and "arXiv 2502.03805" in said


def test_without_out_nothing_is_written(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--documents", "1", "--length", "220", "--policy", "streaming", "--against", "knorm", "--cache", "0.5"]
    words += ["--measure", "local"]
    assert script("analyses", NAMES[1]).main([*words, "--model", str(tiny_folder("llama"))]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [] and "this layer alone evicting" in said
    assert said.count("as given") == 3 and said.count("[no interval]") == 3


WRONG = [
    ("--policy snap", "snap"),
    ("--against snapkv", "held against itself"),
    ("--presets papr", "papr"),
    ("--norm 3", "3"),
    ("--documents 0", "0"),
    ("--docs no/such/folder", "no/such/folder"),
    ("--probe last", "last"),
    ("--length 5", "5"),
]
SIZED = [
    (NAMES[0], "--cache 1.5", "1.5"),
    (NAMES[0], "--cache 0.01", "0.01"),
    (NAMES[1], "--measure weights", "weights"),
    (NAMES[2], "--caches 0.3,2", "'2'"),
    (NAMES[2], "--caches 0.025", "0.025"),
    (NAMES[2], "--caches ,", "no budget"),
    (NAMES[2], "--caches 0.3,0.3", "twice"),
]


@pytest.mark.parametrize(
    ("name", "option", "said"), [(name, *case) for case, name in zip(WRONG, NAMES * 3, strict=False)] + SIZED
)
def test_wrong_input_is_one_line_before_a_folder_is_made(tiny_folder, tmp_path, capsys, name, option, said):
    out = tmp_path / "run"
    words = ["--documents", "2", "--length", "220", *OPTIONS[name], *option.split()]
    assert script("analyses", name).main([*words, "--model", str(tiny_folder("llama")), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{name}: ") and said in error and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_the_paper_reports_is_printed_and_nothing_else(name):
    """It stands in one sentence, used once: no table or figure reads it."""
    module, source = script("analyses", name), (ROOT / "analyses" / f"{name}.py").read_text()
    assert "2502.03805" in module.PAPER and source.count("PAPER") == 2


def test_the_papers_share_of_heads_is_read_where_it_is_printed():
    source = (ROOT / "analyses" / f"{NAMES[0]}.py").read_text()
    assert source.count("HEADS_REDUCED") == 1 and "0.92" not in source and "86" not in source
