"""Where documents' texts come from: files, folders, and verified files of the hub."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import resources
from kvprobe.errors import DataError, TaskError
from kvprobe.tasks.sources import ALIASES, Text, read

ROWS = '{"context": "first {text}"}\n\n{"text": "second", "context": "not this"}\n'
WANTED = [Text("multi_news-1", "first {text}"), Text("multi_news-3", "second")]


def archive(**members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in {
            "data/multi_news.jsonl": ROWS,
            "data/other.txt": "third",
            "readme.md": "no",
            **members,
        }.items():
            made.writestr(name, text)
    return data.getvalue()


def git_sha1(data):
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# --- files


def test_the_shipped_essays_whole_and_in_order():
    files = sorted(os.listdir(resources.path("essays")))
    found = read()
    assert [f"{text.name}.txt" for text in found] == files and len(found) > 1
    assert [text.text for text in found] == [resources.path("essays", file).read_text("utf-8") for file in files]


def test_folders_and_text_files(tmp_path):
    (tmp_path / "b.txt").write_bytes("\ufeffzwei ä\r\nlines".encode())
    (tmp_path / "a.b.txt").write_text("one")
    (tmp_path / "notes.md").write_text("no")
    (tmp_path / "folder.txt").mkdir()
    both = [Text("a.b", "one"), Text("b", "zwei ä\nlines")]
    assert read(tmp_path) == read(str(tmp_path)) == both
    assert read(tmp_path / "b.txt") == both[1:]


@settings(deadline=None)
@given(st.lists(st.text().filter(str.strip), min_size=1), st.booleans(), st.sampled_from(["text", "context"]))
def test_json_lines_give_back_every_text(tmp_path_factory, texts, ascii_only, field):
    # U+2028, U+0085 and the like may stand in a JSON string as they are: they end no line.
    texts = [text.encode("utf-8", "replace").decode() for text in [*texts, "a\u2028b\x85c\x0bd\r\ne"]]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps({"n": i, field: text}, ensure_ascii=ascii_only) for i, text in enumerate(texts)]
    file.write_text("\n \n".join(lines), encoding="utf-8", newline="")
    assert read(file) == [Text(f"rows-{2 * i + 1}", text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 3, is not JSON (Expecting property name"),
        ('["text"]', "line 3, is ['text'], must be an object with text or context"),
        ('{"input": "x"}', "line 3, is {'input': 'x'}, must be an object with text or context"),
        ('{"text": 5}', "line 3, has the text 5, must be a text that is not empty"),
        ('{"context": " "}', "line 3, has the context ' ', must be a text that is not empty"),
        ('{"text": null, "context": "x"}', "line 3, has the text None, must be a text that is not empty"),
        ("[" * 100_000, "line 3, is not JSON"),
    ],
)
def test_lines_that_are_no_text(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{str(file)!r}, {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n", "is empty, must hold text"),
        ("a.jsonl", b"\n\n", "is empty, must hold text"),
        ("a.txt", b"caf\xe9", "is not UTF-8"),
        ("a.json", b"{}", "must end in .txt or .jsonl; allowed: a folder of .txt files"),
        ("txt", b"text", "must end in .txt or .jsonl"),
    ],
)
def test_files_that_are_no_text(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_an_empty_file_is_found_in_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(DataError, match=r"b\.txt' is empty"):
        read(tmp_path)


def test_sources_that_are_not_there(tmp_path):
    for source in (tmp_path / "nothing", "", "  ", "a text " * 1000, "nul\0", Path("multi_news")):
        with pytest.raises(
            DataError, match=r"^there is no file or folder .*; allowed: a folder of \.txt files"
        ) as caught:
            read(source)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        read(tmp_path)
    for source in (3, b"a.txt", ["a.txt"], True):
        with pytest.raises(TaskError, match=r"^source is .*, must be a folder"):
            read(source)


# --- the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that holds what a test says: ``data`` under ``etag``; None for an etag is a hub that cannot be reached."""
    state = SimpleNamespace(data=archive(), etag=None, asked=[], cached=True, missing=None)
    state.etag = sha256(state.data)

    def metadata(url, **_):
        state.asked.append(url)
        if state.missing is not None:
            raise state.missing
        if state.etag is None:
            raise ConnectionError("no route\nto the hub")
        return SimpleNamespace(etag=state.etag)

    def download(repository, file, *, repo_type, local_files_only=False):
        assert repo_type == "dataset" and local_files_only == (state.etag is None)
        if not state.cached:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not\nhere")
        blob, link = tmp_path / "blobs" / (state.etag or state.blob), tmp_path / "snapshots" / file
        for place in (blob, link):
            place.parent.mkdir(exist_ok=True)
        blob.write_bytes(state.data)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        return str(link)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_multi_news_is_a_member_of_longbench(hub):
    assert ALIASES == {"multi_news": "hub:THUDM/LongBench:data.zip:data/multi_news.jsonl"}
    assert read("multi_news") == WANTED
    assert hub.asked == ["https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"]


