"""Pinned CPU memory: slabs that are laid out before a step, and the ranges in use.

NOTE [ The layout is the first fit ]
The sizes that a step offloads are known, and their order; all fetches come after the last of them. Each tensor gets the
lowest free range in the first slab that has one, both when slabs are chosen (`slabs_for`) and when the step runs. A
step that offloads more (another forward before the first one's backward) takes as many slabs again, within the budget.

NOTE [ Slabs are powers of two ]
torch's allocator of pinned memory rounds each request up to a power of two. One slab for 33 GiB would take 64; slabs of
32 and 1 GiB take 33. So the slabs are the binary digits of a multiple of a `PARTS`-th of the size of one slab: the
smallest multiple in which first fit finds room for everything, since no tensor spans two slabs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jettison.core.errors import HostBudgetExceeded, UsageError
from jettison.runtime.device import Event, Slab, StreamDevice

ALIGNMENT_BYTES: Final = 512
MEMINFO: Final = Path("/proc/meminfo")  # available memory of a machine, on Linux
GROUP: Final = Path("/sys/fs/cgroup")  # and of a container
PARTS: Final = 64  # see NOTE [ Slabs are powers of two ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slabs_for(sizes: Sequence[int], rounded: Callable[[int], int] = int) -> tuple[int, ...]:
    """Sizes of the slabs for the tensors that a step offloads, in bytes and in order, with ``rounded`` the bytes that
    pinning takes. See NOTE [ The layout is the first fit ].
    """
    total = sum(map(_aligned, sizes))
    whole = rounded(total)
    part = max(ALIGNMENT_BYTES, whole // PARTS)
    for nbytes in range(-(-total // part) * part, whole, part):
        slabs = tuple(1 << i for i in reversed(range(nbytes.bit_length())) if nbytes >> i & 1)
        if sum(map(rounded, slabs)) < whole and _have_room(slabs, sizes):
            return slabs
    return (total,) if sizes else ()


def _have_room(slabs: Iterable[int], sizes: Iterable[int]) -> bool:
    left = list(slabs)
    for length in map(_aligned, sizes):
        slab = next((number for number, nbytes in enumerate(left) if nbytes >= length), None)
        if slab is None:
            return False
        left[slab] -= length
    return True


def usable(budget_bytes: int, rounded: Callable[[int], int]) -> int:
    """Most bytes that slabs can have together without taking more than the budget."""
    total = first = 0
    left = budget_bytes
    while (slab := _largest(left, rounded)) and slab * PARTS >= 2 * first:
        first, total, left = first or slab, total + slab, left - rounded(slab)
    return total


def _largest(budget_bytes: int, rounded: Callable[[int], int]) -> int:
    low, high = 0, budget_bytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rounded(middle) <= budget_bytes else (low, middle - 1)
    return low


@dataclass(frozen=True, eq=False, slots=True)
class SlabSpan:
    """A range of a slab, and the copies that still read its previous contents."""

    slab: Slab
    offset: int
    nbytes: int
    read_until: tuple[Event, ...] = ()


@dataclass(eq=False)
class SlabRanges:
    """A slab with its ranges in use."""

    slab: Slab
    taken: list[tuple[int, int]] = field(default_factory=list)  # begin and end, ascending
    reads: list[tuple[int, int, Event]] = field(default_factory=list)  # freed ranges: begin, end, event of a read

    def take(self, nbytes: int) -> int | None:
        """Take the lowest free range of this size, aligned; None without one."""
        length, begin = _aligned(nbytes), 0
        for place, (taken, end) in enumerate(self.taken):
            if taken - begin >= length:
                self.taken.insert(place, (begin, begin + length))
                return begin
            begin = end
        if begin + length > self.slab.nbytes:
            return None
        self.taken.append((begin, begin + length))
        return begin

    def give(self, begin: int) -> None:
        """Free the range that begins there."""
        self.taken = [taken for taken in self.taken if taken[0] != begin]


def left_on_host() -> int:
    """Bytes of CPU memory that are available without swapping, or the container's limit if that is less; if torchrun
    started several ranks on a host, each rank's part. Raises `UsageError` where the system does not tell.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(MEMINFO), re.MULTILINE)
    if found is None:
        raise UsageError(f"{MEMINFO} does not say how much memory is available; give the budget in bytes, as in '8GiB'")
    left = int(found[1]) * 1024
    most, used = _read(GROUP / "memory.max").strip(), _read(GROUP / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        left = min(left, max(0, int(most) - int(used)))
    return left // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class HostPool:
    """Slabs within pinned bytes as pinning rounds them; None: all that ``left`` has (None: nothing is allocated)."""

    def __init__(
        self, device: StreamDevice, budget_bytes: int | None = None, *, left: Callable[[], int] | None = left_on_host
    ) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise UsageError(f"got a host budget of {budget_bytes} bytes; expected 0 or more")
        self.device = device
        self.budget_bytes = budget_bytes
        self._left_on_host = left
        self.live_bytes = 0
        self.peak_bytes = 0
        self._planned: tuple[int, ...] = ()
        self._rooms: list[SlabRanges] = []

    @property
    def real_bytes(self) -> int:
        return sum(room.slab.nbytes for room in self._rooms)

    def reserve(self, *slabs: int) -> None:
        """Allocate the slabs of a step; existing ones that are large enough are reused, others are freed. Raises
        `HostBudgetExceeded` if the budget or the available memory is too small.
        """
        if sum(slabs) >= sum(self._planned):
            self._planned = slabs
        there = [room.slab.nbytes for room in self._rooms]
        if len(slabs) == 1 and any(nbytes >= slabs[0] for nbytes in there):
            return
        if tuple(there[: len(slabs)]) == slabs:
            return
        for room in [room for room in self._rooms if not room.taken]:
            for _, _, event in room.reads:
                self.device.wait(self.device.current_stream(), event)
            self._rooms.remove(room)
        self._grow(slabs)

    def take(self, nbytes: int) -> SlabSpan:
        """Take a range of this size. Raises `HostBudgetExceeded` as `reserve` does."""
        span = self._find(nbytes)
        if span is not None:
            return span
        aligned = _aligned(nbytes)
        wanted = self._planned if max(self._planned, default=0) >= aligned else (aligned,)
        self._grow(wanted if self._allows(wanted) else (aligned,))
        span = self._find(nbytes)
        assert span is not None
        return span

    def _find(self, nbytes: int) -> SlabSpan | None:
        for room in self._rooms:
            if (offset := room.take(nbytes)) is None:
                continue
            end = offset + nbytes
            meeting = tuple(event for begin, stop, event in room.reads if begin < end and offset < stop)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            return SlabSpan(room.slab, offset, nbytes, meeting)
        return None

    def give(self, span: SlabSpan, read_until: Event | None) -> None:
        """Free a span, once the copy that read it last is over."""
        room = next(room for room in self._rooms if room.slab is span.slab)
        room.give(span.offset)
        end = span.offset + span.nbytes
        # later copies to it, in the stream of the next send, have waited for these
        room.reads = [read for read in room.reads if not (span.offset <= read[0] and read[1] <= end)]
        if read_until is not None:
            room.reads.append((span.offset, end, read_until))
        self.live_bytes -= span.nbytes

    def _grow(self, slabs: Sequence[int]) -> None:
        real_bytes = self._real(slabs)
        if not self._allows(slabs):
            assert self.budget_bytes is not None
            raise self._exceeded(slabs, self.budget_bytes, "the host budget")
        left = self._left()
        if left is not None and real_bytes > left:
            raise self._exceeded(slabs, self.real_bytes + left, "what this machine has for it")
        self._rooms += [SlabRanges(self.device.pin(nbytes)) for nbytes in slabs]

    def _real(self, slabs: Sequence[int]) -> int:
        return sum(map(self.device.rounded, slabs))

    def _allows(self, slabs: Sequence[int]) -> bool:
        return self.budget_bytes is None or self.real_bytes + self._real(slabs) <= self.budget_bytes

    def _left(self) -> int | None:
        try:
            return None if self._left_on_host is None else self._left_on_host()
        except UsageError:
            if self.budget_bytes is None:
                raise
            return None  # the system does not tell

    def _exceeded(self, slabs: Sequence[int], limit_bytes: int, limit_name: str) -> HostBudgetExceeded:
        return HostBudgetExceeded(
            needed_bytes=self.live_bytes + sum(slabs),
            real_bytes=self.real_bytes + self._real(slabs),
            limit_bytes=limit_bytes,
            limit_name=limit_name,
        )
