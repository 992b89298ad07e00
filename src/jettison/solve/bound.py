"""A lower bound on the seconds of the rest of a walk, from any position and any prefix.

Each position's constraint "prefix + need <= budget" (NOTE [ The step is a path ]) gets a multiplier, in picoseconds per
byte. Relaxed that way the cheapest rest of the walk is a shortest path, so that from position r with P bytes held

    seconds so far + P * held_price[r] + (bytes of the host so far) * host_price + rest[r][what is on its way]

is a lower bound on every completion, for *any* multipliers that are not negative: the certificate does not depend on
the solver that proposed them. The best ones are the duals of the linear relaxation, which HiGHS solves; relaxed paths
have integral vertices, so the bound then equals the relaxation's (Geoffrion 1974). Where something is offloaded, the
relaxation sums up what copies wait over all that may stand beside each other, and `relax` tells pairs apart: its bound
is then the relaxation's or a better one. Where HiGHS is not installed, an ascent comes close to them (ascent.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jettison.solve.ascent import ascend
from jettison.solve.moves import Move, Walk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROUNDING = 1e-9  # share of the dearest path by which bounds are lowered, far above the rounding of their sums
SCALE = 1e3  # the relaxation counts in thousandths of the budget and of the dearest path: well-scaled for simplex


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Picoseconds per byte, each 0 or more: one a position and one for the loss; and one for the host's budget."""

    device: Sequence[float] | Floats
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bound:
    """See the module's docstring; both tuples have one entry a position, and one for the end."""

    held_price: tuple[float, ...]  # picoseconds per byte held before the position
    rest: tuple[tuple[float, ...], ...]  # picoseconds, by class of what is on its way
    picoseconds: float  # of the whole walk, root included
    host_price: float  # picoseconds per byte of the host
    multipliers: Multipliers  # that it comes from


@dataclass(frozen=True, kw_only=True)
class BudgetedWalk:
    """A walk under a budget, without the moves that no fitting choice can contain."""

    walk: Walk
    budget_bytes: int
    moves: tuple[tuple[Move, ...], ...]

    @classmethod
    def of(cls, walk: Walk, budget_bytes: int) -> BudgetedWalk:
        """Drop a move if it does not fit even after the shortest prefix that leads to it, with the least on its way."""
        shortest: list[int | None] = [0] + [None] * walk.count
        kept: list[tuple[Move, ...]] = []
        for r, moves in enumerate(walk.moves):
            prefix = shortest[r]
            fitting: list[Move] = []
            if prefix is not None:
                room = budget_bytes - prefix
                least = walk.sent[r][0]
                fitting = [m for m in moves if walk.floors[m.stop][walk.arrives(m)]]
                fitting = [m for m in fitting if max(least + m.need_bytes, _after(walk, m)) <= room]
                for m in fitting:
                    reached = shortest[m.stop]
                    after = prefix + m.resident_bytes
                    shortest[m.stop] = after if reached is None else min(reached, after)
            kept.append(tuple(fitting))
        return cls(walk=walk, budget_bytes=budget_bytes, moves=tuple(kept))


def _after(walk: Walk, m: Move) -> int:
    """The smallest budget for a move and the rest of the walk, its own passes aside."""
    return m.resident_bytes + walk.floors[m.stop][walk.arrives(m)][0][0]


def relax(budgeted: BudgetedWalk, multipliers: Multipliers) -> Bound:
    """The bound that these multipliers give."""
    walk, budget = budgeted.walk, budgeted.budget_bytes
    prices = [max(0.0, float(p)) for p in multipliers.device]
    limited = walk.host_budget_bytes
    host = max(0.0, float(multipliers.host)) if limited is not None else 0.0
    held = list(accumulate(reversed(prices)))[::-1]
    skipped = [0.0, *accumulate(prices)]  # sums of multipliers, for positions that a segment passes over
    most = sum(max((m.picoseconds + m.copying for m in moves), default=0) for moves in budgeted.moves)
    end = prices[-1] * (walk.loss_need_bytes - budget) - host * (limited or 0) - ROUNDING * (1 + most)
    rest: list[tuple[float, ...]] = [()] * walk.count + [(end,)]
    for r in reversed(range(walk.count)):
        through = [
            (
                m.picoseconds
                + prices[r] * (m.need_bytes - budget)
                + held[m.stop] * m.resident_bytes
                + host * m.host_bytes
                - (skipped[m.stop] - skipped[r + 1]) * budget
                + rest[m.stop][walk.arrives(m)],
                m.hides,
            )
            for m in budgeted.moves[r]
        ]
        rest[r] = tuple(
            prices[r] * size + _least(through, copying)
            for size, copying in zip(walk.sent[r], walk.copying[r], strict=True)
        )
    whole = walk.root_picoseconds + rest[0][0]
    return Bound(held_price=tuple(held), rest=tuple(rest), picoseconds=whole, host_price=host, multipliers=multipliers)


