"""Orders of a pipeline stage's passes; `memory.actions` adds the memory held before each of them.

There are p stages, each with v virtual stages (its chunks). Chunk c of stage r is number c p + r of the whole model,
unless `Schedule.place` says otherwise.

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
    """Work of a device in one action; the last three are not passes of a schedule."""

    FORWARD = "F"
    BACKWARD = "B"  # all of it, or the half for the gradient of the input if the schedule splits it
    WEIGHT = "W"  # the other half, for the gradients of the weights
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


PASSES: Final = (Work.FORWARD, Work.BACKWARD, Work.WEIGHT)


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """One pass of one micro-batch through one chunk; both count from 0."""

    work: Work
    micro_batch: int
    chunk: int


def orders(
    schedule: Schedule, *, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> tuple[tuple[ScheduledPass, ...], ...]:
    """Return the order of each device, first stage first; see `order`.

    Raises:
        UsageError: see `order`.
    """
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages, "group": group}
    check_sizes(schedule, stage=0, **sizes)
    return tuple(order(schedule, stage=stage, **sizes) for stage in range(stages))


def order(
    schedule: Schedule, *, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> tuple[ScheduledPass, ...]:
    """Return all passes of one device in order: warm-up forwards, alternating forwards and backwards, the remainder.

    Chunks take turns: p micro-batches at a time, or ``group``, with the remainder last (Megatron-LM,
    ``megatron/core/pipeline_parallel/schedules.py``, ``get_schedule_table`` with
    ``--microbatch-group-size-per-virtual-pipeline-stage``); forwards from the first chunk and backwards from the last.
    Backwards follow the order of the forwards, with GPipe as well: its paper draws them in reverse order, which needs
    the same memory.

    ZB-H1 is 1F1B with each weight step delayed by as many backwards as there are earlier stages, so that every stage
    holds p micro-batches: a later stage has fewer micro-batches in flight, and more weight steps pending. The
    interleaved form is torch's (``torch/distributed/pipelining/schedules.py``, ``ScheduleInterleavedZeroBubble``):
    each stage warms up with one forward more than the next, not two.

    Raises:
        UsageError: a size below one, a stage out of range, or a combination that the schedule does not support.
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
    """Yield the passes of ZB-V (arXiv 2401.10241 §6), whose second chunks go from the last device to the first.

    As in ``ScheduleZBVZeroBubble`` of ``torch/distributed/pipelining/schedules.py``: with fewer than 2 p - 1
    micro-batches, the order of 2 p - 1 without the missing ones.
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


@lru_cache(maxsize=8)  # callers ask for all stages of one schedule in turn
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
    """Put the weight half of each backward after the ``delay``-th later backward."""
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
    """Check that the stage exists and that the schedule supports these sizes.

    Raises:
        UsageError: it does not.
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
    """Check a group size as Megatron-LM does in ``forward_backward_pipelining_with_interleaving``."""
    if not stages <= group <= micro_batches:
        raise UsageError(
            f"got --micro-batch-group {group}; expected {stages}, the pipeline stages, to {micro_batches}, the "
            "micro-batches of a step"
        )
    if 0 < micro_batches % group < stages:
        raise UsageError(
            f"got --micro-batch-group {group} for {micro_batches} micro-batches; the remainder in the last group, "
            f"{micro_batches % group}, has to be 0 or at least the {stages} pipeline stages"
        )


def window(
    schedule: Schedule, *, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1, group: int = 0
) -> int:
    """Return the most forwards of a chunk that a device has in flight: those before its first backward.

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
    """Return the share of a device's forwards that checkpoint: all but those with i modulo `window` < ``whole``.

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
    """Yield the passes, with extra chunks for forwards without checkpointing and their backwards.

    Args:
        chunks: number of the device's chunks, without the extra ones.
        size: length of a `window`; ``whole`` forwards of each run without checkpointing.
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
