"""The first-layer rule: measures against loops, decisions on tables made by hand, and the file between two runs."""

import json
import math
from fractions import Fraction

import masked_heads
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvprobe as kp
from kvprobe.errors import DataError, RecordError, TaskError
from kvprobe.heads import Rule, decide, measure, read_rule, rule, write_rule
from kvprobe.needles.settings import from_command

FAMILIES = ("llama", "gemma2", "gpt_oss")


def by_loops(trace, cache, alpha):
    """entropy, relative entropy, top mass [3][L][H], every row by itself from its own softmax in float64."""
    found = []
    for view in trace.layers():
        found.append([])
        for h in range(len(view.logits)):
            entropies, relative, masses = [], [], []
            for query, row in zip(trace.queries, view.logits[h].double().tolist(), strict=True):
                weights = [math.exp(s) for s in row if s > -math.inf]
                sink = [] if view.sink is None else [math.exp(float(view.sink[h]))]
                total = sum(weights) + sum(sink)
                entropies.append(-sum(w / total * math.log(w / total) for w in weights + sink))
                if len(weights + sink) > 1:
                    relative.append(entropies[-1] / math.log(len(weights + sink)))
                b = Fraction(cache) * (query - trace.pad + 1)
                size = math.floor(Fraction(alpha) * math.floor(b))
                if size:
                    masses.append(sum(sorted(weights)[-size:]) / total)
            found[-1].append([sum(some) / len(some) for some in (entropies, relative, masses)])
    return np.moveaxis(np.array(found), -1, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [0, 4])
def test_measures_equal_loops(family, pad, tiny):
    item = masked_heads.item(2, pad=pad)
    trace = kp.observe(tiny(family), item.prompt, slice(None))
    found = measure(trace, Rule(cache=0.5, alpha=0.3))
    expected = by_loops(trace, "0.5", "0.3")
    for place, name in enumerate(rule.MEASURES):
        np.testing.assert_allclose(found[name], expected[place], rtol=1e-5, atol=1e-7)
    assert (found["n"], found["n_rows"], found["n_judged"]) == (18 + pad, 18, 18 - 7)  # ⌊0.3 · ⌊n/2⌋⌋ ≥ 1 from n = 8


def test_rows_are_worked_through_in_chunks(tiny, monkeypatch):
    trace = kp.observe(tiny("gpt_oss"), masked_heads.item(2).prompt, slice(None))
    whole = measure(trace)
    monkeypatch.setattr(rule, "ROWS_BYTES", 1)
    for name in rule.MEASURES:
        np.testing.assert_allclose(measure(trace)[name], whole[name], rtol=1e-6)


@given(st.integers(1, 10_000), st.integers(1, 100), st.integers(1, 100))
@example(100, 29, 100)  # 0.29 · 100 is 28.999… in floats
@example(100, 100, 29)
def test_the_first_stage_is_counted_exactly(n, cache, alpha):
    b = n * cache // 100
    assert Rule(cache=cache / 100, alpha=alpha / 100).stage1(n) == b * alpha // 100


def test_rows_too_short_to_judge_are_refused(tiny):
    trace = kp.observe(tiny("llama"), masked_heads.item(0).prompt, [5, 8])
    with pytest.raises(TaskError, match="longest sees 9"):
        measure(trace)


def table(*rows):
    """Measures of one item from top masses [L][H]."""
    top = np.array(rows, dtype=float)
    return {"top_mass": top, "entropy": 5 * (1 - top), "relative_entropy": 1 - top}


DIFFUSE, SHARP = [0.3, 0.4, 0.2, 0.9], [0.9, 0.8, 0.7, 0.95]


