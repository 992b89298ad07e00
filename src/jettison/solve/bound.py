"""A lower bound on the seconds of the rest of a walk, from any position and any prefix.

Each position's constraint "prefix + need <= budget" (NOTE [ The step is a path ]) gets a multiplier, in picoseconds per
byte. Relaxed that way the cheapest rest of the walk is a shortest path, so that from position r with P bytes held

    seconds so far + P * held_price[r] + (bytes of the host so far) * host_price + rest[r][bytes in flight]

is a lower bound on every completion, for *any* multipliers that are not negative: the certificate does not depend on
the solver that proposed them. The best ones are the duals of the linear relaxation, which HiGHS solves; relaxed paths
have integral vertices, so the bound then equals the relaxation's (Geoffrion 1974). If tensors are offloaded, the
relaxation sums waiting times over all pairs of neighbours, and `relax` distinguishes the pairs: its bound is then the
relaxation's or a better one. Without HiGHS all are 0: labels are then compared by their seconds alone, and a
certificate states the wider gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jettison.solve.shortest_path import StepWalk, WalkMove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROUNDING = 1e-9  # relative margin below computed bounds, far above the rounding of their sums
SCALE = 1e3  # the relaxation counts in thousandths of the budget and of the slowest path: well-scaled for simplex


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Picoseconds per byte, each 0 or more: one for each position, one for the loss, and one for the host's budget."""

    device: Sequence[float] | Floats
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A solved relaxation: its duals, and each move's share in its vertex, in order; none if HiGHS finds no vertex."""

    multipliers: Multipliers
    shares: Sequence[float] | Floats = ()


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A bound, see the module's docstring; both tuples have one entry for each position, and one for the end."""

    held_price: tuple[float, ...]  # picoseconds per byte held before the position
    rest: tuple[tuple[float, ...], ...]  # picoseconds, by class of bytes in flight
    picoseconds: float  # of the whole walk, root included
    host_price: float  # picoseconds per byte of the host


@dataclass(frozen=True, kw_only=True)
class BudgetedWalk:
    """A walk under a budget, without the moves that no fitting choice can contain."""

    walk: StepWalk
    budget_bytes: int
    moves: tuple[tuple[WalkMove, ...], ...]

    @classmethod
    def of(cls, walk: StepWalk, budget_bytes: int) -> BudgetedWalk:
        """Drop moves that do not fit even after the shortest prefix that leads to them, with the fewest in flight."""
        shortest: list[int | None] = [0] + [None] * walk.count
        kept: list[tuple[WalkMove, ...]] = []
        for r, moves in enumerate(walk.moves):
            prefix = shortest[r]
            fitting: list[WalkMove] = []
            for m in moves if prefix is not None else ():
                assert prefix is not None
                floors = walk.floors[m.stop][walk.arrives(m)]
                after = prefix + m.resident_bytes
                needs = max(prefix + walk.sent[r][0] + m.need_bytes, after + floors[0][0]) if floors else 0
                if floors and needs <= budget_bytes:
                    fitting.append(m)
                    reached = shortest[m.stop]
                    shortest[m.stop] = after if reached is None else min(reached, after)
            kept.append(tuple(fitting))
        return cls(walk=walk, budget_bytes=budget_bytes, moves=tuple(kept))


def relax(budgeted: BudgetedWalk, multipliers: Multipliers) -> Bound:
    walk, budget = budgeted.walk, budgeted.budget_bytes
    prices = [max(0.0, float(p)) for p in multipliers.device]
    limited = walk.host_budget_bytes
    host = max(0.0, float(multipliers.host)) if limited is not None else 0.0
    held = list(accumulate(reversed(prices)))[::-1]
    skipped = [0.0, *accumulate(prices)]  # prefix sums, for positions inside a segment
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
    return Bound(held_price=tuple(held), rest=tuple(rest), picoseconds=whole, host_price=host)


def _least(through: Sequence[tuple[float, int]], copying: int) -> float:
    """The cheapest continuation, if copies of ``copying`` picoseconds return during the next backward."""
    if not copying:
        return min((cost for cost, _ in through), default=float("inf"))
    return min((cost + max(0, copying - hides) for cost, hides in through), default=float("inf"))


