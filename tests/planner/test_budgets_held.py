"""Budgets that hold where autograd takes another way on real tensors than on fake ones; or are said not to."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import Infeasible, UnsupportedModule
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors

WIDTH = 32


class InPlace(nn.Module):
    """Writes to a view of a product's result, as an activation in place behind a Linear does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.down(torch.tanh(self.up(x))))


class OverChannels(nn.Module):
    """A batch norm of a transposed activation, whose real result is contiguous and whose fake one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(x.transpose(1, 2)).transpose(1, 2)).tanh()


class Remembering(nn.Module):
    """Adds what it returned the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x if self.last is None else x * self.last.exp()))
        self.last = y.detach()
        return x + y


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def smallest(model: nn.Module, x: Tensor) -> int:
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), Bytes(1))
    return refused.value.minimum_budget_bytes


def test_a_refusal_keeps_nothing_of_its_planning() -> None:
    """Whoever plans again inside ``except`` has no trace next to the new one: its tensors would count on a GPU."""
    gc.collect()
    before = {id(o) for o in gc.get_objects() if isinstance(o, ModelTrace)}
    model, x = Stack(InPlace), torch.randn(16, 6, WIDTH)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), Bytes(1))
    gc.collect()
    assert refused.value.__traceback__ is not None
    assert not [o for o in gc.get_objects() if isinstance(o, ModelTrace) and id(o) not in before]


def peak(model: nn.Module, x: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, (x,))).peak_bytes


@pytest.mark.parametrize("block", [InPlace, OverChannels])
@pytest.mark.parametrize("percent", [100, 110])
def test_the_budget_holds(block: type[nn.Module], percent: int) -> None:
    model, x = Stack(block), torch.randn(16, 6, WIDTH)
    budget = smallest(model, x) * percent // 100
    with jettison.auto_checkpoint(model, (x,), Bytes(budget)):
        assert max(peak(model, x) for _ in range(3)) <= budget


def test_other_ops_than_were_planned_are_said_once() -> None:
    model, x = Stack(Remembering), torch.randn(16, WIDTH)
    budget = smallest(model, x)
    with jettison.auto_checkpoint(model, (x,), Bytes(budget)), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).backward()
            model.zero_grad()
    found = [str(w.message) for w in said if "other ops than it was planned with" in str(w.message)]
    assert len(found) == 1 and "the budget may not hold" in found[0]


class Tasks(Stack):
    """One of two heads, named by the call: the same ops, of other sizes."""

    def __init__(self) -> None:
        super().__init__(InPlace)
        self.heads = nn.ModuleDict({"small": nn.Linear(WIDTH, 2), "large": nn.Linear(WIDTH, 64 * WIDTH)})

    def forward(self, x: Tensor, task: str = "small") -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.heads[task](x).tanh()
        return out.square().mean()


def test_the_same_ops_on_larger_weights_are_said() -> None:
    model, x = Tasks(), torch.randn(16, WIDTH)
    with jettison.auto_checkpoint(model, (x,), Bytes(smallest(model, x))), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for task in ("small", "large"):
            assert not said
            model(x, task).backward()
            model.zero_grad()
    assert any("other ops than it was planned with" in str(w.message) for w in said)


@pytest.mark.filterwarnings("ignore:.*jit.script.*")
def test_scripted_parts_are_refused_in_words() -> None:
    model = Stack(lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))
    x = torch.randn(4, WIDTH)
    for call in (
        lambda: jettison.apply(model, "full", batch=(x,)),
        lambda: jettison.trace(model, (x,)),
        lambda: jettison.checkpoint(model.layers[0], x),
    ):
        with pytest.raises(UnsupportedModule, match="is scripted"):
            call()
