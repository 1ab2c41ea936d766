"""Shared fixtures. Models are made and loaded once a process; nothing here imports torch until a test asks for one."""

import os
from contextlib import contextmanager
from functools import cache

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


@pytest.fixture(scope="session")
def smol(smol_path):
    """The embedded model, for what needs a trained one."""
    from kvprobe import models

    assert smol_path
    return models.load("smollm2-135m")


@pytest.fixture(scope="session")
def at_hand(smol):
    """``with at_hand():`` commands find the embedded model loaded; loading is tested where it is the point."""
    from kvprobe import models

    load = models.load

    def found(name, **more):
        return smol if name == "smollm2-135m" and not more else load(name, **more)

    @contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "load", found)
            yield

    return patched


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Family → folder of a tiny random model as transformers saves it."""
    import tiny

    return cache(lambda family: tiny.save(family, tmp_path_factory.mktemp("tiny") / family))


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """Family → tiny random model as kvprobe loads it."""
    from kvprobe import models

    return cache(lambda family: models.load(tiny_folder(family)))


@pytest.fixture(scope="session")
def plain(tiny_folder):
    """Family → the same tiny model in plain transformers, eager, for a 4-D mask of one's own."""
    from oracles import Plain

    return cache(lambda family: Plain(tiny_folder(family)))