@pytest.mark.parametrize(
    ("rows", "options", "excluded"),
    [
        ([DIFFUSE, SHARP, SHARP], {}, [0]),  # Fig. 8: first-layer heads only
        ([DIFFUSE, DIFFUSE, SHARP], {}, [0, 1]),
        ([SHARP, DIFFUSE, SHARP], {}, []),  # no unbroken run from layer 0
        ([SHARP, DIFFUSE, DIFFUSE], {"leading": False}, [1, 2]),
        ([DIFFUSE, SHARP, DIFFUSE], {}, [0]),
        ([DIFFUSE, SHARP, DIFFUSE], {"leading": False}, [0, 2]),
        ([SHARP, SHARP], {}, []),
        ([DIFFUSE, DIFFUSE], {}, [0, 1]),
        ([[0.5, 0.5, 0.9, 0.9], SHARP], {}, [0]),  # at the mass fails, at the share excludes
        ([[0.5, 0.51, 0.9, 0.9], SHARP], {}, []),
        ([DIFFUSE, SHARP], {"share": 0.75}, [0]),
        ([DIFFUSE, SHARP], {"share": 0.8}, []),
        ([DIFFUSE, SHARP], {"mass": 0.25}, []),
    ],
)
def test_what_is_excluded(rows, options, excluded):
    report = decide([table(*rows)], Rule(**options))
    assert report["excluded"] == excluded
    assert [row["layer"] for row in report["layers"] if row["excluded"]] == excluded
    assert report["rule_text"] == Rule(**options).text and report["rule"]["mass"] == options.get("mass", 0.5)


def test_the_report_says_why():
    report = decide([table(DIFFUSE, SHARP, DIFFUSE)])
    first, second, third = report["layers"]
    assert first["why"] == "3 of 4 heads hold at most 0.5 of their attention on their top keys: excluded"
    assert second["why"] == "0 of 4 heads hold at most 0.5 of their attention on their top keys, 2 needed: kept"
    assert third["why"].endswith("but layer 1 before it stays: kept") and third["diffuse"] and not third["excluded"]
    assert first["failing"] == [0, 1, 2] and first["top_mass_min"] == 0.2
    assert first["top_mass"] == pytest.approx(0.45) and first["relative_entropy"] == pytest.approx(0.55)
    assert report["failing_heads"][:2] == [[0, 0, 0.3], [0, 1, 0.4]] and len(report["failing_heads"]) == 6
    assert report["n_failing_elsewhere"] == 3 and report["heads_passing"] == pytest.approx(0.5)


def test_means_over_items_decide():
    """A head at 0.3 and 0.8 holds 0.55: it passes, though it fails in one item."""
    low, high = table([0.3, 0.3], [0.9, 0.9]), table([0.8, 0.65], [0.9, 0.9])
    assert decide([low])["excluded"] == [0] and decide([low, high])["excluded"] == [0]
    report = decide([low, high])
    assert report["layers"][0]["failing"] == [1] and report["n_items"] == 2
    assert report["top_mass"][0] == pytest.approx([0.55, 0.475])


def test_what_cannot_be_decided_is_named():
    with pytest.raises(TaskError, match="at least one item"):
        decide([])
    with pytest.raises(TaskError, match="of one model"):
        decide([table(SHARP), table(SHARP, SHARP)])
    with pytest.raises(TaskError, match="not finite"):
        decide([table([math.nan, 0.2])])
    for name in ("cache", "alpha", "mass", "share"):
        for value in (0, 1.5, -0.1, True, "half", math.nan):
            with pytest.raises(TaskError, match=f"{name} is .*above 0 and at most 1"):
                Rule(**{name: value})
    with pytest.raises(TaskError, match="leading is 1"):
        Rule(leading=1)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "rule.json"
    return write_rule(
        path, decide([table(DIFFUSE, SHARP, SHARP)], Rule(cache=0.1)), "smollm2-135m", task="t", seeds=[3]
    )


def test_the_file_comes_back(stored):
    found = read_rule(stored, "smollm2-135m")
    report = decide([table(DIFFUSE, SHARP, SHARP)], Rule(cache=0.1))
    assert {name: found[name] for name in report} == report
    assert (found["model"], found["task"], found["seeds"], found["file"]) == ("smollm2-135m", "t", [3], str(stored))
    assert Rule(**found["rule"]) == Rule(cache=0.1)


