"""A solver is asked until what the judge finds fits, and nothing is left that the next answer would need."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jettison.solve.solver import ATTEMPTS, fastest, refine


@dataclass(frozen=True)
class Answer:
    """What a solver gives for a budget, in its bytes, and what it takes."""

    level: int
    needs: int
    added_seconds: float


@pytest.mark.parametrize("off", [0.8, 0.9, 0.97, 1.0, 1.03, 1.1, 1.25])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.95])
def test_what_is_found_fits_and_leaves_no_more_than_an_answer_would_take(off: float, share: float) -> None:
    """A thousand answers, evenly spaced, and a judge who finds another sum than the solver."""
    answers = [
        Answer(level=1_000 * i, needs=round(off * 1_000 * i), added_seconds=1_000.0 - i) for i in range(1, 1_001)
    ]
    budget = round(share * answers[-1].needs)
    asked: list[int] = []

    def ask(budget_bytes: int) -> Answer:
        asked.append(budget_bytes)
        return answers[min(len(answers), budget_bytes // 1_000) - 1]

    best = fastest([answers[0], *refine(ask, budget, answers[0].level)], budget)
    assert 0 <= budget - best.needs <= budget // 100
    assert len(asked) <= ATTEMPTS and min(asked) >= answers[0].level


def test_nothing_is_asked_twice_where_the_first_answer_costs_nothing() -> None:
    calls: list[int] = []

    def ask(budget: int) -> Answer:
        calls.append(budget)
        return Answer(level=10, needs=10, added_seconds=0.0)

    assert refine(ask, 1000, 5) == [Answer(10, 10, 0.0)]
    assert calls == [1000]


@pytest.mark.parametrize("off", [0.8, 1.03, 1.25])
def test_answers_for_other_budgets_say_where_to_look(off: float) -> None:
    answers = [
        Answer(level=1_000 * i, needs=round(off * 1_000 * i) + 7_777, added_seconds=1_000.0 - i)
        for i in range(1, 1_001)
    ]

    def ask(budget_bytes: int) -> Answer:
        return answers[min(len(answers), budget_bytes // 1_000) - 1]

    def judged(*, knowing: bool) -> int:
        """How many different answers it takes for nine budgets."""
        found: list[Answer] = []
        for share in (0.5, 0.52, 0.55, 0.51, 0.6, 0.7, 0.4, 0.65, 0.45):
            budget = round(share * answers[-1].needs)
            found += refine(ask, budget, answers[0].level, known=found if knowing else ())
            assert 0 <= budget - fastest(found, budget).needs <= budget // 100
        return len(set(found))

    assert judged(knowing=True) < 0.75 * judged(knowing=False)
