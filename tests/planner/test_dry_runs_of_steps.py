"""Dry runs of whole steps that planning makes: each choice once, whatever the step does to its model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import jettison
from jettison.core.units import Bytes
from jettison.dryrun import op_costs
from jettison.dryrun import step as step_module
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlps


@pytest.fixture
def silent_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of two ranks that send nothing, and do not agree on plans."""
    monkeypatch.setattr(sys.modules["jettison.planner.auto_checkpoint"], "groups_for", lambda *_: [])
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def accumulating(model: Any, x: Tensor) -> None:
    for rows in x.chunk(2):
        (model(rows) / 2).backward()


def test_a_sharded_step_is_dry_run_once_for_each_choice(silent_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's gathers name an object of their own in every call, by its address."""
    model = Mlps()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, runs, steps = torch.randn(64, 16), [], []
    dry_run, step_of = step_module.dry_run, step_module.step_of

    def counted(*args: Any, workspace: op_costs.MeasuredWorkspace, **more: Any) -> Any:
        runs.append(workspace)
        found = dry_run(*args, workspace=workspace, **more)
        return found

    monkeypatch.setattr(step_module, "dry_run", counted)
    monkeypatch.setattr("jettison.dryrun.composed_peaks.step_of", lambda *args: steps.append(None) or step_of(*args))
    handle = jettison.auto_checkpoint(model, x, "1GiB", optimizer=optimizer, step=accumulating)
    assert handle.plan is not None
    budget = Bytes(handle.plan.predicted.peak_bytes - 4096)
    handle.remove()
    runs.clear(), steps.clear()
    jettison.auto_checkpoint(model, x, budget, optimizer=optimizer, step=accumulating)
    assert len(steps) >= 3
    assert len(runs) == len(steps), "a step is dry-run once where all its ops have a price"


def test_parameters_that_stay_unsharded_after_planning_are_planned_for(silent_two: None) -> None:
    model, x = Mlps(), torch.randn(64, 16)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    handle = jettison.auto_checkpoint(model, x, "1GiB", step=lambda model, x: model(x).backward())
    assert handle.batches is not None and handle.batches.now is not None
    before = handle.batches.now.peak_bytes
    for region in handle.regions:
        region.before_first = None  # the second rank would have to agree
    model(x).backward()
    model.set_reshard_after_forward(False)
    with pytest.warns(UserWarning, match=r"set_reshard_after_forward.*call handle\.expect\(batch\)"):
        model(x).backward()
    handle.expect(x)
    assert handle.batches.now.peak_bytes > before


class Drawn(nn.Module):
    """An MLP that Python's random may leave out: no recording has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) if random.random() < 0.9 else x


@pytest.mark.filterwarnings("ignore:.*cannot be (recorded|planned)")
def test_planning_takes_the_memory_of_a_block_not_of_a_step() -> None:
    """Stand-ins of blocks without a recording allocate fake bytes: planning on a GPU may not run out of memory."""
    model, x = nn.Sequential(*(Drawn() for _ in range(12))), torch.randn(512, 16)
    static = static_tensors(model, (x,))

    def plan() -> None:
        jettison.auto_checkpoint(model, (x,), "1GiB", loss_fn=torch.mean).remove()

    plain = measured_peak(lambda: model(x).mean().backward(), static_tensors=static)
    model.zero_grad()
    planning = measured_peak(plan, static_tensors=static)
    assert planning.peak_bytes - planning.static_bytes < (plain.peak_bytes - plain.static_bytes) / 2
