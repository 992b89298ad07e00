"""Keep, recompute or offload against brute force, and what the solver takes."""

import dataclasses
import random
import sys
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.core.errors import Infeasible
from jettison.solve import label_setting
from jettison.solve.bound import BudgetedWalk, Multipliers, relax, relaxation
from jettison.solve.host_budget import mended
from jettison.solve.label_setting import fastest_path
from jettison.solve.problem import Choice, Link, ProblemRegion, RegionOption, RootOption, StepProblem, evaluate
from jettison.solve.shortest_path import StepWalk, WalkMove, least_of, walks
from jettison.solve.solver import choose
from support.offload_cases import Case, cases, deep_offload, fastest
from support.work import worked

EXACT = 1e-9


LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=80, deadline=None, suppress_health_check=LARGE)
@given(cases(), st.floats(0, 1))
def test_brute_force_is_never_faster(case: Case, share: float) -> None:
    brute_force_is_not_faster(case, share)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None, suppress_health_check=LARGE)
@given(cases(), st.floats(0, 1))
def test_brute_force_is_never_faster_in_thousands(case: Case, share: float) -> None:
    brute_force_is_not_faster(case, share)


def brute_force_is_not_faster(case: Case, share: float) -> None:
    problem = case.problem
    least = least_of(walks(problem))
    most = max(least, evaluate(problem, _fastest(problem)).peak_bytes)
    budget = least + round(share * (most - least))
    solution = choose(problem, budget)
    best = fastest(case, budget)
    assert best is not None
    assert solution.levels == evaluate(problem, solution.choice)
    assert solution.levels.peak_bytes <= budget
    if case.link.host_budget_bytes is not None:
        assert solution.levels.host_bytes <= case.link.host_budget_bytes
    assert solution.levels.seconds == pytest.approx(best, abs=EXACT)
    assert solution.lower_bound_seconds <= best + EXACT
    assert solution.gap == 0.0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(regions=5, tensors=6))
def test_the_smallest_budget_is_exact(case: Case) -> None:
    problem = case.problem
    least = least_of(walks(problem))
    assert fastest(case, least) is not None
    assert fastest(case, least - 1) is None
    with pytest.raises(Infeasible) as error:
        choose(problem, least - 1)
    assert error.value.minimum_budget_bytes == least
    assert choose(problem, least).levels.peak_bytes == least


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(regions=5, tensors=5), st.integers(0, 40))
def test_labels_alone_find_the_best(case: Case, more: int) -> None:
    """Without plans that pay for the host's bytes, without a limit from another plan."""
    problem = case.problem
    budget = least_of(walks(problem)) + more
    (walk,) = walks(problem)
    budgeted = BudgetedWalk.of(walk, budget)
    bound = relax(budgeted, relaxation(budgeted).multipliers)
    found = fastest_path(budgeted, bound, width=10**6)
    best = fastest(case, budget)
    assert found.path is not None and best is not None
    assert evaluate(problem, walk.choice(found.path.moves)).seconds == pytest.approx(best, abs=EXACT)
    assert bound.picoseconds <= best * 1e12 + 10  # a picosecond for each region that sends
    assert (found.loss, found.dropped) == (0, float("inf"))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(regions=4, tensors=5), st.integers(0, 40), st.lists(st.floats(0, 1e9), min_size=6, max_size=6))
def test_any_multipliers_bound_from_below(case: Case, more: int, prices: list[float]) -> None:
    problem = case.problem
    budget = least_of(walks(problem)) + more
    (walk,) = walks(problem)
    best = fastest(case, budget)
    assert best is not None
    multipliers = Multipliers(device=prices[: walk.count + 1], host=prices[5])
    assert relax(BudgetedWalk.of(walk, budget), multipliers).picoseconds <= best * 1e12 + 10


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(regions=6, tensors=5), st.integers(0, 60), st.integers(0, 2**16))
def test_exchanges_keep_both_budgets_and_lose_nothing(case: Case, more: int, seed: int) -> None:
    """From any plan that fits; the seconds are those of the replay."""
    problem = case.problem
    budget = least_of(walks(problem)) + more
    (walk,) = walks(problem)
    start = walked(problem, walk, budget, seed)
    moves = mended(BudgetedWalk.of(walk, budget), start)
    assert moves is not None
    found = walk.choice(moves)
    before, after = evaluate(problem, walk.choice(start)), evaluate(problem, found)
    assert after.peak_bytes <= budget
    assert case.link.host_budget_bytes is None or after.host_bytes <= case.link.host_budget_bytes
    moved = len(problem.regions) * 60e-12  # a picosecond for a megabyte that moves, or a part of one
    assert after.seconds <= before.seconds + moved


