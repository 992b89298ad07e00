"""Orders of pipeline work agree with torch's, run without deadlock, and hold what the papers say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from operator import mul
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from jettison.core.errors import UsageError
from jettison.memory.schedule import Occupancy, OrderOptions, PipelineShape, ScheduledPass, Work, device_order
from jettison.spec.layout import Schedule
from support.orders import fullest, most_in_flight, peak_in_flight

Order = Sequence[ScheduledPass]
Case = tuple[Schedule, int, int, int]
"""Schedule, stages, micro-batches, virtual stages."""

ALL = tuple(Schedule)
GPIPE, ONE_F_ONE_B, ZERO_BUBBLE = Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE
IN_A_V = Schedule.ZERO_BUBBLE_V


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = draw(st.sampled_from(ALL))
    stages = draw(st.integers(1, 7))
    if schedule is IN_A_V:
        return schedule, stages, draw(st.integers(1, 30)), 2
    virtual_stages = draw(st.integers(1, 4)) if schedule is not GPIPE else 1
    if virtual_stages > 1:
        return schedule, stages, stages * draw(st.integers(1, 6)), virtual_stages
    return schedule, stages, draw(st.integers(1, 30)), 1


def shape_of(case: Case) -> PipelineShape:
    schedule, stages, micro_batches, virtual_stages = case
    return PipelineShape(schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)


def orders_of(case: Case) -> tuple[tuple[ScheduledPass, ...], ...]:
    return shape_of(case).orders


# --- torch.distributed.pipelining -----------------------------------------------------------------------------------

TORCH_WORK = {
    torch_schedules._ComputationType.FORWARD: Work.FORWARD,
    torch_schedules._ComputationType.FULL_BACKWARD: Work.BACKWARD,
    torch_schedules._ComputationType.BACKWARD_INPUT: Work.BACKWARD,
    torch_schedules._ComputationType.BACKWARD_WEIGHT: Work.WEIGHT,
}


def torch_stages(stages: int, virtual_stages: int, schedule: Schedule) -> list[SimpleNamespace]:
    """What torch's schedules ask of the stages of rank 0; they lay out the orders of all ranks from it."""
    shared = {"group_size": stages, "group_rank": 0, "num_stages": stages * virtual_stages, "submod": nn.Identity()}
    places = [schedule.place(0, chunk, stages) for chunk in range(virtual_stages)]
    return [SimpleNamespace(stage_index=place, **shared) for place in places]


def from_torch(actions: Iterable[torch_schedules._Action | None], stages: int) -> tuple[ScheduledPass, ...]:
    """Its steps in our words, bubbles and the reduction of gradients left out."""
    return tuple(
        ScheduledPass(TORCH_WORK[action.computation_type], action.microbatch_index, action.stage_index // stages)
        for action in actions
        if action is not None and action.computation_type in TORCH_WORK
    )


def torch_orders(case: Case) -> list[tuple[ScheduledPass, ...]]:
    schedule, stages, micro_batches, virtual_stages = case
    dummies = torch_stages(stages, virtual_stages, schedule)
    if schedule is GPIPE:
        found = torch_schedules.ScheduleGPipe(dummies[0], micro_batches)
    elif schedule is ZERO_BUBBLE:  # its "ZB1P" with one chunk a rank is ZB-H1
        found = torch_schedules.ScheduleInterleavedZeroBubble(dummies, micro_batches)
    elif schedule is IN_A_V:
        found = torch_schedules.ScheduleZBVZeroBubble(dummies, micro_batches)
    elif virtual_stages == 1:
        found = torch_schedules.Schedule1F1B(dummies[0], micro_batches)
    else:
        found = torch_schedules.ScheduleInterleaved1F1B(dummies, micro_batches)
    return [from_torch(found.pipeline_order[stage], stages) for stage in range(stages)]


def renumbered(order: Order) -> tuple[ScheduledPass, ...]:
    """With micro-batches numbered in the order in which each kind of work meets them."""
    seen: dict[Work, int] = {}
    steps = []
    for step in order:
        steps.append(ScheduledPass(step.work, seen.get(step.work, 0), step.chunk))
        seen[step.work] = seen.get(step.work, 0) + 1
    return tuple(steps)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 1), (4, 8), (5, 7)])
