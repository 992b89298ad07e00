"""What ranks do for tests/parallel/test_parallel_fsdp.py: plans under FSDP2, alone and over tensor parallelism."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import jettison
from jettison.capture.fsdp2 import parameter_groups, sharded_modules
from jettison.models.reference import Gpt
from jettison.parallel import apply_tensor_parallel
from jettison.parallel.parameters import shard_blocks
from jettison.runtime import saved_tensor_hooks
from jettison.verify.differences import buffer_digest
from support.parallel_plans import SEED, of_record, plan, steps
from support.rank_models import Counting, Model, Ops, distance, model, same, shard, tokens, whole_gradients


def freeze(module: Model) -> None:
    """A whole block, and parts of the others."""
    for name, parameter in module.named_parameters():
        if "attention.q" in name or "norm1" in name or name.startswith(("blocks.1", "embedding")):
            parameter.requires_grad_(False)


def fsdp(module: Model, mesh: DeviceMesh, how: str) -> None:
    """Shard as a case says."""
    options: dict[str, Any] = {}
    if how == "kept whole":
        options["reshard_after_forward"] = False
    if how == "to a smaller mesh":
        options["reshard_after_forward"] = 2
    if how == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "bf16 blocks":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh)
        return
    if how == "nested":
        for block in module.blocks:
            fully_shard(block.mlp.up, mesh=mesh)
    if how == "norm and head together":
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard([module.norm, module.head], mesh=mesh)
        fully_shard(module, mesh=mesh)
        return
    shard_blocks(module, mesh, **options)


def built(how: str) -> Model:
    """The model of a case."""
    module = model(3 if how == "three blocks" else 2)
    if how == "frozen":
        freeze(module)
    if how == "used twice":
        module.blocks[1] = module.blocks[0]
    if how == "counting":
        for block in module.blocks:
            block.after = Counting()
    return module


def trained(module: Any, how: str, rank: int) -> tuple[dict[str, torch.Tensor], Ops]:
    """Gradients and ops of the second step."""
    if how not in ("accumulated", "kept graph"):
        return steps(module, tokens(rank), SEED + rank)
    torch.manual_seed(SEED + rank)
    for _step in range(2):
        module.zero_grad()
        with Ops() as ops:
            if how == "kept graph":
                loss = module(*tokens(rank))
                loss.backward(retain_graph=True)
                loss.backward()
                continue
            for micro_batch in range(3):
                module.set_is_last_backward(micro_batch == 2)
                module.set_requires_gradient_sync(micro_batch == 2)
                module(*tokens(10 * micro_batch + rank)).backward()
    return whole_gradients(module), ops


class Demands:
    """Counts recipes' questions for parameters that are not whole at that moment, and what FSDP gathered for them."""

    def __init__(self) -> None:
        self.asked = 0
        self._real = saved_tensor_hooks.whole_now

    def __enter__(self) -> Demands:
        saved_tensor_hooks.whole_now = self._asked
        return self

    def __exit__(self, *_: Any) -> None:
        saved_tensor_hooks.whole_now = self._real

    def _asked(self, module: Any, table: Any, leaf: str, seen: torch.Tensor) -> torch.Tensor:
        before = table[leaf]
        found = self._real(module, table, leaf, seen)
        self.asked += found is not before
        assert not isinstance(found, DTensor) or found.device_mesh.ndim == 1
        return found


def fsdp_run(mesh: DeviceMesh, how: str, policy: str, order: str) -> tuple[dict[str, Any], Any]:
    rank, handle, module = mesh.get_local_rank(), None, built(how)
    if policy and order == "before":
        handle = plan(module, policy, tokens(rank))
    fsdp(module, mesh, how)
    if policy and order == "after":
        handle = plan(module, policy, tokens(rank))
    with Demands() as demands:
        gradients, ops = trained(module, how, rank)
    found = {
        "collectives": Counter(ops.collectives()),
        "sharded": all(isinstance(p, DTensor) for p in module.parameters()),
        "gathered bytes": sum(
            p._unsharded_param.untyped_storage().nbytes()
            for sharded in sharded_modules(module)
            for group in parameter_groups(sharded._get_fsdp_state())
            for p in group.fsdp_params
        ),
        "buffers": buffer_digest(module),
        "softmax": ops.counted("_softmax")["_softmax"],
        "asked": demands.asked,
        "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
        "recordings": max((report.recordings for report in handle.report()), default=0) if handle else 0,
        "fallbacks": [report.fallback for report in handle.report() if report.fallback] if handle else [],
    }
    return found, gradients


