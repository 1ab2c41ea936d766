"""Parts: what an unfinished run has already computed, one file an item, so that a run that was ended goes on.

An experiment gets ``keep`` and wraps whatever is costly and stands alone:

>>> from kvprobe.parts import afresh
>>> [afresh(f"item {index}", lambda index=index: index**2) for index in range(3)]     # keeps nothing
[0, 1, 4]

With :class:`Parts` in place of ``afresh`` every result is written to a file first, and read from there the next time.
"""

from kvprobe.parts.codec import Damaged, Unstorable, dumps, loads
from kvprobe.parts.files import mark, replacing
from kvprobe.parts.store import Keep, Parts, afresh, under
from kvprobe.parts.unfinished import HIDDEN, Unfinished

__all__ = [
    "HIDDEN",
    "Damaged",
    "Keep",
    "Parts",
    "Unfinished",
    "Unstorable",
    "afresh",
    "dumps",
    "loads",
    "mark",
    "replacing",
    "under",
]
