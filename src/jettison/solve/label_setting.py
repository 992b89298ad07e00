"""The fastest path under a budget by labels: (bytes held, seconds so far) pairs that nothing else beats in both.

NOTE [ Labels and what thinning costs ]
At each position keep the labels (prefix, seconds; where something is offloaded also what is on its way and bytes of the
host) that no other label dominates (NOTE [ The step is a path ]), drop those whose lower bound (bound.py) is no better
than the best plan known, and extend them by every move. That is exact. Where more than `width` labels are left, the
list is thinned:

- with a `beam`, and wherever moves offload: keep those with the best bounds. The least bound of those that go is told:
  `dropped`. No plan that went with them is faster than that.
- otherwise: cut the range of seconds into `width` equal buckets and keep the shortest prefix of each. Whatever was
  dropped has a stand-in that holds no more and is slower by less than a bucket, so the result is within the sum of the
  bucket widths of the optimum (the scaling argument of Ibarra & Kim 1975 for knapsacks). The sum is reported as `loss`.

Under a host budget a label goes where what is left of it is not enough for any rest of the walk that fits. The floors
that say so may be rounded up (NOTE [ The step is a path ]); then what goes by them counts as dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

try:
    import numpy as np
except ImportError:  # torch comes without it
    np = None  # type: ignore[assignment]

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.moves import Move, Walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


LISTED = 2_048
"""Labels a position where there is no numpy."""
COMPARED = 8_192
"""Labels a position that are compared pair by pair, under a host budget; so many at a time as the next says."""
BLOCK = 256
STRONG = 1_024
"""Of those that nothing beats, each is compared with so many: those with the best bounds."""
CELLS = 24
"""Of what labels hold, from the least to the most, here and on the host."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """Moves from the first position to the end and what they cost, root included."""

    moves: tuple[Move, ...]
    picoseconds: int

    @classmethod
    def along(cls, walk: Walk, moves: tuple[Move, ...]) -> Path:
        """With what the moves of a walk cost."""
        waits = sum(after.waits(before.copying) for before, after in pairwise(moves))
        return cls(moves=moves, picoseconds=walk.root_picoseconds + waits + sum(m.picoseconds for m in moves))


@dataclass(frozen=True, kw_only=True)
class Search:
    """``path`` is None where nothing beats the limit.

    The optimum is at most ``loss`` picoseconds below the answer, or at least ``dropped``.
    """

    path: Path | None
    loss: int
    dropped: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Undominated labels at a position, by ``prefix`` (bytes) ascending; of one class ``picoseconds`` descends.

    ``sent`` is the class of what is on its way, ``host`` the bytes of the host so far.
    """

    prefix: Integers
    picoseconds: Integers
    sent: Integers
    host: Integers
    parent: Integers  # label at the position where ``move`` starts
    move: Integers  # index among the moves that arrive here

    def take(self, which: NDArray[np.bool_] | Integers) -> _Labels:
        """Some of them, in the order given."""
        return _Labels(
            prefix=self.prefix[which],
            picoseconds=self.picoseconds[which],
            sent=self.sent[which],
            host=self.host[which],
            parent=self.parent[which],
            move=self.move[which],
        )


def fastest_path(
    budgeted: BudgetedWalk, bound: Bound, *, width: int, below: int | None = None, beam: bool = False
) -> Search:
    """The fastest path of fewer than ``below`` picoseconds, see NOTE [ Labels and what thinning costs ]."""
    if np is None:
        from jettison.solve.label_lists import fastest_labels

        return fastest_labels(budgeted, bound, width=min(width, LISTED), below=below, beam=beam)
    walk = budgeted.walk
    arriving: list[list[Move]] = [[] for _ in range(walk.count + 1)]
    for moves in budgeted.moves:
        for m in moves:
            arriving[m.stop].append(m)
    zero = np.zeros(1, dtype=np.int64)
    start = _Labels(prefix=zero, picoseconds=zero + walk.root_picoseconds, sent=zero, host=zero, parent=zero, move=zero)
    labels = [start]
    loss, dropped = 0, float("inf")
    for r in range(1, walk.count + 1):
        here = _extend(budgeted, labels, arriving[r], bound, r, below)
        if not _plain(walk, r):
            here, gone = _affordable(here, budgeted, bound, r)
            here, crowded = _undominated(here, walk, bound, r, min(COMPARED, 8 * width) if beam else COMPARED)
            dropped = min(dropped, gone, crowded)
        if len(here.prefix) > width:
            if beam or walk.offloads:
                here, gone = _closest(here, bound, r, width)
                dropped = min(dropped, gone)
            else:
                here, bucket = _thin(here, width)
                loss += bucket - 1
        labels.append(here)
    path = _trace_back(labels, arriving) if len(labels[-1].prefix) else None
    return Search(path=path, loss=loss, dropped=dropped)


