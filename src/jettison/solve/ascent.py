"""Multipliers for `bound.relax` where HiGHS is not installed: subgradient ascent, as of Held & Karp (1971).

Any multipliers give a bound (bound.py), so these need not be the best ones: what they miss is paid in labels, and told
by the certificate. The path that is the cheapest at some prices says by how much it breaks each budget; prices move
along that, by Polyak's step towards the cheapest path known that breaks none. What copies wait for backwards, and the
host's budget, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jettison.solve.bound import BudgetedWalk
    from jettison.solve.moves import Move

ROUNDS = 120
PATIENCE = 5
"""Rounds without a better bound after which steps are halved."""


def ascend(budgeted: BudgetedWalk) -> list[float]:
    """Picoseconds per byte, one a position and one for the loss, each 0 or more."""
    count = budgeted.walk.count
    prices = best = [0.0] * (count + 1)
    most = target = float(sum(max((m.picoseconds for m in moves), default=0) for moves in budgeted.moves))
    highest, length, waited = float("-inf"), 1.0, 0
    for _ in range(ROUNDS):
        path = _cheapest(budgeted, prices)
        excess = _excess(budgeted, path)
        seconds = float(sum(m.picoseconds for m in path))
        bound = seconds + sum(price * over for price, over in zip(prices, excess, strict=True))
        waited = 0 if bound > highest else waited + 1
        if bound > highest:
            highest, best = bound, prices
        if max(excess) <= 0:
            target = min(target, seconds)
        if waited == PATIENCE:
            prices, length, waited = best, length / 2, 0
            continue
        square = sum(over * over for over, price in zip(excess, prices, strict=True) if over > 0 or price > 0)
        if not square or target - bound <= 1e-6 * most:
            break
        step = length * (target - bound) / square
        prices = [max(0.0, price + step * over) for price, over in zip(prices, excess, strict=True)]
    return best


def _cheapest(budgeted: BudgetedWalk, prices: Sequence[float]) -> list[Move]:
    """The path of the fewest picoseconds where a byte needed, or held, at a position costs its price."""
    count = budgeted.walk.count
    held = list(accumulate(reversed(prices)))[::-1]
    rest = [float("inf")] * count + [0.0]
    chosen: list[Move | None] = [None] * count
    for r in reversed(range(count)):
        for m in budgeted.moves[r]:
            cost = m.picoseconds + prices[r] * m.need_bytes + held[m.stop] * m.resident_bytes + rest[m.stop]
            cost += prices[m.stop] * m.sent_bytes
            if cost < rest[r]:
                rest[r], chosen[r] = cost, m
    path, r = [], 0
    while r < count:
        move = chosen[r]
        assert move is not None, "a walk above its smallest budget has a way through"
        path.append(move)
        r = move.stop
    return path


def _excess(budgeted: BudgetedWalk, path: Sequence[Move]) -> list[float]:
    """Bytes above the budget at each position, and at the loss; below zero where there is room."""
    budget = budgeted.budget_bytes
    found: list[float] = []
    prefix = sent = 0
    for m in path:
        found.append(prefix + sent + m.need_bytes - budget)
        found += [float(prefix - budget)] * (m.stop - m.start - 1)  # passed over by a segment
        prefix, sent = prefix + m.resident_bytes, m.sent_bytes
    return [*found, float(prefix + budgeted.walk.loss_need_bytes - budget)]
