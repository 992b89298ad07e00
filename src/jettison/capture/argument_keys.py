"""What an argument is, beyond its type: a value that is equal for arguments that a forward cannot tell apart."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from typing import Any

from torch import Tensor, nn

from jettison.capture.contents import slots_of
from jettison.capture.snapshots import PLAIN, attribute_of, attributes_of, entries_of, is_a, items_of
from jettison.capture.tensor_subclasses import plain, wrapping

DEEPEST = 8
MOST_BYTES = 4096  # of an array that is compared by its values


def described(value: Any) -> Any:
    """A hashable description: tensors by their metadata, plain values by themselves, objects by what they hold.

    Modules, types and what cannot be looked into (generators, files, objects of C) are known by their type alone.
    """
    return _described(value, 0, set())


_ATOMS = frozenset(PLAIN) - {float}  # of which, exactly, there are most


def _described(value: Any, depth: int, above: set[int]) -> Any:
    if type(value) in _ATOMS:
        return type(value), value
    if is_a(value, PLAIN):
        return type(value), repr(value) if is_a(value, float) else value
    if is_a(value, Tensor):
        return tensor_description(value)
    if is_a(value, enum.Enum | type):
        return value
    if is_a(value, nn.Module | types.ModuleType) or depth > DEEPEST or id(value) in above:
        return type(value)
    above = above | {id(value)}

    def inner(*values: Any) -> tuple[Any, ...]:
        return tuple([_described(v, depth + 1, above) for v in values])

    if is_a(value, slice):
        return slice, inner(value.start, value.stop, value.step)
    if is_a(value, list | tuple | deque):
        return type(value), inner(*items_of(value))
    if is_a(value, dict):
        return type(value), tuple([(inner(k), inner(v)) for k, v in entries_of(value)])
    if is_a(value, set | frozenset):
        return type(value), frozenset(inner(*items_of(value)))
    if is_a(value, functools.partial):
        return "partial", inner(value.func, value.args, value.keywords)
    if is_a(value, types.MethodType):
        return (
            "method",
            value.__func__.__code__ if hasattr(value.__func__, "__code__") else type(value),
            inner(value.__self__),
        )
    if is_a(value, types.FunctionType):
        return "function", value.__code__, inner(*_cells(value), value.__defaults__, value.__kwdefaults__)
    if is_a(value, types.BuiltinFunctionType):
        return value
    array = _array(value)
    if array is not None:
        return array
    held = [attribute_of(value, name) for cls in type(value).__mro__ for name in slots_of(cls)]
    attributes = attributes_of(value)
    if is_a(attributes, dict):
        held.append(attributes)
    return type(value), inner(*held)


def tensor_description(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its values and its place in memory."""
    if tensor.__class__ is Tensor:  # of which there are most
        inner, wraps = tensor, None
    else:
        inner, wraps = plain(tensor), wrapping(tensor)
    return (
        inner.shape,
        inner.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.device.type,
        wraps,
        inner.is_conj(),
        inner.is_neg(),
    )


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(None)
    return found


def _array(value: Any) -> Any:
    """numpy's scalars and small arrays by their values, large arrays by their metadata; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not is_a(value, numpy.generic | numpy.ndarray):
        return None
    found = numpy.asarray(value)
    values = found.tobytes() if found.nbytes <= MOST_BYTES and found.dtype != object else None
    return type(value), str(found.dtype), found.shape, values
