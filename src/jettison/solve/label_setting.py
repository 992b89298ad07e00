"""The fastest path under a budget by labels: undominated pairs of (bytes held, seconds so far).

NOTE [ Labels and what thinning costs ]
At each position keep the labels (prefix, seconds; with offloading also bytes in flight and bytes of the host) that no
other label dominates (NOTE [ The step is a path ]), drop those whose lower bound (bound.py) is no better than the best
known plan, and extend the rest by every move. That is exact. More than `width` labels are thinned:

- with a `beam`, and wherever moves offload: keep those with the best bounds, and report the least bound of the rest as
  `dropped`. No plan through a dropped label is faster than that.
- otherwise: cut the range of seconds into `width` equal buckets and keep the shortest prefix of each. A dropped label
  has a stand-in that holds no more and is slower by less than a bucket, so the result is within the sum of the bucket
  widths of the optimum (the scaling argument of Ibarra & Kim 1975 for knapsacks). The sum is reported as `loss`.

Under a host budget a label is dropped if no rest of the walk fits into the host bytes that it leaves. The floors for
that test may be rounded up (NOTE [ The step is a path ]); labels that only a rounded floor rules out count as dropped.

Labels are columns of an array. Without numpy they are tuples of the same six numbers, several times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

try:
    import numpy as np
except ImportError:  # optional for torch
    np = None  # type: ignore[assignment]

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.shortest_path import Path, WalkMove

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]
    Flags: TypeAlias = NDArray[np.bool_]

PREFIX, SPENT, SENT, HOST, PARENT, MOVE = range(6)
"""Fields of a label: bytes held, picoseconds so far, class of bytes in flight, bytes of the host; its label at the
start of the last move, and that move's number among the arriving ones."""
LISTED = 2_048
"""Most labels a position without numpy."""
COMPARED = 8_192
"""Most labels a position that are compared pair by pair, under a host budget, in blocks of `BLOCK`."""
BLOCK = 256
STRONG = 1_024
"""Most undominated labels that others are compared with: those with the best bounds."""
CELLS = 24
"""Cells along each of device bytes and host bytes, from least to most, that diversify a beam."""
INFINITE = float("inf")


@dataclass(frozen=True, kw_only=True)
class Search:
    """Result; ``path``: None if nothing beats the limit. An optimum is at most ``loss`` ps below, or >= ``dropped``."""

    path: Path | None
    loss: int
    dropped: float = INFINITE


def fastest_path(
    budgeted: BudgetedWalk, bound: Bound, *, width: int, below: int | None = None, beam: bool = False
) -> Search:
    """The fastest path of fewer than ``below`` picoseconds, see NOTE [ Labels and what thinning costs ]."""
    walk = budgeted.walk
    arriving: list[list[WalkMove]] = [[] for _ in range(walk.count + 1)]
    for m in (m for moves in budgeted.moves for m in moves):
        arriving[m.stop].append(m)
    steps: Any = _Lists(budgeted, bound)
    if np is None:
        width = min(width, LISTED)
    else:
        steps = _Arrays(budgeted, bound)
    most = min(COMPARED, 8 * width) if beam else COMPARED
    labels: list[Any] = [steps.start]
    loss, dropped = 0, INFINITE
    for r in range(1, walk.count + 1):
        kept, least = steps.undominated(steps.extended(labels, arriving[r], r, below), r, most)
        dropped = min(dropped, least)
        if steps.count(kept) > width and (beam or walk.offloads):
            kept, least = steps.closest(kept, r, width)
            dropped = min(dropped, least)
        elif steps.count(kept) > width:
            kept, lost = steps.thin(kept, width)
            loss += lost
        labels.append(kept)
    if not steps.count(labels[-1]):
        return Search(path=None, loss=loss, dropped=dropped)
    return Search(path=_trace_back(steps, labels, arriving), loss=loss, dropped=dropped)


def _trace_back(steps: Any, labels: list[Any], arriving: list[list[WalkMove]]) -> Path:
    at = steps.fastest(labels[-1])
    picoseconds, r, moves = steps.label(labels[-1], at)[SPENT], len(labels) - 1, []
    while r:
        *_, at, which = steps.label(labels[r], at)
        moves.append(arriving[r][which])
        r = moves[-1].start
    return Path(moves=tuple(reversed(moves)), picoseconds=picoseconds)


# labels as columns ----------------------------------------------------------------------------------------------------


