"""Critics with a penalty on gradients (WGAN-GP, R1): graphs that a backward retains are planned for with ``step=``."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 16
Pair = tuple[Tensor, Tensor]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 64) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def penalty(critic: Any, batch: Pair) -> Tensor:
    mixed = ((batch[0] + batch[1]) / 2).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def wasserstein(critic: Any, batch: Pair) -> Tensor:
    made: Tensor = critic(batch[1]).mean() - critic(batch[0]).mean()
    return made


def penalty_first(critic: Any, batch: Pair) -> None:
    of_gradients = penalty(critic, batch)
    (wasserstein(critic, batch) + of_gradients).backward()


def penalty_last(critic: Any, batch: Pair) -> None:
    (wasserstein(critic, batch) + penalty(critic, batch)).backward()


def twice_one_after_the_other(critic: Any, batch: Pair) -> None:
    for _ in range(2):
        penalty(critic, batch).backward()
        wasserstein(critic, batch).backward()


def retained_for_later(critic: Any, batch: Pair) -> None:
    real = batch[0].clone().requires_grad_()
    score = critic(real).sum()
    (gradient,) = torch.autograd.grad(score, real, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    critic(batch[1]).mean().backward()
    score.backward()


@pytest.mark.parametrize("step", [penalty_first, penalty_last, twice_one_after_the_other, retained_for_later])
def test_a_penalty_on_gradients_is_planned_without_a_warning(step: Callable[..., Any]) -> None:
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))

    def made() -> tuple[Critic, torch.optim.Optimizer]:
        torch.manual_seed(0)
        critic = Critic()
        return critic, torch.optim.Adam(critic.parameters())

    def train(critic: Critic, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], int]:
        found = []
        for _ in range(2):
            step(critic, batch)
            found += [p.grad for p in critic.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        static = static_tensors(critic, batch, optimizer)
        return found, measured_peak(lambda: (step(critic, batch), optimizer.step()), static_tensors=static).peak_bytes

    expected, plain = train(*made())
    critic, optimizer = made()
    try:
        handle = jettison.auto_checkpoint(critic, batch, Bytes(int(0.85 * plain)), optimizer=optimizer, step=step)
    except jettison.Infeasible as error:
        handle = jettison.auto_checkpoint(critic, batch, error.minimum_budget_bytes, optimizer=optimizer, step=step)
    with warnings.catch_warnings(action="error"):
        got, measured = train(critic, optimizer)
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert handle.plan is not None
    assert handle.plan.predicted.peak_bytes == pytest.approx(measured, abs=64)
