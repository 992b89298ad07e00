"""Levels of a run, cut into intervals: calls of blocks, and what is around them.

A counter logs levels, marks and last references in order. A storage is watched if several intervals may refer to it:
what a call is given, returns, or leaves in its arguments. An interval has its levels as if no watched storage died in
it, and says where it drops its last reference; the storage dies with the last interval that does (`composed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GIVEN, RETURNED, STORED, HELD, VIEWED = range(5)
"""Roles of a call's tensors. `STORED` are left in its arguments; `HELD`, by others too, and `VIEWED` are gradients."""
Place = tuple[str, int, bool]
"""Interval of a step: phase, number of a block's call (-1: before all), and whether inside of it or around."""
Role = tuple[int, ...]
"""Relation of a tensor to a call, as `GIVEN`, and its position; in a step, the call's number comes first."""


class Mark(NamedTuple):
    """An interval begins."""

    place: Place
    live_bytes: int


class LastReference(NamedTuple):
    """The last reference to a watched storage is dropped; ``freed_bytes``: 0 if its bytes stay counted."""

    role: Role
    freed_bytes: int


Event = int | Mark | LastReference
"""Entry of a log; a number is a level, in bytes."""

Summed = frozenset[Role]
"""Gradients that are not a call's alone: (`GIVEN`, position, whether it is the first) of arguments to whose gradient
autograd adds others, and roles of its results' gradients."""


class IntervalLevels(NamedTuple):
    """An interval of a step as if no watched storage died in it: levels above its start, bytes that it leaves, and the
    level before which it drops its last reference to each of them.
    """

    levels: tuple[int, ...]
    left_bytes: int
    last_references: tuple[tuple[Role, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLevels:
    """A call that was run alone, so that nobody else refers to what it is given and returns. ``cached_bytes`` of what
    its forward leaves are in autocast's cache; ``stores``: it leaves tensors in its arguments, which outlive it.
    """

    forward: IntervalLevels
    backward: IntervalLevels
    watched_bytes: Mapping[Role, int]
    cached_bytes: int
    stores: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RootLevels:
    """A step of stubs that refer to nothing: its intervals, and the role of what each call is given and returns."""

    intervals: tuple[tuple[Place, IntervalLevels], ...]
    touched: Sequence[Mapping[Role, Role]]
    summed: Sequence[Summed]
    watched_bytes: Mapping[Role, int]


def intervals_of(log: Sequence[Event], live_bytes: int) -> list[tuple[Place, IntervalLevels]]:
    """Intervals of a log that ends with so many bytes."""
    found: list[tuple[Place, IntervalLevels]] = []
    levels: list[int] = []
    drops: list[tuple[Role, int]] = []
    mark, freed = Mark(("", -1, False), 0), 0
    for event in [*log, Mark(mark.place, live_bytes)]:
        if isinstance(event, Mark):
            left = event.live_bytes + freed - mark.live_bytes
            found.append((mark.place, IntervalLevels(tuple(levels), left, tuple(drops))))
            mark, freed, levels, drops = event, 0, [], []
        elif isinstance(event, LastReference):
            drops.append((event.role, len(levels)))
            freed += event.freed_bytes
        else:
            levels.append(event + freed - mark.live_bytes)
    return found[1:]  # what comes before the first mark is nobody's
