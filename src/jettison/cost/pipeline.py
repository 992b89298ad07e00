"""A pipeline's step, event by event: orders from `ledger.schedule`, with the real times of each stage.

NOTE [ Events ]
A device runs its order as it stands. A forward of one place (a chunk of a stage) needs the same micro-batch's forward
of the place before it, a backward the backward of the place behind it, each sent a transfer earlier; the last place's
backward needs its own forward. A weight step needs its device only. A step starts when its device is free and what it
needs has come.

Once the pipeline is full, p micro-batches more take as long as the p before them, since `ledger.schedule.order` repeats
itself every p of them. How soon that is depends on how alike the stages are. So everything is replayed, up to
`MOST_EVENTS`; of more micro-batches only the first are, and their last period counts for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jettison.ledger.schedule import ScheduledPass, Work, orders
from jettison.spec.layout import Schedule

MOST_EVENTS = 100_000
"""Replayed at most: 10 ms."""
_Linked = tuple[int, int, bool, int]
"""Device, event needed (-1: none), whether it is another device's, and which duration: 3 x place + kind."""
_KINDS = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.WEIGHT: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a step takes. ``busy``: of each device, and ``ends``, when each has done its last step."""

    busy: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Until the last device has done."""
        return max(self.ends)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Seconds in which each device waits."""
        return tuple(self.makespan - seconds for seconds in self.busy)

    @property
    def efficiency(self) -> float:
        """Share of all devices' time in which they work."""
        return sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 1.0


def replay(
    orders: Sequence[Sequence[ScheduledPass]],
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    weight: Sequence[Sequence[float]] | None = None,
    *,
    transfer: float = 0.0,
) -> Replay:
    """Play the orders of all devices.

    Args:
        orders: of each device, as `ledger.schedule.orders` has them.
        forward, backward, weight: seconds of each device's chunks, of one micro-batch; ``backward`` is the half for
            inputs where ``weight`` is given.
        transfer: seconds between the end of a step on one device and its arrival on another.
    """
    events = _linked(tuple(tuple(steps) for steps in orders))
    return _play(events, forward, backward, weight, transfer)


def schedule_seconds(
    schedule: Schedule,
    micro_batches: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    weight: Sequence[Sequence[float]] | None = None,
    *,
    transfer: float = 0.0,
) -> Replay:
    """The same for a named schedule, however many micro-batches there are."""
    stages, chunks = len(forward), len(forward[0])
    affordable = MOST_EVENTS // (stages * chunks * (2 if weight is None else 3))

    def play(count: int) -> Replay:
        return _play(_events(schedule, stages, count, chunks), forward, backward, weight, transfer)

    if micro_batches <= max(affordable, 4 * stages):
        return play(micro_batches)
    periods = -(-(micro_batches - max(affordable, 4 * stages)) // stages)
    longer = play(micro_batches - periods * stages)
    short = play(micro_batches - (periods + 1) * stages)
    return Replay(
        busy=tuple(b + periods * (b - a) for a, b in zip(short.busy, longer.busy, strict=True)),
        ends=tuple(b + periods * (b - a) for a, b in zip(short.ends, longer.ends, strict=True)),
    )


@lru_cache(maxsize=256)
def _events(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> tuple[_Linked, ...]:
    return _linked(orders(schedule, stages=stages, micro_batches=micro_batches, virtual_stages=chunks))


def _linked(orders: tuple[tuple[ScheduledPass, ...], ...]) -> tuple[_Linked, ...]:
    """Events in an order in which each comes after what it needs."""
    stages = len(orders)
    chunks = 1 + max(step.chunk for steps in orders for step in steps)
    last = stages * chunks - 1
    positions = [0] * stages
    done: dict[tuple[int, int, int], int] = {}
    events: list[_Linked] = []
    waiting = list(range(stages - 1, -1, -1))
    while waiting:
        device = waiting.pop()
        steps = orders[device]
        while positions[device] < len(steps):
            step = steps[positions[device]]
            place = step.chunk * stages + device
            kind = _KINDS[step.work]
            needed = _needed(kind, place, last, step.micro_batch)
            if needed is not None and needed not in done:
                break
            source = -1 if needed is None else done[needed]
            far = source >= 0 and events[source][0] != device
            done[kind, place, step.micro_batch] = len(events)
            events.append((device, source, far, 3 * place + kind))
            positions[device] += 1
            for other in ((device + 1) % stages, (device - 1) % stages):
                if other != device and other not in waiting and positions[other] < len(orders[other]):
                    waiting.append(other)
    if any(position < len(steps) for position, steps in zip(positions, orders, strict=True)):
        raise ValueError("the orders wait for each other: no device can go on")
    return tuple(events)


def _needed(kind: int, place: int, last: int, micro_batch: int) -> tuple[int, int, int] | None:
    if kind == 0:
        return (0, place - 1, micro_batch) if place else None
    if kind == 1:
        return (1, place + 1, micro_batch) if place < last else (0, place, micro_batch)
    return (1, place, micro_batch)


def _play(
    events: Sequence[_Linked],
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    weight: Sequence[Sequence[float]] | None,
    transfer: float,
) -> Replay:
    stages, chunks = len(forward), len(forward[0])
    durations = [0.0] * (3 * stages * chunks)
    for device in range(stages):
        for chunk in range(chunks):
            at = 3 * (chunk * stages + device)
            durations[at], durations[at + 1] = forward[device][chunk], backward[device][chunk]
            durations[at + 2] = weight[device][chunk] if weight is not None else 0.0
    free, busy = [0.0] * stages, [0.0] * stages
    ends: list[float] = []
    end_at = ends.append
    for device, needed, far, duration in events:
        start = free[device]
        if needed >= 0:
            ready = ends[needed] + transfer if far else ends[needed]
            if ready > start:
                start = ready
        took = durations[duration]
        end = start + took
        end_at(end)
        free[device] = end
        busy[device] += took
    return Replay(busy=tuple(busy), ends=tuple(free))
