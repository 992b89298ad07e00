"""`label_setting.fastest_path` on Python's own lists, where numpy is not installed: the same labels, some times slower.

See NOTE [ Labels and what thinning costs ]. A label is (prefix, picoseconds, class of what is on its way, bytes of the
host, label at the move's start, move).
"""

from __future__ import annotations

from typing import TypeAlias

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.label_setting import Path, Search
from jettison.solve.moves import Move, Walk

Label: TypeAlias = tuple[int, int, int, int, int, int]


def fastest_labels(budgeted: BudgetedWalk, bound: Bound, *, width: int, below: int | None, beam: bool) -> Search:
    """The fastest path of fewer than ``below`` picoseconds."""
    walk = budgeted.walk
    arriving: list[list[Move]] = [[] for _ in range(walk.count + 1)]
    for moves in budgeted.moves:
        for m in moves:
            arriving[m.stop].append(m)
    labels: list[list[Label]] = [[(0, walk.root_picoseconds, 0, 0, 0, 0)]]
    loss, dropped = 0, float("inf")
    for r in range(1, walk.count + 1):
        here, gone = _affordable(_extended(budgeted, labels, arriving[r], r), budgeted, bound, r)
        dropped = min(dropped, gone)
        here = _undominated(here, walk, r)
        if below is not None:
            here = [label for label in here if _lower_bound(label, bound, r) <= below - 1]
        if len(here) > width:
            if beam or walk.offloads:
                ranked = sorted(here, key=lambda label: _lower_bound(label, bound, r))
                dropped = min(dropped, _lower_bound(ranked[width], bound, r))
                here = sorted(ranked[:width])
            else:
                here, lost = _thin(here, width)
                loss += lost
        labels.append(here)
    if not labels[-1]:
        return Search(path=None, loss=loss, dropped=dropped)
    return Search(path=_trace_back(labels, arriving), loss=loss, dropped=dropped)


def _trace_back(labels: list[list[Label]], arriving: list[list[Move]]) -> Path:
    """From the fastest label at the end to the start."""
    r, path = len(labels) - 1, []
    at = min(range(len(labels[r])), key=lambda i: labels[r][i][1])
    picoseconds = labels[r][at][1]
    while r:
        *_, parent, which = labels[r][at]
        m = arriving[r][which]
        path.append(m)
        at, r = parent, m.start
    return Path(moves=tuple(reversed(path)), picoseconds=picoseconds)


def _extended(budgeted: BudgetedWalk, labels: list[list[Label]], arriving: list[Move], r: int) -> list[Label]:
    """Every label that a move brings to position r, if the move fits and the rest of the walk can still fit."""
    walk, budget = budgeted.walk, budgeted.budget_bytes
    found: list[Label] = []
    for which, m in enumerate(arriving):
        number = walk.arrives(m)
        room = budget - m.resident_bytes - walk.floors[r][number][0][0]
        sizes, waits = walk.sent[m.start], [m.waits(copying) for copying in walk.copying[m.start]]
        found += [
            (prefix + m.resident_bytes, spent + m.picoseconds + waits[sent], number, host + m.host_bytes, parent, which)
            for parent, (prefix, spent, sent, host, _, _) in enumerate(labels[m.start])
            if prefix <= room and prefix + sizes[sent] + m.need_bytes <= budget
        ]
    return found


def _affordable(labels: list[Label], budgeted: BudgetedWalk, bound: Bound, r: int) -> tuple[list[Label], float]:
    """Those whose rest the host has room for, and the least bound of those that rounded floors leave out."""
    walk = budgeted.walk
    if walk.host_budget_bytes is None:
        return labels, float("inf")
    kept, gone = [], float("inf")
    for label in labels:
        prefix, _, sent, host, _, _ = label
        room, left = budgeted.budget_bytes - prefix, walk.host_budget_bytes - host
        if any(budget <= room and taken <= left for budget, taken in walk.floors[r][sent]):
            kept.append(label)
        elif walk.floors_rounded:
            gone = min(gone, _lower_bound(label, bound, r))
    return kept, gone


def _undominated(labels: list[Label], walk: Walk, r: int) -> list[Label]:
    """Sorted by prefix; each one faster than all before it with no more on its way and no more on the host."""
    kept: list[Label] = []
    limited = walk.host_budget_bytes is not None
    plain = len(walk.sent[r]) == 1 and not limited
    for label in sorted(labels, key=lambda label: label[:4]):
        rivals = kept[-1:] if plain else kept
        if not any(k[1] <= label[1] and k[2] <= label[2] and (not limited or k[3] <= label[3]) for k in rivals):
            kept.append(label)
    return kept


def _lower_bound(label: Label, bound: Bound, r: int) -> float:
    return label[1] + bound.held_price[r] * label[0] + bound.host_price * label[3] + bound.rest[r][label[2]]


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
