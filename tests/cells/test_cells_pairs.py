"""Pairs of policies: names, presets, settings, refusals; tables side by side."""

import numpy as np
import pandas as pd
import pytest

from kvprobe import eviction
from kvprobe.cells import Pair, matrix, pairs_of
from kvprobe.cells.pairs import COLUMNS
from kvprobe.cells.reading import Reading
from kvprobe.errors import EvictionError, PromptError


def table(pair, docs=("b", "a"), caches=(0.2, 0.4), layers=2, heads=3):
    """One row a document × policy × cache × layer × head, in that order, each with a number of its own."""
    rows, number = [], 0.0
    for doc in docs:
        for policy in pair.policies:
            for cache in caches:
                for layer in range(layers):
                    for head in range(heads):
                        number += 1
                        about = {"doc": doc, "policy": policy.name, "cache": cache, "layer": layer, "head": head}
                        rows.append(about | {name: number + k / 10 for k, name in enumerate(COLUMNS)})
    return pd.DataFrame(rows)


def test_columns_stand_beside_each_other_cell_by_cell():
    pair = Pair.of("snapkv", "snapkv+two_stage")
    given = table(pair)
    found = pair.columns(given, COLUMNS)
    assert list(found) == [
        "doc",
        "layer",
        "head",
        "cache",
        *(f"{c}_{s}" for c in COLUMNS.values() for s in ("base", "ours")),
    ]
    assert len(found) == len(given) / 2
    for row in found.to_dict("records"):
        for side, policy in zip(("base", "ours"), pair.policies, strict=True):
            at = given[
                (given["doc"] == row["doc"])
                & (given["policy"] == policy.name)
                & (given["cache"] == row["cache"])
                & (given["layer"] == row["layer"])
                & (given["head"] == row["head"])
            ]
            for column, name in COLUMNS.items():
                assert row[f"{name}_{side}"] == at[column].item()


def test_swapping_the_policies_swaps_the_columns():
    one, other = Pair.of("snapkv", "tova"), Pair.of("tova", "snapkv")
    given = table(one)
    mine, swapped = one.columns(given, COLUMNS), other.columns(given, COLUMNS)
    for name in COLUMNS.values():
        assert (mine[f"{name}_base"] == swapped[f"{name}_ours"]).all()
        assert (mine[f"{name}_ours"] == swapped[f"{name}_base"]).all()


def test_presets_go_to_both_and_are_part_of_the_names():
    paper, released = pairs_of("snapkv", "snapkv+two_stage")
    assert [pair.preset for pair in (paper, released)] == ["paper", "released"]
    for pair, pool, kernel in ((paper, "max", 7), (released, "avg", 5)):
        assert [each.name for each in (pair.base, pair.ours)] == ["snapkv", "snapkv+two_stage"]
        assert [each.name for each in pair.policies] == [f"{n} ({pair.preset})" for n in ("snapkv", "snapkv+two_stage")]
        for policy in pair.policies:
            assert (policy.scorer.window, policy.scorer.pool, policy.scorer.kernel) == (32, pool, kernel)


def test_a_preset_goes_to_the_one_that_pools():
    (pair,) = pairs_of("snapkv", "tova", ["released"])
    assert (pair.base.scorer.pool, pair.ours.scorer.name) == ("avg", "tova")


def test_policies_that_do_not_pool_are_one_pair():
    pairs = pairs_of("tova", "tova+two_stage", alpha=0.25)
    assert len(pairs) == 1 and pairs[0].preset == "as given" and pairs[0].ours.selector.alpha == 0.25


def test_settings_go_to_those_that_have_them():
    pair = Pair.of("snapkv", "snapkv+two_stage", "paper", alpha=0.25, epsilon=0.5, p=2)
    assert (pair.ours.selector.alpha, pair.ours.selector.epsilon, pair.ours.selector.p) == (0.25, 0.5, 2)
    assert pair.base.selector.name == "topk"


def test_epsilon_is_that_of_the_second_stage_and_of_no_scorer():
    pair = Pair.of("expected_attention", "snapkv+two_stage", epsilon=0.5)
    assert pair.base.scorer.epsilon == 0.0 and pair.ours.selector.epsilon == 0.5


def test_objects_are_taken_as_they_are():
    base, ours = eviction.policy("snapkv", window=3), eviction.policy("tova")
    pair = Pair.of(base, ours)
    assert (pair.base, pair.ours) == (base, ours)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pair.of("snapkv", "snapkv"), "snapkv is held against itself"),
        (lambda: Pair.of("snapkv", eviction.policy("snapkv", window=3)), "snapkv is held against itself"),
        (lambda: Pair.of("snapkv", "nonsense"), "nonsense"),
        (lambda: Pair.of("snapkv", 3), "3 is no policy"),
        (lambda: Pair(eviction.policy("tova"), None), "None is no policy"),
        (lambda: Pair.of("snapkv", "tova", "nonsense"), "preset='nonsense'; allowed: paper, released"),
        (lambda: pairs_of("snapkv", "tova", ["nonsense"]), "preset='nonsense'; allowed: paper, released"),
        (lambda: pairs_of("tova", "tova+two_stage", ["nonsense"]), "preset='nonsense'; allowed: paper, released"),
        (lambda: Pair.of("streaming", "streaming+two_stage"), "streaming has no first stage"),
        (lambda: Pair.of("snapkv", "snapkv+two_stage", alpha=2), "alpha=2"),
    ],
)  # fmt: skip
def test_refusals(make, said):
    with pytest.raises(EvictionError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_matrix_has_a_row_a_document_and_columns_in_the_order_of_the_keys():
    pair = Pair.of("snapkv", "tova")
    given = table(pair, caches=(0.2,))
    shuffled = given[given["policy"] == pair.policies[0].name].sample(frac=1, random_state=0)
    found = matrix(shuffled, "perturbation", ["layer", "head"])
    slow = [
        [shuffled[(shuffled["doc"] == d) & (shuffled["layer"] == ly) & (shuffled["head"] == h)]["perturbation"].item()
         for ly in range(2) for h in range(3)]
        for d in ("a", "b")
    ]  # fmt: skip
    assert np.array_equal(found, slow)


def test_an_unknown_probe_is_refused_before_any_document_is_read():
    with pytest.raises(PromptError, match="probe='nothing'; allowed: first_decoded, last_prompt, next_token"):
        Reading(probe="nothing")
