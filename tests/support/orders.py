"""What a device holds as it works through an order of passes, for tests that bring orders of their own."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.memory.schedule import PLAIN, DeviceOrder, Occupancy, OrderOptions, ScheduledPass


def device(steps: Sequence[ScheduledPass], walk: OrderOptions = PLAIN) -> DeviceOrder:
    """An order of chunks that are all of the device's own."""
    chunks = 1 + max(step.chunk for step in steps)
    return DeviceOrder(steps=tuple(steps), own=chunks, chunks=chunks, walk=walk)


def fullest(steps: Sequence[ScheduledPass], walk: OrderOptions = PLAIN) -> tuple[Occupancy, ...]:
    """Its states that hold most."""
    return tuple(device(steps, walk).fullest.values())


def peak_in_flight(steps: Sequence[ScheduledPass]) -> int:
    """The most micro-batch chunks that are in flight at one moment."""
    return max(sum(state.alive) for state in fullest(steps))


def most_in_flight(steps: Sequence[ScheduledPass]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most that each chunk ever has between its passes, and between the halves of a backward."""
    states = fullest(steps)
    forward = zip(*(state.forward for state in states), strict=True)
    weight = zip(*(state.weight for state in states), strict=True)
    return tuple(map(max, forward)), tuple(map(max, weight))
