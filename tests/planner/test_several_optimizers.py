"""Two networks with an optimizer each, and what wraps an optimizer: the plan counts all of them."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import jettison
from jettison.core.errors import UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner.readiness import JointOptimizer, as_one
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, LAYERS, STEPS = 32, 128, 4, 3


def network(outputs: int) -> nn.Module:
    return nn.Sequential(*(Mlp(WIDTH, 4 * WIDTH, 0.1) for _ in range(LAYERS)), nn.Linear(WIDTH, outputs))


def passes(made: nn.Module, judge: nn.Module, batch: Tensor) -> None:
    """A judge that tells what is made from what is real, and what makes it against it."""
    fake = made(batch)
    (softplus(-judge(batch)).mean() + softplus(judge(fake.detach())).mean()).backward()
    softplus(-judge(fake)).mean().backward()


def run(budget: int | None, *, both: bool = True) -> tuple[list[Tensor], list[int], Any]:
    """Parameters and peaks of some steps, and the handle of their plan."""
    torch.manual_seed(0)
    models = network(WIDTH), network(1)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in models]
    batch = torch.randn(ROWS, WIDTH)
    handle = None
    if budget is not None:
        given = optimizers if both else optimizers[0]
        handle = jettison.auto_checkpoint(models[0], batch, Bytes(budget), models=models, step=passes, optimizer=given)

    def step() -> None:
        passes(*models, batch)
        for optimizer in reversed(optimizers):
            optimizer.step()

    peaks = []
    torch.manual_seed(1)
    for _ in range(STEPS):
        alive = [*static_tensors(models[0], batch, optimizers[0]), *static_tensors(models[1], (), optimizers[1])]
        peaks.append(measured_peak(step, static_tensors=alive).peak_bytes)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [p.detach().clone() for model in models for p in model.parameters()], peaks, handle


def test_two_networks_under_one_budget_with_both_optimizers() -> None:
    plain, peaks, _ = run(None)
    budget = int(0.85 * max(peaks))
    planned, lower, handle = run(budget)
    assert all(map(torch.equal, planned, plain))
    assert max(lower) <= budget
    assert max(lower) == pytest.approx(handle.plan.predicted.peak_bytes, abs=256)


def test_the_second_network_s_optimizer_is_said_where_it_was_not_given() -> None:
    """It steps first, when the one that was given has no state: it is not in that one's place."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, peaks, _ = run(None)
        run(int(0.85 * max(peaks)), both=False)
    (text,) = [str(w.message) for w in said if "of state that the plan" in str(w.message)]
    assert "optimizer=(first, second)" in text


def test_what_is_no_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="has 3 among several"):
        as_one([torch.optim.SGD(model.parameters()), 3])  # type: ignore[list-item]
    assert as_one(()) is None
    lone = torch.optim.SGD(model.parameters())
    assert as_one([lone]) is lone


@pytest.mark.parametrize("library", ["accelerate", "fabric", "lightning"])
def test_what_a_library_wraps_around_an_optimizer_is_taken_off(library: str) -> None:
    """Accelerate's steps only where gradients are whole, and of Lightning's no copy can be made."""
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters())
    if library == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        given = accelerator.prepare(inner)
    elif library == "fabric":
        _, given = pytest.importorskip("lightning").Fabric(accelerator="cpu").setup(model, inner)
    else:
        optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
        given = optimizers.LightningOptimizer(inner)
    assert given is not inner
    assert as_one(given) is inner
    several = as_one([given, given])
    assert isinstance(several, JointOptimizer)
    assert several.optimizers == [inner, inner]


class Counting(torch.optim.Optimizer):
    """Keeps a count and a lock of its own beside its state; its step takes no closure, as Muon's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count, self.lock, self.scale = 0, threading.Lock(), torch.ones(3)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        with self.lock:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter.add_(parameter.grad, alpha=-0.1 / self.count * float(len(self.scale)))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_with_attributes_of_its_own(several: bool, scheduled: bool) -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))), torch.randn(4, 8)
    optimizer = Counting(model[0].parameters() if several else model.parameters())
    if scheduled:  # puts a step of its own on the instance
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = (optimizer, torch.optim.SGD(model[1].parameters(), 0.1)) if several else optimizer
    before = [p.detach().clone() for p in model.parameters()]
    with jettison.auto_checkpoint(model, (x,), "1GiB", optimizer=given, loss_fn=lambda y: y.square().mean()):
        assert optimizer.count == 0 and optimizer.scale.sum() == 3
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model(x).square().mean().backward()
        optimizer.step()
    assert optimizer.count == 1
