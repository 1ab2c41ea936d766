"""Texts that documents are made of: the shipped essays, files of the user's own, or a data set of the hub.

Every file is UTF-8 text or JSON lines; nothing is unpickled and no code of a data set runs. What comes from the hub is
believed only after its hash: the hub's ``etag`` of a file is its sha256 (large files) or the sha1 that git gives it
(small ones), and the hub cache names the file after that etag, so it can be checked without a network, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from kvprobe import resources
from kvprobe.errors import DataError, TaskError, quote

#: Names of data sets, and where they lie.
ALIASES = {"multi_news": "hub:THUDM/LongBench:data.zip:data/multi_news.jsonl"}
#: The fields of a JSON line that may hold its text, the first that is there counts.
FIELDS = ("text", "context")
ENDINGS = (".txt", ".jsonl")
_HUB = "'hub:OWNER/NAME:FILE' (.txt or .jsonl) or 'hub:OWNER/NAME:FILE.zip:MEMBER'"
ALLOWED = f"a folder of .txt files, a .txt or .jsonl file, {' or '.join(map(repr, ALIASES))}, or {_HUB}"


@dataclass(frozen=True)
class Text:
    """A text with a name that tables can call it by.

    Attributes
    ----------
    name : str
        File name without its ending, and the number of the line in a ``.jsonl`` file (``"multi_news-17"``).
    text : str
        All of it, as it stands in the file; line ends are line feeds.
    """

    name: str
    text: str


def read(source: str | os.PathLike[str] | None = None) -> list[Text]:
    """The texts of a source, in the order of file names and lines.

    Parameters
    ----------
    source
        * None: the shipped essays, title lines included;
        * a folder of ``.txt`` files, or one ``.txt`` file;
        * a ``.jsonl`` file whose objects have a ``text`` or a ``context`` (blank lines are skipped);
        * ``"multi_news"``: MultiNews of LongBench [1]_, from the Hugging Face hub (a folder of that name is
          ``"./multi_news"``);
        * ``"hub:OWNER/NAME:FILE"`` or ``"hub:OWNER/NAME:FILE.zip:MEMBER"``: a ``.txt`` or ``.jsonl`` file of a data set
          on the hub. Only here the network is touched; without one, the hub cache is read.

    Returns
    -------
    list of Text
        At least one; none is empty.

    Raises
    ------
    TaskError
        If ``source`` is neither a name, a path nor None.
    DataError
        If there is no such file, repository or member; for text that is empty, not UTF-8, or not of the form above
        (naming the line); for a download that is not what the hub says it is.

    References
    ----------
    .. [1] Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, arXiv 2308.14508.

    Examples
    --------
    >>> texts = read()
    >>> texts[0].name
    '01-a-notebook-beside-the-back-door'
    """
    if source is None:
        return _folder(str(resources.path("essays")))
    if not isinstance(source, str | os.PathLike) or not isinstance(os.fspath(source), str):
        raise TaskError(f"source is {quote(source)}, must be {ALLOWED}")
    given = os.fspath(source)
    name = ALIASES.get(given, given) if isinstance(source, str) else given
    if isinstance(source, str) and name.startswith("hub:"):
        return _HubFile.named(name).texts()
    place = os.path.expanduser(name)
    if os.path.isdir(place) and name.strip():
        return _folder(place)
    if os.path.isfile(place):
        _check_ending(place, ENDINGS, given)
        return _parsed(_bytes(place), place, place)
    raise DataError(f"there is no file or folder {quote(given)}; allowed: {ALLOWED}")


def _folder(place: str) -> list[Text]:
    """The ``.txt`` files of a folder by name."""
    files = sorted(str(file) for file in Path(place).glob("*.txt") if file.is_file())
    if not files:
        raise DataError(f"the folder {place!r} holds no .txt file; allowed: {ALLOWED}")
    return [text for file in files for text in _parsed(_bytes(file), file, file)]


def _bytes(place: str) -> bytes:
    try:
        return Path(place).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {place!r}: {error.strerror or error}; allowed: {ALLOWED}") from None


def _check_ending(name: str, allowed: tuple[str, ...], given: str) -> None:
    if not name.lower().endswith(allowed):
        raise DataError(f"{given!r}: {name!r} must end in {' or '.join(allowed)}; allowed: {ALLOWED}")


def _parsed(data: bytes, name: str, where: str) -> list[Text]:
    """The texts of one file's bytes: the whole, or one a JSON line; ``where`` is what messages call the file."""
    try:
        content = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise DataError(f"{where!r} is not UTF-8 ({error.reason}), must be UTF-8 text") from None
    stem = Path(name).stem
    if name.lower().endswith(".txt"):
        found = [Text(stem, content)] if content.strip() else []
    else:  # not splitlines(): a JSON string may hold U+2028 and the like as they are
        lines = enumerate(content.split("\n"), 1)
        found = [Text(f"{stem}-{i}", _field(line, f"{where!r}, line {i},")) for i, line in lines if line.strip()]
    if not found:
        raise DataError(f"{where!r} is empty, must hold text")
    return found


