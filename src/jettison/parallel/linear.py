"""Column-parallel products that hold the shard of their input and gather it again in backward.

NOTE [ One gather for all products of an input ]
q, k and v read one gathered input; so do gate and up. `gather_input` gathers it once and leaves a note on the result:
the shard, and a `Gathered` that all of these products share. Each saves the shard, which is one storage however often
it is saved, and none saves the whole. In backward the first of them starts the gather, multiplies for the gradient of
its input while it is under way, and then waits; the others find it done; the last lets go of it. The note hangs on the
tensor, so nothing outlives the forward. A product that gets something else than what was gathered (a part of it, a
cast) finds no note and saves what it got, as torch does: more bytes, same gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jettison.parallel.regions import Axis, finish_gather, g, start_gather

_NOTE = "_jettison_gathered"


class Gathered:
    """The second gather of one input, in backward, for all products that read it."""

    __slots__ = ("_left", "_pending", "_whole", "axis", "dim", "readers")

    def __init__(self, axis: Axis, dim: int) -> None:
        self.axis = axis
        self.dim = dim
        self.readers = 0
        self._left = 0
        self._pending: Tensor | None = None
        self._whole: Tensor | None = None

    def start(self, shard: Tensor) -> None:
        """Begin to gather, unless another reader has."""
        if self._pending is None and self._whole is None:
            self._pending = start_gather(shard, self.axis)
            self._left = self.readers

    def take(self) -> Tensor:
        """The gathered tensor. The last reader's call forgets it."""
        if self._whole is None:
            assert self._pending is not None
            self._whole, self._pending = finish_gather(self._pending, self.axis, self.dim), None
        whole = self._whole
        self._left -= 1
        if self._left <= 0:
            self._whole = None
        return whole


def gather_input(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """g, with the note that `column_linear` looks for."""
    if axis.size == 1:
        return x
    dtype = _autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)  # what autocast would do to the whole, done to the shard
    whole = g(x, axis, dim)
    setattr(whole, _NOTE, (Gathered(axis, dim), x.detach()))
    return whole


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias, with this rank's rows of W.

    Args:
        weight: local, n/t × h.
    """
    note = _note_of(x)
    if note is None:
        return functional.linear(x, weight, bias)
    gathered, shard = note
    if (dtype := _autocast_dtype(x)) is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _ColumnLinear.apply(x, weight, bias, shard, gathered)
    return out


class _ColumnLinear(torch.autograd.Function):
    """See NOTE [ One gather for all products of an input ]."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, shard: Tensor, gathered: Gathered
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            gathered.readers += 1
            ctx.save_for_backward(weight, shard)
        else:
            ctx.save_for_backward(weight)
        ctx.gathered = gathered
        return functional.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, *shard = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = (_is_wanted(ctx, i) for i in range(3))
        rows = dy.reshape(-1, dy.shape[-1])
        if wants_weight:
            ctx.gathered.start(shard[0])
        dx = torch.matmul(dy, weight) if wants_x else None
        db = rows.sum(0) if wants_bias else None
        dw = None
        if wants_weight:
            x = ctx.gathered.take()
            dw = rows.t() @ x.reshape(-1, x.shape[-1])
        return dx, dw, db, None, None


@cache
def can_split_backward() -> bool:
    """Whether a schedule may run the backward of these matmuls in two halves, as zero-bubble ones do.

    Between the halves torch's schedules refer to nodes of the graph from Python alone. In torch 2.11 that does not keep
    the node of an ``autograd.Function``.
    """
    x, weight = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True)
    node = _ColumnLinear.apply(x, weight, None, x, Gathered(Axis("", 1, 0), 0)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


def _is_wanted(ctx: Any, i: int) -> bool:
    """Whether this very backward asks for an input's gradient: a split one asks for x's and the weight's in turn."""
    node = ctx.next_functions[i][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def _note_of(x: Tensor) -> tuple[Gathered, Tensor] | None:
    """What `gather_input` left on x, or on the tensor that x is another shape of."""
    note = getattr(x, _NOTE, None)
    if note is None and x._base is not None and x.is_contiguous() and x._base.is_contiguous():
        whole = (x.numel(), x.shape[-1], x.dtype) == (x._base.numel(), x._base.shape[-1], x._base.dtype)
        note = getattr(x._base, _NOTE, None) if whole else None
    return note


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
