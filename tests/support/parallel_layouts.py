"""What ranks do for tests/parallel/test_parallel_layouts.py: one global batch in every layout, beside a whole model.

The model is the reference GPT with dropout; masks are drawn for the whole model by site and micro-batch, and a rank
takes its part. A layout computes the mean loss over `BATCHES` micro-batches, and its gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

import jettison
from jettison.models.reference import Gpt, GptConfig
from jettison.parallel import apply_tensor_parallel, reduce_partial_gradients
from jettison.parallel.parameters import shard_blocks
from jettison.parallel.pipeline import blocks_of, received, stand_in_loss
from jettison.parallel.styles import can_split_backward
from jettison.parallel.tp_collectives import Axis
from jettison.planner.handle import Applied
from jettison.train.pipeline import StageModule
from support.parallel_pipelines import SCHEDULES, places, schedule_of
from support.rank_masks import Batch, fix_masks

S, B, V, BATCHES = 16, 2, 51, 4  # 51 divides by neither 2 nor 4
CONFIG = GptConfig(layers=4, hidden=32, heads=4, vocab=V, positions=S, dropout=0.3)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
Step = Callable[[], Tensor | None]


@dataclass(kw_only=True)
class Ready:
    """A model in a layout: what takes a step and returns the mean loss where it is known, and by what names its parts
    are known.
    """

    step: Step
    parts: list[nn.Module]
    applied: list[Applied] = field(default_factory=list)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for part in self.parts for name, p in part.named_parameters()}


def start(dtype: torch.dtype) -> Gpt:
    """Every parameter away from where it starts: weights of 1 and biases of 0 hide mistakes. The head is untied: stages
    would otherwise share it.
    """
    torch.manual_seed(0)
    model = Gpt(CONFIG)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()


def data() -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, V, (B, S), generator=generator) for _ in range(2)) for _ in range(BATCHES)]  # type: ignore[misc]


def whole(dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients without any parallelism, and without a plan."""
    model = start(dtype)
    fix_masks(model, CONFIG.heads)
    losses = [model(*batch) for batch in data()]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# layouts --------------------------------------------------------------------------------------------------------------


def sharded(dtype: torch.dtype, policy: str, dp: DeviceMesh, tp: DeviceMesh | None, *, sp: bool = True) -> Ready:
    """FSDP2, alone or over tensor parallelism; where a rank has several micro-batches, gradients are reduced once."""
    model = start(dtype)
    batch = _split(model, tp, sp=sp)
    shares = data()[dp.get_local_rank() :: dp.size()]
    applied = [jettison.apply(model, policy, batch=shares[0])] if policy else []
    shard_blocks(model, dp)

    def step() -> Tensor:
        model.zero_grad()
        total = torch.zeros(())
        for n, share in enumerate(shares):
            batch.next = dp.get_local_rank() + n * dp.size()
            model.set_requires_gradient_sync(n == len(shares) - 1)  # type: ignore[operator]
            loss = model(*share) / len(shares)
            loss.backward()
            total = total + loss.detach()
        distributed.all_reduce(total, group=dp.get_group())
        return total / dp.size()

    return Ready(step=step, parts=[model], applied=applied)


