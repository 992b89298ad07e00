"""The choice over a step against brute force, and the proof about it."""

import dataclasses
from functools import partial
from itertools import groupby

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jettison.core.errors import Infeasible
from jettison.solve.bound import BudgetedWalk, Multipliers, relax, relaxation
from jettison.solve.label_setting import fastest_path
from jettison.solve.problem import Choice, LevelPhase, RegionOption, RootOption, SegmentOption, StepProblem, evaluate
from jettison.solve.shortest_path import least_of, walks
from jettison.solve.solver import Solution, choose, in_runs
from support.plan_cases import all_choices, brute_force, deep_problem, layer, of_one_class, step_problems
from support.work import worked

MIB = 1 << 20
EXACT = 1e-9


@settings(max_examples=200, deadline=None)
@given(step_problems(), st.integers(0, 400))
def test_the_choice_is_the_best_of_all(problem: StepProblem, budget: int) -> None:
    fitting = [seconds for peak, seconds in brute_force(problem) if peak <= budget]
    if not fitting:
        with pytest.raises(Infeasible):
            choose(problem, budget)
        return
    solution = choose(problem, budget)
    assert solution.levels == evaluate(problem, solution.choice)
    assert solution.levels.peak_bytes <= budget
    assert solution.levels.seconds == pytest.approx(min(fitting), abs=EXACT)
    assert solution.lower_bound_seconds <= min(fitting) + EXACT
    assert solution.gap == 0.0


@settings(max_examples=200, deadline=None)
@given(step_problems())
def test_the_smallest_budget_is_exact_and_works(problem: StepProblem) -> None:
    everything = brute_force(problem)
    minimum = min(peak for peak, _ in everything)
    assert least_of(walks(problem)) == minimum
    with pytest.raises(Infeasible) as error:
        choose(problem, minimum - 1)
    assert (error.value.minimum_budget_bytes, error.value.budget_bytes) == (minimum, minimum - 1)
    solution = choose(problem, error.value.minimum_budget_bytes)
    assert solution.levels.peak_bytes == minimum
    assert solution.levels.seconds == pytest.approx(min(s for peak, s in everything if peak == minimum), abs=EXACT)


@settings(max_examples=100, deadline=None)
@given(step_problems(), st.integers(0, 200), st.integers(0, 200))
def test_more_budget_is_never_slower(problem: StepProblem, less: int, more: int) -> None:
    base = least_of(walks(problem))
    slow, fast = choose(problem, base + less), choose(problem, base + less + more)
    assert fast.levels.seconds <= slow.levels.seconds + EXACT


def _units(choice: Choice) -> list[tuple[str, int]]:
    """Key and length of each region's option and of each segment."""
    stops, at, found = dict(choice.segments), 0, list[tuple[str, int]]()
    while at < len(choice.regions):
        stop = stops.get(at, at + 1)
        found.append((choice.regions[at], stop - at))
        at = stop
    return found


def _scattered(choice: Choice) -> bool:
    units = _units(choice)
    return len(list(groupby(units))) > len(set(units))


@settings(max_examples=40, deadline=None)
@given(step_problems().filter(lambda problem: len(problem.regions) > 2), st.data())
def test_equal_regions_have_each_option_in_one_run(problem: StepProblem, data: st.DataObject) -> None:
    problem = of_one_class(problem)
    every = list(all_choices(problem))
    choice = data.draw(st.sampled_from([one for one in every if _scattered(one)] or every))
    before = evaluate(problem, choice)
    ordered = in_runs(problem, choice, lambda one: evaluate(problem, one).peak_bytes)
    after = evaluate(problem, ordered)
    assert sorted(_units(ordered)) == sorted(_units(choice))
    assert ordered.root == choice.root
    assert after.peak_bytes <= before.peak_bytes
    assert after.seconds == pytest.approx(before.seconds)
    same = (one for one in every if one.root == choice.root and sorted(_units(one)) == sorted(_units(choice)))
    allowed = any(not _scattered(one) and evaluate(problem, one).peak_bytes <= before.peak_bytes for one in same)
    assert _scattered(ordered) != allowed
    solution = choose(problem, before.peak_bytes)
    assert solution.levels == evaluate(problem, solution.choice)


def test_calls_of_one_block_that_have_options_of_their_own_stay_as_they_are() -> None:
    """A discriminator that is called with its parameters frozen, then trained: two programs under one class."""
    problem, other = small_problem(), dataclasses.replace(DROP, key="keep-1")
    regions = [dataclasses.replace(problem.regions[r % 2], options=(KEEP, (DROP, other)[r % 2])) for r in range(4)]
    problem = dataclasses.replace(problem, regions=tuple(regions), root=(quiet_root(4),), segments=())
    choice = Choice(root="none", regions=(DROP.key, KEEP.key, DROP.key, other.key))
    assert in_runs(problem, choice, lambda one: evaluate(problem, one).peak_bytes) == choice


@settings(max_examples=100, deadline=None)
@given(step_problems(), st.integers(0, 200), st.lists(st.floats(0, 1e10), min_size=6, max_size=6))
def test_any_multipliers_bound_from_below(problem: StepProblem, more: int, multipliers: list[float]) -> None:
    budget = least_of(walks(problem)) + more
    for walk in walks(problem):
        fitting = [
            replay.seconds
            for replay in (evaluate(problem, c) for c in all_choices(problem) if c.root == walk.root)
            if replay.peak_bytes <= budget
        ]
        assume(fitting)
        budgeted = BudgetedWalk.of(walk, budget)
        for prices in (Multipliers(device=multipliers[: walk.count + 1]), relaxation(budgeted).multipliers):
            assert relax(budgeted, prices).picoseconds <= min(fitting) * 1e12 + 1