def test_a_measure_without_a_value_comes_back(tmp_path):
    measures = table(DIFFUSE, SHARP) | {"relative_entropy": np.full((2, 4), np.nan)}
    path = write_rule(tmp_path / "rule.json", decide([measures]), "m")
    assert read_rule(path)["excluded"] == [0]


def test_models_are_known_by_the_name_that_load_gives_them(stored, tiny_folder, tiny, tmp_path):
    assert read_rule(stored, "SmolLM2-135M-Instruct")["excluded"] == [0]  # what load calls by the shorter name
    report = decide([table(DIFFUSE, SHARP, SHARP)])
    own = write_rule(tmp_path / "own.json", report, tiny("llama"))
    assert read_rule(own, tiny("llama"))["model"] == tiny("llama").name
    assert read_rule(own, str(tiny_folder("llama")))["excluded"] == [0]
    with pytest.raises(DataError, match=r"own.json is a rule of 'llama'; allowed: one of 'gpt2'"):
        read_rule(own, tiny("gpt2"))
    assert read_rule(own)["excluded"] == [0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "kvprobe-run/1"}, "no stored layer rule"),
        ({"excluded": [0, 1]}, r"says excluded \[0, 1\], its own numbers and rule give \[0\]"),
        ({"excluded": "0"}, "its own numbers"),
        ({"top_mass": [[0.1], [0.2, 0.3]]}, "no layer rule"),
        ({"top_mass": "many"}, "no layer rule"),
        ({"top_mass": [[None, 1, 1, 1]] * 3}, "not finite"),
        ({"rule": {"mass": 7}}, "mass is 7"),
        ({"rule": {"colour": 1}}, "colour"),
        ({"rule": 3}, "no layer rule"),
        ({"rule_text": None}, "lacks rule_text"),
        ({"model": None}, "lacks model"),
    ],
)
def test_a_corrupt_file_is_named(stored, change, said):
    content = json.loads(stored.read_text()) | change
    stored.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(DataError, match=said):
        read_rule(stored)


@pytest.mark.parametrize(("raw", "said"), [(b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[1]", "no stored layer")])
def test_what_is_no_object_is_named(stored, raw, said):
    stored.write_bytes(raw)
    with pytest.raises(DataError, match=said):
        read_rule(stored)


def test_no_file_and_no_place(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_rule(tmp_path / "none.json")
    with pytest.raises(RecordError, match=r"must end in \.json"):
        write_rule(tmp_path / "rule.txt", decide([table(SHARP)]), "m")


def niah(**changes):
    """Words of ``kvprobe niah``."""
    unsaid = ("distractors", "new_tokens", "haystack", "preset", "needles", "length", "items", "decoys")
    given = dict.fromkeys(unsaid) | {"task": "niah_single_1", "seed": 0, "norm": 1, "template": "ruler"}
    given |= {"gate_contrast": "hard", "gate_score": "mass", "gate_at": "last", "exclude_layers": ""}
    return from_command(given | {"model": "smollm2-135m"} | changes)


def test_niah_takes_a_stored_rule_and_says_where_it_comes_from(stored):
    import hashlib

    settings = niah(exclude_layers=f" {stored} ")
    assert settings.exclude_layers == (0,)
    assert settings.layer_rule["sha256"] == hashlib.sha256(stored.read_bytes()).hexdigest()
    assert settings.layer_rule["file"] == str(stored) and settings.layer_rule["rule"]["cache"] == 0.1
    assert settings.layer_rule["rule_text"] == Rule(cache=0.1).text and settings.layer_rule["excluded"] == [0]
    plain = niah(exclude_layers="2,0")
    assert (plain.exclude_layers, plain.layer_rule) == ((0, 2), None)
    with pytest.raises(TaskError, match=r"a stored rule's \.json file"):
        niah(exclude_layers="0,x")
    with pytest.raises(DataError, match="allowed: one of 'other/model'"):
        niah(exclude_layers=str(stored), model="other/model")
    with pytest.raises(DataError, match="cannot read"):
        niah(exclude_layers="0,1.json")
