"""A step over time as files: a Chrome trace for ui.perfetto.dev and chrome://tracing, or a CUDA memory snapshot.

A Chrome trace is as the "Trace Event Format" document says: X is a slice, C a counter, M a name, s and f the ends of an
arrow. A pipeline stage is a process; its tracks are the device's work, and copies to and from the host. Times are
microseconds with three decimals, whole nanoseconds. A counter holds from its time on: its slice's highest.

A snapshot is as `_dump_snapshot` writes it: it opens at https://docs.pytorch.org/memory_viz and with
`torch.cuda._memory_viz`. Stacks have module and role. Addresses are of an allocator that does not split segments, since
fragmentation is unknown: each allocation has its own segment, rounded up to the allocator's granularity, and a freed
one is reused for the next of the same size.

NOTE [ A step replayed ]
`memory.step.actions` says what is there before each pass of all micro-batches, and how high each unit rises above that.
Here what units save and the gradients that they make are allocations of their own, and so is a unit's rise, which lasts
as long as its slice. Other buffers of a schedule or a framework are one allocation that changes. So the highest moment
is the ledger's, to the byte.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from jettison.core.errors import UsageError
from jettison.core.files import whole_file, write_whole
from jettison.diagnose.frames import frames_of_label
from jettison.memory.schedule import PASSES, ScheduledPass, Work
from jettison.memory.step import StageAction, actions
from jettison.memory.timeline import Label, MemoryTimeline, TimelineWriter
from jettison.predict.forecast import Forecast, Stage, replayed_load
from jettison.predict.stage_units import sent_to_host
from jettison.predict.stages import kept_by
from jettison.predict.time import Estimate
from jettison.report.estimate import EstimateReport
from jettison.report.step_slices import PassSlices, SliceKind, host_copies, nanoseconds, step_slices
from jettison.spec.precision import Gradients
from jettison.spec.run import Run

DEVICE, TO_HOST, FROM_HOST = 1, 2, 3
_TRACKS: Final = {DEVICE: "device", TO_HOST: "copies to the host", FROM_HOST: "copies from the host"}
_PASSES: Final = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHT: "weight half"}
ALLOCATED, ROLES = "allocated", "allocated by role"


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """A described run's first two steps.

    Args:
        passes: by stage, of one step.
        memory: by stage, over both.
    """

    title: str
    forecast: Forecast
    estimate: Estimate
    step_ns: int
    passes: tuple[tuple[PassSlices, ...], ...]
    memory: tuple[MemoryTimeline, ...]


def step_trace(title: str, memory: Forecast, found: Estimate, *, by_tensor: bool = False) -> StepTrace:
    """Play a described run's first two steps. Raise `UsageError` for more micro-batches than a viewer could show.

    Args:
        by_tensor: what is saved for backward one tensor at a time.
    """
    passes, step_ns = step_slices(memory, found), nanoseconds(found.step_seconds)
    played = tuple(
        stage_memory(memory, stage.index, passes[stage.index], step_ns=step_ns, by_tensor=by_tensor)
        for stage in memory.stages
    )
    return StepTrace(title=title, forecast=memory, estimate=found, step_ns=step_ns, passes=passes, memory=played)


def chrome_json(trace: StepTrace) -> str:
    """The file's text, an event a line."""
    about = {
        "schema": "jettison.timeline/1",
        "title": trace.title,
        "step_seconds": trace.estimate.step_seconds,
        "peak_bytes": trace.forecast.peak_bytes,
        "first_step_peak_bytes": trace.forecast.first_step_peak_bytes,
        "replayed_peak_bytes": [timeline.peak_bytes for timeline in trace.memory],
        "stage_peak_bytes": [stage.peak.nbytes for stage in trace.forecast.stages],
    }
    return _file_text(about, chrome_events(trace))