def relaxation(budgeted: BudgetedWalk) -> Relaxation:
    try:
        import highspy
        import numpy as np
    except ImportError:
        return Relaxation(multipliers=Multipliers(device=[0.0] * (budgeted.walk.count + 1)))
    walk = budgeted.walk
    if walk.count == 0:
        return Relaxation(multipliers=Multipliers(device=np.zeros(1)))
    highs = _quiet(highspy)()
    highs.silent()
    # these programs are so small that presolve takes longer than it saves
    for option, value in (("threads", 1), ("random_seed", 0), ("presolve", "off")):
        highs.setOptionValue(option, value)
    dearest = sum(max((m.picoseconds + m.copying for m in moves), default=0) for moves in budgeted.moves)
    seconds_scale = SCALE / max(1, dearest)
    byte_scale = SCALE / max(1, budgeted.budget_bytes)
    highs.passModel(_relaxation(highspy, budgeted, seconds_scale, byte_scale))
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return Relaxation(multipliers=Multipliers(device=np.zeros(walk.count + 1)))
    solution = highs.getSolution()
    duals = np.asarray(solution.row_dual, dtype=np.float64)[2 * walk.count :]
    prices = np.maximum(0.0, -duals) * (byte_scale / seconds_scale)
    host = float(prices[-1]) if walk.host_budget_bytes is not None else 0.0
    shares = np.asarray(solution.col_value, dtype=np.float64)[: sum(map(len, budgeted.moves))]
    return Relaxation(multipliers=Multipliers(device=prices[: walk.count + 1], host=host), shares=shares)


@lru_cache(maxsize=1)
def _quiet(highspy: Any) -> Any:
    """Return a solver that prints nothing: highspy 1.16 prints its banner within its constructor."""

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.silent()
            super().enableCallbacks()

    return Quiet


def _relaxation(highspy: Any, budgeted: BudgetedWalk, seconds_scale: float, byte_scale: float) -> Any:
    """Columns: every move, the prefix at positions 1 .. R, and with offloading the waits at positions 1 .. R-1.

    Rows: R paths, R prefixes, R budgets, the loss; with offloading R-1 waits; with a host budget one for it.
    """
    import numpy as np

    walk, count = budgeted.walk, budgeted.walk.count
    moves = [m for group in budgeted.moves for m in group]
    waiting = count - 1 if walk.offloads else 0
    limited = walk.host_budget_bytes is not None
    columns = _columns(moves, count, waiting, 3 * count + 1 + waiting if limited else None, seconds_scale, byte_scale)
    starts, rows, values = columns

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
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = rows
    lp.a_matrix_.value_ = values
    return lp


def _columns(
    moves: Sequence[WalkMove], count: int, waiting: int, host_row: int | None, seconds_scale: float, byte_scale: float
) -> tuple[NDArray[np.int32], NDArray[np.int32], Floats]:
    """Start of each column, and rows and values of all entries: moves, then prefixes, then waits, of which position 0
    has none, since its row is the loss's. ``host_row``: row of the host's budget.
    """
    import numpy as np

    figures = [
        (m.start, m.stop, m.resident_bytes, m.need_bytes, m.sent_bytes, m.copying, m.host_bytes, m.hides) for m in moves
    ]
    start, stop, resident, need, sent, copying, host, hides = np.array(figures, dtype=np.int64).reshape(-1, 8).T
    prefix_row, budget_row, wait_row = count, 2 * count, 3 * count
    each = np.arange(len(moves))
    parts: list[tuple[Any, Any, Any]] = []  # columns, rows and values; within a column in the order of the parts

    def add(which: Any, columns: Any, rows: Any, entries: Any) -> None:
        parts.append((columns[which], np.broadcast_to(rows, columns.shape)[which], entries[which]))

    ones, every = np.ones(len(moves)), np.ones(len(moves), dtype=np.bool_)
    add(every, each, start, ones)
    add(stop < count, each, stop, -ones)
    add(every, each, prefix_row + stop - 1, -(resident * byte_scale))
    add(every, each, budget_row + start, need * byte_scale)
    add(sent > 0, each, budget_row + stop, sent * byte_scale)
    add(sent > 0, each, wait_row + stop, copying * seconds_scale)
    if host_row is not None:
        add(host > 0, each, np.int64(host_row), host * byte_scale)
    if waiting:
        add(start > 0, each, wait_row + start, -hides * seconds_scale)
    position = np.arange(1, count + 1)
    prefixes, ones = len(moves) + position - 1, np.ones(count)
    every = np.ones(count, dtype=np.bool_)
    add(every, prefixes, prefix_row + position - 1, ones)
    add(position < count, prefixes, prefix_row + position, -ones)
    add(every, prefixes, budget_row + position, ones)
    if waiting:
        position = np.arange(1, waiting + 1)
        columns = len(moves) + count + position - 1
        add(np.ones(waiting, dtype=np.bool_), columns, wait_row + position, -np.ones(waiting))
    owners, rows, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners, minlength=len(moves) + count + waiting)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    return starts.astype(np.int32), rows[order].astype(np.int32), values[order].astype(np.float64)
