"""Fake tensors for everything large, real values for everything that a forward may look at.

A model may read its inputs ("is any token masked?") and take another path. Fake tensors have no values to read, so a
purely fake trace can take a path that training never takes. `RealUntilFake` keeps ops whose arguments are all real on
real tensors (ids, masks, position tables), and lets everything that meets a fake tensor (weights, hidden states) be
fake.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.compiled import eagerly
from jettison.capture.op_traits import writes
from jettison.capture.quick_fakes import QuickFakeMode
from jettison.capture.tensor_subclasses import desugars, has_gradients
from jettison.capture.trees import op_leaves
from jettison.capture.undo import Undo, handed_out

WHICH_DEVICE = torch.ops.prim.device.default
"""Every other call of a dry run is this question; it is worth answering first, without asking the modes below."""
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""A gradient scaler's: gradients that are made up are finite, so that the number it writes that to stays 0."""


def which_device(tensor: Tensor) -> torch.device:
    """What `WHICH_DEVICE` answers, to a mode above a `FakeTensorMode`."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return WHICH_DEVICE(tensor)


def outside_of_compiled(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """The mode with a dispatch that goes through dynamo's guard only where dynamo is at work. Torch puts the guard
    around each call of each mode, which takes as long as many a fake kernel.
    """
    guarded = mode.__torch_dispatch__
    plain: Any = getattr(guarded, "__wrapped__", guarded)

    def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if get_eval_frame_callback() is None:
            return plain(self, func, types, args, kwargs)
        return guarded(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = __torch_dispatch__
    return mode


@outside_of_compiled
class RealUntilFake(TorchDispatchMode):
    """Runs an op on real tensors where every tensor argument is real; stands above a `FakeTensorMode`.

    A real tensor that fake values are written into is fake from then on, in every view of it: it stays the same object,
    and a fake one on a shadow of its storage goes in its place wherever it is computed with.
    """

    def __init__(self, mode: FakeTensorMode, undo: Undo) -> None:
        super().__init__()
        self.mode = mode
        self.undo = undo
        self.shadows: dict[int, tuple[Any, torch.UntypedStorage]] = {}  # storage -> weak reference, what stands for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is WHICH_DEVICE:
            return which_device(*args)
        if desugars(types):
            return NotImplemented
        has_real = has_fake = False
        for leaf in op_leaves(args, kwargs):
            if isinstance(leaf, FakeTensor):
                has_fake = True
            elif isinstance(leaf, torch.Tensor):
                has_real = True
        if has_fake and has_real and func._schema.is_mutable and func is not _UNSCALE:
            written = writes(func, args, kwargs)
            self.undo.note(written)
            for tensor in written:
                self._overshadow(tensor)
        if self.shadows and has_real and not func.is_view:
            given, instead = (args, kwargs), tree_map(self._instead, (args, kwargs))
            changed = zip(tree_leaves(given), tree_leaves(instead), strict=True)
            if back := {id(new): old for old, new in changed if new is not old}:
                out = func(*instead[0], **instead[1])
                return tree_map(lambda leaf: back.get(id(leaf), leaf), out)
        if has_fake:
            return func(*args, **kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if not has_real and seeded:
            return _drawn(func, args, kwargs)
        # not yet written: no forward decides anything by such values, and they may be as large as activations
        if not has_real and _is_empty_float(func, kwargs):
            return func(*args, **kwargs)
        with unset_fake_temporarily(), _unmoved_stream() if seeded else contextlib.nullcontext():
            self.undo.note(writes(func, args, kwargs))
            out = func(*args, **kwargs)
            self.undo.made(op_leaves(args, kwargs), out)
            return out

    def _overshadow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor) and self._shadow(storage) is None:
            shadow = torch.UntypedStorage(storage.nbytes(), device="meta")
            self.shadows[storage._cdata] = weakref.ref(storage), shadow

    def _shadow(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        known = self.shadows.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def _instead(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        shadow = self._shadow(leaf.untyped_storage())
        if shadow is None:
            return leaf
        with unset_fake_temporarily():
            meta = torch.empty(0, dtype=leaf.dtype, device="meta")
            meta = meta.set_(shadow, leaf.storage_offset(), leaf.shape, leaf.stride())
        return FakeTensor(self.mode, meta, leaf.device)


def fakes_below() -> QuickFakeMode | None:
    """The mode that answers all calls of fake tensors alone, where no mode but `RealUntilFake` would see them first."""
    above = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, RealUntilFake)]
    return above[0] if len(above) == 1 and isinstance(above[0], QuickFakeMode) else None


FEW = 16  # elements of a draw that a forward may decide by


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers: fake where they are many; where a forward may decide by them, real, and as large as they get.

    What is skipped with some probability is skipped where a draw is below it: so everything runs, which takes most.
    """
    out = func(*args, **kwargs)
    if not isinstance(out, FakeTensor) or out.numel() > FEW or not out.is_floating_point():
        return out
    with unset_fake_temporarily():
        return torch.full(out.shape, 1 - torch.finfo(out.dtype).eps, dtype=out.dtype, device=out.device)


@contextlib.contextmanager
def _unmoved_stream() -> Iterator[None]:
    """A recording draws nothing, also where its tensors are real. So a draw that is repeated gives the same numbers."""
    with torch.random.fork_rng(devices=_cuda_devices()):
        yield


def _is_empty_float(func: Any, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return func._schema.name in ("aten::empty", "aten::empty_strided") and has_gradients(dtype)


@contextlib.contextmanager
def tracing(mode: FakeTensorMode, *, values_known: bool) -> Iterator[None]:
    """Everything inside allocates no model memory and leaves every random generator as it was.

    Args:
        values_known: the batch is real, so that what depends on it alone is computed for real. Real tensors that
            were there before come out as they went in.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices()))
        stack.enter_context(eagerly())
        stack.enter_context(mode)
        vars(mode)["thread"] = threading.get_ident()
        undo = Undo()
        stack.callback(undo.restore)
        stack.enter_context(handed_out(undo))
        if values_known:
            stack.enter_context(RealUntilFake(mode, undo))
        yield


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