def _field(line: str, where: str) -> str:
    """The text of one JSON line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}), must be an object with {' or '.join(FIELDS)}") from None
    key = next((key for key in FIELDS if isinstance(row, dict) and key in row), None)
    if key is None:
        raise DataError(f"{where} is {quote(row)}, must be an object with {' or '.join(FIELDS)}")
    if not isinstance(row[key], str) or not row[key].strip():
        raise DataError(f"{where} has the {key} {quote(row[key])}, must be a text that is not empty")
    return str(row[key])


@dataclass(frozen=True)
class _HubFile:
    """A file of a data set repository on the hub, and the member of it that is meant (itself, if "")."""

    source: str
    repository: str
    file: str
    member: str

    @classmethod
    def named(cls, source: str) -> _HubFile:
        """Take a name apart."""
        _, repository, file, member = [*source.split(":", 3), "", ""][:4]
        if not re.fullmatch(r"[^/\s]+/[^/\s]+", repository) or not file or source.endswith(":"):
            raise DataError(f"{source!r} is no file of the hub, must be {_HUB}")
        _check_ending(file, (".zip",) if member else ENDINGS, source)
        _check_ending(member or file, ENDINGS, source)
        return cls(source, repository, file, member)

    def texts(self) -> list[Text]:
        """The texts, downloaded where they are not in the hub cache yet."""
        path, etag = self._located()
        _verify(path, etag, self.source)
        data = _member(path, self.member, self.source) if self.member else _bytes(path)
        return _parsed(data, self.member or self.file, self.source)

    def _located(self) -> tuple[str, str]:
        """Path in the hub cache, and the hash that the file must have."""
        import huggingface_hub as hub
        from huggingface_hub import errors

        try:
            url = hub.hf_hub_url(self.repository, self.file, repo_type="dataset")
            etag = hub.get_hf_file_metadata(url).etag
        except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, ValueError) as error:
            raise self._refusal(error) from error
        except Exception:  # no network; which kind of error says so depends on the hub's HTTP library
            return self._cached()
        try:
            return hub.hf_hub_download(self.repository, self.file, repo_type="dataset"), etag or ""
        except Exception as error:
            raise self._refusal(error) from error

    def _cached(self) -> tuple[str, str]:
        """Path in the hub cache without asking the hub; the file it leads to is named after its hash."""
        import huggingface_hub as hub

        try:
            path = hub.hf_hub_download(self.repository, self.file, repo_type="dataset", local_files_only=True)
        except Exception as error:
            raise self._refusal(error) from error
        return path, Path(path).resolve().name

    def _refusal(self, error: Exception) -> DataError:
        """One line for whatever the hub's library raised."""
        from huggingface_hub import errors

        kinds = {
            errors.LocalEntryNotFoundError: "the hub cannot be reached, and its local cache does not hold the file",
            errors.EntryNotFoundError: f"the repository has no file {self.file!r}",
            errors.GatedRepoError: "its owner gives access on request only",
            errors.RepositoryNotFoundError: f"the hub has no (public) data set {self.repository!r}",
        }
        found = next((text for kind, text in kinds.items() if isinstance(error, kind)), None)
        reason = found or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return DataError(f"cannot get {self.source!r}: {reason}; allowed: {ALLOWED}")


def _verify(path: str, etag: str, source: str) -> None:
    """Refuse a file whose hash is not the one that the hub states."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag):
        raise DataError(f"cannot verify {source!r}: {etag!r} is no hash of the hub (sha256, or git's sha1); go online")
    try:
        found = _hashed(path, len(etag) == 64)
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error.strerror or error}") from None
    if found != etag:
        raise DataError(
            f"{source!r} has the hash {found}, must have the hub's {etag}: delete {os.path.realpath(path)!r} and retry"
        )


def _hashed(path: str, large: bool) -> str:
    """sha256 of a file, or the sha1 of git's blob: ``blob SIZE``, a zero byte, and the content."""
    digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % os.path.getsize(path), usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _member(path: str, member: str, source: str) -> bytes:
    """Bytes of one file of a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            if member in archive.namelist():
                return archive.read(member)
            names = [name for name in archive.namelist() if name.lower().endswith(ENDINGS)]
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"cannot read {member!r} in {source!r}: {error}; must be a zip archive without password"
        ) from None
    raise DataError(f"{source!r}: the archive has no {member!r}, must be one of {quote(names, 200)}")
