"""The engine that moves saved tensors to the host after forward and brings them back before backward asks.

NOTE [ Edges ]
Copies run in streams of their own. What orders them, each where it says so below:
 1. A copy out begins after the op that wrote its source: the current stream, read at every pack, is recorded after
    whatever gathers or clones there.
 2. It writes to a place on the host once the copy that read what lay there before is over.
 3. A source is held until the stream that it belongs to has waited for its copy. `record_stream` would hold it for as
    long as the device happens to take; so peaks follow from the plan.
 4. A buffer to bring something back to is allocated in the current stream, and its copy waits for that point: the
    memory may be in use by earlier work of that stream.
 5. A copy back waits for the copy out of the same bytes, however early it was asked for.
 6. Whoever asks waits for the copy back.
 7. Asked for in another stream than it was brought back in, it is copied there, and the first stream waits for that
    before the buffer is its own again.
 8. What goes before it was used (a graph that is dropped, an exception) goes once its copies are over.

NOTE [ When sources go, and when copies come ]
Calls of regions form groups, in the order of their ends. When a group ends, what the group before it has sent is
waited for and let go: the copies of one region hide behind the next one's forward. When backward first asks a group
for anything, all of the group before it is brought back: that hides behind this one's backward. Both follow from the
order in which Python runs, never from time, so that a dry run holds and frees the same bytes at the same moments.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.recording import TensorRef
from jettison.capture.tensor_subclasses import plain, version_of
from jettison.core.errors import StaleTensor
from jettison.runtime.accelerator import device_for
from jettison.runtime.device import Event, Stream, StreamDevice
from jettison.runtime.host_pool import HostPool, SlabSpan
from jettison.runtime.views import view_of

IN_FLIGHT: Final = 1
"""Groups whose copies may be under way when a group has ended, and that are brought back ahead of being asked for."""


class Direction(StrEnum):
    """Of a copy."""

    OUT = "out"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy, as it was queued."""

    direction: Direction
    nbytes: int


class Group:
    """One call of a region, for the order in which copies go and come. It owns nothing that moves."""

    __slots__ = ("__weakref__", "before", "engine", "moved")

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.moved: list[weakref.ref[Moved]] = []
        self.before: weakref.ref[Group] | None = None

    def alive(self) -> Iterator[Moved]:
        """What it has sent and somebody still wants."""
        return (moved for each in self.moved if (moved := each()) is not None)

    def end(self) -> None:
        self.engine.end(self)

    def asked(self) -> None:
        self.engine.prefetch(self)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Moved:
    """Bytes of a storage that were sent to the host, for whoever holds it to have back, again and again. ``source`` is
    there until the copy was waited for, ``loaded`` from when they are on their way back until they were asked for.
    """

    engine: OffloadEngine
    source: Tensor | None
    span: SlabSpan
    stream: Stream
    sent: Event
    key: int  # of its storage, with the next three
    storage: weakref.ref[Any]
    begin: int
    version: int | None
    written: int | None = None  # the version that was found when the copy had been waited for
    loaded: Tensor | None = None
    loaded_on: Stream = None
    arrived: Event = None

    @property
    def on_device(self) -> Tensor | None:
        """What it holds there at the moment."""
        return self.source if self.source is not None else self.loaded

    def open(self) -> Tensor:
        """The bytes, flat, for the current stream. Raises `StaleTensor` where they were written to too early."""
        return self.engine.open(self)

    def __del__(self) -> None:
        self.engine.let_go(self)


