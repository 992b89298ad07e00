"""Snapshots of Python state: tables, attributes, tensors and caches as they were, and how each is put back.

NOTE [ No code of the user's ]
A class of the user's may count its lookups, raise in ``__iter__``, hand each name on to another object, or say that it
is another class (``__class__``). Looking at state runs none of that: kinds are told by `type`, containers are read by
the methods of the builtin kind that they derive from, and attributes by the descriptors of C.
"""

from __future__ import annotations

import array
import contextlib
import copy
import ctypes
import functools
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from jettison.core.objects import Same

MOST_BYTES = 1 << 24  # of an array that is put back
MOST_COPIED = 1 << 30  # of one that can be protected in no other way
MOST_SHARED = 4096  # bytes of a tensor that is put back although no op was seen to write to it
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
PLAIN_KINDS = frozenset(PLAIN)

Table = Any
"""A dict, a list, a set, a deque, a bytearray, or an array of numbers."""


MISSING = object()


class Place:
    """An attribute that lies in no table: what a cell of a closure holds, or a slot of an object."""

    __slots__ = ("holder", "name", "value")

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        self.value = attribute_of(holder, name)

    def unchanged(self) -> bool:
        """Whether it holds what it held."""
        now = attribute_of(self.holder, self.name)
        return now is self.value or is_equal(now, self.value)

    def put_back(self) -> None:
        """Hold that again."""
        self.put(self.value)

    def put(self, value: Any) -> None:
        """Hold another one."""
        with contextlib.suppress(AttributeError, TypeError):  # what C holds may refuse to be set
            if value is MISSING:
                object.__delattr__(self.holder, self.name)
            else:  # whatever the class makes of an assignment
                object.__setattr__(self.holder, self.name, value)


class TensorState:
    """What a tensor is beside its values: where they lie and how, its gradient, whether it wants one."""

    __slots__ = ("alias", "copy", "grad", "tensor", "wants")

    def __init__(self, tensor: Tensor) -> None:
        with _disable_current_modes():
            self.tensor, self.alias = tensor, tensor.detach()
            self.copy = _bytes_of(self.alias)
        self.wants = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        """Be that again."""
        tensor, alias = self.tensor, self.alias
        if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape or tensor.stride() != alias.stride():
            tensor.data = alias
        now = _bytes_of(alias)
        if now is not None and self.copy is not None and now != self.copy:
            ctypes.memmove(alias.data_ptr(), self.copy, len(self.copy))
        if tensor.is_leaf:
            if tensor.requires_grad is not self.wants:
                tensor.requires_grad_(self.wants)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


