"""What a backward in two halves costs: torch's halves in FLOPs, and schedules played beside a small simulation."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from jettison.memory.schedule import Work
from jettison.predict.forecast import forecast
from jettison.predict.stages import pipeline_shape
from jettison.predict.time import Estimate, Timing, estimate
from jettison.report.step_slices import SliceKind, step_slices
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.spec.hardware import hardware
from jettison.spec.layout import Layout, Schedule
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import run_of

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from support.pipeline_peaks import Case, Cut, chunks_of

H100 = hardware("h100-80gb")
WIDTH = 64


class Products(TorchDispatchMode):
    """FLOPs of products and of attention's forwards, as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
            q, k = args[:2]
            self.flops += 4 * q.numel() * k.shape[2]
        return out


def told(case: Case, recompute: str) -> Run:
    run = run_of(case.formula)
    layout = Layout(
        pp=len(case.stage_layers), schedule=Schedule.ZERO_BUBBLE, stage_layers=case.stage_layers, stage_buffers=True
    )
    how = Recompute.parse(recompute, layers=run.model.depth)
    return replace(run, layout=layout, micro_batches=case.micro_batches, recompute=how)


class Segment(torch.nn.Module):
    """Layers behind one checkpoint of torch's."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(torch.nn.Sequential(*self.layers), x, use_reentrant=False, preserve_rng_state=False)


def halves_flops(case: Case, *, segment: bool = False) -> tuple[int, int]:
    """Of the second stage's first half, and of its second one."""
    ((_, module),) = (found for found in chunks_of(case, 1, 3, Cut))
    if segment:
        module.inner.h = torch.nn.ModuleList([Segment(module.inner.h)])
    x = torch.randn(case.batch, case.sequence, WIDTH, requires_grad=True)
    out = module(x)
    with Products() as first:
        _, groups = stage_backward_input([out], [torch.randn_like(out)], [x], module.parameters())
    with Products() as second:
        stage_backward_weight(module.parameters(), groups)
    return first.flops, second.flops


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_runs_once_more_for_each_group_of_weights(family: str) -> None:
    """What torch computes again in both halves is what the estimate counts, to the FLOP."""
    plain, full = (
        Case(family=family, stage_layers=(1, 2, 1), schedule="zero-bubble", full=again) for again in (False, True)
    )
    without, again = halves_flops(plain), halves_flops(full)
    assert without[0] > 0 < without[1]
    stages = estimate(told(full, "full"), H100).stages
    assert sum(again) - sum(without) == stages[1].recomputed_flops > 0
    items = [item for item in _items(told(full, "full"), 1) if item.groups]
    once = sum(item.count * item.recomputed_flops for item in items)
    assert again[0] - without[0] == once
    assert again[1] - without[1] == once * items[0].groups, "once a group"
    assert stages[1].weights[0] > stages[1].chunks[0].weights.seconds
    assert estimate(told(plain, "none"), H100).stages[1].repeated[0].seconds == 0


def test_a_segment_runs_whole_for_each_group_of_any_of_its_layers() -> None:
    case = Case(family="gpt2", stage_layers=(1, 2, 1), schedule="zero-bubble")
    without, again = halves_flops(case), halves_flops(case, segment=True)
    run = told(case, "every:2")
    stage = estimate(run, H100).stages[1]
    assert sum(again) - sum(without) == stage.recomputed_flops > 0
    assert again[1] - without[1] == 12 * (again[0] - without[0]), "six groups in each of two layers"


def _items(run: Run, stage: int) -> list[Any]:
    found = estimate(run, H100)
    timing = Timing(run=run, hardware=H100, execution=found.execution)
    return [item for chunk in forecast(run).stages[stage].groups for item in timing.items(chunk)]


SCHEDULES: dict[str, dict[str, Any]] = {
    "zero-bubble": {},
    "zero-bubble, two chunks": {"schedule": "zero-bubble", "virtual_stages": 2},
    "zero-bubble-v": {"virtual_stages": 2},
}


def asked(schedule: str, **more: Any) -> Run:
    flags = (
        {"pp": 4, "micro_batches": 8, "schedule": schedule, "stage_buffers": True} | SCHEDULES.get(schedule, {}) | more
    )
    return resolve(model_spec("llama3-8b"), RunRequest(**flags)).run


