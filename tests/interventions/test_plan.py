"""What follows from positions alone, against brute force over layers, heads, queries and keys."""

import catalogue
import pytest
import torch
from catalogue import ARMS, HEADS, LAYERS, SUFFIX, N

from kvprobe import KVMask
from kvprobe.errors import InterventionError
from kvprobe.interventions.plan import ArmBias, Cut, Plan, Rows, Scene, compile_arms

WINDOWS = {"full": (None,) * 3, "narrow": (5, 5, 5), "mixed": (5, None, 5)}


def scene(windows=(None,) * 3, sink=True, follow=3, **changes):
    """The catalogue's scene; with a learned sink no row is ever silenced, so that every arm compiles."""
    return Scene(N, SUFFIX, len(LAYERS), len(HEADS), windows, sink, follow=follow, **changes)


def sees(query, key, window):
    return key <= query and (window is None or query - key < window)


@pytest.fixture(scope="module")
def tables():
    return {name: catalogue.table(name) for name in ARMS}


def test_biases_are_the_table(tables):
    plan = compile_arms(catalogue.arms(), scene())
    for number, name in enumerate(ARMS):
        for layer in LAYERS:
            full = torch.zeros(len(HEADS), catalogue.TOTAL, catalogue.TOTAL)
            bias = plan.layers.get(layer, {}).get(number)
            if bias is not None:
                full[..., bias.columns] = bias.at(torch.arange(catalogue.TOTAL)).expand(len(HEADS), -1, -1)
            torch.testing.assert_close(full, tables[name][layer], atol=1e-6, rtol=0)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_no_query_before_the_first_affected_one_meets_a_biased_key(windows, tables):
    plan = compile_arms(catalogue.arms(), scene(windows))
    for number, name in enumerate(ARMS):
        met = [
            query
            for layer in LAYERS
            for query in range(catalogue.TOTAL)
            if any(bool((tables[name][layer][:, query, key] < 0).any()) for key in range(query + 1))
        ]
        if not met:
            assert plan.first[number] is None or plan.first[number] >= N
        else:
            assert plan.first[number] <= min(met)
            # No earlier than where all layers see everything, but for rows whose own key is kept.
            assert plan.first[number] == min(met) or "kept" in name or "keep" in name or "positions" in name


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("follow", [0, 3])
def test_unseen_keys_are_those_that_no_touched_query_sees(windows, follow, tables):
    plan = compile_arms(catalogue.arms(), scene(windows, follow=follow))
    hidden = 0
    for number, name in enumerate(ARMS):
        expected = {}
        for layer, window in enumerate(windows):
            biased = tables[name][layer].amin(0) < 0
            keys = {key for part, cutout in ARMS[name] if layer in cutout.layers and cutout.heads.get(layer)
                    for span in cutout.keys for key in range(*span)}  # fmt: skip
            met = {k for k in keys for q in range(N + follow) if biased[q, k] and sees(q, k, window)}
            if "kept" in name or "keep_self" in name:
                met |= {k for k in keys if k >= N - SUFFIX}  # counted as seen: its own query would see it
            if keys - met:
                expected[layer] = len(keys - met)
        assert plan.unseen[number] == expected, name
        hidden += sum(expected.values())
    assert bool(hidden) != (windows == (None,) * 3 and follow == 3)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_silenced_rows_are_those_that_lose_every_key(windows, tables):
    names = [name for name in ARMS if "zero" in name]
    plan = compile_arms([catalogue.arm(name) for name in names], scene(windows, sink=False))
    assert any(plan.silenced)
    for number, name in enumerate(names):
        expected = {
            (layer, head, query)
            for layer, window in enumerate(windows)
            for head in HEADS
            for query in range(N)
            if all(
                tables[name][layer][head, query, key] == -torch.inf
                for key in range(query + 1)
                if sees(query, key, window)
            )
        }
        assert set(plan.silenced[number]) == expected
        assert len(plan.silenced[number]) == len(expected)


