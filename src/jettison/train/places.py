"""Where a rank stands in the layout: its mesh axes, its share of the batch, and its random streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jettison.parallel import apply_tensor_parallel, reduce_partial_gradients, seed_ranks
from jettison.spec.layout import Layout
from jettison.train.world import World

_AXES = ("pp", "dp", "tp")
"""From the slowest link to the fastest: neighbours in rank share a tensor-parallel axis."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """A rank's place on each axis; without a mesh, alone."""

    layout: Layout
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, layout: Layout, world: World) -> Places:
        """Lay the ranks out."""
        if layout.world == 1:
            return cls(layout=layout, mesh=None)
        sizes = (layout.pp, layout.dp, layout.tp)
        return cls(layout=layout, mesh=init_device_mesh(world.device.type, sizes, mesh_dim_names=_AXES))

    @property
    def data_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return 0 if self.mesh is None else self.mesh["dp"].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along an axis, of which there are several."""
        assert self.mesh is not None
        return self.mesh[axis].get_group()

    def shard(self, model: nn.Module) -> None:
        """Tensor and sequence parallelism, in place.

        Raises:
            UnsupportedModule: no plan is known for this model.
            UsageError: it does not divide this way.
        """
        if self.layout.tp > 1:
            assert self.mesh is not None
            apply_tensor_parallel(model, self.mesh["tp"], sequence_parallel=self.layout.sp)

    def seed(self, seed: int) -> None:
        """Seed what is drawn on a micro-batch: as one process would, or each tensor-parallel rank for its own part."""
        if self.layout.tp > 1:
            assert self.mesh is not None
            seed_ranks(seed, self.mesh["tp"], sequence_parallel=self.layout.sp)
        else:
            torch.manual_seed(seed)

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make gradients whole that every tensor-parallel rank has a part of."""
        if self.layout.tp > 1:
            reduce_partial_gradients(parameters)
