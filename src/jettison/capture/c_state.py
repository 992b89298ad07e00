"""State that C keeps for Python: memory behind a buffer, iterators, files, contexts of `decimal`.

NOTE [ Set aside ]
No table of Python's holds such state. Some of it can be written back (`c_state`). The rest is set aside before a run
that must leave nothing behind: wherever Python holds an iterator, the run finds a copy of it; in the place of a file
that is open for writing it finds a file in memory; and where nothing can be copied, as with a generator, it finds an
`Untouchable`, which refuses by name before anything moves. See `Reach.set_aside`.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import decimal
import functools
import gc
import importlib
import io
import itertools
import multiprocessing
import os
import queue
import stat
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Iterator
from operator import is_
from typing import Any, NoReturn, Protocol

from jettison.capture.file_changes import asking
from jettison.capture.kinds_of_c import adds_up, copied_whole, is_of_c, refuses_a_copy
from jettison.capture.snapshots import MOST_BYTES, PLAIN, attributes_of, is_a
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same


class CState(Protocol):
    """State of one object, as it was."""

    holder: Any

    def is_unchanged(self) -> bool:
        """Whether it is as it was."""

    def put_back(self) -> None:
        """Make it so again."""


def c_state(value: Any) -> CState | None:
    """State of an object that can be written back; None where it keeps none of that kind."""
    if is_a(value, io.StringIO | io.BytesIO):
        return None if value.closed else _InMemory(value)
    if is_a(value, decimal.Context):
        return _Context(value)
    if is_a(value, queue.SimpleQueue):
        return _Queue(value)
    if type(value) is _SEM_LOCK:
        return _Semaphore(value)
    if is_a(value, io.IOBase):
        return _Position(value) if _is_read(value) else None
    return Memory(value) if _lends_memory(value) else None


# memory ---------------------------------------------------------------------------------------------------------------

_LENDS: dict[type, bool] = {}


def _lends_memory(value: Any) -> bool:
    """Whether others may write to an object's memory, as to that of `ctypes`, `mmap`, shared memory."""
    kind = type(value)
    if _LENDS.get(kind, True):
        try:
            with memoryview(value) as view:
                _LENDS[kind] = True
                return not view.readonly and view.nbytes > 0 and kind is not memoryview
        except (TypeError, ValueError, BufferError):  # no buffer; released or closed by now
            _LENDS.setdefault(kind, False)
    return False


