"""Laws of every scorer there is, a third party's included."""

from dataclasses import dataclass, replace
from typing import ClassVar

import eviction_layers as slow
import pytest
import torch
from torch.testing import assert_close

from kvprobe.errors import EvictionError
from kvprobe.eviction.scorers import SCORERS, Scorer, register


@dataclass(frozen=True)
class Longest(Scorer):
    """What someone else would write."""

    name: ClassVar[str] = "longest"

    power: int = 1

    def score(self, layer):
        return layer.keys.float().norm(dim=-1) ** self.power


NAMES = (*SCORERS, Longest.name)
SMALL = {"window": 4, "n_future": 9}
"""Settings that make short layers possible, for the scorers that have them."""
GROUPED = ("defensivekv",)
"""Refused per query head."""
ALIGNED = ("defensivekv", "tova")
"""Compare heads position by position: no left-padded layers."""
SHORTEST = {"snapkv": 5, "defensivekv": 5, "obcache": 4, "expected_attention": 5}
"""Tokens that a scorer needs at least with these settings; one for the others."""


@pytest.fixture(autouse=True)
def third_party():
    register(Longest)
    yield
    del SCORERS[Longest.name]


def build(name):
    cls = SCORERS[name]
    return cls(**{key: value for key, value in SMALL.items() if key in cls.__dataclass_fields__})


def ready(name, kind="gqa", **changes):
    """A layer with what this scorer asks for: its query rows, a rotation, later queries."""
    scorer, lay = build(name), slow.kind(kind, **changes)
    later = torch.randn(lay.n_heads, 3, 6, generator=torch.Generator().manual_seed(1))
    rows = scorer.rows(lay.length)
    return scorer, replace(
        lay,
        queries=lay.queries[:, lay.length - rows :],
        rotary=slow.Turns(6) if scorer.needs_rotary else None,
        future=later if scorer.needs_future else None,
    )


def test_the_names_are_complete():
    ours = "snapkv h2o h2o_256 tova streaming knorm expected_attention defensivekv obcache random oracle"
    assert [name for name in SCORERS if name != "longest"] == ours.split()
    assert all(cls.name == name for name, cls in SCORERS.items())


@pytest.mark.parametrize("kind", slow.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_finite_scores(name, kind):
    scorer, lay = ready(name, kind)
    scores = scorer.score(lay)
    assert scores.dtype == torch.float32 and scores.shape in ((lay.n_heads, 23), (lay.n_kv_heads, 23))
    assert bool(torch.isfinite(scores).all()) and lay.per_set(scores).shape == (lay.n_sets, 23)
    if scorer.attention:
        assert float(scores.min()) >= 0
    kept = scorer.protected(lay, torch.full((lay.n_sets,), 9))
    assert kept.dtype == torch.bool and kept.shape == (lay.n_sets, 23) and int(kept.sum(-1).max()) <= 9
    assert scorer.rows(23) <= 23 and isinstance(hash(scorer), int)


@pytest.mark.parametrize("kind", ["gqa", "mqa", "all"])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ALIGNED])
def test_pads_change_nothing(name, kind):
    """Left pads hold anything: scores of what is there, and what is kept of it, stay the same."""
    scorer, lay = ready(name, kind)
    lost = [5, 3][: lay.n_kv_heads]
    gone = slow.ragged(lay, lost)
    more = replace(
        gone,
        keys=torch.cat([torch.full_like(gone.keys[:, :2], 3.0), gone.keys], 1),
        values=torch.cat([torch.full_like(gone.values[:, :2], -9.0), gone.values], 1),
        positions=torch.cat([torch.full_like(gone.positions[:, :2], -1), gone.positions], 1),
    )
    few, many = gone.per_set(scorer.score(gone)), more.per_set(scorer.score(more))
    assert_close(many[:, 2:][gone.alive], few[gone.alive], rtol=1e-5, atol=1e-7)
    assert bool(torch.isfinite(many).all())
    budgets = torch.full((lay.n_sets,), 9)
    kept = scorer.protected(more, budgets)
    assert torch.equal(kept[:, 2:] & gone.alive, scorer.protected(gone, budgets) & gone.alive)


@pytest.mark.parametrize("kind", ["gqa", "mqa", "sink", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_query_heads_of_a_group_are_interchangeable(name, kind):
    scorer, lay = ready(name, kind)
    order = torch.arange(lay.n_heads).unflatten(0, (lay.n_kv_heads, lay.group)).flip(1).flatten()
    assert order.tolist() != list(range(lay.n_heads))
    other = slow.permuted(lay, order)
    assert_close(other.per_set(scorer.score(other)), lay.per_set(scorer.score(lay)), rtol=1e-5, atol=1e-7)
    budgets = torch.full((lay.n_sets,), 12)
    assert torch.equal(scorer.protected(other, budgets), scorer.protected(lay, budgets))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "random"])
