"""Place of a rank in the layout: mesh axes, share of the batch, and random generators."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from jettison.parallel import apply_context_parallel, apply_tensor_parallel, reduce_partial_gradients, seed_ranks
from jettison.parallel.context_parallel import Context
from jettison.parallel.parameters import shard_blocks
from jettison.spec.layout import Layout
from jettison.train.data import derived_seed
from jettison.train.ranks import World, sockets_when_used

_AXES = ("pp", "replica", "shard", "tp")
"""Mesh axes, from the slowest link to the fastest. The two in the middle are data parallelism: ranks with equal
parameters, and ranks over which parameters are sharded. Context parallelism has no axis here: for parameters and
gradients its ranks are data-parallel ones, cp neighbours of which share their sequences.
"""
_SHARING = ("pp", "dp", "cp", "tp")
"""Mesh axes of the same ranks with context parallelism."""

Averaging = Literal["nothing", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Place of a rank on each axis. ``mesh`` has sizes along ``_AXES``: HSDP if neither of the two data-parallel ones
    is 1; ``sharing`` along ``_SHARING``, with context parallelism. ``mixed``: FSDP2 reads bf16 copies of parameters.
    """

    layout: Layout
    mesh: DeviceMesh
    mixed: bool
    sharing: DeviceMesh | None = None

    @classmethod
    def of(cls, layout: Layout, world: World, *, spread: tuple[int, int], mixed: bool) -> Places:
        """Build the meshes; ``spread``: number of replicas, and of ranks over which each is sharded."""
        sizes, kind = (layout.pp, *spread, layout.tp), world.device.type
        with sockets_when_used():
            mesh = init_device_mesh(kind, sizes, mesh_dim_names=_AXES)
            sharing = None
            if layout.cp > 1:
                sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
                sharing = init_device_mesh(kind, sizes, mesh_dim_names=_SHARING)
        return cls(layout=layout, mesh=mesh, mixed=mixed, sharing=sharing)

    @property
    def context(self) -> Context | None:
        return None if self.sharing is None else Context.of(self.sharing["cp"])

    @property
    def averaging(self) -> Averaging:
        """Averaging of gradients. DistributedDataParallel takes only plain parameters of one module."""
        if self.layout.zero or self.mixed:
            return "fsdp"
        if self.layout.dp * self.layout.cp == 1:
            return "nothing"
        return "fsdp" if self.layout.tp > 1 or self.layout.pp > 1 else "ddp"

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the global batch."""
        own = self.mesh["replica"].get_local_rank() * self.mesh["shard"].size() + self.mesh["shard"].get_local_rank()
        return own // self.layout.cp

    @property
    def agreeing(self) -> DeviceMesh | None:
        """Ranks that must recompute the same ops, if that does not follow from parameters."""
        return self.mesh["replica"] if self.sharing is not None and self.averaging == "ddp" else None

    @property
    def plans(self) -> bool:
        """Whether this rank plans for all ranks of the same pipeline stage."""
        return dist.get_rank() == int(self.mesh.mesh[self.stage].min())

    @property
    def stage(self) -> int:
        return self.mesh["pp"].get_local_rank()

    def fake(self) -> FakePlaces:
        """Return the same places for a dry run on fake tensors. All ranks call it."""
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # torch's backend that sends nothing
        device, sizes = self.mesh.device_type, tuple(self.mesh.shape)
        nothing = dict.fromkeys(_AXES, "fake")
        mesh = init_device_mesh(device, sizes, mesh_dim_names=_AXES, backend_override=nothing)
        return FakePlaces(layout=self.layout, mesh=mesh, mixed=self.mixed, sharing=self.sharing)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh[axis].get_group()

    def split_layers(self, model: nn.Module) -> None:
        """Apply context, tensor and sequence parallelism in place, before planning. Raise `UnsupportedModule` if none
        is known for this model, `UsageError` if its sizes do not divide.
        """
        if self.sharing is not None:
            apply_context_parallel(model, self.sharing["cp"])
        if self.layout.tp > 1:
            apply_tensor_parallel(model, self.mesh["tp"], sequence_parallel=self.layout.sp)

    def shard(self, model: nn.Module) -> None:
        """Apply FSDP2 in place, if the layout or the precision needs it; it replaces the parameters."""
        if self.averaging != "fsdp":
            return
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        replicated = not self.layout.zero or self.mesh["replica"].size() > 1
        mesh = self.mesh["replica", "shard"] if replicated else self.mesh["shard"]
        options = {"mp_policy": policy} if self.mixed else {}
        shard_blocks(model, mesh, reshard_after_forward=self.layout.zero == 3, **options)

    def seed(self, seed: int) -> None:
        """Seed the random generators for a micro-batch: as one process would, or per rank if ranks share it."""
        if self.context is not None:
            seed = derived_seed(seed, "context", self.context.axis.rank)
        if self.layout.tp > 1:
            seed_ranks(seed, self.mesh["tp"], sequence_parallel=self.layout.sp)
        else:
            torch.manual_seed(seed)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients of which every tensor-parallel rank has a part."""
        if self.layout.tp > 1 and self.averaging != "fsdp":
            reduce_partial_gradients(parameters)


class FakePlaces(Places):
    """Places for dry runs, without communication; collectives allocate as real ones do."""

    @property
    def averaging(self) -> Averaging:
        """Averaging without DistributedDataParallel, whose reducer needs real tensors; buckets are counted apart."""
        found = super().averaging
        return "nothing" if found == "ddp" else found

    def seed(self, seed: int) -> None:
        """Nothing."""