class Memory:
    """Bytes behind an object. What is too large to be copied has a digest of parts instead."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.seen = holder, _bytes_of(holder)

    def is_unchanged(self) -> bool:
        """Whether the same bytes are there."""
        return _bytes_of(self.holder) == self.seen

    def put_back(self) -> None:
        """Write them back.

        Raises:
            UnsupportedModule: there are too many.
        """
        now = _bytes_of(self.holder)
        if isinstance(self.seen, int):
            raise UnsupportedModule(
                f"the forward writes to the memory of a {type(self.holder).__name__} that outlives it and is larger "
                f"than the {MOST_BYTES} bytes that are put back after planning. Count in an attribute or a buffer "
                "instead, and make this memory again before you train"
            )
        if isinstance(now, bytes) and isinstance(self.seen, bytes) and len(now) == len(self.seen):
            with memoryview(self.holder) as view, view.cast("B") as flat:
                flat[:] = self.seen


def _bytes_of(holder: Any) -> bytes | int | None:
    try:
        with memoryview(holder) as view:
            if view.nbytes <= MOST_BYTES or not view.c_contiguous:
                return view.tobytes()
            with view.cast("B") as flat:
                step = max(len(flat) // 256, 4096)
                return functools.reduce(
                    lambda sofar, at: zlib.crc32(flat[at : at + 4096], sofar), range(0, len(flat), step), 1
                )
    except (TypeError, ValueError, BufferError):
        return None


# what is written back -------------------------------------------------------------------------------------------------


class _InMemory:
    """A file in memory."""

    def __init__(self, holder: io.StringIO | io.BytesIO) -> None:
        self.holder: Any = holder
        self.seen = holder.tell(), holder.getvalue()

    def is_unchanged(self) -> bool:
        return not self.holder.closed and (self.holder.tell(), self.holder.getvalue()) == self.seen

    def put_back(self) -> None:
        if self.holder.closed:
            raise UnsupportedModule(f"the forward closes a {type(self.holder).__name__} that outlives it")
        position, content = self.seen
        self.holder.seek(0)
        self.holder.truncate()
        self.holder.write(content)
        self.holder.seek(position)


class _Context:
    """Precision, rounding and flags of `decimal`."""

    _NAMES = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")

    def __init__(self, holder: decimal.Context) -> None:
        self.holder: Any = holder
        self.seen = self._now()

    def _now(self) -> Any:
        settings = {name: getattr(self.holder, name) for name in self._NAMES}
        return settings, dict(self.holder.flags), dict(self.holder.traps)

    def is_unchanged(self) -> bool:
        return bool(self._now() == self.seen)

    def put_back(self) -> None:
        settings, flags, traps = self.seen
        for name, value in settings.items():
            setattr(self.holder, name, value)
        self.holder.flags.update(flags)
        self.holder.traps.update(traps)


class _Queue:
    """Items of a queue. One that another thread empties, as an executor's, is empty before and after."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.seen = holder, waiting_in(holder)

    def is_unchanged(self) -> bool:
        now = waiting_in(self.holder)
        return len(now) == len(self.seen) and all(map(is_, now, self.seen))

    def put_back(self) -> None:
        if is_used_elsewhere(self.holder):  # what has been taken is under way
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self.holder.get_nowait()
        for one in self.seen:
            self.holder.put(one)


def is_used_elsewhere(held: Any) -> bool:
    """Whether code of another thread has an object, as an executor's has its queue."""
    here = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != here]
    while frames:
        frame = frames.pop()
        names = frame.f_code.co_names
        known = [*frame.f_locals.values(), *map(frame.f_globals.get, names)]
        inside = (map(table.get, names) for one in known if type(table := attributes_of(one)) is dict)
        if any(one is held for one in itertools.chain(known, *inside)):
            return True
        frames += [frame.f_back] if frame.f_back is not None else []
    return False


class _Semaphore:
    """Value of a semaphore of `multiprocessing`: of one, of a lock, and of what an event has for a flag."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.seen = self._now()

    def _now(self) -> int | None:
        with contextlib.suppress(NotImplementedError):  # macOS does not tell
            return int(self.holder._get_value())
        return None

    def is_unchanged(self) -> bool:
        return self._now() == self.seen

    def put_back(self) -> None:
        if self.seen is None or multiprocessing.active_children():  # which may have moved it
            return
        while self.holder._get_value() < self.seen:
            self.holder.release()
        while self.holder._get_value() > self.seen and self.holder.acquire(False):
            pass


_SEM_LOCK = getattr(sys.modules.get("_multiprocessing") or importlib.import_module("_multiprocessing"), "SemLock", None)


class Subclasses:
    """Classes that were registered below an abstract one, which C keeps."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.seen = self._now()

    def _now(self) -> list[type]:
        classes = (reference() for reference in abc._get_dump(self.holder)[0])  # type: ignore[attr-defined]
        return [cls for cls in classes if cls is not None]

    def is_unchanged(self) -> bool:
        """Whether the same classes are registered."""
        return set(map(id, self._now())) == set(map(id, self.seen))

    def put_back(self) -> None:
        """Register them alone."""
        abc._reset_registry(self.holder)  # type: ignore[attr-defined]
        for cls in self.seen:
            abc.ABCMeta.register(self.holder, cls)
        abc._reset_caches(self.holder)  # type: ignore[attr-defined]


