"""A training step of one pipeline stage, as the product of its passes' spans in the order of its schedule.

NOTE [ Memory over a step ]
A stage is a chain of units (regions, or checkpoint segments of several), cut into chunks where a device has virtual
stages. Parameters and optimizer state are allocated throughout. Each pass through a chunk adds what its units keep for
the backward, and rises above that as its units do; a backward frees what was kept. Gradients live in buffers from the
start (Megatron's and DDP's buckets), or appear one by one in the first backward of a step (PyTorch, where zero_grad
sets them to None), each chunk's in the chunk's own first backward; each later contribution is a temporary until it has
been added. With `reducing_chunks` only the last backward of a step reduces gradients. Before the first optimizer step
there is no state but the master copy of the parameters, which is made with the optimizer (`master`): step 0 is lower
than step 1, and the same run may fit in step 0 and not in step 1.
Everything else that a schedule or a framework holds is a `Lifetime`, except for buffers of one micro-batch or chunk:
an output that was sent and is not freed (`sent`), the last input and its gradient that a chunk without a micro-batch in
flight still holds (`received`), each completed transfer (`transfers`), and a reduction after a chunk's last backward.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter, mul
from typing import NamedTuple

from jettison.memory.schedule import PASSES, DeviceAction, DeviceOrder, Occupancy, Weights, Work
from jettison.memory.span import Phase, Span, Where, levels, peaks
from jettison.memory.stage_unit import PassKind, PassPiece, Unit, pieces, span
from jettison.spec.precision import Gradients

Units = tuple[Unit, ...]


class Event(IntEnum):
    """Events of a step, in order; after the last one the next step begins."""

    STEP = 0
    FORWARD = 1  # the first pass begins
    BACKWARD = 2  # the first backward is over
    OPTIMIZER = 3


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Bytes that are allocated at one event of a step and freed at another, which may be in the next step."""

    name: str
    nbytes: int
    begin: Event
    end: Event

    def covers(self, event: Event) -> bool:
        """Whether the bytes are allocated right after ``event``."""
        return (event - self.begin) % len(Event) < (self.end - self.begin) % len(Event)


