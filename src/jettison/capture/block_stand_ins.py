"""Stand-ins for blocks: outputs made from metadata, or observed in one real call."""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.dispatch import eagerly
from jettison.capture.isolation import WritesUndone, leaving_nothing, without_our_hooks, without_plans
from jettison.capture.pytrees import tree_flatten, tree_unflatten
from jettison.capture.randomness import forked_streams
from jettison.capture.recorder import OpRecorder, RegionTrace, TensorRef
from jettison.capture.signature import opaque_copy
from jettison.capture.state_kinds import TENSOR_HOOKS
from jettison.capture.tensor_subclasses import Wrapping, has_gradients, plain, reach_of, wrapping
from jettison.core.objects import ABSENT, grouped, swapped_entries

# outputs made from metadata, tied to a block's inputs in the graph ----------------------------------------------------


StubBackward = Callable[[int, tuple[Any, ...], Callable[[], list[Any]]], list[Any]]
"""Called in a stub's backward with its call's number and what makes its gradients, which it returns."""


def forwards(instead: Mapping[nn.Module, Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Run these functions in place of modules' forwards."""
    return swapped_entries((vars(module), "forward", forward) for module, forward in instead.items())


def stub_outputs(
    trace: RegionTrace,
    leaves: list[Any],
    *,
    probe: StubBackward | None = None,
    call: int = 0,
    held: tuple[Any, ...] = (),
) -> Any:
    """The region's outputs from metadata, returned inputs passed through. ``held`` lives until the stub's backward."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    by_input = {b: leaves[position] for b, position in trace.inputs.items()}
    made = [r for r in trace.output_leaves if isinstance(r, TensorRef) and r.buffer not in by_input]
    device = max((t.device for t in tensors), key=lambda d: d.type != "cpu", default=torch.device("cpu"))
    if not any(t.requires_grad for t in tensors):  # a block on the bare batch: the gradients are its parameters'
        tensors.append(torch.empty(0, device=device, requires_grad=True))
    fresh = list(_Stub.apply(made, trace.constants, device, (probe, call, held), *tensors)) if made else []
    out = []
    for leaf in trace.output_leaves:
        if not isinstance(leaf, TensorRef):
            out.append(leaf)
        elif leaf.buffer in by_input:  # itself, or a view of it
            given = by_input[leaf.buffer]
            same = leaf.wrap is not None or (tuple(given.shape), tuple(given.stride())) == (leaf.size, leaf.stride)
            out.append(given if same else given.as_strided(leaf.size, leaf.stride, leaf.offset))
        else:
            out.append(fresh.pop(0))
    return tree_unflatten(out, trace.output_spec)


class _Stub(torch.autograd.Function):
    """Stands for a block in the root's graph: makes its outputs, and gradients for its inputs, without values."""

    @staticmethod
    def forward(
        ctx: Any, made: list[TensorRef], constants: frozenset[int], device: torch.device, extra: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.metas = [
            (plain(t).shape, t.dtype, t.device, wrapping(t)) if has_gradients(t.dtype) and t.requires_grad else None
            for t in tensors
        ]
        ctx.extra = extra
        ctx.set_materialize_grads(False)  # outputs without a path to a parameter have no gradient
        out = tensors_made(made, device, like=next((t for t in tensors if isinstance(t, FakeTensor)), None))
        ctx.mark_non_differentiable(
            *(t for t, r in zip(out, made, strict=True) if r.buffer in constants or not has_gradients(t.dtype))
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probe, call, _held = ctx.extra

        def gradients() -> list[Any]:
            ctx.extra = (None, call, ())
            return [None if meta is None else _empty(*meta) for meta in ctx.metas]

        del _held
        return None, None, None, None, *(gradients() if probe is None else probe(call, grads, gradients))


def tensors_made(refs: Sequence[TensorRef], device: torch.device, *, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """New tensors, uninitialized. Those that are parts of one buffer are parts of one storage: a call's signature
    includes how its arguments share memory. With a fake tensor ``like`` they are fake: plain integers would be real
    in a call with a real batch (see `RealUntilFake`), and index with uninitialized memory.
    """
    empty = torch.empty if like is None else plain(like).detach().new_empty
    storages: dict[int, Any] = {}
    for buffer, of_one in grouped((ref.buffer, ref) for ref in filter(_is_of_a_storage, refs)).items():
        if len(of_one) > 1 and len({r.dtype for r in of_one}) == 1:
            end = max(r.offset + reach_of(r.size, r.stride) for r in of_one)
            storages[buffer] = empty(end, dtype=of_one[0].dtype, device=device).untyped_storage()
    strided = torch.empty_strided if like is None else plain(like).detach().new_empty_strided
    made = []
    for r in refs:
        if r.buffer in storages and _is_of_a_storage(r):
            made.append(empty(0, dtype=r.dtype, device=device).set_(storages[r.buffer], r.offset, r.size, r.stride))
        else:
            tensor = strided(r.size, r.stride, dtype=r.dtype, device=device)
            made.append(tensor if r.wrap is None else r.wrap.wrap(tensor))
    return tuple(made)


def _is_of_a_storage(ref: TensorRef) -> bool:
    return ref.wrap is None and 0 not in ref.size


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, wrap: Wrapping | None) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    return made if wrap is None else wrap.wrap(made)


# outputs of one real call ---------------------------------------------------------------------------------------------
#
# A forward whose shapes depend on values (a loop over the experts that got a token) or that launches kernels past the
# dispatcher has no program. The model around it only needs its outputs' shapes; its memory is measured elsewhere.


def is_real(module: nn.Module) -> bool:
    """Whether a module's tensors have values."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(not isinstance(plain(t), FakeTensor) and t.device.type != "meta" for t in tensors)


def observed_trace(module: nn.Module, args: Any, kwargs: Any) -> RegionTrace:
    """A trace without ops: inputs, and outputs of one call on real tensors; buffers and generators are restored."""
    leaves, spec = tree_flatten((args, kwargs))
    with _disable_current_modes(), without_our_hooks(), restored(module, leaves):
        given = [stand_in(leaf) for leaf in leaves]
        output = run_holding_nothing(module.forward, tree_unflatten(given, spec))
        trace = OpRecorder(nn.Module(), given).finish(output)  # all outputs look like tensors of other graphs
    trace.entangled, trace.constants = False, frozenset()
    return trace


def run_holding_nothing(forward: Callable[..., Any], call: tuple[Any, Any]) -> Any:
    """Return a forward's results for a copy of these arguments. Nothing that it saves stays, unless it refuses to run
    under hooks, as transforms of `torch.func` do, or runs its own backward (`torch.autograd.grad`).
    """

    def run() -> Any:
        args, kwargs = opaque_copy(call, stand_in)
        return forward(*args, **kwargs)

    def asked(_nothing: None) -> Tensor:
        raise RuntimeError("a forward runs a backward of its own")

    with eagerly(), torch.enable_grad():  # it builds a graph: it may put hooks on its nodes
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda _saved: None, asked):
                return run()
        except RuntimeError:
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
def restored(module: nn.Module, values: Iterable[Any]) -> Iterator[None]:
    """Restore tensors, random generators and Python's state after the context. No plan is active in it."""

    with (
        without_plans(module),
        forked_streams(),
        leaving_nothing([module], values),
        WritesUndone(),
        torch.autograd.set_detect_anomaly(False),  # gradients are uninitialized memory
    ):
        yield


def without_gradient_hooks(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Disable hooks on a module's parameters for a backward of random numbers: they may step an optimizer."""
    tables = [table for parameter in module.parameters() for table in _gradient_hooks(parameter)]
    return swapped_entries((table, number, ABSENT) for table in tables for number in table)


def _gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hook tables that autograd uses: the tensor's, and that of the node which accumulates its gradient."""
    found = [getattr(parameter, name, None) for name in TENSOR_HOOKS]
    if parameter.requires_grad and parameter.is_leaf:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        found += [one for one in gc.get_referents(node) if type(one) is OrderedDict]
    return list({id(table): table for table in found if table}.values())
