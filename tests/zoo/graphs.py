"""Graphs, points, sets and flows: gathers, scatters, determinants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, Stack, by_hand, normal

NODES, EDGES, WIDTH = 24, 80, 32


def graph(step: int) -> Batch:
    """Nodes, edges as two rows of indices, and a target for each node."""
    return torch.randn(NODES, 8), torch.randint(NODES, (2, EDGES)), torch.randn(NODES, 4)


def sparse_graph(step: int) -> Batch:
    """Another number of edges every step."""
    return torch.randn(NODES, 8), torch.randint(NODES, (2, EDGES - 8 * step)), torch.randn(NODES, 4)


class Network(nn.Module):
    """Blocks that take the nodes and the edges."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(8, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = block(x, edges)
        return F.mse_loss(self.head(x), y)


class Message(nn.Module):
    """Messages along edges, added up where they arrive with index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        m = self.message(torch.cat([x[source], x[target]], -1))
        return self.norm(x + torch.zeros_like(x).index_add_(0, target, m))


class GAT(nn.Module):
    """Attention over neighbours: a softmax by scatter_reduce and scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        e = F.leaky_relu(self.score(torch.cat([x[source], x[target]], -1)).squeeze(-1), 0.2)
        highest = torch.full((len(x),), -1e9).scatter_reduce(0, target, e.detach(), "amax")
        a = (e - highest[target]).exp()
        a = a / (torch.zeros(len(x)).scatter_add(0, target, a)[target] + 1e-6)
        a = F.dropout(a, 0.1, self.training)
        return x + F.elu(torch.zeros_like(x).index_add(0, target, a.unsqueeze(-1) * self.value(x)[source]))


class Convolved(nn.Module):
    """GCN: a product with a sparse matrix, normalised by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.bincount(edges[1], minlength=len(x)).clamp_min(1).rsqrt()
        weights = (degree[edges[0]] * degree[edges[1]]).unsqueeze(-1)
        gathered = torch.zeros_like(x).index_put((edges[1],), weights * self.linear(x)[edges[0]], accumulate=True)
        return x + torch.relu(self.norm(gathered))


class Equivariant(nn.Module):
    """EGNN over all pairs: features and positions, handed on as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * 16 + 1, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.node, self.weight = nn.Linear(2 * 16, 16), nn.Linear(16, 1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, x = pair
        n = len(h)
        apart = x[:, None] - x[None]
        m = self.edge(
            torch.cat([h[:, None].expand(n, n, -1), h[None].expand(n, n, -1), apart.square().sum(-1, True)], -1)
        )
        x = x + (apart * torch.tanh(self.weight(m))).mean(1)
        return h + self.node(torch.cat([h, m.sum(1)], -1)), x


class Molecule(nn.Module):
    """The norm of forces on atoms of eight kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(8, 16), nn.ModuleList(Equivariant() for _ in range(3))

    def forward(self, kinds: Tensor, x: Tensor) -> Tensor:
        pair = self.embed(kinds), x
        for layer in self.layers:
            pair = layer(pair)
        return pair[0].square().mean() + (pair[1] - x).square().mean()


class PointNet(nn.Module):
    """A learnt rotation, shared convolutions, a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, 9)
        self.first, self.second = nn.Conv1d(3, WIDTH, 1), nn.Conv1d(3, WIDTH, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        matrix = self.turn(self.first(x).amax(-1)).view(-1, 3, 3) + torch.eye(3)
        h = self.second(matrix @ x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h.max(-1).values), y)


class Induced(nn.Module):
    """A set transformer's block: attention through a few learnt points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.up = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.down = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        few = self.up(self.points.expand(len(x), -1, -1), x, x)[0]
        x = self.norm(x + self.down(x, few, few)[0])
        return x + torch.relu(self.mlp(x))


class Coupling(nn.Module):
    """RealNVP: half of the input scales and shifts the other half; the log-determinant is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], -1), logdet + scale.sum(-1)


class Glow(nn.Module):
    """An activation norm that is set by the first batch, an invertible product, a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.coupling = Coupling()

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        x = (x + self.shift) * self.log_scale.exp()
        logdet = logdet + self.log_scale.sum() + torch.linalg.slogdet(self.weight).logabsdet
        return self.coupling(x @ self.weight, logdet)


class Spline(nn.Module):
    """A neural spline flow: linear pieces found by searchsorted and gathered."""

    def __init__(self, bins: int = 4) -> None:
        super().__init__()
        self.bins = bins
        self.net = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4 * bins))

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.sigmoid().chunk(2, -1)
        heights = self.net(a).view(*a.shape, self.bins).softmax(-1)
        edges = torch.linspace(0, 1, self.bins + 1)
        index = (torch.searchsorted(edges, b.detach().contiguous()) - 1).clamp(0, self.bins - 1).unsqueeze(-1)
        height = heights.gather(-1, index).squeeze(-1)
        below = (heights.cumsum(-1) - heights).gather(-1, index).squeeze(-1)
        y = below + (b - edges[index.squeeze(-1)]) * self.bins * height
        return torch.cat([torch.logit(y.clamp(1e-4, 1 - 1e-4)), x[..., :4]], -1), logdet + (
            self.bins * height
        ).log().sum(-1)


class Flow(nn.Module):
    """Minus the logarithm of the density."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            x, logdet = layer(x, logdet)
        return (x.square().sum(-1) / 2 - logdet).mean()


TABLE: list[Entry] = [
    by_hand("gnn-index-add", lambda: Network([Message() for _ in range(3)]), graph),
    by_hand("gat-scatter-softmax", lambda: Network([GAT() for _ in range(3)]), sparse_graph),
    by_hand("gcn-index-put", lambda: Network([Convolved() for _ in range(3)]), graph),
    by_hand("egnn", Molecule, lambda step: (torch.randint(8, (10,)), torch.randn(10, 3))),
    by_hand("point-net", PointNet, lambda step: (torch.randn(3, 3, 24), torch.randint(5, (3,)))),
    by_hand(
        "set-transformer",
        lambda: Stack(nn.Linear(4, WIDTH), [Induced() for _ in range(3)], nn.Linear(WIDTH, 4)),
        normal(2, 16, 4),
    ),
    by_hand("real-nvp", lambda: Flow([Coupling() for _ in range(4)]), normal(64, 8)),
    by_hand("glow", lambda: Flow([Glow() for _ in range(3)]), normal(64, 8)),
    by_hand("neural-spline-flow", lambda: Flow([Spline() for _ in range(3)]), normal(64, 8)),
]
