"""What differs between the oldest and the newest dependencies allowed; the same tests run with both."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch.testing import assert_close

from kvprobe import Prompt, intervene, models
from kvprobe.errors import ModelError

ROOT = Path(__file__).parents[1]
IDS = torch.arange(40, 64)


def test_gemma2_keeps_its_soft_cap(tiny, plain):
    """transformers 5.9 takes SDPA for gemma2 and drops the cap; the attention that kvprobe registers must not."""
    mine = intervene(tiny("gemma2"), Prompt.from_ids(IDS), [()], suffix=len(IDS))[0].logits
    reference = plain("gemma2")
    assert_close(mine, reference(IDS).logits, atol=5e-5, rtol=1e-5)
    capless = plain("gemma2").hf
    for module in capless.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    try:
        assert (reference(IDS).logits - mine).abs().max() > 1e-3  # the cap is felt
    finally:
        for module in capless.modules():
            if hasattr(module, "attn_logit_softcapping"):
                module.attn_logit_softcapping = capless.config.attn_logit_softcapping


def test_a_twin_that_drops_the_soft_cap_is_refused(tiny_folder, monkeypatch):
    """SDPA in the place of kvprobe's attention: whether the class refuses it or takes it and loses its cap."""
    from kvprobe import attention

    monkeypatch.setattr(attention, "NAME", "sdpa")
    monkeypatch.setattr(attention, "register", lambda: None)
    with pytest.raises((ModelError, ValueError)) as caught:
        models.load(tiny_folder("gemma2"))
    assert "\n" not in str(caught.value)


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", each).lower(): pin for each, pin in found.items()}


def direct():
    """Dependencies of the package and of its tests, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(each) for each in (*project["dependencies"], *project["optional-dependencies"]["test"])]


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_the_pins_are_within_the_bounds(name):
    """Every direct dependency is pinned to a version allowed, and in the oldest set to the lowest of them."""
    pinned = pins(name)
    for each in direct():
        pin = pinned[re.sub(r"[-_.]+", "-", each.name).lower()]
        assert each.specifier.contains(pin), f"{each} with {pin}"
        lowest = next(part.version for part in each.specifier if part.operator == ">=")
        if "oldest" in name and each.name != "torch":
            assert f"{pin}.".startswith(f"{lowest}."), f"{each} with {pin}"
