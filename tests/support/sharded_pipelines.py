"""What ranks do for test_sharded_pipelines.py: a pipeline whose stages FSDP2 shards, as torchtitan has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from jettison.dryrun.counter import static_tensors
from support.formula_cases import VOCABULARY
from support.pipeline_peaks import Case, Cut, chunks_of, loss_of
from support.sharded_peaks import _Gathers, _Reduces, local, lowest_of_three

SHARDS = 2


@dataclass(frozen=True, kw_only=True)
class ShardedCase(Case):
    """Args: mixed: products in bf16, gradients reduced in fp32. reshard: weights are sharded again after a forward."""

    mixed: bool = False
    reshard: bool = False

    def told(self) -> dict[str, Any]:
        """As ranks are given it."""
        return asdict(self)


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's bytes between steps and at the highest, without the batch and AdamW's counters."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("pp", "dp"))
    cases = [{**words, "stage_layers": tuple(words["stage_layers"])} for words in args["cases"]]
    return [_peak(ShardedCase(**words), mesh) for words in cases]


def _peak(case: ShardedCase, mesh: DeviceMesh) -> dict[str, Any]:
    place, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    own = list(chunks_of(case, place, ranks, Cut))
    modules = [_sharded(module, case, mesh) for _, module in own]
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(m, number, len(case.stage_layers), torch.device("cpu"), group=group)
        for m, (number, _) in zip(modules, own, strict=True)
    ]
    schedule: Any
    if case.schedule == "zero-bubble":
        schedule = ScheduleInterleavedZeroBubble(stages, case.micro_batches, loss_fn=loss_of)
    elif len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, case.micro_batches, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(stages[0], case.micro_batches, loss_fn=loss_of)
    ids = torch.randint(1, VOCABULARY, (case.batch * case.micro_batches, case.sequence))
    given = (ids,) if own[0][0] == 0 else ()
    wanted = {"target": ids} if own[-1][0] == len(case.stage_layers) - 1 else {}
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], foreach=False)

    def step() -> None:
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    step()
    infos = [
        info
        for stage in stages
        for m in range(case.micro_batches)
        for info in (*stage.args_recv_info[m], *stage.grad_recv_info[m])
    ]
    buffers = [info.buffer for info in infos if info.buffer is not None]
    state = [local(t) for s in optimizer.state.values() for t in s.values()]
    counters = sum(local(s["step"]).nbytes for s in optimizer.state.values())
    static = [local(t) for m in modules for t in static_tensors(m, ids)]

    def left() -> Iterator[Tensor]:
        """Gradients of inputs, which a split backward leaves until the next step begins."""
        yield from (buffer.grad for buffer in buffers if buffer.grad is not None)

    there = [*static, *state, *buffers]
    return lowest_of_three(step, there, ids.nbytes + counters, events=case.events, passing=left)


def _sharded(module: Cut, case: ShardedCase, mesh: DeviceMesh) -> nn.Module:
    """Embedding, each layer, and norm with head are groups of their own."""
    options: dict[str, Any] = {"mesh": mesh["dp"], "reshard_after_forward": case.reshard}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ends = [module.inner.embed_tokens] if module.first else []
    for group in (*ends, *module.inner.layers):
        fully_shard(group, **options)
    if module.head is not None:
        fully_shard([module.inner.norm, module.head], **options)
    fully_shard(module, **options)
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.set_custom_all_gather(_Gathers())
            one.set_custom_reduce_scatter(_Reduces())
    return module.train()
