"""Transformers and others by hand that do what libraries seldom do: side stores, dataclasses, generators, masks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Entry, Stack, by_hand, normal

WIDTH = 32


def mlp(width: int = WIDTH) -> nn.Module:
    """Up, GELU, dropout, down."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
    )


def stack(block: type[nn.Module], blocks: int = 3) -> nn.Module:
    """Blocks of one class between two projections."""
    return Stack(nn.Linear(8, WIDTH), [block() for _ in range(blocks)], nn.Linear(WIDTH, 8))


class ValueResidual(nn.Module):
    """Attention whose values are mixed with the first block's, out of a store that all blocks share."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.store, self.qkv, self.out = [store], nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,))).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        v = torch.lerp(v, self.store[0].setdefault("values", v), self.mix)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class WithStore(nn.Module):
    """Empties the store before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Tensor] = {}
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(ValueResidual(self.store) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.store.clear()
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        self.store.clear()
        return F.mse_loss(self.head(h), x)


@dataclass
class State:
    """What blocks hand on."""

    hidden: Tensor
    penalty: Tensor


class Structured(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        gate = torch.sigmoid(self.gate(state.hidden))
        return State(hidden=state.hidden + gate * self.body(state.hidden), penalty=state.penalty + gate.mean())


class Structures(nn.Module):
    """Blocks of dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(8, WIDTH), nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = State(hidden=self.stem(x), penalty=torch.zeros(()))
        for layer in self.layers:
            state = layer(state)
        return state.hidden.square().mean() + 0.01 * state.penalty


class Lazy(nn.Module):
    """Yields its outputs one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for part in self.parts:
            x = x + part(x)
            yield x


class Generators(nn.Module):
    """Blocks of generators."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(8, WIDTH), nn.ModuleList(Lazy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, losses = self.stem(x), []
        for layer in self.layers:
            for y in layer(h):
                losses.append(y.square().mean())
            h = y
        return torch.stack(losses).sum()


class Complex(nn.Module):
    """A block of complex numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(2))

    def forward(self, z: Tensor) -> Tensor:
        h = self.a(z)
        h = torch.polar(torch.relu(h.abs() - 0.1), h.angle())
        return z + self.b(h).conj() * z.conj()


class AllComplex(nn.Module):
    """Complex input, complex weights; the loss is what is left of the phase."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH, dtype=torch.cfloat)
        self.layers = nn.ModuleList(Complex() for _ in range(3))

    def forward(self, z: Tensor) -> Tensor:
        z = self.stem(z) * 0.3
        for layer in self.layers:
            z = layer(z) * 0.5
        return torch.view_as_real(z).square().mean()


class Chosen(nn.Module):
    """Works on the rows that a mask chooses: as many as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.body = nn.Linear(WIDTH, 1), mlp()

    def forward(self, x: Tensor) -> Tensor:
        mask = self.score(x).squeeze(-1) > 0
        y = x.clone()
        y[mask] = x[mask] + self.body(x[mask])
        return y


class Experts(nn.Module):
    """Top-1 experts by index: nonzero, gather, index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, index = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            rows = torch.nonzero(index == n).squeeze(-1)
            out = out.index_add(0, rows, weight[rows].unsqueeze(-1) * expert(flat[rows]))
        return x + out.view_as(x)


class Noisy(nn.Module):
    """A linear layer with factorised noise in its weights (NoisyNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sigma = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (n.sign() * n.abs().sqrt() for n in (torch.randn(WIDTH), torch.randn(WIDTH)))
        return x + torch.relu(F.linear(x, self.mean.weight + self.sigma * torch.outer(a, b), self.mean.bias))


class PythonDepth(nn.Module):
    """Stochastic depth by Python's and numpy's random streams."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.7:
            x = x + self.body(x)
        if numpy.random.rand() < 0.7:
            x = x + self.more(x)
        return x


class Reversible(torch.autograd.Function):
    """x + f(x) for f = tanh, with a backward of its own."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return x + y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (2 - y * y)


class Custom(nn.Module):
    """A custom autograd function among ordinary ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(Reversible.apply(self.a(x)))


class Gumbel(nn.Module):
    """A discrete code drawn with Gumbel noise, hard with a soft gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.codes = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.codes(F.gumbel_softmax(self.logits(x), tau=0.7, hard=True))


SEQUENCES = normal(2, 12, 8)

TABLE: list[Entry] = [
    by_hand("value-residual", WithStore, SEQUENCES),
    by_hand("dataclass-blocks", Structures, SEQUENCES),
    by_hand("generator-blocks", Generators, SEQUENCES),
    by_hand("all-complex", AllComplex, lambda step: (torch.randn(16, 8, dtype=torch.cfloat),)),
    by_hand("mask-gather", lambda: stack(Chosen), SEQUENCES, values_decide=True),
    by_hand("experts-by-index", lambda: stack(Experts), SEQUENCES, values_decide=True),
    by_hand("noisy-linear", lambda: stack(Noisy), SEQUENCES),
    by_hand("stochastic-depth-python", lambda: stack(PythonDepth, 4), SEQUENCES, by_chance=True),
    by_hand("custom-function", lambda: stack(Custom), SEQUENCES),
    by_hand("gumbel-codes", lambda: stack(Gumbel), SEQUENCES),
]