def _plain(walk: Walk, r: int) -> bool:
    """Are labels at a position told by what they hold and their seconds alone?"""
    return walk.host_budget_bytes is None and len(walk.sent[r]) == 1


@dataclass(frozen=True, kw_only=True)
class _Arriving:
    """Moves with one start that arrive at a position: one entry each, and the first one's number among all there.

    ``after`` is what the rest of the walk needs at least, ``sent`` the class of what they leave on its way.
    """

    start: int
    first: int
    need: Integers
    resident: Integers
    picoseconds: Integers
    host: Integers
    hides: Integers
    after: Integers
    sent: Integers

    @classmethod
    def of(cls, walk: Walk, moves: Sequence[Move], first: int) -> _Arriving:
        rows = [
            (m.need_bytes, m.resident_bytes, m.picoseconds, m.host_bytes, m.hides, *_arrival(walk, m)) for m in moves
        ]
        need, resident, picoseconds, host, hides, after, sent = np.array(rows, dtype=np.int64).T
        return cls(
            start=moves[0].start,
            first=first,
            need=need,
            resident=resident,
            picoseconds=picoseconds,
            host=host,
            hides=hides,
            after=after,
            sent=sent,
        )


def _arrival(walk: Walk, m: Move) -> tuple[int, int]:
    number = walk.arrives(m)
    return walk.floors[m.stop][number][0][0], number


def _by_start(walk: Walk, arriving: Sequence[Move]) -> list[_Arriving]:
    """In the order of the moves, which are sorted by where they start."""
    found, first = [], 0
    for _, group in groupby(arriving, lambda m: m.start):
        moves = list(group)
        found.append(_Arriving.of(walk, moves, first))
        first += len(moves)
    return found


def _extend(
    budgeted: BudgetedWalk, labels: list[_Labels], arriving: Sequence[Move], bound: Bound, r: int, below: int | None
) -> _Labels:
    """Every label that a move brings to position r, if the move fits, the rest of the walk can still fit and it may
    still end below the limit; of `_plain` ones those that no other dominates.

    Sorted by move, and then as their sources are; plain ones by prefix.
    """
    walk, budget = budgeted.walk, budgeted.budget_bytes
    parts: list[tuple[Integers, ...]] = []
    for moves in _by_start(walk, arriving):
        source = labels[moves.start]
        room = budget - moves.resident - moves.after
        if len(walk.sent[moves.start]) == 1:  # then nothing is on its way
            which, parent = np.nonzero(source.prefix <= np.minimum(room, budget - moves.need)[:, None])
            spent = source.picoseconds[parent] + moves.picoseconds[which]
        else:
            sizes, copying = (np.array(of[moves.start], dtype=np.int64) for of in (walk.sent, walk.copying))
            fits = source.prefix + sizes[source.sent] <= (budget - moves.need)[:, None]
            which, parent = np.nonzero(fits & (source.prefix <= room[:, None]))
            waits = np.maximum(0, copying[source.sent[parent]] - moves.hides[which])
            spent = source.picoseconds[parent] + (moves.picoseconds[which] + waits)
        prefix = source.prefix[parent] + moves.resident[which]
        if _plain(walk, r):
            parts.append((prefix, spent, parent, which + moves.first))
        else:
            host = source.host[parent] + moves.host[which]
            parts.append((prefix, spent, parent, which + moves.first, moves.sent[which], host))
    if not parts:
        return _Labels(**{f.name: np.zeros(0, dtype=np.int64) for f in fields(_Labels)})
    fresh = parts[0] if len(parts) == 1 else tuple(np.concatenate(each) for each in zip(*parts, strict=True))
    if not _plain(walk, r):
        prefix, spent, parent, which, sent, host = fresh
        every = _Labels(prefix=prefix, picoseconds=spent, sent=sent, host=host, parent=parent, move=which)
        return _promising(every, bound, r, below)
    prefix, spent, parent, which = fresh
    if below is not None:
        promising = spent + bound.held_price[r] * prefix + bound.rest[r][0] <= below - 1
        prefix, spent, parent, which = prefix[promising], spent[promising], parent[promising], which[promising]
    kept = _faster(prefix, spent)
    zeros = np.zeros(len(kept), dtype=np.int64)
    return _Labels(
        prefix=prefix[kept], picoseconds=spent[kept], sent=zeros, host=zeros, parent=parent[kept], move=which[kept]
    )


