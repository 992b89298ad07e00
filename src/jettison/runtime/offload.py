"""Offload engine and its pinned CPU memory: saved tensors move after forward and are prefetched before backward.

NOTE [ The layout is the first fit ]
The sizes that a step offloads are known, and their order; all fetches come after the last of them. Each tensor gets the
lowest free range in the first slab that has one, both when slabs are chosen (`slabs_for`) and when the step runs. A
step that offloads more (another forward before the first one's backward) takes as many slabs again, within the budget.

NOTE [ Slabs are powers of two ]
torch's allocator of pinned memory rounds each request up to a power of two. One slab for 33 GiB would take 64; slabs of
32 and 1 GiB take 33. So the slabs are the binary digits of a multiple of a `PARTS`-th of the size of one slab: the
smallest multiple in which first fit finds room for everything, since no tensor spans two slabs.

NOTE [ Edges ]
Copies run in streams of their own. Each edge of their order, named where the code makes it:
  1. An offload begins after the op that wrote its source: the current stream is read at every pack, and recorded after
  the gather or clone there.
  2. It writes to a range of a slab once the copy that read the previous contents is over.
  3. A source is held until the stream it was packed in has waited for the copy: peaks follow from the plan. Memory of
  another stream, which waits for nothing, is also held by `record_stream`, for as long as the device happens to take.
  4. A buffer for a fetch is allocated in the current stream, and its copy waits for that point: the memory may be in
  use by earlier work of that stream.
  5. A fetch waits for the offload of the same bytes, however early it is requested.
  6. The reader waits for the fetch.
  7. If it is read in another stream than it was fetched in, it is copied there, and the first stream waits for that
  before it may reuse the buffer.
  8. Tensors that are freed unused (a graph that is dropped, an exception) are freed once their copies are over.

NOTE [ When sources are freed, and when fetches start ]
Calls of regions form groups, in the order of their ends. When a group ends, the copies of the group before it are
waited for and their sources freed: the copies of one region overlap with the next one's forward. When backward first
reads from a group, all of the group before it is prefetched: that overlaps with this one's backward. Both follow from
the order in which Python runs, never from time, so a dry run holds and frees the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.recorder import TensorRef
from jettison.capture.tensor_subclasses import plain, version_of
from jettison.core.errors import HostBudgetExceeded, StaleTensor, UsageError
from jettison.runtime.device import Event, Slab, Stream, StreamDevice, device_for
from jettison.runtime.views import view_of

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


def free_host_bytes() -> int:
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
        self, device: StreamDevice, budget_bytes: int | None = None, *, left: Callable[[], int] | None = free_host_bytes
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
        if tuple(there[: len(slabs)]) == slabs or (len(slabs) == 1 and max(there, default=0) >= slabs[0]):
            return
        for room in [room for room in self._rooms if not room.taken]:
            for _, _, event in room.reads:
                self.device.wait(self.device.current_stream(), event)
            self._rooms.remove(room)
        self._grow(slabs)

    def take(self, nbytes: int) -> SlabSpan:
        """Take a range of this size. Raises `HostBudgetExceeded` as `reserve` does."""
        if (span := self._find(nbytes)) is not None:
            return span
        aligned = _aligned(nbytes)
        wanted = self._planned if max(self._planned, default=0) >= aligned else (aligned,)
        self._grow(wanted if self._allows(wanted) else (aligned,))
        span = self._find(nbytes)
        assert span is not None
        return span

    def _find(self, nbytes: int) -> SlabSpan | None:
        for room in self._rooms:
            if (offset := room.take(nbytes)) is not None:
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
        if self.budget_bytes is not None and not self._allows(slabs):
            raise self._exceeded(slabs, self.budget_bytes, "the host budget")
        if (left := self._left()) is not None and self._real(slabs) > left:
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


IN_FLIGHT: Final = 1
"""Groups whose copies may be running after a group has ended, and groups that are prefetched."""


class Group:
    """One call of a region, as a unit in the order of copies. It owns none of the moved bytes."""

    __slots__ = ("__weakref__", "before", "engine", "moved")

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.moved: list[weakref.ref[OffloadedStorage]] = []
        self.before: weakref.ref[Group] | None = None

    def alive(self) -> Iterator[OffloadedStorage]:
        """Its offloaded ranges that are still referenced."""
        return (moved for each in self.moved if (moved := each()) is not None)

    def end(self) -> None:
        self.engine.end(self)

    def asked(self) -> None:
        self.engine.prefetch(self)


@dataclass(eq=False, slots=True, weakref_slot=True)
class OffloadedStorage:
    """Offloaded bytes of a storage, which may be fetched repeatedly."""

    engine: OffloadEngine
    source: Tensor | None  # held until its copy was waited for
    span: SlabSpan
    stream: Stream
    sent: Event
    key: int  # identity of its storage, with the next three
    storage: weakref.ref[Any]
    begin: int
    version: int | None
    uses: int = 0  # under the engine's lock
    written: int | None = None  # the version after the copy had been waited for
    loaded: Tensor | None = None  # held from the start of a fetch until the bytes are read
    loaded_on: Stream = None
    arrived: Event = None


class StorageUse:
    """One use of offloaded bytes, freed with their last: counted, as weak references also give what is being freed."""

    __slots__ = ("of",)

    def __init__(self, of: OffloadedStorage) -> None:
        of.uses += 1
        self.of = of

    @property
    def on_device(self) -> Tensor | None:
        return self.of.source if self.of.source is not None else self.of.loaded

    def open(self) -> Tensor:
        """Return the bytes, flat, for the current stream. Raises `StaleTensor` if they were written to too early."""
        return self.of.engine.open(self.of)

    def __del__(self) -> None:  # the garbage collector may call this at any moment
        self.of.engine._gone.append(self.of)
        with self.of.engine._working():
            pass


class OffloadEngine:
    """Moves bytes of the device ``place``; other tensors stay."""

    def __init__(self, device: StreamDevice, pool: HostPool, place: torch.device) -> None:
        self.device, self.pool, self.place = device, pool, place
        self._moving: dict[int, OffloadedStorage] = {}  # by storage
        self._behind: deque[Group] = deque()  # ended groups whose sources may still be held
        self._latest: weakref.ref[Group] | None = None
        self._asked: weakref.ref[Group] | None = None
        self._gone: deque[OffloadedStorage] = deque()
        self._lock = threading.RLock()
        self._depth = 0

    # forward ---------------------------------------------------------------------------------------------------------

    def end(self, group: Group) -> None:
        """End a call, also after an exception. See NOTE [ When sources are freed, and when fetches start ]."""
        with self._working():
            group.before, self._latest = self._latest, weakref.ref(group)
            self._behind.append(group)
            while len(self._behind) > IN_FLIGHT:
                for moved in self._behind.popleft().alive():
                    self._release(moved)

    def send(self, source: Tensor, group: Group) -> StorageUse:
        """Start to offload flat bytes, once per range. Raises `HostBudgetExceeded` without room in CPU memory."""
        with self._working():
            device, stream = self.device, self.device.current_stream()
            device.record_use(stream, source)  # edge 3
            if (known := self._known(source)) is not None:
                return StorageUse(known)
            span = self.pool.take(source.numel())
            device.wait(device.sends, device.record(stream))  # edge 1
            for read in span.read_until:
                device.wait(device.sends, read)  # edge 2
            device.send(source, span.slab, span.offset)
            sent, storage = device.record(device.sends), source.untyped_storage()
            at = storage._cdata, weakref.ref(storage), source.storage_offset(), version_of(source)
            moved = OffloadedStorage(self, source, span, stream, sent, *at)
            self._moving[moved.key] = moved
            group.moved.append(weakref.ref(moved))
            return StorageUse(moved)

    def _known(self, source: Tensor) -> OffloadedStorage | None:
        """The running offload of the same bytes, if any. An address alone says nothing: memory is reused."""
        moved = self._moving.get(source.untyped_storage()._cdata)
        is_it = (
            moved is not None
            and moved.storage() is source.untyped_storage()
            and (moved.written or moved.version) == version_of(source)
            and (moved.begin, moved.span.nbytes) == (source.storage_offset(), source.numel())
        )
        return moved if is_it else None

    def _release(self, moved: OffloadedStorage) -> None:
        if moved.source is not None:
            self.device.wait(moved.stream, moved.sent)  # edge 3
            moved.written = version_of(moved.source)
            moved.source = None

    # backward --------------------------------------------------------------------------------------------------------

    def prefetch(self, group: Group) -> None:
        """Note that backward reads from this group: at the first of several reads, fetch the group before it."""
        with self._working():
            if self._asked is not None and self._asked() is group:
                return
            self._asked = weakref.ref(group)
            for _ in range(IN_FLIGHT):
                before = group.before() if group.before is not None else None
                if before is None:
                    return
                for moved in reversed(list(before.alive())):
                    if moved.source is None and moved.loaded is None:
                        self._load(moved)
                group = before

    def open(self, moved: OffloadedStorage) -> Tensor:
        with self._working():
            now = version_of(moved.source) if moved.source is not None else moved.written
            if now != moved.version:
                raise stale("a tensor on its way to the host", "a planned region", moved.version, now)
            if moved.source is not None:
                return moved.source
            if moved.loaded is None:
                self._load(moved)
            loaded, moved.loaded = moved.loaded, None
            assert loaded is not None
            stream = self.device.current_stream()
            self.device.wait(stream, moved.arrived)  # edge 6
            if stream == moved.loaded_on:
                return loaded
            copied = loaded.clone()
            self.device.wait(moved.loaded_on, self.device.record(stream))  # edge 7
            return copied

    def _load(self, moved: OffloadedStorage) -> None:
        device, stream = self.device, self.device.current_stream()
        into = device.allocate(moved.span.nbytes, self.place)
        device.wait(device.fetches, device.record(stream))  # edge 4
        device.wait(device.fetches, moved.sent)  # edge 5
        device.fetch(moved.span.slab, moved.span.offset, into)
        moved.loaded, moved.loaded_on = into, stream
        moved.arrived = device.record(device.fetches)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Hold the lock; bytes that are freed meanwhile are released at the end."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                while self._depth == 1 and self._gone:
                    self._take_apart(self._gone.popleft())
                self._depth -= 1

    def _take_apart(self, moved: OffloadedStorage) -> None:
        moved.uses -= 1
        if moved.uses:
            return
        self._release(moved)  # edge 8, while being offloaded
        if moved.loaded is not None:
            self.device.wait(moved.loaded_on, moved.arrived)  # edge 8, while being fetched
            moved.loaded = None
        self.pool.give(moved.span, moved.arrived)
        if self._moving.get(moved.key) is moved:
            del self._moving[moved.key]


def engine_for(place: torch.device, budget_bytes: int | None = None, *, dry: bool = False) -> OffloadEngine:
    """Return an engine for tensors of one device, with a budget for pinned memory (None: available memory), and without
    copies for a dry run. Raises `UsageError` for a device without offloading.
    """
    device = StreamDevice(place) if dry else device_for(place)
    pool = HostPool(device, None, left=None) if dry else HostPool(device, budget_bytes)
    return OffloadEngine(device, pool, place)


shared_engine = functools.cache(engine_for)
"""Engine of regions that belong to no plan of a model: functions."""


def place_of(module: nn.Module) -> torch.device:
    """The device a module computes on: the accelerator of any of its tensors, else the CPU."""
    places = {plain(tensor).device for tensor in (*module.parameters(), *module.buffers())}
    return min((p for p in places if p.type not in ("cpu", "meta")), key=str, default=torch.device("cpu"))


def flat_bytes(tensor: Tensor, begin: int, nbytes: int) -> Tensor:
    """Bytes of a plain tensor's storage, with an offset from its start, detached."""
    with torch.no_grad():
        return view_of(tensor.detach(), TensorRef(0, (nbytes,), (1,), begin, torch.uint8))


def stale(what: str, where: str, then: int | None, now: int | None) -> StaleTensor:
    """Return the error for a tensor that was written to, as autograd would raise it."""
    return StaleTensor(
        f"{what} of {where} was modified by an inplace operation between forward and backward: it is at version {now}; "
        f"expected version {then}. Write to it after backward, or clone it first"
    )
