"""Receipts of effects: what positions say, and failures where an effect is tampered with."""

import threading
from dataclasses import replace

import catalogue
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, LAYERS, SUFFIX, N

from kvprobe import (
    Inject,
    KVMask,
    KVPatch,
    Prompt,
    ResidualAblation,
    ValueGate,
    attention,
    engine,
    intervene,
    prefill,
    streams,
)
from kvprobe.errors import ReceiptError
from kvprobe.interventions import effects
from kvprobe.layerspec import View
from kvprobe.receipts import SiteCount

every_family = pytest.mark.parametrize("family", families.FAMILIES)
D, ROWS = 48, SUFFIX + len(CONTINUED)
PROMPT, GIVER = Prompt.from_ids(catalogue.ids(), {"needle": (14, 17)}), Prompt.from_ids(catalogue.ids(seed=7))


def run(model, *arms, **options):
    return intervene(model, PROMPT, [(), *arms], **{"suffix": SUFFIX, "continuation": CONTINUED} | options)[1:]


@every_family
def test_counts_are_those_of_loops(family, tiny, plain):
    """Visible cells of 5 keys, before and in the rows, for every layer's window; rows for what modules return."""
    model = tiny(family)
    donor = prefill(model, GIVER)
    outs = run(
        model,
        ValueGate([(13, 16), (20, 22)], heads=[1, 1, 4]),
        KVPatch([(13, 16), (20, 22)], donor),
        KVPatch([(13, 16), (20, 22)], donor, what="v", layers=[0, 2]),
        KVPatch([(13, 16), (20, 22)], donor, what="k", queries=(15, 19, 27)),
        ResidualAblation("mlp", [0, 2]),
        Inject({1: torch.ones(D)}, queries=(3, 19, 28)),
    )
    seen = {layer: plain(family).visible(layer, N + len(CONTINUED)) for layer in LAYERS}
    keys, rows = [13, 14, 15, 20, 21], range(N - SUFFIX, N + len(CONTINUED))
    cells = {layer: sum(int(seen[layer][row, keys].sum()) for row in rows) for layer in LAYERS}
    few = sum(int(seen[layer][row, keys].sum()) for layer in LAYERS for row in (15, 19, 27))
    every = sum(cells.values())
    expected = [
        ("weights", LAYERS, 2 * every), ("cache", LAYERS, 12 * every), ("cache", (0, 2), 6 * (cells[0] + cells[2])),
        ("cache", LAYERS, 6 * few), ("mlp", (0, 2), 2 * ROWS), ("attention", (1,), 3),
    ]  # fmt: skip
    for out, (site, layers, count) in zip(outs, expected, strict=True):
        assert out.receipt.sites == {site: SiteCount(layers, layers, count, count)}
        assert out.receipt.to_dict()[f"{site}_rewritten"] == count
        assert out.receipt.cells_expected == 0 and bool((out.receipt.retained == 1).all())


def test_keys_that_no_window_shows_are_met_zero_times_and_change_no_bit(tiny):
    model = tiny("mistral")
    donor = prefill(model, GIVER)
    arms = [ValueGate((3, 6)), KVPatch((3, 6), donor), KVPatch((3, 6), donor, (9, 12))]
    clean, *outs = intervene(model, PROMPT, [(), *arms], suffix=SUFFIX, generate=3)
    for out in outs:
        assert torch.equal(out.logits, clean.logits) and out.generated == clean.generated
        assert all(count == SiteCount(LAYERS, LAYERS, 0, 0) for count in out.receipt.sites.values())


def caught(model, arm, says, **options):
    with pytest.raises(ReceiptError, match=says):
        run(model, arm, **options)
    return True


@pytest.fixture(scope="module")
def arms(tiny):
    donor = prefill(tiny("llama"), GIVER)
    return {
        "gate": ValueGate((13, 20), 0.5),
        "patch": KVPatch((13, 20), donor, (3, 10)),
        "keys": KVPatch((13, 20), donor, what="k"),
        "values": KVPatch((13, 20), donor, what="v"),
        "attention": ResidualAblation("attention"),
        "mlp": ResidualAblation("mlp"),
        "block": ResidualAblation("block"),
        "inject": Inject({layer: torch.ones(ROWS, D) for layer in LAYERS}),
    }


CELLS = ("gate", "patch", "keys", "values")
ROWWISE = ("attention", "mlp", "block", "inject")


@pytest.mark.parametrize("name", CELLS)
def test_a_head_or_a_side_that_is_left_out_is_caught(tiny, monkeypatch, arms, name):
    heads, sides, rows = effects.Cells._heads, View.sides, effects.Cells._rows
    with monkeypatch.context() as patch:
        patch.setattr(effects.Cells, "_heads", lambda self, view: tuple(part[:-1] for part in heads(self, view)))
        assert caught(tiny("llama"), arms[name], r"arm 1: .* were rewritten, expected")
    for part in (0, 1):  # the prefix, own keys
        with monkeypatch.context() as patch:
            one = lambda self, columns, part=part: [[*sides(self, columns)][1 - part]]  # noqa: E731
            patch.setattr(View, "sides", one)
            assert caught(tiny("llama"), arms[name], "were rewritten, expected")
    with monkeypatch.context() as patch:
        patch.setattr(effects.Cells, "_rows", lambda self, view: rows(self, view)[1:])
        assert caught(tiny("llama"), arms[name], "were rewritten, expected")
    assert run(tiny("llama"), arms[name])


class Deaf(torch.Tensor):
    """A tensor that takes no writing."""

    def __setitem__(self, place, value):
        pass