def test_gpipe_is_torchs(stages: int, micro_batches: int) -> None:
    case = (GPIPE, stages, micro_batches, 1)
    assert list(orders_of(case)) == torch_orders(case)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (2, 9), (4, 4), (4, 7), (8, 32)])
def test_1f1b_is_torchs(stages: int, micro_batches: int) -> None:
    case = (ONE_F_ONE_B, stages, micro_batches, 1)
    *ours, our_last = orders_of(case)
    *theirs, their_last = torch_orders(case)
    assert ours == theirs
    # torch 2.13 prints the forwards of its last stage as 1 to n; what it runs counts from 0
    assert our_last == renumbered(our_last) == renumbered(their_last)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "virtual_stages"),
    [(2, 2, 2), (8, 8, 4), (2, 4, 2), (2, 6, 3), (3, 6, 4), (4, 8, 2), (4, 12, 3), (5, 20, 2), (8, 64, 4)],
)
def test_interleaved_1f1b_is_torchs(stages: int, micro_batches: int, virtual_stages: int) -> None:
    case = (ONE_F_ONE_B, stages, micro_batches, virtual_stages)
    assert list(orders_of(case)) == torch_orders(case)


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 3), (2, 2), (2, 6), (4, 2), (4, 4), (4, 8), (5, 20), (8, 64)]
)
def test_zb_h1_is_torchs(stages: int, micro_batches: int) -> None:
    case = (ZERO_BUBBLE, stages, micro_batches, 1)
    assert list(orders_of(case)) == torch_orders(case)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "virtual_stages"),
    [(2, 2, 2), (8, 8, 4), (2, 4, 2), (2, 6, 3), (3, 6, 4), (4, 8, 2), (4, 12, 3), (5, 20, 2), (8, 64, 4)],
)
def test_interleaved_zero_bubble_is_torchs(stages: int, micro_batches: int, virtual_stages: int) -> None:
    case = (ZERO_BUBBLE, stages, micro_batches, virtual_stages)
    assert list(orders_of(case)) == torch_orders(case)


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 3), (2, 2), (2, 6), (4, 2), (4, 4), (4, 7), (4, 9), (5, 20), (8, 64)]
)
def test_zb_v_is_torchs(stages: int, micro_batches: int) -> None:
    case = (IN_A_V, stages, micro_batches, 2)
    assert list(orders_of(case)) == torch_orders(case)


# --- can it run? ----------------------------------------------------------------------------------------------------


def needs(
    stage: int, step: ScheduledPass, stages: int, virtual_stages: int, schedule: Schedule = ONE_F_ONE_B
) -> list[tuple[int, ScheduledPass]]:
    """Steps that must be done before ``step`` on ``stage``, each with its stage."""
    place, last = schedule.place(stage, step.chunk, stages), stages * virtual_stages - 1

    def at(place: int, work: Work) -> tuple[int, ScheduledPass]:
        chunk = place // stages
        device = next(device for device in range(stages) if schedule.place(device, chunk, stages) == place)
        return device, ScheduledPass(work, step.micro_batch, chunk)

    if step.work is Work.FORWARD:
        return [at(place - 1, Work.FORWARD)] if place else []
    if step.work is Work.WEIGHT:
        return [at(place, Work.BACKWARD)]
    return [at(place, Work.FORWARD)] + ([at(place + 1, Work.BACKWARD)] if place < last else [])


def left_undone(
    found: Sequence[Order], virtual_stages: int, schedule: Schedule = ONE_F_ONE_B
) -> list[tuple[int, ScheduledPass]]:
    """Where each device stands when no device can go on; empty where all have finished."""
    done: set[tuple[int, ScheduledPass]] = set()
    position = [0] * len(found)
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(found):
            while position[stage] < len(steps):
                step = steps[position[stage]]
                if any(need not in done for need in needs(stage, step, len(found), virtual_stages, schedule)):
                    break
                done.add((stage, step))
                position[stage] += 1
                moved = True
    return [
        (stage, steps[at]) for stage, (steps, at) in enumerate(zip(found, position, strict=True)) if at < len(steps)
    ]


