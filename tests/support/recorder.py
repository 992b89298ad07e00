"""`StreamDevice` of the runtime without one: copies go to host memory and back, on virtual streams whose order can be
chosen.

NOTE [ Legal moments ]
Ops run when Python calls them, as they do on a CPU. A copy does not: it waits in its stream, and may run at any moment
at which its stream's events allow it, at the latest when what computes has to wait for it. Which moment that is, an
`Order` says. A copy knows its source and its target by weak references: a source that is gone by then has been handed
to somebody else, and what arrives is poison, as is what a buffer holds before anything has arrived. So a missing wait
shows in the values under some order, and in `HappensBefore` under all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.op_traits import writes
from jettison.capture.pytrees import op_leaves
from jettison.capture.tensor_subclasses import desugars, infers_shapes, is_dense, plain
from jettison.runtime.device import Slab, whole_pages
from jettison.runtime.offload import OffloadEngine

from .happens_before import Bytes, Clock, HappensBefore, Race

POISON = 0xFF  # makes NaN of floats


class Order(Protocol):
    """Chooses when copies run."""

    def choose(self, runnable: list[str]) -> int:
        """One of the streams whose next copy may run now, by its place in the list; -1 for none of them."""


class Latest:
    """Copies run when they must."""

    def choose(self, runnable: list[str]) -> int:
        """See `Order`."""
        return -1


class Earliest:
    """Copies run when they may."""

    def choose(self, runnable: list[str]) -> int:
        """See `Order`."""
        return 0


@dataclass(eq=False)
class VirtualStream:
    """``queue`` is what has not run yet: copies, and points of other streams to wait for."""

    name: str
    copies: bool  # of ours; what computes runs at once
    queue: deque[_Copy | Point] = field(default_factory=deque)
    queued: int = 0
    done: int = 0

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Point:
    """An event: a stream's first ``position`` copies are over."""

    stream: VirtualStream
    position: int
    clock: Clock

    @property
    def is_reached(self) -> bool:
        """Whether it is."""
        return self.stream.done >= self.position


@dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    source: int  # address
    into: int
    nbytes: int
    source_alive: Any  # weak reference, or None for what always is
    into_alive: Any

    def run(self) -> None:
        if self.into_alive is not None and self.into_alive() is None:
            return  # whoever has that memory now is in `races`
        if self.source_alive is not None and self.source_alive() is None:
            ctypes.memset(self.into, POISON, self.nbytes)
        else:
            ctypes.memmove(self.into, self.source, self.nbytes)


