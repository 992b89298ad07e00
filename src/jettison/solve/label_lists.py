"""`label_setting.fastest_path` on Python's own lists, where numpy is not installed: the same labels, some times slower.

See NOTE [ Labels and what thinning costs ]. A label is (prefix, picoseconds, label at the move's start, move).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TypeAlias

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.moves import Move

Label: TypeAlias = tuple[int, int, int, int]


def fastest_labels(
    budgeted: BudgetedWalk, bound: Bound, *, width: int, below: int | None, beam: bool
) -> tuple[tuple[Move, ...] | None, int, int]:
    """Moves of the fastest path of fewer than ``below`` picoseconds, its picoseconds, and what thinning may lose."""
    count = budgeted.walk.count
    arriving: list[list[Move]] = [[] for _ in range(count + 1)]
    for moves in budgeted.moves:
        for m in moves:
            arriving[m.stop].append(m)
    labels: list[list[Label]] = [[(0, budgeted.walk.root_picoseconds, 0, 0)]]
    loss = 0
    for r in range(1, count + 1):
        here = _undominated(_extended(budgeted, labels, arriving[r], r))
        if below is not None:
            here = [label for label in here if _lower_bound(label, bound, r) <= below - 1]
        if len(here) > width:
            if beam:
                here = sorted(sorted(here, key=lambda label: _lower_bound(label, bound, r))[:width])
            else:
                here, lost = _thin(here, width)
                loss += lost
        labels.append(here)
    if not labels[-1]:
        return None, 0, loss
    at, r, path = len(labels[-1]) - 1, count, []
    while r:
        _, _, parent, which = labels[r][at]
        m = arriving[r][which]
        path.append(m)
        at, r = parent, m.start
    return tuple(reversed(path)), labels[-1][-1][1], loss


def _extended(budgeted: BudgetedWalk, labels: list[list[Label]], arriving: list[Move], r: int) -> list[Label]:
    """Every label that a move brings to position r, if the move fits and the rest of the walk can still fit."""
    found: list[Label] = []
    for which, m in enumerate(arriving):
        room = budgeted.budget_bytes - max(m.need_bytes, m.resident_bytes + budgeted.walk.floors[r])
        source = labels[m.start]
        fitting = bisect_right(source, room, key=lambda label: label[0])
        found += [
            (prefix + m.resident_bytes, picoseconds + m.picoseconds, parent, which)
            for parent, (prefix, picoseconds, _, _) in enumerate(source[:fitting])
        ]
    return found


def _undominated(labels: list[Label]) -> list[Label]:
    """Sorted by prefix; each one faster than all before it."""
    kept: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _lower_bound(label: Label, bound: Bound, r: int) -> float:
    return label[1] + bound.held_price[r] * label[0] + bound.rest[r]


def _thin(labels: list[Label], width: int) -> tuple[list[Label], int]:
    """The shortest prefix of each bucket of seconds, and by how much another may have been faster."""
    fastest, slowest = labels[-1][1], labels[0][1]
    bucket = (slowest - fastest) // width + 1
    kept: list[Label] = []
    last = None
    for label in labels:
        which = (label[1] - fastest) // bucket
        if which != last:
            kept.append(label)
        last = which
    return kept, bucket - 1
