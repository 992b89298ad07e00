"""Views of a storage, as recordings describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.core.errors import TraceError


@dataclass(frozen=True, slots=True)
class Within(TensorRef):
    """A view of an argument, parameter or offloaded bytes: ``offset`` counts from where those begin in storage."""

    @classmethod
    def since(cls, begin: int, ref: TensorRef) -> Within:
        """Return a view whose offset counts from this byte on."""
        offset = ref.offset - begin // ref.dtype.itemsize
        return cls(ref.buffer, ref.size, ref.stride, offset, ref.dtype, ref.wrap, ref.conj, ref.neg)


def within(trace: RegionTrace, ref: TensorRef) -> TensorRef:
    """The view, with its offset from the start of the argument or parameter if its buffer is one."""
    given = trace.given.get(ref.buffer) if ref.buffer in trace.inputs else None
    begin = trace.named_at.get(ref.buffer) if given is None else given.offset * given.dtype.itemsize
    return ref if begin is None else Within.since(begin, ref)


def view_of(tensor: Tensor, ref: TensorRef) -> Tensor:
    offset, begin = ref.offset, tensor.storage_offset()
    if (
        tensor.dtype is ref.dtype
        and ref.wrap is None
        and not (ref.conj or ref.neg or tensor.is_neg() or tensor.is_conj())
    ):  # the common case
        if type(ref) is Within:
            offset += begin
        if begin == offset and tensor.stride() == ref.stride and tensor.shape == ref.size:
            return tensor
        return tensor.as_strided(ref.size, ref.stride, offset)
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.is_conj():
        tensor = tensor.conj()
    if type(ref) is Within:
        offset += begin * tensor.element_size() // ref.dtype.itemsize
    if tensor.dtype is not ref.dtype:
        step = max(tensor.element_size(), ref.dtype.itemsize)
        count = tensor.untyped_storage().nbytes() // step * step // tensor.element_size()
        tensor = tensor.as_strided((count,), (1,), 0).view(ref.dtype)
    tensor = tensor.as_strided(ref.size, ref.stride, offset)
    if ref.conj:
        tensor = tensor.conj()
    if ref.neg:
        tensor = torch._neg_view(tensor)
    return tensor if ref.wrap is None else ref.wrap.wrap(tensor)


def in_a_copy(tensors: Sequence[Tensor], refs: Sequence[TensorRef]) -> list[Tensor]:
    """Copy the memory that these views share, and return them as views of the copy."""
    copy = whole_copy(tensors[0])
    return [copy, *(view_of(copy, ref) for ref in refs[1:])]


def whole_copy(tensor: Tensor) -> Tensor:
    """Copy the complete storage, and return the view of it that ``tensor`` is of its own."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_conj() or tensor.is_neg():
        raise TraceError("an op writes to a conjugate or negative view")
    flat = tensor.as_strided((count,), (1,), 0).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