class Recorder:
    """See the module docstring."""

    def __init__(self, order: Order | None = None) -> None:
        self.order: Order = order or Latest()
        self.sends = VirtualStream("sends", copies=True)
        self.fetches = VirtualStream("fetches", copies=True)
        self.clocks = HappensBefore()
        self._current = VirtualStream("compute", copies=False)
        self._blocks: dict[int, tuple[Any, int]] = {}  # storage -> weak reference, key in the clocks
        self._next = 0
        self._uses: dict[int, dict[VirtualStream, None]] = {}  # by key in the clocks: streams that hold freed memory

    @property
    def races(self) -> list[Race]:
        """Found so far."""
        return self.clocks.races

    # what a `StreamDevice` does -------------------------------------------------------------------------------------

    def current_stream(self) -> VirtualStream:
        """See `StreamDevice`."""
        return self._current

    def record(self, stream: VirtualStream) -> Point:
        """See `StreamDevice`."""
        return Point(stream, stream.queued, self.clocks.record(stream))

    def wait(self, stream: VirtualStream, event: Point) -> None:
        """See `StreamDevice`."""
        self.clocks.wait(stream, event.clock)
        if stream.copies:
            stream.queue.append(event)
            return
        self._reach(event)
        self.moment()

    def record_use(self, stream: VirtualStream, source: Tensor) -> None:
        """See `StreamDevice`."""
        self._uses.setdefault(self._block(source.untyped_storage()), {})[stream] = None

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `StreamDevice`."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        ctypes.memset(made.data_ptr(), POISON, nbytes)
        self.clocks.run(self._current, "allocation", writes=[self._bytes(made)])
        return made

    def rounded(self, nbytes: int) -> int:
        """See `StreamDevice`."""
        return whole_pages(nbytes)

    def pin(self, nbytes: int) -> Slab:
        """Not from torch's allocator: where the device is the host, its bytes are counted apart."""
        real_bytes = self.rounded(nbytes)
        return Slab((ctypes.c_char * real_bytes).from_buffer(mmap.mmap(-1, real_bytes)), real_bytes)

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """See `StreamDevice`."""
        nbytes = source.numel()
        host = Bytes(id(slab.memory), offset, offset + nbytes)
        self.clocks.run(self.sends, "copy to the host", reads=[self._bytes(source)], writes=[host])
        alive = weakref.ref(source.untyped_storage())
        self._queue(self.sends, _Copy(source.data_ptr(), _address(slab, offset), nbytes, alive, None))

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """See `StreamDevice`."""
        nbytes = into.numel()
        host = Bytes(id(slab.memory), offset, offset + nbytes)
        self.clocks.run(self.fetches, "copy from the host", reads=[host], writes=[self._bytes(into)])
        alive = weakref.ref(into.untyped_storage())
        self._queue(self.fetches, _Copy(_address(slab, offset), into.data_ptr(), nbytes, None, alive))

    # what only a test asks for ----------------------------------------------------------------------------------------

    def stream(self, name: str) -> VirtualStream:
        """One more stream that ops can run in."""
        return VirtualStream(name, copies=False)

    @contextlib.contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        """Ops run in this stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def watching(self) -> TorchDispatchMode:
        """While entered, every op that runs is an access to its arguments and results."""
        return _Watch(self)

    def touches(self, given: list[Tensor], written: list[Tensor]) -> None:
        """An op is about to use these. A copy into what it uses, or out of what it writes to, may run before it or
        after. For all others that makes no difference.
        """
        queued = [item for stream in (self.sends, self.fetches) for item in stream.queue if isinstance(item, _Copy)]
        into = {copy.into_alive() for copy in queued if copy.into_alive is not None}
        out_of = {copy.source_alive() for copy in queued if copy.source_alive is not None}
        if any(t.untyped_storage() in into for t in given) or any(t.untyped_storage() in out_of for t in written):
            self.moment()

    def moment(self) -> None:
        """Copies may run here, as the order has it."""
        while runnable := [stream for stream in (self.sends, self.fetches) if self._may_run(stream)]:
            chosen = self.order.choose([stream.name for stream in runnable])
            if chosen < 0:
                return
            self._run_next(runnable[chosen])

    # ------------------------------------------------------------------------------------------------------------------

    def _queue(self, stream: VirtualStream, copy: _Copy) -> None:
        stream.queue.append(copy)
        stream.queued += 1
        self.moment()

    @staticmethod
    def _may_run(stream: VirtualStream) -> bool:
        for item in stream.queue:
            if isinstance(item, _Copy):
                return True
            if not item.is_reached:
                return False
        return False

    def _run_next(self, stream: VirtualStream) -> None:
        while not isinstance(item := stream.queue.popleft(), _Copy):
            self._reach(item)
        item.run()
        stream.done += 1

    def _reach(self, event: Point) -> None:
        while not event.is_reached:
            self._run_next(event.stream)

    def _bytes(self, tensor: Tensor) -> Bytes:
        """The block that a tensor lies in, and the bytes there that it sees."""
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        return Bytes(self._block(storage), begin, begin + span * tensor.element_size())

    def _block(self, storage: Any) -> int:
        known = self._blocks.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        self._next += 1
        address, key, nbytes, stream = storage._cdata, self._next, storage.nbytes(), self._current
        this = weakref.ref(self)

        def died(reference: object) -> None:
            recorder = this()
            if recorder is not None:
                clocks, reuse = recorder.clocks, ("reuse of", key)  # ordered after these streams, which do not wait
                for each in (stream, *recorder._uses.pop(key, ())):
                    clocks.wait(reuse, clocks.record(each))
                clocks.free(reuse, key, nbytes)
                if recorder._blocks.get(address, (None,))[0] is reference:
                    del recorder._blocks[address]

        self._blocks[address] = (weakref.ref(storage, died), key)
        return key


def recorder_of(engine: OffloadEngine | None) -> Recorder:
    """What an engine's copies go through from now on."""
    assert engine is not None, "nothing moves: nothing is tested"
    if not isinstance(engine.device, Recorder):
        engine.device = Recorder()
    return engine.device


class _Watch(TorchDispatchMode):
    """See `Recorder.watching`. An operator of higher order (compiled code has them for random states) is one op."""

    __module__ = "jettison.tests"  # compiled blocks run op by op under modes of others
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        whole = isinstance(func, HigherOrderOperator)
        if infers_shapes() or (not whole and func.is_view):
            return func(*args, **kwargs)
        given = _tensors(op_leaves(args, kwargs))
        written = [] if whole else _tensors(writes(func, args, kwargs))
        self.recorder.touches(given, written)
        out = func(*args, **kwargs)
        written += _tensors(op_leaves(out))
        bytes_of, stream = self.recorder._bytes, self.recorder.current_stream()
        self.recorder.clocks.run(stream, str(func), reads=map(bytes_of, given), writes=map(bytes_of, written))
        return out


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    found = [plain(leaf) for leaf in leaves if isinstance(leaf, Tensor) and is_dense(leaf)]
    return [tensor for tensor in found if tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter)]


def _address(slab: Slab, offset: int) -> int:
    return ctypes.addressof(slab.memory) + offset
