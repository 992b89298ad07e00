"""Orders of a pipeline stage's passes; `memory.actions` adds the memory held before each of them.

There are p stages, each with v virtual stages (its chunks). Chunk c of stage r is number c p + r of the whole model,
unless `Schedule.place` says otherwise.

Sources: GPipe arXiv 1811.06965; 1F1B as PipeDream-flush in arXiv 2006.09503; interleaved 1F1B arXiv 2104.04473 §2.2;
zero bubble ZB-H1 arXiv 2401.10241 §2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
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


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline's schedule, with the sizes that decide the order of each device. Raise `UsageError` for a size below
    one, or a combination that the schedule does not support.

    Args:
        micro_batches: of a step.
        group: micro-batches for which a chunk takes its turn; 0: as many as stages.
    """

    schedule: Schedule
    _: KW_ONLY
    stages: int
    micro_batches: int
    virtual_stages: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        stages, count, chunks = self.stages, self.micro_batches, self.virtual_stages
        for size, name in (stages, "stages"), (count, "micro-batches"), (chunks, "virtual stages"):
            if size < 1:
                raise UsageError(f"got {size} {name} in a pipeline; expected 1 or more")
        if self.schedule is Schedule.ZERO_BUBBLE_V:
            if self.virtual_stages != 2 or self.group:
                got = f"got {self.virtual_stages} virtual stages with the schedule {self.schedule}"
                raise UsageError(f"{got}; it takes 2")
        elif self.virtual_stages > 1:
            self._check_interleaving()

    def _check_interleaving(self) -> None:
        """Check group sizes as Megatron-LM does in ``forward_backward_pipelining_with_interleaving``."""
        stages, micro_batches, group = self.stages, self.micro_batches, self.group
        if self.schedule is Schedule.GPIPE:
            raise UsageError(
                f"got {self.virtual_stages} virtual stages with the schedule {self.schedule}; only "
                f"{Schedule.ONE_F_ONE_B} and {Schedule.ZERO_BUBBLE} interleave"
            )
        if not group and micro_batches % stages:
            raise UsageError(
                f"got {micro_batches} micro-batches for {stages} pipeline stages of {self.virtual_stages} virtual "
                f"stages each; interleaving takes a multiple of {stages}: change the global batch, or give "
                f"--virtual-stages 1, or a --micro-batch-group of {stages} or more"
            )
        if group and not stages <= group <= micro_batches:
            raise UsageError(
                f"got --micro-batch-group {group}; expected {stages}, the pipeline stages, to {micro_batches}, the "
                "micro-batches of a step"
            )
        if group and 0 < micro_batches % group < stages:
            raise UsageError(
                f"got --micro-batch-group {group} for {micro_batches} micro-batches; the remainder in the last group, "
                f"{micro_batches % group}, has to be 0 or at least the {stages} pipeline stages"
            )

    def shortened(self, micro_batches: int) -> PipelineShape:
        """Return this pipeline with another number of micro-batches; faster than `replace`, for every candidate."""
        sizes = {"stages": self.stages, "virtual_stages": self.virtual_stages, "group": self.group}
        return PipelineShape(self.schedule, micro_batches=micro_batches, **sizes)

    @property
    def turn(self) -> int:
        """Micro-batches for which a chunk takes its turn."""
        return self.group or self.stages

    @property
    def forwards(self) -> int:
        """Number of forwards of a device in a step."""
        return self.micro_batches * self.virtual_stages

    @property
    def orders(self) -> tuple[tuple[ScheduledPass, ...], ...]:
        """Order of each device, first stage first."""
        return tuple(map(self.order, range(self.stages)))

    def order(self, stage: int) -> tuple[ScheduledPass, ...]:
        """Return all passes of one device in order: warm-up forwards, alternating forwards and backwards, the rest.
        Raise `UsageError` if the stage is out of range.

        Chunks take turns: p micro-batches at a time, or ``group``, with the remainder last (Megatron-LM,
        ``megatron/core/pipeline_parallel/schedules.py``, ``get_schedule_table`` with
        ``--microbatch-group-size-per-virtual-pipeline-stage``); forwards from the first chunk and backwards from the
        last. Backwards follow the order of the forwards, with GPipe as well: its paper draws them in reverse order,
        which needs the same memory.

        ZB-H1 is 1F1B with each weight step delayed by as many backwards as there are earlier stages, so that every
        stage holds p micro-batches: a later stage has fewer micro-batches in flight, and more weight steps pending. The
        interleaved form is torch's (``torch/distributed/pipelining/schedules.py``, ``ScheduleInterleavedZeroBubble``):
        each stage warms up with one forward more than the next, not two.
        """
        self._check_stage(stage)
        if self.schedule is Schedule.ZERO_BUBBLE_V:
            return tuple(_in_a_v(stage, self.stages, self.micro_batches))
        forwards, backwards = _both_ways(self.turn, self.micro_batches, self.virtual_stages)
        warm_up = self._warm_up(stage)
        steps = list(forwards[:warm_up])
        for pair in zip(forwards[warm_up:], backwards, strict=False):
            steps += pair
        steps += backwards[len(forwards) - warm_up :]
        return tuple(_with_weights(steps, delay=stage) if self.schedule is Schedule.ZERO_BUBBLE else steps)

    def window(self, stage: int) -> int:
        """Return a chunk's most forwards in flight: those before its first backward. `UsageError`: no such stage."""
        self._check_stage(stage)
        return min(self._warm_up(stage) + 1, self.forwards)

    def recomputing_share(self, stage: int, whole: int) -> float:
        """Return the share of a device's forwards that checkpoint: all but those with i modulo `window` < ``whole``.
        Raise `UsageError` if the stage is out of range.
        """
        size = self.window(stage)
        windows, rest = divmod(self.forwards, size)
        return (windows * max(0, size - whole) + max(0, rest - whole)) / self.forwards

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.stages:
            raise UsageError(f"got stage {stage} of a pipeline of {self.stages}; expected 0 to {self.stages - 1}")

    def _warm_up(self, stage: int) -> int:
        if self.schedule is Schedule.ZERO_BUBBLE_V:
            steps = _in_a_v(stage, self.stages, self.micro_batches)
            return len(list(takewhile(lambda step: step.work is Work.FORWARD, steps))) - 1
        if self.schedule is Schedule.GPIPE:
            return self.forwards
        ahead = self.stages - stage - 1
        if self.virtual_stages > 1:
            ahead *= 1 if self.schedule is Schedule.ZERO_BUBBLE else 2
        return min(ahead + (self.virtual_stages - 1) * self.turn, self.forwards)


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


def apart(steps: Sequence[ScheduledPass], chunks: int, size: int, whole: int) -> Iterator[ScheduledPass]:
    """Yield the passes, with extra chunks for forwards without checkpointing and their backwards.

    Args:
        chunks: number of the device's chunks, without the extra ones.
        size: length of a `PipelineShape.window`; ``whole`` forwards of each run without checkpointing.
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
