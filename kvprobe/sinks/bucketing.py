"""The table of buckets: sums over the keys of each, by layer and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.errors import PromptError
from kvprobe.sinks.buckets import BUCKETS, Buckets

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.sinks.scores import Array, Scores

COLUMNS = (
    *("layer", "head", "bucket", "n_tokens", "n_seen", "mass", "value_mass", "value", "ratio"),
    *("mass_per_token", "value_mass_per_token"),
)


def bucket_table(scores: Scores, buckets: Buckets, epsilon: float) -> pd.DataFrame:
    """See :meth:`kvprobe.sinks.Scores.bucket_table`."""
    import pandas as pd

    if buckets.n != scores.shape[2] or buckets.pad != scores.pad:
        raise PromptError(
            f"buckets of {buckets.n} keys with {buckets.pad} pads; allowed: as many as the scores have, "
            f"{scores.shape[2]} with {scores.pad} pads"
        )
    frames = [_frame(scores, name, buckets.keys[name], epsilon) for name in BUCKETS if buckets.keys.get(name)]
    if (scores.learned > 0).any():
        frames.append(_learned(scores))
    return pd.concat(frames).sort_values(["layer", "head"], kind="stable", ignore_index=True)


def _frame(scores: Scores, name: str, keys: tuple[int, ...], epsilon: float) -> pd.DataFrame:
    columns = list(keys)
    m, seen = scores.norms[..., columns], scores.seen[:, None, columns] > 0
    s = np.where(seen, scores.mass[..., columns], 0.0)
    mass, value = s.sum(-1), (s * m).sum(-1)
    value_mass = ((s + epsilon) * m * seen).sum(-1)
    n_seen = np.broadcast_to(seen.sum(-1), mass.shape)
    measured = {
        "mass": mass,
        "value_mass": value_mass,
        "value": value,
        "ratio": _over(value, mass),
        "mass_per_token": _over(mass, n_seen),
        "value_mass_per_token": _over(value_mass, n_seen),
    }
    return _rows(name, len(keys), n_seen, measured)


def _learned(scores: Scores) -> pd.DataFrame:
    """The learned sink: one more key whose value is 0 (kvprobe.theory), in the layers that have one."""
    nothing = np.zeros_like(scores.learned)
    measured = {name: nothing for name in COLUMNS[5:]} | {"mass": scores.learned, "mass_per_token": scores.learned}
    frame = _rows("learned_sink", 1, np.ones(nothing.shape, dtype=np.int64), measured)
    return frame[np.repeat((scores.learned > 0).any(1), nothing.shape[1])]


def _rows(name: str, n_tokens: int, n_seen: np.ndarray, measured: dict[str, Array]) -> pd.DataFrame:
    import pandas as pd

    layer, head = (grid.reshape(-1) for grid in np.indices(n_seen.shape))
    columns = {"layer": layer, "head": head, "bucket": name, "n_tokens": n_tokens, "n_seen": n_seen.reshape(-1)}
    return pd.DataFrame(columns | {key: values.reshape(-1) for key, values in measured.items()})[list(COLUMNS)]


def _over(above: Array, below: np.ndarray) -> Array:
    """above / below, NaN where below is 0."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
