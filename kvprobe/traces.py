"""Trace: what chosen queries saw, layer by layer, in fp32 logits.

A trace keeps rotated query rows and references to the cached keys and values; a layer's logits are worked out when
that layer is looked at, so that memory does not grow with the number of layers. Positions count the prompt's tokens as
given: left pads are columns that no query sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprobe import theory
from kvprobe.engine import Prefix
from kvprobe.errors import DataError, RecordError, TheoryError, quote
from kvprobe.twopart import LayerSpec, layer_logits


@dataclass(frozen=True)
class LayerView:
    """One layer as the theory needs it.

    Attributes
    ----------
    logits
        [H, Q, n] fp32, after scale and soft-cap; −∞ where the key is invisible to the query.
    values
        [K, n, d] cached values.
    w_o
        [H, d, D] the output projection's slice of each query head.
    sink
        [H] learned sink logits, or None.
    queries
        [Q] absolute query positions.
    """

    index: int
    logits: Tensor
    values: Tensor
    w_o: Tensor
    sink: Tensor | None
    queries: Tensor

    @property
    def attention(self) -> Tensor:
        """A = softmax(logits) [H, Q, n] in fp32; rows sum to 1, or to 1 − the learned sink's share."""
        return self.rows()[0]

    def rows(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """softmax(logits + bias) [H, Q, n] and the learned sink's own mass [H, Q] (None without sinks)."""
        logits = self.logits if bias is None else self.logits + bias
        return theory.attention(logits, None if self.sink is None else self.sink.float()[:, None])


@dataclass(frozen=True)
class LayerData:
    """Raw material of one layer: query rows [H, Q, d], key and value parts [K, ·, d] to be read as one sequence."""

    query: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    spec: LayerSpec


@dataclass(frozen=True)
class Trace:
    """Observed rows of one prompt.

    Attributes
    ----------
    ids
        [n] token ids as given, left pads included.
    queries
        Absolute positions of the observed rows.
    pad
        Number of left pads: columns 0 … pad − 1 are invisible.
    meta
        Model name, dtype, versions and weight-processing state, saved with the trace.
    """

    ids: Tensor
    queries: list[int]
    data: list[LayerData]
    output: Callable[[int], Tensor]
    pad: int = 0
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of key columns."""
        return len(self.ids)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.data)

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return int(self.data[0].query.shape[0])

    def layer(self, index: int, rows: slice | Sequence[int] | None = None) -> LayerView:
        """Work out one layer; logits and values are fresh tensors, W_O is a view of the model's weight.

        Parameters
        ----------
        index
            Layer number.
        rows
            Which of the observed rows, as ``queries[rows]`` counts them: a slice or a list of indices; None for all.
            Only their logits are ever made, so that a long trace can be read in chunks. They are those of all rows up
            to the rounding of a matrix product of another height.
        """
        if not 0 <= index < self.n_layers:
            raise TheoryError(f"layer {index} does not exist: the trace has layers 0 … {self.n_layers - 1}")
        data = self.data[index]
        keys, values = (_joined(part, self.pad) for part in (data.keys, data.values))
        positions = torch.tensor(self.queries, device=keys.device)
        query = data.query
        if rows is not None:
            chosen = self._rows(rows).to(keys.device)
            query, positions = query[:, chosen], positions[chosen]
        logits = layer_logits(query, keys, data.spec, positions)
        logits[..., : self.pad] = -torch.inf
        return LayerView(index, logits, values, self.output(index), data.spec.sink, positions)

    def _rows(self, rows: slice | Sequence[int]) -> Tensor:
        """Indices of chosen rows; none, or one that was not observed, is an error."""
        if isinstance(rows, slice):
            rows = range(*rows.indices(len(self.queries)))
        if not len(rows) or min(rows) < -len(self.queries) or max(rows) >= len(self.queries):
            raise TheoryError(
                f"rows={quote(rows)}; allowed: one or more of the {len(self.queries)} observed rows, by index"
            )
        return torch.tensor(list(rows))

    def layers(self) -> Iterator[LayerView]:
        """All layers, one at a time."""
        for index in range(self.n_layers):
            yield self.layer(index)

    def prefix(self, length: int) -> Prefix:
        """Keys and values of the first ``length`` real tokens as a shared prefix (views): the same as a prefill."""
        if not 0 < length <= min(data.keys[0].shape[1] for data in self.data):
            raise TheoryError(f"the trace holds no contiguous prefix of {length} tokens")
        layers = [(data.keys[0][:, :length], data.values[0][:, :length]) for data in self.data]
        return Prefix(self.ids[self.pad : self.pad + length], layers, made=self.n - self.pad)

    def save(self, path: str | Path, *, weights: bool = True) -> Path:
        """Write one safetensors file: ids, query rows, keys, values, specs, and W_O unless ``weights=False``."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {"ids": self.ids.clone(), "queries": torch.tensor(self.queries)}
        for index, data in enumerate(self.data):
            tensors[f"{index}.query"] = data.query.contiguous()
            tensors[f"{index}.key"] = _joined(data.keys, 0).contiguous().clone()
            tensors[f"{index}.value"] = _joined(data.values, 0).contiguous().clone()
            if data.spec.sink is not None:
                tensors[f"{index}.sink"] = data.spec.sink.detach().clone()
            if weights:
                tensors[f"{index}.w_o"] = self.output(index).contiguous().clone()
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(tensors, partial, metadata={"kvprobe": json.dumps(self._header(weights))})
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise RecordError(f"cannot write the trace {path}: {error}; allowed: a file in a writable folder") from None
        finally:
            partial.unlink(missing_ok=True)
        return path

    def _header(self, weights: bool) -> dict[str, Any]:
        specs = [[data.spec.scale, data.spec.window, data.spec.softcap] for data in self.data]
        spans = {name: list(span) for name, span in self.spans.items()}
        return {
            "format": 1,
            "pad": self.pad,
            "specs": specs,
            "spans": spans,
            "meta": dict(self.meta),
            "weights": weights,
            "projections": [] if weights else [_fingerprint(self.output(i)) for i in range(self.n_layers)],
        }

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Trace:
        """Read a saved trace; W_O comes from the file, or from ``model`` where it was saved without."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as file:
                header = json.loads((file.metadata() or {}).get("kvprobe", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(f"{path} is not a readable trace: {error}") from None
        if not isinstance(header, dict) or header.get("format") != 1:
            raise DataError(f"{path} is not a kvprobe trace (format 1)")
        if not header.get("weights"):
            _same_projections(path, header.get("projections"), model)
        try:
            return cls._read(header, tensors, model)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is an incomplete trace: {type(error).__name__} {error}") from None

    @classmethod
    def _read(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: Any) -> Trace:
        data = [_read_layer(tensors, index, spec) for index, spec in enumerate(header["specs"])]
        weights = [tensors[f"{index}.w_o"] for index in range(len(data))] if header["weights"] else []
        spans = {name: (int(span[0]), int(span[1])) for name, span in header["spans"].items()}
        output = weights.__getitem__ if header["weights"] else model.w_o
        return cls(tensors["ids"], tensors["queries"].tolist(), data, output, header["pad"], spans, header["meta"])


def _fingerprint(w_o: Tensor) -> list[float]:
    """Two sums that tell one layer's W_O from another's."""
    return [float(w_o.double().sum()), float(w_o.double().abs().sum())]


def _same_projections(path: str | Path, saved: Any, model: Any) -> None:
    """Refuse a model whose output projections are not those that the trace was made with."""
    if not hasattr(model, "w_o") or not hasattr(model, "geometry"):
        raise DataError(f"{path} was saved without W_O: give Trace.load(path, model) with the model it was made with")
    theirs = [_fingerprint(model.w_o(index)) for index in range(model.geometry.n_layers)]
    if len(theirs) != len(saved) or not torch.allclose(torch.tensor(theirs), torch.tensor(saved), rtol=1e-5, atol=1e-6):
        raise DataError(f"{path} was made with another model than {model.name!r}: its output projections differ")


def _read_layer(tensors: Mapping[str, Tensor], index: int, spec: list[Any]) -> LayerData:
    scale, window, softcap = spec
    parts = ((tensors[f"{index}.key"],), (tensors[f"{index}.value"],))
    return LayerData(tensors[f"{index}.query"], *parts, LayerSpec(scale, window, softcap, tensors.get(f"{index}.sink")))


def _joined(parts: tuple[Tensor, ...], pad: int) -> Tensor:
    """Parts [K, ·, d] as one [K, pad + n, d]; a single part without pads is returned as it is, uncopied."""
    if pad:
        parts = (parts[0].new_zeros(parts[0].shape[0], pad, parts[0].shape[2]), *parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
