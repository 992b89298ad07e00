"""Facts of a memory snapshot: step and phase, parts, tensors that outlive steps, unused pieces.

Steps are those whose ends the snapshot's stacks give (`DeviceSnapshot.step_ends`). Where there are none, nothing is
said of growth: what rises within a forward is activations, and what an optimizer keeps is its state.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from jettison.diagnose.facts import MemoryFacts, Part, StepBytes, Survivor, phase_named
from jettison.diagnose.growth import never_falls
from jettison.diagnose.logits import speaks_of_logits
from jettison.traces.frames import OPTIMIZER
from jettison.traces.snapshot import DeviceSnapshot, Snapshot
from jettison.traces.timeline import Label, MemoryTimeline

FIRST_STEPS: Final = 2
"""Steps in which state appears that is meant to stay: the optimizer's, caches, compiled code."""
FEWEST_STEPS: Final = 4
"""After the first ones, before anything is said of growth."""
SHARE_OF_STEPS: Final = 0.6
"""In which a place has to leave something behind, one of the first third among them: prefetched batches, and what is
kept of the last few, are there from the last few only.
"""
LEAST_TO_GROW: Final = 6
"""After the first ones, before a place is said to hold more and more: of fewer, sizes of batches rise by chance."""
MOST_LOOKED: Final = 30
"""Ends of steps."""
LEAST_GROWTH: Final = 0.001
"""Share of the peak."""


def facts_of_snapshot(snapshot: Snapshot) -> MemoryFacts:
    """Facts of the device on which a request failed, else of the fullest."""
    failing = [device for device in snapshot.devices if device.out_of_memory]
    device = failing[0] if failing else snapshot.busiest
    timeline = device.timeline
    failed = device.out_of_memory[0] if device.out_of_memory else None
    moment = timeline.peak_event if failed is None else failed.event - 1
    parts = _parts(timeline, moment)
    at = timeline.start_bytes if moment < 0 else int(timeline.live_bytes[moment])
    label = _where(timeline, moment) if failed is None else failed.label
    steps = step_bounds(device, len(timeline.allocation) if failed is None else moment + 1)
    pieces = [
        piece
        for segment in device.segments
        if segment.is_split and not segment.is_private
        for piece in segment.free_pieces_bytes
    ]
    return MemoryFacts(
        source=snapshot.name,
        failed=failed is not None,
        asked_bytes=None if failed is None else failed.asked_bytes,
        free_bytes=None if failed is None else failed.free_bytes,
        allocated_bytes=at,
        unused_bytes=_unused(device, at) if device.segments else None,
        private_bytes=sum(sum(s.free_pieces_bytes) for s in device.segments if s.is_private),
        largest_piece_bytes=max(pieces, default=0) if device.segments else None,
        expandable=_expandable(snapshot, device),
        phase=phase_named(label.role),
        site=label.module,
        logits=speaks_of_logits(label.module, label.site),
        parts=parts,
        steps=_steps(timeline, steps, at + failed.asked_bytes if failed else None),
        places_known=True,
        survivors=survivors(timeline, [low for low, _ in steps]),
        notes=device.notes,
    )


def _parts(timeline: MemoryTimeline, moment: int) -> tuple[Part, ...]:
    """By module and role, the largest first; each with the site that has most of it."""
    found: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for share in timeline.shares(moment):
        one = share.label
        found.setdefault((one.module, one.role), []).append((share.nbytes, share.count, one.site))
    parts = [
        Part(
            module=module, role=role, nbytes=sum(n for n, _, _ in own), count=sum(c for _, c, _ in own), site=own[0][2]
        )
        for (module, role), own in found.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.nbytes, part.module, part.role)))


def _where(timeline: MemoryTimeline, event: int) -> Label:
    if event < 0:
        return Label(module="", role="unknown")
    return timeline.labels[int(timeline.label_of[int(timeline.allocation[event])])]


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
        split = [segment for segment in device.segments if segment.is_split and not segment.is_private]
        return sum(sum(segment.free_pieces_bytes) for segment in split)
    allocated = sum(segment.allocated_bytes for segment in device.segments)
    died_since = max(0, live_bytes - device.timeline.end_bytes)
    private = sum(sum(segment.free_pieces_bytes) for segment in device.segments if segment.is_private)
    return max(0, device.reserved_bytes - allocated - died_since - private)


def step_bounds(device: DeviceSnapshot, events: int) -> list[tuple[int, int]]:
    """Each step's event at which fewest bytes are allocated, and the one at which most are afterwards.

    Empty where no end of a step is seen. What follows the last end is a step where a forward or backward is in it.

    Args:
        events: how many of the first events to look at.
    """
    timeline = device.timeline
    ends = [end for end in device.step_ends if end < events]
    if not ends:
        return []
    bounds = [0, *(end - 1 for end in ends if end)]  # what the last event of a step leaves is between steps
    if _has_work(timeline, ends[-1], events):
        bounds.append(events)
    found = []
    for begin, end in pairwise(bounds):
        if end > begin:
            low = begin + int(timeline.live_bytes[begin:end].argmin())
            found.append((low, low + int(timeline.live_bytes[low:end].argmax())))
    return found


def _has_work(timeline: MemoryTimeline, begin: int, end: int) -> bool:
    own = timeline.allocation[begin:end][timeline.is_birth[begin:end]]
    labels = np.unique(timeline.label_of[own]).tolist()
    return any(timeline.labels[label].role in ("forward", "backward", "recompute") for label in labels)


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
    """Find lines whose tensors outlive most steps after the first ones, the largest first.

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
        if timeline.labels[label].role == OPTIMIZER:
            continue  # its state: a parameter that gets its first gradient late gets its state late
        own = timeline.label_of[alive] == label
        steps = len(np.unique(step[own]))
        nbytes = int(timeline.nbytes[alive[own]].sum())
        early = int(step[own].min()) < FIRST_STEPS + possible / 3
        if early and steps >= max(3, SHARE_OF_STEPS * possible) and nbytes >= LEAST_GROWTH * timeline.peak_bytes:
            named = timeline.labels[label]
            found.append(Survivor(module=named.module, role=named.role, nbytes=nbytes, steps=steps, site=named.site))
    return tuple(sorted(found, key=lambda one: -one.nbytes)) or _growing(timeline, ends)


def _growing(timeline: MemoryTimeline, ends: list[int]) -> tuple[Survivor, ...]:
    """Find lines that hold more and more, though not in most steps or not in new tensors: a list that grows now and
    then, a buffer that is replaced by a larger one.
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
        if named.role == OPTIMIZER:
            continue
        levels = held[:, label].tolist()
        more = levels[-1] - levels[0]
        if more >= LEAST_GROWTH * timeline.peak_bytes and never_falls(levels):
            found.append(
                Survivor(module=named.module, role=named.role, nbytes=more, steps=last - first, site=named.site)
            )
    return tuple(sorted(found, key=lambda one: -one.nbytes))
