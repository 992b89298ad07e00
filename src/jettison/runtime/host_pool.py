"""Pinned host memory: one slab that is laid out before a step, and who has which part of it.

NOTE [ The layout is the first fit ]
What a step moves is known: sizes, in which order they go, and in which they come back. `laid_out` gives each the lowest
place that is free when it goes. The pool does the same when the step runs, so that a step which moves what was planned
finds exactly these places, and the slab is exactly as large as it must be. A step that moves more (another forward
before the first one's backward) takes one more slab, within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jettison.errors import HostBudgetExceeded, UsageError
from jettison.runtime.device import Device, Event, Slab
from jettison.runtime.host_memory import left_on_host

ALIGNMENT_BYTES: Final = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """Bytes on the host from one moment to another, counted in whatever the caller counts moments in."""

    nbytes: int
    begins: int
    ends: int

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.ends <= self.begins:
            raise ValueError(f"got {self.nbytes} bytes from {self.begins} to {self.ends}; expected some, for some time")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where each lies, in the order given, and how many bytes hold all of them."""

    offsets: tuple[int, ...]
    nbytes: int


class FirstFit:
    """Ranges of a memory of ``size_bytes``; None: as large as it must be."""

    def __init__(self, size_bytes: int | None = None) -> None:
        self.size_bytes = size_bytes
        self._taken: list[tuple[int, int]] = []  # begin and end, ascending

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def take(self, nbytes: int) -> int | None:
        """The lowest free place for so many bytes, aligned; None if there is none."""
        length = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        begin = 0
        for place, (taken, end) in enumerate(self._taken):
            if taken - begin >= length:
                self._taken.insert(place, (begin, begin + length))
                return begin
            begin = end
        if self.size_bytes is not None and begin + length > self.size_bytes:
            return None
        self._taken.append((begin, begin + length))
        return begin

    def give(self, begin: int) -> None:
        """The range that begins there is free."""
        self._taken = [taken for taken in self._taken if taken[0] != begin]


def laid_out(lifetimes: Sequence[Lifetime]) -> Layout:
    """See NOTE [ The layout is the first fit ]. What ends when another begins makes room for it."""
    offsets = [0] * len(lifetimes)
    ends = sorted((life.ends, i) for i, life in enumerate(lifetimes))
    memory, total = FirstFit(), 0
    for _, i in sorted((life.begins, i) for i, life in enumerate(lifetimes)):
        while ends and ends[0][0] <= lifetimes[i].begins:
            memory.give(offsets[ends.pop(0)[1]])
        begin = memory.take(lifetimes[i].nbytes)
        assert begin is not None  # it has no end
        offsets[i] = begin
        total = max(total, begin + -(-lifetimes[i].nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return Layout(offsets=tuple(offsets), nbytes=total)


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """Some bytes of a slab, and copies that still read what was there before."""

    slab: Slab
    offset: int
    nbytes: int
    read_until: tuple[Event, ...] = ()


@dataclass(eq=False)
class _Room:
    slab: Slab
    places: FirstFit
    reads: list[tuple[int, int, Event]] = field(default_factory=list)  # of what was given back: begin, end, until when


class HostPool:
    """Slabs, within a budget of what they really take from the host; None: as much as the host has.

    Args:
        left: says what the host has; None where nothing is really taken.
    """

    def __init__(
        self, device: Device, budget_bytes: int | None = None, *, left: Callable[[], int] | None = left_on_host
    ) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise UsageError(f"got a host budget of {budget_bytes} bytes; expected 0 or more")
        self.device = device
        self.budget_bytes = budget_bytes
        self._left_on_host = left
        self.live_bytes = 0
        self.peak_bytes = 0
        self._planned_bytes = 0
        self._rooms: list[_Room] = []

    @property
    def real_bytes(self) -> int:
        """Taken from the host."""
        return sum(room.slab.real_bytes for room in self._rooms)

    def reserve(self, nbytes: int) -> None:
        """Make the slab of a step; one that is there and large enough serves, and one that is not makes room.

        Raises:
            HostBudgetExceeded: the host may not give, or has not, so much.
        """
        self._planned_bytes = max(nbytes, self._planned_bytes)
        if not nbytes or any(room.slab.nbytes >= nbytes for room in self._rooms):
            return
        for room in [room for room in self._rooms if room.places.is_empty]:
            for _, _, event in room.reads:
                self.device.wait(self.device.current_stream(), event)
            self._rooms.remove(room)
        self._grow(nbytes, nbytes)

    def take(self, nbytes: int) -> Span:
        """Room for so many bytes.

        Raises:
            HostBudgetExceeded: there is none, and the host may not give, or has not, so much.
        """
        for room in self._rooms:
            offset = room.places.take(nbytes)
            if offset is not None:
                return self._span(room, offset, nbytes)
        aligned = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        room = self._grow(aligned, max(aligned, self._planned_bytes))
        offset = room.places.take(nbytes)
        assert offset is not None
        return self._span(room, offset, nbytes)

    def give(self, span: Span, read_until: Event | None) -> None:
        """A span is free, once the copy that read it last is over."""
        room = next(room for room in self._rooms if room.slab is span.slab)
        room.places.give(span.offset)
        end = span.offset + span.nbytes
        # what was sent here since then, in the stream that sends next, has waited for these
        room.reads = [read for read in room.reads if not (span.offset <= read[0] and read[1] <= end)]
        if read_until is not None:
            room.reads.append((span.offset, end, read_until))
        self.live_bytes -= span.nbytes

    def _span(self, room: _Room, offset: int, nbytes: int) -> Span:
        end = offset + nbytes
        meeting = tuple(event for begin, stop, event in room.reads if begin < end and offset < stop)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Span(room.slab, offset, nbytes, meeting)

    def _grow(self, least: int, wanted: int) -> _Room:
        nbytes = wanted if self._allows(wanted) else least
        real_bytes = self.device.rounded(nbytes)
        if not self._allows(nbytes):
            assert self.budget_bytes is not None
            raise self._exceeded(nbytes, self.budget_bytes, "the host budget")
        left = self._left()
        if left is not None and real_bytes > left:
            raise self._exceeded(nbytes, self.real_bytes + left, "what this machine has for it")
        room = _Room(slab := self.device.pin(nbytes), FirstFit(slab.nbytes))
        self._rooms.append(room)
        return room

    def _allows(self, nbytes: int) -> bool:
        return self.budget_bytes is None or self.real_bytes + self.device.rounded(nbytes) <= self.budget_bytes

    def _left(self) -> int | None:
        try:
            return None if self._left_on_host is None else self._left_on_host()
        except UsageError:
            if self.budget_bytes is None:
                raise
            return None  # the system does not say

    def _exceeded(self, nbytes: int, limit_bytes: int, limit_name: str) -> HostBudgetExceeded:
        return HostBudgetExceeded(
            needed_bytes=self.live_bytes + nbytes,
            real_bytes=self.real_bytes + self.device.rounded(nbytes),
            limit_bytes=limit_bytes,
            limit_name=limit_name,
        )
