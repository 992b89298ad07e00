"""Fake copies of models as their ranks run them: torch's own FSDP2 over its fake process groups.

FSDP2's allocations of a step (all-gathered parameters, unsharded gradients before the reduce-scatter, copies for a
collective) are made on fake tensors too, and so are counted. One rank runs alone, without waiting for others.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.fake_copies import fake_copy
from jettison.capture.fsdp2 import managed_parameters, parameter_groups, sharded_modules
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import swapped

_PREFETCHED = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
_SET_ON_GROUPS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "unshard_in_backward",
)
"""Settings of FSDP's modules after `fully_shard` that memory depends on, by their internal names."""

_fake_meshes: WeakKeyDictionary[DeviceMesh, DeviceMesh] = WeakKeyDictionary()


def sharded_fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A fake copy, as on this rank. A sharded model's ranks call it together. `UnsupportedModule` if impossible."""
    if isinstance(model, DistributedDataParallel):
        rebuilds = bool(model.static_graph or not model.find_unused_parameters)
        return FakeDDP(fake_copy(model.module, mode), views=gradients_stay(model), rebuilds=rebuilds)
    if not sharded_modules(model):
        return fake_copy(model, mode)
    copied = fake_copy(model, mode, stored=True)
    _shard_alike(model, copied)
    return copied


def fake_group(group: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """A group of the same ranks that sends nothing. They call this together."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # torch's backend that sends nothing
    ranks = distributed.get_process_group_ranks(group)
    return distributed.new_group(ranks, backend="fake", use_local_synchronization=True)


def inside_of_ddp(model: nn.Module) -> nn.Module:
    """The module that DistributedDataParallel, or its stand-in, runs; the model itself where it is neither."""
    return model.module if isinstance(model, DistributedDataParallel | FakeDDP) else model


def held_by_ddp(model: nn.Module) -> int:
    """Bytes of DistributedDataParallel's gradient buckets, in addition to the gradients; 0 without it."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def may_leave_out(model: nn.Module) -> bool:
    """Whether a rank may leave parameters out that other ranks use: DistributedDataParallel was told to expect it."""
    return isinstance(model, DistributedDataParallel) and bool(model.find_unused_parameters or model.static_graph)


def gradients_stay(model: nn.Module) -> bool:
    """Whether a model's gradients live in memory that is never freed, as views of DistributedDataParallel's buckets."""
    return isinstance(model, DistributedDataParallel) and bool(model.gradient_as_bucket_view)


class FakeDDP(nn.Module):
    """Stand-in for DistributedDataParallel that sends nothing, as its reducer needs real tensors.

    Once the reducer knows the order of gradients, it rebuilds its buckets when a forward begins; gradients that are
    views of the old buckets then exist twice for a moment. If parameters may be unused and the graph is not static,
    buckets are never rebuilt (``should_rebuild_buckets`` in torch/csrc/distributed/c10d/reducer.hpp).

    If gradients are freed between steps, a backward under ``no_sync`` allocates them outside of the buckets. In the
    first backward that averages, each is copied into its bucket once it is complete, and becomes a view of it
    (``mark_variable_ready_dense`` in reducer.cpp).

    Args:
        views: gradients are views of buckets.
        rebuilds: whether buckets are rebuilt.
    """

    def __init__(self, module: nn.Module, *, views: bool, rebuilds: bool) -> None:
        super().__init__()
        self.module, self.views, self.gradients_wait, self.freed = module, views, False, True
        self.rebuilds = rebuilds
        self.unused: dict[nn.Parameter, Tensor] = {}
        self._averages = self._expects = True  # from now on; in the backward of the latest forward
        self._elsewhere: tuple[nn.Parameter, ...] = ()
        self._finishes = False  # the running backward has its final callback
        self._buckets: dict[nn.Parameter, Tensor] = {}  # of gradients that are outside of them now
        if views:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._complete)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.views and self.gradients_wait and self.rebuilds:
            rebuilt = [torch.empty_like(p) for p in self.module.parameters() if p.grad is not None or p in self.unused]
            del rebuilt
        if torch.is_grad_enabled():
            self._expects = self._averages
            if self.views and self.freed and not self._averages:
                self._leave_buckets()
        return self.module(*args, **kwargs)

    def used_elsewhere(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on each has a gradient once a backward has averaged, whether this rank used it or not: the reducer
        makes those as it ends (``copy_bucket_to_grad`` in torch/csrc/distributed/c10d/reducer.cpp).
        """
        self._elsewhere = tuple(parameters)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._will_finish)

    def _will_finish(self, _parameter: nn.Parameter) -> None:
        if self._expects and not self._finishes:
            self._finishes = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._finishes = False
        for parameter in self._elsewhere:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Forwards in here average nothing in their backwards; nothing is sent in any case."""
        return swapped(self, _averages=False)

    def _leave_buckets(self) -> None:
        """Gradients as a step begins are what is left of the last one's: buckets, of which there is no view."""
        for parameter in self.module.parameters():
            held = self._buckets.get(parameter)
            if parameter.grad is not None and (held is None or parameter.grad is held):
                self._buckets[parameter], parameter.grad = parameter.grad, None

    def _complete(self, parameter: nn.Parameter) -> None:
        if self._expects and parameter in self._buckets:
            parameter.grad = self._buckets.pop(parameter)


def _shard_alike(model: nn.Module, copied: nn.Module) -> None:
    """Call `fully_shard`, or ``replicate``, on the copy as it was called on the model, innermost first."""
    from torch.distributed.fsdp import fully_shard  # imports DTensor

    names = {module: name for name, module in model.named_modules()}
    made: list[tuple[Any, Any]] = []  # FSDP's states of the model, and of the copy
    group: Any = None
    for module in reversed(sharded_modules(model)):
        state = module._get_fsdp_state()
        if any(state is other for other, _ in made):
            continue
        modules = [copied.get_submodule(names[m]) for m in state._modules]
        placements, dtensor = {}, False
        for sharded in managed_parameters(module):
            info = sharded._module_info
            parameter = copied.get_submodule(names[info.module]).get_parameter(info.param_name)
            placements[parameter] = sharded.fsdp_placement
            dtensor = dtensor or sharded.is_dtensor
        groups = parameter_groups(state)
        _check_groups(names[module] or "the model", groups)
        group = groups[0] if groups else group  # a unit may have no parameters left: the root is still the root
        if group is None:
            continue
        own = {p for m in modules for p in m.parameters()}
        # torch's ``replicate`` that is made of FSDP2: nothing is sharded, and FSDP's hooks average gradients
        library = sys.modules.get("torch.distributed._composable.replicate_with_fsdp")
        wrap: Any = library and isinstance(module, library.ReplicateModule) and library.replicate
        sharding = {"reshard_after_forward": _reshards(state, group), "shard_placement_fn": placements.get}
        (wrap or fully_shard)(
            modules if len(modules) > 1 else modules[0],
            **({} if wrap else sharding),
            mesh=_fake_mesh(group.mesh_info.mesh, rooted=dtensor),
            mp_policy=state._mp_policy,
            offload_policy=group.offload_policy,
            ignored_params={p for p in own if p not in placements and not hasattr(p, "placements")},
        )
        made.append((state, modules[0]._get_fsdp_state()))
    _set_alike(made)


def _check_groups(name: str, groups: Sequence[Any]) -> None:
    """Whether what FSDP manages in one module can be sharded again."""
    if len(groups) > 1:
        raise UnsupportedModule(
            f"{name} is sharded by FSDP2 over several meshes at once, which no dry run repeats yet; use apply() with a "
            "policy or a plan"
        )
    if any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in groups):  # older versions have no such
        raise UnsupportedModule(
            f"{name} was sharded with dp_mesh_dims=, its parameters distributed over the whole mesh, which no dry run "
            "repeats yet; give fully_shard the data-parallel axes alone (in a "
            "trainer's configuration parallelism.spmd_backend='partial_dtensor')"
        )