def _file_text(about: dict[str, Any], events: Iterable[dict[str, Any]]) -> str:
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def chrome_events(trace: StepTrace) -> Iterator[dict[str, Any]]:
    """All events."""
    for stage in trace.forecast.stages:
        names = [name for chunk in stage.groups for group in chunk for name in group.names]
        of = f" ({names[0]} to {names[-1]})" if names else ""
        yield from _names(stage.index, f"stage {stage.index}{of}", _TRACKS)
        own, sent = trace.passes[stage.index], [sent_to_host(trace.forecast.run, chunk) for chunk in stage.groups]
        for number in range(STEPS):
            offset = number * trace.step_ns
            yield _slice(stage.index, DEVICE, f"step {number}", "step", offset, offset + trace.step_ns, {})
            for played in own:
                yield from _pass(stage.index, played, offset)
            for copy in host_copies(stage, own, sent, trace.estimate.hardware):
                args = {"bytes": copy.nbytes, "micro-batch": copy.micro_batch}
                track, begin, end = TO_HOST if copy.to_host else FROM_HOST, copy.begin_ns, copy.end_ns
                yield _slice(stage.index, track, copy.name, "copy", offset + begin, offset + end, args)
        yield from counters(trace.memory[stage.index], stage.index)
    for number in range(STEPS):
        yield from _arrows(trace, number * trace.step_ns, number)


