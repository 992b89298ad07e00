"""Transformers and others by hand that do what libraries seldom do: side stores, dataclasses, generators, masks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, Stack, by_hand, normal

WIDTH = 32


def mlp(width: int = WIDTH) -> nn.Module:
    """Up, GELU, dropout, down."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
    )


def stack(block: type[nn.Module], blocks: int = 3) -> nn.Module:
    """Blocks of one class between two projections."""
    return Stack(nn.Linear(8, WIDTH), [block() for _ in range(blocks)], nn.Linear(WIDTH, 8))


class Translator(nn.Module):
    """torch's own transformer, with a causal mask and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        inner = target[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(inner.shape[1])
        h = self.transformer(
            self.embed(source), self.embed(inner), tgt_mask=mask, tgt_is_causal=True,
            src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0,
        )  # fmt: skip
        return F.cross_entropy(self.head(h).flatten(0, 1), target[:, 1:].flatten())


class Encoder(nn.Module):
    """torch's own encoder, norms first, over a padded batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 4)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(h[:, 0]), labels)


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


class Recommender(nn.Module):
    """DLRM: bags of embeddings, pairwise products, a click or none."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 16, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(8, 16), nn.Sequential(nn.Linear(22, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        vectors = [torch.relu(self.bottom(dense)), *(bag(ids[:, n]) for n, bag in enumerate(self.bags))]
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        products = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([vectors[0], products], -1)).squeeze(-1), clicks)


class Capsules(nn.Module):
    """Dynamic routing between capsules: three rounds of agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        u = x.unflatten(-1, (4, 8))
        votes = torch.einsum("bsid,ijde->bsije", u, self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            s = (logits.softmax(-1).unsqueeze(-1) * votes).sum(2)
            norm = s.square().sum(-1, keepdim=True)
            v = s * norm.sqrt() / (1 + norm)
            logits = logits + (votes * v.unsqueeze(2)).sum(-1)
        return x + v.flatten(2)


class Hyper(nn.Module):
    """A hypernetwork: each row makes its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.norm = nn.Linear(WIDTH, 2 * WIDTH * 4), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.make(x.mean(1)).view(len(x), 2, 4, WIDTH).unbind(1)
        return x + torch.bmm(torch.tanh(torch.bmm(self.norm(x), down.transpose(1, 2))), up) * 0.1


class ODE(nn.Module):
    """Runge and Kutta's fourth-order steps of one field."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.stem = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
            nn.Linear(8, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y, step = self.stem(x), 0.25
        for _ in range(4):
            k1 = self.field(y)
            k2 = self.field(y + step / 2 * k1)
            k3 = self.field(y + step / 2 * k2)
            k4 = self.field(y + step * k3)
            y = y + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y.square().mean()


class Universal(nn.Module):
    """A universal transformer: one block, four times, with a step embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.steps = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for step in self.steps:
            h = self.layer(h + step)
        return h.square().mean() + h.mean()


class Kolmogorov(nn.Module):
    """KAN: sums of radial functions on every edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 5))
        self.weight, self.base = nn.Parameter(torch.randn(WIDTH, WIDTH, 5) * 0.05), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-(x.unsqueeze(-1) - self.centres).square())
        return x + self.base(F.silu(x)) + torch.einsum("...ik,oik->...o", basis, self.weight)


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


class Rotary(nn.Module):
    """Attention with rotary embeddings through complex views, eager, with dropout on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.body = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mlp()

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]), 1.0 / 10 ** torch.arange(4))
        z = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = self.turn(q) @ self.turn(k).transpose(-1, -2) / 8**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        a = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), 0.1, self.training)
        x = x + self.out((a @ v).transpose(1, 2).flatten(2))
        return x + self.body(x)


class Gumbel(nn.Module):
    """A discrete code drawn with Gumbel noise, hard with a soft gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.codes = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.codes(F.gumbel_softmax(self.logits(x), tau=0.7, hard=True))


class NeRF(nn.Module):
    """Rays sampled at random depths, positions as waves, densities multiplied up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(24, WIDTH), nn.ModuleList(mlp() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        depths = (torch.arange(8) + torch.rand(len(origins), 8)) / 8
        points = origins[:, None] + depths[..., None] * directions[:, None]
        waves = (points[..., None] * 2.0 ** torch.arange(4)).flatten(-2)
        h = self.stem(torch.cat([waves.sin(), waves.cos()], -1))
        for layer in self.layers:
            h = h + layer(h)
        alpha = 1 - torch.exp(-F.softplus(self.head(h)[..., 3]) / 8)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return F.mse_loss(((alpha * through)[..., None] * self.head(h)[..., :3].sigmoid()).sum(1), colours)


class Contrastive(nn.Module):
    """Two views made by dropout and noise, NT-Xent between them (SimCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), mlp())

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(torch.cat([self.encoder(x + 0.1 * torch.randn_like(x)) for _ in range(2)]), dim=-1)
        scores = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


def translation(step: int) -> Batch:
    """Source (padded) and target tokens."""
    source = torch.randint(1, 48, (2, 12))
    source[1, -3:] = 0
    return source, torch.randint(1, 48, (2, 10))


def clicks(step: int) -> Batch:
    """Numbers, three bags of four ids, and clicks."""
    return torch.randn(16, 8), torch.randint(20, (16, 3, 4)), torch.randint(2, (16,)).float()


def rays(step: int) -> Batch:
    """Origins, directions and colours."""
    return torch.randn(12, 3), F.normalize(torch.randn(12, 3), dim=-1), torch.rand(12, 3)


SEQUENCES = normal(2, 12, 8)

TABLE: list[Entry] = [
    by_hand("torch-transformer", Translator, translation),
    by_hand("torch-encoder", Encoder, lambda step: (translation(step)[0], torch.randint(4, (2,)))),
    by_hand("value-residual", WithStore, SEQUENCES, fast=True),
    by_hand("dataclass-blocks", Structures, SEQUENCES),
    by_hand("generator-blocks", Generators, SEQUENCES),
    by_hand("all-complex", AllComplex, lambda step: (torch.randn(16, 8, dtype=torch.cfloat),)),
    by_hand("mask-gather", lambda: stack(Chosen), SEQUENCES),
    by_hand("experts-by-index", lambda: stack(Experts), SEQUENCES),
    by_hand("noisy-linear", lambda: stack(Noisy), SEQUENCES),
    by_hand("stochastic-depth-python", lambda: stack(PythonDepth, 4), SEQUENCES),
    by_hand("dlrm", Recommender, clicks),
    by_hand("capsules", lambda: stack(Capsules), SEQUENCES),
    by_hand("hypernetwork", lambda: stack(Hyper), SEQUENCES),
    by_hand("neural-ode", ODE, normal(32, 8)),
    by_hand("universal-transformer", Universal, SEQUENCES),
    by_hand("kan", lambda: stack(Kolmogorov), normal(24, 8)),
    by_hand("custom-function", lambda: stack(Custom), SEQUENCES),
    by_hand("rotary-complex-views", lambda: stack(Rotary), SEQUENCES),
    by_hand("gumbel-codes", lambda: stack(Gumbel), SEQUENCES),
    by_hand("nerf", NeRF, rays),
    by_hand("sim-clr", Contrastive, normal(12, 8)),
]
