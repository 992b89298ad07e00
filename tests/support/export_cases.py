"""Models and plans that are exported, and what a real step of one holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.capture.model_trace import as_call
from jettison.export.policy import LayerPolicy
from jettison.export.result import Exported
from jettison.export.subject import Subject
from jettison.export.targets import torch_remat
from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import static_tensors

WIDTH, TOKENS, DEPTH = 32, 24, 4


class Block(nn.Module):
    """Attention and a gated feed-forward, with dropout: one of each kind of tensor."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + functional.dropout(self.out(scores @ v), self.rate, self.training)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    """Blocks under ``layers``; the loss is the mean square of what comes out."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(rate) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(rate: float = 0.0) -> tuple[nn.Module, Any]:
    """A factory for `jettison plan`."""
    torch.manual_seed(0)
    return Stack(rate), (torch.randn(4, TOKENS, WIDTH),)


def noisy() -> tuple[nn.Module, Any]:
    """The same with dropout."""
    return stack(0.1)


def applied(found: Exported, model: nn.Module) -> nn.Module:
    """A model after the exported file was used as it says."""
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(compile(next(iter(found.files.values())), "exported.py", "exec"), defined)
    changed: nn.Module = defined["apply"](model)
    return changed


def held_bytes(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] = lambda output: output
) -> tuple[int, Any]:
    """Alive between a real forward and its backward, and not before; the loss."""
    args, kwargs = as_call(batch)
    with AllocationCounter(static_tensors(model, batch)) as counter:
        before = counter.live_bytes
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        return counter.live_bytes - before, loss


def remat_applied(subject: Subject, policies: Sequence[LayerPolicy], model: nn.Module) -> nn.Module:
    """A model after torch_remat's file for these policies was used."""
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(torch_remat.code(subject, policies), defined)
    changed: nn.Module = defined["apply"](model)
    return changed


def many_rows() -> tuple[nn.Module, Any]:
    """A batch beside which the gradients of parameters are small."""
    torch.manual_seed(0)
    return Stack(0.0), (torch.randn(64, TOKENS, WIDTH),)
