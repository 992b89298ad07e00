"""Forwards that somebody put on instances, closed over the modules: copies run their own, and plans hold."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import jettison
from jettison.capture.deep_copies import close_over_copies
from jettison.capture.fake_copies import fake_copy, fake_mode
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Words


def around(module: nn.Module) -> None:
    """A function around its forward, as torchtitan puts one around each module that it parallelizes."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, scale: float = 2.0, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * scale

    module.forward = forward


def through_self(module: Any) -> None:
    module.forward = lambda x: x + module.down(functional_gelu(module.up(x)))


def within(module: nn.Module) -> None:
    """Two functions, one around the other."""
    around(module)
    around(module)


def partly(module: nn.Module) -> None:
    """Around what `functools.partial` holds, as `local_map` of DTensors does."""
    own = functools.partial(called, module.forward, scale=2.0)
    module.forward = lambda x: own(x)


def called(function: Any, x: Tensor, *, scale: float) -> Any:
    return function(x) * scale


functional_gelu = torch.nn.functional.gelu


def model(wrap: Callable[[nn.Module], None]) -> Any:
    torch.manual_seed(0)
    made = Words(100, 32, 6)
    for layer in made.layers:
        wrap(layer)
    return made


@pytest.mark.parametrize("wrap", [around, through_self, within, partly])
def test_a_fake_copy_runs_its_own_modules(wrap: Callable[[nn.Module], None]) -> None:
    original, mode = model(wrap), fake_mode()  # which refuses what is not fake
    copied = fake_copy(original, mode)
    with mode:
        logits = copied(torch.zeros(2, 8, dtype=torch.int64))
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (2, 8, 100)
    assert copied.layers[0].forward is not original.layers[0].forward


def test_a_function_that_closes_over_no_module_stays_the_same() -> None:
    original = nn.Linear(2, 2)
    number = 3

    def scaled(x: Tensor) -> Tensor:
        return x * number + (0 if x.dim() else scaled(x))  # closes over itself, too

    original.scaled = scaled
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(original, memo)
    close_over_copies(original, memo)
    assert copied.scaled is scaled


@pytest.mark.parametrize("wrap", [around, through_self, within, partly])
@pytest.mark.usefixtures("one_thread")
def test_a_plan_holds(wrap: Callable[[nn.Module], None]) -> None:
    ids = torch.randint(0, 100, (16, 64), generator=torch.Generator().manual_seed(1))

    def run(budget: int | None) -> tuple[list[Tensor], int]:
        made = model(wrap)
        if budget is not None:
            jettison.auto_checkpoint(made, ids, Bytes(budget), loss_fn=lambda logits: logits.square().mean())
        made(ids).square().mean().backward()
        gradients = [p.grad.clone() for p in made.parameters()]
        made.zero_grad()
        alive = static_tensors(made, ids)
        return gradients, measured_peak(lambda: made(ids).square().mean().backward(), static_tensors=alive).peak_bytes

    plain, peak = run(None)
    planned, lower = run(int(0.8 * peak))
    assert all(map(torch.equal, planned, plain))
    assert lower <= int(0.8 * peak)
