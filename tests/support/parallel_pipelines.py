"""What ranks do for tests/parallel/test_parallel_pipeline.py: every schedule, with plans and without."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import mul
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

import jettison
from jettison.core.errors import UsageError
from jettison.memory.schedule import PipelineShape, ScheduledPass, Work
from jettison.parallel.parameters import shard_blocks
from jettison.parallel.pipeline import blocks_of, received, stand_in_loss
from jettison.planner.handle import Applied
from jettison.runtime.callers import of_a_region
from jettison.runtime.planned_forward import PlannedForward
from jettison.spec.layout import Schedule
from support.orders import fullest, peak_in_flight
from support.rank_models import (
    LENGTH,
    ROWS,
    WIDTH,
    Ops,
    Stage,
    distance,
    loss_of,
    same,
    shard,
    tokens,
    whole,
    whole_gradients,
)

SEED, MICRO_BATCHES = 7, 4
COUNTED = ("_softmax", "gelu", "bernoulli_.float")
SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "zero bubble V": ScheduleZBVZeroBubble,
}
KNOWN = {
    "GPipe": (Schedule.GPIPE, 1),
    "1F1B": (Schedule.ONE_F_ONE_B, 1),
    "interleaved 1F1B": (Schedule.ONE_F_ONE_B, 2),
    "zero bubble": (Schedule.ZERO_BUBBLE, 1),
}
"""Those that the ledger's replay knows by name, with stages a rank. Of the others torch's own order is replayed."""


def places(name: str, rank: int, size: int) -> list[int]:
    """The stages of a rank."""
    if name == "zero bubble V":
        return [rank, 2 * size - 1 - rank]
    return [rank, rank + size] if name.startswith("interleaved") else [rank]


def takes_several(name: str) -> bool:
    """Whether a schedule is given a list of stages."""
    return name not in ("GPipe", "1F1B")


def schedule_of(name: str, stages: list[PipelineStage], micro_batches: int, loss: Callable[..., Tensor]) -> Any:
    """One of torch's schedules over a rank's stages.

    torch 2.11 begins with a message between neighbours. In a V two are on one rank, to which gloo sends nothing.
    """
    for stage in stages if name == "zero bubble V" else ():
        stage._get_init_p2p_neighbors_ops = list
    return SCHEDULES[name](stages if takes_several(name) else stages[0], micro_batches, loss_fn=loss)


def checkpointed(stage: Stage) -> None:
    """As torch's own checkpoint does it."""
    for block in stage.blocks:

        def forward(x: Tensor, inner: Callable[[Tensor], Tensor] = block.forward) -> Tensor:
            return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]

        block.forward = forward  # type: ignore[method-assign]


def apply(stage: Stage, policy: str, batch: tuple[Tensor, ...]) -> Applied:
    return jettison.apply(stage, policy, batch=batch, loss_fn=stand_in_loss, regions=blocks_of(stage))


def stages_of(name: str, size: int, dtype: torch.dtype, dropout: float = 0.1) -> list[Stage]:
    """All stages of a pipeline, the same on every rank."""
    count = size * len(places(name, 0, size))
    torch.manual_seed(0)
    return [Stage(1, first=i == 0, last=i == count - 1, dropout=dropout).to(dtype) for i in range(count)]


