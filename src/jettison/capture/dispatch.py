"""Event sources of recorders: ATen calls, saved tensors, module boundaries, and reads of values past the dispatcher."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.fake_tensor_cache import QuickFakeMode
from jettison.capture.isolation import Undo, handed_out, without_our_hooks
from jettison.capture.op_traits import draws, is_bookkeeping, writes
from jettison.capture.pytrees import op_leaves
from jettison.capture.randomness import forked_streams
from jettison.capture.recorder import BY_HAND, OpRecorder
from jettison.capture.tensor_subclasses import desugars, has_gradients, infers_shapes, storage_of
from jettison.core.errors import TraceError, UnsupportedModule
from jettison.core.objects import swapped

# fake tensors for large ones, real values for those that a forward may read -------------------------------------------
#
# A model may read its inputs ("is any token masked?") and take another path. Fake tensors have no values to read, so a
# purely fake trace can take a path that training never takes. `RealUntilFake` keeps ops whose arguments are all real on
# real tensors (ids, masks, position tables); ops with any fake argument (weights, hidden states) are fake.

WHICH_DEVICE = torch.ops.prim.device.default
"""Every other call of a dry run; answered first, without dispatching to the modes below."""
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""A gradient scaler's op: made-up gradients are finite, so the number that it writes stays 0."""


def which_device(tensor: Tensor) -> torch.device:
    """Answer of `WHICH_DEVICE`, for a mode above a `FakeTensorMode`."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return WHICH_DEVICE(tensor)


def outside_of_compiled(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """The mode with dynamo's guard only while dynamo runs: it takes as long as many a fake kernel."""
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
    """Runs an op on real tensors if every tensor argument is real; stands above a `FakeTensorMode`.

    A real tensor that fake values are written into is fake from then on, in every view of it: it stays the same object,
    and ops get a fake tensor on a shadow of its storage instead.
    """

    def __init__(self, mode: FakeTensorMode, undo: Undo) -> None:
        super().__init__()
        self.mode = mode
        self.undo = undo
        self.shadows: dict[int, tuple[Any, torch.UntypedStorage]] = {}  # storage -> weak reference, its shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is WHICH_DEVICE:
            return which_device(*args)
        if desugars(types):
            return NotImplemented
        given = [isinstance(leaf, FakeTensor) for leaf in op_leaves(args, kwargs) if isinstance(leaf, Tensor)]
        has_fake, has_real = True in given, False in given
        if has_fake and has_real and func._schema.is_mutable and func is not _UNSCALE:
            written = writes(func, args, kwargs)
            self.undo.note(written)
            for storage in (t.untyped_storage() for t in written if not isinstance(t, FakeTensor)):
                if self._shadow(storage) is None:
                    shadow = torch.UntypedStorage(storage.nbytes(), device="meta")
                    self.shadows[storage._cdata] = weakref.ref(storage), shadow
        if self.shadows and has_real and not func.is_view:
            instead = tree_map(self._instead, (args, kwargs))
            changed = zip(tree_leaves((args, kwargs)), tree_leaves(instead), strict=True)
            if back := {id(new): old for old, new in changed if new is not old}:
                out = func(*instead[0], **instead[1])
                return tree_map(lambda leaf: back.get(id(leaf), leaf), out)
        if has_fake:
            return func(*args, **kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if not has_real and seeded:
            return _drawn(func, args, kwargs)
        is_empty = func._schema.name in ("aten::empty", "aten::empty_strided")
        # uninitialized: no forward decides by such values, and they may be as large as activations
        if not has_real and is_empty and has_gradients(kwargs.get("dtype") or torch.get_default_dtype()):
            return func(*args, **kwargs)
        with unset_fake_temporarily(), forked_streams() if seeded else contextlib.nullcontext():
            self.undo.note(writes(func, args, kwargs))
            out = func(*args, **kwargs)
            self.undo.made(op_leaves(args, kwargs), out)
            return out

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
    """The mode that answers all calls of fake tensors alone, if no mode except `RealUntilFake` is above it."""
    above = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, RealUntilFake)]
    return above[0] if len(above) == 1 and isinstance(above[0], QuickFakeMode) else None