@pytest.mark.parametrize("name", CELLS)
def test_what_is_not_written_is_not_met(tiny, monkeypatch, arms, name):
    sides, values = View.sides, effects.Swap.on_values

    def deaf(self, columns):
        for part, *rest in sides(self, columns):
            yield part.as_subclass(Deaf), *rest

    monkeypatch.setattr(View, "sides", deaf)
    monkeypatch.setattr(effects.Swap, "on_values", lambda self, view, z: values(self, view, z.as_subclass(Deaf)))
    assert caught(tiny("llama"), arms[name], r"cache|weights")


@pytest.mark.parametrize("name", ["patch", "values"])
def test_values_that_are_left_out_are_caught(tiny, monkeypatch, arms, name):
    monkeypatch.setattr(effects.Swap, "on_values", lambda self, view, z: 0)
    assert caught(tiny("llama"), arms[name], "places of cache were rewritten")


@pytest.mark.parametrize("name", [*CELLS, *ROWWISE])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_left_out_is_caught(tiny, monkeypatch, arms, name, layer):
    two_part, sites = attention._two_part, streams._sites
    rest = [index for index in LAYERS if index != layer]

    def skip(query, key, value, spec, run, index, biases, edits):
        return two_part(query, key, value, spec, run, index, biases, {} if index == layer else edits)

    monkeypatch.setattr(attention, "_two_part", skip)
    monkeypatch.setattr(streams, "_sites", lambda *a: [each for each in sites(*a) if each[0] != layer])
    assert caught(tiny("llama"), arms[name], f"rewritten on layers \\[{rest[0]}, {rest[1]}\\], asked for \\[0, 1, 2\\]")


@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_or_an_arm_that_is_left_out_is_caught(tiny, monkeypatch, arms, name):
    kind = effects.Add if name == "inject" else effects.Remove
    apply = kind.apply
    with monkeypatch.context() as patch:
        some = lambda self, output, before, positions: apply(self, output[1:], before[1:], positions[1:])  # noqa: E731
        patch.setattr(kind, "apply", some)
        assert caught(tiny("llama"), arms[name], f"were rewritten, expected {len(LAYERS) * ROWS}")
    with monkeypatch.context() as patch:
        deaf = lambda self, output, before, positions: apply(self, output.as_subclass(Deaf), before, positions)  # noqa: E731
        patch.setattr(kind, "apply", deaf)
        assert caught(tiny("llama"), arms[name], f"0 places of .* were rewritten, expected {len(LAYERS) * ROWS}")


def test_a_layer_left_out_in_a_decoding_step_is_caught(tiny, monkeypatch, arms):
    sites = streams._sites
    calls = []

    def some(*a):
        calls.append(a)
        return [each for each in sites(*a) if len(calls) < 3 or each[0] != 1]

    monkeypatch.setattr(streams, "_sites", some)
    with pytest.raises(ReceiptError, match=r"mlp rewritten on layers \[0, 2\], asked for \[0, 1, 2\]"):
        intervene(tiny("llama"), PROMPT, arms["mlp"], suffix=SUFFIX, generate=6)
    assert len(calls) >= 3


def hooks_of(model):
    return sum(len(module._forward_hooks) for module in model.twin.modules())


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, ReceiptError])
def test_hooks_are_gone_after_whatever_happens(tiny, monkeypatch, arms, kind):
    """And the twin is what it was: the next run equals one before."""
    model = tiny("llama")
    before, hooks = run(model, *arms.values()), hooks_of(model)
    apply = effects.Remove.apply

    def fail(self, output, rest, positions):
        if kind is ReceiptError:
            return apply(self, output, rest, positions) + 1
        raise kind("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(effects.Remove, "apply", fail)
        with pytest.raises(kind):
            run(model, *arms.values(), streams=2)
    assert hooks_of(model) == hooks
    after = run(model, *arms.values())
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(before, after, strict=True))


def test_a_bad_arm_in_the_middle_runs_nothing(tiny, monkeypatch, arms):
    monkeypatch.setattr(engine, "forward", lambda *a, **k: pytest.fail("ran"))
    with pytest.raises(Exception, match="layer 7 does not exist"):
        run(tiny("llama"), arms["gate"], ResidualAblation(layers=7), arms["inject"])


def test_another_thread_on_the_same_twin_is_left_alone(tiny, monkeypatch, arms):
    """Module hooks belong to one run: a pass that another thread makes meanwhile is not rewritten."""
    model, found = tiny("llama"), []
    clean = prefill(model, PROMPT).next_logits
    apply = effects.Remove.apply

    def slow(self, output, before, positions):
        if not found:
            worker = threading.Thread(target=lambda: found.append(prefill(model, PROMPT).next_logits))
            worker.start()
            worker.join()
        return apply(self, output, before, positions)

    monkeypatch.setattr(effects.Remove, "apply", slow)
    run(model, arms["block"], streams=2)
    assert torch.equal(found[0], clean)


def test_a_receipt_names_the_site(tiny, arms):
    receipt = run(tiny("llama"), (arms["gate"], KVMask((3, 6))))[0].receipt
    short = replace(receipt, sites={"weights": SiteCount((0, 1), (0,), 5, 4)})
    with pytest.raises(ReceiptError) as caught_:
        short.verify("arm 3")
    assert str(caught_.value) == (
        "arm 3: the receipt does not hold: weights rewritten on layers [0], asked for [0, 1]; 4 places of weights were "
        "rewritten, expected 5"
    )
