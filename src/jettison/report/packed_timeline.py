"""A timeline as data of a page: small numbers in as few bytes as they need, in base64.

NOTE [ Packed timelines ]
Births come in the order of the allocations' numbers, so an event is one number: 0 is the next birth, n above it the
death of the n-th allocation back. Times are differences. Sizes and labels are places in lists, of which the frequent
come first. A number is written seven bits a byte, the lowest first; the eighth bit says that more follow.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jettison.traces.timeline import Ints, MemoryTimeline


def packed_timeline(timeline: MemoryTimeline) -> dict[str, Any]:
    """What `panels/memory_timeline.js` reads. See NOTE [ Packed timelines ]."""
    timeline = _in_order(timeline)
    births = np.cumsum(timeline.is_birth)
    before = int((timeline.born < 0).sum())
    back = np.where(timeline.is_birth, 0, before + births - timeline.allocation)
    times = np.maximum.accumulate(timeline.time_ns) if len(timeline.time_ns) else timeline.time_ns
    sizes, size_of = _by_frequency(timeline.nbytes)
    labels, label_of = _by_frequency(timeline.label_of)
    start = int(times[0]) if len(times) else 0
    return {
        "title": timeline.title,
        "events": len(timeline.allocation),
        "allocations": len(timeline.nbytes),
        "before": before,
        "start_ns": start,
        "peak_event": timeline.peak_event,
        "peak_bytes": timeline.peak_bytes,
        "sizes": sizes.tolist(),
        "labels": [[label.module, label.role, label.site] for label in (timeline.labels[n] for n in labels.tolist())],
        "marks": [[mark.event, mark.text] for mark in timeline.marks],
        "order": _text(back),
        "time": _text(np.diff(times, prepend=start)),
        "size_of": _text(size_of),
        "label_of": _text(label_of),
    }


def varints(values: Ints) -> bytes:
    """Numbers of 0 or more, seven bits a byte."""
    left = values.astype(np.uint64)
    lengths = np.ones(len(left), np.int64)
    for bits in range(7, 64, 7):
        lengths += left >= np.uint64(1 << bits)
    starts = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), np.uint8)
    for place in range(int(lengths.max(initial=0))):
        there = lengths > place
        byte = (left[there] >> np.uint64(7 * place)) & np.uint64(127)
        out[starts[there] + place] = byte | np.where(lengths[there] > place + 1, 128, 0).astype(np.uint64)
    return out.tobytes()


def _text(values: Ints) -> str:
    return base64.b64encode(varints(values)).decode()


def _by_frequency(values: Ints) -> tuple[Ints, Ints]:
    """Different values, the most frequent first, and the place of each in that list."""
    different, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return different[order], rank[places] if len(values) else places


def _in_order(timeline: MemoryTimeline) -> MemoryTimeline:
    """With allocations numbered as they are born."""
    order = np.argsort(timeline.born, kind="stable")
    if (order == np.arange(len(order))).all():
        return timeline
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return MemoryTimeline(
        title=timeline.title,
        nbytes=timeline.nbytes[order],
        label_of=timeline.label_of[order],
        labels=timeline.labels,
        allocation=rank[timeline.allocation],
        is_birth=timeline.is_birth,
        time_ns=timeline.time_ns,
        marks=timeline.marks,
    )