class Rank:
    """One rank's part of a pipeline."""

    def __init__(
        self,
        name: str,
        group: distributed.ProcessGroup,
        *,
        policy: str = "",
        dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | None = None,
        data: DeviceMesh | None = None,
        torch_checkpoint: bool = False,
    ) -> None:
        """Stages on a mesh axis of tensor parallelism, or of FSDP2."""
        self.rank, self.size = group.rank(), group.size()
        self.mine = places(name, self.rank, self.size)
        every = stages_of(name, self.size, dtype, 0.0 if mesh is not None else 0.1)
        self.modules = [every[i] for i in self.mine]
        self.storages = Storages(self.modules)  # before any plan: a hook that comes later has the forward recorded anew
        self.handles: list[Applied] = []
        for index, module in zip(self.mine, self.modules, strict=True):
            if mesh is not None:
                shard(module, mesh)
            if torch_checkpoint:
                checkpointed(module)
            if policy:
                length = LENGTH if mesh is None else LENGTH // mesh.size()
                hidden = torch.zeros(ROWS, length, WIDTH, dtype=dtype)
                batch = received(hidden) if index else (tokens(0)[0],)
                self.handles.append(apply(module, policy, batch))
            if data is not None:
                shard_blocks(module, data, regions=blocks_of(module))
        device = torch.device("cpu")
        stages = [
            PipelineStage(m, i, len(every), device, group=group) for i, m in zip(self.mine, self.modules, strict=True)
        ]
        self.schedule = schedule_of(name, stages, MICRO_BATCHES, loss_of)
        self.last = len(every) - 1

    def step(self, seed: int) -> Ops:
        """One step over all micro-batches."""
        ids, labels = tokens(3, ROWS * MICRO_BATCHES)
        for module in self.modules:
            module.zero_grad()
        torch.manual_seed(seed)
        with Ops() as ops:
            self.schedule.step(
                *((ids,) if 0 in self.mine else ()), **({"target": labels} if self.last in self.mine else {})
            )
        return ops

    def gradients(self) -> dict[str, Tensor]:
        """By stage and name."""
        return {
            f"{index}.{name}": gradient
            for index, module in zip(self.mine, self.modules, strict=True)
            for name, gradient in whole_gradients(module).items()
        }

    def calls(self) -> list[int]:
        """How often each block ran, by its own count."""
        return [int(block.calls) for module in self.modules for block in module.blocks]


