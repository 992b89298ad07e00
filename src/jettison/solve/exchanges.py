"""Plans under a host budget: around the vertex that the linear relaxation ends at, and made better by exchanges.

Under a host budget labels are many, and what is left of them misses plans in which one region gives bytes of the device
or of the host to another. Nothing is proven here.

NOTE [ Rounding ]
A vertex takes one move in all regions but about as many as there are budgets that bind: two or three of a hundred. In
these regions moves are tried together, all of each as long as they are few. The promising of these plans, whether they
fit or not, are mended and improved, among moves that a better plan may take (`Fixing`). Promising is what costs little
with what it lacks paid at the bound's prices.

NOTE [ Exchanges ]
Given a plan that fits, each region is asked for its best change, alone or together with a change of a later one that is
not its neighbour, that fits both budgets and saves seconds; until none does. A plan that breaks a budget is mended
first, by the cheapest of all such changes after which it fits. With s_r the room that is left at position r (NOTE [ The
step is a path ] in `walk`), a change at i of the bytes that stay by d, of the need by e and of what is sent by f fits
where s_i >= e, s_{i+1} >= d + f, and s_q >= d for all q behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from jettison.solve.bound import Bound, BudgetedWalk, Fixing
from jettison.solve.walk import Path, WalkMove

try:
    import numpy as np
except ImportError:  # torch comes without it; nothing is rounded or exchanged then
    np = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jettison.solve.bound import Floats

    Integers = NDArray[np.int64]

TOGETHER = 600
"""Plans, at most, that the regions between moves give when more than the vertex's own moves are tried."""
SPLIT = 6
"""Regions between moves that are looked at, those that are most so."""
TRIED = 6
PATIENCE = 2
"""Plans that are mended, and so many without a better one end it."""
WHOLE = 1e-7
SWEEPS = 12
"""Over all regions, at most."""
_AMPLE = 1 << 60


def rounded(fixing: Fixing, bound: Bound, shares: Sequence[float] | Floats) -> Iterator[Path]:
    """Paths that fit, each better than those before; none with segments, or where the relaxation was not solved."""
    budgeted, best, waited = fixing.budgeted, None, 0
    if np is None:
        return
    if not len(shares) or any(m.segment for moves in budgeted.moves for m in moves):
        return
    for start in _starts(budgeted, bound, np.asarray(shares)):
        moves = mended(fixing.below(best), start)
        path = None if moves is None else Path.along(budgeted.walk, moves)
        if path is not None and (best is None or path.picoseconds < best):
            yield path
            best, waited = path.picoseconds, 0
        elif best is not None:
            waited += 1
        if waited == PATIENCE:
            break


def _starts(budgeted: BudgetedWalk, bound: Bound, shares: Floats) -> Iterator[tuple[WalkMove, ...]]:
    """The promising plans around the vertex, most so first; alike ones once."""
    by_region = np.split(shares, np.cumsum([len(moves) for moves in budgeted.moves])[:-1])
    split = sorted((r for r, each in enumerate(by_region) if each.max() < 1 - WHOLE), key=lambda r: by_region[r].max())
    ways = [[int(each.argmax())] for each in by_region]
    for r in split[:SPLIT]:
        ways[r] = [int(at) for at in np.nonzero(by_region[r] > WHOLE)[0]]
    for r in split[:SPLIT]:
        number = int(np.prod([len(each) for each in ways])) // len(ways[r]) * len(budgeted.moves[r])
        ways[r] = list(range(len(budgeted.moves[r]))) if number <= TOGETHER else ways[r]
    plans = [tuple(moves[at] for moves, at in zip(budgeted.moves, each, strict=True)) for each in product(*ways)]
    known = set()
    for at, alike in _by_promise(budgeted, bound, plans):
        if alike not in known:
            known.add(alike)
            yield plans[at]
        if len(known) == TRIED:
            return


