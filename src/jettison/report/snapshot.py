"""Memory snapshots for people and programs: what is there at the peak, and how two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType

from jettison.core.documents import document, part
from jettison.core.units import format_bytes, format_percent
from jettison.diagnose.frames import Frame, is_python
from jettison.diagnose.snapshot import DeviceSnapshot, Snapshot
from jettison.memory.timeline import Ints, MemoryTimeline
from jettison.report.page import page
from jettison.report.tables import exact, facts, grid, signed

MOST_ROWS: Final = 25
_SCRIPTS: Final = ("timeline_data", "timeline_canvas", "timeline_svg", "memory_map", "memory_timeline")
PANELS: Final = tuple(f"panels/{name}.js" for name in _SCRIPTS)


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """One snapshot, or two held against each other: the busiest device of each."""

    snapshot: Snapshot
    other: Snapshot | None = None

    @property
    def difference(self) -> PeakDifference | None:
        """From the first to the second."""
        return None if self.other is None else compare_snapshots(self.snapshot, self.other)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        more: dict[str, Any] = {}
        if self.other is not None and self.difference is not None:
            more["other"] = {"name": self.other.name, "devices": [_device(device) for device in self.other.devices]}
            more["changes"] = [part("SnapshotChange", one, change=one.verdict) for one in self.difference.changes]
        devices = [_device(device) for device in self.snapshot.devices]
        return document("jettison.snapshot/1", name=self.snapshot.name, devices=devices, **more)

    def table(self) -> RenderableType:
        """For a terminal."""
        difference = self.difference
        if difference is not None and self.other is not None:
            return _difference_table(difference, self.snapshot.name, self.other.name)
        return snapshot_table(self.snapshot)

    def html(self) -> str:
        """One HTML file."""
        both = (self.snapshot,) if self.other is None else (self.snapshot, self.other)
        return timelines_page(
            " against ".join(one.name for one in both),
            [packed_device(d) | {"name": f"{one.name}, {d.timeline.title}"} for one in both for d in one.devices],
            self.difference,
            names=tuple(one.name for one in both),
        )


def compare_snapshots(before: Snapshot, after: Snapshot) -> PeakDifference:
    """Difference of the busiest devices' peaks, by module and role."""
    return compare_timelines(before.busiest.with_gradients, after.busiest.with_gradients)


def timelines_page(
    title: str,
    timelines: list[dict[str, Any]],
    difference: PeakDifference | None = None,
    *,
    names: tuple[str, ...] = (),
) -> str:
    """A page of packed timelines, each with a ``name``; where there are two sides, with how they differ."""
    changes = [] if difference is None else difference.changes
    data = {
        "timelines": timelines,
        "names": list(names),
        "changes": [[*astuple(change), change.verdict] for change in changes],
    }
    return page(f"Memory over time: {title}", intro=_INTRO, scripts=PANELS, data=data, styles=("panels/timeline.css",))


_INTRO = (
    "Bytes that are allocated after each event, stacked by role. Each column is the highest moment that it covers; the "
    "thin line is the lowest, the dashed one what is reserved. Click an allocation, or choose one with the arrow keys, "
    "for its size, its lifetime and its stack."
)


def snapshot_table(snapshot: Snapshot) -> RenderableType:
    """Facts of the busiest device, and what is there at its peak."""
    device = snapshot.busiest
    timeline = device.with_gradients
    among = f", the fullest of {len(snapshot.devices)}" if len(snapshot.devices) > 1 else ""
    rows = [
        ("snapshot", f"{snapshot.name}, device {device.index}{among}"),
        ("events", f"{len(timeline.allocation):,} of {len(timeline.nbytes):,} allocations"),
        ("peak", exact(timeline.peak_bytes)),
        ("at the end", f"{exact(timeline.end_bytes)} of {format_bytes(device.reserved_bytes)} in segments"),
    ]
    rows += [("note", note) for note in device.notes]
    failed = [mark.text.partition(": ") for mark in timeline.marks]
    rows += [(name, figures) for name, _, figures in failed if name == "out of memory"]

    of_role = [(role, *_sizes(nbytes, timeline.peak_bytes)) for role, nbytes in timeline.peak_roles.items()]
    return Group(
        facts(rows), grid("At the peak, by role", ("role",), ("bytes", "share"), of_role), peak_table(timeline)
    )


