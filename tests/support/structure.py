"""Small models whose structure tests change after planning, and what a step of them gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import jettison
from support.toys import Net

ROWS, WIDTH, BLOCKS = 32, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)).exp())


class Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.sigmoid(self.a(x)).exp().sin())


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def net() -> Any:
    torch.manual_seed(0)
    return Net(Block() for _ in range(BLOCKS))


def planned() -> tuple[Any, Any]:
    model = net()
    return model, jettison.apply(model, "full", batch=(batch(),))


def step(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Loss and gradients, by parameter."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = (model if call is None else call)(batch())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def calls(handle: Any) -> dict[str, int]:
    """So far, by region that the plan still has."""
    return {region.name: region.calls for region in handle.regions if not region.retired}


def said(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the warnings that came with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(w.message) for w in caught]
