"""Plans on models that are spread over ranks: agreement, FSDP2, DTensor, and two axes at once. Real processes."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import jettison
from jettison.api.verbs import Applied
from jettison.errors import PlanMismatch, StaleTensor
from jettison.parallel import apply_tensor_parallel, seed_ranks
from jettison.parallel.agree import check_agreement
from jettison.parallel.fsdp import shard_blocks
from jettison.parallel.reference import Gpt, GptConfig
from jettison.plan.treatment import Full
from jettison.runtime.install import install
from jettison.runtime.region import PlannedForward
from jettison.trace.model import trace_model
from rank_models import Model, Ops, distance, model, same, shard, tokens, whole_gradients
from ranks import run_ranks

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
    """How it ended, and after how many seconds."""
    started = time.monotonic()
    try:
        action()
        error: Exception | None = None
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - started
    distributed.barrier()
    return {"kind": type(error).__name__, "text": str(error), "seconds": seconds}


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
    }
    found["left behind"] = any(isinstance(m.forward, PlannedForward) for m in (*sharded.modules(), *alone.modules()))
    return found


def one_stays_away(mesh: DeviceMesh) -> dict[str, Any]:
    """Leaves the ranks out of step: the last thing to do."""
    handle = jettison.apply(model(2), "full", batch=tokens(1))

    def ask() -> None:
        if distributed.get_rank() == 0:
            check_agreement(handle, mesh, timeout_seconds=1)

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


# FSDP2 (TRAP 15) ------------------------------------------------------------------------------------------------------


def freeze(module: Model) -> None:
    """A whole block, and parts of the others."""
    for name, parameter in module.named_parameters():
        if "attention.q" in name or "norm1" in name or name.startswith(("blocks.1", "embedding")):
            parameter.requires_grad_(False)


def fsdp(module: Model, mesh: DeviceMesh, how: str) -> None:
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


def fsdp_run(mesh: DeviceMesh, how: str, policy: str, order: str) -> tuple[dict[str, Any], Any]:
    rank = mesh.get_local_rank()
    batch, module, handle = tokens(rank), model(2), None
    if how == "frozen":
        freeze(module)
    if policy and order == "before":
        handle = plan(module, policy, batch)
    fsdp(module, mesh, how)
    if policy and order == "after":
        handle = plan(module, policy, batch)
    gradients, ops = steps(module, batch, SEED + rank, count=2)
    found = {
        "collectives": Counter(ops.collectives()),
        "sharded": all(isinstance(p, DTensor) for p in module.parameters()),
        "calls": sum(int(block.calls) for block in module.blocks),
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


# DTensor --------------------------------------------------------------------------------------------------------------


def tensor_parallel(mesh: DeviceMesh, *, local: bool) -> dict[str, Any]:
    batch, found = tokens(1), {}

    def run(policy: str) -> tuple[dict[str, torch.Tensor], Ops, Any]:
        module = model(2)
        shard(module, mesh, local=local)
        handle = plan(module, policy, batch) if policy else None
        gradients, ops = steps(module, batch, SEED)
        return gradients, ops, handle.report() if handle else []

    expected, plain, _ = run("")
    for policy in (policy for plain_tensors, policy in TENSOR_PARALLEL_CASES if plain_tensors is local):
        gradients, ops, reports = run(policy)
        found[policy] = {
            "same": same(gradients, expected), "order": ops.collectives(), "plain": plain.collectives(),
            "recordings": max(r.recordings for r in reports), "fallbacks": [r.fallback for r in reports if r.fallback],
            "again": sum("c10d" in name for r in reports for name in r.recomputed_ops),
        }  # fmt: skip
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
            "same": same(gradients, expected), "order": ops.collectives(),
            "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
        }  # fmt: skip
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


# two ranks ------------------------------------------------------------------------------------------------------------

FSDP_CASES = (
    ("per block", "every:2", "before"),
    ("per block", "every:2", "after"),
    ("per block", "everything", "before"),
    ("per block", "everything", "after"),
    ("frozen", "everything", "after"),
    ("kept whole", "every:2", "after"),
    ("bf16", "everything", "before"),
    ("bf16", "everything", "after"),
    ("bf16 blocks", "everything", "before"),
    ("bf16 blocks", "everything", "after"),
    ("nested", "everything", "before"),
    ("nested", "everything", "after"),
    ("norm and head together", "everything", "after"),
)
TENSOR_PARALLEL_CASES = (
    *((True, policy) for policy in ("none", "selective", "selective-op", "full", "every:2", "everything")),
    (False, "full"),
    (False, "everything"),
)


def two_ranks(_args: Any) -> Any:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cpu", (2,))
    return {
        "agreement": agreement(mesh),
        "fsdp": fsdp_all(mesh, FSDP_CASES),
        "fsdp parity": fsdp_parity(mesh),
        "local": tensor_parallel(mesh, local=True),
        "wrapped": tensor_parallel(mesh, local=False),
        "own": {str(sp): own_styles(mesh, sequence_parallel=sp) for sp in (True, False)},
        "tensor parallel parity": tensor_parallel_parity(mesh),
        "uneven": uneven(mesh),
        "writes": writes_between(mesh),
        "replicas": replicas(mesh),
        "absent": one_stays_away(mesh),
    }


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    return run_ranks(two_ranks, 2, timeout=200)


def test_equal_plans_agree_and_different_ones_stop_every_rank_before_the_first_step(on_two: list[Any]) -> None:
    for rank, found in enumerate(r["agreement"] for r in on_two):
        assert found["same"]["kind"] == "NoneType", found["same"]
        assert found["budget"]["kind"] == "NoneType", found["budget"]
        assert found["not distributed"]["kind"] == "NoneType"
        for case in ("other", "asked for"):
            assert found[case]["kind"] == PlanMismatch.__name__, (rank, found[case])
            assert "rank 1 would run another plan than rank 0" in found[case]["text"]
            assert "blocks.0" in found[case]["text"]
            assert found[case]["seconds"] < 20
        assert not found["left behind"]


def test_a_rank_that_fails_or_stays_away_is_named_to_the_others(on_two: list[Any]) -> None:
    zero, one = (r["agreement"] for r in on_two)
    assert (zero["fails"]["kind"], one["fails"]["kind"]) == ("PlanMismatch", "UsageError")
    assert "rank 1 has no plan" in zero["fails"]["text"]
    assert "nonsense" in zero["fails"]["text"]
    assert (zero["leader fails"]["kind"], one["leader fails"]["kind"]) == ("UsageError", "PlanMismatch")
    assert "rank 0 has no plan" in one["leader fails"]["text"]
    absent = on_two[0]["absent"]
    assert absent["kind"] == "PlanMismatch"
    assert "rank 1 did not say" in absent["text"]
    assert 1 <= absent["seconds"] < 10


@pytest.mark.parametrize("case", [f"{how}, {policy} {order}" for how, policy, order in FSDP_CASES])
def test_fsdp_gives_the_same_bits_with_the_same_collectives(case: str, on_two: list[Any]) -> None:
    for found in (r["fsdp"][case] for r in on_two):
        assert_fsdp(found)


def assert_fsdp(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert found["same"]
    assert found["dropped"] > 0, "nothing was dropped: nothing was tested"
    assert found["fallbacks"] == []
    assert plain["collectives"]["_allgather_base_"] >= 3, "nothing was gathered: nothing was tested"
    for kind in ("_allgather_base_", "_reduce_scatter_base_"):
        assert found["collectives"][kind] == plain["collectives"][kind]
    assert found["sharded"], "something stayed gathered after backward"
    if not found["recordings"]:  # the first run under another precision is done twice
        assert found["calls"] == plain["calls"], "something was written twice"


def test_recipes_recorded_before_fsdp_hold_under_it(on_two: list[Any]) -> None:
    for how in ("per block", "nested"):
        assert on_two[0]["fsdp"][f"{how}, everything before"]["recordings"] == 0
        assert on_two[0]["fsdp"][f"{how}, everything after"]["recordings"] == 0


def test_fsdp_with_a_plan_is_one_process_in_double_precision(on_two: list[Any]) -> None:
    assert all(r["fsdp parity"] < 1e-12 for r in on_two)


@pytest.mark.parametrize(("local", "policy"), TENSOR_PARALLEL_CASES)
def test_tensor_and_sequence_parallel_gives_the_same_bits(local: bool, policy: str, on_two: list[Any]) -> None:
    zero, one = (r["local" if local else "wrapped"][policy] for r in on_two)
    for found in (zero, one):
        assert found["same"]
        assert found["recordings"] == 0
        assert found["fallbacks"] == []
    assert zero["order"] == one["order"], "ranks talk in different orders"
    assert len(zero["order"]) - len(zero["plain"]) == zero["again"]
    if policy in ("full", "everything"):  # two gathers and the attention's reduce-scatter, in each of two blocks
        extra = Counter(zero["order"]) - Counter(zero["plain"])
        assert extra["all_gather_into_tensor"] >= 4
        assert extra["reduce_scatter_tensor"] == 2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_our_own_styles_give_the_same_bits(sequence_parallel: bool, on_two: list[Any]) -> None:
    zero, one = (r["own"][str(sequence_parallel)] for r in on_two)
    for policy in ("full", "every:2"):
        assert zero[policy]["same"] and one[policy]["same"]
        assert zero[policy]["dropped"] > 0
        assert zero[policy]["order"] == one[policy]["order"]
        if sequence_parallel:
            assert len(zero[policy]["order"]) > len(zero[""]["order"]), "no collective ran again: nothing was tested"


def test_tensor_parallel_with_a_plan_is_one_process_in_double_precision(on_two: list[Any]) -> None:
    assert all(r["tensor parallel parity"] < 1e-12 for r in on_two)


def test_plain_data_parallelism_gives_the_same_bits(on_two: list[Any]) -> None:
    assert all(r["replicas"]["same"] for r in on_two)


def test_ranks_with_parts_of_different_sizes_agree(on_two: list[Any]) -> None:
    assert [r["uneven"]["rows"] for r in on_two] == [[34], [33]]
    assert all(r["uneven"]["same"] for r in on_two)


def test_a_write_inside_a_dtensor_between_the_passes_is_noticed(on_two: list[Any]) -> None:
    for found in (r["writes"] for r in on_two):
        assert "parameter" in found["parameter"], found
        assert "modified by an inplace operation" in found["parameter"]
        assert "modified by an inplace operation" in found["kept"], found


# four ranks -----------------------------------------------------------------------------------------------------------


TWO_AXES = ("per block", "bf16", "own styles")


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
        "collectives": Counter(ops.collectives()), "sharded": True, "order": ops.collectives(),
        "dropped": sum(report.slots_dropped for report in handle.report()) if handle else 0,
        "fallbacks": [report.fallback for report in handle.report() if report.fallback] if handle else [],
    }  # fmt: skip
    found["sharded"] = all(p.device_mesh.ndim == 2 for p in module.parameters())
    return found, gradients


def two_axes_parity(mesh: DeviceMesh) -> float:
    share, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    alone, module = model(2, dropout=0.0, dtype=torch.float64), model(2, dropout=0.0, dtype=torch.float64)
    for each in range(size):
        (alone(*tokens(each)) / size).backward()
    shard(module, mesh["tp"])
    shard_blocks(module, mesh["dp"])
    with jettison.apply(module, "full", batch=tokens(share)):
        gradients, _ = steps(module, tokens(share), SEED, count=1)
    return distance(gradients, whole_gradients(alone))


def four_ranks(_args: Any) -> Any:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = fsdp_all(
        line, [("to a smaller mesh", "everything", order) for order in ("before", "after")]
    )
    for how in TWO_AXES:
        plain, expected = two_axes(square, how, "", "")
        for order in ("before", "after"):
            got, gradients = two_axes(square, how, "everything", order)
            found[f"2D {how}, {order}"] = got | {"same": same(gradients, expected), "plain": plain}
    parity = two_axes_parity(square)
    return {"found": found, "parity": parity}


@pytest.fixture(scope="module")
def on_four() -> list[Any]:
    return run_ranks(four_ranks, 4, timeout=200)


@pytest.mark.parametrize("order", ["before", "after"])
def test_resharding_to_a_smaller_mesh(order: str, on_four: list[Any]) -> None:
    for found in (r["found"][f"to a smaller mesh, everything {order}"] for r in on_four):
        assert_fsdp(found)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", TWO_AXES)
def test_fsdp_over_tensor_parallel_gives_the_same_bits(how: str, order: str, on_four: list[Any]) -> None:
    found = [r["found"][f"2D {how}, {order}"] for r in on_four]
    for each in found:
        assert each["same"] and each["sharded"]
        assert each["dropped"] > 0 and each["fallbacks"] == []
        assert each["plain"]["collectives"]["_allgather_base_"] >= 3
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            assert each["collectives"][kind] == each["plain"]["collectives"][kind]
        assert each["order"] == found[0]["order"]


def test_fsdp_over_tensor_parallel_is_one_process_in_double_precision(on_four: list[Any]) -> None:
    assert all(r["parity"] < 1e-12 for r in on_four)
