"""Bytes as a function of the step's phases, for one pipeline stage of one rank.

NOTE [ What is there when ]
A stage is a chain of units (regions, or checkpoint segments of several), cut into chunks where a device has virtual
stages. With `fixed` the bytes that are always there (parameters, buffers, and what a framework sets aside), `state`
the optimizer's, the bytes allocated are, at the worst moment of

    forward of unit u      fixed + state + gradients + in flight + sum_{q<u} resident_q + forward_peak_u
    backward of unit u     fixed + state + gradients + in flight + sum_{q<=u} resident_q + backward_peak_u
    optimizer step         fixed + state + all gradients + transient

where q runs over the units of the chunk at work and `in flight` is what other micro-batches, and other chunks, hold.
Gradients live in buffers from the start (Megatron's and DDP's buckets), or appear one by one in the first backward of a
step (PyTorch, where zero_grad sets them to None): a chunk's in the chunk's own first backward, and devices begin with
their last chunk. So a state says which chunks have learned. To what is there each new contribution lives beside it
until it has been added. Before the first optimizer step ever there is no state but the
master copy of the parameters, which is made with the optimizer (`master`): step 0 is lower than step 1, and the same
run may fit in the one and not in the other. What the first backward ever brings (`late`: the workspace of its thread's
products) is not there before, either. A chunk that has nothing in flight may hold the last input that it was sent, and
its gradient (`received`); of one that has, the last input is among what is in flight. While any is, there may be more
beside them (`around`): what the schedule has just sent, and the batch itself; or what its code's variables still name
once a backward of the step has run (`variables`); or all that a step has sent so far (`passed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from operator import add, itemgetter, mul

from jettison.ledger.halves import Halves
from jettison.ledger.occupancies import Occupancy, Sending
from jettison.memory.schedule import Work
from jettison.spec.precision import Gradients


class Phase(StrEnum):
    """Parts of a training step."""

    BEFORE = "before forward"
    FORWARD = "forward"
    LOSS = "loss"
    FROZEN = "frozen model"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    AFTER = "after the step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A region, or a checkpoint segment of several, and its neighbours that are alike: one name each, in order.

    Bytes are of each one, as in NOTE [ What is there when ].
    ``backward_peak`` counts its own weight gradients; ``adding_peak`` is the same where gradients are there already.
    ``frozen``: of these peaks, a frozen model's forward, before the first unit's forward or before the last one's
    backward. ``cached``: what autocast's cache has beside it until the forward is over. ``whole``: of what is resident,
    weights that stay gathered. ``weights``: those that a chunk's passes
    gather and shard again. ``halves``: of a backward that is split; None: it is not, or each half is taken for the
    whole.
    """

    names: tuple[str, ...]
    resident: int
    forward_peak: int
    backward_peak: int
    adding_peak: int
    gradient: int
    pending: int = 0  # of it, what cannot be added before a tied weight's other use has passed
    is_loss: bool = False
    frozen: int = 0
    cached: int = 0
    whole: int = 0
    weights: int = 0
    halves: Halves | None = None

    @property
    def half(self) -> int:
        """Bytes of each one from the first half of its backward to the second."""
        return self.resident if self.halves is None else self.resident + self.halves.waiting - self.halves.detached

    def named(self, names: tuple[str, ...]) -> Unit:
        """The same of others."""
        if names == self.names:
            return self
        return Unit(
            names=names,
            resident=self.resident,
            forward_peak=self.forward_peak,
            backward_peak=self.backward_peak,
            adding_peak=self.adding_peak,
            gradient=self.gradient,
            pending=self.pending,
            is_loss=self.is_loss,
            frozen=self.frozen,
            cached=self.cached,
            whole=self.whole,
            weights=self.weights,
            halves=self.halves,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """Everything that decides a stage's bytes over a step.

    ``occupancies`` are the states before passes: how many micro-batches each chunk has in flight, and which chunks have
    learned; where they do not say it, all have. ``sent`` is what is held of each of them beside its residents (a stage
    output that was sent and not let go). ``twins``: the second half of the chunks is the first half again, of
    micro-batches that are kept whole.
    """

    chunks: tuple[tuple[Unit, ...], ...]
    occupancies: tuple[Occupancy, ...]
    micro_batches: int
    fixed: int
    state: int
    gradients: Gradients
    optimizer_transient: int = 0
    sent: int = 0
    twins: bool = False
    master: int = 0  # of ``state``
    copies: int = 0  # of gradients, from the optimizer until the next step
    aside: int = 0  # of ``fixed``, what libraries set aside
    late: int = 0  # of ``aside``
    received: int = 0  # of each chunk from number ``receives`` on
    receives: int = 0
    around: int = 0
    variables: int = 0
    batches: int = 0  # of all micro-batches, where a step keeps them; ``around`` has those before the one at work
    shards: int = 0  # of gradients that are whole until a step's end: what the optimizer has of them
    reductions: tuple[Occupancy, ...] = ()  # the states in which chunks are reduced
    reducing: tuple[int, ...] = ()  # by chunk, how far that rises above what is there before it
    whole_chunks: tuple[tuple[Unit, ...], ...] = ()  # chunks as they are while weights are whole, if passes change that
    freed: tuple[int, ...] = ()  # by chunk, what is gone once it is reduced: of whole gradients, and whole weights
    passed: int = 0  # of each transfer that has passed
    sending: Sending = ()
    left: int = 0  # from a split backward's first halves to the next step

    def idle(self, alive: Sequence[int]) -> int:
        """What chunks without a micro-batch in flight hold of the last one; ``alive``: by chunk, those in flight."""
        if not self.received:
            return 0
        own = len(self.chunks) // 2 if self.twins else len(self.chunks)
        return self.received * sum(not any(alive[chunk::own]) for chunk in range(self.receives, own))

    @property
    def own(self) -> tuple[tuple[Unit, ...], ...]:
        """Chunks without those that are others again."""
        return self.chunks[: len(self.chunks) // 2] if self.twins else self.chunks

    @property
    def gradient_bytes(self) -> int:
        """Of all units, from one pass to the next."""
        return 0 if self.gradients is Gradients.ADDED else sum(map(_gradients, self.own))

    @property
    def entered(self) -> tuple[bool, ...]:
        """By chunk: does any micro-batch come through it? Of twins one may be idle."""
        if not self.twins:
            return (True,) * len(self.chunks)
        return tuple(any(counts) for counts in zip(*(o.forward for o in self.occupancies), strict=True))

    def adds(self, state: Occupancy) -> bool:
        """Does the backward that a state is about find its chunk's gradients there?"""
        if self.gradients is Gradients.ADDED:
            return False
        if self.gradients is Gradients.UPFRONT or not state.learned or state.step is None:
            return True
        return bool(state.learned[state.step.chunk % len(state.learned)])

    def learned_bytes(self, learned: Sequence[int], reduced: Sequence[int] = ()) -> int:
        """Gradients that are there in a state, less what is gone of chunks that have been reduced."""
        gone = sum(map(mul, reduced, self.freed)) if self.freed else 0
        if self.gradients in (Gradients.UPFRONT, Gradients.ADDED) or all(learned):
            return self.gradient_bytes - gone
        return sum(_gradients(chunk) for chunk, has in zip(self.own, learned, strict=True) if has) - gone

    def held(self, chunk: int) -> int:
        """What one micro-batch's forward through a chunk leaves behind."""
        return sum(len(unit.names) * unit.resident for unit in self.chunks[chunk])

    def held_half(self, chunk: int) -> int:
        """The same of its backward's first half, where the second is still to come."""
        return sum(len(unit.names) * unit.half for unit in self.chunks[chunk])


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes allocated at the worst point of one phase of one unit."""

    phase: Phase
    where: str
    micro_batch: int
    nbytes: int


def moments(stage: StageLoad, *, first_step: bool) -> Iterator[Moment]:
    """The step in order: the first micro-batch's forward, then the fullest states, the optimizer, and what is left.

    Args:
        first_step: step 0, before optimizer state exists; its optimizer phase makes it.
    """
    return (_moment(row) for row in _rows(stage, first_step, True))


def peak(stage: StageLoad, *, first_step: bool = False) -> Moment:
    """The first of the highest moments."""
    return _moment(max(_rows(stage, first_step, False), key=itemgetter(0)))


_Row = tuple[int, Phase, str, int]  # bytes, phase, unit, micro-batch: a `Moment` that is cheap to make
_Rows = list[tuple[int, Phase, str]]  # the same of one chunk alone, above what was there before


def _moment(row: _Row) -> Moment:
    nbytes, phase, where, micro_batch = row
    return Moment(phase=phase, where=where, micro_batch=micro_batch, nbytes=nbytes)


def _rows(stage: StageLoad, first_step: bool, each: bool) -> Iterator[_Row]:
    """The moments of a step.

    Args:
        each: all of them; otherwise the first of the highest of each pass through a chunk.
    """
    pick = list if each else _highest
    upfront = stage.gradients is Gradients.UPFRONT
    forward = [pick(_forward(chunk, each)) for chunk in stage.chunks]
    all_gradients = stage.gradient_bytes
    base = stage.fixed + (stage.master if first_step else stage.state) + (all_gradients if upfront else 0)
    nothing = (0,) * len(stage.chunks)
    between = stage.idle(nothing) if stage.received else 0
    idle = 0 if first_step else between
    late = stage.late if first_step else 0
    yield base - late + idle + (0 if first_step else stage.left), Phase.BEFORE, "", 0
    for chunk, (rows, entered) in enumerate(zip(forward, stage.entered, strict=True)):
        if entered:
            alone = stage.idle((*nothing[:chunk], 1, *nothing[chunk + 1 :])) if idle else 0
            yield from _at(base - late + alone, rows, 0)
    yield from _states(stage, base, forward, late, each)
    there = stage.fixed + stage.state + stage.copies + between + stage.batches + stage.left
    if stage.shards:
        yield from _reductions(stage, base)
        all_gradients = stage.shards
    yield there + all_gradients + stage.optimizer_transient, Phase.OPTIMIZER, "", -1
    yield there + (all_gradients if upfront else 0), Phase.AFTER, "", -1


def _reductions(stage: StageLoad, base: int) -> Iterator[_Row]:
    """Each chunk is reduced behind its last backward, beside what others have in flight."""
    for state in stage.reductions:
        assert state.step is not None
        chunk = state.step.chunk % len(stage.own)
        level = base + stage.around + _in_flight(stage, state) + _whole_bytes(stage, state)
        level += stage.learned_bytes(state.learned, state.reduced)
        yield level + stage.reducing[chunk], Phase.BACKWARD, "", -1


def _in_flight(stage: StageLoad, state: Occupancy) -> int:
    """What micro-batches hold in a state, and what has been sent."""
    whole = sum(count * stage.held(chunk) for chunk, count in enumerate(state.forward) if count)
    halves = sum(count * stage.held_half(chunk) for chunk, count in enumerate(state.weight) if count)
    return whole + halves + state.total * stage.sent + stage.passed * state.passed


def _whole_bytes(stage: StageLoad, state: Occupancy) -> int:
    """Weights that are whole in a state, of chunks whose passes gather them and shard them again."""
    whole = zip(stage.own, state.whole, strict=False)
    return sum(len(unit.names) * unit.weights for chunk, is_whole in whole if is_whole for unit in chunk)


def _highest(rows: Iterator[tuple[int, Phase, str]]) -> _Rows:
    highest = max(rows, default=None, key=itemgetter(0))
    return [] if highest is None else [highest]  # of a chunk without layers


def _at(level: int, rows: _Rows, micro_batch: int) -> Iterator[_Row]:
    return ((level + nbytes, phase, where, micro_batch) for nbytes, phase, where in rows)


def _states(stage: StageLoad, base: int, forward: Sequence[_Rows], late: int, each: bool) -> Iterator[_Row]:
    """The pass that comes next, of each of the fullest states.

    Args:
        forward: by chunk.
        late: bytes of ``base`` that the step's first backward brings.
    """
    pick = list if each else _highest
    base += stage.around
    held = [stage.held(chunk) for chunk in range(len(stage.chunks))]
    half = [stage.held_half(chunk) for chunk in range(len(stage.chunks))]
    upfront = stage.gradients is Gradients.UPFRONT
    backward: dict[tuple[int, bool, int, bool, bool], _Rows] = {}
    for state in stage.occupancies:
        alive = list(map(add, state.forward, state.weight))
        begun = any(state.learned or (1,))  # backwards have
        missing = 0 if stage.micro_batches > 1 and begun else late
        level = base + sum(map(mul, state.forward, held)) + sum(map(mul, state.weight, half))
        level += sum(alive) * stage.sent + stage.passed * state.passed
        level += (0 if upfront else stage.learned_bytes(state.learned, state.reduced)) + (
            stage.variables if begun else 0
        )
        chunk, number = (0, 0) if state.step is None else (state.step.chunk, state.step.micro_batch)
        enters = state.step is not None and state.step.work is Work.FORWARD
        if stage.received:
            alive[chunk] += enters  # what it is sent comes in the last one's place
            level += stage.idle(alive)
        is_whole = bool(state.whole) and bool(state.whole[chunk % len(stage.own)])
        level += _whole_bytes(stage, state)
        units = stage.whole_chunks[chunk] if is_whole else stage.chunks[chunk]
        if enters:
            rows = pick(_forward(units, each, lets_go=True)) if is_whole else forward[chunk]
            yield from _at(level - missing, rows, number)
            continue
        second = state.step is not None and state.step.work is Work.WEIGHT
        key = chunk, stage.adds(state), missing, second, is_whole
        if key not in backward:
            backward[key] = pick(
                _backward_rows(units, not key[1], each, missing, second, bool(state.whole) and not is_whole)
            )
        yield from _at(level, backward[key], number)


def _gradients(chunk: Sequence[Unit]) -> int:
    return sum(len(unit.names) * unit.gradient for unit in chunk)


def _forward(chunk: Sequence[Unit], each: bool, lets_go: bool = False) -> Iterator[tuple[int, Phase, str]]:
    """Args: lets_go: weights are whole, and each unit's are sharded behind it."""
    level = 0
    for unit in chunk:
        count = len(unit.names)
        phase = Phase.LOSS if unit.is_loss else Phase.FORWARD
        if unit.frozen and unit.frozen == unit.forward_peak and not unit.is_loss:
            phase = Phase.FROZEN
        change = unit.resident + unit.cached - (unit.weights if lets_go else 0)
        for i in range(count) if each else (0, count - 1) if lets_go else (count - 1,):
            yield level + i * change + unit.forward_peak, phase, unit.names[i]
        level += count * change


def _backward(
    chunk: Sequence[Unit], fresh: bool, each: bool, missing: int = 0, gathers: bool = False
) -> Iterator[tuple[int, Phase, str]]:
    """Of a chunk whose residents are there.

    Args:
        fresh: gradients appear now, one by one; otherwise they are there already.
        each: every unit's; otherwise, of units that are alike, the first's and the last's, which are extreme.
        missing: bytes that are not there yet when the loss is differentiated.
        gathers: each unit's weights, which stay.
    """
    level = 0
    for unit in reversed(chunk):
        count = len(unit.names)
        rise = (unit.backward_peak if fresh else unit.adding_peak) - (missing if unit.is_loss else 0)
        phase = Phase.FROZEN if unit.is_loss and unit.frozen and unit.frozen == rise else Phase.BACKWARD
        change = (unit.gradient if fresh else unit.pending) - unit.resident + (unit.weights if gathers else 0)
        for i in range(count) if each else (0, count - 1):
            yield level + i * change + rise, phase, unit.names[count - 1 - i]
        level += count * change


def _backward_rows(
    chunk: Sequence[Unit], fresh: bool, each: bool, missing: int, second: bool, gathers: bool = False
) -> Iterator[tuple[int, Phase, str]]:
    """Of a backward or, where a chunk has them, of one of its halves; see `_backward`."""
    if not any(unit.halves for unit in chunk):
        return _backward(chunk, fresh, each, missing, gathers)
    return _weight_half(chunk, fresh) if second else _input_half(chunk, missing)


def _input_half(chunk: Sequence[Unit], missing: int) -> Iterator[tuple[int, Phase, str]]:
    """The first half: nothing that was resident goes before it is over, and gradients stay beside it."""
    level = 0
    for unit in reversed(chunk):
        assert unit.halves is not None
        for name in reversed(unit.names):
            yield level + unit.halves.input_peak - (missing if unit.is_loss else 0), Phase.BACKWARD, name
            level += unit.halves.waiting


def _weight_half(chunk: Sequence[Unit], fresh: bool) -> Iterator[tuple[int, Phase, str]]:
    """The second half, step by step: a step's gradients have a name until the next step has made its own.

    ``torch/distributed/pipelining/_backward.py``, ``stage_backward_weight``: ``dweights``.
    """
    level = named = 0
    for unit in chunk:
        assert unit.halves is not None
        for name, step in product(unit.names, unit.halves.steps):
            made = step.made if fresh else step.added
            yield level + step.rise + made + named, Phase.BACKWARD, name
            level += step.change + (made if fresh else 0)
            named = 0 if fresh else made
