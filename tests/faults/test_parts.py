"""Parts: what is read is what was written, to the bit; what is damaged is noticed; what cannot be written is said."""

import dataclasses
import hashlib
import io
import json
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kvprobe import parts
from kvprobe.errors import RecordError, TaskError
from kvprobe.heads.grid import Cell
from kvprobe.parts.store import file_name
from kvprobe.prompts import Prompt
from kvprobe.tasks.items import Item

NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn"),
)
TORCH = [getattr(torch, name) for name in NAMES]
NUMPY = (
    *("bool", "int8", ">i4", "uint64", "float16", "float32", ">f8", "complex64", "<U3", "S2", "datetime64[ns]"),
    "timedelta64[s]",
)


def same(a, b):
    """Equal in type, value and order: an oracle of its own, by recursion."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, float):
        assert (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, dict):
        same(list(a), list(b))
        same(list(a.values()), list(b.values()))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == object:
            same(a.ravel().tolist(), b.ravel().tolist())
        else:
            assert a.tobytes() == b.tobytes()  # NaN payloads and signed zeros included
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)] if a.numel() else [a, b]
        assert torch.equal(*raw)
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b, check_exact=True, check_column_type="exact", check_index_type="exact")
        assert list(a.dtypes) == list(b.dtypes)
        same(a.attrs, b.attrs)
    elif dataclasses.is_dataclass(a):
        for each in dataclasses.fields(a):
            same(getattr(a, each.name), getattr(b, each.name))
    else:
        assert a == b


def back(value):
    return parts.loads(parts.dumps("x", value), "x")


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
hashable = plain | st.fractions() | st.tuples(st.integers(), st.text(max_size=3))
arrays = npst.arrays(
    st.sampled_from(NUMPY),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
values = st.recursive(
    hashable | arrays | arrays.map(lambda a: a.T) | st.builds(Path, st.just("a/b ä")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable.filter(lambda key: key == key), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.sets(st.text(max_size=2), max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_what_is_read_is_what_was_written(value):
    same(back(value), value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_axes_keep_their_order_in_memory(data):
    """Sums go through memory: an array that came back in another order would be another one to the last bit."""
    shape = data.draw(npst.array_shapes(min_dims=2, max_dims=4, min_side=2, max_side=4))
    order = data.draw(st.permutations(range(len(shape))))
    whole = np.random.default_rng(0).random(shape)
    for array, strides in (
        (whole.transpose(order), lambda each: each.strides),
        (torch.from_numpy(whole).permute(order), lambda each: each.stride()),
    ):
        found = back(array)
        same(found, array)
        assert strides(found) == strides(array)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_tensors_of_every_dtype(dtype, shape):
    raw = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randn(shape) * 3
    same(back(raw.to(dtype)), raw.to(dtype))


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(math.nan), np.int64(3), np.bool_(True), np.str_("ä")])
def test_scalars_of_numpy_stay_what_they_are(value):
    same(back([value, (value,)]), [value, (value,)])


def tables():
    rng = np.random.default_rng(0)
    yield pd.DataFrame({"item": np.arange(3, dtype=np.int32), "score": [0.1, math.nan, -0.0], "text": ["a", "", "ä\n"]})
    yield pd.DataFrame({"mixed": pd.Series([1, "a", None, (2, 3)], dtype=object), "flag": [True, False, True, True]})
    yield (pd.DataFrame({"some": ["a", None, "b"]}),)
    yield pd.DataFrame({"kind": pd.Categorical(["b", "a"], categories=["c", "b", "a"], ordered=True)})
    yield pd.DataFrame({"n": pd.array([1, None], dtype="Int64"), "yes": pd.array([True, None], dtype="boolean")})
    yield pd.DataFrame({"when": pd.to_datetime(["2020-01-01", None]), "half": np.array([1, 2], dtype=np.float16)})
    yield pd.DataFrame(rng.random((4, 3)), columns=["a", "b", "a"], index=[3, 1, 1, 0]).rename_axis("place")
    yield pd.DataFrame({"a": [1.0, 2.0]}, index=["x", "y"])
    yield pd.DataFrame()
    yield pd.DataFrame({"a": np.zeros(0, np.float32)})
    yield pd.DataFrame(index=[1, 2])
    yield pd.DataFrame({0: [1], "1": [2]})


@pytest.mark.parametrize("number", range(12))
def test_tables_keep_dtypes_names_index_and_attrs(number):
    table = list(tables())[number]
    table = table[0] if isinstance(table, tuple) else table
    table.attrs = {"tokens": 3, "spans": [[1, 2]]}
    found = back(table)
    same(found, table)
    parquet = [io.BytesIO(), io.BytesIO()]
    for each, sink in zip((table, found), parquet, strict=True):
        if all(isinstance(name, str) for name in each.columns) and each.columns.is_unique and number != 1:
            each.to_parquet(sink)
    assert parquet[0].getvalue() == parquet[1].getvalue()


def test_records_of_kvprobe_are_made_as_they_were():
    item = Item(
        "niah", 3, 9, Prompt.from_ids([5, 6, 7], {"b": (1, 2)}), " 17", (4,), ("17",), 2, {"evidence": [(0, 1)]}
    )
    same(back((item, Cell(300, 12.5, 0, 1))), (item, Cell(300, 12.5, 0, 1)))


@dataclasses.dataclass(frozen=True)
class Foreign:
    x: int = 0


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Foreign(), "Foreign"),
        (object(), "builtins.object"),
        (OrderedDict(), "OrderedDict"),
        (Text("a"), "Text"),
        (lambda: 0, "function"),
        (torch.nn.Linear(2, 2), "Linear"),
        (torch.zeros(2, requires_grad=True), "gradient"),
        (np.zeros(2, dtype=[("a", "f4")]), "array of"),
        (pd.Series([1]), "Series"),
        (pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])), "MultiIndex"),
        (range(3), "range"),
    ],
)
def test_what_cannot_be_written_is_named(value, said):
    with pytest.raises(parts.Unstorable, match=said):
        parts.dumps("x", {"deep": [value]})


def test_every_flipped_bit_and_every_cut_is_noticed():
    data = parts.dumps("x", {"a": np.arange(3), "b": "text"})
    for at in range(len(data)):
        for bit in (0, 7):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(parts.Damaged):
                parts.loads(bytes(broken), "x")
        with pytest.raises(parts.Damaged):
            parts.loads(data[:at], "x")
    with pytest.raises(parts.Damaged):
        parts.loads(data + b"\0", "x")
    with pytest.raises(parts.Damaged, match="it is of 'x'"):
        parts.loads(data, "y")


@pytest.mark.parametrize(
    "named", ["os:system", "subprocess:Popen", "kvprobe.errors:KVProbeError", "kvprobe.parts.codec:dumps",
              "kvprobe.heads.grid:Nothing", "kvprobe.no_such:Thing", "kvprobe.heads.grid:itertools.chain",
              "kvprobe.tasks.items:Prompt"],
)  # fmt: skip
def test_a_file_cannot_have_anything_else_made(named, monkeypatch):
    """Whole, with a right checksum, and ill-meant: what it names is not run."""
    monkeypatch.setattr(parts.codec, "_named", lambda kind: named)
    monkeypatch.setattr(parts.codec, "_ours", lambda kind: True)
    forged = parts.dumps("x", Cell(300, 0, 0, 0))
    monkeypatch.undo()
    with pytest.raises(parts.Damaged):
        parts.loads(forged, "x")


def test_a_record_with_other_fields_is_of_no_use():
    data = parts.dumps("x", Cell(300, 0, 0, 0))
    body = data[len(parts.codec.MAGIC) + 32 :].replace(b'"needle"', b'"noodle"')
    with pytest.raises(parts.Damaged, match="other fields"):
        parts.loads(parts.codec.MAGIC + hashlib.sha256(body).digest() + body, "x")


def test_a_part_is_computed_once(tmp_path, capsys):
    calls = []

    def compute():
        calls.append(1)
        return {"a": np.arange(3.0), "t": (1, 2)}

    for _ in range(3):
        same(parts.Parts(tmp_path)("item 3", compute), {"a": np.arange(3.0), "t": (1, 2)})
    assert len(calls) == 1 and not capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [file_name("item 3")]
    assert parts.Parts(tmp_path).count("item") == 1 and parts.Parts(tmp_path).count("document") == 0


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:60] + b"?" + data[61:]]
)
def test_a_damaged_part_is_computed_again_and_said(damage, tmp_path, capsys):
    path = tmp_path / file_name("item 0")
    parts.Parts(tmp_path)("item 0", lambda: 1)
    path.write_bytes(damage(path.read_bytes()))
    assert parts.Parts(tmp_path)("item 0", lambda: 2) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and "item 0 is computed again" in said
    assert parts.Parts(tmp_path)("item 0", lambda: 3) == 2


def test_what_cannot_be_kept_is_said_and_used_all_the_same(tmp_path, capsys):
    keep = parts.Parts(tmp_path)
    assert isinstance(keep("item 0", lambda: Foreign(4)), Foreign)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "item 0" in said and "Foreign" in said and not list(tmp_path.iterdir())


def test_one_name_twice_is_a_mistake_of_ours(tmp_path):
    keep = parts.Parts(tmp_path)
    keep("item 0", lambda: 1)
    with pytest.raises(AssertionError, match="two parts are called 'item 0'"):
        keep("item 0", lambda: 2)


@given(st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=5, unique=True))
def test_names_of_files_are_safe_and_differ(names):
    made = [file_name(name) for name in names]
    assert len(set(made)) == len(made)
    assert all(Path(each).name == each and len(each.encode()) < 100 and not each.startswith(".") for each in made)


@pytest.mark.parametrize("kept", [True, False])
def test_a_mistake_names_its_item_once(kept, tmp_path):
    keep = parts.Parts(tmp_path) if kept else parts.afresh
    inner = parts.under(parts.afresh, "sweep")

    def mistaken():
        raise TaskError("too long")

    with pytest.raises(TaskError, match=r"^sweep: item 1: too long$"):
        keep("outer", lambda: inner("item 1", mistaken))
    with pytest.raises(ZeroDivisionError) as caught:
        keep("item 2", lambda: 1 // 0)
    assert caught.value.__notes__ == ["in item 2"]


def test_a_file_or_none(tmp_path):
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("x")):
        expected = RecordError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected) as caught, parts.replacing(tmp_path / "a.json") as temporary:
            temporary.write_text("half")
            raise error
        assert not list(tmp_path.iterdir())
        if expected is RecordError:
            assert str(caught.value) == f"cannot write {tmp_path / 'a.json'}: No space left on device"


def test_a_mark_changes_with_what_a_file_or_folder_holds(tmp_path):
    one, folder = tmp_path / "one.txt", tmp_path / "folder"
    one.write_text("a")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x.json").write_text("{}")
    before = parts.mark(one), parts.mark(folder)
    assert before == (parts.mark(one), parts.mark(folder)) and None not in before
    one.write_text("b")
    (folder / "deep" / "x.json").write_text("{ }")
    assert parts.mark(one) != before[0] and parts.mark(folder) != before[1]
    assert parts.mark(tmp_path / "none") is None
    assert json.dumps(before)
