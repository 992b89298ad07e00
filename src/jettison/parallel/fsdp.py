"""FSDP2 in units that recipes can use: one for each block, and one for the rest.

What a recipe computes again it computes while its block's parameters are gathered for the block's own backward, so that
nothing is gathered twice. A plan may be applied before or after; see `jettison.capture.sharded` for what happens then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from jettison.capture.blocks import find_blocks
from jettison.capture.sharded import parameter_groups


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
    """After forwards that no backward follows: free what they gathered, and what they noted for prefetching."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            for group in parameter_groups(module._get_fsdp_state()):
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()
