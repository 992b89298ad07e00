"""Transformers and smaller networks by hand: torch's own layers, recommenders, routing, fields, contrasts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, by_hand, normal
from zoo.oddities import SEQUENCES, WIDTH, mlp, stack


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
            self.embed(source),
            self.embed(inner),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
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


TABLE: list[Entry] = [
    by_hand("torch-transformer", Translator, translation),
    by_hand("torch-encoder", Encoder, lambda step: (translation(step)[0], torch.randint(4, (2,)))),
    by_hand("dlrm", Recommender, clicks),
    by_hand("capsules", lambda: stack(Capsules), SEQUENCES),
    by_hand("hypernetwork", lambda: stack(Hyper), SEQUENCES),
    by_hand("neural-ode", ODE, normal(32, 8)),
    by_hand("universal-transformer", Universal, SEQUENCES),
    by_hand("kan", lambda: stack(Kolmogorov), normal(24, 8)),
    by_hand("rotary-complex-views", lambda: stack(Rotary), SEQUENCES),
    by_hand("nerf", NeRF, rays),
    by_hand("sim-clr", Contrastive, normal(12, 8)),
]