def test_silenced_rows_count_left_pads_as_users_do():
    padded = scene(sink=False, offset=4)
    plan = compile_arms([[KVMask((4, 24), queries=(20,), on_empty="zero", layers=0, heads=1)]], padded)
    assert plan.silenced == (((0, 1, 20),),)
    with pytest.raises(InterventionError, match="query 20 sees"):
        compile_arms([[KVMask((4, 24), queries=(20,))]], padded)


def test_only_masks_that_silence_a_row_decide_what_becomes_of_it():
    zero = KVMask((0, N), heads=[2], queries=[20], on_empty="zero")
    for bystander in (KVMask((3, 6), heads=[4]), KVMask((3, 6), queries=[22])):
        assert compile_arms([[zero, bystander]], scene(sink=False)).silenced[0] == tuple((i, 2, 20) for i in LAYERS)
    half = KVMask((0, 12), queries=[20], on_empty="zero"), KVMask((12, N), queries=[20])
    with pytest.raises(InterventionError, match="query 20 sees"):
        compile_arms([half], scene(sink=False))


def test_masks_that_together_remove_a_row_are_found():
    halves = KVMask((0, 12), queries=[20]), KVMask((12, 21), queries=[20])
    for half in halves:
        compile_arms([[half]], scene(sink=False))
    with pytest.raises(InterventionError, match="removes every key that query 20 sees"):
        compile_arms([halves], scene(sink=False))
    kept = KVMask((12, 21), queries=[20], on_empty="keep_self")
    assert compile_arms([(halves[0], kept)], scene(sink=False)).silenced == ((),)


def test_layers_of_an_arm_share_one_bias():
    plan = compile_arms([[KVMask((3, 6))], [KVMask((3, 6), heads={0: (1,), 1: (1,), 2: (2,)})]], scene())
    assert plan.layers[0][0] is plan.layers[2][0]
    assert plan.layers[0][1] is plan.layers[1][1] and plan.layers[1][1] is not plan.layers[2][1]


def test_select_renumbers_a_batch():
    plan = compile_arms([[], [KVMask((3, 6), layers=1)], [KVMask((7, 9))]], scene())
    assert plan.n_arms == 3
    chosen = plan.select([2, 0, 1])
    assert chosen[1] == {0: plan.layers[1][2], 2: plan.layers[1][1]}
    assert chosen[0] == {0: plan.layers[0][2]}
    assert plan.select([0]) == {}
    assert isinstance(plan, Plan)


def test_rows_touch_from_the_first_or_exactly_the_named():
    queries = torch.arange(6)
    assert Rows(3).touches(queries).tolist() == [False, False, False, True, True, True]
    assert Rows(1, (1, 4)).touches(queries).tolist() == [False, True, False, False, True, False]


def test_biases_add_up_and_keep_self_spares_the_diagonal():
    cuts = (Cut(1, 4, Rows(0), -1.0), Cut(2, 5, Rows(3), -0.5, heads=(1,)), Cut(3, 4, Rows(4), -torch.inf, heads=(0,)))
    bias = ArmBias(cuts, 2)
    assert bias.columns.tolist() == [1, 2, 3, 4]
    assert bias.at(torch.tensor([2, 4])).tolist() == [
        [[-1, -1, -1, 0], [-1, -1, -torch.inf, 0]],
        [[-1, -1, -1, 0], [-1, -1.5, -1.5, -0.5]],
    ]
    spared = ArmBias((Cut(1, 4, Rows(0), -torch.inf, keep_self=True),), 2).at(torch.tensor([2]))
    assert spared.tolist() == [[[-torch.inf, 0, -torch.inf]]]


@pytest.mark.parametrize("span", [(3, 5), (5, 31), (7, 7), (9, 8)])
def test_spans_count_left_pads_and_stay_off_them(span):
    padded = scene(offset=4)
    assert padded.real(4, 30) == (0, 26)
    with pytest.raises(InterventionError, match=r"allowed is 4 ≤ start < stop ≤ 30"):
        padded.real(*span)
