"""A dry run under plans that move: the peak on the device, the bytes on the host, and every copy in its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_model
from jettison.dryrun.counter import AllocationCounter, measured_peak, static_tensors
from jettison.dryrun.step import StepPeaks, dry_run_batch
from jettison.planner.apply import policies_of
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll
from support.offloading import ALL, INPUTS, line_of, run, seeded
from support.toys import Mlp
from support.transfers import Direction, Transfer, transfers_in, transfers_of

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, LAYERS = 16, 32, 5


class Columns(nn.Module):
    """Of a wide product every fourth column is saved: they are gathered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(width, 12 * width))

    def forward(self, x: Tensor) -> Tensor:
        part = (x @ self.wide)[:, ::12]
        return part * torch.sin(part) + x


class Wide(Mlp):
    """Most of what it saves is its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 6 * width)


def found(block: type[nn.Module], policy: CheckpointPolicy) -> tuple[StepPeaks, tuple[Transfer, ...], nn.Module, Any]:
    model, x = line_of(block, LAYERS, WIDTH), seeded(ROWS, WIDTH)
    regions = [f"layers.{i}" for i in range(LAYERS)]
    traced = trace_model(model, x, regions=regions)
    policies, segments = policies_of(policy, [call.name for call in traced.calls])
    dry, transfers = transfers_in(lambda: dry_run_batch(traced, policies, KeepAll(), segments))
    return dry, transfers, model, regions


@pytest.mark.parametrize("block", [Wide, Columns])
@pytest.mark.parametrize("policy", [ALL, INPUTS], ids=["all", "inputs"])
def test_a_dry_run_knows_the_device_the_host_and_the_copies(block: type[nn.Module], policy: CheckpointPolicy) -> None:
    expected, transfers, model, regions = found(block, policy)
    x = seeded(ROWS, WIDTH)
    with jettison.apply(model, policy, batch=x, regions=regions) as handle:
        engine = handle.offload
        assert engine is not None
        run(model, x)
        model.zero_grad(set_to_none=True)
        transfers_of(engine).clear()

        def step() -> None:
            loss = model(x)
            loss.backward()

        report = measured_peak(step, static_tensors=static_tensors(model, x))
        assert tuple(transfers_of(engine)) == transfers
        assert engine.pool.peak_bytes == expected.host_bytes
        model.zero_grad(set_to_none=True)
        with AllocationCounter(static_tensors(model, x)) as counter:
            step()
    assert counter.peak_bytes == report.peak_bytes == expected.peak_bytes
    assert expected.host_bytes == sum(t.nbytes for t in transfers if t.direction is Direction.OUT)


def test_what_moves_is_not_resident() -> None:
    """Five blocks save an input and two tensors of six times its width; all but the last one's go."""
    (kept, transfers, *_), (moved, *_) = found(Wide, KeepAll()), found(Wide, ALL)
    block = ROWS * WIDTH * 4 + 2 * ROWS * 6 * WIDTH * 4
    assert kept.host_bytes == 0 and not transfers
    assert moved.host_bytes == (LAYERS - 1) * block
    # when forward ends the last block's are there, and none of the others'
    assert kept.forward_peak_bytes - moved.forward_peak_bytes >= 2 * block
    assert moved.peak_bytes < kept.peak_bytes
