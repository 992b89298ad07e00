"""Plans under a host budget: rounded from the vertex of the linear relaxation, and improved by exchanges.

Under a host budget there are many labels, and thinning misses plans in which one region gives bytes of the device or of
the host to another. Nothing is proven here.

NOTE [ Rounding ]
A vertex has one move in all regions except for about as many as there are binding budgets: two or three in a hundred.
In these regions combinations of moves are tried, all of them if they are few. The promising plans, whether they fit or
not, are repaired and improved by exchanges. A plan is promising if its cost is low with its excess over budgets priced
at the bound's prices.

NOTE [ Exchanges ]
For a plan that fits, take each region's best change (alone, or together with a change of a later region that is not its
neighbour) that fits both budgets and saves seconds, until there is none. A plan that exceeds a budget is repaired
first, by the cheapest such change after which it fits. With s_r the free bytes at position r (NOTE [ The step is a path
] in `shortest_path`), a change at i of the kept bytes by d, of the need by e and of the offloaded bytes by f fits if
s_i >= e, s_{i+1} >= d + f, and s_q >= d for all later q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

from jettison.solve.bound import Bound, BudgetedWalk
from jettison.solve.shortest_path import Path, WalkMove

try:
    import numpy as np
except ImportError:  # optional for torch; without it nothing is rounded or exchanged
    np = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jettison.solve.bound import Floats

    Integers = NDArray[np.int64]

TOGETHER = 600
"""Most plans from regions with fractional moves when more than the vertex's own moves are tried."""
SPLIT = 6
"""Most regions with fractional moves that are tried, the most fractional first."""
TRIED = 6
PATIENCE = 2
"""Most plans to repair, and number of plans without improvement after which to stop."""
WHOLE = 1e-7
SWEEPS = 12
"""Most sweeps over all regions."""
_AMPLE = 1 << 60


def rounded(budgeted: BudgetedWalk, bound: Bound, shares: Sequence[float] | Floats) -> Iterator[Path]:
    """Yield fitting paths, each better than those before; none with segments, or without a solved relaxation."""
    if np is None:
        return
    if not len(shares) or any(m.segment for moves in budgeted.moves for m in moves):
        return
    best, waited = None, 0
    for start in _starts(budgeted, bound, np.asarray(shares)):
        moves = mended(budgeted, start)
        path = None if moves is None else Path.along(budgeted.walk, moves)
        if path is not None and (best is None or path.picoseconds < best):
            yield path
            best, waited = path.picoseconds, 0
        elif best is not None:
            waited += 1
        if waited == PATIENCE:
            break


def _starts(budgeted: BudgetedWalk, bound: Bound, shares: Floats) -> Iterator[tuple[WalkMove, ...]]:
    """Yield distinct plans around the vertex, the most promising first."""
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
    """Yield indices of plans, with their cost and their excess over each budget."""
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


def mended(budgeted: BudgetedWalk, path: Sequence[WalkMove]) -> tuple[WalkMove, ...] | None:
    """Repair and improve a path without segments that may exceed budgets; None if no exchange makes it fit."""
    alternatives = _Alternatives.of(budgeted, path)
    if not alternatives.fits and not alternatives.mend():
        return None
    alternatives.sweep()
    return alternatives.path


class _Changes(NamedTuple):
    """Free bytes, and the difference that each alternative makes in place of its region's current move."""

    slack: Integers  # free bytes by position, one for the loss, and ample room after it
    later: Integers  # the least of ``slack`` from a position on
    host_left: int
    resident: Integers
    need: Integers
    sent: Integers
    host: Integers
    picoseconds: Integers


_Change = tuple[int, list[int]]
"""Added picoseconds, and the alternatives that are taken."""


