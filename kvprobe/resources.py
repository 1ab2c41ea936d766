"""Where the shipped data files lie: one function for a wheel install and for an editable one.

A wheel carries the files as ``kvprobe/data``; in a checkout (editable install) they are ``<repository>/data``.
"""

from __future__ import annotations

from pathlib import Path

from kvprobe.errors import DataError

PACKAGE = Path(__file__).resolve().parent


def path(*parts: str) -> Path:
    """Path of a shipped data file or folder.

    Parameters
    ----------
    *parts
        Path below the data folder, for instance ``path("tasks", "decoys.txt")``; none for the folder itself.

    Returns
    -------
    Path
        An existing path: the wheel's copy where there is one, else the checkout's.

    Raises
    ------
    DataError
        If neither place has it; the message names both.
    """
    places = [root.joinpath(*parts) for root in (PACKAGE / "data", PACKAGE.parent / "data")]
    for place in places:
        if place.exists():
            return place
    raise DataError(f"data file {'/'.join(parts) or 'data'!r} is missing: looked for {places[0]} and {places[1]}")
