"""What an argument is, beyond its type: a value that is equal for arguments that a forward cannot tell apart."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from typing import Any

from torch import Tensor, nn

from jettison.capture.python_state import slots_of
from jettison.capture.snapshots import PLAIN, entries_of
from jettison.capture.tensor_subclasses import plain, wrapping

DEEPEST = 8
MOST_BYTES = 4096  # of an array that is compared by its values


def described(value: Any) -> Any:
    """A hashable description: tensors by their metadata, plain values by themselves, objects by what they hold.

    Modules, types and what cannot be looked into (generators, files, objects of C) are known by their type alone.
    """
    return _described(value, 0, set())


def _described(value: Any, depth: int, above: set[int]) -> Any:
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value
    if isinstance(value, Tensor):
        return tensor_description(value)
    if isinstance(value, enum.Enum | type):
        return value
    if isinstance(value, nn.Module | types.ModuleType) or depth > DEEPEST or id(value) in above:
        return type(value)
    above = above | {id(value)}

    def inner(*values: Any) -> tuple[Any, ...]:
        return tuple([_described(v, depth + 1, above) for v in values])

    if isinstance(value, slice):
        return slice, inner(value.start, value.stop, value.step)
    if isinstance(value, list | tuple | deque):
        return type(value), inner(*value)
    if isinstance(value, dict):
        return type(value), tuple([(inner(k), inner(v)) for k, v in entries_of(value)])
    if isinstance(value, set | frozenset):
        return type(value), frozenset(inner(*value))
    if isinstance(value, functools.partial):
        return "partial", inner(value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (
            "method",
            value.__func__.__code__ if hasattr(value.__func__, "__code__") else type(value),
            inner(value.__self__),
        )
    if isinstance(value, types.FunctionType):
        return "function", value.__code__, inner(*_cells(value), value.__defaults__, value.__kwdefaults__)
    if isinstance(value, types.BuiltinFunctionType):
        return value
    array = _array(value)
    if array is not None:
        return array
    held = [getattr(value, name, None) for cls in type(value).__mro__ for name in slots_of(cls)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
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
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    found = numpy.asarray(value)
    values = found.tobytes() if found.nbytes <= MOST_BYTES and found.dtype != object else None
    return type(value), str(found.dtype), found.shape, values
