"""audit(): rows against the cells and loops, where θ̂ exists, and what counts as a violation."""

import numpy as np
import pandas as pd
import pytest
import small_documents as small
from small_documents import behind
from tiny import FAMILIES

import kvprobe
from kvprobe import audits, cells, eviction
from kvprobe.audits.tables import BOUNDS, violations
from kvprobe.errors import EvictionError, KVProbeError, PromptError, TheoryError

families = pytest.mark.parametrize("family", FAMILIES)
POLICIES = [eviction.policy(name, **small.SMALL) for name in ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage")]
STAGES = ["stage2_bound", "relaxed_bound", "relaxed_candidates"]
KEYS = ["doc", "policy", "cache", "layer"]


def tables(model, docs, cache=(0.25, 0.5), **more):
    return {level: kvprobe.audit(model, docs, POLICIES, list(cache), level, **more) for level in audits.LEVELS}


@pytest.fixture(scope="module")
def both(tiny):
    made = {}

    def get(family, p=1):
        if (family, p) not in made:
            made[family, p] = tables(tiny(family), small.documents_for(family, 3), p=p)
        return made[family, p]

    return get


@pytest.mark.slow
@families
@pytest.mark.parametrize("p", [1, 2])
def test_no_cell_violates_the_chain_and_the_chain_is_not_trivial(family, p, both):
    for level, table in both(family, p).items():
        assert violations(table) == 0, level
        theta = table["bound_valid"] if level == "layer" else table["bound"]
        strict = [
            table["actual"] < 0.99 * table["centred_bound"],
            table["centred_bound"] < 0.99 * table["bound"],
            theta < 0.999 * table["stage2_bound"],
            table["stage2_bound"] < 0.999 * table["relaxed_bound"],
        ]
        if family in ("llama", "gpt2"):
            assert all(each.sum() > 5 for each in strict), [int(each.sum()) for each in strict]


@families
def test_heads_are_the_cells_under_their_names(family, tiny, both):
    found = both(family)["head"]
    assert list(found) == [*KEYS, "head", "actual", *BOUNDS, "mass", "kept", "stage1", "sigma", "sigma_oracle"]
    doc = small.documents_for(family, 3)[1]
    arms = [cells.Arm(policy, cache) for policy in POLICIES for cache in ("0.25", "0.5")]
    mine = cells.measure(cells.probe(tiny(family), doc, POLICIES), arms, stages=True).heads
    pd.testing.assert_frame_equal(
        found[found["doc"] == doc.name].reset_index(drop=True),
        mine.rename(columns={"perturbation": "actual"})[list(found)],
        rtol=1e-5,
        atol=1e-6,
    )


@families
@pytest.mark.parametrize("p", [1, 2])
def test_layers_are_sums_over_their_heads_by_loops(family, p, both):
    heads, layers = both(family, p)["head"], both(family, p)["layer"]
    grouped = {key: rows.to_dict("records") for key, rows in heads.groupby(KEYS)}
    assert len(layers) == len(grouped) == len(heads) / 6
    for row in layers.to_dict("records"):
        mine = grouped[tuple(row[key] for key in KEYS)]
        valid = [head for head in mine if head["sigma"] > 0.5]
        assert row["sum_heads"] == pytest.approx(sum(head["actual"] for head in mine))
        assert row["actual"] <= row["sum_heads"] * (1 + 1e-9)
        for name in ("centred_bound", "bound"):
            assert row[name] == pytest.approx(sum(head[name] for head in mine))
        assert row["valid_heads"] == len(valid) and row["sigma"] == min(head["sigma"] for head in mine)
        assert row["mass"] == pytest.approx(sum(head["mass"] for head in mine) / 6)
        for name in STAGES:
            assert row[name] == pytest.approx(sum(h[name] for h in valid) if valid else np.nan, nan_ok=True)
        assert row["bound_valid"] == pytest.approx(sum(h["bound"] for h in valid) if valid else np.nan, nan_ok=True)


@families
def test_nan_exactly_where_sigma_is_at_most_one_half(family, both):
    heads, layers = both(family)["head"], both(family)["layer"]
    for name in STAGES:
        assert heads[name].isna().equals(heads["sigma"] <= 0.5)
        assert layers[name].isna().equals(layers["valid_heads"] == 0)
    assert not heads[["actual", "bound", "centred_bound", "sigma", "mass"]].isna().any(axis=None)
    if family == "llama":
        assert (heads["sigma"] <= 0.5).any() and (heads["sigma"] > 0.5).any()


@families
def test_actual_of_a_layer_is_that_of_plain_transformers_tensors(family, tiny, plain, both):
    doc = small.documents_for(family, 3)[0]
    ids, stop = small.whole(plain(family), doc)
    rows = small.rows_of(plain(family), ids)
    layers = both(family)["layer"]
    for policy in POLICIES:
        keep = policy.select(tiny(family), ids[:stop], "0.25")
        at = layers[(layers["doc"] == doc.name) & (layers["policy"] == policy.name) & (layers["cache"] == 0.25)]
        for layer, (A, V, W) in enumerate(rows):
            heads = [
                small.head_measures(A[h], V[h * len(V) // 6], W[h], behind(keep[layer, h * len(V) // 6], len(ids)), 1)
                for h in range(6)
            ]
            if min(each["retained"] for each in heads) > 1e-3:
                truth = small.size(sum(each["change"] for each in heads), 1)
                assert at["actual"].iloc[layer] == pytest.approx(truth, rel=5e-3, abs=1e-3)


def made_up(level):
    """Ten cells in which every inequality holds."""
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.uniform(0.1, 1, (10, 7)), 1)
    names = ["actual", "sum_heads", "centred_bound", "bound", "stage2_bound", "relaxed_candidates", "relaxed_bound"]
    table = pd.DataFrame(dict(zip(names, steps.T, strict=True)))
    if level == "head":
        return table.drop(columns="sum_heads")
    return table.assign(bound_valid=table["bound"])


CHAIN = {
    "head": ["actual", "centred_bound", "bound", "stage2_bound", "relaxed_candidates", "relaxed_bound"],
    "layer": ["actual", "sum_heads", "centred_bound", "bound", "stage2_bound", "relaxed_candidates", "relaxed_bound"],
}


@pytest.mark.parametrize("level", ["head", "layer"])
def test_planted_violations_are_counted_cell_by_cell(level):
    clean = made_up(level)
    assert violations(clean) == 0
    for low, high in zip(CHAIN[level], CHAIN[level][1:], strict=False):
        broken = clean.copy()
        where = "bound_valid" if level == "layer" and low == "bound" else low
        broken.loc[[2, 5, 7], where] = broken.loc[[2, 5, 7], high] * (1 + 1e-6)
        assert violations(broken) == 3, (low, high)
    many = clean.copy()
    many.loc[4, "actual"] = 1e9  # breaks one cell, however many inequalities
    assert violations(many) == 1


@pytest.mark.parametrize("level", ["head", "layer"])
def test_equality_rounding_and_what_does_not_exist_are_no_violations(level):
    table = made_up(level)
    for name in CHAIN[level] + (["bound_valid"] if level == "layer" else []):
        table[name] = 1.0
    assert violations(table) == 0
    table.loc[0, "actual"] = 1 + 1e-12
    assert violations(table) == 0
    table[STAGES + (["bound_valid"] if level == "layer" else [])] = np.nan
    assert violations(table) == 0
    table[:] = 0.0
    assert violations(table) == 0


@pytest.mark.parametrize("level", ["head", "layer"])
@pytest.mark.parametrize("name", ["actual", "bound", "centred_bound"])
def test_what_must_exist_and_does_not_is_a_violation(level, name):
    """L, θ and θ_c exist in every cell: a NaN there is a bug that no audit may pass over."""
    table = made_up(level)
    table.loc[3, name] = np.nan
    assert violations(table) == 1


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m, d: kvprobe.audit(m, d, POLICIES, 0.5, "model"), EvictionError, "level='model'; allowed"),
        (lambda m, d: kvprobe.audit(m, d, []), EvictionError, "allowed: a list of names or policies"),
        (lambda m, d: kvprobe.audit(m, d, "snapkv"), EvictionError, "allowed: a list of names or policies"),
        (lambda m, d: kvprobe.audit(m, d, ["nonsense"]), EvictionError, "nonsense"),
        (lambda m, d: kvprobe.audit(m, d, [3], 0.5), KVProbeError, "3"),
        (lambda m, d: kvprobe.audit(m, d, ["tova", "tova"], 0.5), EvictionError, "given twice"),
        (lambda m, d: kvprobe.audit(m, d, ["tova"], []), EvictionError, "no cache ratio was given"),
        (lambda m, d: kvprobe.audit(m, d, ["tova"], [0.5, 0.5]), EvictionError, "given twice"),
        (lambda m, d: kvprobe.audit(m, d, ["tova"], 2), EvictionError, "cache ratio '2'"),
        (lambda m, d: kvprobe.audit(m, d, ["snapkv"], 0.5), EvictionError, "last 32 queries and the context has 24"),
        (lambda m, d: kvprobe.audit(m, d, ["tova"], 0.5, p=0), TheoryError, "p = 0"),
        (lambda m, d: kvprobe.audit(m, d, ["tova"], 0.5, probe="next_token"), PromptError, "doc-0 has a question"),
    ],
)  # fmt: skip
def test_refused_in_one_line_before_anything_is_run(call, error, said, tiny, monkeypatch):
    model = tiny("llama")

    def run(*given, **more):
        raise AssertionError("a document was run")

    monkeypatch.setattr(cells, "probe", run)
    with pytest.raises(error, match=said) as caught:
        call(model, [small.document(0)])
    assert "\n" not in str(caught.value)


def test_policies_by_name_are_policies(tiny):
    doc = small.document(1)
    one, other = (kvprobe.audit(tiny("llama"), [doc], [each], 0.5) for each in ("tova", eviction.policy("tova")))
    assert one.equals(other)
