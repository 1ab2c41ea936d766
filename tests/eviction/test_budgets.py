"""Budgets: laws that hold for every one of them."""

from dataclasses import FrozenInstanceError, dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from budget_requests import counts, present, request, requests, tables
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import EvictionError
from kvprobe.eviction import budgets
from kvprobe.eviction.budgets import BUDGETS, AdaKV, Allocation, Budget, Duo, HeadKV, LayerGlobal, Pyramid, Uniform

MAKE = {
    "uniform": lambda asked: Uniform(),
    "adakv": lambda asked: AdaKV(),
    "adakv mix": lambda asked: AdaKV("mix"),
    "pyramid": lambda asked: Pyramid(beta=4),
    "headkv": lambda asked: HeadKV(table(asked), beta=2),
    "duo": lambda asked: Duo(table(asked), sinks=2, recent=3),
    "layer_global": lambda asked: LayerGlobal(),
    "model_global": lambda asked: LayerGlobal("model"),
    "last_first": lambda asked: LastFirst(),
}
ROUNDED = ("adakv mix", "duo")  # their totals have laws of their own
SETTINGS = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class LastFirst(Budget):
    """A third party's: all that can be given to the last sets of a layer."""

    name: ClassVar[str] = "last_first"

    def allocate(self, request):
        rows = []
        for scores, reserved in zip(request.scores, request.reserved, strict=True):
            here = scores > -torch.inf
            row, left = (reserved & here).sum(-1), request.base * request.n_sets
            left -= int(row.sum())
            for i in reversed(range(request.n_sets)):
                more = min(left, int(here[i].sum() - row[i]))
                row[i], left = row[i] + more, left - more
            rows.append(row)
        return Allocation(torch.stack(rows), 0, {})


@pytest.fixture(autouse=True, scope="module")
def _registered():
    budgets.register(LastFirst)
    yield
    del BUDGETS["last_first"]


def table(asked):
    """Distinct numbers in (0, 1), one a set, in no order of layers or heads."""
    size = asked.n_layers * asked.n_sets
    values = [((7 * i + 3) % 17 + i / (size + 1)) / 20 + 1 / 64 for i in range(size)]
    return tuple(tuple(values[i : i + asked.n_sets]) for i in range(0, size, asked.n_sets))


def test_the_registry_holds_what_is_tested_here():
    assert set(BUDGETS) == {MAKE[name](request([[[1.0]]], [[[False]]], 1)).name for name in MAKE}
    for name, cls in BUDGETS.items():
        assert cls.name == name and issubclass(cls, Budget)
    assert [name for name, cls in BUDGETS.items() if cls.needs_attention] == ["adakv", "layer_global"]


@pytest.mark.parametrize("name", MAKE)
@SETTINGS
@given(st.data())
def test_every_budget_lies_between_the_reserved_and_the_present_and_the_total_is_exact(name, data):
    pads = 0 if name == "uniform" else 6  # uniform is the same for all, so that whoever holds less must be refused
    asked = data.draw(requests(most_pads=pads))
    given_ = MAKE[name](asked).allocate(asked)
    scores, reserved = tables(asked)
    assert given_.budgets.dtype == torch.int64 and given_.budgets.shape == (asked.n_layers, asked.n_sets)
    if name not in ROUNDED:
        assert int(given_.budgets.sum()) == asked.base * asked.n_layers * asked.n_sets
    for i, row in enumerate(given_.budgets.tolist()):
        for j, budget in enumerate(row):
            assert sum(reserved[i][j]) <= budget <= present(scores[i][j])


@pytest.mark.parametrize("name", MAKE)
@SETTINGS
@given(st.data())
def test_keep_all_keeps_all(name, data):
    asked = data.draw(requests())
    asked = replace(asked, base=asked.length, cache=1.0)
    assert MAKE[name](asked).allocate(asked).budgets.eq(asked.length).all()


