"""Pipelines in a loop of one's own: what is refused before any rank waits for another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import jettison
from jettison.core.errors import PlanMismatch, TraceError, UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak
from jettison.dryrun.fake_pipeline import _Chain
from jettison.parallel.recompute_agreement import Round
from support.toys import Mlp


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """A world of one rank."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def schedule(kind=Schedule1F1B, stages: int = 1):
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(16, 64) for _ in range(4)))
    return kind(PipelineStage(model, 0, stages, torch.device("cpu")), 4, nn.functional.mse_loss)


def step(made, x: Tensor) -> None:
    made.step(x, target=x, return_outputs=False)


def gradients(made) -> list[Tensor]:
    return [p.grad for p in made._stage.submod.parameters()]


@pytest.mark.parametrize("kind", [Schedule1F1B, pytest.param(ScheduleGPipe, marks=pytest.mark.slow)])
def test_a_pipeline_of_one_stage_is_planned_like_any_step(alone: None, kind) -> None:
    x = torch.randn(32, 8, 16)
    planned, plain = schedule(kind), schedule(kind)
    whole = jettison.auto_checkpoint(planned, x, "1GiB", step=step)
    free = whole.plan.predicted.peak_bytes
    whole.remove()
    handle = jettison.auto_checkpoint(planned, x, Bytes(int(0.9 * free)), step=step)
    assert handle.plan.predicted.peak_bytes <= 0.9 * free
    assert any(layer.policy != "none" for layer in handle.plan.layers)
    step(planned, x)
    step(plain, x)
    assert all(map(torch.equal, gradients(planned), gradients(plain)))
    planned._stage.submod.zero_grad()
    alive = [x, *planned._stage.submod.parameters()]
    measured = measured_peak(lambda: step(planned, x), static_tensors=alive).peak_bytes
    assert measured <= 0.9 * free
    assert measured == pytest.approx(handle.plan.predicted.peak_bytes, rel=0.03)
    handle.remove()


@pytest.mark.filterwarnings("ignore:0 runs other ops than it was planned with")
def test_what_thaws_in_a_pipeline_is_planned_for(alone: None) -> None:
    x, thawed = torch.randn(32, 8, 16), []
    planned, plain = schedule(), schedule()
    for made in (planned, plain):
        for layer in made._stage.submod[:3]:
            layer.requires_grad_(False)
    handle = jettison.auto_checkpoint(planned, x, "1GiB", step=step)
    before = handle.plan.predicted.peak_bytes
    handle.expect(x)
    assert handle.plan.predicted.peak_bytes == before
    for made in (planned, plain):
        made._stage.submod[1].requires_grad_(True)
    with warnings.catch_warnings(action="error"):
        handle.expect(x)
        thawed.append(handle.plan.predicted.peak_bytes)
        step(planned, x)
    step(plain, x)
    mine, others = gradients(planned), gradients(plain)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert thawed[0] > before
    planned._stage.submod.zero_grad()
    alive = [x, *planned._stage.submod.parameters()]
    measured = measured_peak(lambda: step(planned, x), static_tensors=alive).peak_bytes
    assert measured == pytest.approx(thawed[0], rel=0.03)
    planned._stage.submod.zero_grad()
    planned._stage.submod[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"4 parameters .* are trained that were frozen.* call handle\.expect\(batch\)"
    ):
        step(planned, x)
    handle.remove()


def test_a_schedule_without_its_step_is_refused(alone: None) -> None:
    with pytest.raises(UsageError, match="Schedule1F1B without step="):
        jettison.auto_checkpoint(schedule(), torch.randn(8, 16), "1GiB")


def test_a_pipeline_has_batches_of_one_shape(alone: None) -> None:
    with pytest.raises(UsageError, match="shapes= with a pipeline"):
        jettison.auto_checkpoint(schedule(), torch.randn(8, 16), "1GiB", step=step, shapes=[torch.randn(16, 16)])


def test_stages_of_a_traced_pipeline_are_refused(alone: None) -> None:
    made = schedule()
    made._stage = object()
    with pytest.raises(UnsupportedModule, match="expected stages that are made as"):
        jettison.auto_checkpoint(made, torch.randn(8, 16), "1GiB", step=step)


def test_a_step_that_fails_is_said(alone: None) -> None:
    def fails(made, x: Tensor) -> None:
        raise ValueError("no such rows")

    with pytest.raises(TraceError, match="no such rows"):
        jettison.auto_checkpoint(schedule(), torch.randn(8, 16), "1GiB", step=fails)


def test_layers_that_torch_would_lose_are_refused_by_name(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 does, where a backward is split; tests/parallel/test_parallel_layouts.py says which version does."""

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Attribute '_input_metadata' is invalid for this instance of _C._FunctionBase.")

    monkeypatch.setattr(PipelineStage, "backward_weight_one_chunk", lost)
    made = schedule(lambda stage, *rest: ScheduleInterleavedZeroBubble([stage], *rest))
    with pytest.raises(UnsupportedModule, match=r"loses layers that are an .* between the halves"):
        jettison.auto_checkpoint(made, torch.randn(32, 8, 16), "1GiB", step=step)


def test_a_stage_hears_what_the_one_before_returns_or_why_it_does_not() -> None:
    """Two ranks, one after the other: the first one's words are in the store already."""
    store = distributed.HashStore()

    def chain(rank: int, number: int) -> tuple[Round, _Chain]:
        one = Round((0, 1), 0.2, rank=rank, store=store, number=number)
        return one, _Chain(one, 0)

    chain(0, 1)[1].publish(0, [torch.zeros(2, 3, requires_grad=True)])
    (heard,) = chain(1, 1)[1].receive(0)
    assert (heard.shape, heard.dtype, heard.requires_grad, heard.is_meta) == ((2, 3), torch.float32, True, True)
    chain(0, 2)[0].give_up("ValueError: it has no rows")
    with pytest.raises(PlanMismatch, match="rank 0 has no plan, so none of ranks 0, 1 starts: ValueError: it has no"):
        chain(1, 2)[1].receive(0)
    with pytest.raises(PlanMismatch, match=r"stage 0 of the pipeline said nothing within 0[.]2 s; all of ranks 0, 1"):
        chain(1, 3)[1].receive(0)