def test_members_and_plain_files(hub):
    assert read("hub:o/n:some.zip:data/other.txt") == [Text("other", "third")]
    for name, data, wanted in (
        ("rows.jsonl", ROWS.encode(), [Text(f"rows-{i}", text.text) for i, text in zip((1, 3), WANTED, strict=True)]),
        ("texts.v2.txt", b"all of it", [Text("texts.v2", "all of it")]),
    ):
        hub.data, hub.etag = data, git_sha1(data)
        assert read(f"hub:o/n:{name}") == wanted


def test_a_member_at_the_top_of_the_archive(hub):
    hub.data = archive(**{"top.txt": "text"})
    hub.etag = sha256(hub.data)
    assert read("hub:o/n:a.zip:top.txt") == [Text("top", "text")]


@pytest.mark.parametrize("digest", [sha256, git_sha1])
@pytest.mark.parametrize("offline", [False, True])
def test_what_the_hub_does_not_vouch_for_is_refused(hub, digest, offline):
    right, wrong = digest(hub.data), digest(hub.data + b"!")
    hub.etag, hub.blob = (None, right) if offline else (right, None)
    assert read("multi_news") == WANTED
    hub.data += b"!"
    with pytest.raises(
        DataError, match=f"has the hash {wrong}, must have the hub's {right}: delete '.*/blobs/{right}'"
    ):
        read("multi_news")


@pytest.mark.parametrize("etag", ["", "main", "abc123", "A" * 64, "0" * 41])
@pytest.mark.parametrize("offline", [False, True])
def test_a_file_without_a_hash_is_refused(hub, etag, offline):
    hub.etag, hub.blob = (None, etag or "data.zip") if offline else (etag, None)
    hub.blob = hub.blob or "blob"
    with pytest.raises(DataError, match=r"cannot verify 'hub:THUDM/LongBench.*' is no hash of the hub"):
        read("multi_news")


def test_offline_without_a_cached_file(hub):
    hub.etag, hub.cached = None, False
    with pytest.raises(
        DataError, match="the hub cannot be reached, and its local cache does not hold the file"
    ) as caught:
        read("multi_news")
    assert "\n" not in str(caught.value) and "'hub:THUDM/LongBench:data.zip:data/multi_news.jsonl'" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RepositoryNotFoundError", r"the hub has no \(public\) data set 'o/n'; allowed: a folder"),
        ("GatedRepoError", "its owner gives access on request only"),
        ("RemoteEntryNotFoundError", "the repository has no file 'a.zip'"),
        ("HFValidationError", "HFValidationError: not a name"),
    ],
)
def test_what_the_hub_does_not_have_is_not_looked_for_in_the_cache(hub, kind, message):
    error = getattr(huggingface_hub.errors, kind)
    hub.missing = error.__new__(error)
    hub.missing.args = ("not\na name",)
    with pytest.raises(DataError, match=f"^cannot get 'hub:o/n:a.zip:b.txt': {message}") as caught:
        read("hub:o/n:a.zip:b.txt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (
            "data/news.jsonl",
            r"the archive has no 'data/news.jsonl', must be one of \['data/multi_news.jsonl', 'data/other",
        ),
        ("bad.jsonl", "data.zip:bad.jsonl', line 2, is not JSON"),
        ("empty.txt", "data.zip:empty.txt' is empty"),
        ("folder/../data/other.txt", "the archive has no"),
    ],
)
def test_members_that_cannot_be_read(hub, member, message):
    hub.data = archive(**{"bad.jsonl": '{"text": "a"}\n{', "empty.txt": ""})
    hub.etag = sha256(hub.data)
    with pytest.raises(DataError, match=message) as caught:
        read(f"hub:o/n:data.zip:{member}")
    assert "\n" not in str(caught.value)


