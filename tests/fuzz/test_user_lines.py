"""Any file of the user's own lines: what is accepted is what was written, a refusal is one line with its number."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import tiny
from fuzzing import JUNK, lawful
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvprobe.errors import DataError
from kvprobe.tasks import user

law = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXT = "Ann's code is 17. Bob's code is 52. Cid's code is 88. What is Bob's code? It is"
ITEM = {"text": TEXT, "target": "Bob's code is 52.", "answer": "52", "hard": [[0, 17]], "protect": "It is"}
ITEM |= {"question": " What is Bob's code? It is", "references": ["52"], "id": "bob", "meta": {"a": [1, None]}}
TRACED = "Six by nine is 54. Two by nine is 18. So 54 it is, and 54 again: six by nine is 54."
TRACE = {"text": TRACED, "target": [0, 17], "mentions": [[15, 17, 1], [41, 43, 2], [55, 57, 3], [80, 82, 4]]}
TRACE |= {"rederive": [[65, 83]], "hard": ["Two by nine is 18."], "protect": [], "id": 3, "meta": 1}
CHARACTERS = st.characters(codec="utf-8")
LETTERS = st.one_of(st.sampled_from("ab .,é漢🙂\u0301\u200d\x00\u2028\n\t\ufeff\u202e"), CHARACTERS)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 90),
    st.sampled_from((2**31, 2**63, 2**64, -(2**64), 10**400)),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(LETTERS, max_size=6),
    st.sampled_from(
        [word for word in JUNK if len(word) < 100] + ["\ud800", "a\udfff", TEXT, TEXT[:18], "Bob", "code", "is 52"]
    ),
)
VALUES = st.recursive(
    ATOMS,
    lambda x: st.one_of(st.lists(x, max_size=4), st.dictionaries(st.text(max_size=3), x, max_size=3)),
    max_leaves=8,
)
PAIRS = st.lists(st.one_of(st.integers(-2, 85), st.sampled_from((True, 1.0, 2**64))), min_size=1, max_size=4)
FIELDS = st.one_of(VALUES, PAIRS, st.lists(PAIRS, max_size=3))


@pytest.fixture(scope="module")
def model():
    """The tokenizer of the tiny models: one token a byte, nothing added."""
    return SimpleNamespace(tokenizer=tiny.tokenizer(), max_length=512)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "own.jsonl"


READERS = {"items": (user.items, ITEM), "traces": (user.traces, TRACE)}
both = pytest.mark.parametrize("kind", READERS)


def read(kind, place, content, model):
    """Rows, or None where they are refused in one line that says which."""
    place.write_bytes(content)
    try:
        return READERS[kind][0](place, model)
    except DataError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 1200, said
        count = content.count(b"\n") + 1
        found = re.match(rf"'{re.escape(str(place))}', line (\d+)", said)
        if not content.decode("utf-8-sig", "replace").strip():
            assert "is empty" in said
        else:
            assert found and 1 <= int(found[1]) <= count, said
        return None


def decoded(model, item, span):
    return model.tokenizer.decode(item.prompt.ids[slice(*span)])


def right(kind, rows, written, model):
    """Every accepted row says what its line says."""
    assert len(rows) == len(written)
    for item, row in zip(rows, written, strict=True):
        text = row["text"]
        assert item.prompt.ids.tolist() == model.tokenizer(text)["input_ids"]
        assert json.loads(json.dumps(item.settings, allow_nan=False)) == item.settings
        if kind == "items":
            assert item.answer.strip() == row["answer"].strip()
            labelled = item.spans
        else:
            labelled = {"evidence": item.target, "hard": item.hard}
        for label, field in (("evidence", "target"), ("hard", "hard")):
            spans = sorted(characters(text, row.get(field, [])))
            assert sorted(bytes_of(text, *span) for span in spans) == sorted(labelled[label])


def characters(text, value):
    whole = isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) for x in value)
    given = value if isinstance(value, list) and not whole else [value]
    return [tuple(x) if isinstance(x, list) else (text.index(x), text.index(x) + len(x)) for x in given]


def bytes_of(text, start, stop):
    """Tokens of the byte tokenizer that a range of characters takes."""
    return len(text[:start].encode()), len(text[:stop].encode())


@both
@law
@given(content=st.one_of(st.binary(max_size=60), st.text(LETTERS, max_size=30).map(str.encode)))
@example(content=b"\xff\xfe{\x00}\x00")
@example(content=b"{}\n" * 3 + b"\x80")
@example(content=b"[" * 3000)
@example(content=b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}")
@example(content=b'{"id": ' + b"9" * 5000 + b"}")
@example(content=b'{"text": "Ann is. Bob is", "target": "Ann is", "answer": "x", "meta": [1e999]}')
@example(content=b'{"text": ["' + b'", "'.join([b"x" * 90] * 90) + b'"]}')
def test_bytes(kind, content, place, model):
    assert read(kind, place, content, model) is None


@both
@law
@given(data=st.data())
def test_rows_with_anything_in_a_field(kind, data, place, model):
    """One good row, and one in which fields are replaced, dropped, doubled or made up."""
    good = READERS[kind][1]
    row = dict(good) | {"id": "own"}
    for _ in range(data.draw(st.integers(1, 2))):
        field = data.draw(st.sampled_from([*good, "odd", "", "Text", "\ud800"]))
        how = data.draw(st.sampled_from(("replace", "replace", "replace", "drop")))
        row.pop(field, None) if how == "drop" else row.update({field: data.draw(FIELDS)})
    text = json.dumps(row, ensure_ascii=data.draw(st.booleans()) or surrogates(row))
    if data.draw(st.integers(0, 9)) == 0:
        text = text[:-1] + ', "text": "again"}'
    found = read(kind, place, f"{json.dumps(good)}\n{text}".encode(), model)
    if found is not None:
        right(kind, found, [good, row], model)


def surrogates(row):
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


@st.composite
def good_rows(draw):
    """Rows that must be accepted: pieces of any text, of which some are marked by their characters."""
    pieces = draw(st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=4, max_size=6))
    pieces = [piece if piece.strip() else f"x{piece}" for piece in pieces]
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    target = draw(st.integers(0, len(pieces) - 3))
    row = {"text": "".join(pieces) + "?", "answer": draw(st.text(LETTERS, max_size=4)) + "y"}
    row["target"] = [starts[target], starts[target] + len(pieces[target])]
    if draw(st.booleans()):
        row["meta"] = draw(VALUES.filter(lambda value: not surrogates(value) and "e+" not in json.dumps(value)))
    return row


@law
@given(
    rows=st.lists(good_rows(), min_size=1, max_size=3),
    ends=st.sampled_from(("\n", "\r\n", "\n\n", "\n \t\n")),
    mark=st.sampled_from(("", "\ufeff")),
    plain=st.booleans(),
)
def test_good_rows_however_they_lie(rows, ends, mark, plain, place, model):
    content = mark + ends.join(json.dumps(row, ensure_ascii=plain) for row in rows) + ends
    kept = [row for row in rows if not holds_no_number(row.get("meta"))]
    found = read("items", place, content.encode(), model)
    if len(kept) == len(rows):
        assert found is not None
        right("items", found, rows, model)
    else:
        assert found is None


def holds_no_number(value):
    """Whether NaN or an infinity stands anywhere in a value: they are not JSON."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, float) and not math.isfinite(value)) or any(map(holds_no_number, inside))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"{}",
        b"[1]",
        b"",
        json.dumps(ITEM | {"target": "nowhere"}).encode(),
        json.dumps({"text": "\ud800"}).encode(),
    ],
)
def test_the_command_says_so_in_one_line(content, validated, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(content)
    status, _, said = lawful(["placebo", "--file", str(path), "--out", str(tmp_path / "out")])
    assert status == 2 and "own.jsonl" in said
    assert not (tmp_path / "out").exists()