def simulated(found: Estimate) -> dict[tuple[int, Work, int, int], tuple[float, float]]:
    """When each pass begins and ends, by device, work, micro-batch and chunk.

    Devices are programs that put messages on a clock: one wakes when it is free or is sent something, and runs what
    comes next in its order if all that it needs is there.
    """
    run, layout = found.run, found.run.layout
    pp, chunks = layout.pp, layout.virtual_stages
    orders = pipeline_shape(run).orders
    owner = {layout.schedule.place(d, c, pp): d for d in range(pp) for c in range(chunks)}
    last = pp * chunks - 1
    delivered: dict[int, set[tuple[Work, int, int]]] = defaultdict(set)  # by device: what it has, of which place
    next_step, free = [0] * pp, [0.0] * pp
    clock: list[tuple[float, int, int, tuple[Work, int, int] | None]] = [(0.0, d, d, None) for d in range(pp)]
    spans, serial = {}, pp
    while clock:
        now, _, device, message = heapq.heappop(clock)
        if message is not None:
            delivered[device].add(message)
        if now < free[device] or next_step[device] == len(orders[device]):
            continue
        step = orders[device][next_step[device]]
        place = layout.schedule.place(device, step.chunk, pp)
        needs = {
            Work.FORWARD: None if place == 0 else (Work.FORWARD, step.micro_batch, place - 1),
            Work.BACKWARD: (Work.FORWARD, step.micro_batch, place)
            if place == last
            else (Work.BACKWARD, step.micro_batch, place + 1),
            Work.WEIGHT: (Work.BACKWARD, step.micro_batch, place),
        }[step.work]
        if needs is not None and needs not in delivered[device]:
            continue
        stage = found.stages[device]
        seconds = {Work.FORWARD: stage.forward, Work.BACKWARD: stage.inputs, Work.WEIGHT: stage.weights}
        free[device] = now + seconds[step.work][step.chunk]
        spans[device, step.work, step.micro_batch, step.chunk] = now, free[device]
        next_step[device] += 1
        done = step.work, step.micro_batch, place
        beside = {Work.FORWARD: place + 1, Work.BACKWARD: place - 1}.get(step.work, place)
        for other in {device, owner.get(beside, device)}:
            serial += 1
            heapq.heappush(clock, (free[device], serial, other, done))
    return spans


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_played_schedule_is_what_a_simulation_finds(schedule: str, recompute: str) -> None:
    run = asked(schedule, recompute=recompute)
    found, memory = estimate(run, H100), forecast(run)
    spans = simulated(found)
    slices = step_slices(memory, found)
    passes = [[each for each in own if each.step is not None] for own in slices]
    assert len(spans) == sum(map(len, passes)) == 3 * 4 * 8 * run.layout.virtual_stages
    for stage, sliced in zip(memory.stages, slices, strict=True):
        for each in passes[stage.index]:
            step = each.step
            begin, end = spans[stage.index, step.work, step.micro_batch, step.chunk]
            assert (each.begin_ns / 1e9, each.end_ns / 1e9) == pytest.approx((begin, end), rel=1e-9, abs=1e-9)
        again = sum(
            one.end_ns - one.begin_ns for part in sliced for one in part.slices if one.kind is SliceKind.RECOMPUTE
        )
        per_batch = sum(part.seconds for part in found.stages[stage.index].again)
        assert again / 1e9 == pytest.approx(run.micro_batches * per_batch, rel=1e-5)
    over = max(end for _, end in spans.values())
    ended = max(stage.end for stage in found.stages)
    optimizer = max(stage.optimizer for stage in found.stages)
    assert found.step_seconds == pytest.approx(over + ended + optimizer, rel=1e-9)


def test_a_models_first_stage_does_everything_in_its_second_half() -> None:
    first, second, *_ = estimate(asked("zero-bubble", recompute="full"), H100).stages
    assert first.inputs[0] == pytest.approx(0.0, abs=1e-12)
    assert first.repeated[0].seconds == 0, "a backward that is whole computes once"
    assert second.repeated[0].seconds == pytest.approx(9 * second.chunks[0].again.seconds), "Llama's nine groups"
    usual = estimate(asked("zero-bubble", recompute="full", stage_buffers=False), H100).stages
    assert not any(part.seconds for part in usual[1].repeated)
    assert usual[0].inputs[0] > 0
