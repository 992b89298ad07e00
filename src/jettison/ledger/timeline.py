"""Bytes as a function of the step's phases, for one pipeline stage of one rank.

NOTE [ What is there when ]
A stage is a chain of units (regions, or checkpoint segments of several), cut into chunks where a device has virtual
stages. With `fixed` the bytes that are always there (parameters, buffers, and what a framework sets aside), `state`
the optimizer's, the bytes allocated are, at the worst moment of

    forward of unit u      fixed + state + gradients + in flight + sum_{q<u} resident_q + forward_peak_u
    backward of unit u     fixed + state + gradients + in flight + sum_{q<=u} resident_q + backward_peak_u
    optimizer step         fixed + state + all gradients + transient

where q runs over the units of the chunk at work and `in flight` is what other micro-batches, and other chunks, hold.
Gradients appear one by one in the first backward of a step (PyTorch, where zero_grad sets them to None), or live in
buffers from the start (Megatron's and DDP's buckets). From the second micro-batch on all are there, and each new
contribution lives beside them until it has been added. Before the first optimizer step ever there is no state: step 0
is lower than step 1, and the same run may fit in the one and not in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from jettison.ledger.schedule import Occupancy
from jettison.spec.run import Gradients


class Phase(StrEnum):
    """Parts of a training step."""

    BEFORE = "before forward"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    AFTER = "after the step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A region, or a checkpoint segment of several, and its neighbours that are alike: one name each, in order.

    Bytes are of each one, as in NOTE [ What is there when ].
    ``backward_peak`` counts its own weight gradients; ``adding_peak`` is the same where gradients are there already.
    """

    names: tuple[str, ...]
    resident: int
    forward_peak: int
    backward_peak: int
    adding_peak: int
    gradient: int
    pending: int = 0  # of it, what cannot be added before a tied weight's other use has passed
    is_loss: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """Everything that decides a stage's bytes over a step.

    ``occupancies`` are the states before a backward: how many micro-batches each chunk has in flight. ``sent`` is what
    is held of each of them beside its residents (a stage output that was sent and not let go).
    """

    chunks: tuple[tuple[Unit, ...], ...]
    occupancies: tuple[Occupancy, ...]
    micro_batches: int
    fixed: int
    state: int
    gradients: Gradients
    optimizer_transient: int = 0
    sent: int = 0

    @property
    def gradient_bytes(self) -> int:
        """Of all units."""
        return sum(len(unit.names) * unit.gradient for chunk in self.chunks for unit in chunk)

    def held(self, chunk: int) -> int:
        """What one micro-batch's forward through a chunk leaves behind."""
        return sum(len(unit.names) * unit.resident for unit in self.chunks[chunk])


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes allocated at the worst point of one phase of one unit."""

    phase: Phase
    where: str
    micro_batch: int
    nbytes: int


def moments(stage: StageLoad, *, first_step: bool, each: bool = True) -> Iterator[Moment]:
    """The step in order: the first micro-batch's forward, then the fullest states, the optimizer, and what is left.

    Args:
        first_step: step 0, before optimizer state exists; its optimizer phase makes it.
        each: every unit's moments; otherwise, of units that are alike, the first's and the last's, which are extreme.
    """
    upfront = stage.gradients is Gradients.UPFRONT
    all_gradients = stage.gradient_bytes
    state = 0 if first_step else stage.state
    base = stage.fixed + state + (all_gradients if upfront else 0)
    yield Moment(phase=Phase.BEFORE, where="", micro_batch=0, nbytes=base)
    for chunk in stage.chunks:
        yield from _forward(chunk, base, 0, each)
    for occupancy in stage.occupancies:
        yield from _backward(stage, occupancy, base, not upfront, each)
    if stage.micro_batches > 1 and not upfront:
        for occupancy in stage.occupancies:
            yield from _backward(stage, occupancy, base + all_gradients, False, each)
    there = stage.fixed + stage.state + all_gradients
    yield Moment(phase=Phase.OPTIMIZER, where="", micro_batch=-1, nbytes=there + stage.optimizer_transient)
    left = stage.fixed + stage.state + (all_gradients if upfront else 0)
    yield Moment(phase=Phase.AFTER, where="", micro_batch=-1, nbytes=left)


def peak(stage: StageLoad, *, first_step: bool = False) -> Moment:
    """The first of the highest moments."""
    return max(moments(stage, first_step=first_step, each=False), key=lambda moment: moment.nbytes)


def _forward(chunk: Sequence[Unit], base: int, micro_batch: int, each: bool) -> Iterator[Moment]:
    level = base
    for unit in chunk:
        count = len(unit.names)
        phase = Phase.LOSS if unit.is_loss else Phase.FORWARD
        for i in range(count) if each else (count - 1,):
            nbytes = level + i * unit.resident + unit.forward_peak
            yield Moment(phase=phase, where=unit.names[i], micro_batch=micro_batch, nbytes=nbytes)
        level += count * unit.resident


def _backward(stage: StageLoad, occupancy: Occupancy, base: int, fresh: bool, each: bool) -> Iterator[Moment]:
    """From one of the fullest states: the forward that led to it, and the backward that starts from it.

    Args:
        fresh: gradients appear now, one by one; otherwise they are there, in ``base``.
    """
    held = [stage.held(chunk) for chunk in range(len(stage.chunks))]
    alive = [f + w for f, w in zip(occupancy.forward, occupancy.weight, strict=True)]
    in_flight = sum(n * nbytes for n, nbytes in zip(alive, held, strict=True)) + sum(alive) * stage.sent
    step = occupancy.step
    number = 0 if step is None else step.micro_batch
    for index, chunk in enumerate(stage.chunks):
        if occupancy.forward[index]:
            yield from _forward(chunk, base + in_flight - held[index], number, each)
    level = base + in_flight
    for unit in reversed(stage.chunks[step.chunk if step is not None else 0]):
        count = len(unit.names)
        rise = unit.backward_peak if fresh else unit.adding_peak
        change = (unit.gradient if fresh else unit.pending) - unit.resident
        for i in range(count) if each else sorted({0, count - 1}):
            where = unit.names[count - 1 - i]
            yield Moment(phase=Phase.BACKWARD, where=where, micro_batch=number, nbytes=level + i * change + rise)
        level += count * change