@settings(max_examples=50, deadline=None)
@given(step_problems(), st.integers(0, 100), st.integers(1, 4))
def test_thin_labels_say_what_they_lost(problem: StepProblem, more: int, width: int) -> None:
    budget = least_of(walks(problem)) + more
    for walk in walks(problem):
        if walk.minimum_budget_bytes > budget:
            continue
        budgeted = BudgetedWalk.of(walk, budget)
        bound = relax(budgeted, Multipliers(device=[0.0] * (walk.count + 1)))
        exact = fastest_path(budgeted, bound, width=10**6)
        thin = fastest_path(budgeted, bound, width=width)
        beam = fastest_path(budgeted, bound, width=width, beam=True)
        assert exact.path is not None and thin.path is not None and beam.path is not None
        assert exact.loss == 0
        assert thin.path.picoseconds - thin.loss <= exact.path.picoseconds <= thin.path.picoseconds
        assert exact.path.picoseconds <= beam.path.picoseconds


@settings(max_examples=50, deadline=None)
@given(step_problems(plain_seconds=1.0), st.integers(0, 200))
def test_the_same_problem_has_the_same_answer(problem: StepProblem, more: int) -> None:
    budget = least_of(walks(problem)) + more

    def decided(solution: Solution) -> Solution:
        return dataclasses.replace(solution, solver_seconds=0.0)

    assert decided(choose(problem, budget)) == decided(choose(problem, budget))


def quiet_root(count: int) -> RootOption:
    zeros = (0,) * count
    return RootOption(
        key="none", held_forward_bytes=zeros, held_backward_bytes=zeros, loss_peak_bytes=0, tail_peak_bytes=0, seconds=0
    )


KEEP = RegionOption(key="none", resident_bytes=10, forward_peak_bytes=12, backward_peak_bytes=3, seconds=0.0)
DROP = RegionOption(key="full", resident_bytes=1, forward_peak_bytes=12, backward_peak_bytes=12, seconds=1.0)


def small_problem(segments: tuple[SegmentOption, ...] = ()) -> StepProblem:
    return StepProblem(
        static_bytes=100,
        optimizer_peak_bytes=7,
        regions=tuple(layer(r, (KEEP, DROP), gradient=2) for r in range(3)),
        root=(quiet_root(3),),
        segments=segments,
    )


def test_levels_by_hand() -> None:
    levels = evaluate(small_problem(), Choice(root="none", regions=("full", "none", "none")))
    assert [(level.phase.value, level.region, level.nbytes) for level in levels.levels] == [
        ("forward", 0, 112),
        ("forward", 1, 113),
        ("forward", 2, 123),
        ("loss", None, 121),
        ("backward", 2, 124),
        ("backward", 1, 116),
        ("backward", 0, 117),
        ("tail", None, 106),
        ("optimizer", None, 107),
    ]
    assert (levels.peak.phase, levels.peak.region, levels.peak_bytes) == (LevelPhase.BACKWARD, 2, 124)
    assert (levels.seconds, levels.resident_bytes) == (1.0, 21)


def test_levels_of_a_segment_by_hand() -> None:
    segment = SegmentOption(
        key="pair", start=0, stop=2, resident_bytes=1, forward_peak_bytes=13, backward_peak_bytes=(14, 24), seconds=1.5
    )
    problem = small_problem((segment,))
    levels = evaluate(problem, Choice(root="none", regions=("pair", "pair", "none"), segments=((0, 2),)))
    assert [level.nbytes for level in levels.levels] == [113, 113, 113, 111, 114, 127, 119, 106, 107]
    assert levels.seconds == 1.5


def test_everything_kept_is_a_normal_answer() -> None:
    solution = choose(small_problem(), 10_000)
    assert solution.choice == Choice(root="none", regions=("none",) * 3)
    assert (solution.gap, solution.levels.seconds) == (0.0, 0.0)


def test_a_step_without_regions() -> None:
    root = dataclasses.replace(quiet_root(0), loss_peak_bytes=5, tail_peak_bytes=9)
    problem = StepProblem(static_bytes=1, optimizer_peak_bytes=4, regions=(), root=(root,))
    assert least_of(walks(problem)) == 10
    assert choose(problem, 10).choice == Choice(root="none", regions=())


@pytest.mark.parametrize(
    "gradient",
    [pytest.param(1 * MIB, marks=pytest.mark.slow), 200 * MIB, pytest.param(600 * MIB, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("same", "roots", "limit"), [(True, 1, 125_000), (False, 1, 100_000), (False, 6, 425_000)])
def test_deep_models_are_planned_quickly(same: bool, roots: int, limit: int, gradient: int) -> None:
    """A million calls are some second."""
    problem = deep_problem(same=same, gradient=gradient, roots=roots)
    minimum = least_of(walks(problem))
    choose(problem, minimum)  # the first call loads the solver
    seconds = []
    for more in (0, 1, 5, 20, 60, 150, 250):
        solution, work = worked(partial(choose, problem, minimum + (more << 30)))
        assert work < limit
        seconds.append(solution.levels.seconds)
        assert solution.gap <= 0.005
        assert solution.levels.peak_bytes <= minimum + (more << 30)
    assert seconds == sorted(seconds, reverse=True)