def test_kv_heads_are_interchangeable(name):
    scorer, lay = ready(name, "gqa")
    other = slow.permuted(lay, torch.tensor([2, 3, 0, 1]))
    other = replace(other, keys=lay.keys.flip(0), values=lay.values.flip(0))
    assert_close(other.per_set(scorer.score(other)), lay.per_set(scorer.score(lay)).flip(0), rtol=1e-5, atol=1e-7)
    budgets = torch.full((lay.n_sets,), 12)
    assert torch.equal(scorer.protected(other, budgets), scorer.protected(lay, budgets).flip(0))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in GROUPED])
def test_query_head_granularity(name):
    """Per query head the scores average to the group's; on MHA the two are the same (random draws by the set)."""
    scorer, lay = ready(name)
    single = lay.at_query_heads()
    scores = single.per_set(scorer.score(single))
    assert scores.shape == (4, 23) and bool(torch.isfinite(scores).all())
    kept = scorer.protected(single, torch.full((4,), 9))
    assert kept.shape == (4, 23) and int(kept.sum(-1).max()) <= 9
    if name != "random":
        assert_close(scores.unflatten(0, (2, 2)).mean(1), lay.per_set(scorer.score(lay)), rtol=1e-5, atol=1e-7)
        assert torch.equal(kept[::2], scorer.protected(lay, torch.full((2,), 9)))
    scorer, mha = ready(name, "mha")
    assert_close(mha.at_query_heads().per_set(scorer.score(mha.at_query_heads())), mha.per_set(scorer.score(mha)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_upcast_once(name, dtype):
    """Scores of half-precision tensors are those of the same numbers in fp32."""
    scorer, lay = ready(name)
    half = slow.in_dtype(lay, dtype)
    scores = scorer.score(half)
    assert scores.dtype == torch.float32
    assert_close(scores, scorer.score(slow.in_dtype(half, torch.float32)), rtol=1e-5, atol=1e-7)
    assert torch.equal(
        scorer.protected(half, torch.tensor([9, 9])),
        scorer.protected(slow.in_dtype(half, torch.float32), torch.tensor([9, 9])),
    )


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_and_without_side_effects(name):
    scorer, lay = ready(name)
    before = [part.clone() for part in (lay.keys, lay.values, lay.queries, lay.w_o, lay.positions)]
    first = scorer.score(lay)
    scorer.score(ready(name, seed=4)[1])
    assert torch.equal(scorer.score(lay), first)
    scorer.protected(lay, torch.tensor([9, 9]))
    assert all(map(torch.equal, before, (lay.keys, lay.values, lay.queries, lay.w_o, lay.positions)))


@pytest.mark.parametrize("name", NAMES)
def test_the_shortest_layer(name):
    n = SHORTEST.get(name, 1)
    scorer, lay = ready(name, n=n)
    scores = scorer.score(lay)
    assert scores.shape[-1] == n and bool(torch.isfinite(scores).all())
    assert scorer.protected(lay, torch.tensor([n, n])).shape == (2, n)


@pytest.mark.parametrize("options", [{}, {"reduce": "max"}], ids=str)
@pytest.mark.parametrize("name", ["h2o", "h2o_256", "oracle", "snapkv", "obcache", "defensivekv"])
def test_blocks_of_rows_change_nothing(name, options, monkeypatch):
    from kvprobe.eviction import layer

    scorer, lay = ready(name, "all")
    if options:
        scorer = replace(scorer, **{key: value for key, value in options.items() if hasattr(scorer, key)})
    whole = scorer.score(lay)
    monkeypatch.setitem(layer.BLOCK_BYTES, "cpu", 1)  # one row at a time
    assert_close(scorer.score(lay), whole, rtol=1e-5, atol=1e-7)


def test_registering():
    with pytest.raises(EvictionError, match="the name 'longest' is taken by Longest; allowed: a name of its own"):
        register(Longest)
    for name in ("", "two words", "a+b", None):
        with pytest.raises(EvictionError, match="allowed: one word without '\\+'"):
            register(type("Nameless", (Scorer,), {"name": name}))
    for thing in (Longest(), dict, "longest"):
        with pytest.raises(EvictionError, match="is no scorer; allowed: a subclass of Scorer"):
            register(thing)
    assert SCORERS["longest"] is Longest and len(SCORERS) == 12
