"""Orders of a pipeline stage's passes, and the micro-batches in flight before each action of one device.

There are p stages, each with v virtual stages (its chunks). Chunk c of stage r is number c p + r of the whole model,
unless `Schedule.place` says otherwise. Memory on a device depends on the order of its own passes, not on when each one
runs, so no clock is needed.

Sources: GPipe arXiv 1811.06965; 1F1B as PipeDream-flush in arXiv 2006.09503; interleaved 1F1B arXiv 2104.04473 §2.2;
zero bubble ZB-H1 arXiv 2401.10241 §2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import product, takewhile
from math import lcm
from operator import add, ge
from typing import Final, NamedTuple

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


class Weights(StrEnum):
    """Events at which the weights of a chunk are all-gathered and resharded."""

    RESIDENT = "resident"  # always unsharded
    GATHERED = "gathered"  # unsharded by each pass that finds shards
    FETCHED = "fetched"  # unsharded ahead for the next `ACTIVE` chunks of the schedule; others are sharded


ACTIVE: Final = 3
"""``torch/distributed/pipelining/schedules.py``, ``_add_unshard_reshard``: ``max_active_stages``."""


class DeviceAction(NamedTuple):
    """One kind of action of a device.

    Args:
        fresh: a backward whose chunk has no gradients yet.
        whole: its chunk's weights are already unsharded when it begins.
        begun: an earlier backward of this step has finished.
        alone: no other micro-batch of its chunk is in flight; False where it does not matter.
        reduces: its chunk's last backward, in which units reduce their gradients.
    """

    work: Work
    chunk: int
    fresh: bool = False
    whole: bool = False
    begun: bool = True
    alone: bool = False
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Micro-batches that each chunk of a device holds when ``step`` begins.

    Args:
        forward: forward done and backward not, the micro-batch of the coming backward included.
        weight: first half of a split backward done and second half not.
        passed: transfers (outputs, gradients of inputs) already sent that count towards memory.
        learned: by chunk, 1 if its gradients exist, after a backward (or the weight half of a split one).
            Empty where it does not matter.
        reduced: by chunk, 1 if its gradients have been reduced. Empty where it does not matter.
        whole: by chunk, 1 if its weights are unsharded; empty if passes do not change that.
    """

    forward: tuple[int, ...]
    weight: tuple[int, ...]
    step: ScheduledPass
    passed: int = 0
    learned: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def alive(self) -> tuple[int, ...]:
        """Number of micro-batches in flight, by chunk."""
        return tuple(map(add, self.forward, self.weight))


class OrderOptions(NamedTuple):
    """Options that add to the memory of the micro-batches in flight.

    Args:
        sending: by chunk, transfers of each micro-batch that count: one if its output is sent, and one more if the
            gradient of its input is; empty: none counts.
        learning: by chunk, whether it has gradients.
        reducing: reduce each chunk's gradients after its last backward, which frees memory; ``_add_reduce_grad``
            of ``torch/distributed/pipelining/schedules.py`` adds REDUCE_GRAD to the schedule in the same way.
        reducing_units: each unit reduces its gradients in its chunk's last backward.
        weights: when chunks' weights are all-gathered and resharded.
        receiving: chunks without a micro-batch in flight still hold the last tensor that they received.
    """

    sending: tuple[int, ...] = ()
    learning: bool = False
    reducing: bool = False
    reducing_units: bool = False
    weights: Weights = Weights.RESIDENT
    receiving: bool = False


