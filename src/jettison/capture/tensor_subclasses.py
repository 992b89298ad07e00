"""Tensors around tensors: DTensor, and the results of collectives that nobody has waited for yet.

Autograd saves the wrapper; bytes, ops and collectives are those of the plain tensor inside. A recorder therefore lets
wrappers take themselves apart first (`desugars`), writes down what they do to what is inside them, and keeps how to put
a computed tensor back into the wrapper that autograd had saved. Wrappers that live within one function only (`PASSING`)
take themselves apart as well; autograd saves none of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor


class _Kind(Enum):
    PLAIN = 0
    DISTRIBUTED = 1  # a DTensor
    ASYNCHRONOUS = 2  # the result of a collective, to be waited for before its first use
    PASSING = 3  # seen within a function, where ops on what is inside it do the work


PASSING = (("torchao.float8.float8_training_tensor", "Float8TrainingTensor"),)
"""Modules and classes of narrow numbers beside their factor, which products take apart."""

_HOLDS_ONE = (_Kind.DISTRIBUTED, _Kind.ASYNCHRONOUS)


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The mesh and the placements of a DTensor; equal for two that are laid out alike."""

    spec: Any

    def wrap(self, tensor: Tensor) -> Tensor:
        """A DTensor with ``tensor`` as this rank's part."""
        from torch.distributed.tensor import DTensor

        wrapped: Tensor = DTensor(tensor, self.spec, requires_grad=False)
        return wrapped


@cache
def _kind(cls: type) -> _Kind:
    distributed = sys.modules.get("torch.distributed.tensor")  # there is no such tensor before it is imported
    if distributed is not None and issubclass(cls, distributed.DTensor):
        return _Kind.DISTRIBUTED
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and issubclass(cls, functional.AsyncCollectiveTensor):
        return _Kind.ASYNCHRONOUS
    if (cls.__module__, cls.__qualname__) in PASSING:
        return _Kind.PASSING
    return _Kind.PLAIN


def _kind_of(tensor: Any) -> _Kind:
    cls: Any = type(tensor)
    return _kind(cls)


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can want gradients."""
    return dtype.is_floating_point or dtype.is_complex


def desugars(types: Any) -> bool:
    """Whether a dispatch mode must leave a call to the wrappers among its arguments, to see what they do inside."""
    return any(_kind(cls) is not _Kind.PLAIN for cls in types)


def plain(tensor: Any) -> Any:
    """This rank's part of a DTensor, and what is inside an asynchronous result, arrived or not."""
    while (kind := _kind_of(tensor)) in _HOLDS_ONE:
        tensor = tensor._local_tensor if kind is _Kind.DISTRIBUTED else tensor.elem
    return tensor


def arrived(tensor: Any) -> Any:
    """As `plain`, after waiting for what is still under way."""
    while (kind := _kind_of(tensor)) in _HOLDS_ONE:
        tensor = tensor._local_tensor if kind is _Kind.DISTRIBUTED else tensor.trigger_wait()
    return tensor


def wrapping(tensor: Any) -> Wrapping | None:
    """How to wrap `plain(tensor)` again; None where nothing needs to be."""
    return Wrapping(tensor._spec) if _kind_of(tensor) is _Kind.DISTRIBUTED else None


def is_dense(tensor: Tensor) -> bool:
    """Whether it lies in one memory; a sparse tensor lies in several."""
    return plain(tensor).layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor, wrapped or not; of a sparse one, which has several, its own."""
    part = plain(tensor)
    found: int = part.untyped_storage()._cdata if is_dense(part) else id(part)
    return found


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count, nor may autograd save them."""
    return 0 if tensor.is_inference() else tensor._version


def infers_shapes() -> bool:
    """Whether this is called from within DTensor while it works out the shapes of a call that it has not seen before:
    what it runs for that is no op of the model.
    """
    propagation = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if propagation is None:
        return False
    code = propagation.ShardingPropagator._propagate_tensor_meta_non_cached.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