def peak_table(timeline: MemoryTimeline) -> RenderableType:
    """Allocations at the peak, by module and role."""
    found = list(timeline.shares(timeline.peak_event, "module", "role").items())
    rows = [
        (module or "no stack", role, *_sizes(nbytes, timeline.peak_bytes), f"{count:,}")
        for (module, role), (nbytes, count) in found[:MOST_ROWS]
    ]
    if rest := found[MOST_ROWS:]:
        nbytes, count = sum(n for _, (n, _) in rest), sum(c for _, (_, c) in rest)
        rows.append((f"{len(rest)} more", "", *_sizes(nbytes, timeline.peak_bytes), f"{count:,}"))
    return grid("At the peak, by module and role", ("module", "role"), ("bytes", "share", "allocations"), rows)


def _sizes(nbytes: int, peak_bytes: int) -> tuple[str, str]:
    return format_bytes(nbytes), format_percent(nbytes / max(1, peak_bytes))


def _device(device: DeviceSnapshot) -> dict[str, Any]:
    timeline = device.with_gradients
    return part(
        "SnapshotDevice",
        timeline,
        device,
        device=device.index,
        events=len(timeline.allocation),
        allocations=len(timeline.nbytes),
        segments=len(device.segments),
        peak=[
            {"module": module, "role": role, "bytes": nbytes, "count": count}
            for (module, role), (nbytes, count) in timeline.shares(timeline.peak_event, "module", "role").items()
        ],
    )


def _difference_table(difference: PeakDifference, before: str, after: str) -> RenderableType:
    change = difference.after_peak_bytes - difference.before_peak_bytes
    peaks = [
        (f"peak of {before}", exact(difference.before_peak_bytes)),
        (f"peak of {after}", f"{exact(difference.after_peak_bytes)}: {signed(change)}"),
    ]
    right = ("before", "after", "change")
    of_role = [
        (role, format_bytes(old), format_bytes(new), signed(new - old))
        for role, (old, new) in difference.by_role().items()
    ]
    differing = [c for c in difference.changes if c.verdict != "same"]
    rows = [
        (c.module, c.role, format_bytes(c.before_bytes), format_bytes(c.after_bytes), signed(c.change_bytes), c.verdict)
        for c in differing[:MOST_ROWS]
    ]
    if rest := differing[MOST_ROWS:]:
        rows.append((f"{len(rest)} more", "", "", "", signed(sum(c.change_bytes for c in rest)), ""))
    table = grid("At the peak of each, by module and role", ("module", "role"), right, rows, last=("",))
    if same := len(difference.changes) - len(differing):
        table.add_section()
        table.add_row(f"{same} the same")
    return Group(facts(peaks), grid("At the peak of each, by role", ("role",), right, of_role), table)


# A timeline as data of a page ----------------------------------------------------------------------------------------
#
# NOTE [ Packed timelines ]
# Births come in the order of the allocations' numbers, so an event is one number: 0 is the next birth, n above it the
# death of the n-th allocation back. Times are differences. Such lists are mostly the same few small numbers, and the
# page's compression makes them smaller than a coding of our own did.


def packed_timeline(timeline: MemoryTimeline) -> dict[str, Any]:
    """Data of `panels/memory_timeline.js`. See NOTE [ Packed timelines ]."""
    timeline, _ = _in_order(timeline)
    births = np.cumsum(timeline.is_birth)
    before = int((timeline.born < 0).sum())
    times = np.maximum.accumulate(timeline.time_ns) if len(timeline.time_ns) else timeline.time_ns
    start = int(times[0]) if len(times) else 0
    return {
        "title": timeline.title,
        "events": len(timeline.allocation),
        "allocations": len(timeline.nbytes),
        "before": before,
        "start_ns": start,
        "peak_event": timeline.peak_event,
        "peak_bytes": timeline.peak_bytes,
        "labels": [[label.module, label.role, label.site] for label in timeline.labels],
        "marks": [[mark.event, mark.text] for mark in timeline.marks],
        "order": np.where(timeline.is_birth, 0, before + births - timeline.allocation).tolist(),
        "time": np.diff(times, prepend=start).tolist(),
        "nbytes": timeline.nbytes.tolist(),
        "label_of": timeline.label_of.tolist(),
    }


