"""The replay of pipeline schedules: bubbles of the papers, and properties that hold for any stage times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jettison.cost import pipeline
from jettison.cost.pipeline import Replay, schedule_seconds
from jettison.memory.schedule import PipelineShape
from jettison.spec.layout import Schedule

ONE_F_ONE_B, GPIPE, ZERO_BUBBLE = Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZERO_BUBBLE
IN_A_V = Schedule.ZERO_BUBBLE_V
Times = list[list[float]]


def even(stages: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0) -> tuple[Times, Times]:
    return [[forward / chunks] * chunks] * stages, [[backward / chunks] * chunks] * stages


def played(schedule: Schedule, micro_batches: int, *works: Times, transfer: float = 0.0) -> Replay:
    stages, chunks = len(works[0]), len(works[0][0])
    shape = PipelineShape(schedule, stages=stages, micro_batches=micro_batches, virtual_stages=chunks)
    return schedule_seconds(shape, *works, transfer=transfer)


def efficiency(found: Replay) -> float:
    """Busy share of all devices' time."""
    return sum(found.busy) / (len(found.busy) * found.makespan)


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (4, 8), (8, 64)])
def test_the_bubble_of_equal_stages(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """(p - 1)(f + b): arXiv 2104.04473 §2.2.1, for GPipe and 1F1B alike."""
    found = played(schedule, micro_batches, *even(stages))
    assert found.makespan == pytest.approx((micro_batches + stages - 1) * 3)
    assert found.bubble == pytest.approx([(stages - 1) * 3] * stages)
    assert efficiency(found) == pytest.approx(micro_batches / (micro_batches + stages - 1))


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_virtual_stages_divide_the_bubble(chunks: int) -> None:
    """arXiv 2104.04473 §2.2.2."""
    found = played(ONE_F_ONE_B, 16, *even(4, chunks))
    assert found.makespan == pytest.approx(16 * 3 + 3 * 3 / chunks)


def test_zero_bubble_leaves_a_third() -> None:
    """ZB-H1, arXiv 2401.10241 §2.1: (p - 1)(f + b - w) for f = b = w, where 1F1B has three times as much."""
    ones = [[1.0]] * 4
    found = played(ZERO_BUBBLE, 12, ones, ones, ones)
    assert found.makespan == pytest.approx(12 * 3 + 3)


def test_the_slowest_stage_decides() -> None:
    """Stage 2: it waits 2 for its first forward; after two of them 1.5 for its first backward, which stage 3 sends at
    6.5; and 4 remain when it has done."""
    forward, backward = [[1.0], [1.0], [1.5], [1.0]], [[2.0], [2.0], [3.0], [2.0]]
    found = played(ONE_F_ONE_B, 100, forward, backward)
    assert found.makespan == pytest.approx(100 * 4.5 + 7.5)
    assert found.bubble[2] == pytest.approx(2 + 1.5 + 4)


def test_a_device_waits_for_what_is_sent() -> None:
    found = played(ONE_F_ONE_B, 1, [[1.0], [1.0]], [[2.0], [2.0]], transfer=0.25)
    assert found == Replay(busy=(3.0, 3.0), ends=(6.5, 4.25))


def test_a_v_has_no_bubbles_where_all_halves_are_alike() -> None:
    """ZB-V (arXiv 2401.10241 §6): behind the p - 1 steps in which the last device waits for its first, none."""
    ones = [[1.0, 1.0]] * 4
    found = played(IN_A_V, 12, ones, ones, ones)
    assert found.busy == (72.0,) * 4
    assert found.makespan == 75.0
    assert max(found.bubble) == 3.0


# any times ------------------------------------------------------------------------------------------------------------

seconds = st.floats(0.1, 3)


@st.composite
def pipelines(
    draw: st.DrawFn, most: int = 5, schedules: Sequence[Schedule] = tuple(Schedule)
) -> tuple[Schedule, int, list[Times]]:
    """Schedule, p, and times of p stages by kind of work."""
    stages = draw(st.integers(1, most))
    schedule = draw(st.sampled_from(schedules))
    interleaves = schedule in (ONE_F_ONE_B, ZERO_BUBBLE) and stages > 1
    chunks = draw(st.integers(1, 3)) if interleaves else 2 if schedule is IN_A_V else 1

    def times() -> Times:
        return [draw(st.lists(seconds, min_size=chunks, max_size=chunks)) for _ in range(stages)]

    return schedule, stages, [times() for _ in range(3 if schedule.splits else 2)]


@given(pipelines(), st.integers(1, 4), st.floats(0, 1))
def test_no_step_is_shorter_than_its_busiest_device_or_its_longest_path(pipeline, groups: int, transfer: float) -> None:
    schedule, stages, works = pipeline
    found = played(schedule, groups * stages, *works, transfer=transfer)
    chunks = len(works[0][0])
    sent = stages * chunks - 1 - (schedule is IN_A_V)  # the V's bottom is on one device
    path = sum(sum(map(sum, work)) for work in works[:2]) + 2 * sent * transfer * (stages > 1)
    assert found.makespan >= max(found.busy) - 1e-9
    assert found.makespan >= path - 1e-9
    assert (
        found.makespan
        <= groups * stages * sum(sum(map(sum, work)) for work in works)
        + groups * stages * 2 * stages * chunks * transfer
        + 1e-9
    )


@given(pipelines(), st.integers(1, 6), st.floats(0, 1))
def test_a_shorter_transfer_never_costs_time(pipeline, groups: int, transfer: float) -> None:
    schedule, stages, works = pipeline
    longer, shorter = (played(schedule, groups * stages, *works, transfer=t) for t in (transfer, transfer / 2))
    assert shorter.makespan <= longer.makespan + 1e-9


@given(pipelines(schedules=[each for each in Schedule if each is not IN_A_V]), st.integers(1, 8))
def test_more_micro_batches_never_lower_efficiency(pipeline, groups: int) -> None:
    schedule, stages, works = pipeline
    assume(schedule is not ZERO_BUBBLE or len(works[0][0]) == 1)  # interleaved, it can by a few %
    fewer, more = (efficiency(played(schedule, count * stages, *works)) for count in (groups, groups + 1))
    assert more >= fewer - 1e-9


@pytest.mark.parametrize("schedule", Schedule)
def test_many_micro_batches_are_extrapolated(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal stages, against the replay of everything."""
    chunks = 2 if schedule is IN_A_V else 1
    forward, backward = (
        [[1.0] * chunks, [1.4] * chunks, [1.1] * chunks],
        [[2.0] * chunks, [2.1] * chunks, [2.6] * chunks],
    )
    weight = [[[0.9] * chunks, [0.8] * chunks, [1.0] * chunks]] if schedule.splits else []
    whole = played(schedule, 100, forward, backward, *weight, transfer=0.1)
    monkeypatch.setattr(pipeline, "MOST_EVENTS", 150)
    found = played(schedule, 100, forward, backward, *weight, transfer=0.1)
    assert found.makespan == pytest.approx(whole.makespan)
    assert found.busy == pytest.approx(whole.busy)