def lifetimes(*found: tuple[str, int, Event, Event]) -> tuple[Lifetime, ...]:
    """Return the lifetimes with bytes above zero."""
    return tuple(Lifetime(*each) for each in found if each[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """All inputs that decide a stage's bytes over a step.

    ``sent`` counts, for each micro-batch, a stage output that was sent and is not freed, in addition to what the units
    keep. Chunks from number ``order.own`` on stand for the same chunks without checkpointing.
    """

    chunks: tuple[Units, ...]
    order: DeviceOrder
    micro_batches: int
    fixed: int
    state: int
    gradients: Gradients
    optimizer_transient: int = 0
    sent: int = 0
    master: int = 0  # part of ``state``
    aside: int = 0  # part of ``fixed``: workspaces of libraries
    late: int = 0  # part of ``aside`` that the first backward allocates: the matmul workspace of autograd's thread
    lifetimes: tuple[Lifetime, ...] = ()
    received: int = 0  # bytes for each chunk from number ``receives`` on
    receives: int = 0
    transfers: tuple[int, ...] = ()  # by chunk, bytes of each micro-batch that are held until the step's end
    shards: int = 0  # the optimizer's shards of gradients that are unsharded until they are reduced
    reducing: tuple[int, ...] = ()  # by chunk, how far a reduction after its last backward rises above the bytes before
    freed: tuple[int, ...] = ()  # by chunk, unsharded gradients (and weights kept unsharded) that a reduction frees
    reducing_chunks: tuple[Units, ...] = ()  # chunks in their last backward, where its units reduce gradients
    whole_chunks: tuple[Units, ...] = ()  # chunks while their weights are unsharded, if passes change that

    def there(self, event: Event) -> int:
        """Return the bytes of the lifetimes that cover an event."""
        return sum(each.nbytes for each in self.lifetimes if each.covers(event))

    def idle(self, busy: int = -1) -> int:
        """Return what all chunks without a micro-batch in flight, all but ``busy``, hold of their last one."""
        receiving = range(self.receives, self.order.own)
        return self.received * (len(receiving) - (busy in receiving))

    @property
    def own(self) -> tuple[Units, ...]:
        """The device's chunks, each once."""
        return self.chunks[: self.order.own]

    @property
    def occupancies(self) -> tuple[Occupancy, ...]:
        """States with the most memory, in order."""
        return tuple(self.order.fullest.values())

    @property
    def gradient_bytes(self) -> int:
        """Gradients of all units that are kept between passes."""
        kept = self.gradients is not Gradients.ACCUMULATOR
        return kept * sum(total_bytes(units, "gradient") for units in self.own)

    def adds(self, state: Occupancy) -> bool:
        """Whether the coming backward adds to gradients that its chunk already has."""
        if self.gradients is Gradients.ACCUMULATOR:
            return False
        if self.gradients is Gradients.UPFRONT or not state.learned:
            return True
        return bool(state.learned[state.step.chunk % self.order.own])

    def learned_bytes(self, learned: tuple[int, ...], reduced: tuple[int, ...] = ()) -> int:
        """Return the bytes of existing gradients, less those freed by the reduction of a chunk."""
        gone = sum(map(mul, reduced, self.freed)) if self.freed else 0
        if self.gradients in (Gradients.UPFRONT, Gradients.ACCUMULATOR) or all(learned):
            return self.gradient_bytes - gone
        learning = (units for units, has in zip(self.own, learned, strict=True) if has)
        return sum(total_bytes(units, "gradient") for units in learning) - gone

    def held(self, chunk: int) -> int:
        """Return the bytes that one micro-batch's forward through a chunk keeps."""
        return total_bytes(self.chunks[chunk], "resident")

    def most(self, each: Sequence[int]) -> int:
        """Return the most bytes at once, of ``each`` chunk's for every micro-batch in flight."""
        return max(sum(map(mul, state.alive, each)) for state in self.occupancies)

    def held_half(self, chunk: int) -> int:
        """Return the bytes kept between the two halves of a split backward of a chunk."""
        return total_bytes(self.chunks[chunk], "half")


class Moment(NamedTuple):
    """Bytes allocated at the highest point of one phase of one unit."""

    phase: Phase
    where: str
    micro_batch: int
    nbytes: int


class ChunkSpans:
    """Bytes of a chunk's units, and the spans of passes through them, each computed once."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.held = sum(len(unit.names) * unit.resident for unit in units)  # faster than `total_bytes`
        self.half = sum(len(unit.names) * unit.half for unit in units)
        self.gradients = sum(len(unit.names) * unit.gradient for unit in units)
        self.weights = sum(len(unit.names) * unit.weights for unit in units)
        self._spans: dict[PassKind, Span] = {}

    def span(self, how: PassKind) -> Span:
        """Return the span of one pass."""
        if how not in self._spans:
            self._spans[how] = span(self.units, how)
        return self._spans[how]


class StageAction(NamedTuple):
    """An action of a step, with the bytes allocated before it.

    Args:
        level: bytes before it; ``gradients``: the part of them that is gradients.
        units: the units of its chunk, and ``pieces``: the pass unit by unit; only set for passes.
    """

    kind: DeviceAction
    micro_batch: int
    level: int
    gradients: int = 0
    units: Units = ()
    pieces: tuple[PassPiece, ...] = ()


class StepActions(NamedTuple):
    """A step's actions; bytes after the last one, during the optimizer without its transient, and after the step."""

    actions: tuple[StageAction, ...]
    behind: int
    optimizer: int
    after: int


Known = dict[int, ChunkSpans]
"""Spans by ``id`` of a chunk's units: equal chunks share one object."""


def peak_bytes(load: StageLoad, *, first_step: bool = False, known: Known | None = None) -> int:
    """Return the peak bytes of a step.

    Args:
        first_step: step 0: optimizer state is first allocated by its optimizer phase.
        known: spans of chunks that other stages have computed.
    """
    step = _StepSpans(load, first_step, {} if known is None else known)
    return max(max(step.peaks()), *(moment.nbytes for moment in step.ends()))


def peak(load: StageLoad, *, first_step: bool = False) -> Moment:
    """Return the highest of the `moments`; the first one if several are equal."""
    step, order = _StepSpans(load, first_step, {}), load.order
    found = list(step.peaks())
    at = max(order.shown, key=found.__getitem__)
    action, micro_batch = order.action(at)
    where = step.span(action).where or Where(Phase.BACKWARD)
    *before, optimizer, after = step.ends()
    return max((*before, Moment(*where, micro_batch, found[at]), optimizer, after), key=attrgetter("nbytes"))


def moments(load: StageLoad, *, first_step: bool = False) -> Iterator[Moment]:
    """Yield the first micro-batch's forward, the passes from the fullest states, the optimizer, and the end.

    Args:
        first_step: see `peak_bytes`.
    """
    return _StepSpans(load, first_step, {}).rows()


def actions(load: StageLoad, *, first_step: bool = False) -> StepActions:
    """Return a step action by action; complete if the order contains all micro-batches."""
    step = _StepSpans(load, first_step, {})
    *found, behind = levels(step._of_kinds, step._sequence, step._level)
    *_, optimizer, after = step.ends()
    own = load.optimizer_transient
    return StepActions(tuple(step.opened(found)), behind, optimizer.nbytes - own, after.nbytes)


class _StepSpans:
    def __init__(self, load: StageLoad, first_step: bool, known: Known) -> None:
        self.load, self.first_step, self._known = load, first_step, known
        order = load.order
        self._chunks = [self._spans(units) for units in load.chunks]
        self._upfront = load.gradients is Gradients.UPFRONT
        self._added = load.gradients is Gradients.ACCUMULATOR  # no gradient outlives its backward
        self._gathers = order.walk.weights is not Weights.RESIDENT
        self._gradients = 0 if self._added else sum(chunk.gradients for chunk in self._chunks[: order.own])
        always = load.fixed + (load.master if first_step else load.state)
        self._base = always + (self._gradients if self._upfront else 0)
        self._late = load.late if first_step else 0
        skipped = load.micro_batches - order.micro_batches
        begin = Event.FORWARD if order.walk.learning else Event.BACKWARD  # nothing is trained: as after a backward
        self._level = self._base + load.there(begin) + load.idle() + skipped * sum(load.transfers)
        alike: dict[object, int] = {}
        differ = load.received or load.transfers or load.reducing  # chunks differ even with equal units
        of = self._chunks
        keys = ((n,) if differ else (of[n], of[n % order.own]) for n in range(order.chunks))
        self._alike = tuple(alike.setdefault(key, chunk) for chunk, key in enumerate(keys))
        kinds, self._sequence = order.compiled(self._alike)
        self._of_kinds = [self.span(kind) for kind in kinds]

    def _spans(self, units: Units) -> ChunkSpans:
        if id(units) not in self._known:
            self._known[id(units)] = ChunkSpans(units)
        return self._known[id(units)]

    def peaks(self) -> Iterator[int]:
        """Yield the peak bytes of each action."""
        return peaks(self._of_kinds, self._sequence, self._level)

    def ends(self) -> Iterator[Moment]:
        """Yield the start of the step, each chunk's first forward, the optimizer, and the end of the step."""
        load = self.load
        there = 0 if self.first_step else load.idle() + load.there(Event.STEP)
        yield Moment(Phase.BEFORE, "", 0, self._base - self._late + there)
        for chunk in sorted(set(self._alike)):
            if not self._enters(chunk):
                continue
            found = self._chunks[chunk].span(PassKind(Work.FORWARD))
            yield Moment(*(found.where or Where(Phase.FORWARD)), 0, self._enter(chunk) + found.peak)
        there = load.fixed + load.state + load.there(Event.OPTIMIZER) + load.idle()
        gradients = load.shards or self._gradients
        yield Moment(Phase.OPTIMIZER, "", -1, there + gradients + load.optimizer_transient)
        yield Moment(Phase.AFTER, "", -1, there + (gradients if self._upfront else 0))

    def _enters(self, chunk: int) -> bool:
        return self.load.order.entered[chunk] and bool(self._chunks[chunk].units)

    def _enter(self, chunk: int) -> int:
        return self._base - self._late + (0 if self.first_step else self.load.idle(chunk % self.load.order.own))

    def _pass(self, kind: DeviceAction) -> tuple[ChunkSpans, PassKind]:
        load, forward = self.load, kind.work is Work.FORWARD
        gathers = self._gathers and not forward and not kind.whole
        late = 0 if kind.begun and load.micro_batches > 1 else self._late
        fresh = not forward and (self._added or (kind.fresh and not self._upfront))
        spans = self._chunks[kind.chunk]
        if kind.whole or kind.reduces:
            spans = self._spans((load.whole_chunks if kind.whole else load.reducing_chunks)[kind.chunk])
        return spans, PassKind(kind.work, fresh, gathers, forward and kind.whole, late)

    def _received(self, kind: DeviceAction) -> int:
        """Bytes received for a pass; they replace the last ones of its chunk, and are freed with the next ones."""
        return self.load.received if kind.alone and kind.chunk % self.load.order.own >= self.load.receives else 0

    def span(self, kind: DeviceAction) -> Span:
        """Return the span of an action, with the allocations and frees up to the next one."""
        load, order, work = self.load, self.load.order, kind.work
        place, chunk = kind.chunk % order.own, self._chunks[kind.chunk]
        own = self._chunks[place]
        if work is Work.REDUCE:
            return Span(-load.freed[place] - kind.whole * own.weights, load.reducing[place], Where(Phase.BACKWARD))
        if work is Work.UNSHARD or work is Work.RESHARD:
            net = own.weights if work is Work.UNSHARD else -own.weights
            return Span(net, max(0, net))
        spans, how = self._pass(kind)
        found, received = spans.span(how), self._received(kind)
        if work is Work.FORWARD:
            net = chunk.held + load.sent - kind.whole * own.weights - received
            return Span(net, found.peak - received, found.where)
        net = how.gathers * own.weights - (
            chunk.half if work is Work.WEIGHT else chunk.held - order.splits * chunk.half
        )
        if work is order.ending:
            net += received - load.sent + (load.transfers[place] if load.transfers else 0)
            net += own.gradients if kind.fresh and not (self._upfront or self._added) else 0
            net -= load.freed[place] if kind.reduces else 0
            net += 0 if kind.begun else load.there(Event.BACKWARD) - load.there(Event.FORWARD)
        return Span(net, found.peak, found.where)

    def rows(self) -> Iterator[Moment]:
        """Yield the step's fullest moments."""
        order = self.load.order
        before, *ends = self.ends()
        yield before
        for chunk in filter(self._enters, range(order.chunks)):
            yield from _expanded(pieces(self._chunks[chunk].units, PassKind(Work.FORWARD)), self._enter(chunk), 0)
        shown = dict.fromkeys(order.shown)
        opened = self.opened(levels(self._of_kinds, self._sequence, self._level), shown)
        found = dict(zip(sorted(shown), opened, strict=True))
        for one in map(found.__getitem__, shown):
            if one.kind.work is Work.REDUCE:
                yield Moment(Phase.BACKWARD, "", one.micro_batch, one.level + self.load.reducing[one.kind.chunk])
            yield from _expanded(one.pieces, one.level, one.micro_batch)
        yield from ends[-2:]

    def opened(self, found: Iterable[int], only: Container[int] | None = None) -> Iterator[StageAction]:
        """Yield actions expanded to their units, given the bytes before each; ``only``: numbers of actions to yield."""
        load, order, gradients = self.load, self.load.order, self._gradients if self._upfront else 0
        for number, level in zip(range(len(self._sequence)), found, strict=False):
            kind, micro_batch = order.action(number)
            if only is None or number in only:
                if kind.work in PASSES:
                    level -= self._received(kind) if kind.work is Work.FORWARD else 0
                    spans, how = self._pass(kind)
                    found_pieces = tuple(pieces(spans.units, how))
                    yield StageAction(kind, micro_batch, level, gradients, spans.units, found_pieces)
                else:
                    yield StageAction(kind, micro_batch, level, gradients)
            if kind.work is Work.REDUCE or kind.reduces:
                gradients -= load.freed[kind.chunk]
            elif kind.fresh and kind.work is order.ending and not (self._upfront or self._added):
                gradients += self._chunks[kind.chunk % order.own].gradients


def _expanded(found: Iterable[PassPiece], level: int, micro_batch: int) -> Iterator[Moment]:
    for piece in found:
        for number, name in enumerate(piece.names):
            yield Moment(piece.phase, name, micro_batch, level + number * piece.net + piece.peak)
        level += len(piece.names) * piece.net


def total_bytes(units: Units, field: str) -> int:
    """Return the bytes of a field of all these units."""
    return sum(len(unit.names) * getattr(unit, field) for unit in units)