@given(cases())
def test_every_step_runs_once_and_nothing_waits_for_ever(case: Case) -> None:
    schedule, stages, micro_batches, virtual_stages = case
    found = orders_of(case)
    works = [Work.FORWARD, Work.BACKWARD, Work.WEIGHT] if schedule.splits else [Work.FORWARD, Work.BACKWARD]
    expected = {ScheduledPass(*each) for each in product(works, range(micro_batches), range(virtual_stages))}
    assert len(found) == stages
    for steps in found:
        assert len(steps) == len(expected)
        assert set(steps) == expected
    assert left_undone(found, virtual_stages, schedule) == []


def test_the_check_finds_a_deadlock() -> None:
    first, second = orders_of((ONE_F_ONE_B, 2, 4, 1))
    early = (first[0], first[2], first[1], *first[3:])  # a backward before the forward that the other waits for
    assert left_undone([early, second], 1) == []
    hasty = (first[2], first[0], first[1], *first[3:])
    assert left_undone([hasty, second], 1) == [(0, first[2]), (1, second[0])]
    late = tuple(reversed(second))
    assert left_undone([first, late], 1)


# --- what is held ---------------------------------------------------------------------------------------------------


Held = set[tuple[int, int]]
"""Micro-batches and chunks."""


def moments(steps: Order) -> list[tuple[Held, Held, ScheduledPass, set[int]]]:
    """What waits for its backward and for its weight step as each step begins, and the chunks that have gradients."""
    splits = any(step.work is Work.WEIGHT for step in steps)
    whole: Held = set()
    half: Held = set()
    learned: set[int] = set()
    found = []
    for step in steps:
        who = (step.micro_batch, step.chunk)
        found.append((set(whole), set(half), step, set(learned)))
        if step.work is Work.FORWARD:
            assert who not in whole
            whole.add(who)
        if step.work is Work.BACKWARD:
            whole.remove(who)
            if splits:
                half.add(who)
            else:
                learned.add(step.chunk)
        if step.work is Work.WEIGHT:
            half.remove(who)
            learned.add(step.chunk)
    assert not whole
    assert not half
    return found


PRICES = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@given(cases(), *[PRICES] * 7)
def test_the_dearest_occupancy_is_the_dearest_moment(
    case: Case,
    whole_price: list[int],
    half_price: list[int],
    learned_price: list[int],
    forward_price: list[int],
    backward_price: list[int],
    weight_price: list[int],
    fresh_price: list[int],
) -> None:
    """Where nobody asks what has learned it costs nothing, and backwards are alike."""
    adds = {Work.FORWARD: forward_price, Work.BACKWARD: backward_price, Work.WEIGHT: weight_price}

    def above(step: ScheduledPass, learned: bool, learning: int) -> int:
        fresh = fresh_price[step.chunk] if learning and not learned and step.work is not Work.FORWARD else 0
        return adds[step.work][step.chunk] + fresh

    def price(state: Occupancy, learning: int) -> int:
        held = zip((*state.forward, *state.weight), (*whole_price[: len(state.forward)], *half_price), strict=False)
        gradients = sum(map(mul, state.learned, learned_price))
        learned = bool(learning) and state.learned[state.step.chunk] == 1
        return sum(count * bytes_ for count, bytes_ in held) + gradients + above(state.step, learned, learning)

    for steps, learning in product(orders_of(case), (0, case[-1])):
        brute = max(
            sum(whole_price[chunk] for _, chunk in whole)
            + sum(half_price[chunk] for _, chunk in half)
            + sum(learned_price[chunk] for chunk in learned if learning)
            + above(step, step.chunk in learned, learning)
            for whole, half, step, learned in moments(steps)
        )
        assert max(price(state, learning) for state in fullest(steps, OrderOptions(learning=bool(learning)))) == brute


