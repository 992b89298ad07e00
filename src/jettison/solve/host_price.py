"""Plans under a host budget, found by paying for its bytes.

With a price for each byte that goes to the host its budget is no row any more, and the labels are those of a problem
without one (NOTE [ Labels and what thinning costs ]). The price is halved between plans that take too much and plans
that do not; every plan on the way that stays within the budget is a candidate. Layers that are alike would all change
their ways at the same price: each pays a little more than the one before, so that they do one by one. Nothing is proven
here: that is the bound's part, and that of labels that count the host's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jettison.solve.bound import Bound, BudgetedWalk, Multipliers, relax
from jettison.solve.label_setting import Path, fastest_path
from jettison.solve.moves import Move, free_of_host

ROUNDS = 12
WIDTH = 256
SPREAD = 0.02
"""By so much of itself the price rises from the first region to the last."""


def paying_for_host(budgeted: BudgetedWalk, bound: Bound) -> Iterator[Path]:
    """Paths within both budgets, as their price leads to them; none where the host's budget does not matter."""
    walk = budgeted.walk
    limit = walk.host_budget_bytes
    if limit is None:
        return
    dearest = sum(max((m.picoseconds + m.copying for m in moves), default=0) for moves in budgeted.moves)
    low, high = 0.0, None
    price = bound.host_price or dearest / max(1, limit)
    for _ in range(ROUNDS):
        path = _cheapest(budgeted, bound, price)
        if path is None:
            return
        if sum(m.host_bytes for m in path.moves) <= limit:
            yield path
            high = price
        else:
            low = price
        price = 2 * price if high is None else (low + high) / 2


def _cheapest(budgeted: BudgetedWalk, bound: Bound, price: float) -> Path | None:
    """With its seconds as they are, without the price."""
    walk = budgeted.walk

    def charge(m: Move) -> int:
        return round(price * (1 + SPREAD * m.start / walk.count) * m.host_bytes)

    charged = tuple(tuple(replace(m, picoseconds=m.picoseconds + charge(m)) for m in moves) for moves in walk.moves)
    free = BudgetedWalk.of(free_of_host(walk, charged), budgeted.budget_bytes)
    paid = relax(free, Multipliers(device=bound.multipliers.device))
    path = fastest_path(free, paid, width=WIDTH, beam=True).path
    if path is None:
        return None
    taken = sum(charge(m) for m in path.moves)
    return Path(moves=path.moves, picoseconds=path.picoseconds - taken)
