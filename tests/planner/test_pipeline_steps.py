"""Pipelines in a loop of one's own: what is refused before any rank waits for another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import jettison
from jettison.errors import PlanMismatch, TraceError, UnsupportedModule, UsageError
from jettison.measure import measured_peak
from jettison.units import Bytes
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


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleGPipe])
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


def test_a_stage_learns_why_the_one_before_it_failed(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of two ranks would: the first one's word is in the store already."""
    from jettison.dryrun import imagined_pipeline

    chain = imagined_pipeline._Chain((0,))
    first = schedule()._stage
    chain.give_up([first], ValueError("it has no rows"))
    with pytest.raises(PlanMismatch, match="stage 0 of the pipeline could not be planned: ValueError: it has no rows"):
        chain.hear(0)
    monkeypatch.setattr(imagined_pipeline, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(PlanMismatch, match="stage 1 of the pipeline did not say"):
        chain.hear(1)