PLAIN: Final = OrderOptions()


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceOrder:
    """The passes of one device, and the actions between them.

    Args:
        own: number of chunks of the device. Chunks ``own`` to ``chunks`` - 1 are the same without checkpointing.
    """

    steps: tuple[ScheduledPass, ...]
    own: int
    chunks: int
    walk: OrderOptions = PLAIN

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches in this order, which may be fewer than the step's."""
        return 1 + max(step.micro_batch for step in self.steps)

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return any(step.work is Work.WEIGHT for step in self.steps)

    @property
    def ending(self) -> Work:
        """Kind of the pass that ends a micro-batch in its chunk."""
        return Work.WEIGHT if self.splits else Work.BACKWARD

    def compiled(self, alike: tuple[int, ...]) -> tuple[tuple[DeviceAction, ...], tuple[int, ...]]:
        """Return the distinct actions, and the index of each action in order among them.

        Args:
            alike: for each chunk, the first chunk equal to it.
        """
        if alike not in self._compiled:
            kinds, sequence = self._kinds
            numbers: dict[DeviceAction, int] = {}
            merged = [numbers.setdefault(kind._replace(chunk=alike[kind.chunk]), len(numbers)) for kind in kinds]
            self._compiled[alike] = tuple(numbers), tuple(map(merged.__getitem__, sequence))
        return self._compiled[alike]

    @cached_property
    def _kinds(self) -> tuple[tuple[DeviceAction, ...], tuple[int, ...]]:
        """Distinct actions, and the index of each action in order among them."""
        numbers: dict[DeviceAction, int] = {}
        sequence = tuple(numbers.setdefault(action, len(numbers)) for action, _ in self._all)
        return tuple(numbers), sequence

    @cached_property
    def _compiled(self) -> dict[tuple[int, ...], tuple[tuple[DeviceAction, ...], tuple[int, ...]]]:
        return {}

    @cached_property
    def _all(self) -> tuple[tuple[DeviceAction, int], ...]:
        return tuple((action, -1 if state is None else state.step.micro_batch) for action, state in self.actions())

    def action(self, number: int) -> tuple[DeviceAction, int]:
        """Return an action and its micro-batch; -1 if it belongs to no micro-batch."""
        return self._all[number]

    @cached_property
    def entered(self) -> tuple[bool, ...]:
        """By chunk, whether any micro-batch passes through it."""
        there = {step.chunk for step in self.steps}
        return tuple(chunk in there for chunk in range(self.chunks))

    @cached_property
    def fullest(self) -> dict[int, Occupancy]:
        """States with the most memory, each by the number of the action that follows it.

        Whatever bytes each chunk in flight, each chunk with gradients and each kind of pass has (zero or more), the
        highest state is among them. Left out are repetitions, states that hold no more of anything than another one
        before the same kind of pass, and states halfway between two others.
        """
        groups: defaultdict[tuple[Work, int, int], dict[tuple[int, ...], int]] = defaultdict(dict)
        states: dict[int, Occupancy] = {}
        for number, (action, state) in enumerate(self.actions()):
            if state is None:
                continue
            work, chunk = state.step.work, state.step.chunk
            counts = (*state.forward, *state.weight, state.passed, *state.learned, *(1 - n for n in state.reduced))
            whole = state.whole[chunk % self.own] if state.whole else 0
            adds = state.learned[chunk % self.own] if state.learned and work is not Work.FORWARD else 0
            first = groups[work, chunk, whole + 2 * adds + 4 * action.reduces].setdefault(
                (*counts, *state.whole), number
            )
            if first == number:
                states[number] = state
        kept = [counted[counts] for counted in groups.values() for counts in _maximal(_ends(list(counted)))]
        return {number: states[number] for number in sorted(kept)}

    @cached_property
    def most_alive(self) -> tuple[int, ...]:
        """Most micro-batches in flight, by chunk; maxima of several chunks need not be at one moment."""
        return tuple(map(max, zip(*(state.alive for state in self.fullest.values()), strict=True)))

    @cached_property
    def shown(self) -> tuple[int, ...]:
        """Numbers of the `fullest` states' actions, then those of reductions."""
        return (*self.fullest, *(n for n, (action, _) in enumerate(self._all) if action.work is Work.REDUCE))

    def actions(self) -> Iterator[tuple[DeviceAction, Occupancy | None]]:
        """Yield each action, and for passes the occupancy before it."""
        steps, own, walk = self.steps, self.own, self.walk
        ending = self.ending
        ends = {step.chunk % own: number for number, step in enumerate(steps) if step.work is ending}
        gathers = walk.weights is not Weights.RESIDENT
        forward, weight, alive, passed = [0] * self.chunks, [0] * self.chunks, [0] * own, 0
        learned, reduced, whole = [not walk.learning] * own, [0] * own, [0] * own
        active: set[int] = set()
        for number, step in enumerate([*steps, *steps[-1:]]):
            if walk.weights is Weights.FETCHED:
                coming = _coming(steps, min(number, len(steps) - 1), own)
                for chunk in sorted(active ^ coming):
                    if whole[chunk] != (chunk in coming):
                        yield DeviceAction(Work.UNSHARD if chunk in coming else Work.RESHARD, chunk), None
                    whole[chunk] = int(chunk in coming)
                active = coming
            before = steps[number - 1].chunk % own if number else 0
            if walk.reducing and number and ends[before] == number - 1:
                yield DeviceAction(Work.REDUCE, before, whole=bool(whole[before])), None
                reduced[before], whole[before] = 1, 0
            if number == len(steps):
                return
            work, chunk = step.work, step.chunk % own
            leaves = work is ending
            alive[chunk] += (work is Work.FORWARD) - leaves
            state = Occupancy(
                tuple(forward),
                tuple(weight),
                step,
                passed,
                tuple(map(int, learned)) if walk.learning else (),
                tuple(reduced) if walk.reducing else (),
                tuple(whole) if gathers else (),
            )
            yield (
                DeviceAction(
                    work,
                    step.chunk,
                    fresh=work is not Work.FORWARD and not learned[chunk],
                    whole=bool(whole[chunk]),
                    begun=any(learned),
                    alone=walk.receiving and alive[chunk] == (work is Work.FORWARD),
                    reduces=walk.reducing_units and ends[chunk] == number,
                ),
                state,
            )
            whole[chunk] = int(gathers and work is not Work.FORWARD)
            if work is Work.FORWARD:
                forward[step.chunk] += 1
                continue
            if leaves:
                passed += walk.sending[chunk] if walk.sending else 0
                learned[chunk] = True
            if work is Work.WEIGHT:
                weight[step.chunk] -= 1
            else:
                forward[step.chunk] -= 1
                weight[step.chunk] += self.splits


