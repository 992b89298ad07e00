"""Deep copies of a model's structure: shared arrays, functions that close over modules, objects that refuse a copy."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.state_kinds import (
    CONTAINERS,
    PLAIN,
    OfTensor,
    attributes_of,
    is_lent,
    is_ours,
    items_of,
    looks_at,
    owner_of,
    span_of,
)
from jettison.capture.tensor_subclasses import memory_key, plain
from jettison.core.errors import JettisonError, UnsupportedModule
from jettison.core.objects import grouped

# objects that cannot or must not be copied ----------------------------------------------------------------------------
#
# A copy of an object with a finalizer releases, when it is freed, a resource that the original still needs: a
# directory, a handle, a file. Other objects refuse to be copied. A copy of a model shares all of these with the model.
#
# NOTE [ The walk runs no user code ]
# The walk asks the garbage collector for the referents of an object, and runs no code of the object's class:
# `__getattr__` may forward each name, `__class__` may be a property, `items()` may raise.

_COPIED_AS_IS = frozenset((*PLAIN, range, type(Ellipsis), type(NotImplemented)))
_NEVER_COPIED = (type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, weakref.ref)
"""Types that `copy.deepcopy` treats as constants."""
_NEVER_ENTERED = (
    *(types.ModuleType, types.FrameType, types.TracebackType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)
"""Types that it refuses, and which refer to much of the program."""


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Deep copy of a value that shares objects with a finalizer, and those that cannot be copied. ``memo``: by id of an
    original, its copy, as for `copy.deepcopy`; new copies are added. Raise `UnsupportedModule` if the value itself, or
    a module inside of it, refuses.
    """
    inside = share_finalized(value, memo)
    refused: Exception | None = None
    try:
        for share in (None, _what_refuses, _what_is_too_deep):  # most values can be copied as they are
            if share is not None:
                share(inside[:-1], memo)
            try:
                return _whole(value, memo)
            except JettisonError:
                raise
            except Exception as error:  # a class's own code may raise anything
                refused = error
        raise UnsupportedModule(
            f"planning runs a copy of the {type(value).__name__}, and `copy.deepcopy` refuses it: "
            f"{type(refused).__name__}: {refused}. Let it be copied, and hold what refuses in an object of its own"
        ) from refused
    finally:
        refused = None  # it references this frame, and the frames of a step around it: a cycle that keeps tensors alive


def share_finalized(value: Any, memo: dict[int, Any]) -> list[Any]:
    """Make a copy share objects with a finalizer. Returns all that the copy refers to, innermost first."""
    inside = _inside(value, memo)
    registered = dict(getattr(weakref.finalize, "_registry", {}))
    finalized = {id(info.weakref()) for info in registered.values()}
    for one in inside:
        kind = type(one)
        is_finalized = id(one) in finalized or issubclass(kind, weakref.finalize) or has_finalizer(kind)
        if is_finalized and one is not value and not issubclass(kind, nn.Module):
            memo[id(one)] = one
    return inside


def without_finalizers(model: nn.Module, memo: dict[int, Any]) -> list[tuple[nn.Module, nn.Module]]:
    """Modules whose class has a finalizer, and empty ones for their copies, which have none."""
    made: dict[type, Any] = {}  # blocks of one class stay of one class
    found: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        cls: Any = type(module)
        if has_finalizer(cls) and id(module) not in memo:
            if cls not in made:
                names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
                made[cls] = type(cls)(cls.__name__, (cls,), {"__del__": _nothing, **names})
            memo[id(module)] = made[cls].__new__(made[cls])
            found.append((module, memo[id(module)]))
    return found


def _nothing(_self: Any) -> None:
    """Finalizer of a copy: does nothing."""


def has_finalizer(cls: type) -> bool:
    """Whether Python runs a method of the class when an instance is freed. Types made in C are copied, or refuse."""
    run = next((vars(c)["__del__"] for c in cls.__mro__ if "__del__" in vars(c)), _nothing)
    return run is not _nothing and not isinstance(run, _METHODS_IN_C)


_METHODS_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)


def _inside(value: Any, memo: Mapping[int, Any]) -> list[Any]:
    """Objects that a deep copy copies, innermost first, itself last. See NOTE [ The walk runs no user code ]."""
    found: list[Any] = []
    seen: set[int] = set()
    left = [(value, False)]
    while left:
        one, is_done = left.pop()
        if is_done:
            found.append(one)
        elif id(one) not in seen and id(one) not in memo:
            seen.add(id(one))
            if type(one) in _COPIED_AS_IS or issubclass(type(one), _NEVER_COPIED):
                continue
            left.append((one, True))
            left += [(part, False) for part in _parts(one)]
    return found


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    ours = str(kind.__module__).startswith("jettison.") and not issubclass(kind, torch.optim.Optimizer)
    if ours or issubclass(kind, (Tensor, *_NEVER_ENTERED)):  # which copy themselves
        return []
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return list(numpy.ndarray.ravel(value)) if value.dtype.hasobject else []
    if has_finalizer(kind) and not issubclass(kind, nn.Module):
        return []
    return gc.get_referents(value)