def waiting_in(held: Any) -> list[Any]:
    """Items of a `queue.SimpleQueue`, oldest first: taking them out would wake those who wait for them."""
    inside = [one for one in gc.get_referents(held) if one is not type(held)]
    if sys.version_info < (3, 13):  # one list, which begins with the places of what was taken
        inside = inside[0]
    count = held.qsize()
    return inside[len(inside) - count :] if count else []


class _Position:
    """How far a file has been read."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.seen = holder, _position(holder)

    def is_unchanged(self) -> bool:
        return _position(self.holder) == self.seen

    def put_back(self) -> None:
        if self.seen is None or self.holder.closed:
            raise UnsupportedModule(f"the forward reads or closes the file {_name_of(self.holder)}, which outlives it")
        self.holder.seek(self.seen)


def _position(file: Any) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return None if file.closed else int(file.tell())
    return None


def _is_read(file: Any) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return is_of_c(file) and _is_regular(file) and file.readable() and not file.writable()
    return False


def _is_regular(file: Any) -> bool:
    """Whether it is a file on a disk, and not a terminal, a pipe, or what the process prints to."""
    if file.closed or any(file is one for one in _printed_to()):
        return False
    number = file.fileno()
    return number > 2 and stat.S_ISREG(os.fstat(number).st_mode)


def _printed_to() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def _name_of(file: Any) -> str:
    return repr(getattr(file, "name", type(file).__name__))


# what is set aside ----------------------------------------------------------------------------------------------------


class Untouchable:
    """Stands for an object that nothing could put back, and refuses to be used."""

    def __init__(self, kind: str, value: Any) -> None:
        self._kind, self._value, self._thread = kind, value, threading.get_ident()
        self._told: list[UnsupportedModule] = []

    def tell(self, refused: list[UnsupportedModule]) -> None:
        """Leave errors there as well: code around may catch what is raised, and go on."""
        self._told = refused

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._told.append(self._error())
        raise self._told[-1]

    def _error(self) -> UnsupportedModule:
        return UnsupportedModule(
            f"the forward takes from a {self._kind} that outlives it, or adds to it. Planning and recording run the "
            f"forward once more, and a {self._kind} cannot be put back, so it has not been touched: count in an "
            "attribute, index a list, or use it outside of the forward, instead"
        )

    __next__ = __call__ = __len__ = __bool__ = __getitem__ = __setitem__ = __enter__ = _refuse

    def __exit__(self, *_: object) -> None:
        """Never entered."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:  # one that goes on meanwhile
            return getattr(self._value, name)
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __deepcopy__(self, _memo: Any) -> Untouchable:
        return self


def stand_in(value: Any) -> Any:
    """What a run finds in the place of a value that C keeps moving; None where the value may stay."""
    if is_a(value, io.StringIO | io.BytesIO):
        return None
    if (instead := asking(value)) is not None:
        return instead
    if is_a(value, io.IOBase) and not refuses_a_copy(Same(type(value))):
        return _scratch(value)
    if is_a(value, types.GeneratorType):
        return Untouchable("generator", value)
    if type(value) is CSV_WRITER:
        return _another_writer(value)
    if is_outside(value):
        return Untouchable(f"{type(value).__module__}.{type(value).__name__}", value)
    if is_a(value, queue.Queue):
        return (
            Untouchable(f"{type(value).__module__}.{type(value).__name__} of another thread", value)
            if is_used_elsewhere(value)
            else None
        )
    if is_iterator_of_c(value):
        try:
            return copied_iterator(value)
        except TypeError:
            return Untouchable(type(value).__name__, value)
    if adds_up(Same(type(value))):
        return value.copy()
    if refuses_a_copy(Same(type(value))):
        return Untouchable(f"{type(value).__module__}.{type(value).__name__}", value)
    return copied_whole(value)