FEW = 16  # elements of a draw that a forward may decide by


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers: fake if many; else real and at their largest, as a forward may skip parts where one is small."""
    out = func(*args, **kwargs)
    if not isinstance(out, FakeTensor) or out.numel() > FEW or not out.is_floating_point():
        return out
    with unset_fake_temporarily():
        return torch.full(out.shape, 1 - torch.finfo(out.dtype).eps, dtype=out.dtype, device=out.device)


@contextlib.contextmanager
def tracing(mode: FakeTensorMode, *, values_known: bool) -> Iterator[None]:
    """Allocate no model memory within the context, and restore every random generator. With ``values_known`` the batch
    is real: values that depend on it alone are computed for real, and existing tensors restored.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(forked_streams())
        stack.enter_context(eagerly())
        stack.enter_context(mode)
        vars(mode)["thread"] = threading.get_ident()
        undo = Undo()
        stack.callback(undo.restore)
        stack.enter_context(handed_out(undo))
        if values_known:
            stack.enter_context(RealUntilFake(mode, undo))
        stack.enter_context(swapped(torch.utils, swap_tensors=_exchange))
        yield


_swap_tensors = torch.utils.swap_tensors


def _exchange(old: Tensor, new: Tensor) -> None:
    """Ignore a `Module.to` of fake tensors that changes nothing. Torch exchanges them by what its cache has."""
    if not isinstance(old, FakeTensor):
        _swap_tensors(old, new)
    elif (storage_of(old), old.dtype) != (storage_of(new), new.dtype):
        raise TraceError(
            "its forward moves or casts its own parameters (Module.to), which puts others in their place, and fake "
            "ones cannot be exchanged: cast them where the model is built"
        )


# events for recorders -------------------------------------------------------------------------------------------------

_BY_HAND = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}

HOOKS_OFF = "it switches saved-tensor hooks off for a part of its forward (torch.func, disable_saved_tensors_hooks)"


