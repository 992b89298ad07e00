"""Leaving out moves that no better plan takes.

With the prices of a bound the cheapest path through each move is known: the cheapest way there, the move, the cheapest
rest. Where that is no better than the best plan known, the move is in no better one, and labels and exchanges need not
look at it. It is the fixing of variables by reduced costs of integer programming, with the pairs that `relax` tells
apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jettison.solve.bound import Bound, BudgetedWalk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jettison.solve.moves import Move


@dataclass(frozen=True, kw_only=True)
class Fixing:
    """A walk, and for each of its moves the picoseconds that no plan with it goes below."""

    budgeted: BudgetedWalk
    bounds: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, budgeted: BudgetedWalk, bound: Bound) -> Fixing:
        """See the module's docstring."""
        walk = budgeted.walk
        ways = [[float("inf")] * len(sizes) for sizes in walk.sent]  # the cheapest to each position and class
        ways[0][0] = float(walk.root_picoseconds)
        found = []
        for r in range(walk.count):
            row = []
            for m, reached in _reached(budgeted, bound, r, ways[r]):
                number = walk.arrives(m)
                row.append(reached + bound.rest[m.stop][number])
                ways[m.stop][number] = min(ways[m.stop][number], reached)
            found.append(tuple(row))
        return cls(budgeted=budgeted, bounds=tuple(found))

    def below(self, picoseconds: int | None) -> BudgetedWalk:
        """With the moves that a plan of fewer picoseconds may take; None: any plan."""
        if picoseconds is None:
            return self.budgeted
        return replace(
            self.budgeted,
            moves=tuple(
                tuple(m for m, least in zip(moves, row, strict=True) if least <= picoseconds - 1)
                for moves, row in zip(self.budgeted.moves, self.bounds, strict=True)
            ),
        )


def _reached(budgeted: BudgetedWalk, bound: Bound, r: int, ways: list[float]) -> Iterator[tuple[Move, float]]:
    """The moves from a position, and what the cheapest way to their ends costs."""
    walk, budget = budgeted.walk, budgeted.budget_bytes
    prices = [max(0.0, float(price)) for price in bound.multipliers.device]
    costs = [way + prices[r] * size for way, size in zip(ways, walk.sent[r], strict=True)]
    for m in budgeted.moves[r]:
        own = m.picoseconds + prices[r] * (m.need_bytes - budget) + bound.held_price[m.stop] * m.resident_bytes
        own += bound.host_price * m.host_bytes - sum(prices[r + 1 : m.stop]) * budget
        there = min(cost + max(0, copying - m.hides) for cost, copying in zip(costs, walk.copying[r], strict=True))
        yield m, there + own
