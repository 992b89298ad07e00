"""Layers that are unfrozen after planning (gradual unfreezing): planned for when the next step begins."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, LAYERS = 128, 32, 5
THAWED = (3, 1)
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """The output is the loss; only the last layer is trained at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        for layer in self.layers[:-1]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Loop:
    """Steps of one model.

    Args:
        all_at_once: the optimizer has the frozen parameters from the start; else they are added when they thaw.
    """

    def __init__(self, all_at_once: bool) -> None:
        torch.manual_seed(0)
        self.model, self.all_at_once, self.handle = Net(), all_at_once, None
        given = [p for p in self.model.parameters() if all_at_once or p.requires_grad]
        self.optimizer = torch.optim.AdamW(given, 1e-3)

    def thaw(self, number: int) -> None:
        layer = self.model.layers[number].requires_grad_(True)
        if not self.all_at_once:
            self.optimizer.add_param_group({"params": list(layer.parameters())})

    def step(self, handle: Any) -> list[Tensor]:
        if handle is not None:
            handle.expect(X)
        self.model(X).backward()
        self.optimizer.step()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return gradients

    def peak(self, handle: Any) -> int:
        gc.collect()
        static = static_tensors(self.model, X, self.optimizer)
        return measured_peak(lambda: [self.step(handle) and None], static_tensors=static).peak_bytes


def own_step(model: Any, x: Tensor) -> None:
    model(x).backward()


@pytest.mark.parametrize("step", [None, own_step], ids=["plain", "step"])
@pytest.mark.parametrize("all_at_once", [True, False], ids=["all at once", "added"])
def test_what_thaws_is_planned_for(step: Any, all_at_once: bool) -> None:
    plain, loop = Loop(all_at_once), Loop(all_at_once)
    plain.step(None)
    for number in THAWED:
        plain.thaw(number)
        plain.step(None)
    budget = int(0.85 * plain.peak(None))
    plain = Loop(all_at_once)
    handle = jettison.auto_checkpoint(loop.model, X, Bytes(budget), optimizer=loop.optimizer, step=step)
    told = handle if step is not None else None
    assert handle.batches is not None and handle.batches.now is not None
    peaks = []
    with warnings.catch_warnings(action="error"):
        for thawed in (None, *THAWED):
            if thawed is not None:
                loop.thaw(thawed)
                plain.thaw(thawed)
            got, expected = loop.step(told), plain.step(None)
            assert len(got) == len(expected) and all(map(torch.equal, got, expected))
            plain.step(None)
            peaks.append(handle.batches.now.peak_bytes)
            assert loop.peak(told) == pytest.approx(peaks[-1], abs=64)
    assert peaks == sorted(peaks) and len(set(peaks)) == 3
    assert peaks[-1] <= budget
    for layer in loop.model.layers[:2]:
        layer.requires_grad_(False)
    loop.step(told)
    assert handle.batches.now.peak_bytes == peaks[-1], "the optimizer keeps the state of what was trained"


def test_what_thaws_and_does_not_fit_is_said_with_the_smallest_budget() -> None:
    loop = Loop(all_at_once=True)
    handle = jettison.auto_checkpoint(loop.model, X, "1GiB", optimizer=loop.optimizer)
    assert handle.plan is not None
    handle.remove()
    budget = handle.plan.predicted.peak_bytes + 4096
    handle = jettison.auto_checkpoint(loop.model, X, Bytes(budget), optimizer=loop.optimizer)
    for number in range(LAYERS):
        loop.thaw(number)
    with pytest.warns(
        UserWarning, match=r"with 16 more parameters trained or unsharded does not fit .* smallest plan for it needs"
    ):
        loop.step(None)


@pytest.mark.filterwarnings("ignore:layers.0 runs other ops than it was planned with")
def test_a_loop_that_says_nothing_is_told_what_to_call() -> None:
    loop = Loop(all_at_once=True)
    jettison.auto_checkpoint(loop.model, X, "1GiB", optimizer=loop.optimizer, step=own_step)
    loop.thaw(0)
    with pytest.warns(
        UserWarning, match=r"4 parameters .* are trained that were frozen.* call handle\.expect\(batch\)"
    ):
        loop.step(None)
