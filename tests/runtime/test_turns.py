"""Graphs are looked at in turn: what a path that changes in between does to the steps after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.planner import Applied
from jettison.runtime.graph_fingerprint import GRAPH_AFTER, GRAPH_SHARE, is_turn
from jettison.verify.differences import compare_gradients, independent_copy
from support.toys import Headed

N, LAYERS = 8, 3


class Bent(nn.Module):
    """One of two activations, by a byte of memory that nobody guards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(N, N), nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + BENDS[BENT[0]](self.up(x)).sigmoid()


BENDS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, lambda h: h.tanh() * 1.0, torch.sin)
BENT = bytearray(1)


def assert_same_step(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        one(x).backward()
    assert compare_gradients(model, plain).identical


def recordings(handle: Applied) -> int:
    return sum(report.recordings for report in handle.report())


@pytest.mark.parametrize(("bend", "stopped"), [(1, 0), (2, 1)], ids=["same values", "other values"])
def test_a_path_that_changes_late_ends_a_step_at_the_most(bend: int, stopped: int) -> None:
    """Graphs are looked at in turn: in between, what was dropped is told by its values, and what is equal is right."""
    torch.manual_seed(0)
    model, x = Headed((Bent() for _ in range(LAYERS)), N, N), torch.randn(4, N)
    plain = independent_copy(model)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        for _ in range(GRAPH_AFTER + 2):
            assert_same_step(model, plain, x)
        assert not any(is_turn(GRAPH_AFTER + 3, region.turn) for region in handle.regions if region.name)
        before = recordings(handle)
        BENT[0] = bend
        told = 0
        try:
            for _ in range(GRAPH_SHARE + 1):
                try:
                    assert_same_step(model, plain, x)
                except jettison.WrongValue as error:
                    assert "has a new recording" in str(error)
                    told += 1
        finally:
            BENT[0] = 0
        assert told == stopped
        assert recordings(handle) >= before + LAYERS
