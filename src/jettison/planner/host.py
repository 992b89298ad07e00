"""What a live plan may send to the host: how fast the way there is, how much fits, and what of a block goes."""

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
from jettison.planner.points import PACK
from jettison.runtime.device import rounding_of
from jettison.runtime.host_pool import left_on_host, usable
from jettison.runtime.install import returned
from jettison.runtime.recipe import compile_recipe
from jettison.solve.actions import parts_to_send
from jettison.solve.frontier import FrontierPoint
from jettison.solve.policy import SMALLEST_BYTES, can_move
from jettison.solve.problem import ChoiceLevels, Link, RegionOption, SentTensor, StepProblem
from jettison.spec.hardware import Hardware, hardware

SEND: Final = "-send-"
ALL: Final = "all"
Saved = Mapping[str, Mapping[int, SentTensor]]
"""Of a compiled block, by point and buffer: tensors that could wait on the host, as they were seen when measured."""
LESS: Final = 0.9
"""Of what a choice sends at most, where pinning that took more of the host than there is."""
MOVE_SECONDS: Final = 50e-6
"""Python's part in sending one tensor and having it back (measured without copies, on 2 CPU cores)."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's memory behind a device.

    Args:
        bytes_per_second: of the link, in one direction.
        budget_bytes: what pinned memory may take there, as it is rounded up; None: nobody says what there is.
        device: that the plan is for.
        hides: copies run beside the device's work.
    """

    bytes_per_second: float
    budget_bytes: int | None
    device: torch.device
    hides: bool = True

    @property
    def usable_bytes(self) -> int | None:
        """The most that can be asked for without going over the budget once it is rounded up."""
        return None if self.budget_bytes is None else usable(self.budget_bytes, rounding_of(self.device))

    def holds(self, pinned_bytes: int) -> bool:
        """Is there room for so many bytes, rounded up?"""
        return self.budget_bytes is None or pinned_bytes <= self.budget_bytes

    def shared(self, count: int) -> Host:
        """An equal share of it."""
        return self if self.budget_bytes is None else replace(self, budget_bytes=self.budget_bytes // count)

    def link(self, limit_bytes: int | None) -> Link:
        """For the solver, with so much room there."""
        return Link(bytes_per_second=self.bytes_per_second, host_budget_bytes=limit_bytes, hides=self.hides)


def hardware_of(given: Hardware | str | None) -> Hardware | None:
    """By name or file, or as it is.

    Raises:
        UsageError: there is none of that name.
    """
    return hardware(given) if isinstance(given, str) else given


def host_of(
    offload: bool,
    host_budget: str | SupportsIndex | None,
    given: Hardware | None,
    device: torch.device,
    *,
    elsewhere: bool = False,
) -> Host | None:
    """The host as a caller describes it; None where nothing may be offloaded.

    Args:
        given: states the link.
        elsewhere: the plan is for the host of what is given, where its file says what that has.

    Raises:
        UsageError: a budget and nothing to use it, more than the machine has, or a link that nobody knows.
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
        with contextlib.suppress(UsageError):  # the system does not say
            left = left_on_host()
    if budget is not None and left is not None and budget > left:
        raise UsageError(f"got host_budget={host_budget!r}; {whose} has {format_bytes(left)} for it. Give at most that")
    if given is not None:
        speed = 1 / host_seconds(1, given)
    elif device.type == "cuda":
        from jettison.diagnose.calibrate import host_link

        speed = host_link(device)
    else:
        raise UsageError(
            f"got offload=True on {device.type}, whose link to the host nobody has stated; give hardware=, a GPU's "
            "name or a file with one"
        )
    return Host(
        bytes_per_second=speed,
        budget_bytes=left if budget is None else budget,
        device=device,
        hides=given is None or not given.synchronous,
    )


def less_on_host(problem: StepProblem, levels: ChoiceLevels, host: Host, pinned_bytes: int) -> StepProblem:
    """With less room than a choice took that rounding, or more forwards at a time, made too much: so many bytes."""
    assert problem.link is not None and host.budget_bytes is not None
    share = min(LESS, host.budget_bytes / pinned_bytes)
    limit = int(levels.host_bytes * share) if levels.host_bytes >= SMALLEST_BYTES else 0
    return replace(problem, link=replace(problem.link, host_budget_bytes=limit))


def movable(trace: ModelTrace, class_key: str) -> frozenset[str]:
    """Names of the calls of a class that may send: of a block that is called once, and is not the last."""
    names = [call.name for call in trace.calls]
    return frozenset(
        call.name for call in trace.calls[:-1] if call.class_key == class_key and names.count(call.name) == 1
    )


def with_moves(
    trace: ModelTrace, class_key: str, points: Iterable[FrontierPoint], kinks: Sequence[int]
) -> Iterator[FrontierPoint]:
    """Each point as it is, and with parts of what it keeps on the host (NOTE [ Three actions ] in `solve.actions`).

    Args:
        kinks: bytes whose copy is as long as what it hides behind.
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
    """The same of a class of compiled blocks: points differ from measured ones in where tensors wait."""
    program, senders = trace.classes[class_key].program, movable(trace, class_key)
    lives = {place for name, places in returned(trace).items() if name in senders for place in places}
    for point in points:
        yield point
        seen = saved[point.key]
        free = frozenset(
            b
            for b, sent in seen.items()  # Inductor may save something else in the place of what is kept: that stays
            if b in point.kept and can_move(program, b) and sent.nbytes >= SMALLEST_BYTES and sent.place not in lives
        )
        yield from with_parts_sent(program, point, free, kinks, seen)


def with_parts_sent(
    program: Program,
    point: FrontierPoint,
    free: frozenset[int],
    kinks: Sequence[int],
    seen: Mapping[int, SentTensor] = MappingProxyType({}),
) -> Iterator[FrontierPoint]:
    """A point with parts of what it keeps on the host.

    Args:
        free: buffers that may go.
        seen: buffers of which Inductor saved other bytes.
    """
    buffers = (replace(b, nbytes=seen[b.index].nbytes) if b.index in seen else b for b in program.buffers)
    sizes = replace(program, buffers=tuple(buffers)) if seen else program
    for part in parts_to_send(sizes, point.kept, free, sorted(set(kinks))):
        if part:
            yield replace(
                point,
                key=f"{point.key}{SEND}{ALL if part == free else sizes.kept_bytes(part)}",
                kept_bytes=point.kept_bytes - program.kept_bytes(part),
                seconds=point.seconds + MOVE_SECONDS * len(part),
                moved=part,
            )


def option_at(point: FrontierPoint, measured: Mapping[str, RegionOption], saved: Saved) -> RegionOption:
    """Levels of a compiled block's point: those that were measured where all stays, less what it sends."""
    key = point.key.partition(SEND)[0]
    option = measured[key]
    if not point.moved:
        return option
    sent = tuple(one for b, one in saved[key].items() if b in point.moved)
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
    """Does what such an option sends hang on seconds that were measured?"""
    _, sends, how = key.removesuffix(PACK).partition(SEND)
    return bool(sends) and how != ALL
