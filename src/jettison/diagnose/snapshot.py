"""CUDA memory snapshots of `torch.cuda.memory._dump_snapshot`, read without torch.

The structure is that of torch 2.1 to 2.15: a dictionary with ``segments`` (of the caching allocator, with their blocks)
and ``device_traces`` (by device, events in order; the oldest may have been overwritten). Older files are a list of
segments, whose blocks have a ``history`` with the stack. ``context`` of `torch.cuda.memory._record_memory_history`
decides which events have a stack: none, allocations, or frees as well; ``stacks`` whether it has C++ frames. Bytes are
requested ones, as in events; `torch.cuda.memory_allocated` rounds each allocation up to 512. An allocation is freed at
``free_requested``, where that function stops counting it.

Steps end where the optimizer or `zero_grad` allocates, frees, or is annotated (``global_record_annotations``). Without
such a stack there are no steps: bytes alone do not tell a layer from a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from jettison.core.errors import UsageError
from jettison.core.units import format_bytes
from jettison.diagnose import memory_facts as facts
from jettison.diagnose.frames import (
    OPTIMIZER,
    ZERO_GRAD,
    Frame,
    ends_step,
    frames_of_original,
    label_of_frames,
    speaks_of_logits,
)
from jettison.diagnose.plain_pickle import load_plain
from jettison.memory.timeline import Ints, Label, MemoryTimeline, TimelineWriter

GRADIENTS: Final = "gradients"
BEFORE: Final = "before the recording"
LEAST_TO_GROW: Final = 6
"""Steps after the first ones that a report of a growing line needs: in fewer, batch sizes may rise by chance."""
MOST_LOOKED: Final = 30
"""Ends of steps."""
LEAST_GROWTH: Final = 0.001
"""Share of the peak."""
RECORD: Final = 'torch.cuda.memory._record_memory_history(stacks="python")'
MOST_FRAMES: Final = 1024
MOST_EVENTS: Final = 20_000_000
"""Events and blocks of a snapshot, together."""
_BORN = ("alloc",)
_DIED = ("free_requested", "free", "free_completed")
_GROWN = ("segment_alloc", "segment_map")
_SHRUNK = ("segment_free", "segment_unmap")
_ALLOCATED = "active_allocated"
_PENDING = ("active_pending_free", "active_awaiting_free")
"""Freed, and still in use by a stream: torch's sources write the first, its documentation the second."""
FREE_BLOCK: Final = -1
PENDING_BLOCK: Final = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentBlock:
    """A piece of a segment. ``allocation``: its number in the timeline, or `FREE_BLOCK`, or `PENDING_BLOCK`."""

    address: int
    nbytes: int
    allocation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A segment: memory that the caching allocator got from the driver.

    ``is_private``: it belongs to a private pool (CUDA graphs, `torch.cuda.MemPool`).
    """

    address: int
    total_bytes: int
    stream: int
    blocks: tuple[SegmentBlock, ...]
    is_expandable: bool = False
    is_private: bool = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated blocks, as rounded by the allocator."""
        return sum(block.nbytes for block in self.blocks if block.allocation >= 0)

    @property
    def free_pieces_bytes(self) -> tuple[int, ...]:
        """Bytes of each block that a request could get."""
        return tuple(block.nbytes for block in self.blocks if block.allocation == FREE_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A failed request, before event ``event``. ``free_bytes``: of the device, from the driver."""

    event: int
    requested_bytes: int
    free_bytes: int
    label: Label


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedChange:
    """Segments grow (or shrink, with ``nbytes`` below 0) before event ``event``.

    ``is_mapped``: a part of an expandable segment, which is mapped and unmapped piece by piece. An event has a
    segment's stream, and not its pool.
    """

    event: int
    address: int
    nbytes: int
    is_mapped: bool
    stream: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceSnapshot:
    """One device.

    Args:
        addresses: of the timeline's allocations.
        stacks: different stacks, the innermost frame first; ``stack_of``: the stack of each allocation.
        complete: nothing was freed whose allocation is not in the trace.
        step_ends: numbers of events after which a training step has ended, in order; see `_StepEnds`.
        has_stacks: allocations have stacks; with ``context="state"`` only what is there at the end has one.
    """

    index: int
    timeline: MemoryTimeline
    segments: tuple[Segment, ...]
    complete: bool
    addresses: Ints
    stack_of: Ints
    stacks: tuple[tuple[Frame, ...], ...]
    reserved_changes: tuple[ReservedChange, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    step_ends: tuple[int, ...] = ()
    has_stacks: bool = True

    @cached_property
    def with_gradients(self) -> MemoryTimeline:
        """The timeline, with two more roles.

        Gradients: what backward, whose thread has no Python stack, allocates in a step and is still there when the
        step's optimizer first allocates. `BEFORE`: what has no stack and was there already, most often parameters.
        """
        timeline = self.timeline
        roles = np.array([label.role for label in timeline.labels] or [""])[timeline.label_of]
        optimizer = timeline.born[roles == OPTIMIZER]
        made = np.zeros(len(roles), bool)
        for begin, end in pairwise((0, *self.step_ends)):
            first = optimizer[(optimizer >= begin) & (optimizer < end)]
            if len(first):
                made |= (timeline.born >= begin) & (timeline.born < first.min()) & (timeline.died > first.min())
        made &= np.isin(roles, ("backward", "unknown"))
        own = {old: Label(module=one.module, role=GRADIENTS, site=one.site) for old, one in enumerate(timeline.labels)}
        labels, label_of = [*timeline.labels], timeline.label_of.copy()
        for old in np.unique(label_of[made]).tolist():
            label_of[made & (timeline.label_of == old)] = len(labels)
            labels.append(own[old])
        unlabelled = [place for place, label in enumerate(timeline.labels) if label == _NO_STACK.label]
        early = (timeline.born < 0) & np.isin(timeline.label_of, unlabelled)
        if early.any():
            label_of[early] = len(labels)
            labels.append(Label(module="", role=BEFORE))
        return replace(timeline, labels=tuple(labels), label_of=label_of)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments at the end."""
        return sum(segment.total_bytes for segment in self.segments)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on limits of the recording."""
        notes = []
        if not self.complete:
            notes.append("the oldest events are missing: what was allocated before them has no stack")
        if not len(self.timeline.allocation):
            notes.append("there are no events: it shows the moment at which it was written, and no peak")
        elif not self.has_stacks:
            notes.append(f"events have no stacks, so that no line is named for them: record with {RECORD}")
        return tuple(notes)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Content of one file."""

    name: str
    devices: tuple[DeviceSnapshot, ...]
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def busiest(self) -> DeviceSnapshot:
        """Device with the highest peak; the first of equals."""
        return max(self.devices, key=lambda device: device.timeline.peak_bytes)

    @property
    def telling(self) -> DeviceSnapshot:
        """Device with a failed request, otherwise the fullest."""
        return next((device for device in self.devices if device.out_of_memory), self.busiest)


def is_snapshot(path: Path) -> bool:
    """Whether a file begins as a pickle of protocol 2 to 5 does."""
    try:
        with path.open("rb") as file:
            begin = file.read(2)
    except OSError:
        return False
    return len(begin) == 2 and begin[0] == 0x80 and begin[1] <= 5


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Raise `UsageError` if it is none, or a pickle with more than plain data."""
    return snapshot_of(load_plain(path), path.name)


def snapshot_of(content: object, name: str) -> Snapshot:
    """Read the content of a snapshot's file. Raise `UsageError` if it has another structure."""
    if isinstance(content, list):
        content = {"segments": content, "device_traces": []}
    reader = _SnapshotReader(name)
    found = reader.dictionary(content, "the file")
    segments = [reader.dictionary(s, "a segment") for s in reader.listed(found.get("segments"), "segments")]
    traces = [reader.listed(t, "device_traces") for t in reader.listed(found.get("device_traces", []), "device_traces")]
    reader.count(sum(map(len, traces)))
    own: dict[int, list[Mapping[str, Any]]] = {}
    for segment in segments:
        own.setdefault(reader.whole(segment, "device", 0), []).append(segment)
        reader.count(len(reader.listed(segment.get("blocks"), "blocks")))
    used = {index for index, trace in enumerate(traces) if trace} | set(own)
    notes = reader.listed(found.get("external_annotations", []), "external_annotations")
    reader.count(len(notes))
    reader.annotations = [reader.dictionary(entry, "an annotation") for entry in notes]
    devices = tuple(
        reader.device(index, traces[index] if index < len(traces) else [], own.get(index, []))
        for index in sorted(used or {0})
    )
    settings = reader.dictionary(found.get("allocator_settings", {}), "allocator_settings")
    plain = {str(k)[:100]: v for k, v in settings.items() if isinstance(v, str | int | float | bool)}
    return Snapshot(name=name, devices=devices, settings=plain)


class _SnapshotReader:
    """Reader of plain values, with errors that name the invalid one."""

    def __init__(self, name: str) -> None:
        self.name, self.counted = name, 0
        self.annotations: list[Mapping[str, Any]] = []

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.name} is no CUDA memory snapshot: {what}; expected what _dump_snapshot writes")

    def dictionary(self, value: object, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(f"{what} is {_kind(value)}, not a dictionary")
        return value

    def listed(self, value: object, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(f"{what} is {_kind(value)}, not a list")
        return value

    def whole(self, entry: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = entry.get(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(f"{key!r} of an entry is {_kind(value)}, not a number of 0 or more")
        return value

    def count(self, more: int) -> None:
        self.counted += more
        if self.counted > MOST_EVENTS:
            raise self.wrong(f"it has more than {MOST_EVENTS:,} events and blocks")

    def device(self, index: int, trace: list[Any], segments: list[Mapping[str, Any]]) -> DeviceSnapshot:
        events = [self.dictionary(entry, "an event") for entry in trace]
        return _device(self, index, events, segments)

    def stack(self, entry: Mapping[str, Any], known: dict[object, _LabelledStack]) -> _LabelledStack:
        """Return the stack of an event or a block; in older files, of the newest entry of a block's history."""
        frames = entry.get("frames")
        if frames is None and entry.get("history"):
            frames = self.dictionary(self.listed(entry["history"], "history")[0], "a history").get("frames")
        if frames is None:
            return _NO_STACK
        if id(frames) not in known:  # the frames live as long as the file's content does
            pairs: list[Frame] = []
            for frame in self.listed(frames, "frames")[:MOST_FRAMES]:
                place = self.dictionary(frame, "a frame")
                if "fx_original_trace" in place:
                    pairs += frames_of_original(str(place["fx_original_trace"])[:4000])
                pairs.append((str(place.get("name", ""))[:400], str(place.get("filename", ""))[:400], _line(place)))
            key = tuple(pairs)
            if key not in known:
                known[key] = _LabelledStack.of(key) if key else _NO_STACK
            known[id(frames)] = known[key]
        return known[id(frames)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LabelledStack:
    """A stack, its label, and whether it ends a step (`ends_step`)."""

    frames: tuple[Frame, ...]
    label: Label
    ends: str

    @classmethod
    def of(cls, frames: tuple[Frame, ...]) -> _LabelledStack:
        return cls(frames=frames, label=label_of_frames(frames), ends=ends_step(frames))


_NO_STACK: Final = _LabelledStack.of(())


def _line(frame: Mapping[str, Any]) -> int:
    line = frame.get("line", 0)
    return line if type(line) is int and line >> 31 == 0 else 0  # torch writes -1 as an unsigned number


def _kind(value: object) -> str:
    return "missing" if value is None else repr(value)[:40] if isinstance(value, int | str) else type(value).__name__


def _blocks(reader: _SnapshotReader, segment: Mapping[str, Any]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Address, bytes and entry of each block of a segment."""
    at = reader.whole(segment, "address", 0)
    for entry in segment["blocks"]:
        block = reader.dictionary(entry, "a block")
        size = reader.whole(block, "size")
        yield reader.whole(block, "address", at), size, block
        at += size


def _requested(reader: _SnapshotReader, block: Mapping[str, Any], size: int) -> int:
    """Requested bytes, which older files have in the block's history."""
    history = block.get("history")
    if isinstance(history, list) and history and "requested_size" not in block:
        return reader.whole(reader.dictionary(history[0], "a history"), "real_size", size) or size
    return reader.whole(block, "requested_size", size) or size


class _StepEnds:
    """Finder of the ends of steps, from marks of stacks and annotations.

    Marks belong to one end unless the next step has begun between them: with a forward or, without stacks of one, any
    other allocation. So an optimizer that steps parameter by parameter within backward ends one step. The more frequent
    of `Optimizer.step` and `zero_grad` counts: a fused optimizer allocates only once.
    """

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[int, int, int]]] = {OPTIMIZER: [], ZERO_GRAD: []}
        self._forwards = self._others = 0

    def allocated(self, stack: _LabelledStack) -> None:
        """Count events that separate two ends."""
        if not stack.ends:
            self._forwards += stack.label.role == "forward"
            self._others += 1

    def mark(self, ends: str, events: int) -> None:
        """Add a mark of one kind, after this number of events."""
        if ends:
            self._marks[ends].append((events, self._forwards, self._others))

    def found(self) -> tuple[int, ...]:
        """Numbers of events after which steps end."""
        return max((self._ends(marks) for marks in self._marks.values()), key=len)

    def _ends(self, marks: list[tuple[int, int, int]]) -> tuple[int, ...]:
        by = 1 if self._forwards else 2
        last = {}
        for mark in marks:
            last[mark[by]] = mark[0]
        return tuple(sorted(set(last.values())))


def _annotated(reader: _SnapshotReader, index: int) -> list[tuple[int, str]]:
    """Microseconds and kind of annotations that end a step; torch's optimizers record themselves by these names."""
    found = []
    for entry in reader.annotations:
        name = str(entry.get("name", ""))
        kind = OPTIMIZER if name.startswith("Optimizer.step#") else ZERO_GRAD if ".zero_grad#" in name else ""
        if kind and entry.get("device", index) == index:
            found.append((reader.whole(entry, "time_us", 0), kind))
    return sorted(found)


class _DeviceReplay:
    """Allocations of one device, replayed from its events."""

    def __init__(self, reader: _SnapshotReader, index: int) -> None:
        self.reader, self.writer, self.ends = reader, TimelineWriter(f"device {index}"), _StepEnds()
        self.known: dict[object, _LabelledStack] = {}
        self.live: dict[int, int] = {}  # numbers of allocations, by address
        self.addresses: list[int] = []
        self.stacks: list[_LabelledStack] = []
        self.first = 0  # number of the first allocation with an event
        self.reserved: list[ReservedChange] = []
        self.failed: list[OutOfMemory] = []

    def begin(self, address: int, stack: _LabelledStack, number: int) -> None:
        self.live[address] = number
        self.addresses.append(address)
        self.stacks.append(stack)

    def event(self, event: Mapping[str, Any], time_ns: int) -> None:
        reader, writer, action = self.reader, self.writer, event.get("action")
        if action in _BORN:
            address, stack = reader.whole(event, "addr"), reader.stack(event, self.known)
            if address in self.live:  # its end was not recorded
                writer.free(self.live.pop(address), time_ns)
            self.begin(address, stack, writer.allocate(reader.whole(event, "size"), stack.label, time_ns))
            self.ends.allocated(stack)
            self.ends.mark(stack.ends, writer.events)
        elif action in _DIED:
            freed = self.live.pop(reader.whole(event, "addr"), None)
            if freed is not None:
                writer.free(freed, time_ns)
                stack = reader.stack(event, self.known)
                if freed < self.first or stack is not self.stacks[freed]:  # else it is the allocation's own
                    self.ends.mark(stack.ends, writer.events)
        elif action in _GROWN or action in _SHRUNK:
            change = ReservedChange(
                event=writer.events,
                address=reader.whole(event, "addr"),
                nbytes=reader.whole(event, "size") * (1 if action in _GROWN else -1),
                is_mapped=action in ("segment_map", "segment_unmap"),
                stream=reader.whole(event, "stream", 0),
            )
            self.reserved.append(change)
        elif action == "oom":
            asked, free = reader.whole(event, "size"), reader.whole(event, "device_free", 0)
            writer.mark(f"out of memory: {format_bytes(asked)} asked for, {format_bytes(free)} free")
            label = reader.stack(event, self.known).label
            self.failed.append(OutOfMemory(event=writer.events, requested_bytes=asked, free_bytes=free, label=label))
        elif action == "user_defined":
            writer.mark(str(event.get("user_metadata", "") or "mark")[:200])


def _device(
    reader: _SnapshotReader, index: int, events: list[Mapping[str, Any]], segments: list[Mapping[str, Any]]
) -> DeviceSnapshot:
    """Read one device; tensors without an allocation in the trace were allocated before it."""
    replay = _DeviceReplay(reader, index)
    writer, live, stacks = replay.writer, replay.live, replay.stacks
    early, notes = _unseen(reader, events), _annotated(reader, index)[::-1]
    blocks = (block for segment in segments for block in _blocks(reader, segment))
    allocated = [each for each in blocks if each[2].get("state") == _ALLOCATED]
    for address, size in early:
        replay.begin(address, _NO_STACK, writer.already(size, _NO_STACK.label))
    born = {reader.whole(e, "addr", 0) for e in events if e.get("action") in _BORN}
    for address, size, block in allocated:
        if address not in born and address not in live:
            stack = reader.stack(block, replay.known)
            replay.begin(address, stack, writer.already(_requested(reader, block, size), stack.label))
    replay.first, time_ns = len(stacks), 0
    for event in events:
        time_ns = reader.whole(event, "time_us", time_ns // 1000) * 1000
        while notes and notes[-1][0] * 1000 <= time_ns:
            replay.ends.mark(notes.pop()[1], writer.events)
        replay.event(event, time_ns)
    has_stacks = any(stack is not _NO_STACK for stack in stacks[replay.first :])
    for address, _, block in allocated:
        number = live.get(address, -1)
        if number >= 0 and (number < replay.first or stacks[number] is _NO_STACK):  # recorded with context="state"
            stacks[number] = reader.stack(block, replay.known)
            writer.relabel(number, stacks[number].label)
    different = {id(stack): stack for stack in stacks}
    places = {key: place for place, key in enumerate(different)}
    return DeviceSnapshot(
        index=index,
        has_stacks=has_stacks,
        timeline=writer.timeline(),
        segments=tuple(_segment(reader, segment, live) for segment in segments),
        complete=not early,
        addresses=np.array(replay.addresses, np.int64),
        stack_of=np.array([places[id(stack)] for stack in stacks], np.int64),
        stacks=tuple(stack.frames for stack in different.values()),
        reserved_changes=tuple(replay.reserved),
        out_of_memory=tuple(replay.failed),
        step_ends=replay.ends.found(),
    )


def _unseen(reader: _SnapshotReader, events: list[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Find frees whose allocation is not in the trace: address and bytes."""
    found: dict[int, int] = {}
    live: set[int] = set()
    dying: set[int] = set()
    for event in events:
        action = event.get("action")
        if action in _BORN:
            address = reader.whole(event, "addr")
            live.add(address)
            dying.discard(address)
        elif action in _DIED:
            address = reader.whole(event, "addr")
            if address not in live and address not in dying:
                found.setdefault(address, reader.whole(event, "size"))
            live.discard(address)
            (dying.discard if action == "free_completed" else dying.add)(address)
    return sorted(found.items())


def _segment(reader: _SnapshotReader, segment: Mapping[str, Any], live: Mapping[int, int]) -> Segment:
    blocks = []
    for address, size, entry in _blocks(reader, segment):
        state = entry.get("state")
        number = live.get(address, PENDING_BLOCK) if state == _ALLOCATED else FREE_BLOCK
        blocks.append(
            SegmentBlock(address=address, nbytes=size, allocation=PENDING_BLOCK if state in _PENDING else number)
        )
    return Segment(
        address=reader.whole(segment, "address", 0),
        total_bytes=reader.whole(segment, "total_size"),
        stream=reader.whole(segment, "stream", 0),
        blocks=tuple(blocks),
        is_expandable=segment.get("is_expandable") is True,
        is_private=segment.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0]),
    )


# facts ----------------------------------------------------------------------------------------------------------------


def facts_of_snapshot(snapshot: Snapshot) -> facts.MemoryFacts:
    """Facts of the device with a failed request, otherwise of the fullest."""
    device = snapshot.telling
    timeline = device.timeline
    failed = device.out_of_memory[0] if device.out_of_memory else None
    moment = timeline.peak_event if failed is None else failed.event - 1
    parts = _parts(timeline, moment)
    at = timeline.start_bytes if moment < 0 else int(timeline.live_bytes[moment])
    label = _where(timeline, moment) if failed is None else failed.label
    steps = [*step_bounds(device, len(timeline.allocation) if failed is None else moment + 1)]
    # a segment that is partly in use cannot be returned to the driver
    split = [one for one in device.segments if 0 < one.allocated_bytes < one.total_bytes and not one.is_private]
    pieces = [piece for segment in split for piece in segment.free_pieces_bytes]
    return facts.MemoryFacts(
        source=snapshot.name,
        failed=failed is not None,
        requested_bytes=None if failed is None else failed.requested_bytes,
        free_bytes=None if failed is None else failed.free_bytes,
        allocated_bytes=at,
        unused_bytes=(_unused(device, at) if failed else sum(pieces)) if device.segments else None,
        private_bytes=sum(sum(s.free_pieces_bytes) for s in device.segments if s.is_private),
        largest_piece_bytes=max(pieces, default=0) if device.segments else None,
        expandable=_expandable(snapshot, device),
        phase=facts.phase_named(label.role),
        site=label.module,
        logits=speaks_of_logits(label.module, label.site),
        parts=parts,
        steps=_steps(timeline, steps, at + failed.requested_bytes if failed else None),
        places_known=True,
        survivors=survivors(timeline, [low for low, _ in steps]),
        notes=device.notes,
    )


def _parts(timeline: MemoryTimeline, moment: int) -> tuple[facts.MemoryPart, ...]:
    """Bytes by module and role, the largest first; each with its largest site."""
    sites: dict[tuple[str, str], str] = {}
    for module, role, site in timeline.shares(moment, "module", "role", "site"):
        sites.setdefault((module, role), site)
    found = timeline.shares(moment, "module", "role").items()
    return tuple(facts.MemoryPart(module=m, role=r, nbytes=nbytes, site=sites[m, r]) for (m, r), (nbytes, _) in found)


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
    """Bytes reserved and unused at that moment. Segments are from the end: tensors freed since were in use then."""
    allocated = sum(segment.allocated_bytes for segment in device.segments)
    died_since = max(0, live_bytes - device.timeline.end_bytes)
    private = sum(sum(segment.free_pieces_bytes) for segment in device.segments if segment.is_private)
    return max(0, device.reserved_bytes - allocated - died_since - private)


def step_bounds(device: DeviceSnapshot, events: int) -> Iterator[tuple[int, int]]:
    """Yield each step's event with the fewest allocated bytes, and the later one with the most.

    Empty without ends of steps. Events after the last end are a step if they include a forward or backward.

    Args:
        events: number of events to read.
    """
    timeline = device.timeline
    ends = [end for end in device.step_ends if end < events]
    if not ends:
        return
    bounds = [0, *(end - 1 for end in ends if end)]  # bytes after the last event of a step are between steps
    own = timeline.allocation[ends[-1] : events][timeline.is_birth[ends[-1] : events]]
    labels = np.unique(timeline.label_of[own]).tolist()
    if any(timeline.labels[label].role in ("forward", "backward", "recompute") for label in labels):
        bounds.append(events)
    for begin, end in pairwise(bounds):
        if end > begin:
            low = begin + int(timeline.live_bytes[begin:end].argmin())
            yield low, low + int(timeline.live_bytes[low:end].argmax())


def _steps(
    timeline: MemoryTimeline, bounds: list[tuple[int, int]], last_peak: int | None
) -> tuple[facts.StepBytes, ...]:
    live = timeline.live_bytes
    found = [
        facts.StepBytes(step=step, between_bytes=int(live[low]), peak_bytes=int(live[high]))
        for step, (low, high) in enumerate(bounds)
    ]
    if last_peak is not None and found:
        found[-1] = replace(found[-1], peak_bytes=last_peak)
    return tuple(found)


def survivors(timeline: MemoryTimeline, ends: list[int]) -> tuple[facts.Survivor, ...]:
    """Find lines whose tensors outlive most steps after the first ones, the largest first.

    Args:
        ends: events at which steps end and the next begin.
    """
    possible = len(ends) - 1 - facts.FIRST_STEPS
    if possible < facts.FEWEST_STEPS:
        return ()
    alive = timeline.alive(ends[-1])
    step = np.searchsorted(np.array(ends), timeline.born[alive], side="right") - 1
    late = step >= facts.FIRST_STEPS
    alive, step = alive[late], step[late]
    found = []
    for label in np.unique(timeline.label_of[alive]).tolist():
        if timeline.labels[label].role == OPTIMIZER:
            continue  # optimizer state of a parameter whose first gradient is late
        own = timeline.label_of[alive] == label
        steps = len(np.unique(step[own]))
        nbytes = int(timeline.nbytes[alive[own]].sum())
        early = int(step[own].min()) < facts.FIRST_STEPS + possible / 3
        if early and steps >= max(3, facts.SHARE_OF_STEPS * possible) and nbytes >= LEAST_GROWTH * timeline.peak_bytes:
            named = timeline.labels[label]
            found.append(
                facts.Survivor(module=named.module, role=named.role, nbytes=nbytes, steps=steps, site=named.site)
            )
    return tuple(sorted(found, key=lambda one: -one.nbytes)) or _growing(timeline, ends)


def _growing(timeline: MemoryTimeline, ends: list[int]) -> tuple[facts.Survivor, ...]:
    """Find lines whose bytes grow, but seldom or not in new tensors: a list, a buffer replaced by a larger."""
    first, last = facts.FIRST_STEPS, len(ends) - 1
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
        if more >= LEAST_GROWTH * timeline.peak_bytes and facts.never_falls(levels):
            found.append(
                facts.Survivor(module=named.module, role=named.role, nbytes=more, steps=last - first, site=named.site)
            )
    return tuple(sorted(found, key=lambda one: -one.nbytes))