class ReadingWatch(TorchFunctionMode):
    """Reports values that Python reads from tensors past the dispatcher to a recorder."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__wrapped__", func) in _BY_HAND:  # see `isolation.handed_out`
            self.recorder.read_by_hand(args[0])
        return (_one_hot if func is torch._C._nn.one_hot else func)(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """torch's implementation for real tensors; for fake ones torch compares with a range instead."""
    if num_classes < 1 or tensor.numel() == 0 or not isinstance(tensor, FakeTensor):
        return torch._C._nn.one_hot(tensor, num_classes)
    made = torch.ops.aten.zeros.default([*tensor.shape, num_classes], dtype=tensor.dtype, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


@outside_of_compiled
class CaptureMode(TorchDispatchMode):
    """Reports every ATen call to the recorder on top of the stack; nested regions push their own."""

    def __init__(self) -> None:
        super().__init__()
        self.recorders: list[OpRecorder] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is WHICH_DEVICE:
            return which_device(*args)
        kwargs = kwargs or {}
        if desugars(types):
            if self.recorders and draws(func, args, kwargs):
                # except on the CPU DTensor shifts the generator's state around the op, unseen by any recorder
                devices = {t.device.type for t in op_leaves(args) if isinstance(t, Tensor)}
                self.recorders[-1].state_broken |= bool(devices - {"cpu"})
            return NotImplemented
        if not self.recorders or self.paused or is_bookkeeping(func) or infers_shapes():
            return func(*args, **kwargs)
        return self.recorders[-1].call(func, args, kwargs, lambda: func(*args, **kwargs))

    @contextlib.contextmanager
    def recording(self, recorder: OpRecorder) -> Iterator[None]:
        """Send ops and saved tensors to ``recorder`` within the context; inner saved-tensor hooks are refused."""

        listening = [recorder]  # emptied at the end: the graph outlives the recording and must not own the record

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            slot = listening[0].saved(tensor) if listening else -1
            return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor, slot

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            tensor, slot = packed
            if listening:  # a backward inside the forward
                listening[0].asked.add(slot)
            return tensor

        pack.of_a_region = True  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            self.recorders.append(recorder)
            stack.callback(self.recorders.pop)
            stack.callback(listening.clear)
            for hook in _watch_modules(recorder):
                stack.callback(hook.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            stack.enter_context(ReadingWatch(recorder))
            stack.enter_context(self._states_watched())
            stack.enter_context(eagerly(lambda: self._refuse(CALLS_COMPILED)))
            if not recorder.strict:
                stack.enter_context(self._hooks_may_be_off(recorder))
            yield

    def _refuse(self, problem: str) -> None:
        if not self.paused and self in _get_current_dispatch_mode_stack():  # not while a block is observed
            self.recorders[-1].refuse(problem)

    @contextlib.contextmanager
    def _hooks_may_be_off(self, recorder: OpRecorder) -> Iterator[None]:
        """Let code around blocks disable saved-tensor hooks: the recording's go for that time, and it is not used."""
        autograd: Any = torch._C._autograd
        disable, enable = autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable
        off = contextlib.ExitStack()

        def switch_off(*args: Any, **kwargs: Any) -> None:
            if self.recorders[-1:] == [recorder] and autograd._saved_tensors_hooks_is_enabled():
                recorder.refuse(HOOKS_OFF)
                off.enter_context(without_our_hooks())
            disable(*args, **kwargs)

        def switch_on() -> None:
            enable()
            off.close()

        with swapped(autograd, _saved_tensors_hooks_disable=switch_off, _saved_tensors_hooks_enable=switch_on):
            yield

    @contextlib.contextmanager
    def _states_watched(self) -> Iterator[None]:
        """Report states that are saved and restored: recording draws nothing, so the generator shows no change."""
        real = torch.set_rng_state

        def set_rng_state(state: Tensor) -> None:
            real(state)
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("jettison."):  # loans are known
                self._refuse(BY_HAND)

        with swapped(torch, set_rng_state=set_rng_state), swapped(torch.random, set_rng_state=set_rng_state):
            yield


def _in_transform() -> bool:
    """Whether modules get wrappers of `torch.func`, which have no memory of their own."""
    return torch._C._functorch.maybe_current_level() is not None


def refuse_scripted(name: str, module: nn.Module) -> None:
    """Raise `UnsupportedModule` for a module that torch.jit has scripted: its forward cannot be traced."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(
            f"{name} is scripted (torch.jit): it has no Python forward to plan. Pass the module as it was before"
        )


def _watch_modules(recorder: OpRecorder) -> Iterator[Any]:
    calls: dict[str, int] = {}
    for path, module in recorder.module.named_modules():
        if path == "":
            continue
        refuse_scripted(path, module)

        def before(_m: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path] = calls.get(path, -1) + 1
            recorder.path.append(path)
            if _in_transform() and not recorder.strict:
                recorder.refuse("it calls modules in a transform of torch.func")
            else:
                recorder.boundary(path, calls[path], False, (args, kwargs))

        def after(_m: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            if recorder.path and recorder.path[-1] == path:
                recorder.path.pop()
            if recorder.strict or not _in_transform():
                recorder.boundary(path, calls.get(path, 0), True, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after)


# functions that `torch.compile` returned ------------------------------------------------------------------------------

CALLS_COMPILED = "it calls a function that torch.compile has made, whose ops are others than those of its Python"


@contextlib.contextmanager
def eagerly(called: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run functions that `torch.compile` returned op by op, and tell ``called`` of each. Under a dispatch mode torch
    does so by itself, but then never compiles them afterwards, and fails with ``fullgraph=True``.
    """
    if "torch._dynamo" not in sys.modules:  # which takes a second to import
        yield
        return
    from torch._dynamo import eval_frame

    own = eval_frame._callback_from_stance

    def noting(callback: Any) -> Any:
        if callback is not None and callback is not False:
            called()
        return own(callback)

    with torch.compiler.set_stance("force_eager"), swapped(eval_frame, _callback_from_stance=noting):
        yield
