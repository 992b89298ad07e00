"""Traces that `torch.profiler` exports (Chrome's format, plain or gzipped), as spans of time.

Times are whole nanoseconds. Only what a step is made of is kept: operators, annotations, kernels and copies of the
device, calls of its runtime, and the allocator's counters.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from jettison.core.errors import UsageError
from jettison.core.process import uncollected
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes
from jettison.diagnose.finding import table

MOST_READ_BYTES: Final = 2 << 30
RECOMPUTES: Final = "jettison.recompute"
"""Annotation of a plan's recomputation, in traces that `jettison profile` makes."""
MODULE: Final = "nn.Module: "
"""Prefixes of modules' calls: torch's with ``with_stack=True``, and those of `jettison profile`."""
OPTIMIZER_STEP: Final = "Optimizer.step#"
LOADER: Final = "enumerate(DataLoader)"
ENGINE: Final = "autograd::engine::evaluate_function"
_STEP: Final = "ProfilerStep#"
_RUNTIME, _DEVICE = table("trace_names")["runtime"], table("trace_names")["device"]
UNMARKED: Final = "step"
_CALL: Final = "python_function"


class ProfilerSlice(NamedTuple):
    """An event from ``start_ns`` to ``end_ns``, on a thread of the host or a stream of the device."""

    name: str
    kind: str
    start_ns: int
    end_ns: int
    track: str
    args: Mapping[str, Any]

    @property
    def ns(self) -> int:
        """Duration."""
        return self.end_ns - self.start_ns


class MemoryPoint(NamedTuple):
    """The allocator's counters after an allocation or a free of ``delta_bytes``, by a thread of the host."""

    at_ns: int
    address: int | None
    track: str
    delta_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device: str


@dataclass(frozen=True, kw_only=True)
class ProfilerTrace:
    """Content of one file, sorted by start.

    Args:
        steps: by annotation, else by the optimizer's; otherwise the full trace.
        ops: of the host; ``modules``: calls of modules; ``device``: kernels, copies and fills.
    """

    name: str
    steps: tuple[tuple[int, ProfilerSlice], ...]
    ops: tuple[ProfilerSlice, ...]
    annotations: tuple[ProfilerSlice, ...]
    modules: tuple[ProfilerSlice, ...]
    runtime: tuple[ProfilerSlice, ...]
    device: tuple[ProfilerSlice, ...]
    memory: tuple[MemoryPoint, ...]
    devices: tuple[str, ...] = ()

    @cached_property
    def named_ops(self) -> dict[str, list[ProfilerSlice]]:
        """Operators of the host by name, so that a few of many are found in one pass."""
        found: defaultdict[str, list[ProfilerSlice]] = defaultdict(list)
        for one in self.ops:
            found[one.name].append(one)
        return found

    @cached_property
    def nodes(self) -> list[ProfilerSlice]:
        """Operators of autograd's engine, each around a node of backward."""
        return [one for name, ops in self.named_ops.items() if name.startswith(ENGINE) for one in ops]

    @cached_property
    def numbered(self) -> list[ProfilerSlice]:
        """Operators with a sequence number of autograd, outside of its nodes."""
        return [one for one in self.ops if is_numbered(one)]

    @cached_property
    def busiest_memory(self) -> list[MemoryPoint]:
        """Counters of the allocator in order, of the device with most; of the host without a device."""
        most: dict[str, int] = {}
        for point in self.memory:
            most[point.device] = max(most.get(point.device, 0), point.allocated_bytes)
        on_device = most.keys() - {"cpu"} or most.keys()
        best = max(on_device, key=most.__getitem__, default=None)
        return sorted((point for point in self.memory if point.device == best), key=lambda point: point.at_ns)


def is_numbered(op: ProfilerSlice) -> bool:
    """Whether it has a sequence number of autograd, outside of autograd's nodes."""
    return "Sequence number" in op.args and not op.args.get("Fwd thread id") and not op.name.startswith(ENGINE)


def is_trace(path: Path) -> bool:
    """Whether a file begins like gzip, or like JSON and has events, which a Trainer's ``all_results.json`` has not."""
    try:
        with path.open("rb") as file:
            begin = file.peek(64)
            events = begin.lstrip()[:1] in (b"{", b"[") and any(b'"traceEvents"' in x or b'"ph"' in x for x in file)
    except OSError:
        return False
    return events or begin[:2] == b"\x1f\x8b"


