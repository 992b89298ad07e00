"""The fastest path under a budget by labels: (bytes held, seconds so far) pairs that nothing else beats in both.

NOTE [ Labels and what thinning costs ]
At each position keep the pairs (prefix, seconds) that no other pair dominates (NOTE [ The step is a path ]), drop those
whose lower bound (bound.py) is no better than the best plan known, and extend them by every move. That is exact. Where
more than `width` labels are left, the list is thinned:

- `beam`: keep those with the best bounds. Fast and good, proves nothing.
- otherwise: cut the range of seconds into `width` equal buckets and keep the shortest prefix of each. Whatever was
  dropped has a stand-in that holds no more and is slower by less than a bucket, so the result is within the sum of the
  bucket widths of the optimum (the scaling argument of Ibarra & Kim 1975 for knapsacks). The sum is reported as `loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

try:
    import numpy as np
except ImportError:  # torch comes without it
    np = None  # type: ignore[assignment]

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.label_lists import fastest_labels
from jettison.solve.moves import Move

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


LISTED = 2_048
"""Labels a position where there is no numpy."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """Moves from the first position to the end and what they cost, root included."""

    moves: tuple[Move, ...]
    picoseconds: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """``path`` is None where nothing beats the limit. The optimum is at most ``loss`` picoseconds below the answer."""

    path: Path | None
    loss: int


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Undominated labels at a position: ``prefix`` (bytes) strictly ascending, ``picoseconds`` strictly descending."""

    prefix: Integers
    picoseconds: Integers
    parent: Integers  # label at the position where ``move`` starts
    move: Integers  # index among the moves that arrive here

    def take(self, which: NDArray[np.bool_] | Integers) -> _Labels:
        """Some of them, in the order given."""
        return _Labels(
            prefix=self.prefix[which],
            picoseconds=self.picoseconds[which],
            parent=self.parent[which],
            move=self.move[which],
        )


def fastest_path(
    budgeted: BudgetedWalk, bound: Bound, *, width: int, below: int | None = None, beam: bool = False
) -> Search:
    """The fastest path of fewer than ``below`` picoseconds, see NOTE [ Labels and what thinning costs ]."""
    if np is None:
        moves, picoseconds, lost = fastest_labels(budgeted, bound, width=min(width, LISTED), below=below, beam=beam)
        return Search(path=None if moves is None else Path(moves=moves, picoseconds=picoseconds), loss=lost)
    count = budgeted.walk.count
    arriving: list[list[Move]] = [[] for _ in range(count + 1)]
    for moves in budgeted.moves:
        for m in moves:
            arriving[m.stop].append(m)
    zero = np.zeros(1, dtype=np.int64)
    labels = [_Labels(prefix=zero, picoseconds=zero + budgeted.walk.root_picoseconds, parent=zero, move=zero)]
    loss = 0
    for r in range(1, count + 1):
        here = _undominated(_promising(_extend(budgeted, labels, arriving[r], r), bound, r, below))
        if len(here.prefix) > width:
            if beam:
                here = _closest(here, bound, r, width)
            else:
                here, bucket = _thin(here, width)
                loss += bucket - 1
        labels.append(here)
    if not len(labels[-1].prefix):
        return Search(path=None, loss=loss)
    return Search(path=_trace_back(labels, arriving), loss=loss)


def _extend(budgeted: BudgetedWalk, labels: list[_Labels], arriving: list[Move], r: int) -> _Labels:
    """Every label that a move brings to position r, if the move fits and the rest of the walk can still fit."""
    parts = []
    for i, m in enumerate(arriving):
        source = labels[m.start]
        room = budgeted.budget_bytes - max(m.need_bytes, m.resident_bytes + budgeted.walk.floors[r])
        fitting = int(np.searchsorted(source.prefix, room, side="right"))
        if fitting:
            parts.append((source.prefix[:fitting] + m.resident_bytes, source.picoseconds[:fitting] + m.picoseconds, i))
    sizes = [len(prefix) for prefix, _, _ in parts]
    none = [np.zeros(0, dtype=np.int64)]
    return _Labels(
        prefix=np.concatenate([p for p, _, _ in parts] or none),
        picoseconds=np.concatenate([s for _, s, _ in parts] or none),
        parent=np.concatenate([np.arange(n, dtype=np.int64) for n in sizes] or none),
        move=np.repeat(np.array([i for _, _, i in parts], dtype=np.int64), sizes),
    )


def _lower_bounds(labels: _Labels, bound: Bound, r: int) -> NDArray[np.float64]:
    """Picoseconds that no completion of a label goes below."""
    return labels.picoseconds + bound.held_price[r] * labels.prefix + bound.rest[r]


def _promising(labels: _Labels, bound: Bound, r: int, below: int | None) -> _Labels:
    """Those that may still end below the limit."""
    if below is None:
        return labels
    return labels.take(_lower_bounds(labels, bound, r) <= below - 1)


def _undominated(labels: _Labels) -> _Labels:
    """Sorted by prefix; each one faster than all before it."""
    ordered = labels.take(np.lexsort((labels.picoseconds, labels.prefix)))
    best_before = np.minimum.accumulate(ordered.picoseconds)[:-1]
    faster = np.ones(len(ordered.prefix), dtype=np.bool_)
    faster[1:] = ordered.picoseconds[1:] < best_before
    return ordered.take(faster)


def _closest(labels: _Labels, bound: Bound, r: int, width: int) -> _Labels:
    order = np.argsort(_lower_bounds(labels, bound, r), kind="stable")[:width]
    return labels.take(np.sort(order))


def _thin(labels: _Labels, width: int) -> tuple[_Labels, int]:
    """The shortest prefix of each bucket of seconds, and the buckets' width in picoseconds."""
    fastest, slowest = int(labels.picoseconds[-1]), int(labels.picoseconds[0])
    bucket = (slowest - fastest) // width + 1
    buckets = (labels.picoseconds - fastest) // bucket
    first = np.ones(len(buckets), dtype=np.bool_)
    first[1:] = buckets[1:] != buckets[:-1]
    return labels.take(first), bucket


def _trace_back(labels: list[_Labels], arriving: list[list[Move]]) -> Path:
    """From the fastest label at the end to the start."""
    r = len(labels) - 1
    label = len(labels[r].prefix) - 1
    picoseconds = int(labels[r].picoseconds[label])
    moves = []
    while r:
        m = arriving[r][int(labels[r].move[label])]
        label = int(labels[r].parent[label])
        r = m.start
        moves.append(m)
    return Path(moves=tuple(reversed(moves)), picoseconds=picoseconds)