PLAIN_TENSORS = (Tensor, nn.Parameter)


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance`, whatever ``__class__`` says. See NOTE [ No code of the user's ]."""
    return issubclass(type(value), kinds)


def attributes_of(value: Any) -> Any:
    """The attributes of an object, past whatever its class makes of being asked; None where it has none."""
    read = _attributes_reader(Same(type(value)))
    return None if read is None else read(value)


@functools.lru_cache(maxsize=4096)
def _attributes_reader(kind: Same[type]) -> Callable[[Any], Any] | None:
    if issubclass(kind.it, threading.local):  # each thread has others
        return lambda value: threading.local.__getattribute__(value, "__dict__")
    found = (vars(cls).get("__dict__") for cls in kind.it.__mro__)
    descriptor = next((one for one in found if isinstance(one, _OF_C)), None)
    return None if descriptor is None else descriptor.__get__


_OF_C = (types.GetSetDescriptorType, types.MemberDescriptorType)
CONTAINERS = (OrderedDict, dict, list, set, deque, tuple, frozenset)
_EXACT_DICTS = (dict, OrderedDict)
_EXACT = frozenset((list, set, deque, tuple, frozenset))


def kind_of(container: Any) -> Any:
    """The builtin kind that a container's class derives from."""
    return next(kind for kind in (*CONTAINERS, bytearray) if is_a(container, kind))


def items_of(container: Any) -> Iterator[Any]:
    """Items of a container; of a dict, its values."""
    if type(container) in _EXACT:
        return iter(container)
    return iter(dict.values(container)) if is_a(container, dict) else kind_of(container).__iter__(container)


def size_of(container: Any) -> int:
    """Number of entries of a container."""
    if type(container) in _EXACT or type(container) in _EXACT_DICTS:
        return len(container)
    size: int = kind_of(container).__len__(container)
    return size


def _bytes_of(tensor: Tensor) -> bytes | None:
    """Of a small tensor on the CPU: numpy may write to it unseen. No tensor, which would count as memory of a step."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = extent * tensor.element_size()
    there = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()  # FSDP frees memory
    return ctypes.string_at(tensor.data_ptr(), size) if size <= min(MOST_SHARED, there) else None


def attribute_of(holder: Any, name: str) -> Any:
    try:
        return object.__getattribute__(holder, name)
    except (AttributeError, ValueError):  # a cell that nothing was assigned to says the latter
        return MISSING


TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor: Tensor, name: str) -> Any:
    found = getattr(tensor, name, None)
    return dict(found) if found else None


def put_hooks_back(tensor: Tensor, name: str, was: Any) -> None:
    table = getattr(tensor, name)
    if was is None and name == "_backward_hooks":
        tensor._backward_hooks = None
    elif table is None:
        setattr(tensor, name, OrderedDict(was))
    else:
        table.clear()
        table.update(was or {})


def is_array(value: Any) -> bool:
    """Whether it is numbers that can be written to, of numpy or of Python, and that are copied: few, or in memory of
    somebody else's (a tensor's), which numpy cannot make read-only for a time.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and is_a(value, numpy.ndarray):
        return bool(value.flags.writeable) and value.nbytes <= MOST_COPIED and not is_large_array(value)
    return is_a(value, array.array)


def is_number_array(value: Any) -> bool:
    """Whether it is numbers of numpy's or of Python's `array`."""
    numpy = sys.modules.get("numpy")
    return is_a(value, array.array) or (numpy is not None and is_a(value, numpy.ndarray))


def is_large_array(value: Any) -> bool:
    """Whether it is an array of numpy's that cannot be copied, and can be made read-only for a time."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not is_a(value, numpy.ndarray) or value.nbytes <= MOST_BYTES:
        return False
    base = value
    while is_a(base.base, numpy.ndarray):
        base = base.base
    return bool(value.flags.writeable) and (base.base is None or is_a(value, numpy.memmap))


# tables ---------------------------------------------------------------------------------------------------------------


def copy_of(table: Table) -> Any:
    if type(table) in _EXACT_DICTS:
        return dict(table)
    if is_array(table):
        return copy.copy(table) if is_a(table, array.array) else sys.modules["numpy"].array(table)
    if is_a(table, dict):
        return _copied_dict(table)
    if is_a(table, bytearray):
        return bytes(table)
    return frozenset(table) if is_a(table, set) else tuple(items_of(table))  # which takes over the hashes


def _copied_dict(table: dict[Any, Any]) -> dict[Any, Any]:
    if type(table) is not dict and type(table).__iter__ is not dict.__iter__:
        return dict(entries_of(table))
    return dict.copy(table)


def entries_of(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values in order, as they lie there: a class of one's own may make another value at each lookup."""
    if not is_a(table, OrderedDict):
        return list(dict.items(table))
    return [(key, dict.__getitem__(table, key)) for key in OrderedDict.__iter__(table)]


def is_unchanged(table: Table, before: Any) -> bool:
    if type(table) in _EXACT_DICTS:  # nearly always: in C
        if len(table) != len(before):
            return False
        if all(map(is_, table.values(), before.values())) and all(map(is_, table, before)):
            return True
    if is_number_array(table):
        return _form_of(table) == _form_of(before) and bool(table.tobytes() == before.tobytes())
    if size_of(table) != len(before):
        return False
    if is_a(table, bytearray):
        return bool(bytearray.__eq__(table, before))
    if is_a(table, set):
        return bool(set.__eq__(table, before))
    if is_a(table, OrderedDict):
        return all(
            a is c and (b is d or is_equal(b, d))
            for (a, b), (c, d) in zip(entries_of(table), before.items(), strict=True)
        )
    if not is_a(table, dict):
        return all(map(is_, items_of(table), before)) or all(map(_is_or_equals, items_of(table), before))
    if not all(map(is_, dict.keys(table), before)):
        return False
    pairs = dict.values(table), before.values()
    return all(map(is_, *pairs)) or all(map(_is_or_equals, *pairs))


def _is_or_equals(a: Any, b: Any) -> bool:
    return a is b or is_equal(a, b)


def is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and type(a) in PLAIN_KINDS and bool(a == b) and (a != 0 or repr(a) == repr(b))  # -0.0


def _form_of(array: Any) -> tuple[Any, ...]:
    """Shape, dtype and write flag of a NumPy array; Python's arrays have none."""
    return (array.shape, array.dtype, array.flags.writeable) if hasattr(array, "flags") else ()


def put_table_back(table: Table, before: Any) -> None:
    if is_number_array(table):
        if _form_of(table) != _form_of(before):
            table.flags.writeable = True
            table.resize(before.shape, refcheck=False)  # in place, as the run has: others may hold it
        table[() if getattr(table, "ndim", 1) == 0 else slice(None)] = before
        return
    if is_a(table, bytearray) and bytearray.__len__(table) == len(before):  # others may look at it, and hold its size
        bytearray.__setitem__(table, slice(None), before)
        return
    kind = kind_of(table)  # whatever the user's class makes of it
    if not issubclass(kind, dict):
        kind.clear(table)
        (kind.update if kind is set else kind.extend)(table, before)
        return
    for key in [key for key in kind.__iter__(table) if key not in before]:
        kind.__delitem__(table, key)
    if list(kind.__iter__(table)) != list(before):  # order counts; else no other thread finds it half full
        kind.clear(table)
    for key, value in before.items():
        if dict.get(table, key, MISSING) is not value:
            kind.__setitem__(table, key, value)


def with_changes(before: Any, start: Any, now: Any) -> Any:
    """A copy of a table with what changed between two later copies of it."""
    if is_a(before, dict):
        left = {key: value for key, value in before.items() if key in now or key not in start}
        return left | {key: value for key, value in now.items() if start.get(key, MISSING) is not value}
    if is_a(before, frozenset):
        return (before - (start - now)) | (now - start)
    if is_a(before, tuple) and len(now) >= len(start) and all(map(is_, now, start)):
        return before + now[len(start) :]
    return now
