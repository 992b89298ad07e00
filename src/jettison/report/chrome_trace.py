"""A described step as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

The format is that of the "Trace Event Format" document: X is a slice, C a counter, M a name, s and f the ends of an
arrow. A pipeline stage is a process; its tracks are the device's work, and copies to and from the host. Times are
microseconds with three decimals, whole nanoseconds. A counter holds from its time on: within a slice it is the
highest of the slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jettison.memory.schedule import ScheduledPass, Work
from jettison.memory.timeline import MemoryTimeline
from jettison.predict.clock import PassSlices, SliceKind, host_copies, nanoseconds, step_slices
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.step_timeline import STEPS, stage_memory
from jettison.predict.time import Estimate
from jettison.predict.units import sent_to_host

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
    """Play a described run's first two steps.

    Args:
        by_tensor: what is saved for backward one tensor at a time.

    Raises:
        UsageError: so many micro-batches that nobody could look at them.
    """
    passes, step_ns = step_slices(memory, found), nanoseconds(found.step_seconds)
    played = tuple(
        stage_memory(memory, stage.index, passes[stage.index], step_ns=step_ns, by_tensor=by_tensor)
        for stage in memory.stages
    )
    return StepTrace(title=title, forecast=memory, estimate=found, step_ns=step_ns, passes=passes, memory=played)


def chrome_json(trace: StepTrace) -> str:
    """The file's text, an event a line."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in chrome_events(trace))
    about = json.dumps(_about(trace))
    return f'{{"displayTimeUnit":"ns","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'


def _about(trace: StepTrace) -> dict[str, Any]:
    return {
        "schema": "jettison.timeline/1",
        "title": trace.title,
        "step_seconds": trace.estimate.step_seconds,
        "peak_bytes": trace.forecast.peak_bytes,
        "first_step_peak_bytes": trace.forecast.first_step_peak_bytes,
        "replayed_peak_bytes": [timeline.peak_bytes for timeline in trace.memory],
        "stage_peak_bytes": [stage.peak.nbytes for stage in trace.forecast.stages],
    }


def chrome_events(trace: StepTrace) -> Iterator[dict[str, Any]]:
    """All events."""
    for stage in trace.forecast.stages:
        yield from _names(stage)
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


def _names(stage: Stage) -> Iterator[dict[str, Any]]:
    names = [name for chunk in stage.groups for group in chunk for name in group.names]
    of = f" ({names[0]} to {names[-1]})" if names else ""
    yield {"ph": "M", "pid": stage.index, "name": "process_name", "args": {"name": f"stage {stage.index}{of}"}}
    yield {"ph": "M", "pid": stage.index, "name": "process_sort_index", "args": {"sort_index": stage.index}}
    for tid, text in _TRACKS.items():
        yield {"ph": "M", "pid": stage.index, "tid": tid, "name": "thread_name", "args": {"name": text}}


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _slice(pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": _us(begin), "dur": _us(end - begin)}
    return event | {"args": args} if args else event


def _pass(pid: int, played: PassSlices, offset: int) -> Iterator[dict[str, Any]]:
    """A slice around a pass, and those within."""
    step = played.step
    args = {} if step is None else {"micro-batch": step.micro_batch, "chunk": step.chunk}
    if step is not None:
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
    """The same file of timelines that nobody timed: a process for each, a slice for each phase, counters."""
    about = {
        "schema": "jettison.timeline/1",
        "title": title,
        "clock": "allocations and frees in their order, one a microsecond",
        "peak_bytes": [timeline.peak_bytes for timeline in timelines],
    }
    events = [event for pid, timeline in enumerate(timelines) for event in _untimed(timeline, pid)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def _untimed(timeline: MemoryTimeline, pid: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": timeline.title}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield {"ph": "M", "pid": pid, "tid": DEVICE, "name": "thread_name", "args": {"name": "phases"}}
    last = len(timeline.time_ns)
    ends = [*(mark.event for mark in timeline.marks[1:]), last]
    for mark, end in zip(timeline.marks, ends, strict=True):
        if end > mark.event:
            begin_ns, end_ns = int(timeline.time_ns[mark.event]), int(timeline.time_ns[end - 1]) + 1000
            yield _slice(pid, DEVICE, mark.text, "phase", begin_ns, end_ns, {})
    yield from counters(timeline, pid)


def counters(timeline: MemoryTimeline, pid: int) -> Iterator[dict[str, Any]]:
    """Bytes allocated, and by role: at each time the highest, then what is left of it where that is less."""
    totals: defaultdict[str, int] = defaultdict(int)
    roles = [label.role for label in timeline.labels]
    for number in range(len(timeline.nbytes)):
        if timeline.born[number] < 0:
            totals[roles[timeline.label_of[number]]] += int(timeline.nbytes[number])
    groups = list(dict.fromkeys(roles))
    now = sum(totals.values())
    yield from _counts(pid, 0, now, totals, groups)
    last, highest, top = now, now, dict(totals)
    rows = zip(timeline.allocation.tolist(), timeline.is_birth.tolist(), timeline.time_ns.tolist(), strict=True)
    time_ns = 0
    for number, is_birth, at in rows:
        if at != time_ns:
            yield from _moment(pid, time_ns, (last, highest, now), top, totals, groups)
            time_ns, last, highest, top = at, now, now, dict(totals)
        nbytes = int(timeline.nbytes[number])
        change = nbytes if is_birth else -nbytes
        totals[roles[timeline.label_of[number]]] += change
        now += change
        if now > highest:
            highest, top = now, dict(totals)
    yield from _moment(pid, time_ns, (last, highest, now), top, totals, groups)


def _moment(
    pid: int, time_ns: int, levels: tuple[int, int, int], top: dict[str, int], totals: dict[str, int], groups: list[str]
) -> Iterator[dict[str, Any]]:
    """Args: levels: before this time, the highest at it, and after it."""
    before, highest, after = levels
    if highest > max(before, after):
        yield from _counts(pid, time_ns, highest, top, groups)
    yield from _counts(pid, time_ns, after, totals, groups)


def _counts(pid: int, time_ns: int, total: int, by_role: dict[str, int], groups: list[str]) -> Iterator[dict[str, Any]]:
    common = {"ph": "C", "pid": pid, "ts": _us(time_ns)}
    yield common | {"name": ALLOCATED, "args": {"bytes": total}}
    yield common | {"name": ROLES, "args": {name: by_role.get(name, 0) for name in groups}}