def _names(pid: int, title: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, text in tracks.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": text}}


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _slice(pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": _us(begin), "dur": _us(end - begin)}
    return event | {"args": args} if args else event


def _pass(pid: int, played: PassSlices, offset: int) -> Iterator[dict[str, Any]]:
    """A slice around a pass, and those within."""
    args = {}
    if (step := played.step) is not None:
        args = {"micro-batch": step.micro_batch, "chunk": step.chunk}
        name = f"{_PASSES[step.work]} {step.micro_batch}" + (f" chunk {step.chunk}" if step.chunk else "")
        yield _slice(pid, DEVICE, name, "pass", offset + played.begin_ns, offset + played.end_ns, args)
    for one in played.slices:
        name = f"{one.kind} {one.name}" if one.kind in _OF_REGIONS else one.name
        yield _slice(pid, DEVICE, name, str(one.kind), offset + one.begin_ns, offset + one.end_ns, args)


_OF_REGIONS = (SliceKind.FORWARD, SliceKind.RECOMPUTE, SliceKind.BACKWARD)


def _arrows(trace: StepTrace, offset: int, number: int) -> Iterator[dict[str, Any]]:
    """From each pass to the one on another stage that needs what it sends."""
    stages = len(trace.passes)
    if stages == 1:
        return
    layout = trace.forecast.run.layout
    of_place = {place: (stage, c) for stage in range(stages) for c, place in enumerate(layout.places(stage))}
    when: dict[tuple[int, ScheduledPass], PassSlices] = {
        (stage, played.step): played
        for stage, own in enumerate(trace.passes)
        for played in own
        if played.step is not None
    }
    for serial, ((stage, step), played) in enumerate(when.items()):
        place = layout.places(stage)[step.chunk]
        target = place + (1 if step.work is Work.FORWARD else -1)
        if step.work is Work.WEIGHT or target not in of_place:
            continue
        other, chunk = of_place[target]
        needed = when[other, ScheduledPass(step.work, step.micro_batch, chunk)]
        common = {"name": "sent", "cat": "sent", "id": number * len(when) + serial, "tid": DEVICE}
        yield common | {"ph": "s", "pid": stage, "ts": _us(offset + max(played.begin_ns, played.end_ns - 1))}
        yield common | {"ph": "f", "bp": "e", "pid": other, "ts": _us(offset + needed.begin_ns)}


def timelines_json(title: str, timelines: Sequence[MemoryTimeline]) -> str:
    """As `chrome_json`, for timelines without times: a process for each, a slice for each phase, counters."""
    about = {
        "schema": "jettison.timeline/1",
        "title": title,
        "clock": "allocations and frees in their order, one a microsecond",
        "peak_bytes": [timeline.peak_bytes for timeline in timelines],
    }
    return _file_text(about, (event for pid, timeline in enumerate(timelines) for event in _untimed(timeline, pid)))


def _untimed(timeline: MemoryTimeline, pid: int) -> Iterator[dict[str, Any]]:
    yield from _names(pid, timeline.title, {DEVICE: "phases"})
    ends = [*(mark.event for mark in timeline.marks[1:]), len(timeline.time_ns)]
    for mark, end in zip(timeline.marks, ends, strict=True):
        if end > mark.event:
            begin_ns, end_ns = int(timeline.time_ns[mark.event]), int(timeline.time_ns[end - 1]) + 1000
            yield _slice(pid, DEVICE, mark.text, "phase", begin_ns, end_ns, {})
    yield from counters(timeline, pid)


def counters(timeline: MemoryTimeline, pid: int) -> Iterator[dict[str, Any]]:
    """Bytes allocated, and by role: at each time the highest, then what is left of it where that is less."""
    roles = [label.role for label in timeline.labels]
    totals = dict.fromkeys(roles, 0)
    for number in range(len(timeline.nbytes)):
        if timeline.born[number] < 0:
            totals[roles[timeline.label_of[number]]] += int(timeline.nbytes[number])
    now = sum(totals.values())
    yield from _counts(pid, 0, now, totals)
    events: dict[int, list[tuple[int, bool]]] = {0: []}
    rows = zip(timeline.allocation.tolist(), timeline.is_birth.tolist(), timeline.time_ns.tolist(), strict=True)
    for number, is_birth, time_ns in rows:
        events.setdefault(time_ns, []).append((number, is_birth))
    for time_ns, changes in events.items():
        before = highest = now
        for number, is_birth in changes:
            change = int(timeline.nbytes[number]) * (1 if is_birth else -1)
            totals[roles[timeline.label_of[number]]] += change
            now += change
            if now > highest:
                highest, top = now, dict(totals)
        if highest > max(before, now):
            yield from _counts(pid, time_ns, highest, top)
        yield from _counts(pid, time_ns, now, totals)


def _counts(pid: int, time_ns: int, total: int, by_role: dict[str, int]) -> Iterator[dict[str, Any]]:
    common = {"ph": "C", "pid": pid, "ts": _us(time_ns)}
    yield common | {"name": ALLOCATED, "args": {"bytes": total}}
    yield common | {"name": ROLES, "args": dict(by_role)}


# allocations ----------------------------------------------------------------------------------------------------------


PARAMETERS, GRADIENTS, STATE, SENT, WORKING = "parameters", "gradients", "optimizer state", "stage output", "transient"
SAVED = "saved for backward"
STEPS = 2
"""The first, in which the optimizer makes its state, and one like all that follow."""


def stage_memory(
    memory: Forecast, index: int, passes: Sequence[PassSlices], *, step_ns: int, by_tensor: bool = False
) -> MemoryTimeline:
    """Return a stage's allocations over the first two steps. See NOTE [ A step replayed ].

    Args:
        passes: of the stage, as `clock.step_slices` has them.
        by_tensor: what is saved for backward one tensor at a time, under the ledger's words.
    """
    player = _StageReplay(memory.run, memory.stages[index], by_tensor)
    for number in range(STEPS):
        player.step(passes, number, number * step_ns, (number + 1) * step_ns)
    return player.writer.timeline()


def peak_by_role(memory: Forecast, found: Estimate, index: int) -> dict[str, int]:
    """Return the bytes of a stage's highest moment from the second step on, by role; the largest first.

    Empty where it has too many micro-batches to be played.
    """
    try:
        passes, step_ns = step_slices(memory, found), nanoseconds(found.step_seconds)
    except UsageError:
        return {}
    played = stage_memory(memory, index, passes[index], step_ns=step_ns)
    second = next(mark.event for mark in played.marks if mark.text == "step 1")
    at = second + int(played.live_bytes[second:].argmax())
    if played.live_bytes[at] != memory.stages[index].peak.nbytes:
        return {}
    return {role: nbytes for (role,), (nbytes, _) in played.shares(at, "role").items()}


class _StageReplay:
    def __init__(self, run: Run, stage: Stage, by_tensor: bool) -> None:
        self.run, self.stage, self.by_tensor = run, stage, by_tensor
        self.load = replayed_load(run, stage)
        self.writer = TimelineWriter(f"stage {stage.index}")
        self.live = 0
        self.sizes: dict[int, int] = {}
        self.saved: dict[tuple[int, int], dict[str, list[int]]] = {}  # by micro-batch and chunk, by unit
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.gradients: dict[int, list[int]] = {}  # by chunk
        self.schedules_own: list[int] = []  # what a schedule or a framework holds
        self.tensors: dict[tuple[int, str], tuple[tuple[Label, int], ...]] = {}
        parts = [part for chunk in stage.parts for part in chunk]
        self._spread(PARAMETERS, self.load.fixed, [(part.name, part.static.parameters) for part in parts])
        self._spread(STATE, self.load.master, [(part.name, part.static.master) for part in parts])
        self.upfront, self.added = (self.load.gradients is g for g in (Gradients.UPFRONT, Gradients.ACCUMULATOR))
        for unit, name in ((u, n) for chunk in self.load.own for u in chunk for n in u.names if self.upfront):
            self._allocate(unit.gradient, Label(module=name, role=GRADIENTS), None)

    # allocations ------------------------------------------------------------------------------------------------------

    def _allocate(self, nbytes: int, label: Label, time_ns: int | None) -> list[int]:
        """One allocation, if there are any bytes; without a time it was there before."""
        if nbytes <= 0:
            return []
        writer = self.writer
        number = writer.already(nbytes, label) if time_ns is None else writer.allocate(nbytes, label, time_ns)
        self.sizes[number] = nbytes
        self.live += nbytes
        return [number]

    def _free(self, numbers: list[int], time_ns: int) -> None:
        for number in numbers:
            self.writer.free(number, time_ns)
            self.live -= self.sizes.pop(number)
        numbers.clear()

    def _resize(self, numbers: list[int], nbytes: int, label: Label, time_ns: int) -> None:
        """Make what some allocations hold so many bytes."""
        if sum(map(self.sizes.__getitem__, numbers)) != nbytes:
            self._free(numbers, time_ns)
            numbers += self._allocate(nbytes, label, time_ns)

    def _settle(self, level: int, time_ns: int) -> None:
        """Let everything together be so many bytes."""
        there = sum(map(self.sizes.__getitem__, self.schedules_own))
        self._resize(
            self.schedules_own, there + level - self.live, Label(module="", role=SENT, site="schedule"), time_ns
        )

    def _transient(self, level: int, label: Label, begin_ns: int, end_ns: int) -> None:
        """Rise to a level for a while."""
        self._free(self._allocate(level - self.live, label, begin_ns), end_ns)

    def _spread(self, role: str, total: int, parts: Sequence[tuple[str, int]], time_ns: int | None = None) -> None:
        rest = total - sum(nbytes for _, nbytes in parts)
        for name, nbytes in [("", total)] if rest < 0 else [*parts, ("", rest)]:
            self._allocate(nbytes, Label(module=name, role=role), time_ns)

    # a step -----------------------------------------------------------------------------------------------------------

    def step(self, passes: Sequence[PassSlices], number: int, begin_ns: int, end_ns: int) -> None:
        """One optimizer step."""
        self.writer.mark(f"step {number}")
        load, stage = self.load, self.stage
        found = actions(load, first_step=number == 0)
        slices = iter([played for played in passes if played.step is not None])
        at = begin_ns
        for one, behind in zip(found.actions, [*[a.level for a in found.actions[1:]], found.behind], strict=True):
            if one.kind.work in PASSES:
                played = next(slices)
                at = begin_ns + played.end_ns
                self._pass(one, played, begin_ns)
            elif one.kind.work is Work.REDUCE:
                held = self.gradients.get(one.kind.chunk, [])
                left = sum(map(self.sizes.__getitem__, held)) - load.freed[one.kind.chunk]
                label = Label(module="", role=GRADIENTS, site="reduction")
                self._transient(one.level + load.reducing[one.kind.chunk], label, at, at)
                self._resize(held, max(0, left), label, at)
            self._settle(behind, at)
        self.writer.mark("optimizer")
        optimizer = next(s for s in reversed(passes[-1].slices) if s.kind is SliceKind.OPTIMIZER)
        begin, end = begin_ns + optimizer.begin_ns, begin_ns + optimizer.end_ns
        if number == 0:
            parts = [(part.name, part.static.state - part.static.master) for chunk in stage.parts for part in chunk]
            self._spread(STATE, load.state - load.master, parts, begin)
        self._settle(found.optimizer, begin)
        label = Label(module="", role=WORKING, site="optimizer")
        self._transient(found.optimizer + load.optimizer_transient, label, begin, end)
        for made in self.gradients.values():
            self._free(made, end_ns)
        self.gradients.clear()
        self._settle(found.after, end_ns)

    def _pass(self, one: StageAction, played: PassSlices, offset_ns: int) -> None:
        kind, load = one.kind, self.load
        key, own = (one.micro_batch, kind.chunk), kind.chunk % load.order.own
        ends, forward = kind.work is load.order.ending, kind.work is Work.FORWARD
        site = f"{_PASSES[kind.work]} of micro-batch {one.micro_batch}"
        begin_ns, end_ns = offset_ns + played.begin_ns, offset_ns + played.end_ns
        times = {name: (offset_ns + a, offset_ns + b) for name, (a, b) in played.times(one.units).items()}
        pieces = [(name, piece) for piece in one.pieces for name in piece.names]
        several, turn = Counter(name for name, _ in pieces), Counter[str]()
        self._settle(one.level, begin_ns)
        saved, made, passing, level = self.saved.setdefault(key, {}), list[int](), list[int](), one.level
        for name, piece in pieces:
            begin, end = times[name]
            if several[name] > 1:  # steps of a second half
                begin, end = begin + (end - begin) * turn[name] // several[name], end
                turn[name] += 1
            held, label = saved.setdefault(name, []), Label(module=name, role=SAVED, site=site)
            if forward:
                for tensor, nbytes in self._tensors(name, kind.chunk, piece.kept):
                    held += self._allocate(nbytes, Label(module=tensor.module, role=tensor.role, site=site), begin)
            gradients = Label(module=name, role=GRADIENTS, site=site)
            early = piece.peak >= piece.gradients
            made += self._allocate(piece.gradients, gradients, begin) if early else []
            self._transient(level + piece.peak, Label(module=name, role=WORKING, site=site), begin, end)
            if not forward:
                self._resize(held, sum(map(self.sizes.__getitem__, held)) + piece.kept, label, end)
            made += [] if early else self._allocate(piece.gradients, gradients, end)
            passing += self._allocate(piece.passing, label if forward else gradients, end)
            level += piece.net
            self._settle(level, end)
        self._free(passing, end_ns)
        if ends and kind.fresh and not (self.added or self.upfront):
            self.gradients[own] = made
        else:
            self._free(made, end_ns)
        if forward:
            self.outputs[key] = self._allocate(load.sent, Label(module="", role=SENT, site=site), end_ns)
        elif ends:
            for held in (*self.saved.pop(key).values(), self.outputs.pop(key)):
                self._free(held, end_ns)
        else:  # a first half: what the second one needs
            for name, unit in ((name, each) for each in one.units for name in each.names):
                self._resize(saved[name], unit.half, Label(module=name, role=SAVED, site=site), end_ns)

    def _tensors(self, name: str, chunk: int, nbytes: int) -> tuple[tuple[Label, int], ...]:
        key = chunk, name
        if key not in self.tensors:
            own, found = len(self.stage.groups), dict[str, tuple[Label, int]]()
            parts = (group.part for group in self.stage.groups[chunk % own] if name in group.names)
            for part in (part for part in parts if self.by_tensor):
                kept = kept_by(part.region, "none") if chunk >= own else part.kept
                for entry in part.region.entries(name, kept):
                    label = Label(module=".".join(filter(None, (entry.layer, entry.path))), role=entry.role)
                    nbytes_of = entry.local_storage_bytes(self.run.layout.mesh_sizes)
                    found.setdefault(entry.storage, (label, nbytes_of))
            whole = ((Label(module=name, role=SAVED), nbytes),)
            self.tensors[key] = tuple(found.values()) if sum(n for _, n in found.values()) == nbytes else whole
        return self.tensors[key]


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


def write_timelines(
    title: str, timelines: Sequence[MemoryTimeline], *, timeline: Path | None, snapshot: Path | None
) -> Iterator[str]:
    """Write steps of a live model, allocation by allocation, and say what was written; as for `write_step_files`.

    Args:
        timelines: a process of the trace, and a device of the snapshot, for each.
    """
    return _write(timeline, lambda: timelines_json(title, timelines), snapshot, lambda: timelines)


def write_step_files(report: EstimateReport, *, timeline: Path | None, snapshot: Path | None) -> Iterator[str]:
    """Write an estimated run's first two steps, and say what was written. Raise `UsageError` for more micro-batches
    than a viewer could show.

    Args:
        timeline: for a Chrome trace.
        snapshot: for a CUDA memory snapshot; device n is pipeline stage n.
    """
    played = partial(step_trace, report.model, report.memory, report.found)
    return _write(timeline, lambda: chrome_json(played()), snapshot, lambda: played(by_tensor=True).memory)


def _write(
    timeline: Path | None,
    trace: Callable[[], str],
    snapshot: Path | None,
    memory: Callable[[], Sequence[MemoryTimeline]],
) -> Iterator[str]:
    if timeline is not None:
        write_whole(timeline, trace())
        yield f"wrote {timeline}: open it at ui.perfetto.dev or chrome://tracing"
    if snapshot is not None:
        write_snapshot(snapshot, list(memory()))
        yield f"wrote {snapshot}: jettison report {snapshot} reads it, and pytorch's memory_viz"
