"""What ranks do for tests/parallel/test_parallel_runtime.py: plans that must agree; DTensors; our own styles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible, StaleTensor
from jettison.core.units import Bytes
from jettison.models.reference import Gpt, GptConfig
from jettison.parallel import apply_tensor_parallel, seed_ranks
from jettison.parallel.recompute_agreement import Agreement, ranks_in, summary
from jettison.planner.handle import Applied
from jettison.runtime.install import install
from jettison.runtime.planned_forward import PlannedForward
from jettison.solve.checkpoint_policy import Full
from jettison.verify.differences import buffer_digest
from support.rank_models import Counting, Model, Ops, distance, model, same, shard, tokens, whole_gradients

SEED = 5


def everything(module: nn.Module, batch: Any) -> Applied:
    """What policies leave alone goes as well: the part around the blocks."""
    traced = trace_model(module, batch)
    names = dict.fromkeys(call.name for call in traced.calls)
    return Applied(regions=install(module, traced, dict.fromkeys(names, Full()), Full()))


def plan(module: nn.Module, policy: str, batch: Any) -> Applied:
    return everything(module, batch) if policy == "everything" else jettison.apply(module, policy, batch=batch)


def steps(module: nn.Module, batch: Any, seed: int | None, *, count: int = 2) -> tuple[dict[str, torch.Tensor], Ops]:
    """Train a little without an optimizer; gradients and ops of the last step."""
    if seed is not None:
        torch.manual_seed(seed)
    for _ in range(count):
        module.zero_grad()
        with Ops() as ops:
            module(*batch).backward()
    return whole_gradients(module), ops


# agreement (TRAP 14) --------------------------------------------------------------------------------------------------


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """How it ended."""
    try:
        action()
        error: Exception | None = None
    except Exception as raised:
        error = raised
    distributed.barrier()
    return {"kind": type(error).__name__, "text": str(error)}


def agreement(mesh: DeviceMesh) -> dict[str, Any]:
    rank, batch = distributed.get_rank(), tokens(1)
    sharded, alone = model(2), model(2)
    shard(sharded, mesh)

    def apply(here: str, elsewhere: str, where: int, **more: Any) -> Callable[[], None]:
        target = alone if more else sharded
        return lambda: jettison.apply(target, here if rank == where else elsewhere, batch=batch, **more).remove()

    found = {
        "same": attempt(apply("full", "full", 1)),
        "other": attempt(apply("selective", "full", 1)),
        "fails": attempt(apply("nonsense", "full", 1)),
        "leader fails": attempt(apply("nonsense", "full", 0)),
        "asked for": attempt(apply("none", "full", 1, group=distributed.group.WORLD)),
        "not distributed": attempt(lambda: jettison.apply(alone, ["full", "none"][rank], batch=batch).remove()),
        "budget": attempt(lambda: budget(sharded, batch)),
        "no batch": attempt(lambda: jettison.apply(sharded, "full", batch=None if rank else batch).remove()),
        "refused": refused(sharded, batch),
        "talks": attempt(lambda: jettison.apply(Talking(), ["full", "none"][rank], batch=(torch.ones(2, 4),)).remove()),
        "talks alike": attempt(lambda: jettison.apply(Talking(), "full", batch=(torch.ones(2, 4),)).remove()),
    }
    found |= sharded_later(mesh, batch)
    found["left behind"] = any(isinstance(m.forward, PlannedForward) for m in (*sharded.modules(), *alone.modules()))
    return found


def sharded_later(mesh: DeviceMesh, batch: Any) -> dict[str, Any]:
    """Plans of plain models, which ranks need not agree on until FSDP makes them share parameters."""
    found = {}
    for name, policies in (("shared later", ("full", "full")), ("shared later, other", ("every:4", "full"))):
        module = model(4)
        found[f"{name}: apply"] = attempt(
            lambda module=module, policies=policies: jettison.apply(
                module, policies[mesh.get_local_rank()], batch=batch
            )
        )
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        found[name] = attempt(lambda module=module: module(*batch).backward())
        found[f"{name}: gradients"] = len(whole_gradients(module))
    return found


def one_stays_away(mesh: DeviceMesh) -> dict[str, Any]:
    """Leaves the ranks out of step: the last thing to do."""
    handle = jettison.apply(model(2), "full", batch=tokens(1))

    def ask() -> None:
        if distributed.get_rank() == 0:
            with Agreement([ranks_in(mesh)], timeout_seconds=1) as agreement:
                agreement.check(summary(handle.regions, handle.plan))

    return attempt(ask)


def budget(module: Model, batch: Any) -> None:
    """One rank plans for both, although no two of them measure the same."""
    with jettison.auto_checkpoint(module, batch, "170KiB") as handle:
        assert handle.plan is not None
        hashes: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(hashes, handle.plan.hash)
        assert len(set(hashes)) == 1
        steps(module, batch, SEED)
        assert any(report.slots_dropped for report in handle.report())
        assert not any(report.recordings for report in handle.report())


class Talking(nn.Module):
    """Plain parameters, and blocks that average over all ranks by themselves."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = functional_collectives.all_reduce(self.up(x), "sum", distributed.group.WORLD)
            return x + self.down(nn.functional.gelu(whole))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def refused(module: Model, batch: Any) -> dict[str, Any]:
    """Rank 1 has next to no memory. What each is told, and asks for then, as scripts do."""
    mine = Bytes(1024 if distributed.get_rank() == 1 else 1 << 30)
    try:
        jettison.auto_checkpoint(module, batch, mine)
    except Infeasible as error:
        with jettison.auto_checkpoint(module, batch, error.minimum_budget_bytes) as handle:
            assert handle.plan is not None
            return {"text": str(error), "asked": int(error.minimum_budget_bytes), "hash": handle.plan.hash}
    return {}


