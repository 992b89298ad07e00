"""Tensors as they were before a run that nobody should notice.

A forward may write to any tensor that Python reaches: its batch, a count in a closure, statistics in an attribute, a
weight that is renormalised. No walk through Python's state finds them all, but every write is an op: what an op is
about to write to, and was there before the run, is copied first and put back at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jettison.capture.op_traits import writes
from jettison.capture.tensor_subclasses import desugars
from jettison.capture.trees import op_leaves


class Undo:
    """Remembers memory before it is written to."""

    def __init__(self) -> None:
        self._own: set[int] = set()  # storages that the run has made
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> its bytes, and a copy of them
        self._counted: dict[int, tuple[Tensor, int, bool]] = {}  # a tensor, its version, whether it had no history
        self._shaped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and what it looked at

    @property
    def wrote(self) -> bool:
        """Whether anything was written to that was there before."""
        return bool(self._memory)

    def has_noted(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was written to, and will be put back."""
        return _storage(tensor) in self._memory

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """What is written to these need not be undone."""
        self._own.update(found for found in map(_storage, tensors) if found is not None)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """These are about to be written to."""
        for tensor in tensors:
            key = _storage(tensor)
            if key is None or key in self._own:
                continue
            base = tensor._base if tensor._base is not None else tensor
            if not base.is_inference():  # one memory may be had by several, each with a counter of its own (``.data``)
                self._counted.setdefault(id(base), (base, base._version, base.grad_fn is None))
            if id(tensor) not in self._shaped:
                with _disable_current_modes():
                    self._shaped[id(tensor)] = tensor, tensor.detach()
            if key not in self._memory:
                # made in inference mode, the look at it could not be written to once that is left
                with _disable_current_modes(), torch.no_grad(), torch.inference_mode(False):
                    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                    self._memory[key] = memory, memory.clone()

    def made(self, given: Iterable[Any], out: Any) -> None:
        """An op has run: storages of its results that no argument has are the run's own."""
        known = {_storage(leaf) for leaf in given if isinstance(leaf, Tensor)}
        for leaf in op_leaves(out):
            if isinstance(leaf, Tensor) and (key := _storage(leaf)) not in known and key is not None:
                self._own.add(key)

    def restore(self) -> None:
        """Put everything back: values, version counters, and tensors that had no history."""
        with _disable_current_modes(), torch.no_grad():
            for memory, copy in self._memory.values():
                memory.copy_(copy)
            for tensor, was in self._shaped.values():
                if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (was.data_ptr(), was.shape, was.stride()):
                    tensor.data = was
            for tensor, version, had_none in self._counted.values():
                if had_none and tensor.grad_fn is not None:
                    tensor.detach_()
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._memory.clear()
        self._counted.clear()
        self._shaped.clear()


class WritesUndone(TorchDispatchMode):
    """A run on real tensors leaves those that were there before as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = Undo()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.undo.restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        self.undo.note(writes(func, args, kwargs))
        out = func(*args, **kwargs)
        self.undo.made(op_leaves(args, kwargs), out)
        return out


def is_in_memory(tensor: Tensor) -> bool:
    """Whether there is one piece of memory that has its values."""
    return _storage(tensor) is not None


def _storage(tensor: Tensor) -> int | None:
    """Of a tensor in memory; fake ones have none, and sparse ones several."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper of `torch.func` has none of its own
        return None
