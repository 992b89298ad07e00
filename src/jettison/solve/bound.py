"""A lower bound on the seconds of the rest of a walk, from any position and any prefix.

Each position's constraint "prefix + need <= budget" (NOTE [ The step is a path ]) gets a multiplier, in picoseconds per
byte. Relaxed that way the cheapest rest of the walk is a shortest path, so that from position r with P bytes held

    seconds so far + P * held_price[r] + rest[r]

is a lower bound on every completion, for *any* multipliers that are not negative: the certificate does not depend on
the solver that proposed them. The best ones are the duals of the linear relaxation, which HiGHS solves; relaxed paths
have integral vertices, so the bound then equals the relaxation's (Geoffrion 1974). Where HiGHS is not installed, an
ascent comes close to them (ascent.py).
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
class Bound:
    """See the module's docstring; both tuples have one entry a position, and one for the end."""

    held_price: tuple[float, ...]  # picoseconds per byte held before the position
    rest: tuple[float, ...]  # picoseconds
    picoseconds: float  # of the whole walk, root included


@dataclass(frozen=True, kw_only=True)
class BudgetedWalk:
    """A walk under a budget, without the moves that no fitting choice can contain."""

    walk: Walk
    budget_bytes: int
    moves: tuple[tuple[Move, ...], ...]

    @classmethod
    def of(cls, walk: Walk, budget_bytes: int) -> BudgetedWalk:
        """Drop a move if it does not fit even after the shortest prefix that leads to it."""
        shortest: list[int | None] = [0] + [None] * walk.count
        kept: list[tuple[Move, ...]] = []
        for r, moves in enumerate(walk.moves):
            prefix = shortest[r]
            fitting: list[Move] = []
            if prefix is not None:
                room = budget_bytes - prefix
                fitting = [m for m in moves if max(m.need_bytes, m.resident_bytes + walk.floors[m.stop]) <= room]
                for m in fitting:
                    reached = shortest[m.stop]
                    after = prefix + m.resident_bytes
                    shortest[m.stop] = after if reached is None else min(reached, after)
            kept.append(tuple(fitting))
        return cls(walk=walk, budget_bytes=budget_bytes, moves=tuple(kept))


def relax(budgeted: BudgetedWalk, multipliers: Sequence[float] | Floats) -> Bound:
    """The bound that these multipliers (one a position and one for the loss, picoseconds per byte, >= 0) give."""
    walk, budget = budgeted.walk, budgeted.budget_bytes
    prices = [max(0.0, float(p)) for p in multipliers]
    held = list(accumulate(reversed(prices)))[::-1]
    skipped = [0.0, *accumulate(prices)]  # sums of multipliers, for positions that a segment passes over
    most = sum(max((m.picoseconds for m in moves), default=0) for moves in budgeted.moves)
    rest = [float("inf")] * walk.count + [prices[-1] * (walk.loss_need_bytes - budget) - ROUNDING * (1 + most)]
    for r in reversed(range(walk.count)):
        rest[r] = min(
            (
                m.picoseconds
                + prices[r] * (m.need_bytes - budget)
                + held[m.stop] * m.resident_bytes
                - (skipped[m.stop] - skipped[r + 1]) * budget
                + rest[m.stop]
                for m in budgeted.moves[r]
            ),
            default=float("inf"),
        )
    return Bound(held_price=tuple(held), rest=tuple(rest), picoseconds=walk.root_picoseconds + rest[0])


def best_multipliers(budgeted: BudgetedWalk) -> Sequence[float] | Floats:
    """The duals of the linear relaxation; zeros where the solver finds none, which is a valid choice, too."""
    try:
        import highspy
        import numpy as np
    except ImportError:
        return ascend(budgeted)
    walk = budgeted.walk
    if walk.count == 0:
        return np.zeros(1)
    highs = _quiet(highspy)
    for option, value in (("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(option, value)
    seconds_scale = SCALE / max(1, sum(max((m.picoseconds for m in moves), default=0) for moves in budgeted.moves))
    byte_scale = SCALE / max(1, budgeted.budget_bytes)
    highs.passModel(_relaxation(highspy, budgeted, seconds_scale, byte_scale))
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return np.zeros(walk.count + 1)
    duals = np.asarray(highs.getSolution().row_dual, dtype=np.float64)[-(walk.count + 1) :]
    return np.maximum(0.0, -duals) * (byte_scale / seconds_scale)


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
    """Columns: every move, then the prefix at positions 1 .. R. Rows: R paths, R prefixes, R budgets, and the loss."""
    import numpy as np

    walk, count = budgeted.walk, budgeted.walk.count
    moves = [m for group in budgeted.moves for m in group]
    prefix_row, budget_row = count, 2 * count
    rows: list[int] = []
    values: list[float] = []
    starts = [0]

    def column(entries: list[tuple[int, float]]) -> None:
        rows.extend(row for row, _ in entries)
        values.extend(value for _, value in entries)
        starts.append(len(rows))

    for m in moves:
        arrive = [(m.stop, -1.0)] if m.stop < count else []
        resident, need = m.resident_bytes * byte_scale, m.need_bytes * byte_scale
        column([(m.start, 1.0), *arrive, (prefix_row + m.stop - 1, -resident), (budget_row + m.start, need)])
    for r in range(1, count + 1):
        follow = [(prefix_row + r, -1.0)] if r < count else []
        column([(prefix_row + r - 1, 1.0), *follow, (budget_row + r, 1.0)])

    budget = budgeted.budget_bytes * byte_scale
    equal = np.zeros(2 * count)
    equal[0] = 1.0
    upper = np.full(count + 1, budget)
    upper[-1] -= walk.loss_need_bytes * byte_scale
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(moves) + count, 3 * count + 1
    lp.col_cost_ = np.array([m.picoseconds * seconds_scale for m in moves] + [0.0] * count)
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.full(lp.num_col_, highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([equal, np.full(count + 1, -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([equal, upper])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(rows, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(values)
    return lp