# DTensor --------------------------------------------------------------------------------------------------------------


def tensor_parallel(mesh: DeviceMesh, policies: Iterable[str], *, local: bool) -> dict[str, Any]:
    batch, found = tokens(1), {}

    def run(policy: str) -> tuple[dict[str, torch.Tensor], Ops, Any]:
        module = model(2)
        shard(module, mesh, local=local)
        handle = plan(module, policy, batch) if policy else None
        gradients, ops = steps(module, batch, SEED)
        return gradients, ops, handle.report() if handle else []

    expected, plain, _ = run("")
    for policy in policies:
        gradients, ops, reports = run(policy)
        found[policy] = {
            "same": same(gradients, expected),
            "order": ops.collectives(),
            "plain": plain.collectives(),
            "recordings": max(r.recordings for r in reports),
            "fallbacks": [r.fallback for r in reports if r.fallback],
            "again": sum("c10d" in name for r in reports for name in r.recomputed_ops),
        }
    return found


def of_record() -> Gpt:
    torch.manual_seed(0)
    return Gpt(GptConfig(layers=2, hidden=32, heads=4, vocab=64, positions=16, dropout=0.1))


def own_styles(mesh: DeviceMesh, *, sequence_parallel: bool) -> dict[str, Any]:
    """This library's own styles, which compute on plain tensors and gather again in backward."""
    found, expected = {}, {}
    for policy in ("", "full", "every:2"):
        module = of_record()
        apply_tensor_parallel(module, mesh, sequence_parallel=sequence_parallel)
        handle = plan(module, policy, tokens(1)) if policy else None
        seed_ranks(SEED, mesh, sequence_parallel=sequence_parallel)
        gradients, ops = steps(module, tokens(1), None)
        expected = expected or gradients
        found[policy] = {
            "same": same(gradients, expected),
            "order": ops.collectives(),
            "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
        }
    return found


def several_backwards(mesh: DeviceMesh) -> dict[str, Any]:
    """TRAP 19 on our own styles: a graph that is kept, and a layer that stands in the model twice."""
    found: dict[str, Any] = {}
    for case in ("kept graph", "used twice"):
        expected: dict[str, torch.Tensor] = {}
        for policy in ("", "full", "every:2"):
            module = of_record()
            if case == "used twice":
                module.layers[1] = module.layers[0]
            apply_tensor_parallel(module, mesh)
            handle = plan(module, policy, tokens(1)) if policy else None
            seed_ranks(SEED, mesh, sequence_parallel=True)
            with Ops() as ops:
                loss = module(*tokens(1))
                if case == "kept graph":
                    loss.backward(retain_graph=True)
                loss.backward()
            gradients = whole_gradients(module)
            expected = expected or gradients
            found[f"{case} {policy}"] = {
                "same": same(gradients, expected),
                "softmax": ops.counted("_softmax")["_softmax"],
                "order": ops.collectives(),
                "fallbacks": [report.fallback for report in handle.report() if report.fallback] if handle else [],
            }
    return found


