"""Toy models that many tests share: blocks in a row, and a block to put there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """Blocks in a row; the loss is the mean square of what comes out."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x.square().mean()


class Headed(nn.Module):
    """Blocks between two linear layers; the loss is the mean square of what comes out."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, out: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, out)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return self.head(x).square().mean()


class Words(nn.Module):
    """Tokens in, logits out: the loss is the loop's."""

    def __init__(self, words: int, width: int, blocks: int, rate: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Mlp(width, 4 * width, rate) for _ in range(blocks))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(ids) * scale
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Mlp(nn.Module):
    """Two linear layers beside a residual: enough to drop and to compute again. ``inner`` may be overridden."""

    def __init__(self, width: int, wide: int, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(width, wide), nn.Linear(wide, width), rate

    def inner(self, h: Tensor) -> Tensor:
        h = functional.gelu(h)
        return functional.dropout(h, self.rate) if self.rate else h

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(x)))


class Mlps(nn.Module):
    """Three of them; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(16, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
