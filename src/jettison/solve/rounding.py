"""Plans under a host budget, from the vertex that the linear relaxation ends at.

A vertex takes one move in all regions but about as many as there are budgets that bind: two or three of a hundred. In
these regions moves are tried together, all of each as long as they are few. The promising of these plans, whether they
fit or not, are mended and made better by exchanges (exchange.py), among moves that a better plan may take (fixing.py).
Promising is what costs little with what it lacks paid at the bound's prices. Nothing is proven here.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

try:
    import numpy as np
except ImportError:  # torch comes without it; nothing is rounded then
    np = None  # type: ignore[assignment]

from jettison.solve.exchange import mended
from jettison.solve.label_setting import Path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from jettison.solve.bound import Bound, BudgetedWalk, Floats
    from jettison.solve.fixing import Fixing
    from jettison.solve.moves import Move

    Integers = NDArray[np.int64]

TOGETHER = 600
"""Plans, at most, that the regions between moves give when more than the vertex's own moves are tried."""
SPLIT = 6
"""Regions between moves that are looked at, those that are most so."""
TRIED = 6
PATIENCE = 2
"""Plans that are mended, and so many without a better one end it."""
WHOLE = 1e-7


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


def _starts(budgeted: BudgetedWalk, bound: Bound, shares: Floats) -> Iterator[tuple[Move, ...]]:
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
    budgeted: BudgetedWalk, bound: Bound, plans: Sequence[Sequence[Move]]
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