def _whole(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that leaves nothing in `memo` if it fails."""
    known = dict(memo)
    made = copy.deepcopy(value, known)
    alive = known.pop(id(known), None)
    memo.update(known)
    memo.setdefault(id(memo), []).append(alive)  # so that no id is reused
    return made


def _what_refuses(inside: Sequence[Any], memo: dict[int, Any]) -> None:
    """Share objects that cannot be copied even if all their referents can."""
    known = {**memo, **{id(one): one for one in inside}}
    for one in inside:
        kind = type(one)
        is_leaf = issubclass(kind, Tensor) and one.is_leaf
        if id(one) in memo or is_leaf or kind in _STRUCTURES or issubclass(kind, nn.Module):
            continue
        del known[id(one)]
        try:
            copy.deepcopy(one, known)
        except Exception:
            memo[id(one)] = one
        known[id(one)] = one


_STRUCTURES = frozenset((list, dict, tuple, set, frozenset))


def _what_is_too_deep(inside: Sequence[Any], memo: dict[int, Any]) -> None:
    """Copy from within, so that no copy needs much of Python's stack, and share the rest."""
    for one in inside:
        if issubclass(type(one), nn.Module) or id(one) in memo:
            continue
        known: ChainMap[int, Any] = ChainMap({}, memo)  # a copy of `memo` for each would take quadratic time
        try:
            copy.deepcopy(one, known)  # type: ignore[arg-type]
        except RecursionError:
            if not any(issubclass(type(part), nn.Module) for part in _inside(one, memo)):  # modules must not be shared
                memo[id(one)] = one
        except Exception:  # because of a module inside of it
            continue
        else:
            alive = known.maps[0].pop(id(known), None)
            memo.update(known.maps[0])
            memo.setdefault(id(memo), []).append(alive)


def copy_arrays(model: nn.Module, tensors: Iterable[Tensor], memo: dict[int, Any]) -> None:
    """Copy a model's arrays that lie in other objects' memory into a memo of `copy.deepcopy`. Copies of arrays that
    share memory share it as well. Those in the memory of ``tensors`` are known by their owner, `OfTensor`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    seen: set[int] = set()
    attributes = (value for module in model.modules() for value in list(vars(module).values()))
    found = (one for value in attributes for one, _ in held_in(value, seen) if type(one) is numpy.ndarray)
    arrays = [one for one in {id(one): one for one in found}.values() if one.size and not one.dtype.hasobject]
    real = [t for t in map(plain, tensors) if memory_key(t) is not None] if arrays else []
    for parts in grouped((id(owner_of(one)), one) for one in arrays).values():
        of_tensor = any(is_lent(one) or any(looks_at(one, tensor) for tensor in real) for one in parts)
        if len(parts) == 1 and not of_tensor:
            continue
        spans = [span_of(one) for one in parts]
        start, end = min(first for first, _ in spans), max(last for _, last in spans)
        raw = numpy.frombuffer(bytearray(ctypes.string_at(start, end - start)), dtype=numpy.uint8)
        memory = numpy.asarray(OfTensor(raw)) if of_tensor else raw
        for one in parts:
            at = one.__array_interface__["data"][0] - start
            made = numpy.ndarray(one.shape, one.dtype, buffer=memory, offset=at, strides=one.strides)
            made.flags.writeable = one.flags.writeable
            memo[id(one)] = made


def held_in(value: Any, seen: set[int], *, ours: bool = True) -> Iterator[tuple[Any, bool]]:
    """Values in containers and in attributes of plain objects, each with whether an object holds it. Modules, tensors
    and code are not walked; objects of torch and of ours only with ``ours``.
    """
    left: list[tuple[Any, bool]] = [(value, False)]
    while left:  # iterative: deep nesting would need much of Python's stack
        one, in_object = left.pop()
        if issubclass(type(one), CONTAINERS):
            if id(one) not in seen:
                seen.add(id(one))
                left += [(item, in_object) for item in items_of(one)]
            continue
        yield one, in_object
        if id(one) in seen or issubclass(type(one), type | ModuleType | nn.Module | Tensor) or callable(one):
            continue
        if (ours or not is_ours(one)) and type(attributes := attributes_of(one)) is dict:
            seen.add(id(one))
            left.append((attributes, True))


# closures -------------------------------------------------------------------------------------------------------------
#
# Modules may hold functions that close over modules: a wrapper around the class's own forward. `copy.deepcopy` treats a
# function as a constant. On a copy of a model such a function would run the original modules, with their parameters.


def close_over_copies(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Make functions among the attributes of a model's copied modules close over the copies (by id of the original)."""
    for module in model.modules():
        attributes = vars(copies.get(id(module), module))
        if attributes is vars(module):
            continue
        for name, value in attributes.items():
            if isinstance(value, types.FunctionType | functools.partial):
                attributes[name] = _over_copies(value, copies, {})


def _over_copies(value: Any, copies: Mapping[int, Any], made: dict[int, Any]) -> Any:
    """A module's copy; a method of the copy; a function over copies; anything else. ``made``: functions, by id."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        own = _over_copies(value.__self__, copies, made)
        return value if own is value.__self__ else types.MethodType(value.__func__, own)
    if isinstance(value, functools.partial):
        function, *args = (_over_copies(one, copies, made) for one in (value.func, *value.args))
        named = {name: _over_copies(one, copies, made) for name, one in value.keywords.items()}
        own = (value.func, *value.args, *value.keywords.values())
        changes = any(a is not b for a, b in zip((function, *args, *named.values()), own, strict=True))
        return functools.partial(function, *args, **named) if changes else value
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in made:
        made[id(value)] = value
        cells = tuple(_cell(cell, copies, made) for cell in value.__closure__)
        if any(ours is not theirs for ours, theirs in zip(cells, value.__closure__, strict=True)):
            function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
            for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
                setattr(function, name, getattr(value, name))
            vars(function).update(vars(value))
            made[id(value)] = function
    return made[id(value)]


def _cell(cell: types.CellType, copies: Mapping[int, Any], made: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # an empty cell
        return cell
    own = _over_copies(content, copies, made)
    return cell if own is content else types.CellType(own)