def walked(problem: StepProblem, walk: StepWalk, budget: int, seed: int) -> tuple[WalkMove, ...]:
    """Some plan that fits: the fastest, with regions changed by chance where it still fits."""
    rng = random.Random(seed)
    keys = choose(problem, budget).choice.regions
    path = [next(m for m in moves if m.key == key) for moves, key in zip(walk.moves, keys, strict=True)]
    for r in rng.sample(range(len(path)), len(path)):
        tried = [*path[:r], rng.choice(walk.moves[r]), *path[r + 1 :]]
        levels = evaluate(problem, walk.choice(tried))
        limit = problem.link.host_budget_bytes if problem.link is not None else None
        if levels.peak_bytes <= budget and (limit is None or levels.host_bytes <= limit):
            path = tried
    return tuple(path)


def test_exchanges_find_what_labels_miss() -> None:
    """128 alike layers with 60 GiB of the host and much room on the device: 1.3 % of a step without them."""
    problem = deep_offload(same=True, host_gib=60)
    found = choose(problem, least_of(walks(problem)) + (200 << 30))
    assert found.gap <= 0.002


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(regions=4, tensors=5), st.integers(0, 40))
def test_without_numpy_and_highs_the_answer_is_as_fast(case: Case, more: int) -> None:
    problem = case.problem
    budget = least_of(walks(problem)) + more
    expected = choose(problem, budget).levels.seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_setting, "np", None)
        assert choose(problem, budget).levels.seconds == pytest.approx(expected, abs=EXACT)
        patch.setitem(sys.modules, "highspy", None)
        assert choose(problem, budget).levels.seconds == pytest.approx(expected, abs=EXACT)


def _fastest(problem: StepProblem) -> Choice:
    keys = [min(r.options, key=lambda o: (o.seconds, o.offloaded_bytes)).key for r in problem.regions]
    return Choice(root="", regions=tuple(keys))


