"""Results as bytes and back: plain values, arrays, tensors, tables and kvprobe's own records, without pickle.

A file is a magic line, the sha256 of all that follows, the length of a JSON header, the header, and the raw bytes of
arrays. What is read equals what was written, to the bit: axes keep their order in memory (sums depend on it), tables
their dtypes. Reading one runs no code that it names: records are found among kvprobe's frozen dataclasses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import sys
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"kvprobe-part/1\n"
DIGEST = hashlib.sha256().digest_size
LENGTH = 8
TAG = "!"
KINDS = "biufcSUmM"
"""Kinds of numpy dtypes that are nothing but their bytes."""


class Unstorable(TypeError):
    """A result holds something that cannot be written down."""


class Damaged(ValueError):
    """Bytes that are not a part as it was written."""


def dumps(name: str, value: Any) -> bytes:
    """Return `value` as the bytes of a part called `name`.

    Raises
    ------
    Unstorable
        If it holds anything but None, bool, int, float, str, bytes, tuple, list, dict, set, frozenset, Fraction, Path,
        numpy arrays and scalars, dense torch tensors (their device is not kept), pandas tables, and enums and frozen
        dataclasses of kvprobe.
    """
    writer = Writer()
    header = json.dumps({"name": name, "value": writer.node(value), "sizes": list(map(len, writer.buffers))})
    text = header.encode("ascii")
    body = b"".join([len(text).to_bytes(LENGTH, "little"), text, *writer.buffers])
    return MAGIC + hashlib.sha256(body).digest() + body


def loads(data: bytes, name: str) -> Any:
    """Return what :func:`dumps` wrote as `name`.

    Raises
    ------
    Damaged
        If a single bit is not as it was written, or it is another part.
    """
    start = len(MAGIC) + DIGEST
    body = memoryview(data)[start:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise Damaged("it is not as it was written")
    try:
        stop = LENGTH + int.from_bytes(body[:LENGTH], "little")
        header = json.loads(bytes(body[LENGTH:stop]))
        if header["name"] != name:
            raise Damaged(f"it is of {header['name']!r}")
        return Reader(body[stop:], header["sizes"]).value(header["value"])
    except Damaged:
        raise
    except Exception as error:  # whole, but of another version of ours: whatever is wrong with it, it is of no use
        raise Damaged(f"{type(error).__name__}: {error}") from error


class Writer:
    """Values become JSON nodes; the bytes of arrays are put aside in ``buffers``."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []

    def node(self, value: Any) -> Any:
        """The JSON node of a value."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.node(each) for each in value]
        write = _WRITE.get(kind) or self._other(value)
        return {TAG: write[0]} | write[1](self, value)

    def put(self, data: bytes) -> int:
        """Put bytes aside; their number."""
        self.buffers.append(data)
        return len(self.buffers) - 1

    def _other(self, value: Any) -> tuple[str, Callable[[Writer, Any], dict[str, Any]]]:
        """Kinds that are found by what they are and not by their exact type."""
        torch, pandas = sys.modules.get("torch"), sys.modules.get("pandas")
        if isinstance(value, np.generic):
            return "scalar", _write_scalar
        if isinstance(value, Path):
            return "path", lambda _, path: {"v": str(path)}
        if torch is not None and type(value) is torch.Tensor:
            return "tensor", _write_tensor
        if pandas is not None and type(value) is pandas.DataFrame:
            from kvprobe.parts.frames import write_frame

            return "frame", write_frame
        if isinstance(value, Enum) and _ours(type(value)):
            return "enum", lambda _, member: {"c": _named(type(member)), "v": member.name}
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _ours(type(value)):
            return "record", _write_record
        raise Unstorable(f"a {type(value).__module__}.{type(value).__qualname__}")


class Reader:
    """JSON nodes become values again."""

    def __init__(self, body: memoryview, sizes: list[int]) -> None:
        ends = np.cumsum([0, *sizes]).tolist()
        if ends[-1] != len(body):
            raise Damaged(f"{len(body)} bytes of arrays, expected {ends[-1]}")
        self._pieces = [body[start:stop] for start, stop in pairwise(ends)]

    def value(self, node: Any) -> Any:
        """The value of a node."""
        if isinstance(node, list):
            return [self.value(each) for each in node]
        return _READ[node[TAG]](self, node) if isinstance(node, dict) else node

    def bytes(self, number: int) -> bytes:
        """Bytes that were put aside."""
        return bytes(self._pieces[number])


def axes(strides: Any) -> list[int]:
    """Axes from the slowest to the quickest in memory."""
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def write_array(writer: Writer, value: np.ndarray) -> dict[str, Any]:
    """An array; one of objects by its items."""
    shape = list(value.shape)
    if value.dtype.kind == "O":
        return {"shape": shape, "items": [writer.node(each) for each in value.reshape(-1)]}
    if value.dtype.kind not in KINDS:
        raise Unstorable(f"an array of {value.dtype}")
    order = axes(value.strides)
    data = np.ascontiguousarray(value.transpose(order)).tobytes()
    return {"shape": shape, "dtype": value.dtype.str, "order": order, "at": writer.put(data)}


def read_array(reader: Reader, node: dict[str, Any]) -> np.ndarray:
    """See :func:`write_array`."""
    shape = tuple(node["shape"])
    if "items" in node:
        flat = np.empty(math.prod(shape), dtype=object)
        for place, each in enumerate(node["items"]):
            flat[place] = reader.value(each)
        return flat.reshape(shape)
    dtype, order = np.dtype(node["dtype"]), node["order"]
    inner = [shape[axis] for axis in order]
    data = reader.bytes(node["at"])
    flat = np.frombuffer(data, dtype).copy() if data else np.zeros(math.prod(shape), dtype)
    return flat.reshape(inner).transpose(np.argsort(order)) if order else flat.reshape(())


def _write_scalar(writer: Writer, value: np.generic) -> dict[str, Any]:
    return write_array(writer, np.asarray(value))


def _read_scalar(reader: Reader, node: dict[str, Any]) -> Any:
    return read_array(reader, node)[()]


def _write_tensor(writer: Writer, value: Any) -> dict[str, Any]:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.requires_grad:
        raise Unstorable("a tensor that is sparse, quantised or needs a gradient")
    plain = value.cpu().resolve_conj().resolve_neg()
    order = axes(plain.stride())
    flat = plain.permute(order).reshape(-1) if order else plain.reshape(-1)
    data = flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"shape": list(value.shape), "dtype": dtype, "order": order, "at": writer.put(data)}


def _read_tensor(reader: Reader, node: dict[str, Any]) -> Any:
    import torch

    dtype, order, shape = getattr(torch, node["dtype"]), node["order"], node["shape"]
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"no dtype {node['dtype']!r}")
    data = reader.bytes(node["at"])
    flat = torch.frombuffer(bytearray(data), dtype=dtype).clone() if data else torch.zeros(0, dtype=dtype)
    whole = flat.reshape([shape[axis] for axis in order])
    return whole.permute(np.argsort(order).tolist()) if order else whole


def _write_record(writer: Writer, value: Any) -> dict[str, Any]:
    fields = {each.name: writer.node(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return {"c": _named(type(value)), "v": fields}


def _read_record(reader: Reader, node: dict[str, Any]) -> Any:
    """Made without ``__init__``: its fields are what they were, and nothing of it is run."""
    kind = _found(node["c"])
    names = {each.name for each in dataclasses.fields(kind)}
    if names != set(node["v"]):
        raise Damaged(f"{node['c']} has other fields now")
    made = object.__new__(kind)
    for name, each in node["v"].items():
        object.__setattr__(made, name, reader.value(each))
    return made


def _ours(kind: type) -> bool:
    """Enums and frozen dataclasses that stand in a module of kvprobe under their own name."""
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind.__module__.startswith("kvprobe.") and (frozen or issubclass(kind, Enum)) and "<" not in _named(kind)


def _named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if not module.startswith("kvprobe."):
        raise Damaged(f"{name} is not kvprobe's")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not _ours(found) or _named(found) != name:
        raise Damaged(f"{name} is no record of kvprobe")
    return found


def _write_dict(writer: Writer, value: dict[Any, Any]) -> dict[str, Any]:
    return {"k": [writer.node(key) for key in value], "v": [writer.node(each) for each in value.values()]}


def _read_dict(reader: Reader, node: dict[str, Any]) -> dict[Any, Any]:
    return dict(zip(reader.value(node["k"]), reader.value(node["v"]), strict=True))


def _write_items(writer: Writer, value: Any) -> dict[str, Any]:
    return {"v": [writer.node(each) for each in value]}


def _read_frame(reader: Reader, node: dict[str, Any]) -> Any:
    from kvprobe.parts.frames import read_frame

    return read_frame(reader, node)


_WRITE: dict[type, tuple[str, Callable[[Writer, Any], dict[str, Any]]]] = {
    tuple: ("tuple", _write_items),
    dict: ("dict", _write_dict),
    set: ("set", _write_items),
    frozenset: ("frozenset", _write_items),
    bytes: ("bytes", lambda writer, value: {"at": writer.put(value)}),
    Fraction: ("fraction", lambda _, value: {"v": [value.numerator, value.denominator]}),
    np.ndarray: ("array", write_array),
}
_READ: dict[str, Callable[[Reader, dict[str, Any]], Any]] = {
    "tuple": lambda reader, node: tuple(reader.value(node["v"])),
    "dict": _read_dict,
    "set": lambda reader, node: set(reader.value(node["v"])),
    "frozenset": lambda reader, node: frozenset(reader.value(node["v"])),
    "bytes": lambda reader, node: reader.bytes(node["at"]),
    "fraction": lambda _, node: Fraction(*node["v"]),
    "path": lambda _, node: Path(node["v"]),
    "array": read_array,
    "scalar": _read_scalar,
    "tensor": _read_tensor,
    "frame": _read_frame,
    "enum": lambda _, node: _found(node["c"])[node["v"]],
    "record": _read_record,
}
