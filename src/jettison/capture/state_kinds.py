"""Kinds of Python state that a forward can change: reading, comparing and restoring each, and walking into it.

`state_of` is the table of kinds, `stand_in` returns what a run finds in place of an object that cannot be restored, and
`inside` yields the referents of a value. Nothing here walks: `reach.Reach` does.

NOTE [ No user code runs ]
A user's class may count its lookups, raise in ``__iter__``, forward each name to another object, or claim to be another
class (``__class__``). So kinds are told by `type`, containers are read by the methods of the builtin type that they
derive from, and attributes by C's descriptors.

NOTE [ Set aside ]
State of C objects is in no table of Python's: iterators, files, digests, queues. If it cannot be written back, the
object is set aside before a run that must change nothing: the run finds a copy of it, a file in memory for one that is
open for writing, or an `Untouchable`, which refuses by name before anything changes.
"""

from __future__ import annotations

import array
import contextlib
import copy
import copyreg
import csv
import ctypes
import decimal
import functools
import gc
import inspect
import io
import itertools
import os
import pickle
import random
import stat
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.bytecode_names import NEVER_INSIDE, function_reach, is_foreign, package_of
from jettison.capture.side_effects import asking
from jettison.capture.tensor_subclasses import reach_of
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

MOST_BYTES = 1 << 24  # of an array that is restored from a copy
MOST_COPIED = 1 << 30  # of one that can be protected in no other way
MOST_SHARED = 4096  # bytes of a tensor that is restored although no op was seen to write to it
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
PLAIN_KINDS = frozenset(PLAIN)
PLAIN_TENSORS = (Tensor, nn.Parameter)
CONTAINERS = (OrderedDict, dict, list, set, deque, tuple, frozenset)
MISSING = object()

