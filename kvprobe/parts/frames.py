"""Tables inside parts: every column with its dtype, the index, the columns' names and ``attrs``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.parts.codec import Damaged, Reader, Unstorable, Writer, read_array, write_array

if TYPE_CHECKING:
    import pandas as pd


def write_frame(writer: Writer, frame: pd.DataFrame) -> dict[str, Any]:
    """A table as a node; columns go by place, so that names may be anything and occur twice."""
    data = [_write_column(writer, frame.iloc[:, place]) for place in range(frame.shape[1])]
    named = {"columns": _write_index(writer, frame.columns), "index": _write_index(writer, frame.index)}
    return {"data": data, "attrs": writer.node(dict(frame.attrs))} | named


def read_frame(reader: Reader, node: dict[str, Any]) -> pd.DataFrame:
    """See :func:`write_frame`."""
    import pandas as pd

    index = _read_index(reader, node["index"])
    columns = {place: _read_column(reader, each, index) for place, each in enumerate(node["data"])}
    frame = pd.DataFrame(columns, index=index)
    frame.columns = _read_index(reader, node["columns"])
    frame.attrs = reader.value(node["attrs"])
    return frame


def _write_column(writer: Writer, column: Any) -> dict[str, Any]:
    """numpy's dtypes as arrays, pandas' own (text, categories, nullable numbers) as Arrow writes them."""
    if isinstance(column.dtype, np.dtype):
        return write_array(writer, column.to_numpy())
    import pandas as pd
    import pyarrow as pa

    sink = io.BytesIO()
    table = pa.Table.from_pandas(pd.DataFrame({"c": column.array}), preserve_index=False)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return {"arrow": writer.put(sink.getvalue()), "dtype": _told(column.dtype)}


def _read_column(reader: Reader, node: dict[str, Any], index: Any) -> Any:
    import pandas as pd

    if "arrow" not in node:
        values = read_array(reader, node)
        return pd.Series(values, index=index, dtype=values.dtype)
    import pyarrow as pa

    with pa.ipc.open_stream(reader.bytes(node["arrow"])) as stream:
        array = stream.read_pandas()["c"].array
    if _told(array.dtype) != node["dtype"]:
        raise Damaged(f"a column of {node['dtype']} came back as {_told(array.dtype)}")
    return pd.Series(array, index=index)


def _told(dtype: Any) -> str:
    """A dtype in full: its repr names what its string leaves out (how text is stored, which categories there are)."""
    return f"{dtype!s} {dtype!r}"


def _write_index(writer: Writer, index: Any) -> dict[str, Any]:
    import pandas as pd

    name = writer.node(index.name)
    if type(index) is pd.RangeIndex:
        return {"range": [index.start, index.stop, index.step], "name": name}
    if type(index) is not pd.Index:
        raise Unstorable(f"a table with a {type(index).__name__}")
    return _write_column(writer, index.to_series()) | {"name": name}


def _read_index(reader: Reader, node: dict[str, Any]) -> Any:
    import pandas as pd

    name = reader.value(node["name"])
    if "range" in node:
        start, stop, step = node["range"]
        return pd.RangeIndex(start, stop, step, name=name)
    column = _read_column(reader, node, None)
    return pd.Index(column.array, dtype=column.dtype, name=name)
