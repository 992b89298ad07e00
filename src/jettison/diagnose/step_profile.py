"""Profile of a trace's steps: phases, utilization and idle time of the device, bytes by phase, FLOPs.

NOTE [ Phases of a trace ]
Phases follow the host. Optimizers and data loaders annotate themselves. Backward is evaluated by autograd's engine.
Forward is an operator with autograd's sequence number, and no forward thread, outside of these; inside of backward it
is recomputation: a checkpoint runs its forward with gradients on. Jettison's recipes run without them, and
`jettison profile` annotates them. A kernel has the phase of its launch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from statistics import median
from typing import Any, Final

from jettison.diagnose.finding import table
from jettison.diagnose.profile_file import (
    ENGINE,
    LOADER,
    OPTIMIZER_STEP,
    RECOMPUTES,
    UNMARKED,
    ProfilerSlice,
    ProfilerTrace,
)

Span = tuple[int, int]
"""Beginning and end, in nanoseconds."""
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
PHASES: Final = (DATA, FORWARD, BACKWARD, OPTIMIZER)
SLOW_FIRST: Final = 1.5
"""Multiple of the other steps' median above which a step is warmup, and excluded from averages."""
_ALLOCATES, _WAITS, _COMPILED, _COPIES, _FORWARD = (
    tuple(table("trace_names")[kind]) for kind in ("allocates", "waits", "compiled", "copies", "attention")
)
_BACKWARD: Final = tuple(f"{name}_backward" for name in _FORWARD)
_COUNTED: Final = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", *_FORWARD, *_BACKWARD}
_LEAST_GAP_NS: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class DeviceIdle:
    """Idle time of the device, by the host's work."""

    data_ns: int = 0
    allocator_ns: int = 0
    sync_ns: int = 0
    host_ns: int = 0
    longest_ns: int = 0
    """Longest gap due to the host; it begins at ``longest_at_ns``."""
    longest_at_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies between CPU and device that use pageable memory, or that the CPU waits for."""

    count: int = 0
    alone_ns: int = 0
    """Copies without overlapping compute."""
    waited_ns: int = 0
    """Waits of the host, inside of operators that copy or read."""
    pageable: int = 0
    to_host: int = 0
    """Pageable copies from the device."""
    reads: int = 0
    """Reads of single numbers (``.item()``)."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Sums over the steady steps of a trace.

    Args:
        step_spans: of each step in the trace, by number.
        window: from the beginning of the first steady step to the end of the last.
        has_device: kernels were recorded; otherwise times are of the host's operators.
        settings: settings in use: ``compile``, ``fused`` (the optimizer), ``workers`` (of data loaders).
        optimizer: its class, where the trace names it.
        collectives: exposed time by name.
        flops: of all ops; ``again_flops``: of recomputation.
        peak_bytes: by phase; ``step_peaks``: of each step.
    """

    steps: int
    step_spans: Mapping[int, Span]
    window: Span
    has_device: bool
    settings: frozenset[str]
    optimizer: str
    phase_ns: Mapping[str, int]
    recompute_ns: int
    busy_ns: int
    communication_ns: int
    exposed_ns: int
    exposed_after_backward_ns: int
    collectives: Mapping[str, int]
    waiting: DeviceIdle
    data_ns: int
    copies: Copies
    kernels: int
    median_kernel_ns: int
    flops: int
    again_flops: int
    peak_bytes: Mapping[str, int]
    step_peaks: tuple[int, ...]
    state_bytes: int
    reserved_at_peak: tuple[int, int] | None

    @property
    def step_ns(self) -> dict[int, int]:
        """Duration of each step."""
        return {number: end - start for number, (start, end) in self.step_spans.items()}

    @property
    def ns(self) -> int:
        """Duration of all steady steps."""
        return max(1, self.window[1] - self.window[0])

    def seconds(self, ns: int) -> float:
        """Seconds of a step, by nanoseconds of all."""
        return ns / self.steps / 1e9


def profile_steps(trace: ProfilerTrace) -> StepProfile:
    """Profile the steps of a trace; see NOTE [ Phases of a trace ]."""
    steady = [one for _, one in trace.steps]
    if len(steady) >= 3 and steady[0].ns > SLOW_FIRST * median(one.ns for one in steady[1:]):
        del steady[0]
    start = steady[0].start_ns
    end = max(steady[-1].end_ns, max((one.end_ns for one in trace.device), default=0))
    phases = host_phases(trace)
    again = _recompute(trace, phases[BACKWARD])
    work = [one for one in trace.device if one.end_ns > start] or [*_outermost(trace)]
    names = {name for name in {one.name for one in work} if is_collective(name)}
    kinds = [one.kind in ("kernel", "cpu_op") and one.name not in names for one in work]
    compute = joined(_spans(compress(work, kinds)))
    gloo = [one for one in trace.annotations if one.name.startswith("gloo:")]
    talk = [*(one for one in work if names and one.name in names), *gloo]
    exposed = [*without(joined(_spans(talk)), compute)]
    others = _spans(one for one, computes in zip(work, kinds, strict=True) if not computes)
    busy = within(joined([*compute, *others, *_spans(talk)]), start, end)
    has_device = bool(trace.device)
    kernels = [one.ns for one in work if one.kind == "kernel" and one.start_ns >= start]
    ran_again = _launches(trace, joined(_spans(again))) if has_device else _spans(again)
    points = [(point.at_ns, point.allocated_bytes, point.reserved_bytes) for point in trace.busiest_memory]
    return StepProfile(
        steps=len(steady),
        step_spans={number: (one.start_ns, one.end_ns) for number, one in trace.steps},
        window=(start, end),
        has_device=has_device,
        settings=_settings(trace),
        optimizer=_optimizer(trace),
        phase_ns={name: total(within(spans, start, end)) for name, spans in phases.items()},
        recompute_ns=total(within(joined(ran_again), start, end)),
        busy_ns=total(busy),
        communication_ns=total(within(joined(_spans(talk)), start, end)),
        exposed_ns=total(within(exposed, start, end)),
        exposed_after_backward_ns=_after(exposed, compute, phases, start, end),
        collectives=_by_name(talk, exposed, start, end),
        waiting=_waiting(trace, busy, phases[DATA], start, end) if has_device else DeviceIdle(),
        data_ns=total(within(phases[DATA], start, end)),
        copies=_copies(trace, compute, start, end),
        kernels=len(kernels),
        median_kernel_ns=round(median(kernels)) if kernels else 0,
        flops=_flops((one for name in _COUNTED for one in trace.named_ops.get(name, ())), start, end),
        again_flops=_flops(again, start, end),
        peak_bytes=_peaks(points, phases),
        step_peaks=tuple(_peaks(points, {str(n): [(one.start_ns, one.end_ns)] for n, one in trace.steps}).values()),
        state_bytes=_state(trace, points),
        reserved_at_peak=max(((allocated, reserved) for _, allocated, reserved in points if reserved), default=None),
    )


def _settings(trace: ProfilerTrace) -> frozenset[str]:
    """Settings in use, found by names of events that only they have."""
    signs = {
        "compile": any(name.startswith("triton_") for name in {one.name for one in trace.device})
        or any(name in _COMPILED or name.startswith("Torch-Compiled Region") for name in trace.named_ops),
        "fused": any(name.startswith("aten::_fused_") for name in trace.named_ops),
        "workers": any("_MultiProcessingDataLoaderIter" in one.name for one in trace.annotations),
    }
    return frozenset(name for name, seen in signs.items() if seen)


def _optimizer(trace: ProfilerTrace) -> str:
    """``AdamW`` of ``Optimizer.step#AdamW.step``."""
    steps = (one.name for one in trace.annotations if one.name.startswith(OPTIMIZER_STEP))
    return next(steps, "").removeprefix(OPTIMIZER_STEP).partition(".")[0]