# reading without user code --------------------------------------------------------------------------------------------


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance`, whatever ``__class__`` claims. See NOTE [ No user code runs ]."""
    return issubclass(type(value), kinds)


def attributes_of(value: Any) -> Any:
    """The attributes of an object, read without its class's code; None if it has none."""
    read = _attributes_reader(Same(type(value)))
    return None if read is None else read(value)


@functools.lru_cache(maxsize=4096)
def _attributes_reader(kind: Same[type]) -> Callable[[Any], Any] | None:
    if issubclass(kind.it, threading.local):  # per thread
        return lambda value: threading.local.__getattribute__(value, "__dict__")
    found = (vars(cls).get("__dict__") for cls in kind.it.__mro__)
    descriptor = next((one for one in found if isinstance(one, _DESCRIPTORS)), None)
    return None if descriptor is None else descriptor.__get__


_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)

_EXACT = frozenset((list, set, deque, tuple, frozenset))


def attribute_of(holder: Any, name: str) -> Any:
    """An attribute, slot or cell content; `MISSING` if it is empty."""
    try:
        return object.__getattribute__(holder, name)
    except (AttributeError, ValueError):  # an empty cell raises the latter
        return MISSING


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """Attribute names of a class's slots on its instances."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if is_a(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


@functools.lru_cache(maxsize=4096)
def slots_below(cls: Same[type]) -> tuple[str, ...]:
    """Slots of an object, and its ``__dict__``, which C may replace, as pydantic's validated assignments do."""
    whose = ((c, package_of(c)) for c in cls.it.__mro__)
    slots = [name for c, package in whose if package not in ("torch", "jettison") for name in slots_of(c)]
    if not cls.it.__dictoffset__ or is_foreign(cls.it.__module__) or issubclass(cls.it, nn.Module | threading.local):
        return tuple(slots)
    return (*slots, "__dict__")


def kind_of(container: Any) -> Any:
    """The builtin type that a container's class derives from."""
    return next(kind for kind in (*CONTAINERS, bytearray) if is_a(container, kind))


def items_of(container: Any) -> Iterator[Any]:
    """Items of a container; of a dict, its values."""
    if type(container) in _EXACT:
        return iter(container)
    return iter(dict.values(container)) if is_a(container, dict) else kind_of(container).__iter__(container)


def size_of(container: Any) -> int:
    if type(container) in _EXACT or type(container) in (dict, OrderedDict):
        return len(container)
    return kind_of(container).__len__(container)


def entries_of(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values in order, as stored: a user's class may make another value at each lookup."""
    if not is_a(table, OrderedDict):
        return list(dict.items(table))
    return [(key, dict.__getitem__(table, key)) for key in OrderedDict.__iter__(table)]


def _is_or_equals(a: Any, b: Any) -> bool:
    """Whether two values are one, or plain and equal; -0.0 is not 0.0."""
    if a is b:
        return True
    return type(a) is type(b) and type(a) in PLAIN_KINDS and bool(a == b) and (a != 0 or repr(a) == repr(b))


# tables and attributes ------------------------------------------------------------------------------------------------


class KeptState:
    """One piece of state that a forward may change, and its value at the last `read`.

    ``rank`` orders `put_back`: state whose restoring runs foreign code, or refuses, comes after all that it may read.
    """

    __slots__ = ("holder", "was")
    rank = 0

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.was = self.read()

    def read(self) -> Any:
        """Return the current state in a form that can be compared."""
        raise NotImplementedError

    def is_unchanged(self) -> bool:
        return bool(self.read() == self.was)

    def put_back(self) -> None:
        """Restore the state. Raises `UnsupportedModule` if that is impossible."""
        raise NotImplementedError

    def held(self) -> Iterable[tuple[Any, Any]]:
        """(where, value) of the values it held, if `put` can replace them."""
        return ()

    def put(self, where: Any, value: Any) -> None:
        """Store another value there."""

    def set_aside(self, instead: Callable[[Any], Any]) -> None:
        """Store, until `put_back`, what a run is to find instead of each value."""
        for where, value in self.held():
            if (new := instead(value)) is not value:
                self.put(where, new)

    def keep_changes(self, start: Any) -> None:
        """Accept changes since an earlier `read`, so that they are not undone."""


class TableState(KeptState):
    """A dict, list, set, deque, bytearray, or array of numbers; ``copied``: its copy, if one was made already."""

    __slots__ = ()

    def __init__(self, holder: Any, copied: Any = None) -> None:
        self.holder, self.was = holder, copy_of(holder) if copied is None else copied

    def is_unchanged(self) -> bool:
        return is_unchanged(self.holder, self.was)

    def put_back(self) -> None:
        """Restore it in place, past the methods of the user's class."""
        table, before = self.holder, self.was
        if is_number_array(table):
            if _form_of(table) != _form_of(before):
                table.flags.writeable = True
                table.resize(before.shape, refcheck=False)  # in place, as the run did: others may hold it
            table[() if getattr(table, "ndim", 1) == 0 else slice(None)] = before
            return
        if is_a(table, bytearray) and bytearray.__len__(table) == len(before):  # exported buffers fix its size
            bytearray.__setitem__(table, slice(None), before)
            return
        kind = kind_of(table)
        if not issubclass(kind, dict):
            kind.clear(table)
            (kind.update if kind is set else kind.extend)(table, before)
            return
        for key in [key for key in kind.__iter__(table) if key not in before]:
            kind.__delitem__(table, key)
        if list(kind.__iter__(table)) != list(before):  # order counts; unchanged, no other thread finds it half full
            kind.clear(table)
        for key, value in before.items():
            if dict.get(table, key, MISSING) is not value:
                kind.__setitem__(table, key, value)

    def held(self) -> Iterable[tuple[Any, Any]]:
        if is_a(self.was, dict):
            return self.was.items()
        return enumerate(self.was) if is_a(self.was, tuple) else ()

    def put(self, where: Any, value: Any) -> None:
        (dict if is_a(self.holder, dict) else kind_of(self.holder)).__setitem__(self.holder, where, value)

    def read(self) -> Any:
        return copy_of(self.holder)

    def keep_changes(self, start: Any) -> None:
        if is_unchanged(self.holder, start):
            return
        before, now = self.was, copy_of(self.holder)
        if is_a(before, dict):
            left = {key: value for key, value in before.items() if key in now or key not in start}
            self.was = left | {key: value for key, value in now.items() if start.get(key, MISSING) is not value}
        elif is_a(before, frozenset):
            self.was = (before - (start - now)) | (now - start)
        else:
            appended = is_a(before, tuple) and len(now) >= len(start) and all(map(is_, now, start))
            self.was = before + now[len(start) :] if appended else now


class AttributeState(KeptState):
    """An attribute outside of any table: the content of a closure's cell, or a slot of an object."""

    __slots__ = ("name",)

    def __init__(self, holder: Any, name: str) -> None:
        self.name = name
        super().__init__(holder)

    def read(self) -> Any:
        return attribute_of(self.holder, self.name)

    def is_unchanged(self) -> bool:
        return _is_or_equals(self.read(), self.was)

    def put_back(self) -> None:
        self.put(self.name, self.was)

    def held(self) -> Iterable[tuple[Any, Any]]:
        return ((self.name, self.was),)

    def put(self, where: str, value: Any) -> None:
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):  # C attributes may be read-only
            if value is MISSING:
                object.__delattr__(self.holder, where)
            else:  # runs the class's own code for an assignment
                object.__setattr__(self.holder, where, value)

    def keep_changes(self, start: Any) -> None:
        if (now := self.read()) is not start:
            self.was = now


class GlobalState(AttributeState):
    """A global that code mentions: one entry of a module's table."""

    __slots__ = ()

    def read(self) -> Any:
        return self.holder.get(self.name, MISSING)

    def put(self, where: str, value: Any) -> None:
        if value is not MISSING:
            self.holder[where] = value


class ClassState(KeptState):
    """Attributes of a class, except those that Python maintains itself."""

    def table(self) -> Any:
        return vars(self.holder)

    def read(self) -> Any:
        return dict(self.table())

    def counts(self, name: str) -> bool:
        """Whether a change under this name is restored."""
        return not (name.startswith("__") or name == "_abc_impl")

    def moved(self) -> list[str]:
        now, was = self.table(), self.was
        names = (name for name in {**was, **now} if self.counts(name))
        return [n for n in names if not _is_or_equals(now.get(n, MISSING), was.get(n, MISSING))]

    def is_unchanged(self) -> bool:
        return not self.moved()

    def put_back(self) -> None:
        for name in self.moved():
            self.put(name, self.was.get(name, MISSING))

    def held(self) -> Iterable[tuple[Any, Any]]:
        return self.was.items()

    def put(self, where: str, value: Any) -> None:
        if value is MISSING:
            delattr(self.holder, where)
        else:
            setattr(self.holder, where, value)


class Globals(ClassState):
    """The table of a module's globals. Submodules that were imported since stay."""

    def table(self) -> Any:
        return self.holder

    def counts(self, name: str) -> bool:
        return name in self.was or not isinstance(self.holder[name], types.ModuleType)

    def put(self, where: str, value: Any) -> None:
        if value is MISSING:
            del self.holder[where]
        else:
            self.holder[where] = value


def copy_of(table: Any) -> Any:
    """A copy of a table for comparison: dict, tuple, frozenset, bytes, or another array."""
    if type(table) in (dict, OrderedDict):
        return dict(table)
    if is_array(table):
        return copy.copy(table) if is_a(table, array.array) else sys.modules["numpy"].array(table)
    if is_a(table, dict):
        is_own = type(table) is not dict and type(table).__iter__ is not dict.__iter__
        return dict(entries_of(table)) if is_own else dict.copy(table)
    if is_a(table, bytearray):
        return bytes(table)
    return frozenset(table) if is_a(table, set) else tuple(items_of(table))  # which reuses the hashes


def is_unchanged(table: Any, before: Any) -> bool:
    """Whether a table has the same objects as its copy, in the same order."""
    if type(table) in (dict, OrderedDict):  # nearly always: in C
        if len(table) != len(before):
            return False
        if all(map(is_, table.values(), before.values())) and all(map(is_, table, before)):
            return True
    if is_number_array(table):
        return _form_of(table) == _form_of(before) and bool(table.tobytes() == before.tobytes())
    if size_of(table) != len(before):
        return False
    if is_a(table, (bytearray, set)):
        return bool(kind_of(table).__eq__(table, before))
    if is_a(table, dict):
        pairs = zip(entries_of(table), before.items(), strict=True)
        return all(a is c and _is_or_equals(b, d) for (a, b), (c, d) in pairs)
    now = list(items_of(table))
    return all(map(is_, now, before)) or all(map(_is_or_equals, now, before))


def _form_of(array: Any) -> tuple[Any, ...]:
    """Shape, dtype and write flag of a NumPy array; Python's arrays have none."""
    return (array.shape, array.dtype, array.flags.writeable) if hasattr(array, "flags") else ()


# tensors and arrays ---------------------------------------------------------------------------------------------------


class TensorState(KeptState):
    """State of a tensor besides its values: memory, layout, gradient, requires_grad.

    And the values of a small one on the CPU: numpy may write to it unseen. They are not kept as a tensor, which would
    count as memory of a step.
    """

    __slots__ = ("alias", "grad", "wants")

    def __init__(self, tensor: Tensor) -> None:
        self.wants = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None
        with _disable_current_modes():
            self.alias = tensor.detach()
            super().__init__(tensor)

    def read(self) -> Any:
        tensor = self.alias
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        size = reach_of(tensor.shape, tensor.stride()) * tensor.element_size()
        there = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()  # FSDP frees memory
        return ctypes.string_at(tensor.data_ptr(), size) if size <= min(MOST_SHARED, there) else None

    def is_unchanged(self) -> bool:
        return False  # `put_back` checks each part

    def put_back(self) -> None:
        tensor, alias = self.holder, self.alias
        if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape or tensor.stride() != alias.stride():
            tensor.data = alias
        now = self.read()
        if now is not None and self.was is not None and now != self.was:
            ctypes.memmove(alias.data_ptr(), self.was, len(self.was))
        if tensor.is_leaf:
            if tensor.requires_grad is not self.wants:
                tensor.requires_grad_(self.wants)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookState(KeptState):
    def read(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return [hooks_of(self.holder, name) for name in TENSOR_HOOKS]

    def put_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, was, now in zip(TENSOR_HOOKS, self.was, self.read(), strict=True):
                if now == was:
                    continue
                if was is None and name == "_backward_hooks":
                    self.holder._backward_hooks = None
                elif (table := getattr(self.holder, name)) is None:
                    setattr(self.holder, name, OrderedDict(was))
                else:
                    table.clear()
                    table.update(was or {})


def hooks_of(tensor: Tensor, name: str) -> Any:
    """A copy of one of a tensor's tables of hooks; None for an empty one."""
    found = getattr(tensor, name, None)
    return dict(found) if found else None


class ReadOnly(KeptState):
    """An array of numpy's that is too large to be copied: it is read-only for a run."""

    def __init__(self, holder: Any) -> None:
        super().__init__(holder)
        self.rank, base = 0, holder.base
        while is_number_array(base):  # a view only becomes writable after its base
            self.rank, base = self.rank + 1, base.base

    def read(self) -> Any:
        return self.holder.flags.writeable

    def put_back(self) -> None:
        self.holder.flags.writeable = True

    def set_aside(self, instead: Callable[[Any], Any]) -> None:
        self.holder.flags.writeable = False


def is_number_array(value: Any) -> bool:
    """Whether it holds numbers of numpy's or of Python's `array`."""
    numpy = sys.modules.get("numpy")
    return is_a(value, array.array) or (numpy is not None and is_a(value, numpy.ndarray))


def is_array(value: Any) -> bool:
    """Whether it is a writable array, of numpy or of Python, that is copied: small, or in another object's memory (a
    tensor's), which numpy cannot make read-only for a time.
    """
    if not is_number_array(value) or is_a(value, array.array):
        return is_a(value, array.array)
    return bool(value.flags.writeable) and value.nbytes <= MOST_COPIED and not is_large_array(value)


def is_large_array(value: Any) -> bool:
    """Whether it is a numpy array that is too large to copy, and can be made read-only for a time."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not is_a(value, numpy.ndarray) or value.nbytes <= MOST_BYTES:
        return False
    base = value
    while is_a(base.base, numpy.ndarray):
        base = base.base
    return bool(value.flags.writeable) and (base.base is None or is_a(value, numpy.memmap))


# Arrays in the memory of tensors, or of each other (`tensor.numpy()`, `torch.from_numpy`, slices): an assignment to
# such an array changes the tensor, and no op reports it.


def span_of(value: Any) -> tuple[int, int]:
    """Start and end address of an array's memory."""
    if isinstance(value, array.array):
        start, count = value.buffer_info()
        return start, start + count * value.itemsize
    start = end = value.__array_interface__["data"][0]
    if not value.size:
        return start, end
    for count, stride in zip(value.shape, value.strides, strict=True):
        start, end = start + min(0, (count - 1) * stride), end + max(0, (count - 1) * stride)
    return start, end + value.itemsize


def looks_at(value: Any, tensor: Tensor) -> bool:
    """Whether an array lies in the memory of a tensor, as ``tensor.numpy()`` does."""
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    first, (start, end) = storage.data_ptr(), span_of(value)
    return first < end and start < first + storage.nbytes()


class OfTensor:
    """Memory of a tensor's copy: arrays in it are known by it (see `is_lent`)."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def __array_interface__(self) -> Any:
        return self.raw.__array_interface__


def owner_of(value: Any) -> Any:
    """Owner of a numpy array's memory: the array that all are views of, or another object."""
    numpy: Any = sys.modules["numpy"]
    while True:
        base = value.obj if isinstance(value, memoryview) else value.base
        if base is None or not isinstance(base, numpy.ndarray | memoryview):
            return value if base is None else base
        value = base


def is_lent(value: Any) -> bool:
    """Whether an array lies in memory that a tensor has given away."""
    owner = owner_of(value) if hasattr(value, "__array_interface__") else None
    return isinstance(owner, Tensor | OfTensor) or type(owner).__name__ == "PyCapsule"


# random generators ----------------------------------------------------------------------------------------------------


def is_stream(value: Any) -> bool:
    """Whether a value is a random generator with a state of its own."""
    numpy = sys.modules.get("numpy.random")
    if is_a(value, random.SystemRandom):
        return False  # has no state
    return is_a(value, random.Random | torch.Generator) or (
        numpy is not None and is_a(value, numpy.Generator | numpy.RandomState | numpy.BitGenerator | numpy.SeedSequence)
    )


class StreamState(KeptState):
    def read(self) -> Any:
        stream = self.holder
        if is_a(stream, random.Random):
            return stream.getstate()
        if is_a(stream, torch.Generator):
            return bytes(stream.get_state().tolist())
        bits, seed = self._of_numpy()
        drawn = None if bits is None else bits.state if hasattr(bits, "random_raw") else bits.get_state(legacy=False)
        return pickle.dumps((drawn, None if seed is None else seed.state))

    def put_back(self) -> None:
        stream = self.holder
        if is_a(stream, random.Random):
            stream.setstate(self.was)
        elif is_a(stream, torch.Generator):
            stream.set_state(torch.tensor(list(self.was), dtype=torch.uint8))
        else:
            bits, seed = self._of_numpy()
            drawn, spawned = pickle.loads(self.was)
            if hasattr(bits, "random_raw"):
                bits.state = drawn
            elif bits is not None:
                bits.set_state(drawn)
            if seed is not None and seed.state != spawned:
                seed.__init__(**spawned)  # no other way sets the number of its children

    def _of_numpy(self) -> tuple[Any, Any]:
        """Source of numpy's draws, and its seed sequence, which gives each child that it spawns another number."""
        sequence = sys.modules["numpy.random"].SeedSequence
        if is_a(self.holder, sequence):
            return None, self.holder
        bits = getattr(self.holder, "bit_generator", self.holder)
        seed = getattr(bits, "seed_seq", None)
        return bits, seed if is_a(seed, sequence) else None


# functions under `functools.lru_cache` --------------------------------------------------------------------------------


class CacheState(KeptState):
    """A cached function, and its cache.

    A full cache forgets an entry for each new one, and its table is C's: nothing can be written into it from outside.
    So a cache that was called is filled again: it is cleared, and called once for each old entry while the function's
    code returns the cached result. Its counts of hits and misses begin again.
    """

    rank = 1_000  # comparing its keys runs user code

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._held = gc.get_referents(function)  # a bounded cache gives keys and results, the oldest first
        self._table = dict(self._table_among(self._held))

    def read(self) -> Any:
        return self.holder.cache_info()

    def _table_among(self, held: list[Any]) -> dict[Any, Any]:
        return next((t for t in held if type(t) is dict and t is not vars(self.holder)), {})

    def entries(self) -> list[tuple[Any, Any]]:
        """(key, result) of all cached calls."""
        if self.was.maxsize is None:
            return list(self._table.items())
        keys = set(map(id, self._table))
        held = iter(self._held)
        return [(one, next(held)) for one in held if id(one) in keys]

    def put_back(self) -> None:
        code = getattr(self.holder, "__wrapped__", None)
        code = getattr(code, "__func__", code)
        table = self._table_among(gc.get_referents(self.holder))
        if isinstance(code, types.FunctionType):
            self._fill(code)
        elif self.was.maxsize is None:  # keys and results are the table's own
            table.clear()
            table.update(self._table)
        elif any(key not in table for key in self._table):
            raise UnsupportedModule(
                f"{self.holder!r} is cached (lru_cache) and full, and the forward has made it forget an entry that "
                "cannot be put back. Give the cache a larger maxsize, or wrap a function of your own around what it "
                "caches"
            )
        else:
            for key in set(table) - set(self._table):
                del table[key]

    def _fill(self, code: Any) -> None:
        function, entries = self.holder, self.entries()
        function.cache_clear()
        mark = next((held for held in self._held if type(held) is object), None)  # between arguments and keywords
        own = code.__code__
        try:
            for key, result in entries:
                args, kwargs = _arguments(key, mark, typed=function.cache_parameters()["typed"])
                constants = tuple(result if one == _RESULT else one for one in _TAKES_ANYTHING.__code__.co_consts)
                code.__code__ = _TAKES_ANYTHING.__code__.replace(co_consts=constants, co_freevars=own.co_freevars)
                function(*args, **kwargs)
        finally:
            code.__code__ = own


def _arguments(key: Any, mark: Any, *, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that has this key: arguments, a mark, keywords in turn with their values, and types if typed."""
    if not isinstance(key, tuple):
        return (key,), {}
    at = next((i for i, part in enumerate(key) if part is mark), None)
    if at is None:
        return (key[: len(key) // 2] if typed else key), {}
    named = key[at + 1 : at + 1 + 2 * ((len(key) - 2 * at - 1) // 3)] if typed else key[at + 1 :]
    return key[:at], dict(zip(named[::2], named[1::2], strict=True))


_RESULT = "the result"
_TAKES_ANYTHING: Callable[..., Any] = lambda *_args, **_kwargs: "the result"  # noqa: E731

# C state that can be written back -------------------------------------------------------------------------------------


class MemoryState(KeptState):
    """Bytes of an object's buffer. A buffer too large to be copied has a digest of parts instead."""

    rank = 2_000

    def read(self) -> bytes | int | None:
        try:
            with memoryview(self.holder) as view:
                if view.nbytes <= MOST_BYTES or not view.c_contiguous:
                    return view.tobytes()
                with view.cast("B") as flat:
                    step = max(len(flat) // 256, 4096)
                    return functools.reduce(
                        lambda sofar, at: zlib.crc32(flat[at : at + 4096], sofar), range(0, len(flat), step), 1
                    )
        except (TypeError, ValueError, BufferError):
            return None

    def put_back(self) -> None:
        now = self.read()
        if isinstance(self.was, int):
            raise UnsupportedModule(
                f"the forward writes to the memory of a {type(self.holder).__name__} that outlives it and is larger "
                f"than the {MOST_BYTES} bytes that are put back after planning. Count in an attribute or a buffer "
                "instead, and make this memory again before you train"
            )
        if isinstance(now, bytes) and isinstance(self.was, bytes) and len(now) == len(self.was):
            with memoryview(self.holder) as view, view.cast("B") as flat:
                flat[:] = self.was


_LENDS: dict[type, bool] = {}


def _lends_memory(value: Any) -> bool:
    """Whether others may write to an object's memory, as to that of `ctypes`, `mmap`, shared memory."""
    if _LENDS.get(kind := type(value), True):
        try:
            with memoryview(value) as view:
                _LENDS[kind] = True
                return not view.readonly and view.nbytes > 0 and kind is not memoryview
        except (TypeError, ValueError, BufferError):  # no buffer; released or closed by now
            _LENDS.setdefault(kind, False)
    return False


def _is_read(file: Any) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return is_of_c(file) and _is_regular(file) and file.readable() and not file.writable()
    return False


def _is_regular(file: Any) -> bool:
    """Whether it is a file on a disk, not a terminal, a pipe, or the process's output."""
    if file.closed or any(file is one for one in _printed_to()):
        return False
    number = file.fileno()
    return number > 2 and stat.S_ISREG(os.fstat(number).st_mode)


def is_of_c(file: Any) -> bool:
    """Whether the methods of a file are C's: asking a Python one for its number may change it."""
    return not isinstance(getattr(type(file), "fileno", None), types.FunctionType)


def _printed_to() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


class Progress(KeptState):
    """Position of a C iterator, equal as long as it is not advanced. It cannot be restored."""

    rank = 3_000

    def read(self) -> Any:
        return iterator_state(self.holder)

    def put_back(self) -> None:
        raise UnsupportedModule(
            f"the forward takes from a {type(self.holder).__name__} that it is given or that outlives it. Planning "
            "and recording run the forward once more, and that cannot be put back: give it the item itself, count "
            "in an attribute, or index a list, instead"
        )


def is_iterator_of_c(value: Any) -> bool:
    """Whether it is an iterator that has neither a table nor slots."""
    return is_a(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def iterator_state(iterator: Any) -> Any:
    """Position of an iterator, and other hidden C state, in a form that can be compared."""
    if is_a(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, _frozen(tuple(frame.f_locals.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools deprecates pickling
        try:
            return _frozen(iterator.__reduce__())
        except TypeError:
            return None


def _frozen(value: Any) -> Any:
    """A value that is equal as long as another is the same: plain values by equality, objects by identity."""
    if is_a(value, (*PLAIN, range)):
        return repr(value)
    if is_a(value, tuple):
        return tuple(map(_frozen, value))
    if is_a(value, Iterator):
        return type(value), iterator_state(value)
    return tuple(map(id, value)) if is_a(value, list) else id(value)


# the table of kinds ---------------------------------------------------------------------------------------------------


def _is_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: is_a(value, kinds)


KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], KeptState | None]], ...] = (
    (is_stream, StreamState),
    (is_iterator_of_c, Progress),
    (is_large_array, ReadOnly),
    (_is_of(dict, list, set, deque, bytearray), TableState),
    (is_array, TableState),
    (_is_of(functools._lru_cache_wrapper), CacheState),
    (_lends_memory, MemoryState),
)
"""By kind, its restorable state. The first that fits counts."""


def state_of(value: Any) -> KeptState | None:
    """State of an object that can be compared, and mostly restored; None if it has none of these kinds."""
    return next((kind(value) for fits, kind in KINDS if fits(value)), None)


# objects that are set aside -------------------------------------------------------------------------------------------


class Untouchable:
    """Stands for an object that cannot be restored, and refuses to be used."""

    def __init__(self, kind: str, value: Any) -> None:
        self._kind, self._value, self._thread = kind, value, threading.get_ident()
        self._told: list[UnsupportedModule] = []

    def tell(self, refused: list[UnsupportedModule]) -> None:
        """Leave errors there as well: code around may catch the exception, and go on."""
        self._told = refused

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._told.append(
            UnsupportedModule(
                f"the forward takes from a {self._kind} that outlives it, or adds to it. Planning and recording run "
                f"the forward once more, and a {self._kind} cannot be put back, so it has not been touched: count in "
                "an attribute, index a list, or use it outside of the forward, instead"
            )
        )
        raise self._told[-1]

    __next__ = __call__ = __len__ = __bool__ = __getitem__ = __setitem__ = __enter__ = _refuse

    def __exit__(self, *_: object) -> None:
        """Never entered."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:  # another thread, which goes on meanwhile
            return getattr(self._value, name)
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __deepcopy__(self, _memo: Any) -> Untouchable:
        return self


def stand_in(value: Any) -> Any:
    """Stand-in for an object with changing C state; None if a run may use the object itself."""
    kind = Same(type(value))
    name = f"{type(value).__module__}.{type(value).__name__}"
    if is_a(value, io.StringIO | io.BytesIO | decimal.Context):
        return None if getattr(value, "closed", False) else copy.copy(value)
    if (instead := asking(value)) is not None:
        return instead
    if is_a(value, io.IOBase) and not refuses_a_copy(kind):
        return Untouchable(f"file ({getattr(value, 'name', name)})", value) if _is_read(value) else _scratch(value)
    if is_a(value, types.GeneratorType):
        return Untouchable("generator", value)
    if type(value) is CSV_WRITER:
        return _another_writer(value)
    if is_outside(kind):
        return Untouchable(name, value)
    if is_iterator_of_c(value):
        try:
            return copied_iterator(value)
        except TypeError:
            return Untouchable(type(value).__name__, value)
    if adds_up(kind):
        return value.copy()
    return Untouchable(name, value) if refuses_a_copy(kind) else copied_whole(value)


_OUTSIDE = frozenset(
    (
        *("sqlite3.Connection", "sqlite3.Cursor", "socket.socket", "subprocess.Popen", "greenlet.greenlet"),
        *("multiprocessing.connection.Connection", "multiprocessing.connection.Client"),
        *("torch.profiler.profiler.profile", "torch.utils.tensorboard.writer.SummaryWriter"),
        *("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", "queue.Queue", "_queue.SimpleQueue"),
        *("multiprocessing.synchronize.Semaphore", "multiprocessing.synchronize.Condition"),
        "multiprocessing.synchronize.Event",
    )
)
"""Kinds of objects that access databases, files, other programs, processes and threads, or run by themselves."""


@functools.lru_cache(maxsize=4096)
def is_outside(kind: Same[type]) -> bool:
    """Whether instances access the world outside of Python, or run by themselves."""
    return any(f"{c.__module__}.{c.__qualname__}" in _OUTSIDE for c in kind.it.__mro__)


def copied_iterator(iterator: Any) -> Any:
    """An iterator at the same position; both can advance independently. Raises `TypeError` if it cannot be copied."""
    if is_a(iterator, types.GeneratorType) or not is_iterator_of_c(iterator):
        raise TypeError(type(iterator).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools deprecates pickling
        make, given, *state = iterator.__reduce__()
        made = make(*_with_copies(given))
        if state and state[0] is not None:
            made.__setstate__(_with_copies(state[0]))
    return made


def _with_copies(value: Any) -> Any:
    if is_a(value, tuple):
        return tuple(map(_with_copies, value))
    return copied_iterator(value) if is_a(value, Iterator) else value


CSV_WRITER = type(csv.writer(io.StringIO()))


def _another_writer(writer: Any) -> Any:
    """A row writer over the stand-in for a writer's file, of which C only exposes the method."""
    method = next(one for one in gc.get_referents(writer) if callable(one) and not is_a(one, type))
    file = getattr(method, "__self__", None)
    instead = None if file is None else stand_in(file)
    to = types.SimpleNamespace(write=method if instead is None else instead.write)
    return csv.writer(to, dialect=writer.dialect)


def _scratch(file: Any) -> Any:
    """A file in memory for one on a disk that is open for writing, or for a C one over bytes in memory."""
    if not is_of_c(file):
        return None  # made in Python: its underlying file is found by its attributes
    try:
        below = getattr(file, "buffer", file)
        below = getattr(below, "raw", below)
        is_in_memory = type(below) is io.BytesIO and all(file is not one for one in _printed_to())
        content = below if is_in_memory else None
        if not (file.writable() and (content is not None or _is_regular(file))):
            return None
        made = io.BytesIO(b"" if content is None else content.getvalue())
        made.seek(0 if content is None else content.tell())
        if is_a(file, io.TextIOBase):
            return io.TextIOWrapper(made, encoding=file.encoding, errors=file.errors, write_through=True)
    except (OSError, ValueError, AttributeError):
        return None
    return made


# Types made in C. One of Python's or NumPy's that refuses to be copied, and changes as it is used, is refused by name:
# a `csv.reader` has advanced, a `pickle.Pickler` remembers what it wrote, a compressor its input.

_STAYS_THE_SAME = frozenset(
    (
        *("_abc", "_asyncio", "_contextvars", "_ctypes", "_io", "_json", "_multiprocessing", "_queue", "_random"),
        *("_socket", "_ssl", "_struct", "_thread", "_weakref", "builtins", "itertools", "mmap", "posix", "select"),
        *("types", "unicodedata", "nt"),
    )
)
"""C modules whose types, if they refuse a copy, synchronise, describe, never change, or are known to `state_of`."""
_KNOWN_LIBRARIES = ("torch", "numpy", "jettison", "triton")
_KNOWN_IN_C = sys.stdlib_module_names | set(_KNOWN_LIBRARIES)
_METHODS_OF_C = ("wrapper_descriptor", "method_descriptor", "instancemethod", "cython_function_or_method")
"""Type names of their methods; the last two are those of pybind11 and of Cython."""
_OF_XML = ("Element",)
_TRACKED = 1 << 14
"""Flag of a class in C: the garbage collector traverses its instances."""


@functools.lru_cache(maxsize=4096)
def refuses_a_copy(kind: Same[type]) -> bool:
    """Whether instances of a C type change as they are used, and can be neither copied nor restored."""
    cls, made_by = kind.it, str(kind.it.__module__)
    if made_by == "numpy" and cls.__name__ == "flatiter":
        return True
    streams = (inspect.getattr_static(cls, name, None) for name in ("write", "tell"))  # in C: those of Arrow
    is_stream = all(one is not None and not isinstance(one, types.FunctionType) for one in streams)
    if is_stream and package_of(cls) not in _KNOWN_IN_C:
        return True
    if made_by in _STAYS_THE_SAME or made_by not in sys.stdlib_module_names:
        return False
    if str(getattr(sys.modules.get(made_by), "__file__", "")).endswith(".py"):
        return False
    ways = (*(getattr(cls, name, None) for name in ("__copy__", "__deepcopy__")), copyreg.dispatch_table.get(cls))
    tables: tuple[Any, ...] = (copy._deepcopy_dispatch, copy._copy_dispatch)  # type: ignore[attr-defined]
    if any(way is not None for way in ways) or any(cls in table for table in tables):
        return False
    return all(getattr(cls, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


@functools.lru_cache(maxsize=4096)
def adds_up(kind: Same[type]) -> bool:
    """Whether instances of a C type accumulate their input, and offer a copy: digests, and compressors of `zlib`."""
    names = ("copy",) if kind.it.__module__ == "zlib" else ("copy", "update", "digest")
    return all(type(getattr(kind.it, name, None)) is types.MethodDescriptorType for name in names)


def copied_whole(value: Any) -> Any:
    """A deep copy of an object with hidden C state; None if it has none, or refuses."""
    kind = type(value)
    # the garbage collector knows the referents of instances: a copy of a container may have the same values
    is_looked_into = bool(kind.__flags__ & _TRACKED) and kind.__name__ not in _OF_XML
    if not is_copied_whole(Same(kind)):
        return None
    try:
        return copy.copy(value) if is_looked_into else copy.deepcopy(value)
    except Exception:  # a library's own code may raise anything
        return None


@functools.lru_cache(maxsize=4096)
def is_copied_whole(kind: Same[type]) -> bool:
    """Whether instances of a C type change unnoticed: it sets items or a state, and cannot be a hash key."""
    hashes: Any = kind.it.__hash__
    if not (hashes is None or hashes is object.__hash__) or issubclass(kind.it, BaseException):
        return False
    return any(_is_of_an_extension(kind.it, name) for name in ("__setstate__", "__setitem__"))


def _is_of_an_extension(cls: type, name: str) -> bool:
    """Whether a method is C's, and of no library whose types are known."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    if owner is None or type(vars(owner)[name]).__name__ not in _METHODS_OF_C:
        return False
    package = package_of(owner)
    return owner.__name__ in _OF_XML if package in sys.stdlib_module_names else package not in _KNOWN_LIBRARIES


# contents -------------------------------------------------------------------------------------------------------------

_ATOMS = frozenset((*PLAIN, range, types.ModuleType))
_OPENED = frozenset((tuple, frozenset))


def worth_a_look(values: Iterable[Any]) -> list[Any]:
    """Values that may change, or lead to some that may: all except plain values, with tuples opened."""
    found: list[Any] = []
    left = list(values)
    for level in itertools.count():
        kinds = set(map(type, left))
        if kinds <= _ATOMS:
            break
        if kinds.isdisjoint(_OPENED):
            found += [value for value in left if type(value) not in _ATOMS]
            break
        found += [value for value in left if type(value) not in _OPENED and type(value) not in _ATOMS]
        left = [value for value in left if type(value) in _OPENED]
        if level > 1:  # tuples may hold each other many times over
            left = list({id(value): value for value in left}.values())
        left = list(itertools.chain.from_iterable(left))
    return found


_OPEN_TO_GC: tuple[type, ...] = (
    *(types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())),
    *(ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._Pointer, ctypes._SimpleCData, CSV_WRITER),
)
"""Types whose referents only the garbage collector knows."""


def inside(value: Any) -> Iterator[Any]:
    """Values that a value holds, refers to, or names."""
    if is_a(value, dict):
        yield from worth_a_look(dict.keys(value))
        yield from worth_a_look(dict.values(value))
        yield vars(defaultdict)["default_factory"].__get__(value) if is_a(value, defaultdict) else None
    elif is_a(value, CONTAINERS):
        yield from worth_a_look(items_of(value))
    elif is_a(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif is_a(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
        yield value.__self__
    elif is_a(value, weakref.ref):
        yield weakref.ref.__call__(value)
    elif is_a(value, weakref.ProxyTypes):  # which forwards every name
        yield getattr(value.__init__, "__self__", None)
    elif is_a(value, _OPEN_TO_GC) or is_iterator_of_c(value):
        yield from worth_a_look(gc.get_referents(value))
    elif is_a(value, memoryview):
        yield value.obj
    elif is_number_array(value):
        yield getattr(value, "base", None)
        has_objects = getattr(getattr(value, "dtype", None), "hasobject", False)
        yield from worth_a_look(value.ravel().tolist() if has_objects else ())
    elif is_extension(Same(type(value))):
        yield from (v for v in worth_a_look(gc.get_referents(value)) if not is_a(v, NEVER_INSIDE))
    elif is_a(value, property):
        yield from filter(None, (value.fget,))
    elif is_a(value, staticmethod | classmethod):
        yield value.__func__
    elif is_a(value, types.FunctionType):
        yield from function_reach(value)


@functools.lru_cache(maxsize=4096)
def is_simple(cls: Same[type]) -> bool:
    """Whether instances of a class have only attributes or slots: the class and all its bases are made in Python."""
    if str(cls.it.__module__).startswith(("torch", "jettison")) or is_copied_whole(cls):
        return False
    return all(_is_made_in_python(c) for c in cls.it.__mro__ if c is not object)


@functools.lru_cache(maxsize=4096)
def is_extension(cls: Same[type]) -> bool:
    """Whether an unknown library made a base of the class in C: it refers to values outside of attributes and slots."""
    return any(not (_is_made_in_python(c) or package_of(c) in _KNOWN_IN_C) for c in cls.it.__mro__)


def _is_made_in_python(cls: type) -> bool:
    return "__dict__" in vars(cls) or "__slots__" in vars(cls)


_MODELS_OWN = (
    *("torch.optim", "torch.amp.grad_scaler", "torch.utils.data", "torch.quasirandom", "torch._library.custom_ops"),
)


def is_ours(value: Any) -> bool:
    """Whether a value is a tracer's or a runtime's own object, which replaces forwards and hooks: its notes must stay,
    and so must torch's own; modules and random generators, torch's as well, are the model's.
    """
    kind: Any = type(value)
    if issubclass(kind, nn.Module) or is_stream(value):
        return False
    module = str(kind.__module__)  # a property in some classes
    if module.startswith(_MODELS_OWN):
        return False
    if module.startswith(("torch.", "jettison.")):
        return True
    if issubclass(kind, types.FunctionType | types.MethodType | type):
        return str(value.__module__).startswith("jettison.")
    attributes = attributes_of(value)
    return is_a(attributes, dict) and str(attributes.get("__module__")).startswith("jettison.")