class _Arrays:
    """Labels as columns of an array, sorted by prefix; within a class seconds descend."""

    def __init__(self, budgeted: BudgetedWalk, bound: Bound) -> None:
        self.budgeted, self.walk, self.bound = budgeted, budgeted.walk, bound
        self.start = np.array([[0], [self.walk.root_picoseconds], [0], [0], [0], [0]], dtype=np.int64)

    def count(self, labels: Integers) -> int:
        return labels.shape[1]

    def label(self, labels: Integers, at: int) -> tuple[int, ...]:
        return tuple(labels[:, at].tolist())

    def fastest(self, labels: Integers) -> int:
        return int(labels[SPENT].argmin())

    def plain(self, r: int) -> bool:
        """Whether labels at a position only differ in bytes held and seconds."""
        return self.walk.host_budget_bytes is None and len(self.walk.sent[r]) == 1

    def extended(self, labels: list[Integers], arriving: Sequence[WalkMove], r: int, below: int | None) -> Integers:
        """Extend labels by every move to position r that fits, whose rest can still fit, and that may still end below
        the limit; sorted by move, and then in the order of their sources.
        """
        parts, first = [], 0
        for start, group in groupby(arriving, lambda m: m.start):  # sorted by start
            moves = list(group)
            parts.append(self._brought(labels[start], moves, start, first, plain=self.plain(r)))
            first += len(moves)
        if not parts:
            return self.start[:, :0]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return found if below is None else found[:, self._bounds(found, r) <= below - 1]

    def _brought(self, source: Integers, moves: Sequence[WalkMove], start: int, first: int, *, plain: bool) -> Integers:
        walk, budget = self.walk, self.budgeted.budget_bytes
        rows = []
        for m in moves:
            number = walk.arrives(m)
            after = m.resident_bytes + walk.floors[m.stop][number][0][0]  # least bytes that the rest of the walk needs
            rows.append((m.need_bytes, m.resident_bytes, m.picoseconds, m.host_bytes, m.hides, after, number))
        need, resident, picoseconds, host, hides, after, sent = np.array(rows, dtype=np.int64).T
        prefix, room = source[PREFIX], budget - after
        if len(walk.sent[start]) == 1:  # then nothing is in flight
            which, parent = np.nonzero(prefix <= np.minimum(room, budget - need)[:, None])
            spent = source[SPENT, parent] + picoseconds[which]
        else:
            sizes, copying = (np.array(of[start], dtype=np.int64) for of in (walk.sent, walk.copying))
            fits = prefix + sizes[source[SENT]] <= (budget - need)[:, None]
            which, parent = np.nonzero(fits & (prefix <= room[:, None]))
            waits = np.maximum(0, copying[source[SENT, parent]] - hides[which])
            spent = source[SPENT, parent] + (picoseconds[which] + waits)
        found = np.zeros((6, len(which)), dtype=np.int64)
        found[PREFIX], found[SPENT] = prefix[parent] + resident[which], spent
        found[PARENT], found[MOVE] = parent, which + first
        if not plain:
            found[SENT], found[HOST] = sent[which], source[HOST, parent] + host[which]
        return found

    def _bounds(self, labels: Integers, r: int) -> NDArray[np.float64]:
        """Lower bound in picoseconds on completions of each label."""
        rest = self.bound.rest[r][0] if len(self.bound.rest[r]) == 1 else np.array(self.bound.rest[r])[labels[SENT]]
        found: NDArray[np.float64] = labels[SPENT] + self.bound.held_price[r] * labels[PREFIX] + rest
        return found + self.bound.host_price * labels[HOST] if self.bound.host_price else found

    def undominated(self, labels: Integers, r: int, most: int) -> tuple[Integers, float]:
        """Undominated labels by prefix: each is faster than all before it with no more in flight or on the host.

        Under a host budget they are compared in pairs; beyond ``most`` some are dropped first. Returns the least bound
        of these and of labels that only rounded floors rule out.
        """
        if self.walk.host_budget_bytes is None:
            if len(self.walk.sent[r]) == 1:
                return labels[:, _faster(labels[PREFIX], labels[SPENT])], INFINITE
            every = self._by_class(labels, len(self.walk.sent[r]))
            return labels[:, every[np.argsort(labels[PREFIX, every], kind="stable")]], INFINITE
        labels, dropped = self._affordable(labels, self.walk.host_budget_bytes, r)
        if labels.shape[1] > most:
            labels, crowded = self.closest(labels, r, most)
            dropped = min(dropped, crowded)
        labels = labels[:, np.lexsort((labels[HOST], labels[SENT], labels[SPENT], labels[PREFIX]))]
        return labels[:, ~_beaten(labels, self._bounds(labels, r))], dropped

    def _affordable(self, labels: Integers, host_budget_bytes: int, r: int) -> tuple[Integers, float]:
        """Labels whose rest fits the host, and the least bound of those that only rounded floors rule out."""
        fits = np.zeros(labels.shape[1], dtype=np.bool_)
        for number, floors in enumerate(self.walk.floors[r] if len(fits) else ()):
            own = labels[SENT] == number
            budgets, taken = np.array(floors, dtype=np.int64).reshape(-1, 2).T
            which = np.searchsorted(budgets, self.budgeted.budget_bytes - labels[PREFIX, own], side="right") - 1
            left = host_budget_bytes - labels[HOST, own]
            fits[own] = (which >= 0) & (taken[np.maximum(which, 0)] <= left) if len(taken) else False
        dropped = self._bounds(labels[:, ~fits], r).min(initial=np.inf) if self.walk.floors_rounded else INFINITE
        return labels[:, fits], float(dropped)

    def _by_class(self, labels: Integers, classes: int) -> Integers:
        """Indices, class by class, of labels not dominated by one of their class or with less in flight."""
        front = kept = np.zeros(0, dtype=np.int64)  # the fastest so far
        for number in range(classes):
            own = np.nonzero(labels[SENT] == number)[0]
            own = own[_faster(labels[PREFIX, own], labels[SPENT, own])]
            if len(front):
                before = np.searchsorted(labels[PREFIX, front], labels[PREFIX, own], side="right") - 1
                own = own[(before < 0) | (labels[SPENT, front[before]] > labels[SPENT, own])]
            if len(own):
                kept, both = np.concatenate([kept, own]), np.concatenate([front, own])
                front = both[_faster(labels[PREFIX, both], labels[SPENT, both])]
        return kept

    def closest(self, labels: Integers, r: int, width: int) -> tuple[Integers, float]:
        """Labels with the best bounds, and the least bound of the others.

        If the host's bytes have a price, bounds of plans with many and with few of them are equal, so the best label of
        each cell of device and host bytes comes first.
        """
        bounds = self._bounds(labels, r)
        order = np.argsort(bounds, kind="stable")
        if self.bound.host_price:
            cells = np.zeros(len(order), dtype=np.int64)
            for sizes in (labels[HOST], labels[PREFIX]):
                least = int(sizes.min())
                cells = cells * CELLS + (sizes - least) * CELLS // (int(sizes.max()) - least + 1)
            order = order[np.argsort(_ranks(cells[order]), kind="stable")]
        return labels[:, np.sort(order[:width])], float(bounds[order[width:]].min())

    def thin(self, labels: Integers, width: int) -> tuple[Integers, int]:
        """The shortest prefix of each bucket of seconds, and by how much a dropped label may have been faster."""
        fastest, slowest = int(labels[SPENT, -1]), int(labels[SPENT, 0])
        bucket = (slowest - fastest) // width + 1
        buckets = (labels[SPENT] - fastest) // bucket
        first = np.ones(len(buckets), dtype=np.bool_)
        first[1:] = buckets[1:] != buckets[:-1]
        return labels[:, first], bucket - 1


