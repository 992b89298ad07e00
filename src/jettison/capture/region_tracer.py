"""Trace one region on its own, from the arguments of a call that is about to happen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from jettison.capture.dispatch import CaptureMode
from jettison.capture.fakes import fake_copy
from jettison.capture.isolation import forward_of, leaving_nothing
from jettison.capture.recorder import Recorder
from jettison.capture.recording import RegionTrace
from jettison.capture.signature import opaque_copy
from jettison.capture.tensor_subclasses import arrived, has_gradients, plain, wrapping
from jettison.capture.tracer import mode_of, on_fakes
from jettison.capture.trees import tree_flatten, tree_leaves, tree_unflatten


def trace_region(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shared: frozenset[int] = frozenset(),
    copy: bool = True,
    runs: Iterable[Any] = (),
) -> RegionTrace:
    """Record a module's forward for arguments like these, on fake tensors.

    Args:
        copy: run a fake copy of the module; without, itself on its real parameters, where what it runs is not its own.
        runs: what the module's forward stands for, where that is no code of its own.
        shared: leaf positions of arguments that live elsewhere anyway and cost this region nothing.

    Raises:
        TraceError: the forward cannot run on tensors without values, or returns what cannot be recorded.
    """
    leaves, spec = tree_flatten((args, kwargs))
    mode = mode_of(module, args, kwargs)
    fake_model = fake_copy(module, mode) if copy else module  # its blocks and itself run their classes' own forward
    capture = CaptureMode()
    with on_fakes(mode):
        faked = tree_leaves(opaque_copy([_like(leaf, mode) for leaf in leaves], lambda t: _like(t, mode)))
        fake_args, fake_kwargs = tree_unflatten(faked, spec)
        with leaving_nothing([fake_model], (*runs, *faked)) as state:
            recorder = Recorder(fake_model, faked)
            with capture, capture.recording(recorder):
                output = forward_of(module, fake_model)(*fake_args, **fake_kwargs)
            trace = recorder.finish(output)
            state.refuse_draws()
            state.refuse_writes()
    trace.share(shared)
    return trace


def _like(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(plain(leaf), FakeTensor):
        return leaf
    if not has_gradients(leaf.dtype):
        return leaf  # ids and masks keep their values: a forward may look at them
    wrap = wrapping(leaf)
    fake = mode.from_tensor(arrived(leaf.detach()))
    if wrap is not None:
        fake = wrap.wrap(fake)
    if leaf.requires_grad:
        fake = fake.requires_grad_()
        fake = fake if leaf.is_leaf else fake.view_as(fake)
    return fake
