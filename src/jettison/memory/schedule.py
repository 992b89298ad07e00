"""Orders of a pipeline stage's passes; what it holds meanwhile is in `memory.actions`, which walks through an order.

p stages, each with v virtual ones, called its chunks: chunk c of stage r comes in place c p + r of the whole model, or
where `Schedule.place` says.

Sources: GPipe arXiv 1811.06965; 1F1B as PipeDream-flush in arXiv 2006.09503; interleaved 1F1B arXiv 2104.04473 §2.2;
zero bubble ZB-H1 arXiv 2401.10241 §2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import product, takewhile
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.layout import Schedule


class Work(StrEnum):
    """What a device does in one step; the last three are beside the passes of a schedule."""

    FORWARD = "F"
    BACKWARD = "B"  # all of it or, where the schedule splits it, the half for the gradient of the input
    WEIGHT = "W"  # the other half, for the gradients of the weights
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


PASSES: Final = (Work.FORWARD, Work.BACKWARD, Work.WEIGHT)


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """One chunk of one micro-batch through one kind of work; both count from 0."""

    work: Work
    micro_batch: int
    chunk: int


def orders(
    schedule: Schedule, *, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> tuple[tuple[ScheduledPass, ...], ...]:
    """The order of each device, first stage first; see `order`.

    Raises:
        UsageError: see `order`.
    """
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages, "group": group}
    check_sizes(schedule, stage=0, **sizes)
    return tuple(order(schedule, stage=stage, **sizes) for stage in range(stages))


def order(
    schedule: Schedule, *, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> tuple[ScheduledPass, ...]:
    """All steps of one device, in order: warm-up forwards, then a forward and a backward in turn, then what is left.

    Chunks take turns, a group of p micro-batches at a time, or of as many as ``group`` says, and the last of what is
    left (Megatron-LM, ``megatron/core/pipeline_parallel/schedules.py``, ``get_schedule_table`` with
    ``--microbatch-group-size-per-virtual-pipeline-stage``); forwards from the first chunk and backwards from the last.
    Backwards go through micro-batches in the order of the forwards, with GPipe as well: its paper draws them the other
    way round, which holds the same.

    ZB-H1 is 1F1B with each weight step put off by as many backwards as stages come before: what a later stage waits
    less for backwards it waits more for weights, and every stage holds p micro-batches. Interleaved it is torch's
    (``torch/distributed/pipelining/schedules.py``, ``ScheduleInterleavedZeroBubble``): each stage warms up one forward
    longer than the next, not two.

    Raises:
        UsageError: sizes below one, a stage that is not there, or a combination that the schedule does not know.
    """
    check_sizes(
        schedule, stage=stage, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages, group=group
    )
    if schedule is Schedule.ZERO_BUBBLE_V:
        return tuple(_in_a_v(stage, stages, micro_batches))
    forwards, backwards = _both_ways(group or stages, micro_batches, virtual_stages)
    warm_up = _warm_up(schedule, stage, stages, micro_batches, virtual_stages, group)
    steps = list(forwards[:warm_up])
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        steps += pair
    steps += backwards[len(forwards) - warm_up :]
    return tuple(_with_weights(steps, delay=stage) if schedule is Schedule.ZERO_BUBBLE else steps)


def _in_a_v(stage: int, stages: int, micro_batches: int) -> Iterator[ScheduledPass]:
    """Of ZB-V (arXiv 2401.10241 §6), whose second chunks go from the last device to the first.

    As ``torch/distributed/pipelining/schedules.py`` has it, ``ScheduleZBVZeroBubble``: with fewer than 2 p - 1
    micro-batches what there is of the order of so many.
    """
    many = max(2 * stages - 1, micro_batches)
    done: dict[tuple[Work, int], int] = defaultdict(int)

    def run(*words: str) -> Iterator[ScheduledPass]:
        for word in words:
            work, chunk = Work(word[0]), int(word[1])
            number = done[work, chunk]
            done[work, chunk] += 1
            if number < micro_batches:
                yield ScheduledPass(work, number, chunk)

    yield from run(*["F0"] * (2 * (stages - stage) - 1), *["F1", "F0"] * stage)
    yield from run(*["F1", "B1", "W1"] * (stages - stage))
    while done[Work.FORWARD, 1] < many:
        more = ["F0"] if done[Work.FORWARD, 0] < many else []
        yield from run(*more, "B0", "W0", "F1", "B1", "W1")
    yield from run(*["B0", "B1"] * stage, *["B0", "W0"] * (stages - stage))
    for chunk in (1, 0):
        yield from run(*[f"W{chunk}"] * (done[Work.BACKWARD, chunk] - done[Work.WEIGHT, chunk]))


@lru_cache(maxsize=8)  # stages of one schedule are asked for one after the other
def _both_ways(group: int, micro_batches: int, virtual_stages: int) -> tuple[tuple[ScheduledPass, ...], ...]:
    forwards, backwards = [], []
    for first in range(0, micro_batches, group):
        for chunk, micro_batch in product(range(virtual_stages), range(first, min(first + group, micro_batches))):
            forwards.append(ScheduledPass(Work.FORWARD, micro_batch, chunk))
            backwards.append(ScheduledPass(Work.BACKWARD, micro_batch, virtual_stages - 1 - chunk))
    return tuple(forwards), tuple(backwards)


def _warm_up(schedule: Schedule, stage: int, stages: int, micro_batches: int, virtual_stages: int, group: int) -> int:
    everything = micro_batches * virtual_stages
    if schedule is Schedule.ZERO_BUBBLE_V:
        begin = takewhile(lambda step: step.work is Work.FORWARD, _in_a_v(stage, stages, micro_batches))
        return len(list(begin)) - 1
    if schedule is Schedule.GPIPE:
        return everything
    later = stages - stage - 1
    if virtual_stages == 1:
        return min(later, everything)
    if schedule is Schedule.ZERO_BUBBLE:
        return min(later + (virtual_stages - 1) * (group or stages), everything)
    return min(2 * later + (virtual_stages - 1) * (group or stages), everything)


def _with_weights(steps: Sequence[ScheduledPass], *, delay: int) -> Iterator[ScheduledPass]:
    """Put the weight half of each backward behind the ``delay``-th backward after it."""
    waiting: list[ScheduledPass] = []
    for step in steps:
        yield step
        if step.work is Work.BACKWARD:
            waiting.append(ScheduledPass(Work.WEIGHT, step.micro_batch, step.chunk))
            if len(waiting) > delay:
                yield waiting.pop(0)
    yield from waiting


def check_sizes(
    schedule: Schedule, *, stage: int, stages: int, micro_batches: int, virtual_stages: int, group: int = 0
) -> None:
    """Is there such a stage, and does the schedule take such sizes?

    Raises:
        UsageError: no.
    """
    for name, size in (("stages", stages), ("micro-batches", micro_batches), ("virtual stages", virtual_stages)):
        if size < 1:
            raise UsageError(f"got {size} {name} in a pipeline; expected 1 or more")
    if not 0 <= stage < stages:
        raise UsageError(f"got stage {stage} of a pipeline of {stages}; expected 0 to {stages - 1}")
    if schedule is Schedule.ZERO_BUBBLE_V:
        if virtual_stages != 2 or group:
            raise UsageError(f"got {virtual_stages} virtual stages with the schedule {schedule}; it takes 2")
        return
    if virtual_stages == 1:
        return
    if schedule is Schedule.GPIPE:
        raise UsageError(
            f"got {virtual_stages} virtual stages with the schedule {schedule}; only {Schedule.ONE_F_ONE_B} and "
            f"{Schedule.ZERO_BUBBLE} interleave"
        )
    if group:
        _check_group(group, stages, micro_batches)
    elif micro_batches % stages:
        raise UsageError(
            f"got {micro_batches} micro-batches for {stages} pipeline stages of {virtual_stages} virtual stages each; "
            f"interleaving takes a multiple of {stages}: change the global batch, or give --virtual-stages 1, or a "
            f"--micro-batch-group of {stages} or more, as Megatron takes it"
        )


def _check_group(group: int, stages: int, micro_batches: int) -> None:
    """As Megatron-LM has it, ``forward_backward_pipelining_with_interleaving``."""
    if not stages <= group <= micro_batches:
        raise UsageError(
            f"got --micro-batch-group {group}; expected {stages}, the pipeline stages, to {micro_batches}, the "
            "micro-batches of a step"
        )
    if 0 < micro_batches % group < stages:
        raise UsageError(
            f"got --micro-batch-group {group} for {micro_batches} micro-batches; what is left for the last group, "
            f"{micro_batches % group}, has to be 0 or at least the {stages} pipeline stages"
        )


def window(
    schedule: Schedule, *, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> int:
    """Forwards through a chunk that a device has in flight at most: those before its first backward.

    Raises:
        UsageError: see `order`.
    """
    check_sizes(
        schedule, stage=stage, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages, group=group
    )
    warm_up = _warm_up(schedule, stage, stages, micro_batches, virtual_stages, group)
    return min(warm_up + 1, micro_batches * virtual_stages)


def recomputing_share(
    schedule: Schedule,
    *,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual_stages: int = 1,
    group: int = 0,
    whole: int,
) -> float:
    """Of a device's forwards, those that keep less: forward i keeps everything where i modulo `window` < ``whole``.

    Raises:
        UsageError: see `order`.
    """
    size = window(
        schedule, stage=stage, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages, group=group
    )
    windows, rest = divmod(micro_batches * virtual_stages, size)
    less = windows * max(0, size - whole) + max(0, rest - whole)
    return less / (micro_batches * virtual_stages)


def apart(steps: Sequence[ScheduledPass], chunks: int, size: int, whole: int) -> Iterator[ScheduledPass]:
    """With chunks of their own for forwards that keep everything, and for their backwards.

    Args:
        chunks: of the device, without these.
        size: of a `window`; ``whole`` of each keep everything.
    """
    kept: set[tuple[int, int]] = set()
    forwards = 0
    for step in steps:
        key = step.micro_batch, step.chunk
        if step.work is Work.FORWARD:
            if forwards % size < whole:
                kept.add(key)
            forwards += 1
        yield ScheduledPass(step.work, step.micro_batch, step.chunk + (chunks if key in kept else 0))