def read_profile(path: Path, progress: Progress = silent) -> ProfilerTrace:
    """Read a trace. Raise `UsageError` if it is none."""
    progress(f"reading {path}")
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            data = file.read(MOST_READ_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MOST_READ_BYTES:
        raise UsageError(f"{path} has more than {MOST_READ_BYTES} bytes; profile fewer steps")
    progress(f"{path}: parsing {format_bytes(len(data))}")
    with uncollected():  # among millions of small objects collections take most of the time
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no JSON ({str(error)[:80]}); expected a trace of torch.profiler") from error
        progress(f"{path}: reading events")
        found = profile_of(content, path.name)
        del content
        return found


def profile_of(content: object, name: str) -> ProfilerTrace:
    """Read the content of a trace's file. Raise `UsageError` if it has another structure."""
    events = content.get("traceEvents") if isinstance(content, Mapping) else content
    if not isinstance(events, list):
        raise UsageError(f"{name} has no list of traceEvents; expected a trace that torch.profiler exported")
    slices, memory = _read(events, name)
    ops = tuple(one for one in slices if one.kind == "cpu_op")
    device = tuple(one for one in slices if one.kind in _DEVICE)
    if not ops and not device:
        raise UsageError(f"{name} has neither operators nor kernels; expected a trace that torch.profiler exported")
    annotations = tuple(one for one in slices if one.kind == "user_annotation")
    found = content.get("deviceProperties", []) if isinstance(content, Mapping) else []
    return ProfilerTrace(
        name=name,
        steps=_steps(annotations, (*ops, *device)),
        ops=ops,
        annotations=annotations,
        modules=tuple(one for one in slices if one.name.startswith(MODULE)),
        runtime=tuple(one for one in slices if one.kind in _RUNTIME),
        device=device,
        memory=tuple(memory),
        devices=tuple(str(one.get("name", "")) for one in found if isinstance(one, Mapping)),
    )


def _read(events: list[Any], name: str) -> tuple[list[ProfilerSlice], list[MemoryPoint]]:
    """Slices and counters of the allocator, in one pass."""
    kinds = {kind: kind for kind in ("cpu_op", "user_annotation", *_RUNTIME, *_DEVICE)} | table("trace_names")["old"]
    slices, points = list[ProfilerSlice](), list[MemoryPoint]()
    for event in events:
        if type(event) is not dict:
            raise UsageError(
                f"{name}: an event is {type(event).__name__}, not an object; expected torch.profiler's trace"
            )
        if event.get("ph") != "X":
            if event.get("name") == "[memory]":
                points += _memory(event)
            continue
        category = event.get("cat")
        kind = kinds.get(category, "") if isinstance(category, str) else ""
        if not kind and not (category == _CALL and str(event.get("name")).startswith(MODULE)):
            continue
        start: Any = event.get("ts")
        length: Any = event.get("dur", 0)
        args = event.get("args", {})
        if not _is_number(start) or not _is_number(length) or length < 0 or type(args) is not dict:
            raise UsageError(
                f"{name}: an event {str(event.get('name'))[:40]!r} has no time; expected torch.profiler's trace"
            )
        begin = round(start * 1000)
        end = begin + round(length * 1000)
        slices.append(ProfilerSlice(str(event.get("name", "")), kind or _CALL, begin, end, _track(event), args))
    slices.sort(key=lambda one: (one.start_ns, -one.end_ns))
    return slices, points


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18


def _track(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"


def _steps(
    annotations: tuple[ProfilerSlice, ...], work: tuple[ProfilerSlice, ...]
) -> tuple[tuple[int, ProfilerSlice], ...]:
    marked = [(one.name.removeprefix(_STEP), one) for one in annotations if one.name.startswith(_STEP)]
    if marked:
        return tuple((int(text) if text.isdecimal() else 0, one) for text, one in marked)
    begin, end = min(one.start_ns for one in work), max(one.end_ns for one in work)
    ends = [one.end_ns for one in annotations if one.name.startswith(OPTIMIZER_STEP)]
    edges = [begin, *ends[:-1], end] if ends else [begin, end]
    return tuple(
        (at, ProfilerSlice(name=f"step {at}", kind=UNMARKED, start_ns=a, end_ns=b, track="", args={}))
        for at, (a, b) in enumerate(pairwise(edges))
    )


def _memory(event: Mapping[str, Any]) -> Iterator[MemoryPoint]:
    args: Any = event.get("args")
    at: Any = event.get("ts")
    if not isinstance(args, Mapping) or not _is_number(at):
        return
    figures: list[Any] = [args.get(key) for key in ("Bytes", "Total Allocated", "Total Reserved")]
    if all(type(figure) is int for figure in figures):
        device = "cpu" if args.get("Device Type") == 0 else f"device {args.get('Device Id')}"
        delta, allocated, reserved = figures
        yield MemoryPoint(round(at * 1000), args.get("Addr"), _track(event), delta, allocated, reserved, device)
