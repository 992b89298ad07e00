"""torch's own modes for debugging, on while a model is planned: plans are the same, and so is what the mode records."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, LAYERS = 64, 16, 3


class Net(nn.Module):
    """The output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class ReadsValues(nn.Module):
    """A block that no recording can hold: it is observed on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.detach().numpy().size else x


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Memory that nobody has written to is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def warns_always() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "detect_anomaly": torch.autograd.detect_anomaly,
    "use_deterministic_algorithms": deterministic,
    "set_warn_always": warns_always,
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
}


def own_step(model: Any, x: Tensor) -> None:
    model(x).backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("step", [None, own_step], ids=["plain", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_holds_under_a_debug_mode(mode: str, step: Any) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def made() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        return model, torch.optim.AdamW(model.parameters())

    def run(model: Net, optimizer: torch.optim.Optimizer) -> None:
        loss = model(x)
        loss.backward()
        optimizer.step()

    def peak(model: Net, optimizer: torch.optim.Optimizer) -> int:
        gc.collect()
        static = static_tensors(model, x, optimizer)
        return measured_peak(lambda: run(model, optimizer), static_tensors=static).peak_bytes

    with MODES[mode]():
        before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        model, optimizer = made()
        run(model, optimizer)
        expected = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        budget = int(0.8 * peak(model, optimizer))
        model, optimizer = made()
        handle = jettison.auto_checkpoint(model, x, Bytes(budget), optimizer=optimizer, step=step)
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == before
        run(model, optimizer)
        got = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        measured = peak(model, optimizer)
    assert all(map(torch.equal, got, expected))
    assert handle.plan is not None
    assert handle.plan.predicted.peak_bytes == pytest.approx(measured, abs=64)
    assert measured <= budget


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:what layers", "ignore:blocks like")
def test_blocks_on_real_tensors_are_observed_in_anomaly_mode() -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    model.layers = nn.ModuleList([Mlp(WIDTH, 64), *(ReadsValues() for _ in range(LAYERS))])
    with torch.autograd.detect_anomaly(), deterministic():
        jettison.auto_checkpoint(model, x, Bytes(1 << 30))
        model(x).backward()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, of every profile without a schedule
def test_a_profile_around_planning_is_not_ended() -> None:
    model, x = Net(), torch.randn(ROWS, WIDTH)
    with torch.profiler.profile() as profile:
        jettison.auto_checkpoint(model, x, Bytes(1 << 30))
        with torch.profiler.record_function("after planning"):
            model(x).backward()
    assert "after planning" in {event.name for event in profile.events()}
