"""Asking a solver until what a judge finds fits.

A solver adds up bytes, a dry run or a timeline finds them, and the two differ. So the solver is asked for a budget that
is off by the difference: a secant where only one side is known, halving where both are.
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
"""An answer within this part of the budget is not improved."""


@dataclass(frozen=True)
class Offer:
    """A problem that is asked for many budgets: its paths are made once."""

    problem: StepProblem

    @cached_property
    def walks(self) -> tuple[StepWalk, ...]:
        """One a root option."""
        return walks(self.problem)

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that some choice fits; see `least_of`."""
        return least_of(self.walks)

    def choose(self, budget_bytes: int) -> Solution:
        """See `choose`."""
        return choose(self.problem, budget_bytes, known=self.walks)


class Judged(Protocol):
    """An answer, and what was found of it."""

    @property
    def needs(self) -> int:
        """The smallest budget in bytes that it is sure to fit, as the judge has it."""

    @property
    def level(self) -> int:
        """Its peak in bytes as the solver has it."""

    @property
    def added_seconds(self) -> float:
        """What is computed again, per step."""


J = TypeVar("J", bound=Judged)


def refine(ask: Callable[[int], J], budget_bytes: int, least_bytes: int, *, known: Sequence[J] = ()) -> list[J]:
    """Every answer on the way to the fastest that fits; the last need not be the best. None where what is known leaves
    nothing to ask.

    Args:
        ask: the answer for that budget in the solver's bytes.
        least_bytes: the smallest budget for which the solver has one.
        known: answers for other budgets. They say how far the judge is from the solver, and where not to look.
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
        else:  # so does every budget that leads to the same answer, down to its own level
            high = min(one.level, asked if high is None else high)
            target = high + spare
        if (target - low if high is None else high - low) <= max(1, budget_bytes // CLOSE):
            break
        asked = target if high is None or low < target < high else (low + high) // 2
    return found


def fastest(found: Iterable[J], budget_bytes: int) -> J | None:
    """Of the answers that fit; None where none does."""
    fitting = (one for one in found if one.needs <= budget_bytes)
    return min(fitting, key=lambda one: one.added_seconds, default=None)
