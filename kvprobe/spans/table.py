"""Arrays over layer, head, query and span as one tidy table."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd


def tidy(
    layers: Sequence[int],
    queries: Sequence[int],
    starts: np.ndarray,
    stops: np.ndarray,
    columns: Mapping[str, np.ndarray],
) -> pd.DataFrame:
    """One row per layer × head × query × span, in that order, from columns ``[L, H, Q, P]``."""
    shape = next(iter(columns.values())).shape
    layer, head, query, span = (axis.ravel() for axis in np.indices(shape))
    return pd.DataFrame(
        {
            "layer": np.asarray(layers)[layer],
            "head": head,
            "query": np.asarray(queries)[query],
            "start": starts[span],
            "stop": stops[span],
            **{name: column.ravel() for name, column in columns.items()},
        }
    )
