"""Run a list of items and lay everything out in tidy tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import parts, stats
from kvprobe.errors import TaskError
from kvprobe.needles.probe import ItemProbe, probe_item
from kvprobe.needles.settings import FEATURES, Settings
from kvprobe.needles.summary import CONTRASTS, head_auroc, kept_layers, observation_points, summarise

if TYPE_CHECKING:
    import pandas as pd

HEAD_COLUMNS = (
    *("contrast", "where", "feature", "layer", "head", "auroc", "n_items", "items_at_1", "excluded"),
    *("p_max_t", "p_attainable"),
)
SEMANTICS = "prefill-then-evict: the context is prefilled exactly, masks apply to question and answer tokens"


@dataclass(frozen=True)
class Result:
    """A finished run: the probed items, the summary, and its tables."""

    settings: Settings
    probes: tuple[ItemProbe, ...]
    summary: dict[str, Any]

    def items(self) -> pd.DataFrame:
        """One row an item."""
        import pandas as pd

        return pd.DataFrame([_item_row(probe) for probe in self.probes])

    def arms(self) -> pd.DataFrame:
        """One row an item × arm."""
        import pandas as pd

        rows = []
        for probe in self.probes:
            for number, arm in enumerate(probe.arms):
                spans = " ".join(f"{start}:{stop}" for start, stop in arm.spans)
                row = {"item": probe.index, "arm": number, "label": arm.label, "spans": spans}
                values = {"logprob": arm.logprob, "delta_logprob": arm.delta_logprob, "kl": arm.kl, "score": arm.score}
                receipt = {f"receipt_{name}": value for name, value in arm.receipt.items()}
                rows.append(row | values | {"answer": arm.text} | receipt)
        return pd.DataFrame(rows)

    def spans(self) -> pd.DataFrame:
        """One row an item × layer × head × observation point × span, with every feature."""
        import pandas as pd

        return pd.concat([_span_frame(probe) for probe in self.probes], ignore_index=True)

    def heads(self) -> pd.DataFrame:
        """One row a contrast × place × feature × layer × head: AUROC over items, and p by max-T over heads for mass."""
        import pandas as pd

        frames = [
            frame
            for name, where, feature in itertools.product(CONTRASTS, ("last", "answer"), FEATURES)
            if (frame := _head_frame(self.probes, self.settings, name, where, feature)) is not None
        ]
        columns = [*HEAD_COLUMNS]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def run(
    model: Any,
    settings: Settings,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Result:
    """Probe ``settings.items`` items.

    Parameters
    ----------
    progress
        Wraps the item numbers (tqdm, for instance).
    keep
        Stores what each item gives, for a run that goes on later (:class:`kvprobe.parts.Parts`); by default nothing.

    Raises
    ------
    TaskError
        No items, or a layer to exclude that the model does not have.
    """
    validate(model, settings)
    begun = time.perf_counter()
    probes = tuple(
        keep(f"item {index}", partial(probe_item, model, settings, index)) for index in progress(range(settings.items))
    )
    timings = {name: sum(probe.timings[name] for probe in probes) for name in probes[0].timings}
    timings["items_s"] = time.perf_counter() - begun
    about = {
        "task": settings.task,
        "length": settings.length,
        "n_items": len(probes),
        "seed": settings.seed,
        "semantics": SEMANTICS,
        "settings": asdict(settings),
    }
    return Result(settings, probes, about | summarise(probes, settings) | {"timings_s": timings})


def validate(model: Any, settings: Settings) -> None:
    """Refuse everything that can be refused before anything is computed or written (see :func:`run`)."""
    if settings.items < 1:
        raise TaskError(f"items is {settings.items}, must be a whole number of at least 1")
    outside = [layer for layer in settings.exclude_layers if not 0 <= layer < model.geometry.n_layers]
    if outside:
        raise TaskError(f"exclude_layers names {outside}, the model has layers 0 … {model.geometry.n_layers - 1}")
    for index in range(settings.items):
        settings.item(model, index)
    if len(set(settings.exclude_layers)) == model.geometry.n_layers:
        raise TaskError(f"exclude_layers names all {model.geometry.n_layers} layers, must leave at least one")


def _item_row(probe: ItemProbe) -> dict[str, Any]:
    item = probe.item
    counts = {label: int(probe.is_label(label).sum()) for label in ("evidence", "hard", "decoy", "distractor")}
    return {
        "item": probe.index,
        "seed": item.seed,
        "task": item.task,
        "tokens": len(item.prompt),
        "context_stop": item.context_stop,
        "answer": probe.clean.text,
        "gold": item.answer,
        "score": probe.clean.score,
        "logprob": probe.clean.logprob,
        **counts,
        **probe.timings,
    }


def _span_frame(probe: ItemProbe) -> pd.DataFrame:
    import pandas as pd

    shape = probe.features["mass"].shape
    layer, head, query, span = (grid.reshape(-1) for grid in np.indices(shape, dtype=np.int32))
    starts, stops = np.array(probe.spans, dtype=np.int32).T
    columns = {
        "item": np.full(layer.size, probe.index, dtype=np.int32),
        "layer": layer,
        "head": head,
        "where": np.array(probe.where)[query],
        "query": np.array(probe.queries, dtype=np.int32)[query],
        "label": np.array(probe.labels)[span],
        "start": starts[span],
        "stop": stops[span],
    }
    features = {name: values.reshape(-1).astype(np.float32) for name, values in probe.features.items()}
    return pd.DataFrame(columns | features)


def _head_frame(
    probes: Sequence[ItemProbe], settings: Settings, name: str, where: str, feature: str
) -> pd.DataFrame | None:
    import pandas as pd

    maps = [auroc for probe in probes if (auroc := head_auroc(probe, feature, name, where)) is not None]
    if not maps:
        return None
    values = np.stack(maps)
    layers, heads = (grid.reshape(-1) for grid in np.indices(values.shape[1:]))
    frame = pd.DataFrame({"contrast": name, "where": where, "feature": feature, "layer": layers, "head": heads})
    frame["auroc"] = values.mean(axis=0).reshape(-1)
    frame["n_items"] = len(maps)
    frame["items_at_1"] = (values == 1.0).sum(axis=0).reshape(-1)
    frame["excluded"] = np.isin(layers, settings.exclude_layers)
    frame["p_max_t"], frame["p_attainable"] = np.nan, np.nan
    if feature == "mass":
        test = _max_t(probes, name, where, settings)
        frame.loc[~frame["excluded"], "p_max_t"] = test.p
        frame.loc[~frame["excluded"], "p_attainable"] = test.p_attainable
    return frame


def _max_t(probes: Sequence[ItemProbe], name: str, where: str, settings: Settings) -> stats.MaxTResult:
    """p of each head that is not excluded, under one joint permutation of the evidence label within items (max |T|)."""
    scores, targets = [], []
    for probe in probes:
        chosen = probe.is_label("evidence", *CONTRASTS[name])
        points = observation_points(probe, where)
        kept = kept_layers(probe, settings)
        mass = probe.features["mass"][kept][:, :, points].mean(axis=2)[..., chosen]
        scores.append(np.moveaxis(mass, -1, 0).reshape(mass.shape[-1], -1))
        targets.append(probe.is_label("evidence")[chosen])
    return stats.max_t_within_item(scores, targets, seed=settings.seed, draws=1999)
