"""Tables, figures, JSON and text as whole files: written beside their place, then renamed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import RecordError
from kvprobe.parts import replacing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Without the date and version that matplotlib writes by itself, the same figure is the same bytes.
_ANONYMOUS: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}


def write_table(df: pd.DataFrame, path: str | Path) -> Path:
    """Write `df` as parquet, without its index; raise :class:`RecordError` if that cannot be done."""
    with _replacing(Path(path), (".parquet",)) as temporary:
        df.to_parquet(temporary, index=False)
    return Path(path)


def write_figure(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write `figure` as PNG, SVG or PDF by the ending of `path`; the same figure gives the same bytes."""
    kind = Path(path).suffix
    with _replacing(Path(path), tuple(_ANONYMOUS)) as temporary:
        metadata = _ANONYMOUS[kind]
        figure.savefig(temporary, dpi=dpi, format=kind[1:], bbox_inches="tight", metadata=metadata)
    return Path(path)


def write_json(value: Any, path: str | Path) -> Path:
    """Write `value` as indented JSON (see :func:`to_json`)."""
    return write_text(to_json(value, indent=2) + "\n", path, ".json")


def write_text(text: str, path: str | Path, ending: str = ".txt") -> Path:
    """Write `text` in UTF-8 to a `path` of this ending."""
    with _replacing(Path(path), (ending,)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: arrays and tensors become lists, paths strings, NaN and infinities ``null``."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far, in MiB (NaN where the system does not tell).

    On Linux from ``VmHWM``: what ``getrusage`` says there includes the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024  # given in KiB
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # given in bytes
    return math.nan


@contextmanager
def _replacing(path: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """See :func:`kvprobe.parts.replacing`; refuses other endings."""
    if path.suffix not in endings:
        raise RecordError(f"{path.name} must end in {' or '.join(endings)}")
    with replacing(path) as temporary:
        yield temporary


def _plain(value: Any) -> Any:
    """Return `value` in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors, pandas columns
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