def _lower_bounds(labels: _Labels, bound: Bound, r: int) -> NDArray[np.float64]:
    """Picoseconds that no completion of a label goes below."""
    rest = bound.rest[r][0] if len(bound.rest[r]) == 1 else np.array(bound.rest[r])[labels.sent]
    found: NDArray[np.float64] = labels.picoseconds + bound.held_price[r] * labels.prefix + rest
    return found + bound.host_price * labels.host if bound.host_price else found


def _promising(labels: _Labels, bound: Bound, r: int, below: int | None) -> _Labels:
    """Those that may still end below the limit."""
    if below is None:
        return labels
    return labels.take(_lower_bounds(labels, bound, r) <= below - 1)


def _affordable(labels: _Labels, budgeted: BudgetedWalk, bound: Bound, r: int) -> tuple[_Labels, float]:
    """Those whose rest the host has room for, and the least bound of those that rounded floors leave out."""
    walk = budgeted.walk
    if walk.host_budget_bytes is None or not len(labels.prefix):
        return labels, float("inf")
    fits = np.zeros(len(labels.prefix), dtype=np.bool_)
    for number, floors in enumerate(walk.floors[r]):
        own = labels.sent == number
        budgets, taken = np.array(floors, dtype=np.int64).reshape(-1, 2).T
        which = np.searchsorted(budgets, budgeted.budget_bytes - labels.prefix[own], side="right") - 1
        left = walk.host_budget_bytes - labels.host[own]
        fits[own] = (which >= 0) & (taken[np.maximum(which, 0)] <= left) if len(taken) else False
    gone = _lower_bounds(labels.take(~fits), bound, r) if walk.floors_rounded else np.zeros(0)
    return labels.take(fits), float(gone.min(initial=np.inf))


def _undominated(labels: _Labels, walk: Walk, bound: Bound, r: int, most: int) -> tuple[_Labels, float]:
    """Sorted by prefix; each one faster than all before it with no more on its way and no more on the host.

    Under a host budget they are compared in pairs; of more than ``most`` some go before, and the least bound of them is
    told.
    """
    gone = float("inf")
    if walk.host_budget_bytes is not None:
        if len(labels.prefix) > most:
            labels, gone = _closest(labels, bound, r, most)
        order = np.lexsort((labels.host, labels.sent, labels.picoseconds, labels.prefix))
        ordered = labels.take(order)
        return ordered.take(~_beaten(ordered, _lower_bounds(ordered, bound, r))), gone
    if len(walk.sent[r]) == 1:
        return _front(labels), gone
    every = _undominated_by_class(labels, len(walk.sent[r]))
    return labels.take(every[np.argsort(labels.prefix[every], kind="stable")]), gone


