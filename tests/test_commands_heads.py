"""``kvprobe heads`` in process: every word, keys of the JSON, files, what is printed, one line for each mistake."""

import contextlib
import io
import json

import numpy as np
import pandas as pd
import pytest

from kvprobe import cli, parts

TABLES = {"heads", "trials", "layers", "causal", "knockouts"}
FIGURES = {"heads", "first_layers", "stability", "causal", "knockouts"}


def run_heads(*words):
    """Exit status, and the lines that were printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main(["heads", *map(str, words)])
    return status, said.getvalue().splitlines()


def loads(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture(scope="module")
def done(at_hand, tmp_path_factory):
    """A small scan of the embedded model: status, lines, and its folder."""
    out = tmp_path_factory.mktemp("heads") / "out"
    words = ["--lengths", "300", "--depths", "0,100", "--reasoning-task", "none", "--items", "2", "--draws", "2"]
    with at_hand():
        return (*run_heads(*words, "--top", "4", "--seed", "5", "--json", "--out", out), out)


def test_heads_hands_over_every_word(monkeypatch):
    """No option of the command is dropped on the way to the settings, and no default differs from theirs."""
    from kvprobe import commands, heads

    seen = []
    monkeypatch.setattr(commands, "heads", lambda *given: (seen.append(given), ({}, None))[1])
    monkeypatch.setattr(commands, "print_heads", lambda summary, out: None)
    assert cli.main(["heads"]) == 0
    assert seen[0][:3] == ("smollm2-135m", heads.Settings(), None)
    words = (
        "--task niah_single_1 --lengths 400,800 --depths 10,50.5 --needles 2 --seeds 3 --span needle --new-tokens 9 "
    )
    words += "--threshold 0.2 --reasoning-task niah_single_2 --top 7 --draws 3 --items 5 --length 600 --no-knockouts "
    words += "--rule-cache 0.4 --haystack essays --norm 2 --model other --out there --seed 4"
    assert cli.main(["heads", *words.split()]) == 0
    grid = heads.Grid("niah_single_1", (400, 800), (10.0, 50.5), 2, (4, 5, 6), 9, {"path": "essays"})
    plain = {"reasoning_task": "niah_single_2", "span": "needle", "threshold": 0.2, "k": 7, "draws": 3, "items": 5}
    plain |= {"length": 600, "knockouts": False, "rule": heads.Rule(cache=0.4), "seed": 4, "p": 2}
    assert seen[1][1] == heads.Settings(grid, **plain)
    assert (seen[1][0], str(seen[1][2])) == ("other", "there")


def test_full_is_the_grid_of_the_source(monkeypatch):
    from kvprobe import commands

    seen = []
    monkeypatch.setattr(commands, "heads", lambda *given: (seen.append(given[1]), ({}, None))[1])
    monkeypatch.setattr(commands, "print_heads", lambda summary, out: None)
    assert cli.main(["heads", "--full", "--seeds", "1"]) == 0
    assert cli.main(["heads", "--full", "--longest", "8000"]) == 0
    first, second = (settings.grid for settings in seen)
    assert (len(first.lengths), len(first.depths), first.needles, len(first.cells())) == (20, 10, 3, 600)
    assert (min(first.lengths), max(first.lengths)) == (1000, 50_000)
    assert (min(second.lengths), max(second.lengths)) == (400, 8000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths 300,x", "lengths is '300,x', must be numbers with commas, like 300,600"),
        ("--lengths ,", "lengths is ',', must be numbers with commas, like 300,600"),
        ("--depths x", "depths is 'x', must be numbers with commas, like 0,50,100"),
        ("--depths 10,10", "depths is (10.0, 10.0), must be one or more numbers, each once"),
        ("--task niah_nothing", "no task 'niah_nothing', must be one of niah_single_1"),
        ("--reasoning-task nothing", "no task 'nothing', must be one of niah_single_1"),
        ("--task niah_multivalue", "niah_multivalue asks for 4 values; heads are scored on one: niah_single_1"),
        ("--reasoning-task niah_multiquery", "niah_multiquery asks for 4 values; heads are scored on one"),
        ("--span token", "span is 'token', must be one of value, needle"),
        ("--threshold 0", "threshold is 0, must be above 0 and at most 1"),
        ("--full --lengths 300", "--full and --lengths exclude each other: give one of them"),
        ("--longest 3000", "--longest 3000 goes with --full only; allowed: --lengths with commas"),
        ("--rule-cache 0", "cache is 0.0, must be a number above 0 and at most 1"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert cli.main(["heads", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths 9000", "length is 9000, the model reads at most"),
        ("--lengths 60", "length 60 is too small for niah_single_2: the smallest length that works is"),
        ("--lengths 300 --depths 0,101", "depth is 101.0, must be a number from 0 to 100"),
        ("--lengths 300 --top 270", "top is 270, must be less than the model's 270 heads"),
        ("--lengths 300 --length 40", "the causal check: length 40 is too small"),
        ("--lengths 300 --rule-cache 0.001", "rule cache 0.001 leaves no key to select at 250 tokens"),
    ],
)
def test_a_mistake_that_the_model_shows_comes_before_any_file(words, said, at_hand, tmp_path, capsys):
    with at_hand():
        assert cli.main(["heads", *words.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_json_has_the_keys_and_says_what_the_tables_say(done):
    status, lines, out = done
    found = loads(lines[-1])
    assert status == 0
    tables = {path.stem: pd.read_parquet(path) for path in out.glob("*.parquet")}
    assert set(tables) == TABLES and {path.stem for path in out.glob("*.png")} == FIGURES
    scores = tables["heads"].pivot(index="layer", columns="head", values="retrieval").to_numpy()
    assert scores.shape == (30, 9)
    assert found["retrieval"]["share"] == pytest.approx((scores >= 0.1).mean())
    layer, head, score = found["retrieval"]["top"][0]
    assert score == scores.max() == scores[layer, head]
    assert found["seed"] == 5 and found["seeds"] == [5, 6] and found["model"] == "smollm2-135m"
    trials = tables["trials"]
    mine = trials[trials["score"] == "retrieval"]
    assert len(trials) == 8 and len(mine) == 4  # both scores come from the same trials
    for kind, measure in (("retrieval", "recall"), ("reasoning", "f1")):
        rows = trials[trials["score"] == kind]
        assert found[kind]["n_kept"] == int((rows[measure] > 0.5).sum()) == int(rows["kept"].sum())
    ranks = [tables["heads"][f"retrieval_seed_{seed}"].rank() for seed in (5, 6)]
    assert found["stability"]["rho"] == pytest.approx(float(np.corrcoef(*ranks)[0, 1]))
    assert found["stability"]["ci_low"] <= found["stability"]["rho"] <= 1


@pytest.mark.slow
def test_the_causal_numbers_are_those_of_its_rows(done):
    found, rows = loads(done[1][-1])["causal"], pd.read_parquet(done[2] / "causal.parquet")
    rows = rows[rows["answered"]]
    means = rows.groupby(["item", "arm"])["delta_logprob"].mean().unstack()
    assert found["n"] == len(means) == 2 and found["k"] == 4
    assert found["top_k"] == pytest.approx(means["top"].mean())
    assert found["random_k"] == pytest.approx(means["random"].mean())
    assert found["top_k"] < found["random_k"] - 1  # the heads that copy carry the answer
    assert found["p_signflip"] == 0.5 and found["cannot_reject"]  # two items: 2 / 2²


@pytest.mark.slow
def test_single_heads_agree_with_their_closed_form(done):
    found, rows = loads(done[1][-1])["knockouts"], pd.read_parquet(done[2] / "knockouts.parquet")
    assert len(rows) == found["n_heads"] == 270
    assert found["kl_perturbation"] == pytest.approx(float(rows["kl"].rank().corr(rows["perturbation"].rank())))
    assert found["kl_perturbation"] > 0.7


@pytest.mark.slow
def test_the_profile_and_the_rule_serve_other_commands(done):
    from kvprobe import heads
    from kvprobe.eviction.budgets import Duo, HeadKV, read_profile

    found, out = loads(done[1][-1]), done[2]
    assert found["profile"] == str(out / "profile.json")
    profile = read_profile(found["profile"], model="smollm2-135m")
    assert profile.kind == "retrieval" and profile.facts["seeds"] == [5, 6] and profile.facts["n"] == 4
    assert len(profile.facts["revision"]) == 64
    scores = pd.read_parquet(out / "heads.parquet").pivot(index="layer", columns="head", values="retrieval")
    assert np.array_equal(np.array(profile.scores), scores.to_numpy())
    assert HeadKV(found["profile"]).importance == profile.scores
    assert np.allclose(np.array(Duo(found["profile"]).gates), scores.to_numpy() / scores.to_numpy().max())
    rule = heads.read_rule(out / "exclude_layers.json", "smollm2-135m")
    assert list(rule["excluded"]) == found["first_layers"]["excluded"]


@pytest.mark.slow
def test_what_is_printed_names_every_number(done):
    text = "\n".join(done[1][:-1])
    for said in (
        "retrieval score: ",
        "stability over seeds: Spearman",
        "evidence masked in the top 4 heads",
        "cannot reject: 0.5 is the smallest p",
        "one head at a time, 270 heads",
        "first-layer rule",
    ):
        assert said in text


def test_a_check_without_other_heads_says_why_and_loses_nothing_else(monkeypatch):
    """All heads of their layers are the top set: nothing is left to compare with, after a long scan."""
    from kvprobe.errors import InterventionError
    from kvprobe.heads import Settings, measuring

    def refused(*given, **more):
        raise InterventionError("k=4: none is left to compare with")

    monkeypatch.setattr(measuring, "causal", refused)
    assert measuring._checked(None, Settings(), None, [], parts.afresh) == (None, "no items were asked for (--items 0)")
    assert measuring._checked(None, Settings(), None, [1], parts.afresh) == (None, "k=4: none is left to compare with")
