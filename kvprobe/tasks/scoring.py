"""RULER's two scores for an answer, from its text alone.

``string_match_all`` is the fraction of the references that the text contains; ``string_match_part`` is 1 if it
contains any. Both ignore case. RULER reports the mean over items × 100; here a score is one item's, in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

from kvprobe.errors import TaskError


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Fraction of the references found in the prediction.

    Parameters
    ----------
    prediction
        What the model wrote.
    references
        The values asked for, at least one.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    TaskError
        If there are no references, or they are a single string.

    Examples
    --------
    >>> string_match_all("They are 12 and 34.", ["12", "56"])
    0.5
    """
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction contains any of the references, else 0.0 (parameters and errors as above)."""
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if isinstance(references, str) or not references or not all(references):
        raise TaskError(f"references are {references!r}, must be a list of one or more non-empty strings")
    text = prediction.lower()
    return [reference.lower() in text for reference in references]