@pytest.mark.parametrize(
    ("same", "host_gib", "limit"),
    [
        pytest.param(True, None, 175_000, marks=pytest.mark.slow),
        (True, 100, 450_000),
        (False, None, 275_000),
        pytest.param(False, 60, 800_000, marks=pytest.mark.slow),
    ],
)
def test_deep_stages_are_planned_quickly(same: bool, host_gib: int | None, limit: int) -> None:
    """128 layers, four micro-batches in flight: to 0.5 % of a step. A million calls are some second."""
    problem = deep_offload(same=same, host_gib=host_gib)
    minimum = least_of(walks(problem))
    choose(problem, minimum)  # the first call loads the solver
    seconds = []
    for more in (0, 2, 10, 40, 120, 200) if same else (0, 10, 120):
        solution, work = worked(partial(choose, problem, minimum + (more << 30)))
        assert work < limit
        assert solution.gap <= 0.005
        assert solution.levels.host_bytes <= (host_gib or 1000) << 30
        seconds.append(solution.levels.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_levels_with_copies_by_hand() -> None:
    """Two sends of 8 and 6 bytes at 1 byte a second, beside passes of 3 and 5 seconds."""
    problem = by_hand()
    levels = evaluate(problem, Choice(root="", regions=("send8", "send6", "keep")))
    assert [(level.phase.value, level.region, level.nbytes) for level in levels.levels] == [
        ("forward", 0, 100 + 12),
        ("forward", 1, 100 + 2 + 8 + 12),
        ("forward", 2, 100 + 2 + 4 + 6 + 12),
        ("loss", None, 100 + 2 + 4 + 10),
        ("backward", 2, 100 + 2 + 4 + 10 + 6 + 3),
        ("backward", 1, 100 + 2 + 4 + 6 + 8 + 3),
        ("backward", 0, 100 + 2 + 8 + 3),
        ("tail", None, 100),
        ("optimizer", None, 100),
    ]
    assert levels.stalled_seconds == (8 - 3) + (8 - 5) + (6 - 3) + (6 - 5)
    assert levels.seconds == levels.stalled_seconds
    assert levels.host_bytes == 2 * (8 + 6)


def test_a_plan_that_needs_no_offload_makes_none() -> None:
    """Also where copies hide, so that moving costs nothing; and of what has to move the least is moved."""
    problem = by_hand(rate=1e12, scale=10**6)
    keys = {budget: choose(problem, budget * 10**6).choice.regions for budget in (133, 132, 126)}
    assert keys[133] == ("keep", "keep", "keep")
    assert keys[132] == ("send6", "keep", "keep")
    assert keys[126] == ("send8", "keep", "keep")
    assert choose(problem, 133 * 10**6).levels.seconds == 0.0


def test_a_host_budget_of_nothing_moves_nothing() -> None:
    problem = by_hand(rate=1e6, host=0)
    assert choose(problem, 133).choice.regions == ("keep", "keep", "keep")
    with pytest.raises(Infeasible) as error:
        choose(problem, 132)
    assert error.value.minimum_budget_bytes == 133


@pytest.mark.parametrize("numpy", [True, False])
def test_bytes_of_the_host_are_saved_for_where_they_are_worth_most(
    numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one: the first would save 1 s, the third 10; what the second does is all the same."""

    def region(name: str, seconds: float) -> ProblemRegion:
        plain = RegionOption(
            key="again", resident_bytes=0, forward_peak_bytes=8, backward_peak_bytes=0, seconds=seconds
        )
        send = dataclasses.replace(plain, key="send", seconds=0.0, offloaded_bytes=8)
        options = (plain, send) if seconds else (plain,)
        return ProblemRegion(name=name, class_key=name, options=options, gradient_bytes=0)

    regions = tuple(region(f"layers.{i}", seconds) for i, seconds in enumerate((1.0, 0.0, 10.0, 0.0)))
    link = Link(bytes_per_second=1e12, host_budget_bytes=8)
    problem = StepProblem(static_bytes=0, optimizer_peak_bytes=0, regions=regions, root=(quiet(4),), link=link)
    if not numpy:
        monkeypatch.setattr(label_setting, "np", None)
    (walk,) = walks(problem)
    budgeted = BudgetedWalk.of(walk, 100)
    found = fastest_path(budgeted, relax(budgeted, Multipliers(device=[0.0] * 5)), width=100)
    assert found.path is not None
    assert walk.choice(found.path.moves).regions == ("again", "again", "send", "again")
    priced = relax(budgeted, Multipliers(device=[0.0] * 5, host=1e11))
    assert priced.picoseconds == pytest.approx(0.8e12, rel=1e-6), "at 0.8 s for 8 bytes both move, and 8 are free"


def test_offload_has_to_make_sense() -> None:
    problem = by_hand()
    with pytest.raises(AssertionError, match="there is no link"):
        dataclasses.replace(problem, link=None)
    with pytest.raises(AssertionError, match="the last region"):
        dataclasses.replace(problem, regions=problem.regions[:2], root=(quiet(2),))
    only = dataclasses.replace(problem.regions[0], options=problem.regions[0].options[1:])
    no_room = dataclasses.replace(
        problem, regions=(only, *problem.regions[1:]), link=Link(bytes_per_second=1.0, host_budget_bytes=0)
    )
    with pytest.raises(ValueError, match="host budget of 0 bytes"):
        choose(no_room, 10**6)


def quiet(count: int) -> RootOption:
    zeros = (0,) * count
    return RootOption(
        key="", held_forward_bytes=zeros, held_backward_bytes=zeros, loss_peak_bytes=0, tail_peak_bytes=0, seconds=0.0
    )


def by_hand(rate: float = 1.0, host: int | None = None, scale: int = 1) -> StepProblem:
    """Three regions that save 10 bytes each, times the scale."""
    keep = RegionOption(
        key="keep", resident_bytes=10 * scale, forward_peak_bytes=12 * scale, backward_peak_bytes=3 * scale, seconds=0.0
    )
    sends = {
        sent: dataclasses.replace(
            keep, key=f"send{sent}", resident_bytes=(10 - sent) * scale, offloaded_bytes=sent * scale
        )
        for sent in (8, 6)
    }
    options = ((keep, sends[8], sends[6]), (keep, sends[6]), (keep,))
    return StepProblem(
        static_bytes=100 * scale,
        optimizer_peak_bytes=0,
        regions=tuple(
            ProblemRegion(
                name=f"layers.{r}",
                class_key=f"{r}",
                options=each,
                gradient_bytes=0,
                forward_seconds=3.0,
                backward_seconds=5.0,
                copies=2,
            )
            for r, each in enumerate(options)
        ),
        root=(quiet(3),),
        link=Link(bytes_per_second=rate, host_budget_bytes=host),
    )
