"""CPU offload of a live plan: speed of the link, host memory, and the tensors of a block that may be offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, SupportsIndex

import torch

from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import UsageError
from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.cost.collective import host_seconds
from jettison.ledger.program import Program
from jettison.planner.frontier_policies import PACK
from jettison.runtime.device import rounding_of
from jettison.runtime.install import returned
from jettison.runtime.offload import free_host_bytes, usable
from jettison.runtime.recipe import compile_recipe
from jettison.solve.checkpoint_policy import SMALLEST_BYTES, can_move
from jettison.solve.frontier import FrontierPoint
from jettison.solve.offload_options import parts_to_send
from jettison.solve.problem import ChoiceLevels, Link, OffloadedTensor, RegionOption, StepProblem
from jettison.spec.hardware import Hardware, hardware

SEND: Final = "-send-"
ALL: Final = "all"
Saved = Mapping[str, Mapping[int, OffloadedTensor]]
"""Tensors of a compiled block, by point and buffer, that could be offloaded, as seen when measured."""
LESS: Final = 0.9
"""Share of the offloaded bytes that is tried next if pinning them needs too much host memory."""
MOVE_SECONDS: Final = 50e-6
"""Python's overhead for offloading one tensor and prefetching it (measured without copies, on 2 CPU cores)."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host memory of a device. ``bytes_per_second`` of the link are in one direction. ``budget_bytes``: limit of pinned
    memory, rounded up as it is allocated; None: unknown. ``hides``: copies overlap with the device's work.
    """

    bytes_per_second: float
    budget_bytes: int | None
    device: torch.device
    hides: bool = True

    @property
    def usable_bytes(self) -> int | None:
        """The largest request that stays within the budget after rounding."""
        return None if self.budget_bytes is None else usable(self.budget_bytes, rounding_of(self.device))

    def holds(self, pinned_bytes: int) -> bool:
        return self.budget_bytes is None or pinned_bytes <= self.budget_bytes

    def shared(self, count: int) -> Host:
        return self if self.budget_bytes is None else replace(self, budget_bytes=self.budget_bytes // count)

    def link(self, limit_bytes: int | None) -> Link:
        return Link(bytes_per_second=self.bytes_per_second, host_budget_bytes=limit_bytes, hides=self.hides)


def hardware_of(given: Hardware | str | None) -> Hardware | None:
    """Return hardware by name or file; other values are returned unchanged. Raise `UsageError` for an unknown name."""
    return hardware(given) if isinstance(given, str) else given


def host_of(
    offload: bool,
    host_budget: str | SupportsIndex | None,
    given: Hardware | None,
    device: torch.device,
    *,
    elsewhere: bool = False,
) -> Host | None:
    """Return the host as a caller describes it; None if nothing may be offloaded. ``given``: hardware with the speed of
    the link. ``elsewhere``: the plan is for its host, if its file states that host's memory. Raise `UsageError` for a
    budget without offloading, more than the machine has, or an unknown link.
    """
    if not offload:
        if host_budget is not None:
            raise UsageError(
                f"got host_budget={host_budget!r}, and nothing goes to the host; give offload=True as well"
            )
        return None
    budget = None if host_budget is None else parse_bytes(host_budget)
    left = given.host_memory_bytes if elsewhere and given is not None else None
    whose = "this machine" if left is None or given is None else f"the host of {given.name}"
    if left is None:
        with contextlib.suppress(UsageError):  # unknown on this system
            left = free_host_bytes()
    if budget is not None and left is not None and budget > left:
        raise UsageError(f"got host_budget={host_budget!r}; {whose} has {format_bytes(left)} for it. Give at most that")
    if given is not None:
        speed = 1 / host_seconds(1, given)
    elif device.type == "cuda":
        from jettison.diagnose.machine_calibration import host_link

        speed = host_link(device)
    else:
        raise UsageError(
            f"got offload=True on {device.type}, whose link to CPU memory is unknown; give hardware=, a GPU's "
            "name or a hardware file"
        )
    return Host(
        bytes_per_second=speed,
        budget_bytes=left if budget is None else budget,
        device=device,
        hides=given is None or not given.synchronous,
    )


def less_on_host(problem: StepProblem, levels: ChoiceLevels, host: Host, pinned_bytes: int) -> StepProblem:
    """Reduce the host bytes of a problem after a choice needed more, due to rounding or more forwards in flight."""
    assert problem.link is not None and host.budget_bytes is not None
    share = min(LESS, host.budget_bytes / pinned_bytes)
    limit = int(levels.host_bytes * share) if levels.host_bytes >= SMALLEST_BYTES else 0
    return replace(problem, link=replace(problem.link, host_budget_bytes=limit))


def movable(trace: ModelTrace, class_key: str) -> frozenset[str]:
    """Names of a class's calls that may offload: blocks that are called once, except the last."""
    names = [call.name for call in trace.calls]
    return frozenset(
        call.name for call in trace.calls[:-1] if call.class_key == class_key and names.count(call.name) == 1
    )


