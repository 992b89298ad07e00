"""A plan made better by exchanges: what one region does is changed, or what two of them do.

Under a host budget labels are many, and what is left of them misses plans in which one region gives bytes of the device
or of the host to another. Given a plan that fits, each region is asked for its best change, alone or together with a
change of a later one that is not its neighbour, that fits both budgets and saves seconds; until none does. Nothing is
proven by it.

With s_r the room that is left at position r (NOTE [ The step is a path ] in `moves`), a change at i of the bytes that
stay by d, of the need by e and of what is sent by f fits where s_i >= e, s_{i+1} >= d + f, and s_q >= d for all q
behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from jettison.solve.moves import Move

try:
    import numpy as np
except ImportError:  # torch comes without it; exchanges are left out then
    np = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from jettison.solve.bound import BudgetedWalk

    Integers = NDArray[np.int64]

SWEEPS = 12
"""Over all regions, at most."""
_AMPLE = 1 << 60


def exchanged(budgeted: BudgetedWalk, path: Sequence[Move]) -> tuple[Move, ...]:
    """The moves of a path that fits both budgets, or better ones. Paths with segments come back as they are."""
    if any(m.segment for m in path):
        return tuple(path)
    if np is None:
        return tuple(path)
    alternatives = _Alternatives.of(budgeted, path)
    for _ in range(SWEEPS):
        if not sum(alternatives.improve(region) for region in range(len(path))):
            break
    return tuple(alternatives.moves[at] for at in alternatives.chosen)


@dataclass(kw_only=True)
class _Changes:
    """What each alternative would change, in the place of what its region does now, and the room that there is."""

    slack: Integers  # by position, one for the loss, and ample room behind
    behind: Integers  # the least of it from a position on
    host_left: int
    resident: Integers
    need: Integers
    sent: Integers
    host: Integers
    picoseconds: Integers


@dataclass(kw_only=True)
class _Alternatives:
    """The moves of all regions, one after another; ``first`` of each region, and which are ``chosen``."""

    budgeted: BudgetedWalk
    moves: tuple[Move, ...]
    first: Integers
    chosen: list[int]

    @classmethod
    def of(cls, budgeted: BudgetedWalk, path: Sequence[Move]) -> _Alternatives:
        single = [[m for m in moves if not m.segment] for moves in budgeted.walk.moves]
        first = np.cumsum([0, *map(len, single)])
        chosen = [int(first[r]) + [m.key for m in single[r]].index(taken.key) for r, taken in enumerate(path)]
        return cls(budgeted=budgeted, moves=tuple(m for moves in single for m in moves), first=first, chosen=chosen)

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
            slack=slack,
            behind=np.minimum.accumulate(slack[::-1])[::-1],
            host_left=_AMPLE if limit is None else limit - int(host[at].sum()),
            resident=resident - resident[at][region],
            need=need - need[at][region],
            sent=sent - sent[at][region],
            host=host - host[at][region],
            picoseconds=spent - spent[at][region],
        )

    def improve(self, i: int) -> bool:
        """Take region i's best change, alone or with one of a region behind its neighbour, if any saves seconds."""
        c = self.changes()
        own = np.arange(self.first[i], self.first[i + 1])
        own = own[(c.need[own] <= c.slack[i]) & (c.resident[own] + c.sent[own] <= c.slack[i + 1])]
        alone = own[(c.resident[own] <= c.behind[i + 2]) & (c.host[own] <= c.host_left) & (c.picoseconds[own] < 0)]
        best, saved = [], 0
        if len(alone):
            at = alone[np.argmin(c.picoseconds[alone])]
            best, saved = [int(at)], int(c.picoseconds[at])
        pair = self._pair(i, own, c)
        if pair is not None and pair[0] < saved:
            best = list(pair[1:])
        for at in best:
            self.chosen[int(self.figures[0][at])] = at
        return bool(best)

    def _pair(self, i: int, own: Integers, c: _Changes) -> tuple[int, int, int] | None:
        """The picoseconds that the best change of region i and a later one saves, and which two."""
        others = np.arange(self.first[min(i + 2, len(self.chosen))], self.first[-1])
        if not len(own) or not len(others):
            return None
        j = self.figures[0][others]
        between = np.concatenate([[_AMPLE], np.minimum.accumulate(c.slack[i + 2 :])])[j - (i + 2)]
        room = np.minimum(between, c.slack[j] - c.need[others])
        room = np.minimum(room, c.slack[j + 1] - c.resident[others] - c.sent[others])
        room = np.minimum(room, c.behind[j + 2] - c.resident[others])
        fits = (c.resident[own][:, None] <= room) & (c.host[own][:, None] + c.host[others] <= c.host_left)
        saved = np.where(fits, c.picoseconds[own][:, None] + c.picoseconds[others], 0)
        at = int(saved.argmin())
        return int(saved.flat[at]), int(own[at // len(others)]), int(others[at % len(others)])