@given(cases())
def test_occupancies_are_few_and_happen(case: Case) -> None:
    chunks = range(case[-1])
    for steps in orders_of(case):
        found = moments(steps)
        happened = {
            (
                tuple(sum(c == chunk for _, c in whole) for chunk in chunks),
                tuple(sum(c == chunk for _, c in half) for chunk in chunks),
                step,
                tuple(int(chunk in learned) for chunk in chunks),
            )
            for whole, half, step, learned in found
        }
        states = fullest(steps, OrderOptions(learning=True))
        assert {(state.forward, state.weight, state.step, state.learned) for state in states} <= happened
        assert len(set(states)) == len(states) <= (14 if case[0].splits else 9) * len(chunks)
        times = [steps.index(state.step) for state in states]
        assert times == sorted(times)
        assert peak_in_flight(steps) == max(len(whole) + len(half) for whole, half, _, _ in found)
        forward, weight = most_in_flight(steps)
        assert forward == tuple(map(max, zip(*(forward for forward, _, _, _ in happened), strict=True)))
        assert weight == tuple(map(max, zip(*(weight for _, weight, _, _ in happened), strict=True)))


def test_devices_learn_from_their_last_chunk_on() -> None:
    """4 stages of 2 chunks, 8 micro-batches: 11 chunks are in flight when backwards begin, and no gradients are there;
    they are of the last chunk alone when those of the first begin."""
    walk = OrderOptions(learning=True)
    states = device_order(shape_of((ONE_F_ONE_B, 4, 8, 2)), 0, walk=walk).fullest.values()
    backwards = [s for s in states if s.step.work is Work.BACKWARD]
    first = {chunk: next(s for s in backwards if s.step.chunk == chunk) for chunk in (0, 1)}
    assert (first[1].forward, first[1].learned) == ((7, 4), (0, 0))
    assert (sum(first[0].alive), first[0].learned) == (11, (0, 1))


def assert_truncation_changes_nothing(case: Case) -> None:
    schedule, _, _, virtual_stages = case
    for (stage, steps), learning in product(enumerate(orders_of(case)), (False, True)):
        every = fullest(steps, OrderOptions(learning=learning))
        few = tuple(device_order(shape_of(case), stage, walk=OrderOptions(learning=learning)).fullest.values())
        if schedule.splits and virtual_stages > 1:  # of weight steps that are left to the end the last are shown
            assert unnumbered(every) == unnumbered(few)
        else:
            assert every == few


def unnumbered(states: Iterable[Occupancy]) -> set[Occupancy]:
    """Whichever micro-batch they are about."""
    return {replace(state, step=replace(state.step, micro_batch=0)) for state in states}


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_few_micro_batches_stand_for_many(schedule: Schedule, stages: int) -> None:
    for micro_batches in range(1, 6 * stages + 2):
        assert_truncation_changes_nothing((schedule, stages, micro_batches, 2 if schedule is IN_A_V else 1))


@pytest.mark.parametrize(("stages", "virtual_stages"), [*product([2, 3, 4, 6], [2, 3, 4])])
def test_few_micro_batches_stand_for_many_interleaved(stages: int, virtual_stages: int) -> None:
    for rounds, schedule in product(range(1, 8), (ONE_F_ONE_B, ZERO_BUBBLE)):
        assert_truncation_changes_nothing((schedule, stages, rounds * stages, virtual_stages))


def test_large_pipelines_are_replayed_in_part() -> None:
    for stage in (0, 31, 63):
        many, more = (device_order(shape_of((ONE_F_ONE_B, 64, n, 4)), stage) for n in (2048, 64 * 10**9))
        assert many is more
        assert max(sum(state.alive) for state in many.fullest.values()) == 2 * (63 - stage) + 3 * 64 + 1


# --- what the papers say --------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 30))
def test_gpipe_holds_every_micro_batch_on_every_stage(stages: int, micro_batches: int) -> None:
    """ArXiv 1811.06965 §2.2: forwards of the whole batch come before the first backward."""
    found = orders_of((GPIPE, stages, micro_batches, 1))
    assert [peak_in_flight(steps) for steps in found] == [micro_batches] * stages
    assert len(set(found)) == 1