def packed_device(device: DeviceSnapshot) -> dict[str, Any]:
    """Data of a recorded device: its timeline, and where allocations lie. See NOTE [ Packed timelines ]."""
    _, order = _in_order(device.timeline)
    last = len(device.timeline.allocation) - 1
    number = np.argsort(order)
    frames, nodes, ends = _stack_tree(device.stacks)
    memory = {
        "addresses": device.addresses[order].tolist(),
        "frames": [[*frame, int(is_python(frame))] for frame in frames],
        "nodes": nodes,
        "ends": ends,
        "stack_of": device.stack_of[order].tolist(),
        "segments": [
            [
                *(one.address, one.total_bytes, one.stream, int(one.is_private), int(one.is_expandable)),
                [[b.nbytes, int(number[b.allocation]) if b.allocation >= 0 else b.allocation] for b in one.blocks],
            ]
            for one in device.segments
        ],
        "changes": [
            [min(one.event, last), one.address, one.nbytes, int(one.is_mapped), one.stream]
            for one in device.reserved_changes
        ],
    }
    return packed_timeline(device.with_gradients) | {"memory": memory}


def _stack_tree(stacks: Sequence[tuple[Frame, ...]]) -> tuple[list[Frame], list[list[int]], list[int]]:
    """Frames, nodes of a tree as the node outside (-1: none) and a frame, and each stack's innermost node.

    Stacks of a step share most of their outer frames.
    """
    frames: dict[Frame, int] = {}
    nodes: dict[tuple[int, int], int] = {}
    ends = []
    for stack in stacks:
        node = -1
        for frame in reversed(stack):
            node = nodes.setdefault((node, frames.setdefault(frame, len(frames))), len(nodes))
        ends.append(node)
    return list(frames), [list(key) for key in nodes], ends


def _in_order(timeline: MemoryTimeline) -> tuple[MemoryTimeline, Ints]:
    """The timeline with allocations numbered as they are born, and the number before of each."""
    order = np.argsort(timeline.born, kind="stable")
    return replace(
        timeline,
        nbytes=timeline.nbytes[order],
        label_of=timeline.label_of[order],
        allocation=np.argsort(order)[timeline.allocation],
    ), order


# peaks of two timelines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakChange:
    """Bytes and allocations of one module and role at the peaks of both."""

    module: str
    role: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int

    @property
    def change_bytes(self) -> int:
        """Growth in bytes; below 0 for a decrease."""
        return self.after_bytes - self.before_bytes

    @property
    def verdict(self) -> str:
        """In one word."""
        if not self.before_count:
            return "appeared"
        if not self.after_count:
            return "vanished"
        if self.change_bytes:
            return "grew" if self.change_bytes > 0 else "shrank"
        return "same" if self.before_count == self.after_count else "cut otherwise"


@dataclass(frozen=True, kw_only=True)
class PeakDifference:
    """``changes``: the largest change first; all of them, those that are the same too."""

    before_peak_bytes: int
    after_peak_bytes: int
    changes: tuple[PeakChange, ...]

    def by_role(self) -> dict[str, tuple[int, int]]:
        """Bytes before and after of each role, the largest change first."""
        found: dict[str, tuple[int, int]] = {}
        for change in self.changes:
            before, after = found.get(change.role, (0, 0))
            found[change.role] = before + change.before_bytes, after + change.after_bytes
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), -item[1][1], item[0])))


def compare_timelines(before: MemoryTimeline, after: MemoryTimeline) -> PeakDifference:
    """Compare what is allocated at the peak of each."""
    old, new = (each.shares(each.peak_event, "module", "role") for each in (before, after))
    changes = []
    for module, role in {**old, **new}:
        (had, of), (has, now) = old.get((module, role), (0, 0)), new.get((module, role), (0, 0))
        one = PeakChange(module=module, role=role, before_bytes=had, after_bytes=has, before_count=of, after_count=now)
        changes.append(one)
    changes.sort(key=lambda change: (-abs(change.change_bytes), -change.after_bytes, change.module, change.role))
    return PeakDifference(
        before_peak_bytes=before.peak_bytes, after_peak_bytes=after.peak_bytes, changes=tuple(changes)
    )
