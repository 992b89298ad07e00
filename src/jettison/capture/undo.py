"""Tensors as they were before a run that nobody should notice.

A forward may write to any tensor that Python reaches: its batch, a count in a closure, statistics in an attribute, a
weight that is renormalised. No walk through Python's state finds them all, but every write is an op: what an op is
about to write to, and was there before the run, is copied first and put back at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jettison.capture.opinfo import writes
from jettison.capture.trees import op_leaves
from jettison.capture.wrapped import desugars


@dataclass(frozen=True, kw_only=True)
class _Before:
    """A tensor's memory, its version, and the tensor whose graph a write may change."""

    memory: Tensor
    copy: Tensor
    tensor: Tensor
    version: int
    is_leaf: bool


class Undo:
    """Remembers memory before it is written to."""

    def __init__(self) -> None:
        self._own: set[int] = set()  # storages that the run has made
        self._before: dict[int, _Before] = {}

    @property
    def wrote(self) -> bool:
        """Whether anything was written to that was there before."""
        return bool(self._before)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """What is written to these need not be undone."""
        self._own.update(found for found in map(_storage, tensors) if found is not None)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """These are about to be written to."""
        for tensor in tensors:
            key = _storage(tensor)
            if key is None or key in self._own or key in self._before or tensor.is_inference():
                continue
            base = tensor._base if tensor._base is not None else tensor
            with _disable_current_modes(), torch.no_grad():
                storage = tensor.untyped_storage()
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._before[key] = _Before(
                    memory=memory, copy=memory.clone(), tensor=base, version=tensor._version,
                    is_leaf=base.grad_fn is None,
                )  # fmt: skip

    def made(self, given: Iterable[Any], out: Any) -> None:
        """An op has run: storages of its results that no argument has are the run's own."""
        known = {_storage(leaf) for leaf in given if isinstance(leaf, Tensor)}
        for leaf in op_leaves(out):
            if isinstance(leaf, Tensor) and (key := _storage(leaf)) not in known and key is not None:
                self._own.add(key)

    def restore(self) -> None:
        """Put everything back: values, version counters, and tensors that had no history."""
        with _disable_current_modes(), torch.no_grad():
            for before in self._before.values():
                before.memory.copy_(before.copy)
                if before.is_leaf and before.tensor.grad_fn is not None:
                    before.tensor.detach_()
                torch._C._autograd._unsafe_set_version_counter((before.tensor,), (before.version,))
        self._before.clear()


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


def _storage(tensor: Tensor) -> int | None:
    """Of a tensor in memory; fake ones have none, and sparse ones several."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
