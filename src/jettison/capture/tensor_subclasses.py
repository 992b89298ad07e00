"""Tensors that wrap tensors: DTensor, asynchronous results of collectives, quantized tensors.

Autograd saves the wrapper; bytes, ops and collectives are those of the plain tensor inside. A recorder therefore lets
wrappers unwrap themselves first (`desugars`), records their ops on the plain tensors, and keeps the data to wrap a
computed tensor as autograd had saved it.

Quantized tensors with their scale (`QUANTIZED`) are such wrappers, too: their data is recorded. The scale, a number or
a row of them, is held with the wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class _Wrapper(Enum):
    PLAIN = 0
    DISTRIBUTED = 1  # a DTensor
    ASYNCHRONOUS = 2  # the result of a collective, to be waited for before its first use
    QUANTIZED = 3  # quantized data with their scale


QUANTIZED = {
    ("torchao.float8.float8_training_tensor", "Float8TrainingTensor"): ("_data", "_scale"),
    ("torchao.float8.float8_tensor", "Float8Tensor"): ("_data", "_scale"),
}
"""By module and class: names of the data tensor, and of its scale."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The mesh and the placements of a DTensor; equal for two of equal layout."""

    spec: Any

    def wrap(self, tensor: Tensor) -> Tensor:
        """A DTensor with ``tensor`` as this rank's part."""
        from torch.distributed.tensor import DTensor

        return DTensor(tensor, self.spec, requires_grad=False)


@dataclass(frozen=True, slots=True)
class QuantizedWrapping(Wrapping):
    """Class and `__tensor_flatten__` context of a quantized tensor, whatever its scales."""

    factor: Any = field(compare=False)

    def wrap(self, tensor: Tensor) -> Tensor:
        """Wrap ``tensor`` with this scale."""
        cls, context = self.spec
        numbers, factor = QUANTIZED[cls.__module__, cls.__qualname__]
        inside = {numbers: tensor, factor: self.factor}
        return cls.__tensor_unflatten__(inside, dict(context), tensor.size(), tensor.stride())


@cache
def _kind(cls: type) -> _Wrapper:
    distributed = sys.modules.get("torch.distributed.tensor")  # no such tensor exists before it is imported
    if distributed is not None and issubclass(cls, distributed.DTensor):
        return _Wrapper.DISTRIBUTED
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and issubclass(cls, functional.AsyncCollectiveTensor):
        return _Wrapper.ASYNCHRONOUS
    return _Wrapper.QUANTIZED if (cls.__module__, cls.__qualname__) in QUANTIZED else _Wrapper.PLAIN


def _kind_of(tensor: Any) -> _Wrapper:
    cls: Any = type(tensor)
    return _kind(cls)


def _names(tensor: Any) -> tuple[str, str]:
    cls = type(tensor)
    return QUANTIZED[cls.__module__, cls.__qualname__]


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can require gradients."""
    return dtype.is_floating_point or dtype.is_complex


def desugars(types: Iterable[type]) -> bool:
    """Whether a dispatch mode must leave a call to the wrappers among its arguments, to see their ops inside."""
    return _desugars(tuple(types))


@cache
def _desugars(types: tuple[type, ...]) -> bool:
    return any(_kind(cls) is not _Wrapper.PLAIN for cls in types)


def plain(tensor: Any, *, wait: bool = False) -> Any:
    """This rank's part of a DTensor, or the tensor inside an asynchronous result, which may ``wait`` for it."""
    while (kind := _kind_of(tensor)) is not _Wrapper.PLAIN:
        if kind is _Wrapper.QUANTIZED:
            tensor = getattr(tensor, _names(tensor)[0])
        elif kind is _Wrapper.DISTRIBUTED:
            tensor = tensor._local_tensor
        else:
            tensor = tensor.trigger_wait() if wait else tensor.elem
    return tensor


def arrived(tensor: Any) -> Any:
    """Like `plain`, after waiting for asynchronous results."""
    return plain(tensor, wait=True)


def wrapping(tensor: Any) -> Wrapping | None:
    """The wrapper of `plain(tensor)`; None if there is none."""
    kind = _kind_of(tensor)
    if kind is _Wrapper.QUANTIZED:
        _, context = tensor.__tensor_flatten__()
        return QuantizedWrapping((type(tensor), tuple(context.items())), getattr(tensor, _names(tensor)[1]))
    return Wrapping(tensor._spec) if kind is _Wrapper.DISTRIBUTED else None


def is_dense(tensor: Tensor) -> bool:
    """Whether it lies in one memory; a sparse tensor lies in several."""
    return plain(tensor).layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory, wrapped or not; of a sparse one, which has several, its own."""
    part = plain(tensor)
    return part.untyped_storage()._cdata if is_dense(part) else id(part)


def reach_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of a storage that strides span; an expanded tensor spans fewer than it has."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def version_of(tensor: Tensor) -> int:
    """Version counter of a tensor; 0 for inference tensors, which have none and cannot be saved."""
    try:  # a third of the time of asking first
        return tensor._version
    except RuntimeError:
        return 0


def infers_shapes() -> bool:
    """Whether DTensor is inferring the shapes of a new call: the ops that it runs for that are not the model's."""
    propagation = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if propagation is None or not torch.distributed.is_initialized():  # no DTensor without a mesh, nor that without it
        return False
    code = propagation.ShardingPropagator._propagate_tensor_meta_non_cached.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def stepped_in_backward(module: nn.Module) -> set[str]:
    """Names of parameters with hooks that run once their gradient is accumulated: an optimizer may step in one."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if is_stepped_in_backward(p)}


def is_stepped_in_backward(parameter: Any) -> bool:
    """Whether it has such hooks; see `stepped_in_backward`."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one memory each that a tensor consists of: itself, or the indices and values of a sparse one."""
    tensor = plain(tensor)
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the memory under a tensor."""
    return sum({s._cdata: s.nbytes() for s in (part.untyped_storage() for part in parts_of(tensor))}.values())


def memory_key(tensor: Tensor) -> int | None:
    """Address of a tensor's memory; None for fake tensors, which have none, and sparse ones, which have several."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper of `torch.func` has none of its own
        return None