def _spans(slices: Iterable[ProfilerSlice]) -> list[Span]:
    return [(one.start_ns, one.end_ns) for one in slices]


# phases ---------------------------------------------------------------------------------------------------------------


def host_phases(trace: ProfilerTrace) -> dict[str, list[Span]]:
    """Spans of the host by phase. See NOTE [ Phases of a trace ]."""
    data = joined(_spans(one for one in trace.annotations if one.name.startswith(LOADER)))
    optimizer = joined(_spans(one for one in trace.annotations if one.name.startswith(OPTIMIZER_STEP)))
    engine = joined(_spans(trace.nodes))
    taken = joined([*data, *optimizer, *engine])
    forward = joined(_spans(one for one in trace.numbered if not _inside(one.start_ns, taken)))
    marks = sorted(
        (span, name)
        for name, spans in ((DATA, data), (FORWARD, forward), (BACKWARD, engine), (OPTIMIZER, optimizer))
        for span in spans
    )
    found: dict[str, list[Span]] = {name: [] for name in PHASES}
    before = ""
    for (start, end), name in marks:
        first, last = found[name][-1] if name == before else (start, start)
        if name == before and not any(last <= one.start_ns <= start for _, one in trace.steps):
            found[name][-1] = first, max(end, last)
        else:
            found[name].append((start, end))
        before = name
    return {name: joined(spans) for name, spans in found.items()}