def side_effects(mesh: DeviceMesh) -> dict[str, Any]:
    """TRAP 17 on torch's own styles: a digest of all buffers after two steps."""
    found = {}
    for policy in ("", "none", "full", "everything"):
        module = model(2)
        for block in module.blocks:
            block.after = Counting()  # on this rank's part of the sequence
        shard(module, mesh)
        handle = plan(module, policy, tokens(1)) if policy else None
        gradients, _ = steps(module, tokens(1), SEED)
        found[policy] = {
            "buffers": buffer_digest(module),
            "load": int(module.blocks[0].after.load.sum()),
            "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
            "gradients": {name: float(g.abs().sum()) for name, g in gradients.items()},
        }
    return found


def replicas(mesh: DeviceMesh) -> dict[str, Any]:
    """Plain data parallelism: gradients are reduced in buckets by hooks of its own."""
    rank, found = mesh.get_local_rank(), {}
    for policy in ("", "full"):
        module = model(2)
        handle = plan(module, policy, tokens(rank)) if policy else None
        found[policy] = steps(nn.parallel.DistributedDataParallel(module), tokens(rank), SEED + rank)[0]
        assert handle is None or any(report.slots_dropped for report in handle.report())
    return {"same": same(found["full"], found[""])}


def tensor_parallel_parity(mesh: DeviceMesh) -> float:
    """Dropout aside: each rank draws for its own heads, one process for all of them in one go."""
    batch = tokens(1)
    alone, module = model(3, dropout=0.0, dtype=torch.float64), model(3, dropout=0.0, dtype=torch.float64)
    alone(*batch).backward()
    shard(module, mesh)
    with jettison.apply(module, "full", batch=batch):
        gradients, _ = steps(module, batch, SEED, count=1)
    return distance(gradients, whole_gradients(alone))


def uneven(mesh: DeviceMesh) -> dict[str, Any]:
    """A vocabulary that does not divide: ranks hold parts of different sizes."""
    batch = tokens(1)

    def build() -> Model:
        module = model(2)
        module.embedding, module.head = nn.Embedding(67, 32), nn.Linear(32, 67, bias=False)
        with torch.no_grad():
            for n, parameter in enumerate((module.embedding.weight, module.head.weight)):
                parameter.copy_(torch.randn(67, 32, generator=torch.Generator().manual_seed(n)) * 0.1)
        shard(module, mesh)
        return module

    plain, planned = build(), build()
    expected, _ = steps(plain, batch, SEED)
    with jettison.apply(planned, "full", batch=batch):
        gradients, _ = steps(planned, batch, SEED)
    rows = [p.to_local().shape[0] for p in (planned.head.weight,)]  # type: ignore[union-attr]
    return {"same": same(gradients, expected), "rows": rows}


def writes_between(mesh: DeviceMesh) -> dict[str, str]:
    """TRAPS 5 and 6 where what is written to is inside a DTensor."""
    found, batch = {}, tokens(1)
    for target in ("parameter", "kept"):
        module = model(2)
        shard(module, mesh, local=False)
        seen: list[torch.Tensor] = []
        module.blocks[0].register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))
        with jettison.apply(module, "full", batch=batch):
            loss = module(*batch)
            with torch.no_grad():
                written = (
                    module.blocks[0].mlp.up.weight if target == "parameter" else seen[-1].detach()
                )  # the first one was the trace's
                written.mul_(1.5)
            try:
                loss.backward()
                found[target] = "nothing"
            except (StaleTensor, RuntimeError) as error:
                found[target] = str(error)
    return found


TENSOR_PARALLEL = {True: ("selective-op", "every:2", "everything"), False: ("full",)}
"""Policies by whether blocks compute on plain tensors."""
MORE_TENSOR_PARALLEL = {True: ("none", "selective", "full"), False: ("everything",)}


def two_ranks(_args: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "agreement": agreement(mesh),
        **{f"local {local}": tensor_parallel(mesh, some, local=local) for local, some in TENSOR_PARALLEL.items()},
        "own": {str(sp): own_styles(mesh, sequence_parallel=sp) for sp in (True, False)},
        "several backwards": several_backwards(mesh),
        "side effects": side_effects(mesh),
        "parity": tensor_parallel_parity(mesh),
        "uneven": uneven(mesh),
        "writes": writes_between(mesh),
        "replicas": replicas(mesh),
        "absent": one_stays_away(mesh),
    }


def two_ranks_more(_args: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    return {f"local {local}": tensor_parallel(mesh, some, local=local) for local, some in MORE_TENSOR_PARALLEL.items()}
