"""Feeds recorders: ATen calls, saved tensors, module boundaries, and values that Python takes past the dispatcher."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from jettison.capture.compiled import CALLS_COMPILED, eagerly
from jettison.capture.isolation import without_our_hooks
from jettison.capture.op_traits import draws, is_bookkeeping
from jettison.capture.recorder import BY_HAND, Recorder
from jettison.capture.tensor_subclasses import desugars, infers_shapes
from jettison.capture.trees import op_leaves
from jettison.capture.values import WHICH_DEVICE, outside_of_compiled, which_device
from jettison.core.errors import UnsupportedModule

_BY_HAND = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}

HOOKS_OFF = "it switches saved-tensor hooks off for a part of its forward (torch.func, disable_saved_tensors_hooks)"


class ReadingWatch(TorchFunctionMode):
    """Tells a recorder of values that Python takes out of tensors past the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__wrapped__", func) in _BY_HAND:  # see `undo.handed_out`
            self.recorder.read_by_hand(args[0])
        if func is torch._C._nn.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """What torch runs on real tensors; on fake ones it compares with a range instead."""
    if num_classes < 1 or tensor.numel() == 0 or not isinstance(tensor, FakeTensor):
        return torch._C._nn.one_hot(tensor, num_classes)
    made = torch.ops.aten.zeros.default([*tensor.shape, num_classes], dtype=tensor.dtype, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


@outside_of_compiled
class CaptureMode(TorchDispatchMode):
    """Feeds every ATen call to the recorder on top of the stack; nested regions push their own."""

    def __init__(self) -> None:
        super().__init__()
        self.recorders: list[Recorder] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is WHICH_DEVICE:
            return which_device(*args)
        kwargs = kwargs or {}
        if desugars(types):
            if self.recorders and draws(func, args, kwargs) and not _on_cpu(args):
                # DTensor shifts the generator's state around the op, where no recorder sees it
                self.recorders[-1].state_broken = True
            return NotImplemented
        if not self.recorders or self.paused or is_bookkeeping(func) or infers_shapes():
            return func(*args, **kwargs)
        return self.recorders[-1].call(func, args, kwargs, lambda: func(*args, **kwargs))

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Ops and saved tensors go to ``recorder`` until the block ends; inner saved-tensor hooks are refused."""

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
        self.recorders.append(recorder)
        hooks = _watch_modules(recorder)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, unpack),
                ReadingWatch(recorder),
                self._states_watched(),
                eagerly(self._calls_compiled),
                contextlib.nullcontext() if recorder.strict else self._hooks_may_be_off(recorder),
            ):
                yield
        finally:
            listening.clear()
            self.recorders.pop()
            for hook in hooks:
                hook.remove()

    def _calls_compiled(self) -> None:
        if not self.paused and self in _get_current_dispatch_mode_stack():  # not where a block is observed
            self.recorders[-1].refuse(CALLS_COMPILED)

    @contextlib.contextmanager
    def _hooks_may_be_off(self, recorder: Recorder) -> Iterator[None]:
        """Code around blocks may switch saved-tensor hooks off for a part of it: torch refuses that under any hooks, so
        that those of the recording are taken off there, and the recording is not used.
        """
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

        autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = switch_off, switch_on
        try:
            yield
        finally:
            autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = disable, enable

    @contextlib.contextmanager
    def _states_watched(self) -> Iterator[None]:
        """A state that is saved and put back: recording draws nothing, so that the generator itself shows no move."""
        real = torch.set_rng_state

        def set_rng_state(state: Tensor) -> None:
            real(state)
            listens = not self.paused and self in _get_current_dispatch_mode_stack()  # not where a block is observed
            if listens and not sys._getframe(1).f_globals.get("__name__", "").startswith(
                "jettison."
            ):  # loans are known
                self.recorders[-1].refuse(BY_HAND)

        places = (torch, torch.random)
        before = [place.set_rng_state for place in places]
        for place in places:
            place.set_rng_state = set_rng_state
        try:
            yield
        finally:
            for place, function in zip(places, before, strict=True):
                place.set_rng_state = function


def _on_cpu(args: Any) -> bool:
    return all(t.device.type == "cpu" for t in op_leaves(args) if isinstance(t, Tensor))


def _in_transform() -> bool:
    """Whether modules get wrappers of `torch.func`, which have no memory of their own."""
    return torch._C._functorch.maybe_current_level() is not None


def refuse_scripted(name: str, module: nn.Module) -> None:
    """What torch.jit has made of a module cannot be looked into.

    Raises:
        UnsupportedModule: it is such a one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(
            f"{name} is scripted (torch.jit): it has no Python forward to plan. Pass the module as it was before"
        )


def _watch_modules(recorder: Recorder) -> list[Any]:
    hooks = []
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

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(after))
    return hooks
