"""A memory snapshot as facts: which step and phase, what was there, what outlives steps, what lies in pieces.

Steps are not in a snapshot. They are seen in its bytes: in each they rise by the activations and fall again. A rise
counts where it is at least `SWING` of the largest fall; between two of them lies the end of a step, or of a
micro-batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from jettison.diagnose.facts import MemoryFacts, Part, StepBytes, Survivor, phase_named
from jettison.diagnose.growth import never_falls
from jettison.traces.snapshot import DeviceSnapshot, Snapshot
from jettison.traces.timeline import Ints, MemoryTimeline, by_module_and_role

SWING: Final = 0.4
FIRST_STEPS: Final = 2
"""Steps in which state appears that is meant to stay: the optimizer's, caches, compiled code."""
FEWEST_STEPS: Final = 4
"""After the first ones, before anything is said of growth."""
SHARE_OF_STEPS: Final = 0.6
"""In which a place has to leave something behind: prefetched batches are there from the last few only."""
LEAST_TO_GROW: Final = 6
"""After the first ones, before a place is said to hold more and more: of fewer, sizes of batches rise by chance."""
MOST_LOOKED: Final = 30
"""Ends of steps."""
LEAST_GROWTH: Final = 0.001
"""Of the peak."""


def facts_of_snapshot(snapshot: Snapshot) -> MemoryFacts:
    """Of the device on which a request failed, else of the fullest."""
    failing = [device for device in snapshot.devices if device.out_of_memory]
    device = failing[0] if failing else snapshot.busiest
    timeline = device.timeline
    failed = device.out_of_memory[0] if device.out_of_memory else None
    moment = timeline.peak_event if failed is None else failed.event - 1
    found = by_module_and_role(timeline.shares(moment))
    parts = [Part(module=m, role=r, nbytes=n, count=c) for (m, r), (n, c) in found.items()]
    at = timeline.start_bytes if moment < 0 else int(timeline.live_bytes[moment])
    phase, site = _where(timeline, moment) if failed is None else (failed.label.role, failed.label.module)
    rises = step_bounds(timeline.live_bytes[: moment + 1] if failed else timeline.live_bytes)
    pieces = [piece for segment in device.segments if segment.is_split for piece in segment.free_pieces_bytes]
    return MemoryFacts(
        source=snapshot.name,
        failed=failed is not None,
        asked_bytes=None if failed is None else failed.asked_bytes,
        free_bytes=None if failed is None else failed.free_bytes,
        allocated_bytes=at,
        unused_bytes=_unused(device, at) if device.segments else None,
        largest_piece_bytes=max(pieces, default=0) if device.segments else None,
        expandable=_expandable(snapshot, device),
        phase=phase_named(phase),
        site=site,
        parts=tuple(parts),
        steps=_steps(timeline, rises, at + failed.asked_bytes if failed else None),
        survivors=survivors(timeline, [low for low, _ in rises]),
        notes=() if device.complete else ("the oldest events are missing: of what was there before nothing is known",),
    )


def _where(timeline: MemoryTimeline, event: int) -> tuple[str, str]:
    if event < 0:
        return "unknown", ""
    label = timeline.labels[int(timeline.label_of[int(timeline.allocation[event])])]
    return label.role, label.module


def _expandable(snapshot: Snapshot, device: DeviceSnapshot) -> bool | None:
    if any(segment.is_expandable for segment in device.segments):
        return True
    said = snapshot.settings.get("expandable_segments")
    if isinstance(said, bool):
        return said
    return True if "expandable_segments:true" in str(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF")).lower() else None


def _unused(device: DeviceSnapshot, live_bytes: int) -> int:
    """Held and not used at that moment. Segments are as they were at the end: what has died since was in use then."""
    if not device.out_of_memory:
        return sum(sum(segment.free_pieces_bytes) for segment in device.segments if segment.is_split)
    allocated = sum(segment.allocated_bytes for segment in device.segments)
    died_since = max(0, live_bytes - device.timeline.end_bytes)
    return max(0, device.reserved_bytes - allocated - died_since)


def step_bounds(live_bytes: Ints) -> list[tuple[int, int]]:
    """(event at which bytes are lowest, event at which they are highest then), step by step."""
    if not len(live_bytes):
        return []
    highest = np.maximum.accumulate(live_bytes)
    least = SWING * float((highest - live_bytes).max())
    if least <= 0:
        return []
    values = live_bytes.tolist()
    bounds: list[tuple[int, int]] = []
    low = high = 0
    rising = False
    for at, value in enumerate(values):
        if rising:
            if value > values[high]:
                high = at
            elif values[high] - value >= least:
                bounds.append((low, high))
                low, rising = at, False
        elif value <= values[low]:
            low = at
        elif value - values[low] >= least:
            high, rising = at, True
    bounds.append((low, high if rising else len(values) - 1))
    return bounds


def _steps(timeline: MemoryTimeline, bounds: list[tuple[int, int]], last_peak: int | None) -> tuple[StepBytes, ...]:
    live = timeline.live_bytes
    found = [
        StepBytes(step=step, between_bytes=int(live[low]), peak_bytes=int(live[high]))
        for step, (low, high) in enumerate(bounds)
    ]
    if last_peak is not None and found:
        last = found[-1]
        found[-1] = StepBytes(step=last.step, between_bytes=last.between_bytes, peak_bytes=last_peak)
    return tuple(found)


def survivors(timeline: MemoryTimeline, ends: list[int]) -> tuple[Survivor, ...]:
    """Places that leave something behind in most steps after the first ones, the largest first.

    Args:
        ends: events at which steps end and the next begin.
    """
    possible = len(ends) - 1 - FIRST_STEPS
    if possible < FEWEST_STEPS:
        return ()
    alive = timeline.alive(ends[-1])
    step = np.searchsorted(np.array(ends), timeline.born[alive], side="right") - 1
    late = step >= FIRST_STEPS
    alive, step = alive[late], step[late]
    found = []
    for label in np.unique(timeline.label_of[alive]).tolist():
        own = timeline.label_of[alive] == label
        steps = len(np.unique(step[own]))
        nbytes = int(timeline.nbytes[alive[own]].sum())
        if steps >= max(3, SHARE_OF_STEPS * possible) and nbytes >= LEAST_GROWTH * timeline.peak_bytes:
            named = timeline.labels[label]
            found.append(Survivor(module=named.module, role=named.role, nbytes=nbytes, steps=steps))
    return tuple(sorted(found, key=lambda one: -one.nbytes)) or _growing(timeline, ends)


def _growing(timeline: MemoryTimeline, ends: list[int]) -> tuple[Survivor, ...]:
    """Places that hold more and more, though not in most steps, or not in tensors of their own: a list that is added
    to now and then, a buffer that is made anew, larger each time.
    """
    first, last = FIRST_STEPS, len(ends) - 1
    if last - first < LEAST_TO_GROW:
        return ()
    looked = sorted({first + (last - first) * part // MOST_LOOKED for part in range(MOST_LOOKED + 1)})
    held = np.zeros((len(looked), len(timeline.labels)), dtype=np.int64)
    for at, end in enumerate(looked):
        alive = timeline.alive(ends[end])
        np.add.at(held[at], timeline.label_of[alive], timeline.nbytes[alive])
    found = []
    for label, named in enumerate(timeline.labels):
        levels = held[:, label].tolist()
        more = levels[-1] - levels[0]
        if more >= LEAST_GROWTH * timeline.peak_bytes and never_falls(levels):
            found.append(Survivor(module=named.module, role=named.role, nbytes=more, steps=last - first))
    return tuple(sorted(found, key=lambda one: -one.nbytes))