@dataclass(kw_only=True)
class _Alternatives:
    """The moves of all regions, one after another; ``first`` of each region, and the ``chosen`` ones."""

    budgeted: BudgetedWalk
    moves: tuple[WalkMove, ...]
    first: Integers
    chosen: list[int]
    last: tuple[list[int], _Changes] | None = None  # the chosen moves of the last computed changes, and these changes

    @classmethod
    def of(cls, budgeted: BudgetedWalk, path: Sequence[WalkMove]) -> _Alternatives:
        moves, first = tuple(chain.from_iterable(budgeted.moves)), np.cumsum([0, *map(len, budgeted.moves)])
        chosen = [moves.index(taken, int(first[r])) for r, taken in enumerate(path)]
        return cls(budgeted=budgeted, moves=moves, first=first, chosen=chosen)

    @property
    def path(self) -> tuple[WalkMove, ...]:
        return tuple(self.moves[at] for at in self.chosen)

    @property
    def fits(self) -> bool:
        changes = self.known
        return int(changes.later[0]) >= 0 and changes.host_left >= 0

    @cached_property
    def figures(self) -> tuple[Integers, ...]:
        """Region, kept bytes, need, offloaded bytes, host bytes; picoseconds: own, of a copy, and of hidden copies."""
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
        arriving = np.concatenate([[0], sent[at][:-1]])
        loss = budget - held[-1] - walk.loss_need_bytes
        slack = np.concatenate([budget - (held[:-1] + arriving + need[at]), [loss, _AMPLE, _AMPLE]])
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
        """Take each region's best change, alone or with a later non-neighbour's, that saves; at most `SWEEPS` times."""
        for _ in range(SWEEPS):
            before = list(self.chosen)
            for region in range(len(self.chosen)):
                best = self._best_change(region, self.known)
                if best is not None and best[0] < 0:
                    self._take(best)
            if self.chosen == before:
                break

    def mend(self) -> bool:
        """Take the cheapest change of one or two regions after which the plan fits; False if there is none."""
        known, found = self.known, []
        for i in range(len(self.chosen)):
            found.append(self._best_change(i, known))
            if known.slack[i] < 0:  # no change of later regions can compensate
                break
        fitting = [change for change in found if change is not None]
        if not fitting:
            return False
        self._take(min(fitting, key=lambda change: change[0]))
        return True

    @property
    def known(self) -> _Changes:
        """`changes`, computed once for the chosen moves."""
        if self.last is None or self.last[0] != self.chosen:
            self.last = list(self.chosen), self.changes()
        return self.last[1]

    def _take(self, change: _Change) -> None:
        for at in change[1]:
            self.chosen[int(self.figures[0][at])] = at

    def _best_change(self, i: int, c: _Changes) -> _Change | None:
        """The cheapest fitting change of region i, alone or with a later region that is not its neighbour."""
        own = np.arange(self.first[i], self.first[i + 1])
        own = own[(c.need[own] <= c.slack[i]) & (c.resident[own] + c.sent[own] <= c.slack[i + 1])]
        alone = own[(c.resident[own] <= c.later[i + 2]) & (c.host[own] <= c.host_left)]
        best = None
        if len(alone):
            at = alone[np.argmin(c.picoseconds[alone])]
            best = int(c.picoseconds[at]), [int(at)]
        pair = self._pair(i, own, c)
        if pair is not None and (best is None or pair[0] < best[0]):
            best = pair
        return best

    def _pair(self, i: int, own: Integers, c: _Changes) -> _Change | None:
        """The best change of region i together with a later one."""
        others = np.arange(self.first[min(i + 2, len(self.chosen))], self.first[-1])
        if not len(own) or not len(others):
            return None
        j = self.figures[0][others]
        between = np.concatenate([[_AMPLE], np.minimum.accumulate(c.slack[i + 2 :])])[j - (i + 2)]
        room = np.minimum(between, c.slack[j] - c.need[others])
        room = np.minimum(room, c.slack[j + 1] - c.resident[others] - c.sent[others])
        room = np.minimum(room, c.later[j + 2] - c.resident[others])
        fits = (c.resident[own][:, None] <= room) & (c.host[own][:, None] + c.host[others] <= c.host_left)
        added = np.where(fits, c.picoseconds[own][:, None] + c.picoseconds[others], _AMPLE)
        at = int(added.argmin())
        best = int(added.flat[at])
        return (best, [int(own[at // len(others)]), int(others[at % len(others)])]) if best < _AMPLE else None