def _faster(prefix: Integers, picoseconds: Integers) -> Integers:
    """Indices of labels faster than all with no longer prefix, the first of equal ones; sorted by prefix."""
    order = np.argsort(prefix, kind="stable")  # stable sort is fast on sorted runs
    prefix, picoseconds = prefix[order], picoseconds[order]
    faster = np.ones(len(order), dtype=np.bool_)
    faster[1:] = picoseconds[1:] < np.minimum.accumulate(picoseconds)[:-1]
    order, prefix = order[faster], prefix[faster]
    last = np.ones(len(order), dtype=np.bool_)  # the last of equal prefixes is the fastest
    last[:-1] = prefix[1:] != prefix[:-1]
    return order[last]


def _beaten(labels: Integers, bounds: NDArray[np.float64]) -> Flags:
    """Mark labels (in lexicographic order) that an earlier one dominates, of `STRONG` undominated ones: some stay."""
    count = labels.shape[1]
    beaten = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, BLOCK):
        own = np.arange(start, min(start + BLOCK, count))
        before = np.nonzero(~beaten[:start])[0]
        if len(before) > STRONG:
            before = before[np.argpartition(bounds[before], STRONG)[:STRONG]]
        others = np.concatenate([before, own])
        better = others[:, None] < own
        for figures in labels[[SPENT, SENT, HOST]]:
            better &= figures[others, None] <= figures[own]
        beaten[own] = better.any(axis=0)
    return beaten


