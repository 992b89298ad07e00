"""Parameters as DTensors, their local parts, and their gradients.

NOTE [ Gradients of replicated parameters ]
A norm on a shard of the sequence reads a part of the tokens, so its weight's gradient on each rank is a part of a sum.
It is a DTensor with the placement Partial, which optimizers, FSDP2 and ``full_tensor()`` read correctly, and which
accumulates over micro-batches without communication. `reduce_partial_gradients` sums all of them over the ranks in one
all-reduce; call it before clipping and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle

from jettison.capture.blocks import find_blocks
from jettison.capture.fsdp2 import parameter_groups
from jettison.core.errors import UsageError
from jettison.parallel.tp_collectives import Axis, all_reduce


def distribute(style: ParallelStyle, module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a module's parameter, if it has one, by a DTensor."""
    parameter = getattr(module, name, None)
    if parameter is None or isinstance(parameter, DTensor):
        return
    made = distribute_tensor(parameter, mesh, [placement], src_data_rank=style.src_data_rank)
    setattr(module, name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def local_part(parameter: Tensor | None, *, partial: bool = False) -> Tensor | None:
    """This rank's part, differentiable; ``partial``: its gradient is a part of a sum over the ranks."""
    if parameter is None or not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=(Partial(),) if partial else None)


def put_whole(tensor: Tensor, values: Tensor) -> None:
    """Copy an unsharded tensor's values into this rank's part, without communication. ``values`` have as many elements
    as the full tensor, and may have one dim more: see `ColumnParallel`.
    """
    values = values.reshape(tensor.shape)
    if isinstance(tensor, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            values = values.narrow(dim, start, size)
        tensor = tensor.to_local()
    with torch.no_grad():
        tensor.copy_(values)


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Reduce Partial gradients: one all-reduce for each mesh and dtype; none without such gradients.

    Call it before ``clip_grad_norm_``: torch 2.11 does not scale Partial gradients there.
    """
    groups: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            groups.setdefault((gradient.device_mesh, gradient.dtype), []).append(parameter)
    for (mesh, _), members in groups.items():
        if mesh.ndim != 1:  # along with FSDP, which reduces them itself
            raise UsageError(f"got a partial gradient on a mesh of {mesh.ndim} axes; expected one on the tp axis alone")
        locals_ = [p.grad.to_local() for p in members]
        whole = all_reduce(torch.cat([t.reshape(-1) for t in locals_]), Axis.of(mesh), 0)
        for parameter, part, local in zip(members, whole.split([t.numel() for t in locals_]), locals_, strict=True):
            parameter.grad = DTensor.from_local(part.view_as(local), mesh, [Replicate()], run_check=False)


# FSDP2, a unit for each block -----------------------------------------------------------------------------------------
#
# A recipe recomputes while its block's parameters are unsharded for the block's own backward, so that nothing is
# all-gathered twice. A plan may be applied before or after; see `jettison.capture.fsdp2`.


def shard_blocks(
    model: nn.Module, mesh: DeviceMesh, *, regions: Iterable[str] | None = None, **options: Any
) -> nn.Module:
    """`fully_shard` every block, then the model, in place.

    Args:
        mesh: the data-parallel axis, or two for FSDP within replicas. Parameters may be sharded by tensor parallelism.
        regions: names of the blocks; by default the model's repeated blocks, which are what plans are made of.
        options: of `fully_shard`: ``mp_policy``, ``reshard_after_forward``, ...

    Raises:
        UsageError: a name in ``regions`` is not a module of the model.
    """
    for name in find_blocks(model, regions):
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def forget_forwards(model: nn.Module) -> None:
    """Free all-gathered parameters and prefetch state of forwards without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            for group in parameter_groups(module._get_fsdp_state()):
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()