def fsdp_all(mesh: DeviceMesh, cases: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """By case: what was found with a plan, beside what was found without."""
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for how, policy, order in cases:
        if how not in plain:
            plain[how] = fsdp_run(mesh, how, "", "")
        got, gradients = fsdp_run(mesh, how, policy, order)
        found[f"{how}, {policy} {order}"] = got | {"same": same(gradients, plain[how][1]), "plain": plain[how][0]}
    return found


def fsdp_parity(mesh: DeviceMesh) -> float:
    """Against one process that sees the batches of all ranks, each with its rank's random numbers."""
    rank, size = mesh.get_local_rank(), mesh.size()
    alone = model(3, dtype=torch.float64)
    for each in range(size):
        torch.manual_seed(SEED + each)
        (alone(*tokens(each)) / size).backward()
    module = shard_blocks(model(3, dtype=torch.float64), mesh)
    with jettison.apply(module, "full", batch=tokens(rank)):
        gradients, _ = steps(module, tokens(rank), SEED + rank, count=1)
    return distance(gradients, whole_gradients(alone))


FSDP_CASES = (
    ("per block", "every:2", "before"),
    ("per block", "everything", "after"),
    ("frozen", "everything", "after"),
    ("kept whole", "every:2", "after"),
    ("bf16", "everything", "before"),
    ("bf16 blocks", "everything", "after"),
    ("nested", "everything", "before"),
    ("norm and head together", "everything", "after"),
    ("three blocks", "every:3", "after"),
    ("accumulated", "every:2", "after"),
    ("kept graph", "full", "before"),
    ("used twice", "full", "after"),
    ("counting", "everything", "before"),
)
MORE_CASES = (
    ("per block", "every:2", "after"),
    ("per block", "everything", "before"),
    ("frozen", "every:2", "before"),
    ("bf16", "everything", "after"),
    ("bf16 blocks", "everything", "before"),
    ("nested", "everything", "after"),
    ("three blocks", "every:3", "before"),
    ("accumulated", "everything", "before"),
    ("kept graph", "every:2", "after"),
    ("used twice", "full", "before"),
    ("counting", "everything", "after"),
)
"""How the model is sharded and trained, the policy, and whether it is applied before or after FSDP."""


TWO_AXES = (("per block", "after"), ("bf16", "before"), ("own styles", "before"), ("own styles", "after"))


def two_axes(mesh: DeviceMesh, how: str, policy: str, order: str) -> tuple[dict[str, Any], Any]:
    """FSDP2 over tensor parallelism."""
    share = mesh["dp"].get_local_rank()
    batch, handle, module = tokens(share), None, of_record() if how == "own styles" else model(2)
    if isinstance(module, Gpt):
        apply_tensor_parallel(module, mesh["tp"], sequence_parallel=True)
    else:
        shard(module, mesh["tp"])
    if policy and order == "before":
        handle = plan(module, policy, batch)
    if isinstance(module, Gpt):
        shard_blocks(module, mesh["dp"])
    else:
        fsdp(module, mesh["dp"], how)
    if policy and order == "after":
        handle = plan(module, policy, batch)
    gradients, ops = steps(module, batch, SEED + distributed.get_rank())
    found = {
        "collectives": Counter(ops.collectives()),
        "sharded": True,
        "order": ops.collectives(),
        "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
        "fallbacks": [report.fallback for report in handle.report() if report.fallback] if handle else [],
    }
    found["sharded"] = all(p.device_mesh.ndim == 2 for p in module.parameters())
    return found, gradients


def two_ranks(_args: Any) -> Any:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cpu", (2,))
    return {"cases": fsdp_all(mesh, FSDP_CASES), "parity": fsdp_parity(mesh)}


def two_ranks_more(_args: Any) -> Any:
    return fsdp_all(init_device_mesh("cpu", (2,)), MORE_CASES)


def four_ranks(_args: Any) -> Any:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = fsdp_all(line, [("to a smaller mesh", "everything", order) for order in ("before", "after")])
    plain: dict[str, Any] = {}
    for how, order in TWO_AXES:
        if how not in plain:
            plain[how] = two_axes(square, how, "", "")
        got, gradients = two_axes(square, how, "everything", order)
        found[f"2D {how}, {order}"] = got | {"same": same(gradients, plain[how][1]), "plain": plain[how][0]}
    return found