def device_order(
    shape: PipelineShape, stage: int, *, whole: int = 0, walk: OrderOptions = PLAIN, every: bool = False
) -> DeviceOrder:
    """Return the order of one device, without walking through thousands of micro-batches. Raise `UsageError` if the
    stage is out of range.

    Warm-up takes at most (v + 1) p - 2 forwards. Then the order repeats every v p pairs (p micro-batches) until the
    forwards run out. 3 p micro-batches contain the warm-up and a full period, so more of them add no new states.
    With another group size, that size replaces p, and the remainder in the last group is included as well.

    Args:
        whole: if above 0, the forwards of each `PipelineShape.window` that run without checkpointing; they count as
            forwards of extra chunks, where chunk v + c stands for chunk c. Positions repeat with order and window.
        every: include all micro-batches.
    """
    size, turn = shape.window(stage) if whole else 1, shape.group or shape.stages
    periods = lcm(size, turn * shape.virtual_stages) // (turn * shape.virtual_stages) if whole else 0
    count = (3 + periods) * turn + (shape.micro_batches % turn if shape.group else 0)
    if shape.schedule is Schedule.GPIPE and not every and 0 <= stage < shape.stages:
        stage = 0  # equal on every stage; all micro-batches are in flight together
    elif not every and count < shape.micro_batches:
        shape = shape.shortened(count)
    return _device_order(shape, stage, size, min(whole, size), walk)


@lru_cache(maxsize=1024)
def _device_order(shape: PipelineShape, stage: int, size: int, kept: int, walk: OrderOptions) -> DeviceOrder:
    steps, own = shape.order(stage), shape.virtual_stages
    if kept:
        steps = tuple(apart(steps, own, size, kept))
    return DeviceOrder(steps=steps, own=own, chunks=(2 if kept else 1) * own, walk=walk)


def _coming(steps: Sequence[ScheduledPass], number: int, own: int) -> set[int]:
    """Return the next `ACTIVE` distinct chunks to run, from a pass on."""
    found: set[int] = set()
    for step in steps[number:]:
        found.add(step.chunk % own)
        if len(found) == min(ACTIVE, own):
            break
    return found


def _ends(states: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Drop states halfway between their neighbours, so that only the ends of an even series are left."""
    inner = zip(states, states[1:], states[2:], strict=False)
    return states[:1] + [b for a, b, c in inner if tuple(map(add, a, c)) != tuple(map(add, b, b))] + states[1:][-1:]


def _maximal(states: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Keep states that no other state reaches or exceeds in every count, the fullest first."""
    kept: list[tuple[int, ...]] = []
    for counts in sorted(states, key=sum, reverse=True):  # a state that exceeds it comes first
        if not any(all(map(ge, other, counts)) for other in kept):
            kept.append(counts)
    return kept
