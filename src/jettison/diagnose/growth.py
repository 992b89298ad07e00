"""Tests of bytes between steps for growth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def never_falls(levels: Sequence[int]) -> bool:
    """Whether levels never fall and each third of the steps adds its part, as a leak now and then does."""
    if any(after < before for before, after in pairwise(levels)):
        return False
    last = len(levels) - 1
    thirds = [levels[round(part * last / 3)] for part in range(4)]
    return all(6 * (after - before) > thirds[-1] - thirds[0] for before, after in pairwise(thirds))


def lowest_rises(levels: Sequence[int]) -> bool:
    """Whether the lowest level rises from third to third; the garbage collector lowers others now and then."""
    each = len(levels) // 3
    lows = [min(levels[:each]), min(levels[each:-each]), min(levels[-each:])]
    return lows[0] < lows[1] < lows[2]
