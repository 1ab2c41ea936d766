"""How many haystack units fit a token budget, from few tokenisations."""

from __future__ import annotations

from collections.abc import Callable

#: Units tried one by one below one that works.
NEARBY = 48


def largest(count: Callable[[int], int], budget: int, low: int) -> int:
    """A number of units that fits where one more would not: ``count(n) <= budget < count(n + 1)``.

    A bracket is opened upwards and closed by interpolation, with a bisection step every third time; counts are nearly
    linear in ``n``, so that takes five to eight calls.

    Parameters
    ----------
    count
        Tokens of an item with ``n`` units.
    budget
        Tokens allowed.
    low
        Units that are known to fit: ``count(low) <= budget``.
    """
    at, high, step = count(low), low, 16
    below, above = at, at
    while above <= budget:
        low, below = high, above
        high = low + step
        above = count(high)
        rate = max((above - below) / step, 0.1)
        step = max(int((budget - above) / rate * 1.02), 0) + 16
    turn = 0
    while high - low > 1:
        share = (budget - below) / (above - below) if turn % 3 != 2 else 0.5
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        found = count(middle)
        if found <= budget:
            low, below = middle, found
        else:
            high, above = middle, found
        turn += 1
    return low


def smallest(works: Callable[[int], bool], low: int, limit: int) -> int | None:
    """The first number of units from ``low`` on that works; None if none up to ``limit`` does.

    Doubling and bisection find one that works next to one that does not. What works is not quite monotone (needles move
    as the haystack grows), so smaller numbers are then tried one by one, until :data:`NEARBY` in a row do not work.
    """
    start, high = low, low
    while not works(high):
        low, high = high + 1, 2 * high
        if high > limit:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    below = high - 1
    while below >= max(start, high - NEARBY):
        high = below if works(below) else high
        below -= 1
    return high