_OUTSIDE = frozenset(
    (
        *("sqlite3.Connection", "sqlite3.Cursor", "socket.socket", "subprocess.Popen", "greenlet.greenlet"),
        *("multiprocessing.connection.Connection", "multiprocessing.connection.Client"),
        *("torch.profiler.profiler.profile", "torch.utils.tensorboard.writer.SummaryWriter"),
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    )
)
"""Kinds of objects that speak to databases, files, other programs and other processes, or go on by themselves."""


def is_outside(value: Any) -> bool:
    """Whether an object speaks to what is outside of Python, or goes on by itself."""
    return _is_outside(Same(type(value)))


@functools.lru_cache(maxsize=4096)
def _is_outside(kind: Same[type]) -> bool:
    return any(f"{c.__module__}.{c.__qualname__}" in _OUTSIDE for c in kind.it.__mro__)


CSV_WRITER = type(csv.writer(io.StringIO()))
_ITERATORS = ("builtins", "itertools")


def is_iterator_of_c(value: Any) -> bool:
    """Whether it is an iterator that has neither a table nor slots."""
    return is_a(value, Iterator) and type(value).__module__ in _ITERATORS


def copied_iterator(iterator: Any) -> Any:
    """An iterator that is as far; both may go on by themselves.

    Raises:
        TypeError: it cannot be copied.
    """
    if is_a(iterator, types.GeneratorType) or not is_iterator_of_c(iterator):
        raise TypeError(type(iterator).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that itertools will not be pickled one day
        make, given, *state = iterator.__reduce__()
        made = make(*_with_copies(given))
        if state and state[0] is not None:
            made.__setstate__(_with_copies(state[0]))
    return made


def _with_copies(value: Any) -> Any:
    if is_a(value, tuple):
        return tuple(map(_with_copies, value))
    return copied_iterator(value) if is_a(value, Iterator) else value


def _another_writer(writer: Any) -> Any:
    """A writer of rows over what stands in for the file that one has, of which C knows the method alone."""
    method = next(one for one in gc.get_referents(writer) if callable(one) and not is_a(one, type))
    file = getattr(method, "__self__", None)
    instead = None if file is None else stand_in(file)
    to = types.SimpleNamespace(write=method if instead is None else instead.write)
    return csv.writer(to, dialect=writer.dialect)


def _scratch(file: Any) -> Any:
    """A file in memory for one on a disk that is open for writing, or for one of C's over bytes in memory."""
    if not is_of_c(file):
        return None  # made in Python: what it writes to is found by its attributes
    try:
        content = _in_memory_below(file)
        if not (file.writable() and (content is not None or _is_regular(file))):
            return None
        made = io.BytesIO(b"" if content is None else content.getvalue())
        made.seek(0 if content is None else content.tell())
        if is_a(file, io.TextIOBase):
            return io.TextIOWrapper(made, encoding=file.encoding, errors=file.errors, write_through=True)
    except (OSError, ValueError, AttributeError):
        return None
    return made


def _in_memory_below(file: Any) -> io.BytesIO | None:
    """The bytes in memory to which a file hands what it is given; None where the process prints to it."""
    if any(file is one for one in _printed_to()):
        return None
    below = getattr(file, "buffer", file)
    below = getattr(below, "raw", below)
    return below if type(below) is io.BytesIO else None


def iterator_state(iterator: Any) -> Any:
    """How far an iterator is, equal for as long as nobody has asked it for more; and what else C keeps for itself."""
    if is_a(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, _frozen(tuple(frame.f_locals.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that itertools will not be pickled one day
        try:
            return _frozen(iterator.__reduce__())
        except TypeError:
            return None


def _frozen(value: Any) -> Any:
    """Something that is equal as long as a value is the same: plain values by themselves, objects by which they are."""
    if is_a(value, (*PLAIN, range)):
        return repr(value)
    if is_a(value, tuple):
        return tuple(map(_frozen, value))
    if is_a(value, Iterator):
        return type(value), iterator_state(value)
    return tuple(map(id, value)) if is_a(value, list) else id(value)