def with_moves(
    trace: ModelTrace, class_key: str, points: Iterable[FrontierPoint], kinks: Sequence[int]
) -> Iterator[FrontierPoint]:
    """Yield each point as it is, and with parts of its kept tensors offloaded (NOTE [ Three actions ] in
    `solve.offload_options`). ``kinks``: numbers of bytes whose copy is as long as the work that hides it.
    """
    region, senders = trace.classes[class_key].trace, movable(trace, class_key)
    lives = frozenset(place for name, places in returned(trace).items() if name in senders for place in places)
    program, returned_buffers = region.program, region.buffers_at(lives)
    for point in points:
        yield point
        large = (b for b in point.kept if can_move(program, b) and program.buffers[b].nbytes >= SMALLEST_BYTES)
        free = compile_recipe(region, point.kept, offloaded=frozenset(large) - returned_buffers).moved
        yield from with_parts_sent(program, point, frozenset(free), kinks)


def with_moves_of_compiled(
    trace: ModelTrace, class_key: str, points: Iterable[FrontierPoint], saved: Saved, kinks: Sequence[int]
) -> Iterator[FrontierPoint]:
    """Yield points of compiled blocks: they differ from measured ones in which tensors are offloaded."""
    program, senders = trace.classes[class_key].program, movable(trace, class_key)
    lives = {place for name, places in returned(trace).items() if name in senders for place in places}
    for point in points:
        yield point
        seen = saved[point.key]
        free = frozenset(
            b
            for b, sent in seen.items()  # Inductor may save other tensors instead, which are not offloaded
            if b in point.kept and can_move(program, b) and sent.nbytes >= SMALLEST_BYTES and sent.place not in lives
        )
        yield from with_parts_sent(program, point, free, kinks, seen)


def with_parts_sent(
    program: Program,
    point: FrontierPoint,
    free: frozenset[int],
    kinks: Sequence[int],
    seen: Mapping[int, OffloadedTensor] = MappingProxyType({}),
) -> Iterator[FrontierPoint]:
    """Yield a point with parts of its ``free`` buffers offloaded. ``seen``: those that Inductor saves resized."""
    buffers = (replace(b, nbytes=seen[b.index].nbytes) if b.index in seen else b for b in program.buffers)
    sizes = replace(program, buffers=tuple(buffers)) if seen else program
    for part in parts_to_send(sizes, point.kept, free, sorted(set(kinks))):
        if part:
            moved_bytes = program.kept_bytes(part)
            yield replace(
                point,
                key=f"{point.key}{SEND}{ALL if part == free else sizes.kept_bytes(part)}",
                kept_bytes=point.kept_bytes - moved_bytes,
                seconds=point.seconds + MOVE_SECONDS * len(part),
                offloaded=part,
                offloaded_bytes=moved_bytes,
            )


def option_at(point: FrontierPoint, measured: Mapping[str, RegionOption], saved: Saved) -> RegionOption:
    """Levels of a compiled block's point: those measured without offloading, less the offloaded bytes."""
    key = point.key.partition(SEND)[0]
    option = measured[key]
    if not point.offloaded:
        return option
    sent = tuple(one for b, one in saved[key].items() if b in point.offloaded)
    moved_bytes = sum(s.nbytes for s in sent)
    return replace(
        option,
        key=point.key,
        seconds=option.seconds + MOVE_SECONDS * len(sent),
        resident_bytes=max(0, option.resident_bytes - moved_bytes),
        offloaded_bytes=moved_bytes,
        sent=sent,
    )


def is_timed(key: str) -> bool:
    """Whether the option's choice of offloaded tensors depends on measured seconds."""
    _, sends, how = key.removesuffix(PACK).partition(SEND)
    return bool(sends) and how != ALL