def _undominated_by_class(labels: _Labels, classes: int) -> Integers:
    """Which ones, class by class: those that no label of their class or of one with less on its way dominates."""
    prefix = picoseconds = np.zeros(0, dtype=np.int64)  # of the fastest so far
    kept = [prefix]
    for number in range(classes):
        own = np.nonzero(labels.sent == number)[0]
        own = own[_faster(labels.prefix[own], labels.picoseconds[own])]
        if len(prefix):
            before = np.searchsorted(prefix, labels.prefix[own], side="right") - 1
            own = own[(before < 0) | (picoseconds[before] > labels.picoseconds[own])]
        if len(own):
            kept.append(own)
            prefix = np.concatenate([prefix, labels.prefix[own]])
            picoseconds = np.concatenate([picoseconds, labels.picoseconds[own]])
            fastest = _faster(prefix, picoseconds)
            prefix, picoseconds = prefix[fastest], picoseconds[fastest]
    return np.concatenate(kept)


def _front(labels: _Labels) -> _Labels:
    """By prefix and seconds alone."""
    return labels.take(_faster(labels.prefix, labels.picoseconds))


def _faster(prefix: Integers, picoseconds: Integers) -> Integers:
    """Those that are faster than all of no longer prefix, and of equal ones the first; sorted by prefix."""
    order = np.argsort(prefix, kind="stable")  # what comes in sorted runs is sorted quickly
    prefix, picoseconds = prefix[order], picoseconds[order]
    faster = np.ones(len(order), dtype=np.bool_)
    faster[1:] = picoseconds[1:] < np.minimum.accumulate(picoseconds)[:-1]
    order, prefix = order[faster], prefix[faster]
    last = np.ones(len(order), dtype=np.bool_)  # of equal prefixes, which are faster and faster now
    last[:-1] = prefix[1:] != prefix[:-1]
    kept: Integers = order[last]
    return kept


def _beaten(labels: _Labels, bounds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Of labels in lexicographic order, which another one before them beats or equals in everything.

    Of more than `STRONG` that nothing beats, only these are asked: then some that are beaten stay.
    """
    count = len(labels.prefix)
    beaten = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, BLOCK):
        own = np.arange(start, min(start + BLOCK, count))
        before = np.nonzero(~beaten[:start])[0]
        if len(before) > STRONG:
            before = before[np.argpartition(bounds[before], STRONG)[:STRONG]]
        others = np.concatenate([before, own])
        better = labels.picoseconds[others, None] <= labels.picoseconds[own]
        for field in (labels.sent, labels.host):
            better &= field[others, None] <= field[own]
        beaten[own] = (better & (others[:, None] < own)).any(axis=0)
    return beaten


def _closest(labels: _Labels, bound: Bound, r: int, width: int) -> tuple[_Labels, float]:
    """Those with the best bounds, and the least bound of the others.

    Where the host's bytes have a price, bounds of plans that take many and few of them are alike, and the best of each
    cell of what is held here and there come first.
    """
    bounds = _lower_bounds(labels, bound, r)
    order = np.argsort(bounds, kind="stable")
    if bound.host_price:
        order = order[np.argsort(_ranks(_cells(labels)[order]), kind="stable")]
    return labels.take(np.sort(order[:width])), float(bounds[order[width:]].min())


def _cells(labels: _Labels) -> Integers:
    """A grid over bytes on the device and on the host."""
    found = np.zeros(len(labels.prefix), dtype=np.int64)
    for sizes in (labels.host, labels.prefix):
        least = int(sizes.min())
        found = found * CELLS + (sizes - least) * CELLS // (int(sizes.max()) - least + 1)
    return found


def _ranks(cells: Integers) -> Integers:
    """How many before each one are of the same cell."""
    order = np.argsort(cells, kind="stable")
    sizes = np.unique(cells, return_counts=True)[1]
    ranks = np.empty(len(cells), dtype=np.int64)
    ranks[order] = np.arange(len(cells)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks


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
    label = int(np.argmin(labels[r].picoseconds))
    picoseconds = int(labels[r].picoseconds[label])
    moves = []
    while r:
        m = arriving[r][int(labels[r].move[label])]
        label = int(labels[r].parent[label])
        r = m.start
        moves.append(m)
    return Path(moves=tuple(reversed(moves)), picoseconds=picoseconds)
