"""Time and bytes of a step by module and role, from a trace.

NOTE [ Modules of a trace ]
``with_stack=True`` records each call of a module by class and number ("nn.Module: Linear_3"); `jettison profile`
annotates calls by the module's name ("nn.Module: layers.3.mlp (MLP)"). An operator belongs to the innermost module
around it. A node of backward has the sequence number of its forward operator, and belongs to that one's module; a
gradient is accumulated right after the node that computes it. A kernel belongs to the module of its launch. Numbers are
dropped, so that repeated layers are one row. Outside of modules the outermost operator and its weight are one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from jettison.diagnose.profile_file import (
    ENGINE,
    LOADER,
    MODULE,
    OPTIMIZER_STEP,
    RECOMPUTES,
    MemoryPoint,
    ProfilerSlice,
    ProfilerTrace,
    is_numbered,
)
from jettison.diagnose.step_profile import BACKWARD, DATA, FORWARD, OPTIMIZER, Span, is_collective

RECOMPUTE: Final = "recompute"
OTHER: Final = "other"
ROLES: Final = (DATA, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER)
BEFORE: Final = "before the trace"
"""Role of bytes that were allocated before the trace: parameters, and the optimizer's state after its first step."""
_REENTRANT: Final = "CheckpointFunction"
"""Around operators that it keeps autograd from numbering."""
_WEIGHTED: Final = ("linear", "addmm", "mm", "matmul", "bmm")
_LASTING: Final = {
    FORWARD: "activations",
    RECOMPUTE: "recomputed activations",
    BACKWARD: "gradients",
    OPTIMIZER: "optimizer state",
    DATA: "batch",
}
_PASSING: Final = {BACKWARD: "transients of backward", OPTIMIZER: "transients of the optimizer"}


class TracePlace(NamedTuple):
    """Module and role of a moment on the host; "": unknown."""

    module: str = ""
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """Time and bytes by place; sums over the steady steps.

    Args:
        named: the trace names modules; otherwise rows are operators.
        ns: time of the device's kernels, or of operators without what runs inside of them.
        peak: bytes at the highest moment of the busiest device, under the role of a tensor; together they are the peak.
    """

    named: bool
    ns: Mapping[TracePlace, int]
    peak: Mapping[TracePlace, int]

    @property
    def modules(self) -> dict[str, dict[str, int]]:
        """Nanoseconds by module and role, the largest module first."""
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for place, ns in self.ns.items():
            found[place.module][place.role] = ns
        return dict(sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0])))


def profile_modules(trace: ProfilerTrace, window: Span) -> ModuleProfile:
    """Attribute time in a window, and bytes at the peak. See NOTE [ Modules of a trace ]."""
    sweep = _TraceWalk(trace, window)
    found = sweep.own
    if trace.device:
        found = defaultdict(int)
        for one in trace.device:
            place = sweep.launched.get(one.args.get("correlation"), TracePlace())
            if window[0] <= one.start_ns < window[1]:
                found[place._replace(module="communication") if is_collective(one.name) else place] += one.ns
    ns: defaultdict[TracePlace, int] = defaultdict(int)
    for place, length in found.items():
        ns[place._replace(role=place.role or OTHER)] += length
    return ModuleProfile(
        named=bool(trace.modules), ns={place: n for place, n in ns.items() if n > 0}, peak=_peak(sweep.born)
    )


@dataclass(slots=True)
class _Open:
    """An open slice, the place inside of it, and that of the innermost open operator."""

    end_ns: int
    place: TracePlace
    op: TracePlace | None = None
    module: bool = False


