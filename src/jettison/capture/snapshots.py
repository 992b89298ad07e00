"""What lies where: tables, attributes, tensors and caches as they were, and how each is put back."""

from __future__ import annotations

import array
import contextlib
import copy
import ctypes
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

MOST_BYTES = 1 << 24  # of an array that is put back
MOST_COPIED = 1 << 30  # of one that can be protected in no other way
MOST_SHARED = 4096  # bytes of a tensor that is put back although no op was seen to write to it
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)

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


def attributes_of(value: Any) -> Any:
    """The attributes of an object, as far as its class gives them out; None where it has none."""
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # of a `__getattribute__`
        return object.__getattribute__(value, "__dict__")


CONTAINERS = (list, tuple, set, frozenset, dict)


def items_of(container: Any) -> Iterable[Any]:
    """What a container holds, whatever its class makes of iterating."""
    base: Any = next(kind for kind in CONTAINERS if issubclass(type(container), kind))
    found: Iterable[Any] = dict.values(container) if base is dict else base.__iter__(container)
    return found


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
        return getattr(holder, name)
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
    if numpy is not None and isinstance(value, numpy.ndarray):
        return bool(value.flags.writeable) and value.nbytes <= MOST_COPIED and not is_large_array(value)
    return isinstance(value, array.array)


def is_number_array(value: Any) -> bool:
    """Whether it is numbers of numpy's or of Python's `array`."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, array.array) or (numpy is not None and isinstance(value, numpy.ndarray))


def is_large_array(value: Any) -> bool:
    """Whether it is an array of numpy's that cannot be copied, and can be made read-only for a time."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.nbytes <= MOST_BYTES:
        return False
    base = value
    while isinstance(base.base, numpy.ndarray):
        base = base.base
    return bool(value.flags.writeable) and (base.base is None or isinstance(value, numpy.memmap))


# tables ---------------------------------------------------------------------------------------------------------------


def copy_of(table: Table) -> Any:
    if is_array(table):
        return copy.copy(table) if isinstance(table, array.array) else sys.modules["numpy"].array(table)
    if isinstance(table, dict):
        return dict(table) if type(table) is dict else dict(entries_of(table))
    return bytes(table) if isinstance(table, bytearray) else tuple(table)


def entries_of(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values in order, as they lie there: a class of one's own may make another value at each lookup."""
    kind: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    return [(key, dict.__getitem__(table, key)) for key in kind.__iter__(table)]


def is_unchanged(table: Table, before: Any) -> bool:
    if is_array(table):
        return bool(table.tobytes() == before.tobytes())
    if len(table) != len(before):
        return False
    if isinstance(table, bytearray):
        return bool(table == before)
    if not isinstance(table, dict):
        if all(map(is_, table, before)):
            return True
    elif type(table) is dict and all(map(is_, table, before)) and all(map(is_, table.values(), before.values())):
        return True
    if isinstance(table, dict):
        return all(
            a is c and (b is d or is_equal(b, d))
            for (a, b), (c, d) in zip(entries_of(table), before.items(), strict=True)
        )
    if isinstance(table, set):
        return table == set(before)
    return all(a is b or is_equal(a, b) for a, b in zip(table, before, strict=True))


def is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b) and (a != 0 or repr(a) == repr(b))  # -0.0


def put_table_back(table: Table, before: Any) -> None:
    if is_array(table):
        table[() if getattr(table, "ndim", 1) == 0 else slice(None)] = before
        return
    if isinstance(table, bytearray) and len(table) == len(before):  # others may look at it, and then none is resized
        table[:] = before
        return
    kind: Any = next(kind for kind in _TABLES if isinstance(table, kind))  # whatever the user's class makes of it
    kind.clear(table)
    if issubclass(kind, dict):
        for key, value in before.items():
            kind.__setitem__(table, key, value)
    else:
        (kind.update if kind is set else kind.extend)(table, before)


_TABLES = (OrderedDict, dict, list, set, deque, bytearray)
