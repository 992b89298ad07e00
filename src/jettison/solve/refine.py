"""Refinement of a solver's budget until a judge (a dry run, a timeline) finds that the answer fits.

The solver's bytes and the judge's differ. So the solver is asked for a budget corrected by the difference: by a secant
if only one side is known, by bisection if both are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from jettison.solve.problem import StepProblem
from jettison.solve.solver import Solution, choose
from jettison.solve.walk import StepWalk, least_of, walks

ATTEMPTS = 8
CLOSE = 500
"""An answer within this share of the budget is good enough."""


@dataclass(frozen=True)
class Offer:
    """A problem that is solved for many budgets, with its walks built once."""

    problem: StepProblem

    @cached_property
    def walks(self) -> tuple[StepWalk, ...]:
        """One for each root option."""
        return walks(self.problem)

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that some choice fits; see `least_of`."""
        return least_of(self.walks)

    def choose(self, budget_bytes: int) -> Solution:
        return choose(self.problem, budget_bytes, known=self.walks)


class Judged(Protocol):
    """An answer, and the judge's finding."""

    @property
    def needs(self) -> int:
        """The smallest budget in bytes that it fits according to the judge."""

    @property
    def level(self) -> int:
        """Its peak in bytes according to the solver."""

    @property
    def added_seconds(self) -> float:
        """Seconds of recomputation in a step."""


J = TypeVar("J", bound=Judged)


def refine(ask: Callable[[int], J], budget_bytes: int, least_bytes: int, *, known: Sequence[J] = ()) -> list[J]:
    """Return every answer on the way to the fastest that fits; the last need not be the best. Empty if the known
    answers leave nothing to ask.

    Args:
        ask: solves for a budget in the solver's bytes.
        least_bytes: the smallest budget that the solver can solve.
        known: answers for other budgets, which show the difference between judge and solver and restrict the search.
    """
    found: list[J] = []
    low = max([least_bytes, *(one.level for one in known if one.needs <= budget_bytes)])
    high = min((one.level for one in known if one.needs > budget_bytes), default=None)
    nearest = min(known, key=lambda one: abs(one.needs - budget_bytes), default=None)
    asked = max(low, budget_bytes + (nearest.level - nearest.needs if nearest is not None else 0))
    if high is not None and asked >= high:
        if high - low <= max(1, budget_bytes // CLOSE):
            return found
        asked = (low + high) // 2
    for _ in range(ATTEMPTS):
        one = ask(asked)
        found.append(one)
        spare = budget_bytes - one.needs
        if spare >= 0:
            low = max(low, asked)
            target = asked + spare
            if one.added_seconds <= 0.0:
                break
        else:  # it fits, and so does every budget with the same answer, down to its level
            high = min(one.level, asked if high is None else high)
            target = high + spare
        if (target - low if high is None else high - low) <= max(1, budget_bytes // CLOSE):
            break
        asked = target if high is None or low < target < high else (low + high) // 2
    return found


def fastest(found: Iterable[J], budget_bytes: int) -> J | None:
    """The fastest of the answers that fit; None if none does."""
    fitting = (one for one in found if one.needs <= budget_bytes)
    return min(fitting, key=lambda one: one.added_seconds, default=None)
