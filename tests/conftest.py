"""Shared fixtures. The embedded model is made or verified once a process; nothing here imports torch."""

import os

import pytest

# Read by torch and transformers when they are imported: one thread for each of xdist's workers, and no hub, ever.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def smol_path():
    """The folder of the embedded model."""
    from kvprobe import embedded

    return embedded.ensure(progress=False)


@pytest.fixture(scope="session")
def smol_tokenizer(smol_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smol_path)