def _least(through: Sequence[tuple[float, int]], copying: int) -> float:
    """The cheapest way on, where copies of so many picoseconds come back beside the next backward."""
    if not copying:
        return min((cost for cost, _ in through), default=float("inf"))
    return min((cost + max(0, copying - hides) for cost, hides in through), default=float("inf"))


def best_multipliers(budgeted: BudgetedWalk) -> Multipliers:
    """The duals of the linear relaxation; zeros where the solver finds none, which is a valid choice, too."""
    try:
        import highspy
        import numpy as np
    except ImportError:
        return Multipliers(device=ascend(budgeted))
    walk = budgeted.walk
    if walk.count == 0:
        return Multipliers(device=np.zeros(1))
    highs = _quiet(highspy)
    for option, value in (("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(option, value)
    dearest = sum(max((m.picoseconds + m.copying for m in moves), default=0) for moves in budgeted.moves)
    seconds_scale = SCALE / max(1, dearest)
    byte_scale = SCALE / max(1, budgeted.budget_bytes)
    highs.passModel(_relaxation(highspy, budgeted, seconds_scale, byte_scale))
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return Multipliers(device=np.zeros(walk.count + 1))
    duals = np.asarray(highs.getSolution().row_dual, dtype=np.float64)[2 * walk.count :]
    prices = np.maximum(0.0, -duals) * (byte_scale / seconds_scale)
    host = float(prices[-1]) if walk.host_budget_bytes is not None else 0.0
    return Multipliers(device=prices[: walk.count + 1], host=host)


def _quiet(highspy: Any) -> Any:
    """A solver that prints nothing: highspy 1.16 registers its callbacks, and with that prints its banner on stdout,
    while it is being constructed, where no option can have been set yet."""

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.silent()
            super().enableCallbacks()

    solver = Quiet()
    solver.silent()
    return solver


def _relaxation(highspy: Any, budgeted: BudgetedWalk, seconds_scale: float, byte_scale: float) -> Any:
    """Columns: every move, the prefix at positions 1 .. R, and where moves offload the waits at positions 1 .. R-1.

    Rows: R paths, R prefixes, R budgets, the loss; where moves offload R-1 waits; under a host budget that.
    """
    import numpy as np

    walk, count = budgeted.walk, budgeted.walk.count
    moves = [m for group in budgeted.moves for m in group]
    waiting = count - 1 if walk.offloads else 0
    limited = walk.host_budget_bytes is not None
    prefix_row, budget_row, wait_row = _rows(count)
    host_row = 3 * count + 1 + waiting
    rows: list[int] = []
    values: list[float] = []
    starts = [0]

    def column(entries: list[tuple[int, float]]) -> None:
        rows.extend(row for row, _ in entries)
        values.extend(value for _, value in entries)
        starts.append(len(rows))

    for m in moves:
        column(_entries(m, count, waiting > 0, host_row if limited else None, seconds_scale, byte_scale))
    for r in range(1, count + 1):
        follow = [(prefix_row + r, -1.0)] if r < count else []
        column([(prefix_row + r - 1, 1.0), *follow, (budget_row + r, 1.0)])
    for r in range(1, waiting + 1):
        column([(wait_row + r, -1.0)])

    budget = budgeted.budget_bytes * byte_scale
    equal = np.zeros(2 * count)
    equal[0] = 1.0
    upper = np.full(count + 1, budget)
    upper[-1] -= walk.loss_need_bytes * byte_scale
    rest = [0.0] * waiting + ([walk.host_budget_bytes * byte_scale] if walk.host_budget_bytes is not None else [])
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(starts) - 1, 3 * count + 1 + len(rest)
    lp.col_cost_ = np.array([m.picoseconds * seconds_scale for m in moves] + [0.0] * count + [1.0] * waiting)
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.full(lp.num_col_, highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([equal, np.full(count + 1 + len(rest), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([equal, upper, rest])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(rows, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(values)
    return lp


def _rows(count: int) -> tuple[int, int, int]:
    """First rows of prefixes, of budgets, and of waits, of which there is none at position 0: it is the loss's."""
    return count, 2 * count, 3 * count


def _entries(
    m: Move, count: int, waiting: bool, host_row: int | None, seconds_scale: float, byte_scale: float
) -> list[tuple[int, float]]:
    """A move's column: (row, value).

    Args:
        waiting: there are rows for waits.
        host_row: of the host's budget.
    """
    prefix_row, budget_row, wait_row = _rows(count)
    resident, need = m.resident_bytes * byte_scale, m.need_bytes * byte_scale
    found = [(m.start, 1.0)]
    if m.stop < count:
        found.append((m.stop, -1.0))
    found += [(prefix_row + m.stop - 1, -resident), (budget_row + m.start, need)]
    if m.sent_bytes:
        found.append((budget_row + m.stop, m.sent_bytes * byte_scale))
        found.append((wait_row + m.stop, m.copying * seconds_scale))
    if m.host_bytes and host_row is not None:
        found.append((host_row, m.host_bytes * byte_scale))
    if waiting and m.start:
        found.append((wait_row + m.start, -m.hides * seconds_scale))
    return found
