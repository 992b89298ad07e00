"""The height of a stage's worst moment, without the moment itself: for thousands of candidates.

`ledger.timeline.peak` walks through every unit for every state of the pipeline, and can say where the peak is. Its
levels are sums of what other micro-batches hold, which a state decides, and of how far a pass through one chunk rises
above that, which it does not: so each chunk is walked through once, and chunks that are alike together. Tests hold the
two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, ge, mul
from typing import Final

from jettison.identity import Same
from jettison.ledger.occupancies import Occupancy
from jettison.ledger.timeline import StageLoad, Unit, peak
from jettison.memory.schedule import Work
from jettison.predict.forecast import Forecast
from jettison.spec.precision import Gradients

FEW_KINDS: Final = 4
"""Of chunks on a stage, for which states are compared with each other."""


def peak_bytes(found: Forecast) -> int:
    """Of the worst stage from the second step on: `Forecast.peak_bytes`."""
    known: dict[int, _Rise] = {}
    return max(_peak(stage.load, known) for stage in found.stages)


def stage_peak_bytes(load: StageLoad) -> int:
    """See NOTE [ What is there when ] in `ledger.timeline`."""
    return _peak(load, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rise:
    """Of a chunk: bytes that a forward leaves behind, and how far passes rise above what is there before them.

    Args:
        fresh, adding: of a backward in which gradients appear, and of one to which they are added.
        gradients: of all its units.
    """

    held: int
    forward: int
    fresh: int
    adding: int
    gradients: int


def _rise(chunk: Sequence[Unit]) -> _Rise:
    return _Rise(
        held=sum(len(unit.names) * unit.resident for unit in chunk),
        forward=_forward_rise(chunk),
        fresh=_backward_rise(chunk, fresh=True),
        adding=_backward_rise(chunk, fresh=False),
        gradients=sum(len(unit.names) * unit.gradient for unit in chunk),
    )


def _peak(load: StageLoad, known: dict[int, _Rise]) -> int:
    """Args: known: of chunks, by the objects that their units are."""
    if load.passed or load.shards:  # what has been sent, or reduced, is not a sum over kinds of chunks
        return peak(load).nbytes
    kinds: dict[int, int] = {}
    pattern = tuple(kinds.setdefault(id(chunk), len(kinds)) for chunk in load.chunks)
    for chunk in load.chunks:
        if id(chunk) not in known:
            known[id(chunk)] = _rise(chunk)
    rises = [known[each] for each in kinds]
    upfront = load.gradients is Gradients.UPFRONT
    added = load.gradients is Gradients.ADDED  # none outlives its backward
    everything = 0 if added else sum(known[id(chunk)].gradients for chunk in load.own)
    always = load.fixed + load.state
    base = always + (everything if upfront else 0)
    receives = load.receives if load.received else -1
    states = _fullest(Same(load.occupancies), pattern, load.twins, receives)
    entering = max(known[id(c)].forward for c, entered in zip(load.chunks, load.entered, strict=True) if entered)
    between = load.idle((0,) * len(load.chunks))
    highest = max(
        base + entering,
        base + between,
        always + between + load.copies + load.batches + everything + load.optimizer_transient,
    )
    for number, entered in enumerate(load.entered if load.received else ()):
        if entered:
            alone = load.idle(tuple(int(other == number) for other in range(len(load.chunks))))
            highest = max(highest, base + alone + known[id(load.chunks[number])].forward)
    base += load.around
    prices = [rise.held + load.sent for rise in rises]
    prices += [0 if upfront or added else rise.gradients for rise in rises]
    for state in states:
        level = base + load.received * state.idle + (load.variables if state.begun else 0)
        level += sum(map(mul, state.counts, prices))
        work = rises[state.at_work]
        adds = upfront or (state.adds and not added)
        level += work.forward if state.enters else work.adding if adds else work.fresh
        highest = level if level > highest else highest
    return highest


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """An occupancy by kinds of chunks: those alive of each and then those that have learned, and the kind at work.

    ``enters``: it runs forwards; ``adds``: backwards, to gradients that are there. ``begun``: backwards have. ``idle``:
    chunks that hold what they were sent last, for lack of anything in flight.
    """

    counts: tuple[int, ...]
    at_work: int
    enters: bool
    adds: bool
    begun: bool
    idle: int

    def covers(self, other: _State) -> bool:
        """Is nothing of the other one higher, whatever chunks hold?"""
        same = self.at_work == other.at_work and self.enters == other.enters and self.adds == other.adds
        if not same or self.idle < other.idle or self.begun < other.begun:
            return False
        return all(map(ge, self.counts, other.counts))


@lru_cache(maxsize=65536)
def _fullest(
    occupancies: Same[tuple[Occupancy, ...]], pattern: tuple[int, ...], twins: bool, receives: int
) -> tuple[_State, ...]:
    """The states worth pricing of a stage whose chunks are of these kinds: where they are few, what none covers.

    Args:
        receives: the first chunk that holds what it was sent; -1: none does.
    """
    states = list(dict.fromkeys(_state(each, pattern, twins, receives) for each in occupancies.it))
    if max(pattern) >= FEW_KINDS:  # a planner's, which come once
        return tuple(states)
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: sum(state.counts), reverse=True):
        if not any(other.covers(state) for other in kept):
            kept.append(state)
    return tuple(kept)


def _state(occupancy: Occupancy, pattern: tuple[int, ...], twins: bool, receives: int) -> _State:
    counts = list(map(add, occupancy.forward, occupancy.weight))
    own = len(counts) // 2 if twins else len(counts)
    learned = occupancy.learned or (1,) * own
    step = occupancy.step
    chunk, enters = (0, False) if step is None else (step.chunk, step.work is Work.FORWARD)
    alive = _by_kind(counts, pattern)
    if receives >= 0 and enters:
        counts[chunk] += 1
    receiving = range(receives, own) if receives >= 0 else ()
    return _State(
        counts=(*alive, *_by_kind(learned, pattern)),
        at_work=pattern[chunk],
        enters=enters,
        adds=not enters and bool(learned[chunk % own]),
        begun=any(learned),
        idle=sum(not any(counts[chunk::own]) for chunk in receiving),
    )


def _by_kind(counts: Sequence[int], pattern: tuple[int, ...]) -> tuple[int, ...]:
    found = [0] * (1 + max(pattern))
    for kind, n in zip(pattern, counts, strict=False):  # of chunks that learn there may be half as many
        found[kind] += n
    return tuple(found)


def _forward_rise(chunk: Sequence[Unit]) -> int:
    """How far a forward rises above what is there before it."""
    highest = level = 0
    for unit in chunk:
        change = unit.resident + unit.cached
        level += len(unit.names) * change
        highest = max(highest, level - change + unit.forward_peak)
    return highest


def _backward_rise(chunk: Sequence[Unit], *, fresh: bool) -> int:
    """How far a backward rises above what is there before it; negative where it only falls."""
    level, highest = 0, -sum(len(unit.names) * unit.resident for unit in chunk)
    for unit in reversed(chunk):
        change = (unit.gradient if fresh else unit.pending) - unit.resident
        rise = unit.backward_peak if fresh else unit.adding_peak
        highest = max(highest, level + rise + max(0, (len(unit.names) - 1) * change))
        level += len(unit.names) * change
    return highest
