"""Export of a timeline as a CUDA memory snapshot, in the format of `_dump_snapshot`.

It opens at https://docs.pytorch.org/memory_viz and with `torch.cuda._memory_viz`. Stacks have module and role.
Addresses are of an allocator that does not split segments, since fragmentation is unknown: each allocation has its own
segment, rounded up to the allocator's granularity, and a freed one is reused for the next of the same size.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from jettison.core.files import whole_file
from jettison.diagnose.frames import frames_of_label
from jettison.memory.timeline import MemoryTimeline

GRANULARITY_BYTES: Final = 512
SMALL_BYTES: Final = 1 << 20
FIRST_ADDRESS: Final = 0x7F00_0000_0000
_POOL: Final = (0, 0)


def write_snapshot(path: Path, timelines: list[MemoryTimeline]) -> None:
    """Write a snapshot of several devices: the first timeline's is device 0."""
    content = snapshot_content(timelines)
    with whole_file(path) as partial, partial.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def snapshot_content(timelines: list[MemoryTimeline]) -> dict[str, Any]:
    """Return the content of the file."""
    devices = [_device(timeline, index) for index, timeline in enumerate(timelines)]
    return {
        "segments": [segment for segments, _ in devices for segment in segments],
        "device_traces": [trace for _, trace in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }


class _Allocator:
    """Addresses of allocations and their segments."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # of segments, by address
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._next = FIRST_ADDRESS

    def take(self, nbytes: int) -> tuple[int, bool]:
        """Return an address, and whether it needed a new segment."""
        size = -(-max(nbytes, 1) // GRANULARITY_BYTES) * GRANULARITY_BYTES
        if self._free[size]:
            return self._free[size].pop(), False
        address, self._next = self._next, self._next + size
        self.sizes[address] = size
        return address, True

    def give(self, address: int) -> None:
        """Free an address."""
        self._free[self.sizes[address]].append(address)


def _device(timeline: MemoryTimeline, index: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Segments and events."""
    allocator = _Allocator()
    stacks = [
        frames_of_label(label) for label in timeline.labels
    ]  # one list for each label, so that the pickle has it once
    trace: list[dict[str, Any]] = []
    where: dict[int, int] = {}
    for number in np.nonzero(timeline.born < 0)[0].tolist():
        where[number], _ = allocator.take(int(timeline.nbytes[number]))
    marks = defaultdict(list)
    for mark in timeline.marks:
        marks[mark.event].append(mark.text)
    rows = zip(timeline.allocation.tolist(), timeline.is_birth.tolist(), timeline.time_ns.tolist(), strict=True)
    for event, (number, is_birth, time_ns) in enumerate(rows):
        at = time_ns // 1000
        for text in marks.get(event, ()):
            trace.append(_event("user_defined", 0, 0, [], at) | {"user_metadata": text})
        nbytes, frames = int(timeline.nbytes[number]), stacks[timeline.label_of[number]]
        if is_birth:
            where[number], is_new = allocator.take(nbytes)
            if is_new:
                size = allocator.sizes[where[number]]
                trace.append(_event("segment_alloc", where[number], size, frames, at))
            trace.append(_event("alloc", where[number], nbytes, frames, at))
        else:
            address = where.pop(number)
            trace += [_event(action, address, nbytes, [], at) for action in ("free_requested", "free_completed")]
            allocator.give(address)
    live = {address: number for number, address in where.items()}
    segments = []
    for address, size in allocator.sizes.items():
        held = live.get(address)
        nbytes = 0 if held is None else int(timeline.nbytes[held])
        segments.append(
            _segment(index, address, size, nbytes, None if held is None else stacks[timeline.label_of[held]])
        )
    return segments, trace


def _event(action: str, address: int, nbytes: int, frames: list[Any], time_us: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": nbytes,
        "stream": 0,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": frames,
    }


def _segment(device: int, address: int, size: int, nbytes: int, frames: list[Any] | None) -> dict[str, Any]:
    """Return a segment of one block; without frames it is free."""
    used = 0 if frames is None else size
    block = {
        "address": address,
        "size": size,
        "requested_size": nbytes,
        "state": "inactive" if frames is None else "active_allocated",
        "frames": frames or [],
    }
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": nbytes,
        "stream": 0,
        "segment_type": "small" if size <= SMALL_BYTES else "large",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
