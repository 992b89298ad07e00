"""Arrays of NumPy's in the memory of tensors, or of each other: `tensor.numpy()`, `torch.from_numpy`, slices.

What such an array is assigned, the tensor holds, and no op tells of it.
"""

from __future__ import annotations

import array
import ctypes
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from jettison.capture.snapshots import CONTAINERS, attributes_of, items_of
from jettison.capture.tensor_subclasses import plain
from jettison.capture.undo import is_in_memory


def span_of(value: Any) -> tuple[int, int]:
    """Where an array's memory begins and ends: addresses."""
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
    """Memory of a copy of a tensor's: arrays in it are known by it (see `is_lent`)."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def __array_interface__(self) -> Any:
        return self.raw.__array_interface__


def owner_of(value: Any) -> Any:
    """Whose memory an array of numpy's lies in: the array's that all are views of, or another object."""
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


def copy_arrays(model: nn.Module, tensors: Iterable[Tensor], memo: dict[int, Any]) -> None:
    """Copy the arrays that a model holds into a memo of `copy.deepcopy`, where they lie in the memory of others.

    Copies of arrays that share memory share it as well. Those in a tensor's memory are known by their owner,
    `OfTensor`: the fake tensor has no values.

    Args:
        tensors: that the model holds.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    seen: set[int] = set()
    attributes = (value for module in model.modules() for value in list(vars(module).values()))
    found = (one for value in attributes for one in _arrays_in(value, numpy.ndarray, seen))
    arrays = [one for one in found if one.size and not one.dtype.hasobject]
    real = [t for t in map(plain, tensors) if is_in_memory(t)] if arrays else []
    together: dict[int, list[Any]] = {}
    for one in arrays:
        together.setdefault(id(owner_of(one)), []).append(one)
    for parts in together.values():
        of_tensor = any(is_lent(one) or any(looks_at(one, tensor) for tensor in real) for one in parts)
        if len(parts) == 1 and not of_tensor:
            continue
        spans = [span_of(one) for one in parts]
        start, end = min(first for first, _ in spans), max(last for _, last in spans)
        raw = numpy.frombuffer(bytearray(ctypes.string_at(start, end - start)), dtype=numpy.uint8)
        memory = numpy.asarray(OfTensor(raw)) if of_tensor else raw
        memo.update((id(one), _seen_in(one, start, memory, numpy)) for one in parts)


def _seen_in(array: Any, start: int, raw: Any, numpy: Any) -> Any:
    """An array of that form in the copy of its memory."""
    at = array.__array_interface__["data"][0] - start
    made = numpy.ndarray(array.shape, array.dtype, buffer=raw, offset=at, strides=array.strides)
    made.flags.writeable = array.flags.writeable
    return made


def _arrays_in(value: Any, kind: type, seen: set[int]) -> Iterator[Any]:
    left = [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        if type(one) is kind:
            seen.add(id(one))
            yield one
        elif issubclass(type(one), CONTAINERS):
            seen.add(id(one))
            left += items_of(one)
        elif not _is_somebodys(one) and type(attributes := attributes_of(one)) is dict:
            seen.add(id(one))
            left.append(attributes)


def _is_somebodys(value: Any) -> bool:
    """Whether it is code, a module or a tensor, whose attributes are found otherwise."""
    return issubclass(type(value), type | ModuleType | nn.Module | Tensor) or callable(value)