def _ranks(cells: Integers) -> Integers:
    """Rank of each element within its cell."""
    order = np.argsort(cells, kind="stable")
    sizes = np.unique(cells, return_counts=True)[1]
    ranks = np.empty(len(cells), dtype=np.int64)
    ranks[order] = np.arange(len(cells)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks


# labels as tuples -----------------------------------------------------------------------------------------------------


_Tuples = list[tuple[int, ...]]


class _Lists:
    """`_Arrays` without numpy: labels are tuples."""

    def __init__(self, budgeted: BudgetedWalk, bound: Bound) -> None:
        self.budgeted, self.walk, self.bound = budgeted, budgeted.walk, bound
        self.start: _Tuples = [(0, self.walk.root_picoseconds, 0, 0, 0, 0)]

    def count(self, labels: _Tuples) -> int:
        return len(labels)

    def label(self, labels: _Tuples, at: int) -> tuple[int, ...]:
        return labels[at]

    def fastest(self, labels: _Tuples) -> int:
        return min(range(len(labels)), key=lambda at: labels[at][SPENT])

    def extended(self, labels: list[_Tuples], arriving: Sequence[WalkMove], r: int, below: int | None) -> _Tuples:
        walk, budget = self.walk, self.budgeted.budget_bytes
        found: _Tuples = []
        for which, m in enumerate(arriving):
            number = walk.arrives(m)
            room = budget - m.resident_bytes - walk.floors[r][number][0][0]
            sizes, waits = walk.sent[m.start], [m.waits(copying) for copying in walk.copying[m.start]]
            for parent, (prefix, spent, sent, host, _, _) in enumerate(labels[m.start]):
                if prefix <= room and prefix + sizes[sent] + m.need_bytes <= budget:
                    spent += m.picoseconds + waits[sent]
                    found.append((prefix + m.resident_bytes, spent, number, host + m.host_bytes, parent, which))
        return found if below is None else [each for each in found if self._bound(each, r) <= below - 1]

    def _bound(self, label: tuple[int, ...], r: int) -> float:
        prefix, spent, sent, host, _, _ = label
        held = self.bound.held_price[r] * prefix + self.bound.host_price * host
        return spent + held + self.bound.rest[r][sent]

    def undominated(self, labels: _Tuples, r: int, _most: int) -> tuple[_Tuples, float]:
        dropped, limit = INFINITE, self.walk.host_budget_bytes
        if limit is not None:
            budget, floors = self.budgeted.budget_bytes, self.walk.floors[r]
            fits = [
                any(least <= budget - k[PREFIX] and taken <= limit - k[HOST] for least, taken in floors[k[SENT]])
                for k in labels
            ]
            if self.walk.floors_rounded:
                dropped = min(
                    (self._bound(k, r) for k, stays in zip(labels, fits, strict=True) if not stays), default=dropped
                )
            labels = [label for label, stays in zip(labels, fits, strict=True) if stays]
        plain, kept = len(self.walk.sent[r]) == 1 and limit is None, list[tuple[int, ...]]()
        for label in sorted(labels, key=lambda label: label[:4]):
            rivals = kept[-1:] if plain else kept
            if not any(
                k[SPENT] <= label[SPENT] and k[SENT] <= label[SENT] and (limit is None or k[HOST] <= label[HOST])
                for k in rivals
            ):
                kept.append(label)
        return kept, dropped

    def closest(self, labels: _Tuples, r: int, width: int) -> tuple[_Tuples, float]:
        ranked = sorted(labels, key=lambda label: self._bound(label, r))
        return sorted(ranked[:width]), self._bound(ranked[width], r)

    def thin(self, labels: _Tuples, width: int) -> tuple[_Tuples, int]:
        fastest = labels[-1][SPENT]
        bucket = (labels[0][SPENT] - fastest) // width + 1
        by_bucket = groupby(labels, lambda label: (label[SPENT] - fastest) // bucket)
        return [next(alike) for _, alike in by_bucket], bucket - 1