@given(st.integers(1, 8), st.integers(1, 30))
def test_1f1b_stage_i_holds_p_less_i_micro_batches(stages: int, micro_batches: int) -> None:
    """ArXiv 2104.04473 §2.2.1: at most as many as the pipeline is deep, where GPipe holds all; fewer further down."""
    found = orders_of((ONE_F_ONE_B, stages, micro_batches, 1))
    assert peak_in_flight(found[0]) == min(stages, micro_batches)
    assert [peak_in_flight(steps) for steps in found] == [min(stages - i, micro_batches) for i in range(stages)]


@pytest.mark.parametrize(("stages", "virtual_stages"), [*product(range(2, 9), range(2, 5))])
def test_interleaved_first_stage_holds_a_model_and_p_less_1_chunks(stages: int, virtual_stages: int) -> None:
    """ArXiv 2205.05198 §4.2.3: L (1 + (p-1)/(p m)) layers' worth on the first stage, m virtual stages."""
    layers = 5 * stages * virtual_stages
    paper = layers * (1 + Fraction(stages - 1, stages * virtual_stages))
    for rounds in (2, 3, 10):
        first, *_, last = orders_of((ONE_F_ONE_B, stages, rounds * stages, virtual_stages))
        assert peak_in_flight(first) == stages * virtual_stages + stages - 1
        assert peak_in_flight(first) * 5 == paper
        assert peak_in_flight(last) == (virtual_stages - 1) * stages + 1


def test_gpt_530b_first_stage_holds_139_layers() -> None:
    """ArXiv 2205.05198 Table 3: 105 layers, p = 35, m = 3, batch 280 of 1: 105 (1 + 34/105)."""
    states = device_order(shape_of((ONE_F_ONE_B, 35, 280, 3)), 0).fullest.values()
    assert max(sum(state.alive) for state in states) == 139


@given(st.integers(1, 8), st.integers(1, 30))
def test_zb_h1_holds_on_every_stage_what_1f1b_holds_on_the_first(stages: int, micro_batches: int) -> None:
    """ArXiv 2401.10241 §2.1: the peak of 1F1B, and as many micro-batches in flight on all workers."""
    found = orders_of((ZERO_BUBBLE, stages, micro_batches, 1))
    plain = orders_of((ONE_F_ONE_B, stages, micro_batches, 1))
    assert [peak_in_flight(steps) for steps in found] == [peak_in_flight(plain[0])] * stages
    for stage, (steps, whole) in enumerate(zip(found, plain, strict=True)):
        assert tuple(step for step in steps if step.work is not Work.WEIGHT) == whole
        assert most_in_flight(steps) == (most_in_flight(whole)[0], (min(stage + 1, micro_batches),))


def test_zb_h1_with_four_stages() -> None:
    """Every worker holds four, and later ones more of them as halves."""
    states = [device_order(shape_of((ZERO_BUBBLE, 4, 64, 1)), i).fullest.values() for i in range(4)]
    before = [[(*s.forward, *s.weight) for s in found if s.step.work is Work.BACKWARD] for found in states]
    assert before == [[(4, 0)], [(3, 1)], [(2, 2)], [(1, 3)]]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ((ONE_F_ONE_B, 4, 10, 2), "got 10 micro-batches for 4 pipeline stages .* takes a multiple of 4"),
        ((ONE_F_ONE_B, 4, 2, 2), "got 2 micro-batches"),
        ((GPIPE, 2, 4, 2), "2 virtual stages with the schedule gpipe"),
        ((GPIPE, 2, 4, 2), "2 virtual stages with the schedule gpipe; only 1f1b and zero-bubble interleave"),
        ((GPIPE, 2, 0, 1), "got 0 micro-batches"),
        ((ONE_F_ONE_B, 2, 2, 0), "got 0 virtual stages"),
    ],
)
def test_what_a_schedule_does_not_know(case: Case, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        shape_of(case)


def test_a_stage_that_is_not_there() -> None:
    shape = shape_of((GPIPE, 4, 1, 1))
    calls: list[Callable[[int], object]] = [shape.order, lambda stage: device_order(shape, stage)]
    for call in calls:
        with pytest.raises(UsageError, match="got stage 4 of a pipeline of 4; expected 0 to 3"):
            call(4)
    with pytest.raises(UsageError, match="got 0 stages"):
        shape_of((GPIPE, 0, 1, 1))
