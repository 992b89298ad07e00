"""What an `AllocationCounter` saw, as a timeline: of a real step or of a dry run, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.measure.memory import AllocationEvent
from jettison.traces.timeline import Label, MemoryTimeline, TimelineWriter

STATIC = "static"
"""The operator of what was there before the step."""


def allocation_timeline(title: str, events: Sequence[AllocationEvent]) -> MemoryTimeline:
    """Storages from birth to death; the role is the operator that returned one, and the module's place has the phase
    in which it did. There is no clock: an event is a µs.

    A storage that is resized is taken for gone, and another one made.
    """
    writer = TimelineWriter(title)
    sizes: dict[int, int] = {}
    numbers: dict[int, int] = {}
    begun, phase = False, ""
    for event in events:
        if event.phase != phase:
            phase = event.phase
            writer.mark(phase)
        time_ns = 1000 * writer.events
        begun = begun or event.operator != STATIC
        before = sizes.get(event.storage, 0)
        sizes[event.storage] = after = before + event.delta_bytes
        if before:
            writer.free(numbers.pop(event.storage), time_ns)
        if after:
            label = Label(module=phase, role=event.operator)
            numbers[event.storage] = writer.allocate(after, label, time_ns) if begun else writer.already(after, label)
    return writer.timeline()
