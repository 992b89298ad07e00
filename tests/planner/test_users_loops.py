"""Loops of users' kinds under a budget: bitwise what an independent copy computes, and the peak that was predicted."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner.handle import Applied
from support.users_loops import QUICK, SLOW, UsersLoop

pytestmark = pytest.mark.usefixtures("one_thread")


def made(make: Callable[[], UsersLoop]) -> UsersLoop:
    torch.manual_seed(0)
    return make()


def trained(loop: UsersLoop) -> list[Tensor]:
    torch.manual_seed(3)
    for _ in range(2):
        loop.run()
    return [*(p.detach().clone() for p in loop.parameters()), torch.get_rng_state()]


def peak(loop: UsersLoop) -> int:
    gc.collect()
    static = [*static_tensors(nn.ModuleList(loop.models), loop.batch, None)]
    for optimizer in loop.optimizers:
        static += static_tensors(nn.ModuleList(), (), optimizer)
    static += [p.grad for p in loop.parameters() if p.grad is not None]
    return measured_peak(loop.run, static_tensors=static).peak_bytes


@pytest.mark.parametrize(
    "make", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)], ids=lambda make: make.__name__
)
def test_a_loop_keeps_its_budget_and_its_bits(make: Callable[[], UsersLoop]) -> None:
    plain = made(make)
    expected = trained(plain)
    budget = int(0.8 * peak(plain))
    loop = made(make)

    def planned(budget: Bytes) -> Applied:
        first, optimizers = loop.models[0], loop.optimizers or None
        return jettison.auto_checkpoint(
            first, loop.batch, budget, step=loop.step, optimizer=optimizers, models=loop.models
        )

    with warnings.catch_warnings(action="error"):
        try:
            handle = planned(Bytes(budget))
        except jettison.Infeasible as error:
            handle = planned(error.minimum_budget_bytes)
        got = trained(loop)
        measured = peak(loop)
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert handle.plan is not None
    assert handle.plan.predicted.peak_bytes == pytest.approx(measured, abs=64)
    assert measured <= handle.plan.budget_bytes
