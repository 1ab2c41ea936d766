"""W_O of quantised weights: read through what a backend offers, by its protocol, or refused with the weight named.

The stand-ins follow the protocols of bitsandbytes, torchao, HQQ and torch; none of these need to be installed.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvprobe import engine, models
from kvprobe.errors import CapabilityError, ModelError

D, HEADS = 12, 3
WEIGHT = torch.randn(D, D, generator=torch.Generator().manual_seed(0))
SCALE = WEIGHT.abs().amax(1)
CODES = (WEIGHT * 127 / SCALE[:, None]).round().to(torch.int8)
ROUNDED = CODES * SCALE[:, None] / 127


class Int8Params(nn.Parameter):
    """bitsandbytes' 8-bit weight: codes, and ``SCB`` beside them (or in the module's state after a run)."""

    def __new__(cls, codes, scale=None):
        found = torch.Tensor._make_subclass(cls, codes, False)
        found.SCB = scale
        return found


class Params4bit(nn.Parameter):
    """bitsandbytes' 4-bit weight: packed bytes and a ``quant_state``."""

    def __new__(cls, packed, state):
        found = torch.Tensor._make_subclass(cls, packed, False)
        found.quant_state = state
        return found


class Int8Tensor(torch.Tensor):
    """torchao's (and quanto's) way: a tensor that says it is floating point, computes no view, and dequantises."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function._schema.name == "aten::detach":
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Int8Tensor dispatch: {function}")

    def dequantize(self):
        return self.codes * self.scale[:, None] / 127


def attention_with(child):
    module = nn.Module()
    module.o_proj = child
    return module


def linear(weight, **attributes):
    child = nn.Module()
    child.weight = weight
    for name, value in attributes.items():
        setattr(child, name, value)
    return attention_with(child)


def read(module):
    """W_O as kvprobe has it, put back to [D, H·d]."""
    found = engine.output_weights(module, HEADS)
    assert found.shape == (HEADS, D // HEADS, D) and found.is_floating_point() and not found.requires_grad
    return found.reshape(D, D).T


def test_a_tensor_class_that_dequantises():
    for weight in (Int8Tensor(CODES, SCALE), nn.Parameter(Int8Tensor(CODES, SCALE), requires_grad=False)):
        assert_close(read(linear(weight)), ROUNDED)


def test_a_module_that_dequantises():
    class HQQLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_q = nn.Parameter(CODES, requires_grad=False)

        def dequantize(self):
            return ROUNDED

    assert_close(read(attention_with(HQQLinear())), ROUNDED)


@pytest.fixture
def bitsandbytes(monkeypatch):
    """The two functions of bitsandbytes that transformers calls to dequantise."""
    from transformers.integrations import bitsandbytes as integration

    package = ModuleType("bitsandbytes")
    package.functional = SimpleNamespace(
        int8_vectorwise_dequant=lambda codes, scale: codes * scale[:, None] / 127,
        dequantize_4bit=lambda packed, state: state.table[packed.long()].view(D, D),
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setattr(integration, "bnb", package, raising=False)


@pytest.mark.parametrize("ran", [False, True])
def test_eight_bits_of_bitsandbytes(ran, bitsandbytes):
    state = SimpleNamespace(SCB=SCALE if ran else None)
    assert_close(read(linear(Int8Params(CODES, None if ran else SCALE), state=state)), ROUNDED)


def test_four_bits_of_bitsandbytes(bitsandbytes):
    table = torch.linspace(-1, 1, 16)
    packed = torch.randint(0, 16, (D * D, 1), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert_close(read(linear(Params4bit(packed, SimpleNamespace(table=table)))), table[packed.long()].view(D, D))


@pytest.mark.parametrize("bias", [None, torch.arange(float(D))])
def test_a_layout_that_only_its_module_can_read(bias):
    """bitsandbytes packs 4-bit weights anew for CPUs: what the module does to the identity is its weight."""

    class Linear4bit(nn.Module):
        in_features = D

        def __init__(self):
            super().__init__()
            state = SimpleNamespace(packing_format_for_cpu=True)
            self.weight, self.bias = Params4bit(torch.zeros(D, D // 2, dtype=torch.uint8), state), bias

        def forward(self, x):
            return nn.functional.linear(x, ROUNDED, self.bias)

    assert_close(read(attention_with(Linear4bit())), ROUNDED, atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torchs_own_quantised_tensors():
    weight = torch.quantize_per_channel(WEIGHT, SCALE / 127, torch.zeros(D, dtype=torch.long), 0, torch.qint8)
    assert_close(read(linear(lambda: weight, bias=lambda: None)), weight.dequantize())
    assert engine.output_bias(linear(lambda: weight, bias=lambda: SCALE)) is SCALE


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (nn.Parameter(CODES, requires_grad=False), r"Module\.o_proj\.weight is stored as torch\.int8, and nothing"),
        (nn.Parameter(WEIGHT.to(torch.float8_e4m3fn), requires_grad=False), r"stored as torch\.float8_e4m3fn, and"),
        (None, r"o_proj\.weight is stored as None, and nothing takes it back"),
    ],
)
def test_codes_without_their_scales_are_refused(weight, says):
    """``Tensor.dequantize`` of plain integers is the codes as numbers: W_O up to a factor that nobody asked for."""
    with pytest.raises(ModelError, match=says) as caught:
        engine.output_weights(linear(weight), HEADS)
    assert "load the model unquantised" in str(caught.value) and "\n" not in str(caught.value)


def test_a_backend_that_fails_is_quoted():
    class Broken(Int8Tensor):
        def dequantize(self):
            raise RuntimeError("no kernel\nfor this device")

    with pytest.raises(ModelError, match=r"torch\.float32 \(Broken\).*: no kernel for this device; allowed"):
        engine.output_weights(linear(Broken(CODES, SCALE)), HEADS)


def test_weights_that_round_activations_too_are_refused_at_load():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    hf = linear(Int8Params(CODES, SCALE))
    hf.config = config
    with pytest.raises(CapabilityError, match=r"o_proj\.weight and 0 more are 8-bit weights of bitsandbytes, whose"):
        models._refuse_unsupported(hf, "big")
    plain = nn.Linear(2, 2)
    plain.config = config
    models._refuse_unsupported(plain, "small")