def _set_alike(made: Sequence[tuple[Any, Any]]) -> None:
    """Repeat settings made after `fully_shard` by its modules' ``set_...`` methods."""
    ours = {id(state): copied for state, copied in made}
    for state, copied in made:
        for name in _PREFETCHED:
            setattr(copied, name, [ours[id(other)] for other in getattr(state, name) if id(other) in ours])
        for group, same in zip(parameter_groups(state), parameter_groups(copied), strict=True):
            for name in _SET_ON_GROUPS:
                setattr(same, name, getattr(group, name))


def _reshards(state: Any, group: Any) -> bool | int | None:
    if state._auto_reshard_after_forward:
        return None
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after == group.mesh_info else int(after.shard_mesh_size)


def _known(mesh: DeviceMesh) -> DeviceMesh | None:
    """The stand-in of an equal mesh, if its groups were not destroyed since."""
    found = _fake_meshes.get(mesh)
    try:
        return found if found is None or found.get_all_groups() else None
    except RuntimeError:
        return None


def _fake_mesh(mesh: DeviceMesh, *, rooted: bool) -> DeviceMesh:
    """The same mesh over groups that send nothing. Its ranks call this; all of its root's if ``rooted``."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # torch's backend that sends nothing
    if (known := _known(mesh)) is not None:
        return known
    names = mesh.mesh_dim_names
    if rooted and names is not None:
        root = mesh._get_root_mesh()
        if _known(root) is None:
            fake = (("fake", None),) * root.ndim
            _fake_meshes[root] = DeviceMesh(
                root.device_type, root.mesh, mesh_dim_names=root.mesh_dim_names, backend_override=fake
            )
        found = _fake_meshes[root] if mesh is root else _fake_meshes[root][names]
    else:
        groups = [fake_group(mesh.get_group(dim)) for dim in range(mesh.ndim)]
        found = DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0], mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names
        )
    _fake_meshes[mesh] = found
    return found