def _by_promise(
    budgeted: BudgetedWalk, bound: Bound, plans: Sequence[Sequence[WalkMove]]
) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Numbers of plans, and what they take and lack of each budget."""
    walk = budgeted.walk
    rows = [
        [(m.resident_bytes, m.need_bytes, m.sent_bytes, m.host_bytes, m.picoseconds, m.copying, m.hides) for m in plan]
        for plan in plans
    ]
    resident, need, sent, host, own, copying, hides = np.array(rows, dtype=np.int64).transpose(2, 0, 1)
    held = np.cumsum(resident, axis=1)
    level = held - resident + need
    level[:, 1:] += sent[:, :-1]
    over = np.maximum(level.max(axis=1), held[:, -1] + walk.loss_need_bytes) - budgeted.budget_bytes
    too_many = host.sum(axis=1) - (walk.host_budget_bytes or 0)
    spent = own.sum(axis=1) + np.maximum(0, copying[:, :-1] - hides[:, 1:]).sum(axis=1)
    paid = spent + bound.held_price[0] * np.maximum(over, 0) + bound.host_price * np.maximum(too_many, 0)
    for at in np.argsort(paid, kind="stable"):
        yield int(at), (int(spent[at]), int(over[at]), int(too_many[at]))


def exchanged(budgeted: BudgetedWalk, path: Sequence[WalkMove]) -> tuple[WalkMove, ...]:
    """The moves of a path that fits both budgets, or better ones. Paths with segments come back as they are."""
    if np is None:
        return tuple(path)
    if any(m.segment for m in path):
        return tuple(path)
    alternatives = _Alternatives.of(budgeted, path)
    alternatives.sweep()
    return alternatives.path


def mended(budgeted: BudgetedWalk, path: Sequence[WalkMove]) -> tuple[WalkMove, ...] | None:
    """The same of a path without segments that may break budgets; None where no exchange makes it fit."""
    alternatives = _Alternatives.of(budgeted, path)
    if not alternatives.fits and not alternatives.mend():
        return None
    alternatives.sweep()
    return alternatives.path


class _Changes(NamedTuple):
    """The room that there is, and what each alternative would change in the place of what its region does now."""

    slack: Integers  # by position, one for the loss, and ample room behind
    behind: Integers  # the least of it from a position on
    host_left: int
    resident: Integers
    need: Integers
    sent: Integers
    host: Integers
    picoseconds: Integers


_Change = tuple[int, list[int]]
"""Picoseconds that it adds, and which alternatives are taken."""


@dataclass(kw_only=True)
class _Alternatives:
    """The moves of all regions, one after another; ``first`` of each region, and which are ``chosen``."""

    budgeted: BudgetedWalk
    moves: tuple[WalkMove, ...]
    first: Integers
    chosen: list[int]
    last: tuple[list[int], _Changes] | None = None  # what was chosen when changes were worked out, and these

    @classmethod
    def of(cls, budgeted: BudgetedWalk, path: Sequence[WalkMove]) -> _Alternatives:
        single = [[m for m in moves if not m.segment] for moves in budgeted.moves]
        for moves, taken in zip(single, path, strict=True):
            if taken not in moves:
                moves.append(taken)
        first = np.cumsum([0, *map(len, single)])
        chosen = [int(first[r]) + [m.key for m in single[r]].index(taken.key) for r, taken in enumerate(path)]
        return cls(budgeted=budgeted, moves=tuple(m for moves in single for m in moves), first=first, chosen=chosen)

    @property
    def path(self) -> tuple[WalkMove, ...]:
        """What is chosen."""
        return tuple(self.moves[at] for at in self.chosen)

    @property
    def fits(self) -> bool:
        """Does it, both budgets?"""
        changes = self.known
        return int(changes.behind[0]) >= 0 and changes.host_left >= 0

    @cached_property
    def figures(self) -> tuple[Integers, ...]:
        """Region, bytes that stay, need, sent, of the host, and picoseconds: own, of a copy, and hidden behind it."""
        rows = [
            (m.start, m.resident_bytes, m.need_bytes, m.sent_bytes, m.host_bytes, m.picoseconds, m.copying, m.hides)
            for m in self.moves
        ]
        return tuple(np.array(rows, dtype=np.int64).T)

    def changes(self) -> _Changes:
        region, resident, need, sent, host, own, copying, hides = self.figures
        walk, budget = self.budgeted.walk, self.budgeted.budget_bytes
        at = np.array(self.chosen)
        held = np.concatenate([[0], np.cumsum(resident[at])])
        beside = np.concatenate([[0], sent[at][:-1]])
        loss = budget - held[-1] - walk.loss_need_bytes
        slack = np.concatenate([budget - (held[:-1] + beside + need[at]), [loss, _AMPLE, _AMPLE]])
        before = np.concatenate([[0], copying[at][:-1]])
        after = np.concatenate([hides[at][1:], [_AMPLE]])
        spent = own + np.maximum(0, before[region] - hides) + np.maximum(0, copying - after[region])
        limit = walk.host_budget_bytes
        return _Changes(
            slack,
            np.minimum.accumulate(slack[::-1])[::-1],
            _AMPLE if limit is None else limit - int(host[at].sum()),
            *(each - each[at][region] for each in (resident, need, sent, host, spent)),
        )

    def sweep(self) -> None:
        """Take each region's best change that saves seconds, alone or with one of a region behind its neighbour, until
        there is none, or `SWEEPS` times.
        """
        for _ in range(SWEEPS):
            before = list(self.chosen)
            for region in range(len(self.chosen)):
                best = self._best_change(region, self.known)
                if best is not None and best[0] < 0:
                    self._take(best)
            if self.chosen == before:
                break

    def mend(self) -> bool:
        """Take the cheapest change of any region, or any two, after which the plan fits; False where none does."""
        known, found = self.known, []
        for i in range(len(self.chosen)):
            found.append(self._best_change(i, known))
            if known.slack[i] < 0:  # no change of later regions makes up for it
                break
        fitting = [change for change in found if change is not None]
        if not fitting:
            return False
        self._take(min(fitting, key=lambda change: change[0]))
        return True

    @property
    def known(self) -> _Changes:
        """`changes`, worked out once for what is chosen."""
        if self.last is None or self.last[0] != self.chosen:
            self.last = list(self.chosen), self.changes()
        return self.last[1]

    def _take(self, change: _Change) -> None:
        for at in change[1]:
            self.chosen[int(self.figures[0][at])] = at

    def _best_change(self, i: int, c: _Changes) -> _Change | None:
        """Of region i, alone or with a later one that is not its neighbour: the cheapest after which the plan fits."""
        own = np.arange(self.first[i], self.first[i + 1])
        own = own[(c.need[own] <= c.slack[i]) & (c.resident[own] + c.sent[own] <= c.slack[i + 1])]
        alone = own[(c.resident[own] <= c.behind[i + 2]) & (c.host[own] <= c.host_left)]
        best = None
        if len(alone):
            at = alone[np.argmin(c.picoseconds[alone])]
            best = int(c.picoseconds[at]), [int(at)]
        pair = self._pair(i, own, c)
        if pair is not None and (best is None or pair[0] < best[0]):
            best = pair
        return best

    def _pair(self, i: int, own: Integers, c: _Changes) -> _Change | None:
        """The best change of region i and a later one."""
        others = np.arange(self.first[min(i + 2, len(self.chosen))], self.first[-1])
        if not len(own) or not len(others):
            return None
        j = self.figures[0][others]
        between = np.concatenate([[_AMPLE], np.minimum.accumulate(c.slack[i + 2 :])])[j - (i + 2)]
        room = np.minimum(between, c.slack[j] - c.need[others])
        room = np.minimum(room, c.slack[j + 1] - c.resident[others] - c.sent[others])
        room = np.minimum(room, c.behind[j + 2] - c.resident[others])
        fits = (c.resident[own][:, None] <= room) & (c.host[own][:, None] + c.host[others] <= c.host_left)
        added = np.where(fits, c.picoseconds[own][:, None] + c.picoseconds[others], _AMPLE)
        at = int(added.argmin())
        best = int(added.flat[at])
        return (best, [int(own[at // len(others)]), int(others[at % len(others)])]) if best < _AMPLE else None