def forwards(name: str, schedule: Any, rank: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch) in the order in which a rank runs them."""
    if not takes_several(name):
        yield from ((rank, micro_batch) for micro_batch in range(MICRO_BATCHES))
        return
    for action in schedule.pipeline_order[rank]:
        if action is not None and action.computation_type.value == "F":
            yield action.stage_index, action.microbatch_index


def one_process(name: str, size: int, schedule: Any, dtype: torch.dtype) -> list[Stage]:
    """The same step without a pipeline. Each rank's random numbers come in the order of its forwards: a dry run on
    zeros finds the state before each of them.
    """
    every = stages_of(name, size, dtype)
    states: dict[tuple[int, int], Tensor] = {}
    for rank in range(size):
        torch.manual_seed(SEED + rank)
        for place in forwards(name, schedule, rank):
            states[place] = torch.get_rng_state()
            with torch.no_grad():
                first = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
                every[place[0]](torch.zeros(ROWS, LENGTH, WIDTH, dtype=dtype) if place[0] else first)
    ids, labels = tokens(3, ROWS * MICRO_BATCHES)
    for micro_batch in range(MICRO_BATCHES):
        x = ids.split(ROWS)[micro_batch]
        for index, stage in enumerate(every):
            torch.set_rng_state(states[index, micro_batch])
            x = stage(x)
        (loss_of(x, labels.split(ROWS)[micro_batch]) / MICRO_BATCHES).backward()
    return every


def priced(work: Sequence[ScheduledPass], nbytes: Sequence[int]) -> int:
    """The dearest moment of an order, at so many bytes a chunk."""
    return max(sum(map(mul, state.alive, nbytes)) for state in fullest(work))


class Storages:
    """Watches memory itself: inputs of the activation function, which autograd saves, that are still there."""

    def __init__(self, modules: Sequence[Stage]) -> None:
        self.most = 0
        self._seen: list[weakref.ref[Any]] = []
        for module in modules:
            for block in module.blocks:
                block.mlp.up.register_forward_hook(self._made)
            module.register_forward_hook(self._count)

    def _made(self, _module: Any, _args: Any, output: Tensor) -> None:
        self._seen.append(weakref.ref(output.untyped_storage()))

    def _count(self, *_: Any) -> None:
        self.most = max(self.most, sum(ref() is not None for ref in self._seen))


_KINDS = {"F": (Work.FORWARD,), "I": (Work.BACKWARD,), "W": (Work.WEIGHT,)}
_WAITS = {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"}  # since torch 2.15
_SILENT = frozenset({"UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", *_WAITS})


def work_of(schedule: Any) -> tuple[ScheduledPass, ...]:
    """This rank's order of work, as `jettison.memory.schedule` writes it, from one of torch's schedules.

    Chunks are numbered in the order in which the rank holds its stages.

    Raises:
        UsageError: the schedule does something that has no place in such an order.
    """
    several = getattr(schedule, "_stages", None)
    stages = several or [schedule._stage]
    chunks = {stage.stage_index: chunk for chunk, stage in enumerate(stages)}
    actions = [a for a in schedule.pipeline_order[stages[0].group_rank] if a is not None]
    split = any(a.computation_type.value == "W" for a in actions)
    steps: list[ScheduledPass] = []
    done: Counter[Work] = Counter()
    for action in actions:
        kind = action.computation_type.value
        if kind in _SILENT:
            continue
        if kind == "B":
            works: tuple[Work, ...] = (Work.BACKWARD, Work.WEIGHT) if split else (Work.BACKWARD,)
        elif kind in _KINDS:
            works = _KINDS[kind]
        else:
            raise UsageError(f"got {action} in {type(schedule).__name__}; expected forwards and backwards")
        for work in works:  # torch 2.13 miscounts the last stage's forwards in 1F1B, where they simply follow another
            micro_batch = action.microbatch_index if several else done[work]
            done[work] += 1
            steps.append(ScheduledPass(work, micro_batch, chunks[action.stage_index]))
    return tuple(steps)


class InFlight:
    """Watches the stages of a rank while a schedule runs, and keeps the most that was between forward and backward.

    Args:
        stages: by chunk, what `jettison.apply` returned for it (its ``regions``).

    ``micro_batches`` counts micro-batch chunks, ``nbytes`` what their recipes keep; peaks of the rank, at one moment
    each. A chunk of a split backward counts until the second half is over.
    """

    def __init__(self, stages: Sequence[Sequence[PlannedForward]]) -> None:
        self.stages = [list(regions) for regions in stages]
        for region in chain.from_iterable(self.stages):
            region.counted = True
        self.micro_batches = 0
        self.nbytes = 0
        self._hooks: list[Any] = []

    def now(self) -> Iterator[tuple[int, int]]:
        """Micro-batches and bytes of every chunk at this moment."""
        for regions in self.stages:
            live = [region.live() for region in regions]
            yield max(one.calls for one in live), sum(one.nbytes for one in live)

    def __enter__(self) -> InFlight:
        for regions in self.stages:
            root: nn.Module = regions[-1].module
            self._hooks.append(root.register_forward_hook(self._look))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @of_a_region
    def _look(self, *_: Any) -> None:  # only forwards add anything
        counts, nbytes = zip(*self.now(), strict=True)
        self.micro_batches = max(self.micro_batches, sum(counts))
        self.nbytes = max(self.nbytes, sum(nbytes))


def pipeline(name: str, group: distributed.ProcessGroup) -> dict[str, Any]:
    rank, size = group.rank(), group.size()
    plain = Rank(name, group)
    plain.step(SEED + rank)
    plain.storages.most = 0
    before = plain.step(SEED + rank)
    expected = plain.gradients()
    found: dict[str, Any] = {"plain": before.counted(*COUNTED), "storages": plain.storages.most, "calls": plain.calls()}
    for policy in ("full", "none"):
        planned = Rank(name, group, policy=policy)
        planned.step(SEED + rank)  # the first step checks and records
        regions = [handle.regions for handle in planned.handles]
        planned.storages.most = 0
        with InFlight(regions) as flight:
            ops = planned.step(SEED + rank)
        each = [sum(report.kept_bytes for report in handle.report()) for handle in planned.handles]
        found[policy] = {
            "same": same(planned.gradients(), expected),
            "calls": planned.calls(),
            "ops": ops.counted(*COUNTED),
            "in flight": flight.micro_batches,
            "bytes": flight.nbytes,
            "storages": planned.storages.most,
            "replayed bytes": priced(work_of(planned.schedule), each),
            "each": each,
            "left": sum(calls for calls, _ in flight.now()),
            "recordings": max(r.recordings for handle in planned.handles for r in handle.report()),
        }
    found["replayed"] = peak_in_flight(work_of(plain.schedule))
    if name in KNOWN:
        schedule, chunks = KNOWN[name]
        shape = PipelineShape(schedule, stages=size, micro_batches=MICRO_BATCHES, virtual_stages=chunks)
        found["known"] = peak_in_flight(shape.order(rank))
    exact = Rank(name, group, policy="full", dtype=torch.float64)
    exact.step(0)
    exact.step(SEED + rank)
    every = one_process(name, size, exact.schedule, torch.float64)
    alone = {f"{i}.{key}": g for i in exact.mine for key, g in whole_gradients(every[i]).items()}
    found["distance"] = distance(exact.gradients(), alone)
    return found


def two_ranks(_args: Any) -> Any:
    group = distributed.group.WORLD
    assert group is not None
    found: dict[str, Any] = {name: pipeline(name, group) for name in SCHEDULES}
    torchs = Rank("interleaved zero bubble", group, torch_checkpoint=True)
    torchs.step(0)
    found["torch's checkpoint"] = torchs.step(0).counted(*COUNTED)
    return found


def tensor_parallel_pipeline(name: str) -> dict[str, Any]:
    """Two stages of two tensor- and sequence-parallel ranks."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    group = square["pp"].get_group()
    plain, planned = Rank(name, group, mesh=square["tp"]), Rank(name, group, policy="full", mesh=square["tp"])
    for each in (plain, planned):
        each.step(0)
        ops = each.step(SEED)
    found: dict[str, Any] = {
        "same": same(planned.gradients(), plain.gradients()),
        "order": ops.collectives(),
        "recordings": max(r.recordings for handle in planned.handles for r in handle.report()),
    }
    exact = Rank(name, group, policy="full", dtype=torch.float64, mesh=square["tp"])
    exact.step(0)
    exact.step(SEED)
    every = stages_of(name, 2, torch.float64, 0.0)
    ids, labels = tokens(3, ROWS * MICRO_BATCHES)
    for part, wanted in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
        x = part
        for stage in every:
            x = stage(x)
        (loss_of(x, wanted) / MICRO_BATCHES).backward()
    alone = {f"{i}.{key}": g for i in exact.mine for key, g in whole_gradients(every[i]).items()}
    found["distance"] = distance({key: whole(g) for key, g in exact.gradients().items()}, alone)
    return found


def sharded_pipeline(name: str) -> dict[str, Any]:
    """Two stages, each under FSDP2 on two ranks."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = square["pp"].get_group()
    plain, planned = Rank(name, group, data=square["dp"]), Rank(name, group, policy="full", data=square["dp"])
    orders = []
    for each in (plain, planned):
        each.step(0)
        orders.append(each.step(SEED + distributed.get_rank()).collectives())
    return {"same": same(planned.gradients(), plain.gradients()), "orders": orders}


def four_ranks(_args: Any) -> Any:
    group = distributed.group.WORLD
    assert group is not None
    found: dict[str, Any] = {name: pipeline(name, group) for name in ("1F1B", "zero bubble", "zero bubble V")}
    return found | {"sharded": {name: sharded_pipeline(name) for name in ("1F1B", "zero bubble")}}


def tensor_parallel_pipelines(_args: Any) -> Any:
    """On four ranks, with torch's own styles."""
    return {name: tensor_parallel_pipeline(name) for name in ("1F1B", "interleaved zero bubble")}
