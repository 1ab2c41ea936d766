"""Model folders with a damaged config: refused in one line, or a model that passes every check; never a traceback."""

import json
import shutil

import pytest
from fuzzing import lawful
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

WRONG = st.sampled_from(
    (
        None,
        True,
        0,
        -1,
        1,
        3,
        7,
        0.5,
        99,
        1e308,
        -99,
        "",
        "x",
        "gelu",
        "bfloat16",
        [],
        [0],
        [1, "a"],
        {},
        {"a": 1},
    )
)
FAMILIES = ("gpt2", "llama", "gemma2")


@pytest.fixture(scope="module")
def damaged(tiny_folder, tmp_path_factory):
    """(family, changes, dropped) → the folder of a copy whose config says something else; weights are not copied."""
    folder = tmp_path_factory.mktemp("damaged")

    def make(family, changes, dropped):
        place = folder / family
        if not place.exists():
            shutil.copytree(tiny_folder(family), place)
        config = json.loads((tiny_folder(family) / "config.json").read_text())
        config = {name: value for name, value in (config | changes).items() if name not in dropped}
        (place / "config.json").write_text(json.dumps(config))
        return place

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_configs(family, tiny_folder, damaged):
    names = sorted(json.loads((tiny_folder(family) / "config.json").read_text()))
    sizes = [
        name for name in names if not name.startswith(("vocab", "hidden_size", "intermediate", "n_embd", "n_inner"))
    ]
    small = st.dictionaries(st.sampled_from(sizes), WRONG, min_size=1, max_size=2)

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(small, st.sets(st.sampled_from(names), max_size=1))
    def check(changes, dropped):
        status, _, _ = lawful(["check", str(damaged(family, changes, dropped))])
        assert status in (0, 1, 2)

    check()
