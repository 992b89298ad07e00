"""Without HiGHS and without numpy: bounds that hold, answers as good, and gaps that say so."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.solve import label_setting
from jettison.solve.bound import BudgetedWalk, relax, relaxation
from jettison.solve.label_setting import fastest_path
from jettison.solve.problem import StepProblem
from jettison.solve.shortest_path import least_of, walks
from jettison.solve.solver import choose
from support.plan_cases import deep_problem, step_problems

GIB = 1 << 30


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)  # importing it is an ImportError


@pytest.mark.parametrize("same", [True, False])
def test_the_answer_is_as_fast_and_proven(without_highs: None, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = deep_problem(same=same, gradient=1 << 20, count=32)
    for more in (0, 1, 5, 20):
        budget = least_of(walks(problem)) + more * GIB
        mine = choose(problem, budget)
        assert mine.gap <= 0.005
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "highspy")
            other = choose(problem, budget)
        assert mine.levels.seconds <= other.levels.seconds * 1.005 + 1e-12


@settings(max_examples=100)
@given(step_problems(), st.integers(0, 200), st.sampled_from([1, 2, 3, 1000]), st.booleans(), st.integers(0, 60))
def test_labels_in_lists_are_those_in_arrays(
    problem: StepProblem, more: int, width: int, beam: bool, below: int
) -> None:
    """Also thinned, and below a limit (0: none)."""
    budget = least_of(walks(problem)) + more
    limit = below * 10**10 or None
    for walk in walks(problem):
        if walk.minimum_budget_bytes > budget:
            continue
        budgeted = BudgetedWalk.of(walk, budget)
        bound = relax(budgeted, relaxation(budgeted).multipliers)
        arrays = fastest_path(budgeted, bound, width=width, below=limit, beam=beam)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(label_setting, "np", None)
            assert fastest_path(budgeted, bound, width=width, below=limit, beam=beam) == arrays


@pytest.mark.parametrize("same", [True, False])
def test_a_deep_model_is_planned_in_lists(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = deep_problem(same=same, gradient=1 << 20, count=32)
    budget = least_of(walks(problem)) + 5 * GIB
    expected = choose(problem, budget)
    monkeypatch.setattr(label_setting, "np", None)
    assert choose(problem, budget).levels.seconds == expected.levels.seconds
