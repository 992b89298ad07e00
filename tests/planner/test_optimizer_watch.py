"""Optimizers whose state a plan does not count are noticed, if the budget may not hold then."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import jettison
from jettison.core.units import Bytes
from jettison.planner import peak_watch
from jettison.planner.peak_watch import OptimizerWatch
from support.structure import said
from support.toys import Mlp

NUMBERS = 1024


@pytest.fixture(autouse=True)
def nothing_left_of_others() -> None:
    """Handles that other tests left behind, whose models are gone, keep the hook until somebody plans or removes."""
    for left in list(peak_watch._watching):
        left.remove()
    watch(model(), None, 0).remove()
    assert not peak_watch._hooks


STATE_BYTES = 2 * 4 * NUMBERS + 4  # of Adam: two moments in fp32, and a count


def model() -> nn.Module:
    return nn.Linear(NUMBERS, 1, bias=False)


def adam(of: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), **more)


def watch(
    of: nn.Module, optimizer: torch.optim.Optimizer | None, room_bytes: int, elsewhere: int = 0
) -> OptimizerWatch:
    return OptimizerWatch(
        [of], optimizer, budget_bytes=100 + room_bytes, predicted=lambda: 100, elsewhere_bytes=elsewhere
    )


def steps(of: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    def both() -> None:
        for _ in range(2):
            of(torch.ones(1, NUMBERS)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return said(both)[1]


@pytest.mark.parametrize(
    ("room_bytes", "elsewhere", "count"),
    [(STATE_BYTES - 1, 0, 1), (STATE_BYTES, 0, 0), (0, STATE_BYTES, 0), (0, STATE_BYTES - 1, 1)],
)
def test_a_state_that_nobody_counted_is_said_once_where_it_does_not_fit(
    room_bytes: int, elsewhere: int, count: int
) -> None:
    of = model()
    found = watch(of, None, room_bytes, elsewhere)
    texts = steps(of, adam(of))
    found.remove()
    assert len(texts) == count
    assert all("made with no optimizer" in text and "plan with optimizer=" in text for text in texts)


def test_what_has_no_state_and_what_is_of_another_model_is_nothing_to_say() -> None:
    of, other = model(), model()
    found = watch(of, None, 0)
    assert steps(of, torch.optim.SGD(of.parameters())) == []
    assert steps(other, adam(other)) == []
    assert len(steps(of, torch.optim.SGD(of.parameters(), momentum=0.9))) == 1
    found.remove()


def test_the_optimizer_that_was_planned_with_and_one_in_its_place_are_counted() -> None:
    of = model()
    planned = adam(of)
    found = watch(of, planned, 0)
    assert steps(of, adam(of, lr=1.0, weight_decay=0.0)) == []  # the first has no state yet
    assert steps(of, planned) == []
    (text,) = steps(of, adam(of))  # beside it
    assert "8.00 KiB" in text
    assert "made with the AdamW that it was given" in text
    found.remove()


def test_more_state_than_that_of_the_optimizer_that_was_planned_with() -> None:
    of = model()
    found = watch(of, adam(of), 0)
    (text,) = steps(of, adam(of, amsgrad=True))
    assert "12.00 KiB" in text  # three numbers a parameter
    found.remove()


class WeightReadPeaks(torch.optim.Optimizer):
    """As Accelerate's wrapper."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def test_what_a_wrapper_steps_inside_is_known() -> None:
    of = model()
    inner = adam(of)
    around = WeightReadPeaks(inner)
    found = watch(of, around, 0)
    assert steps(of, inner) == []
    found.remove()


def test_nothing_is_held_and_what_is_left_over_goes_within_a_step() -> None:
    before = len(_global_optimizer_post_hooks)
    gone, left = [], []
    for _ in range(2):
        of = model()
        left.append(watch(of, adam(of), 0))
        gone.append(weakref.ref(of))
    del of
    gc.collect()
    assert all(found() is None for found in gone)
    assert len(_global_optimizer_post_hooks) == before + 1
    other = model()
    last = watch(other, None, 0)
    assert len(steps(other, adam(other))) == 1
    for found in (*left, last, last):
        found.remove()
    assert len(_global_optimizer_post_hooks) == before


def test_a_model_that_is_gone_takes_no_hook_from_under_a_step() -> None:
    of = model()
    left, called = watch(of, None, 0), []
    behind = register_optimizer_step_post_hook(lambda *_: called.append(1))
    del of
    gc.collect()
    other = model()
    assert steps(other, adam(other)) == []
    assert called == [1, 1]
    behind.remove()
    left.remove()


class Growing(torch.optim.Optimizer):
    """As LBFGS, which has its history after some steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        seen = self.state[parameter].setdefault("seen", [])
        if len(seen) < 3:
            seen.append(parameter.detach().clone())


def test_a_state_that_grows_is_looked_at_until_it_has_grown() -> None:
    of = model()
    found = watch(of, None, 2 * 4 * NUMBERS)  # room for two of three
    optimizer = Growing(of.parameters(), {})
    assert steps(of, optimizer) == []
    (text,) = steps(of, optimizer)
    assert "12.00 KiB of state" in text
    found.remove()


def test_one_of_the_same_kind_over_other_parameters_is_beside_the_one_that_was_planned_with() -> None:
    both = nn.ModuleList([model(), model()])
    planned = adam(both[0])
    found = watch(both, planned, 0)
    (text,) = steps(both[1], adam(both[1]))  # it steps first: the planned one has no state yet
    assert "optimizer=(first, second)" in text
    found.remove()


class Branches(nn.Module):
    """Which of two heads runs is Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(32, 128) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(32, 1024) for _ in range(2))
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss: torch.Tensor = self.heads[self.used](x[:4]).square().mean()
        return loss


@pytest.mark.parametrize("step", [None, lambda model, x: model(x).backward()], ids=["plain", "step"])
def test_parameters_that_are_reached_later_are_planned_for_or_said(step: Any) -> None:
    model, x = Branches(), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    first = jettison.auto_checkpoint(model, x, "1GiB", optimizer=optimizer, step=step)
    first.remove()
    assert first.plan is not None
    budget = Bytes(first.plan.predicted.peak_bytes + 65_536)
    handle = jettison.auto_checkpoint(model, x, budget, optimizer=optimizer, step=step)

    def run() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    model.used = 1
    text = "parameters got their first gradients after" if step else "does not fit .* the smallest plan for it needs"
    with pytest.warns(UserWarning, match=text):
        run()
        run()
    with warnings.catch_warnings(action="error"):
        run()
    assert step is not None or (handle.batches is not None and handle.batches.now.peak_bytes > budget)
