"""Views of parameters, tensors without elements, frames that end, and nodes that unpack twice."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.runtime.saved_tensor_hooks import Frame


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def same_steps(layer: type[nn.Module], x: Tensor, policy: str, **options: Any) -> None:
    """Three steps beside a copy without Jettison, bit by bit."""
    torch.manual_seed(0)
    model = Stack(*(layer() for _ in range(3)))
    plain = copy.deepcopy(model)
    jettison.apply(model, policy, batch=(x,), **options)
    for _ in range(3):
        for one in (model, plain):
            one.zero_grad()
            one(x).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


class Conjugate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.linear(x).sin().view(4, 8, 2))
        h = h @ self.weight.conj() + h @ self.weight.mH + h @ torch._neg_view(self.weight)
        return x + torch.view_as_real(h).reshape(4, 16).tanh()


@pytest.mark.parametrize("policy", ["full", "selective-op"])
@pytest.mark.parametrize("check", ["always", "off"])
def test_conjugated_views_of_parameters(policy: str, check: str) -> None:
    same_steps(Conjugate, torch.randn(4, 16), policy, check=check)


class EmptySlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).sin()
        some, none = h.split([x.shape[0], 0])
        return some.cos() + (self.other(none).exp().sin() * 3).exp().sum()


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
@pytest.mark.parametrize("rows", [0, 4])
def test_saved_tensors_without_elements(policy: str, rows: int) -> None:
    same_steps(EmptySlice, torch.randn(rows, 8), policy)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for _ in range(2):  # each reading unpacks
            (saved,) = ctx.saved_tensors
        return grad * saved.mean(), None


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).sin()
        return (h.cos() @ _Straight.apply(self.weight, h).t()).tanh()


@pytest.mark.parametrize("policy", ["full", "selective-op"])
def test_a_function_that_unpacks_twice_behind_a_view_of_a_parameter(policy: str) -> None:
    same_steps(StraightThrough, torch.randn(4, 8), policy)


def test_frames_end_with_a_loss_that_has_no_backward() -> None:
    """A view of a parameter whose node saved an activation keeps no frame alive."""
    model, x = Stack(*(StraightThrough() for _ in range(3))), torch.randn(4, 8)
    jettison.apply(model, "full", batch=(x,))
    model(x).backward()
    gc.collect()
    before = sum(isinstance(one, Frame) for one in gc.get_objects())
    for _ in range(3):
        loss = model(x)
        del loss
    gc.collect()
    assert sum(isinstance(one, Frame) for one in gc.get_objects()) == before
