"""Simulation of a pipeline's step: orders from `memory.schedule`, with the seconds of each stage.

NOTE [ Events ]
A device runs its passes in order. A forward of one place (a chunk of a stage) needs the same micro-batch's forward of
the previous place, a backward the backward of the next place, each sent a transfer earlier; the last place's backward
needs its own forward. A weight pass needs its device only. A pass starts when device and input are there.

Once the pipeline is full, every p micro-batches take as long as the p before them: `PipelineShape.order` has that
period. How soon that is depends on the differences between stages. So every micro-batch is simulated up to
`MOST_EVENTS` events; beyond, the last period is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import add

from jettison.memory.schedule import PipelineShape, ScheduledPass, Work

MOST_EVENTS = 100_000
"""Events simulated at most: 10 ms."""
Seconds = Sequence[Sequence[float]]
"""By device and chunk, of one micro-batch."""
_Linked = tuple[int, int, bool, int]
"""Event before on the device, event needed, is that another device's, 3 x place + kind. From 1; 0: the start."""
_KINDS = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.WEIGHT: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """Events in topological order; by device the last event and the indices of its durations."""

    linked: tuple[_Linked, ...]
    last: tuple[int, ...]
    durations: tuple[tuple[int, ...], ...]
    devices: tuple[int, ...]  # by place


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Seconds of a step: ``busy`` time of each device, and when each ``ends`` its last pass."""

    busy: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last device ends."""
        return max(self.ends)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle seconds of each device."""
        return tuple(self.makespan - seconds for seconds in self.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """One pass of a device with its start and end, in seconds from the first forward."""

    step: ScheduledPass
    start: float
    end: float


def timed_passes(shape: PipelineShape, *seconds: Seconds, transfer: float = 0.0) -> tuple[tuple[TimedPass, ...], ...]:
    """Return each device's passes with their times: those that `schedule_seconds` sums up."""
    events = _events(shape)
    durations = _durations(events, seconds)
    ends = _ends(events, durations, transfer)
    found: tuple[list[TimedPass], ...] = tuple([] for _ in range(shape.stages))
    steps = shape.orders
    for event, (before, needed, far, duration) in enumerate(events.linked, start=1):
        device = events.devices[duration // 3]
        start = max(ends[before], ends[needed] + (transfer if far else 0.0))
        step = steps[device][len(found[device])]
        found[device].append(TimedPass(step=step, start=start, end=ends[event]))
    return tuple(map(tuple, found))


def schedule_seconds(shape: PipelineShape, *seconds: Seconds, transfer: float = 0.0) -> Replay:
    """Simulate a schedule of any number of micro-batches.

    Args:
        seconds: of forwards and of backwards, or of forwards, of gradients of inputs and of gradients of weights.
        transfer: seconds between the end of a pass on one device and its arrival on another.
    """
    affordable = MOST_EVENTS // (shape.stages * shape.virtual_stages * len(seconds))

    def play(fewer: int) -> Replay:
        events = _events(replace(shape, micro_batches=shape.micro_batches - fewer * shape.turn))
        return _play(events, seconds, transfer)

    more = shape.micro_batches - max(affordable, 4 * shape.turn)
    if more <= 0:
        return play(0)
    periods = -(-more // shape.turn)
    longer, short = play(periods), play(periods + 1)
    return Replay(
        busy=tuple(b + periods * (b - a) for a, b in zip(short.busy, longer.busy, strict=True)),
        ends=tuple(b + periods * (b - a) for a, b in zip(short.ends, longer.ends, strict=True)),
    )


@lru_cache(maxsize=256)
def _events(shape: PipelineShape) -> _Events:
    """Sort events topologically. An event's code is (kind x places + place) x micro-batches + micro-batch."""
    stages, chunks, count = shape.stages, shape.virtual_stages, shape.micro_batches
    places = stages * chunks
    of_device = [[shape.schedule.place(device, chunk, stages) for chunk in range(chunks)] for device in range(stages)]
    devices = [0] * places
    for device, own in enumerate(of_device):
        for place in own:
            devices[place] = device
    kinds = places * count
    codes = [
        [(_KINDS[s.work] * places + of_device[device][s.chunk]) * count + s.micro_batch for s in steps]
        for device, steps in enumerate(shape.orders)
    ]
    numbers = [0] * (3 * kinds)  # of events that have been linked, by code
    of_event = [-1]  # devices
    latest, positions = [0] * stages, [0] * stages
    events: list[_Linked] = []
    durations: list[list[int]] = [[] for _ in range(stages)]
    waiting = list(range(stages - 1, -1, -1))
    while waiting:
        device = waiting.pop()
        steps = codes[device]
        begun = positions[device]
        for code in steps[begun:]:
            needed = _needed(code, kinds, count)
            source = 0 if needed is None else numbers[needed]
            if not source and needed is not None:
                break
            kind, place = divmod(code // count, places)
            events.append((latest[device], source, source > 0 and of_event[source] != device, 3 * place + kind))
            of_event.append(device)
            latest[device] = numbers[code] = len(events)
            durations[device].append(3 * place + kind)
            positions[device] += 1
        if positions[device] > begun:
            others = ((device + 1) % stages, (device - 1) % stages)
            waiting += [n for n in others if n != device and n not in waiting and positions[n] < len(codes[n])]
    assert all(position == len(own) for position, own in zip(positions, codes, strict=True)), "no order deadlocks"
    return _Events(
        linked=tuple(events), last=tuple(latest), durations=tuple(map(tuple, durations)), devices=tuple(devices)
    )


def _needed(code: int, kinds: int, count: int) -> int | None:
    """Code of the event that one waits for; see NOTE [ Events ]."""
    if code < kinds:  # a forward
        return code - count if code >= count else None
    if code < 2 * kinds - count:  # a backward whose place is not the last
        return code + count
    return code - kinds  # its own forward, or its own backward


def _play(events: _Events, seconds: Sequence[Seconds], transfer: float) -> Replay:
    durations = _durations(events, seconds)
    ends = _ends(events, durations, transfer)
    of_duration = durations.__getitem__
    return Replay(  # added one by one: from Python 3.12 on `sum` compensates for rounding
        busy=tuple(reduce(add, map(of_duration, own), 0.0) for own in events.durations),
        ends=tuple(ends[last] for last in events.last),
    )


def _durations(events: _Events, seconds: Sequence[Seconds]) -> list[float]:
    """Seconds of each place's three kinds of work, by the index in `_Linked`."""
    durations = [0.0] * (3 * len(events.devices))
    for kind, of_device in enumerate(seconds):
        for place, device in enumerate(events.devices):
            durations[3 * place + kind] = of_device[device][place // len(of_device)]
    return durations


def _ends(events: _Events, durations: Sequence[float], transfer: float) -> list[float]:
    """End of each event, after the start's 0."""
    ends = [0.0]
    end_at = ends.append
    for before, needed, far, duration in events.linked:
        free, ready = ends[before], ends[needed] + transfer if far else ends[needed]
        end_at((ready if ready > free else free) + durations[duration])
    return ends
