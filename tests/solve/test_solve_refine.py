"""A solver is asked until what the judge finds fits, and nothing is left that the next answer would need."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.solve.refine import ATTEMPTS, fastest, refine


@dataclass(frozen=True)
class Answer:
    """What a solver gives for a budget, in its bytes, and what it takes."""

    level: int
    needs: int
    added_seconds: float


@settings(deadline=None, max_examples=200)
@given(
    levels=st.lists(st.integers(1_000, 1_000_000), min_size=1, max_size=40, unique=True).map(sorted),
    off=st.floats(0.8, 1.25),
    share=st.floats(0.0, 1.2),
)
def test_the_fastest_answer_that_fits_is_found_where_the_judge_is_off_by_a_factor(
    levels: list[int], off: float, share: float
) -> None:
    answers = [
        Answer(level=level, needs=round(off * level), added_seconds=float(len(levels) - 1 - i))
        for i, level in enumerate(levels)
    ]
    asked: list[int] = []

    def ask(budget: int) -> Answer:
        asked.append(budget)
        return max((a for a in answers if a.level <= budget), key=lambda a: a.level)

    budget = max(answers[0].needs, round(share * answers[-1].needs))
    found = [answers[0], *refine(ask, budget, levels[0])]
    best = fastest(found, budget)
    assert best.needs <= budget and len(asked) <= ATTEMPTS and min(asked) >= levels[0]
    near = [a for a in answers if a.needs <= budget - max(1, budget // 50)]
    if len(levels) < 2 ** (ATTEMPTS - 2) and near:  # within what so many halvings can tell apart
        assert best.added_seconds <= near[-1].added_seconds or best.needs > 0.9 * near[-1].needs


def test_nothing_is_asked_twice_where_the_first_answer_costs_nothing() -> None:
    calls: list[int] = []

    def ask(budget: int) -> Answer:
        calls.append(budget)
        return Answer(level=10, needs=10, added_seconds=0.0)

    assert refine(ask, 1000, 5) == [Answer(10, 10, 0.0)]
    assert calls == [1000]
