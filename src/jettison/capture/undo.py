"""Tensors as they were before a run that nobody should notice.

A forward may write to any tensor that Python reaches: its batch, a count in a closure, statistics in an attribute, a
weight that is renormalised. No walk through Python's state finds them all, but every write is an op: what an op is
about to write to, and was there before the run, is copied first and put back at the end. NumPy and others get at the
memory of a tensor without an op: that is copied when they ask for it (`handed_out`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
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
        self._memory: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # storage -> its bytes, and a copy of them: as many as it had
        self._counted: dict[int, tuple[Tensor, int, bool]] = {}  # a tensor, its version, whether it had no history
        self._shaped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and what it looked at
        self._handed: set[int] = set()  # storages that somebody got at without an op, and may have read only

    @property
    def wrote(self) -> bool:
        """Whether anything was written to that was there before."""
        return any(map(self._is_written, self._memory))

    def has_written(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was written to, and will be put back."""
        key = _storage(tensor)
        return key in self._memory and self._is_written(key)

    def _is_written(self, key: int) -> bool:
        with _disable_current_modes(), torch.no_grad():
            return key not in self._handed or not torch.equal(*self._memory[key])

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """What is written to these need not be undone."""
        self._own.update(found for found in map(_storage, tensors) if found is not None)

    def note(self, tensors: Iterable[Tensor], *, handed: bool = False) -> None:
        """These are about to be written to; or ``handed`` to somebody who may write to them."""
        for tensor in tensors:
            key = _storage(tensor)
            if key is None or key in self._own:
                continue
            if not handed:
                self._handed.discard(key)
            elif key not in self._memory:
                self._handed.add(key)
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
                if (storage := memory.untyped_storage()).nbytes() != copy.nbytes:  # of a tensor with another size
                    storage.resize_(copy.nbytes)
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
        self._handed.clear()


class WritesUndone(TorchDispatchMode):
    """A run on real tensors leaves those that were there before as they were."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.undo = Undo()
        self._until_left = contextlib.ExitStack()

    def __enter__(self) -> WritesUndone:
        self._until_left.enter_context(handed_out(self.undo))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._until_left.close()
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


# memory that others get at --------------------------------------------------------------------------------------------

_WAYS_OUT = ("numpy", "__array__", "__dlpack__", "data_ptr")
"""Methods of a tensor that give its memory away."""
_LOOKING: list[Undo] = []  # the run that asks is the latest


@contextlib.contextmanager
def handed_out(undo: Undo) -> Iterator[None]:
    """Memory that a tensor gives away (to NumPy, by DLPack, as an address) is noted before somebody writes to it."""
    own: dict[str, Any] = {} if _LOOKING else {name: vars(Tensor).get(name) for name in _WAYS_OUT}
    for name in own:
        setattr(Tensor, name, _noting(getattr(Tensor, name)))
    _LOOKING.append(undo)
    try:
        yield
    finally:
        _LOOKING.remove(undo)
        for name, method in own.items():
            if method is None:  # a base class has it
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch and we ask for addresses to compare them
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if _LOOKING and asks.partition(".")[0] not in ("torch", "jettison"):
            _LOOKING[-1].note([tensor], handed=True)
        return method(tensor, *args, **kwargs)

    return noting