class OffloadEngine:
    """Moves bytes of the device ``place``; tensors elsewhere stay. ``transfers`` are the copies so far, in order."""

    def __init__(self, device: StreamDevice, pool: HostPool, place: torch.device) -> None:
        self.device, self.pool, self.place = device, pool, place
        self.transfers: list[Transfer] = []
        self._moving: dict[int, weakref.ref[Moved]] = {}  # by storage
        self._behind: deque[Group] = deque()  # ended, and their sources may still be there
        self._latest: weakref.ref[Group] | None = None
        self._asked: weakref.ref[Group] | None = None
        self._gone: deque[Moved] = deque()
        self._lock = threading.RLock()
        self._depth = 0

    # forward ---------------------------------------------------------------------------------------------------------

    def begin(self) -> Group:
        return Group(self)

    def end(self, group: Group) -> None:
        """The call is over, by whatever way. See NOTE [ When sources go, and when copies come ]."""
        with self._working():
            group.before, self._latest = self._latest, weakref.ref(group)
            self._behind.append(group)
            while len(self._behind) > IN_FLIGHT:
                for moved in self._behind.popleft().alive():
                    self._release(moved)

    def send(self, source: Tensor, group: Group) -> Moved:
        """Start to move flat bytes, once for each range. Raises `HostBudgetExceeded` without room on the host."""
        with self._working():
            known = self._known(source)
            if known is not None:
                return known
            device, stream = self.device, self.device.current_stream()
            span = self.pool.take(source.numel())
            device.wait(device.sends, device.record(stream))  # edge 1
            for read in span.read_until:
                device.wait(device.sends, read)  # edge 2
            device.send(source, span.slab, span.offset)
            sent, storage = device.record(device.sends), source.untyped_storage()
            at = storage._cdata, weakref.ref(storage), source.storage_offset(), version_of(source)
            moved = Moved(self, source, span, stream, sent, *at)
            self.transfers.append(Transfer(Direction.OUT, span.nbytes))
            self._moving[moved.key] = weakref.ref(moved)
            group.moved.append(weakref.ref(moved))
            return moved

    def _known(self, source: Tensor) -> Moved | None:
        """What has these bytes already. An address alone says nothing: memory is used again."""
        reference = self._moving.get(source.untyped_storage()._cdata)
        moved = reference() if reference is not None else None
        if (
            moved is None
            or moved.storage() is not source.untyped_storage()
            or (moved.written or moved.version) != version_of(source)
            or (moved.begin, moved.span.nbytes) != (source.storage_offset(), source.numel())
        ):
            return None
        return moved

    def _release(self, moved: Moved) -> None:
        if moved.source is not None:
            self.device.wait(moved.stream, moved.sent)  # edge 3
            moved.written = version_of(moved.source)
            moved.source = None

    # backward --------------------------------------------------------------------------------------------------------

    def prefetch(self, group: Group) -> None:
        """Backward asks this group for something: once in a row, bring back the group before it."""
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

    def open(self, moved: Moved) -> Tensor:
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

    def _load(self, moved: Moved) -> None:
        device, stream = self.device, self.device.current_stream()
        into = device.allocate(moved.span.nbytes, self.place)
        device.wait(device.fetches, device.record(stream))  # edge 4
        device.wait(device.fetches, moved.sent)  # edge 5
        device.fetch(moved.span.slab, moved.span.offset, into)
        moved.loaded, moved.loaded_on = into, stream
        moved.arrived = device.record(device.fetches)
        self.transfers.append(Transfer(Direction.BACK, moved.span.nbytes))

    def let_go(self, moved: Moved) -> None:
        """Nobody wants these bytes any more. The cycle collector may say so in the middle of anything."""
        self._gone.append(moved)
        with self._working():
            pass

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """One thread at a time; what was let go of meanwhile is taken apart at the end."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                while self._depth == 1 and self._gone:
                    self._take_apart(self._gone.popleft())
                self._depth -= 1

    def _take_apart(self, moved: Moved) -> None:
        self._release(moved)  # edge 8, on the way out
        if moved.loaded is not None:
            self.device.wait(moved.loaded_on, moved.arrived)  # edge 8, on the way back
            moved.loaded = None
        self.pool.give(moved.span, moved.arrived)
        known = self._moving.get(moved.key)
        if known is not None and known() is None:
            del self._moving[moved.key]


def engine_for(place: torch.device, budget_bytes: int | None = None, *, dry: bool = False) -> OffloadEngine:
    """Return an engine for tensors of one device, with a budget for pinning (None: what the host has), and without
    copies for a dry run. Raises `UsageError` where nothing can be moved from there.
    """
    device = StreamDevice(place) if dry else device_for(place)
    pool = HostPool(device, None, left=None) if dry else HostPool(device, budget_bytes)
    return OffloadEngine(device, pool, place)


shared_engine = functools.cache(engine_for)
"""Of regions that belong to no plan of a model: functions."""


def place_of(module: nn.Module, values: Iterable[Any] = ()) -> torch.device:
    """Where a module computes: the accelerator that something of it is on, else the CPU."""
    tensors = [*module.parameters(), *module.buffers(), *(v for v in values if isinstance(v, Tensor))]
    places = {plain(tensor).device for tensor in tensors}
    return min((p for p in places if p.type not in ("cpu", "meta")), key=str, default=torch.device("cpu"))


def flat_bytes(tensor: Tensor, begin: int, nbytes: int) -> Tensor:
    """Bytes of the storage that a plain tensor lies in, counted from where the storage begins, without their graph."""
    with torch.no_grad():
        return view_of(tensor.detach(), TensorRef(0, (nbytes,), (1,), begin, torch.uint8))


def stale(what: str, where: str, then: int | None, now: int | None) -> StaleTensor:
    """What to raise where autograd would say that a tensor was written to."""
    return StaleTensor(
        f"{what} of {where} was modified by an inplace operation between forward and backward: it is at version {now}; "
        f"expected version {then}. Write to it after backward, or clone it first"
    )