@pytest.mark.parametrize("name", [name for name in MAKE if name != "last_first"])
@SETTINGS
@given(st.data())
def test_permuting_heads_permutes_budgets(name, data):
    asked = data.draw(requests(most_pads=0 if name == "uniform" else 4))
    order = data.draw(st.permutations(range(asked.n_sets)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    # Distinct scores: a permutation moves ties.
    fresh = [torch.rand(s.shape, generator=generator).masked_fill(s == -torch.inf, -torch.inf) for s in asked.scores]
    asked = replace(asked, scores=fresh)
    method = MAKE[name](asked)
    moved = replace(asked, scores=[s[order] for s in fresh], reserved=[r[order] for r in asked.reserved])
    if isinstance(method, (HeadKV, Duo)):
        field = "importance" if isinstance(method, HeadKV) else "gates"
        shuffled = replace(method, **{field: torch.tensor(getattr(method, field), dtype=torch.float64)[:, order]})
    else:
        shuffled = method
    before, after = method.allocate(asked).budgets[:, order], shuffled.allocate(moved).budgets
    if name == "headkv" or name == "pyramid":  # equal remainders are shared out by order
        assert (before - after).abs().max() <= 1
    else:
        assert before.equal(after)


@pytest.mark.parametrize("name", MAKE)
@SETTINGS
@given(requests(n_layers=2), requests(n_layers=2))
def test_a_budget_remembers_nothing_and_changes_nothing(name, one, two):
    methods = [MAKE[name](asked) for asked in (one, two)]
    untouched = [s.clone() for s in one.scores], [r.clone() for r in one.reserved]
    there = [m.allocate(a).budgets for m, a in zip(methods, (one, two), strict=True)]
    back = [m.allocate(a).budgets for m, a in zip(reversed(methods), (two, one), strict=True)]
    assert there[0].equal(back[1]) and there[1].equal(back[0])
    assert all(map(torch.equal, one.scores, untouched[0])) and all(map(torch.equal, one.reserved, untouched[1]))


@pytest.mark.parametrize("name", MAKE)
def test_a_budget_is_a_frozen_value(name):
    asked = request([[[0.5, 0.25]] * 2] * 2, [[[False, True]] * 2] * 2, 1)
    method = MAKE[name](asked)
    assert method == MAKE[name](asked) and hash(method) == hash(MAKE[name](asked))
    with pytest.raises(FrozenInstanceError):
        method.name = "other"


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("uniform", "duo", "last_first")])
def test_what_cannot_be_met_is_refused_with_its_numbers(name):
    scores = [[[1.0, 2.0, 3.0, 4.0]] * 2] * 2
    too_much = request(scores, [[[True, True, True, False]] * 2] * 2, 2)
    with pytest.raises(EvictionError, match=r"\b(4|8) entries to share .* must keep (6|12) and hold (8|16)"):
        MAKE[name](too_much).allocate(too_much)
    too_little = request(scores, [[[False] * 4] * 2] * 2, 5)
    with pytest.raises(EvictionError, match=r"\b(10|20) entries to share .* hold (8|16); allowed: [02] to (8|16)"):
        MAKE[name](too_little).allocate(too_little)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaKV(1.5), "safeguard=1.5; allowed: a share between 0 and 1, 'mix'"),
        (lambda: AdaKV("mixed"), "safeguard='mixed'; allowed"),
        (lambda: AdaKV(float("nan")), "safeguard=nan; allowed"),
        (lambda: AdaKV(True), "safeguard=True; allowed"),
        (lambda: Pyramid(0.5), "beta=0.5; allowed: a number ≥ 1"),
        (lambda: Pyramid(float("inf")), "beta=inf; allowed"),
        (lambda: LayerGlobal("heads"), "scope='heads'; allowed: layer, model"),
        (lambda: HeadKV(((1.0,),), beta=0.99), "beta=0.99; allowed: a number ≥ 1"),
        (lambda: HeadKV(((1.0, -0.5),)), r"importance holds -0.5; allowed: numbers ≥ 0"),
        (lambda: HeadKV(((0.0, 0.0),)), "importance is 0 for every head"),
        (lambda: HeadKV(((1.0, float("nan")),)), "importance is nan at layer 0, head 1; allowed: finite numbers"),
        (lambda: HeadKV(torch.ones(3)), "importance=tensor.*; allowed: a table of numbers, layers × heads"),
        (lambda: HeadKV(()), "importance has rows of .* allowed: one length"),
        (lambda: HeadKV(((1.0,), (1.0, 2.0))), "importance has rows of .*1, 2.* allowed: one length"),
        (lambda: Duo(((0.5, 1.5),)), "gates hold 1.5; allowed: numbers between 0 and 1"),
        (lambda: Duo(((0.5,),), ratio=-0.1), "ratio=-0.1; allowed: a share of heads between 0 and 1, or None"),
        (lambda: Duo(((0.5,),), sinks=-1), "sinks=-1; allowed: a whole number ≥ 0"),
        (lambda: Duo(((0.5,),), recent=0), "recent=0; allowed: a whole number ≥ 1"),
        (lambda: budgets.register(int), "no budget; allowed: a subclass of Budget"),
        (
            lambda: budgets.register(type("Other", (Budget,), {"name": "duo"})),
            "Other has name='duo'; allowed: a name",
        ),
        (lambda: budgets.register(type("Other", (Budget,), {})), "Other has name=''; allowed"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(EvictionError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_table_of_another_model_is_refused():
    asked = request([[[0.5, 0.25]] * 3] * 2, [[[False, True]] * 3] * 2, 1, group=2)
    with pytest.raises(EvictionError, match=r"importance of shape \[2, 3\]; allowed: \[2, 6\], layers × query heads"):
        HeadKV(((1.0,) * 3,) * 2).allocate(asked)
    with pytest.raises(EvictionError, match=r"gates of shape \[1, 3\]; allowed: \[2, 3\], layers × kv heads"):
        Duo(((1.0,) * 3,)).allocate(asked)
    with pytest.raises(EvictionError, match=r"gates of shape \[2, 1\]; allowed: \[2, 3\]"):
        Duo(((1.0,),) * 2).allocate(replace(asked, group=1))


def test_settings_come_as_tensors_arrays_tuples_and_numbers_of_any_kind():
    asked = request([[[0.5, 0.25, 0.75]] * 2], [[[False] * 3] * 2], 2)
    rows = ((0.25, 0.5),)
    for same in (torch.tensor(rows), torch.tensor(rows, dtype=torch.bfloat16), np.array(rows), [[0.25, 0.5]]):
        assert HeadKV(same) == HeadKV(rows) and Duo(same) == Duo(rows)
    assert AdaKV(np.float64(0.2)).allocate(asked).at_least == AdaKV(Fraction(1, 5)).allocate(asked).at_least == 0


def test_the_reserved_that_are_not_there_do_not_count():
    asked = request([[[-np.inf, 1.0, 2.0], [3.0, 1.0, 2.0]]], [[[True, False, False], [True, False, False]]], 1)
    assert counts(tables(asked)[1]) == [[0, 1]]
    assert LayerGlobal().allocate(asked).budgets.tolist() == [[1, 1]]
