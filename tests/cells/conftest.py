"""Plain transformers in fp64, so that what a row lacks to 1 is the learned sink and not rounding."""

from functools import cache

import pytest
import torch


@pytest.fixture(scope="session")
def plain64(tiny_folder):
    """Family → the tiny model in plain transformers, fp64, eager."""
    from oracles import Plain

    return cache(lambda family: Plain(tiny_folder(family), torch.float64))