def _inside(at: int, spans: Sequence[Span]) -> bool:
    place = bisect_right(spans, (at, 1 << 62)) - 1
    return place >= 0 and spans[place][0] <= at < spans[place][1]


def _touches(spans: Sequence[Span], start: int, end: int) -> bool:
    """Whether one of these merged spans overlaps with ``start`` to ``end``."""
    place = bisect_left(spans, (end,)) - 1
    return place >= 0 and end > start and spans[place][1] > start


def _recompute(trace: ProfilerTrace, backward: Sequence[Span]) -> list[ProfilerSlice]:
    """Find recomputed operators in backward, with their inner operators."""
    engine = joined(_spans(trace.nodes))
    marked = joined(_spans(one for one in trace.annotations if one.name == RECOMPUTES))
    numbered = [one for one in trace.numbered if _inside(one.start_ns, engine or backward)]
    around = joined([*marked, *_spans(numbered)])
    if not around:
        return []
    return [one for one in trace.ops if _inside(one.start_ns, around) and not one.name.startswith(ENGINE)]


def _outermost(trace: ProfilerTrace) -> Iterator[ProfilerSlice]:
    """Outermost operators of the host, without autograd's bookkeeping."""
    last: dict[str, int] = {}
    for one in trace.ops:
        if one.end_ns <= last.get(one.track, 0) or one.name.startswith(ENGINE) or "Backward" in one.name:
            continue
        last[one.track] = one.end_ns
        yield one


# the device -----------------------------------------------------------------------------------------------------------


def is_collective(name: str) -> bool:
    """Whether it is communication."""
    return name.startswith(("nccl", "rccl", "gloo:"))


def _launches(trace: ProfilerTrace, spans: list[Span]) -> list[Span]:
    """Kernels that were launched in these spans."""
    numbers = {one.args.get("correlation") for one in trace.runtime if _inside(one.start_ns, spans)}
    return _spans(one for one in trace.device if one.args.get("correlation") in numbers)


def _by_name(talk: list[ProfilerSlice], exposed: list[Span], start: int, end: int) -> dict[str, int]:
    groups: defaultdict[str, list[Span]] = defaultdict(list)
    for one in talk:
        groups[_short(one.name)].append((one.start_ns, one.end_ns))
    found = {name: overlap(within(joined(spans), start, end), exposed) for name, spans in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _short(name: str) -> str:
    """``ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)`` is an AllReduce."""
    for word in ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "SendRecv", "Broadcast", "Reduce"):
        if word.lower() in name.lower().replace("_", ""):
            return word
    return name.partition("(")[0][:40]


def _after(exposed: list[Span], compute: list[Span], phases: Mapping[str, list[Span]], start: int, end: int) -> int:
    """Length between the last computation of a backward and the first of an optimizer."""
    found = 0
    backward = phases[BACKWARD]
    for begin, stop in within(exposed, start, end):
        before = bisect_right(backward, (begin, 1 << 62))
        if before and not _touches(compute, stop, backward[before - 1][1]):
            found += stop - begin
    return found


def _waiting(trace: ProfilerTrace, busy: list[Span], data: list[Span], start: int, end: int) -> DeviceIdle:
    gaps = [gap for gap in without([(start, end)], busy) if gap[1] - gap[0] >= _LEAST_GAP_NS]
    allocator = joined(_spans(one for one in trace.runtime if one.name in _ALLOCATES))
    calls = [one for one in trace.runtime if one.name.startswith(_WAITS)]
    waits = sorted((one.end_ns, one.ns) for one in calls if "Async" not in one.name)
    ends, waiting = [stop for stop, _ in waits], joined(_spans(calls))
    whole = len(trace.steps) == 1 and trace.steps[0][1].kind == UNMARKED  # a first step's extra work may be in it
    found, longest = Counter[str](), (0, 0)
    for start_ns, end_ns in gaps:
        gap, length = [(start_ns, end_ns)], end_ns - start_ns
        if 2 * overlap(gap, data) > length:
            found["data_ns"] += length
        elif 2 * overlap(gap, allocator) > length and not whole:
            found["allocator_ns"] += length
        else:  # how far the host would be ahead without waits
            inside = waits[bisect_right(ends, start_ns - 1) : bisect_right(ends, end_ns)]
            stopped = max(min(length, sum(waited for _, waited in inside)), overlap(gap, waiting))
            found.update(sync_ns=stopped, host_ns=length - stopped)
            longest = max(longest, (length - stopped, -start_ns))
    return DeviceIdle(**found, longest_ns=longest[0], longest_at_ns=-longest[1])


