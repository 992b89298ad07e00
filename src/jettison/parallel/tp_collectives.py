"""Conjugate collectives at the borders of tensor-parallel regions, forward and backward.

The operators of arXiv 2205.05198, Figures 4 to 6, each a collective forward and its conjugate backward:

    f       nothing          | all-reduce          into a block, activations unsharded outside
    f-bar   all-reduce       | nothing             out of it
    g       all-gather       | reduce-scatter      into a block, activations sharded along s outside
    g-bar   reduce-scatter   | all-gather          out of it

and two next to a region that every rank computes in full:

    split   own part         | all-gather          unsharded activations become shards
    collect all-gather       | own part            shards become unsharded activations, equal on every rank

s sequence · b micro-batch · h hidden · t ranks. All collectives are torch's functional ones, which a recording sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jettison.core.errors import UsageError

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Axis:
    """One rank's place on a mesh axis. It references the group by name, so that modules can be copied."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axis:
        """The axis of a mesh of one dimension."""
        if mesh.ndim != 1:
            raise UsageError(f'got a mesh of {mesh.ndim} axes; expected one axis, such as mesh["tp"]')
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


# collectives ----------------------------------------------------------------------------------------------------------


def start_gather(x: Tensor, axis: Axis) -> Tensor:
    """Start an asynchronous all-gather of the shard; `finish_gather` waits for it."""
    return _c10d.all_gather_into_tensor(x.contiguous(), axis.size, axis.name)


def finish_gather(pending: Tensor, axis: Axis, dim: int) -> Tensor:
    """The shards of all ranks, joined along ``dim``."""
    stacked = _c10d.wait_tensor(pending)
    shape = list(stacked.shape)
    shape[0] //= axis.size
    dim %= len(shape)
    if prod(shape[:dim]) == 1:  # one after the other already
        shape[dim] *= axis.size
        return stacked.view(shape)
    return torch.cat(stacked.chunk(axis.size), dim=dim)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather along ``dim``."""
    return finish_gather(start_gather(x, axis), axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reduce-scatter along ``dim``."""
    dim %= x.dim()
    _check_divides(x, axis, dim)
    stacked = x.contiguous() if prod(x.shape[:dim]) == 1 else torch.cat(x.chunk(axis.size, dim=dim))
    if dim and prod(x.shape[:dim]) == 1:
        stacked = stacked.view(axis.size, -1)
    own = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", axis.size, axis.name))
    shape = list(x.shape)
    shape[dim] //= axis.size
    return own.view(shape)


def all_reduce(x: Tensor, axis: Axis, _dim: int) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", axis.name))


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks have; a copy, so that the full tensor can be freed."""
    _check_divides(x, axis, dim)
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size).clone(memory_format=torch.contiguous_format)


def _same(x: Tensor, _axis: Axis, _dim: int) -> Tensor:
    return x.view_as(x)


def _check_divides(x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise UsageError(
            f"got a tensor of {tuple(x.shape)}; its dim {dim} does not divide over {axis.size} tensor-parallel ranks. "
            "Pad the sequence, or switch sequence parallelism off"
        )


# borders --------------------------------------------------------------------------------------------------------------

_Move = Callable[[Tensor, Axis, int], Tensor]


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, ahead: _Move, back: _Move) -> Tensor:
        ctx.where, ctx.back = (axis, dim), back
        return ahead(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(gradient, *ctx.where), None, None, None, None


def _cross(x: Tensor, axis: Axis, dim: int, ahead: _Move, back: _Move) -> Tensor:
    return x if axis.size == 1 else _Boundary.apply(x, axis, dim, ahead, back)


f = partial(_cross, dim=0, ahead=_same, back=all_reduce)
"""(x, axis): into a block without sequence parallelism."""
f_bar = partial(_cross, dim=0, ahead=all_reduce, back=_same)
"""(x, axis): out of it: partial sums become whole."""
g = partial(_cross, ahead=gather, back=reduce_scatter)
"""(x, axis, dim): into a block with sequence parallelism: ``dim``, s, becomes whole."""
g_bar = partial(_cross, ahead=reduce_scatter, back=gather)
"""(x, axis, dim): out of it: partial sums become shards along ``dim``."""
split = partial(_cross, ahead=own_part, back=gather)
"""(x, axis, dim): this rank's part of what all ranks have."""
collect = partial(_cross, ahead=gather, back=own_part)
"""(x, axis, dim): all parts, for ranks that all do the same with them."""