def pipeline(dtype: torch.dtype, policy: str, pp: DeviceMesh, tp: DeviceMesh | None, name: str) -> Ready:
    """Stages of one layer or two, each tensor and sequence parallel where there is an axis for it."""
    model = start(dtype)
    numbers = places(name, pp.get_local_rank(), pp.size())
    count = pp.size() * len(numbers)
    batch = _split(model, tp, sp=True)
    each = CONFIG.layers // count
    stages = [StageModule(model, range(number * each, (number + 1) * each), seq=S) for number in numbers]
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    ids, labels = (torch.cat(part) for part in zip(*data(), strict=True))
    applied, made = [], []
    for stage, number in zip(stages, numbers, strict=True):
        stage.register_forward_pre_hook(_Counted(batch))
        stream = torch.zeros(S // (tp.size() if tp else 1), B, CONFIG.hidden, dtype=dtype)
        given = (ids[:B],) if stage.is_first else received(stream)
        if policy:
            applied.append(jettison.apply(stage, policy, batch=given, loss_fn=stand_in_loss, regions=blocks_of(stage)))
        outgoing = torch.zeros(S, B, V, dtype=dtype) if stage.is_last else stream
        made.append(
            PipelineStage(
                stage,
                number,
                count,
                torch.device("cpu"),
                group=pp.get_group(),
                input_args=given,
                output_args=outgoing.requires_grad_(),
            )
        )
    schedule = schedule_of(name, made, BATCHES, stages[-1].loss)

    def step() -> Tensor | None:
        for stage in stages:
            stage.zero_grad()
            for hook in stage._forward_pre_hooks.values():
                if isinstance(hook, _Counted):
                    hook.calls = 0
        losses: list[Tensor] = []
        more = {"target": labels, "losses": losses, "return_outputs": False} if last else {}
        schedule.step(*((ids,) if first else ()), **more)
        reduce_partial_gradients(p for stage in stages for p in stage.parameters())
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return Ready(step=step, parts=list(stages), applied=applied)


class _Counted:
    """Tells the masks which micro-batch a stage is at: schedules run them in order on each stage."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.batch.number = self.calls
        self.calls += 1


def _split(model: Gpt, tp: DeviceMesh | None, *, sp: bool) -> Batch:
    """Tensor parallelism and masks."""
    if tp is None:
        return fix_masks(model, CONFIG.heads)
    apply_tensor_parallel(model, tp, sequence_parallel=sp)
    return fix_masks(model, CONFIG.heads, Axis.of(tp), sp=sp)


# checks ---------------------------------------------------------------------------------------------------------------


def with_references(make: Callable[[torch.dtype, str], Ready], references: dict[str, Any]) -> dict[str, Any]:
    """A layout with a plan: against the same without, to the bit; and against the whole model, by the gaps of the loss
    and of each gradient, with the gradient's largest element.
    """
    found: dict[str, Any] = {}
    for label, dtype in DTYPES.items():
        expected_loss, expected = references[label]
        ready = make(dtype, "full")
        ready.step()  # the first step is checked, the second runs freely
        loss = ready.step()
        gradients = {name: p.grad for name, p in ready.parameters().items() if p.grad is not None}
        gaps = {}
        for name, gradient in gradients.items():
            got = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gaps[name] = [_gap(got.reshape(expected[name].shape), expected[name]), expected[name].abs().max().item()]
        reports = [report for applied in ready.applied for report in applied.report()]
        found[label] = {
            "loss": None if loss is None else [loss.item(), expected_loss],
            "gradients": gaps,
            "without": sorted(set(ready.parameters()) - set(gradients)),
            "dropped": sum(report.slots_dropped for report in reports),
            "fallbacks": [report.fallback for report in reports if report.fallback],
            "recordings": max(report.recordings for report in reports),
        }
        if label == "fp32":
            plain = make(dtype, "")
            plain.step()
            plain_loss = plain.step()
            found["same"] = all(
                torch.equal(_local(p.grad), _local(gradients[name])) for name, p in plain.parameters().items()
            ) and (loss is None or torch.equal(loss, plain_loss))  # type: ignore[arg-type]
    return found


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gap(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().max().item()


USUAL = ("1F1B", "interleaved zero bubble")
"""Schedules that are always run; the others are slow here, and always run on two ranks by `parallel_pipelines`."""


def is_lost(name: str) -> bool:
    """Whether torch loses sequence-parallel layers between the halves of a schedule's backward."""
    return "zero bubble" in name and not can_split_backward()


def layouts(_: Any) -> dict[str, Any]:
    """On two ranks each axis alone, on four ranks pairs of them."""
    if distributed.get_world_size() == 2:
        return fsdp() | pipelines(USUAL)
    return fsdp_and_tensor_parallel(sp=True) | tensor_parallel_pipelines(USUAL)


def other_layouts(_: Any) -> dict[str, Any]:
    """Schedules and layouts for the slow suite, which `layouts` leaves out."""
    names = [name for name in SCHEDULES if name not in USUAL]
    if distributed.get_world_size() == 2:
        return pipelines(names)
    return fsdp() | fsdp_and_tensor_parallel(sp=False) | tensor_parallel_pipelines(names)


def fsdp() -> dict[str, Any]:
    line = init_device_mesh("cpu", (distributed.get_world_size(),))
    return {"FSDP2": with_references(lambda dtype, policy: sharded(dtype, policy, line, None), _references())}


def fsdp_and_tensor_parallel(*, sp: bool) -> dict[str, Any]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = with_references(
        lambda dtype, policy: sharded(dtype, policy, square["dp"], square["tp"], sp=sp), _references()
    )
    return {f"FSDP2 x TP{' + SP' if sp else ''}": found}


def pipelines(names: Iterable[str]) -> dict[str, Any]:
    """A stage on each rank, or two, for each schedule."""
    line, references = init_device_mesh("cpu", (2,)), _references()
    return {
        f"PP, {name}": with_references(
            lambda dtype, policy, name=name: pipeline(dtype, policy, line, None, name), references
        )
        for name in names
    }


def tensor_parallel_pipelines(names: Iterable[str]) -> dict[str, Any]:
    """Two stages of two tensor- and sequence-parallel ranks, for each schedule."""
    references = _references()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    return {
        f"TP + SP + PP, {name}": with_references(
            lambda dtype, policy, name=name: pipeline(dtype, policy, square["pp"], square["tp"], name), references
        )
        for name in names
        if not is_lost(name)
    }


@cache
def _references() -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return {label: whole(dtype) for label, dtype in DTYPES.items()}