def _copies(trace: ProfilerTrace, compute: list[Span], start: int, end: int) -> Copies:
    moved = (one for one in trace.device if one.kind == "gpu_memcpy" and start <= one.start_ns < end)
    copies = [one for one in moved if "DtoD" not in one.name]
    waits = [one for one in trace.runtime if one.name.startswith(_WAITS) and start <= one.start_ns < end]
    reads = [one for one in trace.named_ops.get("aten::_local_scalar_dense", ()) if start <= one.start_ns < end]
    read = joined(_spans(reads))
    inside = joined(_spans([*reads, *(one for name in _COPIES for one in trace.named_ops.get(name, ()))]))
    return Copies(
        count=len(copies),
        alone_ns=total(without(joined(_spans(copies)), compute)),
        waited_ns=sum(one.ns for one in waits if _inside(one.start_ns, inside)),
        pageable=sum("Pageable" in one.name for one in copies),
        to_host=sum("Pageable" in one.name and "DtoH" in one.name for one in copies),
        reads=sum(_inside(one.start_ns, read) for one in waits),
    )


# bytes ----------------------------------------------------------------------------------------------------------------


Point = tuple[int, int, int]
"""Time, allocated and reserved."""


def _peaks(points: list[Point], phases: Mapping[str, list[Span]]) -> dict[str, int]:
    times, levels = [at for at, _, _ in points], [allocated for _, allocated, _ in points]
    found = {}
    for name, spans in phases.items():
        ranges = ((bisect_left(times, start), bisect_left(times, end)) for start, end in spans)
        if inside := [max(levels[first:last]) for first, last in ranges if first < last]:
            found[name] = max(inside)
    return found


def _state(trace: ProfilerTrace, points: list[Point]) -> int:
    """Allocated bytes that the trace's first optimizer step adds, if later ones add none."""
    steps = sorted(_spans(one for one in trace.annotations if one.name.startswith(OPTIMIZER_STEP)))
    if not points or len(steps) < 2:
        return 0
    times = [at for at, _, _ in points]

    def level(at: int) -> int:
        place = bisect_right(times, at) - 1
        return points[max(0, place)][1]

    rises = [level(end) - level(start) for start, end in steps]
    return rises[0] if rises[0] > 0 and max(rises[1:]) < 0.2 * rises[0] else 0


# spans of time --------------------------------------------------------------------------------------------------------


def joined(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap or touch; in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> int:
    """Length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def within(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Cut spans to a window."""
    return [(max(a, start), min(b, end)) for a, b in spans if min(b, end) > max(a, start)]


def without(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Subtract ``others`` from ``spans``; both merged."""
    at = bisect_left(others, spans[0][:1]) if spans else 0
    for start, end in spans:
        while at and others[at - 1][1] > start:
            at -= 1
        begin = start
        while at < len(others) and others[at][0] < end:
            if others[at][1] > begin:
                if others[at][0] > begin:
                    yield begin, others[at][0]
                begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            yield begin, end


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> int:
    """Length of the intersection; both merged."""
    return total(spans) - total(without(spans, others))


# FLOPs: a multiply-add is 2 -------------------------------------------------------------------------------------------


def _flops(ops: Iterable[ProfilerSlice], start: int, end: int) -> int:
    return sum(op_flops(one.name, one.args) for one in ops if start <= one.start_ns < end)


def op_flops(name: str, args: Mapping[str, Any]) -> int:
    """Return FLOPs of matmuls and fused attention, causal or not; 0 for other ops, and without shapes."""
    dims = args.get("Input Dims") if name in _COUNTED else None
    if not isinstance(dims, list):
        return 0
    shapes = [one for one in dims if isinstance(one, list) and one and all(type(n) is int and n >= 0 for n in one)]
    if name in ("aten::mm", "aten::bmm") and len(shapes) >= 2:
        return _product(shapes[0], shapes[1])
    if name in ("aten::addmm", "aten::baddbmm") and len(shapes) >= 3:
        return _product(shapes[1], shapes[2])
    if name in _FORWARD and len(shapes) >= 3:
        return _scores(shapes[0], shapes[1]) + _values(shapes[0], shapes[1], shapes[2])
    if name in _BACKWARD and len(shapes) >= 4:  # the scores again and two more of their size; two of the values'
        q, k, v = shapes[1:4]
        return 3 * _scores(q, k) + 2 * _values(q, k, v)
    return 0


def _product(a: list[int], b: list[int]) -> int:
    return 2 * prod(a) * b[-1] if a[-1] == b[-2 if len(b) > 1 else 0] else 0


def _scores(q: list[int], k: list[int]) -> int:
    return 2 * prod(q) * k[-2] if len(k) > 1 else 0


def _values(q: list[int], k: list[int], v: list[int]) -> int:
    return 2 * prod(q[:-1]) * k[-2] * v[-1] if len(k) > 1 else 0
