"""A tiny random model that reads bytes, long enough for whole needle prompts."""

import pytest


@pytest.fixture(scope="package")
def reader(tmp_path_factory):
    import tiny

    from kvprobe.models import load

    return load(tiny.save("llama", tmp_path_factory.mktemp("reader"), max_position_embeddings=4096))


@pytest.fixture(scope="package")
def probes(reader):
    """Two multikey items of about 2,600 bytes: one evidence, three hard needles, two decoys, five distractors."""
    from kvprobe import needles

    settings = needles.Settings(
        task="niah_multikey_1", length=2600, items=2, decoys=2, distractors=5, options={"tokens_to_generate": 16}
    )
    return settings, [needles.probe_item(reader, settings, index) for index in range(2)]
