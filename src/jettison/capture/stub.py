"""A block that only looks like one: its outputs, made out of metadata and tied to its inputs in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.recording import RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import Wrapping, has_gradients, plain, wrapping
from jettison.capture.trees import tree_unflatten


class StubProbe(Protocol):
    """Told when a stubbed block starts its forward and its backward."""

    def forward(self, call: int) -> None: ...
    def backward(self, call: int) -> None: ...


@contextlib.contextmanager
def forwards(instead: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules run these in the place of their forwards."""
    own = {module: vars(module)["forward"] for module in instead if "forward" in vars(module)}
    for module, forward in instead.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in instead:
            module.__dict__.pop("forward", None)
        for module, forward in own.items():
            vars(module)["forward"] = forward


def stub_outputs(
    trace: RegionTrace, leaves: list[Any], *, probe: StubProbe | None = None, call: int = 0, held: tuple[Any, ...] = ()
) -> Any:
    """What the region returned, made anew from metadata; inputs that it returned are passed through.

    Args:
        held: kept alive until the stub's backward, as the block would.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    by_input = {b: leaves[position] for b, position in trace.inputs.items()}
    made = [r for r in trace.output_leaves if isinstance(r, TensorRef) and r.buffer not in by_input]
    device = max((t.device for t in tensors), key=lambda d: d.type != "cpu", default=torch.device("cpu"))
    if not any(t.requires_grad for t in tensors):  # a block on the bare batch: the gradients are its parameters'
        tensors.append(torch.empty(0, device=device, requires_grad=True))
    if probe is not None:
        probe.forward(call)
    fresh = list(_Stub.apply(made, trace.constants, device, (probe, call, held), *tensors)) if made else []
    out = []
    for leaf in trace.output_leaves:
        if not isinstance(leaf, TensorRef):
            out.append(leaf)
        elif leaf.buffer in by_input:
            out.append(_part_of(by_input[leaf.buffer], leaf))
        else:
            out.append(fresh.pop(0))
    return tree_unflatten(out, trace.output_spec)


class _Stub(torch.autograd.Function):
    """Stands for a block in the root's graph: makes its outputs, and gradients for its inputs, out of nothing."""

    @staticmethod
    def forward(
        ctx: Any, made: list[TensorRef], constants: frozenset[int], device: torch.device, extra: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.metas = [
            (plain(t).shape, t.dtype, t.device, wrapping(t)) if has_gradients(t.dtype) and t.requires_grad else None
            for t in tensors
        ]
        ctx.extra = extra
        out = tensors_made(made, device, beside=next((t for t in tensors if isinstance(t, FakeTensor)), None))
        ctx.mark_non_differentiable(
            *(t for t, r in zip(out, made, strict=True) if r.buffer in constants or not has_gradients(t.dtype))
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probe, call, _held = ctx.extra
        if probe is not None:
            probe.backward(call)
        ctx.extra = (None, call, ())
        made = [None if m is None else _empty(m[0], None, *m[1:]) for m in ctx.metas]
        return None, None, None, None, *made


def _part_of(given: Tensor, ref: TensorRef) -> Tensor:
    """An input that comes back: itself, or a view of it."""
    if ref.wrap is not None or (tuple(given.shape), tuple(given.stride())) == (ref.size, ref.stride):
        return given
    return given.as_strided(ref.size, ref.stride, ref.offset)


def tensors_made(
    refs: Sequence[TensorRef], device: torch.device, *, beside: Tensor | None = None
) -> tuple[Tensor, ...]:
    """New tensors, uninitialised. Those that are parts of one buffer are parts of one storage: a call's signature says
    how its arguments share memory.

    Args:
        beside: a fake tensor; what is made is then fake as well. Bare integers would be real beside a real batch (see
            `RealUntilFake`), and the code after a stub would index by what happened to be in memory.
    """
    empty = torch.empty if beside is None else plain(beside).detach().new_empty
    parts: dict[int, list[TensorRef]] = {}
    for ref in filter(_is_of_a_storage, refs):
        parts.setdefault(ref.buffer, []).append(ref)
    storages: dict[int, Any] = {}
    for buffer, of_one in parts.items():
        if len(of_one) > 1 and len({r.dtype for r in of_one}) == 1:
            end = max(r.offset + 1 + sum((n - 1) * s for n, s in zip(r.size, r.stride, strict=True)) for r in of_one)
            storages[buffer] = empty(end, dtype=of_one[0].dtype, device=device).untyped_storage()
    return tuple(
        empty(0, dtype=r.dtype, device=device).set_(storages[r.buffer], r.offset, r.size, r.stride)
        if r.buffer in storages and _is_of_a_storage(r)
        else _empty(r.size, r.stride, r.dtype, device, r.wrap, beside)
        for r in refs
    )


def _is_of_a_storage(ref: TensorRef) -> bool:
    return ref.wrap is None and 0 not in ref.size


def _empty(
    size: Any,
    stride: Any,
    dtype: torch.dtype,
    device: torch.device,
    wrap: Wrapping | None,
    beside: Tensor | None = None,
) -> Tensor:
    if stride is None:
        made = torch.empty(size, dtype=dtype, device=device)
    elif beside is not None:
        made = plain(beside).detach().new_empty_strided(size, stride, dtype=dtype, device=device)
    else:
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return made if wrap is None else wrap.wrap(made)
