"""Steps that run their optimizers themselves: a GAN's half-steps over shared networks, whole steps in one function."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jettison
from jettison.core.errors import UnsupportedModule
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 128, 32
Pair = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 4 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class Gan:
    """Two networks, their optimizers, and steps of several kinds; ``behind`` runs after the planned step."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.maker, self.judge = Net(WIDTH), Net(1)
        self.first = torch.optim.Adam(self.maker.parameters(), 1e-3)
        self.second = torch.optim.AdamW(self.judge.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.second, 1) if kind == "schedule" else None
        self.step: Callable[..., Any] = getattr(self, KINDS[kind])
        self.behind: Callable[[], Any] = self.first.step if kind == "the last outside" else lambda: None

    def judged(self, maker: Any, judge: Any, batch: Pair) -> Tensor:
        self.second.zero_grad()
        made: Tensor = maker(batch[0])
        (functional.softplus(judge(made.detach())).mean() + functional.softplus(-judge(batch[1])).mean()).backward()
        nn.utils.clip_grad_norm_(self.second.param_groups[0]["params"], 1.0)
        self.second.step()
        if self.schedule is not None:
            self.schedule.step()
        return made

    def two_halves(self, maker: Any, judge: Any, batch: Pair) -> None:
        self.judged(maker, judge, batch)
        self.first.zero_grad()
        functional.softplus(-judge(maker(batch[0]))).mean().backward()
        self.first.step()

    def three_judges(self, maker: Any, judge: Any, batch: Pair) -> None:
        self.judged(maker, judge, batch)
        self.judged(maker, judge, batch)
        self.two_halves(maker, judge, batch)

    def one_fake(self, maker: Any, judge: Any, batch: Pair) -> None:
        made = self.judged(maker, judge, batch)
        self.first.zero_grad()
        judge.requires_grad_(False)
        functional.softplus(-judge(made)).mean().backward()
        self.first.step()
        judge.requires_grad_(True)

    def one_outside(self, maker: Any, judge: Any, batch: Pair) -> None:
        self.judged(maker, judge, batch)
        maker.zero_grad()
        functional.softplus(-judge(maker(batch[0]))).mean().backward()

    def run(self, batch: Pair) -> None:
        self.step(self.maker, self.judge, batch)
        self.behind()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.maker.parameters(), *self.judge.parameters()]

    def peak(self, batch: Pair) -> int:
        gc.collect()
        held = [t for t in (p.grad for p in self.parameters()) if t is not None]
        static = (*static_tensors(self.maker, batch, self.first), *static_tensors(self.judge, (), self.second), *held)
        return measured_peak(lambda: self.run(batch), static_tensors=static).peak_bytes


KINDS = {
    "two halves": "two_halves",
    "schedule": "two_halves",
    "three judges": "three_judges",
    "one fake": "one_fake",
    "the last outside": "one_outside",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "schedule" else kind for kind in KINDS]
)
def test_an_optimizer_steps_between_half_steps(kind: str) -> None:
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    plain, gan = Gan(kind), Gan(kind)
    for _ in range(2):
        plain.run(batch)
    expected = [p.detach().clone() for p in plain.parameters()]
    budget = int(0.85 * plain.peak(batch))
    before, rate = [p.detach().clone() for p in gan.parameters()], gan.second.param_groups[0]["lr"]
    with warnings.catch_warnings(action="error"):
        handle = jettison.auto_checkpoint(
            gan.maker,
            batch,
            Bytes(budget),
            models=(gan.maker, gan.judge),
            step=gan.step,
            optimizer=(gan.first, gan.second),
        )
        assert all(map(torch.equal, before, gan.parameters())), "planning steps copies alone"
        assert not gan.first.state and not gan.second.state
        assert gan.second.param_groups[0]["lr"] == rate
        for _ in range(2):
            gan.run(batch)
        got = [p.detach().clone() for p in gan.parameters()]
        measured = gan.peak(batch)
    assert all(map(torch.equal, got, expected))
    assert measured <= budget
    assert handle.plans[0].predicted.peak_bytes == pytest.approx(measured, abs=64)


def test_a_whole_step_may_be_one_function() -> None:
    x = torch.randn(ROWS, WIDTH)

    def made() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net(1)
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step_with(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(model: Any, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def peak(model: Net, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> int:
        gc.collect()
        held = [p.grad for p in model.parameters() if p.grad is not None]
        static = (*static_tensors(model, x, optimizer), *held)
        return measured_peak(lambda: step(model, x), static_tensors=static).peak_bytes

    plain, optimizer = made()
    step = step_with(optimizer)
    step(plain, x)
    budget = int(0.85 * peak(plain, optimizer, step))
    model, optimizer = made()
    step = step_with(optimizer)
    handle = jettison.auto_checkpoint(model, x, Bytes(budget), step=step, optimizer=optimizer)
    step(model, x)
    measured = peak(model, optimizer, step)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert handle.plan is not None
    assert handle.plan.predicted.peak_bytes == pytest.approx(measured, abs=64)
    assert measured <= budget


def test_a_second_plan_over_a_network_is_refused_with_the_way_to_have_one() -> None:
    gan = Gan("two halves")
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    jettison.auto_checkpoint(gan.maker, batch[0], "1GiB", loss_fn=torch.sum)
    with pytest.raises(UnsupportedModule, match=r"models=\(first, second\), step=whole_step, optimizer=\(of_first,"):
        jettison.auto_checkpoint(
            gan.maker, batch, "1GiB", models=(gan.maker, gan.judge), step=gan.step, optimizer=(gan.first, gan.second)
        )
