"""The analyses of interventions: splits and closed forms against loops, sums against arithmetic by hand, files."""

import itertools
import json
import subprocess
import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from fake_trace import fake_trace
from test_analyses import ROOT, script

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own

NAMES = ("renormalisation_artefact", "mask_against_gate")
SMALL = {"length": 760, "items": 2}
MORE = {NAMES[0]: {"windows": ("8", "40"), "draws": 1}, NAMES[1]: {"every": True, "step": 2}}
WORDS = {NAMES[0]: ["--windows", "8,40", "--draws", "1"], NAMES[1]: ["--every", "--step", "2"]}
TABLES = {NAMES[0]: {"rows", "kinds", "cells"}, NAMES[1]: {"rows", "arms", "closed_forms"}}

artefact, gates = (script("analyses", name) for name in NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import tiny

    return tiny.save("llama", tmp_path_factory.mktemp("interventions") / "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(folder):
    from kvprobe import models

    return models.load(folder)


@pytest.fixture(scope="module")
def tables(model):
    """Name → (plan, table) of an analysis, computed once."""

    @cache
    def table(name):
        module = script("analyses", name)
        planned = module.ANALYSIS.plan(model, **SMALL, **MORE[name])
        return planned, module.compute(model, planned)

    return table


@pytest.fixture(scope="module")
def pair(tiny):
    """Family → (clean, masked) outcomes of a short prompt whose keys 3 … 8 and 11 … 12 are masked on all layers."""
    from kvprobe import KVMask, Prompt, intervene

    @cache
    def outcomes(family):
        model = tiny(family)
        prompt = Prompt.from_ids(torch.arange(20, 44))
        return intervene(model, prompt, [(), KVMask([(3, 9), (11, 13)])], suffix=6, continuation=[50, 51])

    return outcomes


GONE = [*range(3, 9), 11, 12]
KEYS = {"sink": [0, 1, 2], "content": [9, 10, 13, 14]}


def softmax(logits, sink, dropped=()):
    """One row in float64, keys dropped, a learned sink as one more key."""
    row = logits.double().clone()
    row[[*dropped]] = -torch.inf
    extra = row.new_zeros(0) if sink is None else sink.double().reshape(1)
    return torch.cat([row, extra]).softmax(0)[: len(row)].tolist()


@pytest.mark.parametrize(("family", "layer"), [("llama", 0), ("llama", 2), ("gpt_oss", 1), ("gpt2", 1)])
def test_parts_are_those_of_loops(pair, family, layer):
    """Both splits key by key, row by row, in float64; then summed over a bucket and averaged over rows."""
    clean, masked = pair(family)
    found, error = artefact.layer_cells(masked, clean, layer, {name: torch.tensor(at) for name, at in KEYS.items()})
    before, after = clean.trace.layer(layer), masked.trace.layer(layer)
    heads, rows, _ = before.logits.shape
    for bucket, h in itertools.product(KEYS, range(heads)):
        sink = None if before.sink is None else before.sink[h]
        sums = dict.fromkeys(("mass", "raw", "arithmetic", "mechanism", "arithmetic_conditional", "shares"), 0.0)
        sizes = dict.fromkeys(("arithmetic", "mechanism", "arithmetic_conditional", "shares"), 0.0)
        for q in range(rows):
            A, own = softmax(before.logits[h, q], sink), softmax(after.logits[h, q], sink)
            used, evicted = softmax(after.logits[h, q], sink, GONE), sum(A[i] for i in GONE)
            rest = 1 - evicted
            row = {
                "raw": sum(used[i] - A[i] for i in KEYS[bucket]),
                "arithmetic": sum(used[i] - own[i] for i in KEYS[bucket]),
                "mechanism": sum(own[i] - A[i] for i in KEYS[bucket]),
                "arithmetic_conditional": sum(A[i] * (1 / rest - 1) for i in KEYS[bucket]),
                "shares": sum(used[i] - A[i] / rest for i in KEYS[bucket]),
                "mass": evicted,
            }
            for name, value in row.items():
                sums[name] += value / rows
                if name in sizes:
                    sizes[name] += abs(value) / rows
        for name, value in sums.items():
            assert found[bucket][name][h] == pytest.approx(value, abs=2e-6), (bucket, h, name)
        for name, value in sizes.items():
            assert found[bucket][f"{name}_size"][h] == pytest.approx(value, abs=2e-6), (bucket, h, name)
    assert error < 2e-6


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_over_all_survivors_raw_gains_what_was_masked_and_shares_gain_nothing(pair, layer):
    clean, masked = pair("llama")
    kept = torch.tensor([at for at in range(clean.trace.n) if at not in GONE])
    found = artefact.layer_cells(masked, clean, layer, {"all": kept})[0]["all"]
    np.testing.assert_allclose(found["raw"], found["mass"], atol=2e-6)
    np.testing.assert_allclose(found["shares"], 0, atol=2e-6)
    np.testing.assert_allclose(found["arithmetic"] + found["mechanism"], found["mass"], atol=2e-6)
    assert (found["mass"] > 1e-3).all()


def test_on_the_first_masked_layer_everything_is_arithmetic(tables):
    _, table = tables(NAMES[0])
    cells, about = table.attrs["tables"]["cells"], table.attrs["about"]
    first = cells[cells["layer"] == 0]
    assert (first["mechanism_size"] == 0).all() and about["first_mechanism_max"] == 0
    assert first["shares_size"].max() < 1e-6 and about["identity_max_abs"] < 1e-5
    assert (cells.loc[cells["layer"] > 0, "mechanism_size"] > 1e-6).mean() > 0.9
    rows = table[table["layers"] == "first"]
    np.testing.assert_allclose(rows[["gross_own", "net_own"]].dropna(), 1, atol=1e-9)
    assert (table.loc[table["layers"] == "deeper", "gross_own"] < 1).all()


def test_cells_are_all_and_masked_buckets_have_none(tables, model):
    planned, table = tables(NAMES[0])
    cells = table.attrs["tables"]["cells"]
    for item, arms in enumerate(planned.arms):
        mine = cells[cells["item"] == item]
        assert set(mine["arm"]) == set(arms)
        counts = mine.groupby(["arm", "bucket"]).size()
        assert (counts == model.geometry.n_layers * model.geometry.n_heads).all()
        assert len(counts) == 2 * len(arms) - 1 and ("first4 0", "sink") not in counts
    assert set(cells["head"]) == set(range(model.geometry.n_heads))


def test_a_masked_key_is_in_no_bucket(tables):
    planned, _ = tables(NAMES[0])
    (item, *_), (arms, *_) = planned.made.items, planned.arms
    for spans in arms.values():
        keys = artefact._keys(item, spans)
        gone = {at for start, stop in spans for at in range(start, stop)}
        every = [at for part in keys.values() for at in part.tolist()]
        assert len(every) == len(set(every)) and not gone & set(every)
        assert gone | set(every) == set(range(item.context_stop)) and gone <= set(range(item.context_stop))


def test_windows_lie_beside_the_needle_and_are_seeded(tables, model):
    planned, _ = tables(NAMES[0])
    assert artefact.plan(model, **SMALL, **MORE[NAMES[0]]).arms == planned.arms
    for item, arms in zip(planned.made.items, planned.arms, strict=True):
        (low, high), *_ = item.spans["evidence"]
        for length in (8, 40):
            ((start, stop),) = arms[f"window{length} 0"]
            assert stop - start == length and start >= 4 and stop <= item.context_stop
            assert stop <= low or high <= start
        assert arms["evidence 0"] == item.spans["evidence"] and len(item.spans["hard"]) == 3


CELLS = pd.DataFrame(
    {
        "item": [0, 0, 1, 1],
        "bucket": ["sink"] * 4,
        "layer": [0, 1, 1, 1],
        "head": [0, 0, 0, 1],
        "kind": ["evidence"] * 4,
        "mass": [0.05, 0.05, 0.2, 0.05],
        "raw": [0.4, 0.3, 0.2, 0.3],
        "arithmetic": [0.4, 0.1, 0.5, 0.2],
        "mechanism": [0.0, 0.2, -0.3, 0.1],
        "arithmetic_conditional": [0.4, 0.2, 0.3, 0.1],
        "shares": [0.0, 0.1, -0.1, 0.2],
    }
)
SIZED = CELLS.assign(
    **{f"{name}_size": CELLS[name].abs() for name in ("arithmetic", "mechanism", "arithmetic_conditional", "shares")}
)


def row_of(table, **where):
    found = table[np.logical_and.reduce([table[name] == value for name, value in where.items()])]
    assert len(found) == 1
    return found.iloc[0]


def test_bins_hold_their_cells_and_ratios_are_of_sums():
    table = artefact.summed(SIZED, (0.1,), seed=0)
    low = row_of(table, layers="deeper", bin="0–0.1")
    assert low["n"] == 2 and low["cells"] == 2 and low["mass"] == pytest.approx(0.05)
    assert low["net_own"] == pytest.approx(0.3 / 0.6) and low["net_conditional"] == pytest.approx(0.3 / 0.6)
    assert low["gross_own"] == pytest.approx((0.1 + 0.2) / (0.3 + 0.3))
    assert low["gross_conditional"] == pytest.approx((0.2 + 0.1) / (0.3 + 0.3))
    high = row_of(table, layers="deeper", bin="0.1–1")
    assert high["n"] == 1 and high["opposed"] == 1 and high["net_own"] == pytest.approx(2.5)
    assert high["gross_own"] == pytest.approx(0.5 / 0.8) and np.isnan(high["raw_low"])
    every = row_of(table, layers="deeper", bin="any")
    assert every["cells"] == 3 and every["raw"] == pytest.approx((0.3 + 0.25) / 2)  # items weigh alike
    assert every["opposed"] == pytest.approx(1 / 3) and row_of(table, layers="all", bin="any")["cells"] == 4
    first = row_of(table, layers="first", bin="any")
    assert first["gross_own"] == 1 and first["opposed"] == 0 and first["cells"] == 1
    assert set(table["bucket"]) == {"sink"}


def test_a_share_of_a_change_that_falls_is_none():
    falls = SIZED.assign(raw=[0.4, -0.3, 0.2, 0.3], arithmetic=SIZED["arithmetic"])
    row = row_of(artefact.summed(falls, (0.1,), seed=0), layers="deeper", bin="any")
    assert np.isnan(row["net_own"]) and np.isnan(row["net_conditional_low"]) and row["gross_own"] < 1


def test_rounding_has_no_sign():
    tiny = SIZED.assign(raw=5e-7, shares=-5e-7)
    assert row_of(artefact.summed(tiny, (0.1,), seed=0), layers="all", bin="any")["opposed"] == 0
    large = SIZED.assign(raw=5e-6, shares=-5e-6)
    assert row_of(artefact.summed(large, (0.1,), seed=0), layers="all", bin="any")["opposed"] == 1


SPANS = [(5, 9), (12, 14)]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("more", [{}, {"sink": True}, {"window": 8}, {"pad": 3}])
def test_closed_forms_are_those_of_the_theory(p, more):
    """Law 4 and law 10, head by head and row by row in float64."""
    from kvprobe import theory

    trace = fake_trace(queries=(17, 30, 39), **more)
    found = gates.closed_forms(trace, SPANS, p)
    for index, view in enumerate(trace.view):
        A, sink = theory.attention(view.logits, None if view.sink is None else view.sink.float()[:, None])
        inside = torch.zeros(trace.n, dtype=torch.bool)
        for start, stop in SPANS:
            inside[start:stop] = True
        sums = dict.fromkeys(("perturbation", "gate_perturbation", "refill", "mass"), 0.0)
        for q in range(3):
            mask, gate = torch.zeros(9).double(), torch.zeros(9).double()
            for h in range(6):
                V, W = view.values[h // 3], view.w_o[h]
                mass = None if sink is None else sink[h, q]
                mask += theory.perturbation_vector(A[h, q], V, W, ~inside, mass)
                gate += theory.value_gate_vector(A[h, q], V, W, inside, 0.0)
                sums["mass"] += float(A[h, q][inside].sum()) / 18
            for name, vector in (("perturbation", mask), ("gate_perturbation", gate), ("refill", mask - gate)):
                sums[name] += float(torch.linalg.vector_norm(vector, p)) / 3
        for name, value in sums.items():
            assert found.loc[index, name] == pytest.approx(value, rel=1e-9, abs=1e-12), (index, name)


def test_where_nothing_is_attended_both_do_nothing():
    """With logits 30 lower on S, a_S → 0: both closed forms and what lies between fall by e^30."""
    trace = fake_trace()
    far = trace.map(logits=lambda x: torch.cat([x[..., :5], x[..., 5:9] - 30, x[..., 9:]], -1))
    near, far = (gates.closed_forms(each, [(5, 9)]) for each in (trace, far))
    for name in gates.FORMS:
        assert (far[name] < 1e-10 * near[name].clip(lower=1)).all() and (near[name] > 1e-3).all()


def test_survivors_without_values_make_mask_and_gate_one_and_equal_values_hide_a_mask():
    trace = fake_trace()
    silent = trace.map(values=lambda v: torch.cat([v[:, :5] * 0, v[:, 5:9], v[:, 9:] * 0], 1))
    found = gates.closed_forms(silent, [(5, 9)])
    assert (found["refill"] == 0).all()
    np.testing.assert_allclose(found["perturbation"], found["gate_perturbation"], rtol=1e-12)
    equal = gates.closed_forms(trace.map(values=lambda v: v[:, :1].expand_as(v)), [(5, 9)])
    assert (equal["perturbation"] < 1e-12).all() and (equal["gate_perturbation"] > 1e-2).all()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_closed_forms_are_what_one_layer_alone_does_to_its_output(tiny, family):
    """The model's own attention output on the layer that is cut, in the arm and in the clean run."""
    from kvprobe import KVMask, Prompt, ValueGate, intervene, observe

    model, layer = tiny(family), 1
    prompt = Prompt.from_ids(torch.arange(20, 44))
    arms = [(), KVMask([(20, 22)], layers=layer), ValueGate([(20, 22)], layers=layer)]
    clean, mask, gate = intervene(model, prompt, arms, suffix=2, streams=2)
    forms = gates.closed_forms(observe(model, prompt, [22, 23]), [(20, 22)]).loc[layer]
    for out, name in ((mask, "perturbation"), (gate, "gate_perturbation")):
        moved = (out.streams.attn_out[layer] - clean.streams.attn_out[layer]).double().abs().sum(-1).mean()
        assert float(moved) == pytest.approx(forms[name], rel=2e-4) and moved > 1e-3


def test_designs_are_single_layers_and_both_cumulations():
    found = gates.designs_of(5, 2)
    assert found[0] == ("all", -1, (0, 1, 2, 3, 4))
    assert [each for each in found if each[0] == "one"] == [("one", at, (at,)) for at in range(5)]
    assert [each[1:] for each in found if each[0] == "up_to"] == [(0, (0,)), (2, (0, 1, 2)), (4, (0, 1, 2, 3, 4))]
    assert [each[1:] for each in found if each[0] == "from"] == [(0, (0, 1, 2, 3, 4)), (2, (2, 3, 4)), (4, (4,))]
    assert [at for name, at, _ in gates.designs_of(4, 2) if name == "up_to"] == [1, 3]


def test_arms_are_those_of_the_library(model, tables):
    from kvprobe import KVMask, ValueGate, intervene

    planned, table = tables(NAMES[1])
    arms, item = table.attrs["tables"]["arms"], planned.made.items[1]
    spans, ids = [*item.spans["evidence"]], [*item.answer_ids]
    given = [(), KVMask(spans, layers=2), ValueGate(spans, layers=2), KVMask(spans, layers=[0, 1, 2]), ValueGate(spans)]
    outs = intervene(model, item.prompt, given, suffix=len(item.prompt) - item.context_stop, continuation=ids)
    logs = [out.logits[-len(ids) - 1 : -1].double().log_softmax(-1) for out in outs]
    named = [("one", 2, "mask"), ("one", 2, "gate"), ("up_to", 2, "mask"), ("all", -1, "gate")]
    for (design, layer, kind), log in zip(named, logs[1:], strict=True):
        row = row_of(arms, item=1, design=design, layer=layer, kind=kind)
        delta = sum(float(log[k, token] - logs[0][k, token]) for k, token in enumerate(ids))
        kl = float((logs[0].exp() * (logs[0] - log)).sum())
        assert row["delta_logprob"] == pytest.approx(delta, abs=2e-4) and row["kl"] == pytest.approx(kl, abs=2e-4)
        assert kl > 1e-3
    for item in (0, 1):
        whole = [row_of(arms, item=item, design=d, layer=at, kind="mask") for d, at in (("all", -1), ("up_to", 2))]
        assert whole[0]["delta_logprob"] == pytest.approx(whole[1]["delta_logprob"], abs=1e-4)


def effects(differences):
    """Arms of one design whose mask − gate is given: layer → one difference an item."""
    rows = [
        {
            "item": item,
            "design": "one",
            "layer": layer,
            "kind": kind,
            "delta_logprob": -1.0 + d * at,
            "kl": 2.0 - d * at,
        }
        for layer, values in differences.items()
        for item, d in enumerate(values)
        for kind, at in (("mask", 1.0), ("gate", 0.0))
    ]
    return pd.DataFrame(rows)


def test_differences_are_paired_and_tested_within_a_design():
    given = {0: [0.5, 0.7, 0.6, 0.9], 1: [0.1, -0.2, 0.3, -0.1], 2: [-0.4, -0.5, -0.1, -0.2]}
    table = gates.compared(effects(given), seed=0)
    p = {}
    for layer, values in given.items():
        signs = itertools.product((-1, 1), repeat=4)
        sums = [abs(sum(s * abs(v) for s, v in zip(sign, values, strict=True))) for sign in signs]
        p[layer] = np.mean([total >= abs(sum(values)) - 1e-12 for total in sums])
    ordered = sorted(p, key=p.get)
    for outcome, sign in (("delta_logprob", 1), ("kl", -1)):
        for layer, values in given.items():
            row = row_of(table, design="one", layer=layer, outcome=outcome)
            assert row["difference"] == pytest.approx(sign * np.mean(values)) and row["n"] == 4
            assert row["mask"] - row["gate"] == pytest.approx(row["difference"])
            assert row["p"] == pytest.approx(p[layer]) and row["p_attainable"] == pytest.approx(2 / 16)
            adjusted = min(p[other] * 3 / (k + 1) for k, other in enumerate(ordered) if p[other] >= p[layer])
            assert row["p_bh"] == pytest.approx(min(adjusted, 1))
            half = 3.182446 * np.std(values, ddof=1) / 2  # t with 3 degrees of freedom
            assert row["difference_low"] == pytest.approx(sign * np.mean(values) - half, rel=1e-5)


def test_agreement_is_a_rank_correlation_within_items():
    arms = pd.DataFrame(
        {"item": [0, 0, 0, 1, 1, 1], "layer": [0, 1, 2] * 2, "design": "one", "kl": [1.0, 2, 9, 30, 20, 90]}
    )
    arms = pd.concat([arms.assign(kind=kind) for kind in ("mask", "gate")])
    forms = pd.DataFrame({"item": [0, 0, 0, 1, 1, 1], "layer": [0, 1, 2] * 2, "perturbation": [1.0, 5, 6, 1, 5, 6]})
    found = gates.agreement(arms, forms.assign(gate_perturbation=-forms["perturbation"]), seed=0)
    assert found["mask"]["mean"] == pytest.approx((1 + 0.5) / 2) and found["mask"]["n"] == 2
    assert found["gate"]["mean"] == pytest.approx(-0.75)


def test_only_answered_items_enter_unless_asked():
    from kvprobe.errors import TaskError

    rows = pd.DataFrame({"item": [0, 1], "answered": [False, True]})
    assert gates.entering(rows, False)["item"].tolist() == [1] and len(gates.entering(rows, True)) == 2
    with pytest.raises(TaskError, match="--every"):
        gates.entering(rows[:1], False)


def test_the_table_has_every_design_and_closed_forms_beside_layers(tables, model):
    planned, table = tables(NAMES[1])
    assert len(table) == 2 * len(planned.designs) and (table["n"] == 2).all()
    forms = table.attrs["tables"]["closed_forms"].groupby("layer")[[*gates.FORMS]].mean()
    for row in table.to_dict("records"):
        for name in gates.FORMS:
            wanted = np.nan if row["layer"] < 0 else forms.loc[row["layer"], name]
            assert row[name] == pytest.approx(wanted, nan_ok=True)
    assert table.attrs["about"]["entering"] == 2 and table.attrs["about"]["answered"] == 0  # it is a random model


def test_figures_show_the_table(tables):
    figure = artefact.plot(tables(NAMES[0])[1])
    assert [bool(ax.get_title("left")) for ax in figure.axes] == [True, True, False, False]
    table = tables(NAMES[0])[1]
    shown = table[(table["layers"] == "deeper") & (table["bucket"] == "content") & (table["bin"] != "any")]
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    for name in ("raw", "mechanism", "shares"):
        np.testing.assert_allclose(lines[name].get_ydata(), 100 * shown[name])
    figure = gates.plot(tables(NAMES[1])[1])
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles[:3] == [f"on {words}" for words in gates.DESIGNS.values()] and len(titles) == 7
    mine = tables(NAMES[1])[1].query("design == 'one' and outcome == 'delta_logprob'").sort_values("layer")
    for ax, names in ((figure.axes[0], ("mask", "gate")), (figure.axes[3], ("difference",))):
        lines = {line.get_label(): line for line in ax.lines}
        for name in names:
            np.testing.assert_allclose(lines[name].get_ydata(), mine[name])


@pytest.mark.parametrize("name", NAMES)
def test_main_writes_a_run_folder(folder, tmp_path, capsys, name):
    out = tmp_path / "run"
    words = ["--length", "760", "--items", "1", *WORDS[name], "--model", str(folder), "--out", str(out)]
    assert script("analyses", name).main(words) == 0
    files = {path.name for path in out.iterdir()}
    assert files == {f"{table}.parquet" for table in TABLES[name]} | {f"{name}.png", "manifest.json"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["command"] == name
    assert "prefill-then-evict" in manifest["semantics"] and manifest["weight_processing"]
    said = capsys.readouterr().out
    assert "niah_multikey_1, 4 needles" in said and "n = 1 items" in said
    assert ("exploratory" in said) == (name == NAMES[1])


WRONG = [
    ("--items 0", "items is 0"),
    ("--task niah", "niah"),
    ("--length 100", "100"),
    ("--needles 0", "needles"),
]
OWN = [
    (NAMES[0], "--edges 0.1,x", "0.1,x"),
    (NAMES[0], "--edges 0.3,0.1", "0.3,0.1"),
    (NAMES[0], "--edges 0.3,1", "0.3,1"),
    (NAMES[0], "--windows 8,900", "windows of 900"),
    (NAMES[0], "--windows 0", "windows of 0"),
    (NAMES[0], "--draws 0", "draws is 0"),
    (NAMES[1], "--step 0", "step is 0"),
    (NAMES[1], "--norm 3", "3"),
]


@pytest.mark.parametrize(("name", "option", "said"), [(n, *case) for n in NAMES for case in WRONG] + OWN)
def test_wrong_input_is_one_line_before_a_folder_is_made(folder, tmp_path, capsys, name, option, said):
    out = tmp_path / "run"
    words = ["--length", "760", "--items", "1", *option.split(), "--model", str(folder), "--out", str(out)]
    assert script("analyses", name).main(words) == 2
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
