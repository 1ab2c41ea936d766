"""Curves: what a task's score becomes as the cache shrinks, policy by policy.

``run`` answers generated items from caches that each policy has compressed to each size, and returns tables
(``answers``, ``rows``, ``pairs``) and a summary; the command ``kvprobe evict`` prints and stores them.
"""

from kvprobe.curves.answers import Answer, answer_item
from kvprobe.curves.settings import SETTINGS, Settings
from kvprobe.curves.summary import summarise
from kvprobe.curves.tables import Result, run, validate

__all__ = ["SETTINGS", "Answer", "Result", "Settings", "answer_item", "run", "summarise", "validate"]