class _TraceWalk:
    """Walk through a trace in order of time, with a stack of open slices for each thread."""

    def __init__(self, trace: ProfilerTrace, window: Span) -> None:
        self.named = bool(trace.modules)
        self.window = window
        self.own: defaultdict[TracePlace, int] = defaultdict(int)
        """Nanoseconds of operators that begin in the window, without inner ones."""
        self.launched: dict[Any, TracePlace] = {}
        """Place of a kernel's launch, by correlation id."""
        self.born: list[tuple[MemoryPoint, TracePlace]] = []
        self._stacks: defaultdict[str, list[_Open]] = defaultdict(list)
        self._makers: defaultdict[Any, dict[str, TracePlace]] = defaultdict(dict)
        """Place by sequence number and thread of an autograd node's forward."""
        self._nodes: dict[str, TracePlace] = {}
        """Last node of backward of each thread."""
        marks = [one for one in trace.annotations if one.name.startswith((OPTIMIZER_STEP, LOADER, RECOMPUTES))]
        items: list[ProfilerSlice | MemoryPoint] = [*marks, *trace.modules, *trace.ops, *trace.runtime]
        items += trace.busiest_memory
        items.sort(key=_begins)
        for item in items:
            stack = self._stacks[item.track]
            at = _begins(item)[0]
            while stack and stack[-1].end_ns <= at:
                stack.pop()
            top = stack[-1] if stack else _Open(0, TracePlace())
            if isinstance(item, MemoryPoint):
                self.born.append((item, top.place))
            elif item.kind == "cpu_op":
                self._op(item, stack, top)
            elif (number := item.args.get("correlation")) is not None:
                self.launched[number] = top.place
            else:
                place = self._marked(item, top)
                stack.append(_Open(item.end_ns, place, top.op, item.name.startswith(MODULE)))

    def _marked(self, one: ProfilerSlice, top: _Open) -> TracePlace:
        """Place inside of an annotation or of a module's call."""
        if one.name.startswith(OPTIMIZER_STEP):
            return TracePlace(one.name.removeprefix(OPTIMIZER_STEP), OPTIMIZER)
        if one.name.startswith(LOADER):
            return TracePlace("data loader", DATA)
        role = RECOMPUTE if top.place.role in (BACKWARD, RECOMPUTE) else top.place.role or FORWARD
        if one.name == RECOMPUTES:
            return TracePlace(top.place.module, RECOMPUTE)
        within = top.place.module if top.module else ""
        return TracePlace(_inside(one.name.removeprefix(MODULE), within), role)

    def _op(self, op: ProfilerSlice, stack: list[_Open], top: _Open) -> None:
        place = top.place
        if op.name.startswith(ENGINE):
            place = self._node(op, top)
            self._nodes[op.track] = place
        elif is_numbered(op):
            role = RECOMPUTE if place.role == BACKWARD else place.role or FORWARD
            module = place.module
            if op.name != _REENTRANT and (not module or (not self.named and role != place.role)):
                module = _called(op)
            place = TracePlace(module, role)
            self._makers[op.args["Sequence number"]][op.track] = place
        elif not place.module:
            place = TracePlace(_called(op), place.role)
        if self.window[0] <= op.start_ns < self.window[1]:
            self.own[place] += op.ns
            if top.op is not None:
                self.own[top.op] -= op.ns
        stack.append(_Open(op.end_ns, place, place))

    def _node(self, op: ProfilerSlice, top: _Open) -> TracePlace:
        """The module whose forward made a node; a gradient's accumulation follows the node that computed it."""
        name = op.name.removeprefix(ENGINE).strip(": ")
        if "AccumulateGrad" in name:
            return self._nodes.get(op.track, TracePlace(name, BACKWARD))
        makers = self._makers.get(op.args.get("Sequence number"), {})
        inner = top.place.role == BACKWARD  # a reentrant checkpoint: nodes of its own recomputation
        tracks = sorted(makers, key=lambda track: (track == op.track) != inner)
        return TracePlace(makers[tracks[0]].module if tracks else name, BACKWARD)


def _begins(item: ProfilerSlice | MemoryPoint) -> tuple[int, int]:
    """Outer slices first; what is allocated at the beginning of one is inside of it."""
    return (item.at_ns, 0) if isinstance(item, MemoryPoint) else (item.start_ns, -item.end_ns)


_NUMBERED: Final = re.compile(r"_\d+$")
_INDEX: Final = re.compile(r"(?<![^.])\d+(?![^. ])")


def _inside(name: str, outer: str) -> str:
    """Name of a module in which numbers of layers are dropped: a path of classes, or the module's own name."""
    if _NUMBERED.search(name):  # else it ends in the class
        return f"{outer}/{_NUMBERED.sub('', name)}".lstrip("/")
    return _INDEX.sub("*", name)


def _called(op: ProfilerSlice) -> str:
    """Name of an operator, with the shape of its weight where that is recorded."""
    name = op.name.removeprefix("aten::")
    dims = op.args.get("Input Dims")
    if name in _WEIGHTED and isinstance(dims, list) and len(dims) > 1:
        weight = dims[2] if name == "addmm" and len(dims) > 2 else dims[1]
        if isinstance(weight, list) and len(weight) == 2:
            return f"{name} {weight[0]}×{weight[1]}"
    return name


def _peak(born: list[tuple[MemoryPoint, TracePlace]]) -> dict[TracePlace, int]:
    """Bytes by place at the highest moment; see `ModuleProfile.peak`."""
    if not born or any(point.address is None for point, _ in born):  # as in older traces
        return {}
    at = max(range(len(born)), key=lambda number: born[number][0].allocated_bytes)
    live: dict[int | None, tuple[int, TracePlace]] = {}
    for point, place in born[: at + 1]:
        if point.delta_bytes > 0:
            live[point.address] = point.delta_bytes, place
        else:
            live.pop(point.address, None)
    freed: dict[int | None, int] = {}  # by address, the next event that frees it
    lasts = len(born)
    for number, (point, place) in enumerate(born[at + 1 :], start=at + 1):
        if point.delta_bytes < 0:
            freed.setdefault(point.address, number)
        if place.role == OPTIMIZER:
            lasts = min(lasts, number)
    found: defaultdict[TracePlace, int] = defaultdict(int)
    for address, (nbytes, place) in live.items():
        last = freed.get(address, len(born))
        passes = place.role in _PASSING and last < (len(born) if place.role == OPTIMIZER else lasts)
        role = _PASSING[place.role] if passes else _LASTING.get(place.role, OTHER)
        found[TracePlace(place.module, role)] += nbytes
    rest = born[at][0].allocated_bytes - sum(found.values())
    if rest > 0:
        found[TracePlace("", BEFORE)] = rest
    return dict(sorted(found.items(), key=lambda item: -item[1]))
