"""Growth of bytes from step to step, to tell leaks from chance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from jettison.diagnose.facts import MemoryFacts

FIRST_STEPS: Final = 2
"""First steps, which allocate permanent state: the optimizer's, caches, compiled code."""
FEWEST_STEPS: Final = 4
"""Steps after the first ones that a report of growth needs."""
SHARE_OF_STEPS: Final = 0.6
"""Steps in which a line has to leak, one in the first third: prefetched batches live in the last few only."""
_LEVELS: Final = 5
_SHARE_GROWING: Final = 0.8
_LEAST_GROWTH: Final = 0.01
"""Least growth, as a share of the bytes between steps, over all steps after the first."""


def never_falls(levels: Sequence[int]) -> bool:
    """Whether levels never fall and grow in each third of the steps, as of an occasional leak."""
    if any(after < before for before, after in pairwise(levels)):
        return False
    last = len(levels) - 1
    thirds = [levels[round(part * last / 3)] for part in range(4)]
    return all(6 * (after - before) > thirds[-1] - thirds[0] for before, after in pairwise(thirds))


def lowest_rises(levels: Sequence[int]) -> bool:
    """Whether the lowest level grows from third to third, despite garbage collections."""
    each = len(levels) // 3
    lows = [min(levels[:each]), min(levels[each:-each]), min(levels[-each:])]
    return lows[0] < lows[1] < lows[2]


def grown_bytes(facts: MemoryFacts) -> int:
    """Return the growth of the bytes between steps after the first ones; 0: no steady growth."""
    left = sum(one.nbytes for one in facts.survivors)
    if left or facts.places_known:
        return left
    levels = [step.between_bytes for step in facts.steps[FIRST_STEPS:]]
    if len(levels) < _LEVELS:
        return 0
    rises = [after - before for before, after in pairwise(levels)]
    growing = sum(rise > 0 for rise in rises) / len(rises)
    total = levels[-1] - levels[0]
    steady = growing == 1
    if len(rises) >= 8:
        steady = never_falls(levels) or (growing >= _SHARE_GROWING and lowest_rises(levels))
    return total if steady and total >= _LEAST_GROWTH * levels[0] else 0
