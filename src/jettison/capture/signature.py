"""Signatures of calls: arguments, modes and settings under which a recorded program is valid."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jettison.capture.pytrees import tree_flatten, tree_shape, tree_unflatten
from jettison.capture.side_effects import KERNEL_SWITCHES
from jettison.capture.state_kinds import PLAIN, attribute_of, attributes_of, entries_of, is_a, items_of, slots_of
from jettison.capture.tensor_subclasses import plain, wrapping
from jettison.core.errors import TraceError, UnsupportedModule
from jettison.core.objects import swapped

_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def leaf_signature(leaf: Any) -> Any:
    """A tensor by metadata, a value itself, an object by type and contents. `UnsupportedModule`: a tensor in pieces."""
    kind = leaf.__class__
    if kind is Tensor and leaf.layout is torch.strided:  # the common case
        return tensor_description(leaf)
    if kind in _SCALARS or isinstance(leaf, _SCALARS):
        return kind, leaf
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided and not is_traceable_wrapper_subclass(leaf):
        raise UnsupportedModule(
            f"an argument of a planned module is a tensor of layout {leaf.layout}, which no recording can hold yet; "
            "expected dense tensors. Pass its parts and put it together inside, or leave the module out with "
            "regions=[...]"
        )
    return described(leaf)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flat leaves of a call, and its hashable signature (positional and keyword structure included).

    The offset of an argument in its memory does not matter (micro-batches are parts of one batch), but relative offsets
    of arguments that share memory do.
    """
    leaves, shape = tree_shape((args, kwargs))
    first: dict[int, tuple[int, Tensor]] = {}
    found = []  # (position, position of the first argument in the same memory, bytes between the two)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            inner = leaf if leaf.__class__ is Tensor else plain(leaf)
            other, start = first.setdefault(inner.untyped_storage()._cdata, (position, inner))
            if other != position:
                at, begin = (one.storage_offset() * one.element_size() for one in (inner, start))
                found.append((position, other, at - begin))
    return leaves, (shape, tuple(map(leaf_signature, leaves)), tuple(found))


_READ = tuple(read for read, _ in KERNEL_SWITCHES)

Switches = tuple[Any, ...]


def kernel_switches() -> Switches:
    """Values of the `KERNEL_SWITCHES`. Read for every region in each backward."""
    return tuple([read() for read in _READ])


@contextlib.contextmanager
def switched(wanted: Switches) -> Iterator[None]:
    """Set the switches to these values within the context."""
    before = kernel_switches()
    try:
        _switch(before, wanted)
        yield
    finally:
        _switch(wanted, before)


def _switch(before: Switches, wanted: Switches) -> None:
    for (_, switch), was, value in zip(KERNEL_SWITCHES, before, wanted, strict=True):
        if was != value:
            switch(value)


AUTOCASTS = 4
"""Entries of a `global_signature` that are about autocast; the others are the `kernel_switches`."""


def global_signature() -> tuple[Any, ...]:
    """Process-wide switches that choose kernels or cast arguments."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        *kernel_switches(),
    )


@contextlib.contextmanager
def as_signed(signature: tuple[Any, ...]) -> Iterator[None]:
    """Restore the autocast state and the kernel switches of a `global_signature` within the context."""
    if signature == global_signature():
        yield
        return
    cpu, cpu_dtype, cuda, cuda_dtype, *kernels = signature
    with (
        torch.autocast("cpu", dtype=cpu_dtype, enabled=cpu),
        torch.autocast("cuda", dtype=cuda_dtype, enabled=cuda),
        switched(tuple(kernels)),
    ):
        yield


def opaque_copy(call: Any, tensors: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """The arguments of a call with objects that a forward may change (caches, side lists) copied. ``tensors`` maps the
    tensors inside such objects; by default they are shared. Raise `TraceError` if an object cannot be copied.
    """
    leaves, spec = tree_flatten(call)
    memo: dict[int, Any] = {}
    return tree_unflatten([_copied(leaf, tensors, memo) for leaf in leaves], spec)


def _copied(leaf: Any, tensors: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(leaf, (Tensor, nn.Module, *_SCALARS)) or callable(leaf):
        return leaf

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(tensor), tensors(tensor))

    try:
        with swapped(Tensor, __deepcopy__=copied):
            return copy.deepcopy(leaf, memo)
    except Exception as error:  # a class's own copy method may raise anything
        raise TraceError(
            f"an argument of type {type(leaf).__name__} cannot be copied ({type(error).__name__}), and a recording "
            "must not change the real one"
        ) from error


# arguments beyond their types: equal values for those that a forward cannot tell apart --------------------------------

DEEPEST = 8
MOST_BYTES = 4096  # of an array that is compared by its values


def described(value: Any) -> Any:
    """Hashable description: tensors by their metadata, plain values by themselves, objects by their contents; modules,
    types and opaque objects (generators, files, objects of C) by their type alone.
    """
    return _described(value, 0, set())


_ATOMS = frozenset(PLAIN) - {float}  # exact types of most values


def _described(value: Any, depth: int, above: set[int]) -> Any:
    if type(value) in _ATOMS or is_a(value, PLAIN):
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
        return "method", getattr(value.__func__, "__code__", type(value)), inner(value.__self__)
    if is_a(value, types.FunctionType):
        cells = [attribute_of(cell, "cell_contents") for cell in value.__closure__ or ()]
        return "function", value.__code__, inner(*cells, value.__defaults__, value.__kwdefaults__)
    if is_a(value, types.BuiltinFunctionType):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and is_a(value, numpy.generic | numpy.ndarray):
        array = numpy.asarray(value)
        values = array.tobytes() if array.nbytes <= MOST_BYTES and array.dtype != object else None
        return type(value), str(array.dtype), array.shape, values
    held = [attribute_of(value, name) for cls in type(value).__mro__ for name in slots_of(cls)]
    attributes = attributes_of(value)
    if is_a(attributes, dict):
        held.append(attributes)
    return type(value), inner(*held)


def tensor_description(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor except its values and its place in memory."""
    common = tensor.__class__ is Tensor
    inner, wraps = (tensor, None) if common else (plain(tensor), wrapping(tensor))
    device = "cpu" if common and tensor.is_cpu else tensor.device.type  # which makes two objects
    form = inner.shape, inner.stride(), tensor.dtype, tensor.requires_grad, device
    return *form, wraps, inner.is_conj(), inner.is_neg()
