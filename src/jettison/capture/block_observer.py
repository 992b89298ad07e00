"""What cannot be recorded on fake tensors is observed on real ones: one call of one block, without a graph.

A forward whose shapes depend on values (a loop over the experts that got a token) or that launches kernels past the
dispatcher has no program. Its outputs' shapes are all that the model around it needs; its memory is measured elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.compiled import eagerly
from jettison.capture.isolation import leaving_nothing, without_our_hooks, without_plans
from jettison.capture.recording import RegionTrace, TensorRef
from jettison.capture.signature import opaque_copy
from jettison.capture.snapshots import TENSOR_HOOKS
from jettison.capture.tensor_subclasses import has_gradients, plain
from jettison.capture.trees import tree_flatten, tree_unflatten
from jettison.capture.undo import WritesUndone
from jettison.ledger.program import Buffer, Program, Source


def is_real(module: nn.Module) -> bool:
    """Whether a module's tensors have values."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(not isinstance(plain(t), FakeTensor) and t.device.type != "meta" for t in tensors)


def observed_trace(module: nn.Module, args: Any, kwargs: Any) -> RegionTrace:
    """A trace without ops: inputs, and outputs as one real call returned them.

    Args:
        module: on real tensors. Its buffers and the random generators are left as they were.
    """
    leaves, spec = tree_flatten((args, kwargs))
    with _disable_current_modes(), without_our_hooks(), undisturbed(module, leaves):
        given = [stand_in(leaf) for leaf in leaves]
        output = run_holding_nothing(module.forward, tree_unflatten(given, spec))
    return _trace_of(given, output)


@contextlib.contextmanager
def holding_nothing() -> Iterator[None]:
    """Forwards make a graph that nobody goes through: there has to be one, for they may put hooks on what is in it."""

    def nothing(_saved: Any) -> None:
        return None

    def asked(_nothing: None) -> Tensor:
        raise RuntimeError("a forward runs a backward of its own")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(nothing, asked):
        yield


def run_holding_nothing(forward: Callable[..., Any], call: tuple[Any, Any]) -> Any:
    """What a forward returns for a copy of these arguments. Nothing that it saves stays, unless it refuses to run under
    hooks, as transforms of `torch.func` do, or goes through its graph itself (`torch.autograd.grad`).
    """

    def run() -> Any:
        args, kwargs = opaque_copy(call, stand_in)
        return forward(*args, **kwargs)

    try:
        with eagerly(), holding_nothing():
            return run()
    except RuntimeError:
        with eagerly(), torch.enable_grad():
            return run()


def stand_in(leaf: Any) -> Any:
    """A real tensor for a fake one: random floats, and zeros for integers, which index anything."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes():
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        made = made.normal_() if has_gradients(leaf.dtype) else made.zero_()
        return made.requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def undisturbed(module: nn.Module, values: Iterable[Any]) -> Iterator[None]:
    """Tensors that were there, random generators and Python's state come out as they went in. No plan is at work."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with (
        without_plans(module),
        torch.random.fork_rng(devices=devices),
        leaving_nothing([module], values),
        WritesUndone(),
        torch.autograd.set_detect_anomaly(False),  # gradients are memory that nobody has written to
    ):
        yield


@contextlib.contextmanager
def without_gradient_hooks(module: nn.Module) -> Iterator[None]:
    """A backward of random numbers through a module calls no hooks on its parameters: they may step an optimizer."""
    tables = [table for parameter in module.parameters() for table in _gradient_hooks(parameter)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _gradient_hooks(parameter: Tensor) -> list[Any]:
    """The very tables that autograd goes by: on the tensor, and on the node that adds up its gradient."""
    found = [getattr(parameter, name, None) for name in TENSOR_HOOKS]
    if parameter.requires_grad and parameter.is_leaf:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        found += [one for one in gc.get_referents(node) if type(one) is OrderedDict]
    return list({id(table): table for table in found if table}.values())


def _trace_of(given: list[Any], output: Any) -> RegionTrace:
    buffers: list[Buffer] = []
    inputs: dict[int, int] = {}
    known: dict[int, int] = {}
    for position, leaf in enumerate(given):
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
            known[leaf.untyped_storage()._cdata] = inputs_index = len(buffers)
            inputs[inputs_index] = position
            buffers.append(_buffer(inputs_index, leaf, Source.INPUT, str(position)))
    leaves, spec = tree_flatten(output)
    refs: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            refs.append(leaf)
            continue
        index = known.setdefault(leaf.untyped_storage()._cdata, len(buffers))
        if index == len(buffers):
            buffers.append(_buffer(index, leaf, Source.OUTER, ""))
        refs.append(TensorRef(index, tuple(leaf.shape), tuple(leaf.stride()), leaf.storage_offset(), leaf.dtype))
    outputs = tuple(r.buffer for r in refs if isinstance(r, TensorRef))
    return RegionTrace(
        program=Program(buffers=tuple(buffers), ops=(), slots=(), outputs=outputs),
        inputs=inputs,
        output_leaves=refs,
        output_spec=spec,
    )


def _buffer(index: int, tensor: Tensor, source: Source, name: str) -> Buffer:
    return Buffer(
        index=index, nbytes=tensor.untyped_storage().nbytes(), source=source, name=name, keepable=source is Source.INPUT
    )