def test_archives_that_cannot_be_read(hub):
    locked = bytearray(archive())
    locked[6] |= 1  # the flag of a password, before the first member and in the directory
    locked[locked.index(b"PK\1\2") + 8] |= 1
    for data, message in ((b"no archive", "File is not a zip file"), (bytes(locked), "password required")):
        hub.data, hub.etag = data, sha256(data)
        with pytest.raises(DataError, match=f"cannot read 'data/multi_news.jsonl' in 'hub:.*{message}.*must be a zip"):
            read("multi_news")


@pytest.mark.parametrize(
    "source",
    [
        "hub:",
        "hub:o/n",
        "hub:o/n:",
        "hub:o/n:a.zip:",
        "hub:o:a.txt",
        "hub:o/n/m:a.txt",
        "hub:o n/m:a.txt",
        "hub::a.txt",
    ],
)
def test_names_that_are_not_of_the_hub(hub, source):
    with pytest.raises(DataError, match=f"^'{source}' is no file of the hub, must be 'hub:OWNER/NAME:FILE'"):
        read(source)
    assert not hub.asked


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:o/n:data.zip", r"'data.zip' must end in .txt or .jsonl"),
        ("hub:o/n:data.pkl", r"'data.pkl' must end in .txt or .jsonl"),
        ("hub:o/n:data.tar:a.txt", r"'data.tar' must end in .zip"),
        ("hub:o/n:data.zip:a.pkl", r"'a.pkl' must end in .txt or .jsonl"),
        ("hub:o/n:data.zip:a.txt:b", r"'a.txt:b' must end in .txt or .jsonl"),
    ],
)
def test_other_files_of_the_hub_are_not_even_asked_for(hub, source, message):
    with pytest.raises(DataError, match=message):
        read(source)
    assert not hub.asked


# --- the hub's own library, against a server on this machine


@pytest.fixture
def server():
    """Serves ``files`` the way the hub does: HEAD with etag and commit, GET; counts requests."""
    files, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            data, etag = files.get(self.path.rsplit("/", 1)[-1], (b"", None))
            self.send_response(200 if etag else 404)
            if not etag:
                self.send_header("X-Error-Code", "EntryNotFound")
            for key, value in {"ETag": f'"{etag}"', "X-Repo-Commit": "c" * 40, "Content-Length": len(data)}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield SimpleNamespace(files=files, asked=asked, port=running.server_port)
    running.shutdown()
    running.server_close()


def elsewhere(source, port, folder, offline="0"):
    """``read`` in a process of its own, whose hub is that server."""
    code = (
        "import sys\nfrom kvprobe.errors import DataError\nfrom kvprobe.tasks.sources import read\n"
        "assert 'huggingface_hub' not in sys.modules and 'torch' not in sys.modules\n"
        "try: print([text.text for text in read(sys.argv[1])])\nexcept DataError as error: print(error)"
    )
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder), "HF_HUB_OFFLINE": offline}
    hub |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", code, source]
    return subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, check=True).stdout.strip()


def test_downloaded_once_verified_always(server, tmp_path):
    data = archive()
    server.files["data.zip"] = (data, sha256(data))
    texts = str([text.text for text in WANTED])
    assert elsewhere("multi_news", server.port, tmp_path) == texts and len(server.asked) > 1
    assert {path.split("/resolve/")[0] for path in server.asked} == {"/datasets/THUDM/LongBench"}
    asked = len(server.asked)
    assert elsewhere("multi_news", server.port, tmp_path, offline="1") == texts and len(server.asked) == asked
    assert elsewhere("multi_news", 9, tmp_path) == texts  # nothing listens there
    (blob,) = tmp_path.rglob(f"blobs/{sha256(data)}")
    blob.write_bytes(data + b"!")
    for offline in ("0", "1"):
        answer = elsewhere("multi_news", server.port, tmp_path, offline)
        assert f"has the hash {sha256(data + b'!')}, must have the hub's {sha256(data)}: delete '{blob}'" in answer
    assert "the repository has no file 'a.txt'" in elsewhere("hub:o/n:a.txt", server.port, tmp_path)
    assert "the hub cannot be reached" in elsewhere("hub:o/n:a.txt", 9, tmp_path, offline="1")
