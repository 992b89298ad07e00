"""Recurrence: torch's own cells and layers, state spaces, causal convolutions, CTC."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, Stack, by_hand, normal

WIDTH = 32


class Layers(nn.Module):
    """One of torch's recurrent layers between two projections."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.layer, self.outer = nn.Linear(8, WIDTH), layer, nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(torch.tanh(self.inner(x)))
        return F.mse_loss(self.outer(y), x)


class Packed(nn.Module):
    """A bidirectional LSTM over sequences of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, WIDTH, bidirectional=True, batch_first=True), nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(y).logsumexp(-1).mean()


class GRUBlock(nn.Module):
    """A message and a gated update."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.update(torch.relu(self.message(x)), x)


class Unrolled(nn.Module):
    """An LSTM cell, one call a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(8, WIDTH), nn.LSTMCell(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)) for _ in self.cells]
        losses = []
        for now, then in zip(x.unbind(1)[:-1], x.unbind(1)[1:], strict=True):
            h = now
            for n, cell in enumerate(self.cells):
                states[n] = cell(h, states[n])
                h = F.dropout(states[n][0], 0.1, self.training)
            losses.append(F.mse_loss(self.head(h), then))
        return torch.stack(losses).mean()


class DeepSpeech(nn.Module):
    """Convolutions, a bidirectional GRU, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(8, WIDTH, 5, 2, 2),
            nn.BatchNorm1d(WIDTH),
            nn.Hardtanh(0, 20),
            nn.Dropout(0.1),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2),
            nn.BatchNorm1d(WIDTH),
            nn.Hardtanh(0, 20),
        )
        self.layer, self.head = nn.GRU(WIDTH, WIDTH, bidirectional=True), nn.Linear(2 * WIDTH, 12)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        y, _ = self.layer(self.convolutions(x).permute(2, 0, 1))
        steps = torch.full((len(lengths),), len(y), dtype=torch.long)
        return F.ctc_loss(self.head(y).log_softmax(-1), targets, steps, lengths, zero_infinity=True)


class Diagonal(nn.Module):
    """S4D: a diagonal complex state space as a long convolution by FFT."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(WIDTH) - 3)
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states)))
        self.imaginary = nn.Parameter(torch.pi * torch.arange(states).repeat(WIDTH, 1).float())
        self.c = nn.Parameter(torch.randn(WIDTH, states, dtype=torch.cfloat) * 0.5)
        self.skip, self.mix, self.norm = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def kernel(self, length: int) -> Tensor:
        a = torch.complex(-self.log_real.exp(), self.imaginary)
        step_a = a * self.log_step.exp().unsqueeze(-1)
        powers = (step_a.unsqueeze(-1) * torch.arange(length)).exp()
        return 2 * torch.einsum("hn,hnl->hl", self.c * (step_a.exp() - 1) / a, powers).real

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x).transpose(1, 2)
        length = u.shape[-1]
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(self.kernel(length), 2 * length))[
            ..., :length
        ]
        y = F.dropout(F.gelu(y + u * self.skip.unsqueeze(-1)), 0.1, self.training)
        return x + F.glu(self.mix(y.transpose(1, 2)), -1)


class Selective(nn.Module):
    """Mamba's selective scan, step by step."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.states = states
        self.project, self.conv = nn.Linear(WIDTH, 2 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.select, self.step = nn.Linear(WIDTH, 2 * states), nn.Linear(WIDTH, WIDTH)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(WIDTH, 1))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.project(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c = self.select(u).split(self.states, -1)
        delta = F.softplus(self.step(u)).unsqueeze(-1)
        decay = torch.exp(delta * -self.log_a.exp())
        drive = delta * b.unsqueeze(2) * u.unsqueeze(-1)
        state, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


class WaveNet(nn.Module):
    """A gated dilated convolution; returns the residual and the skip."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(a) * torch.sigmoid(b)
        return x + self.residual(y), self.skip(y)


class Skips(nn.Module):
    """Sums what WaveNet blocks skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, WIDTH, 1)
        self.layers = nn.ModuleList(WaveNet(2**n) for n in range(4))
        self.head = nn.Conv1d(WIDTH, 16, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x, total = self.stem(x), torch.zeros(())
        for block in self.layers:
            x, skip = block(x)
            total = total + skip
        return F.cross_entropy(self.head(torch.relu(total)), targets)


class Causal(nn.Module):
    """A temporal convolution with weight normalisation."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=dilation))
        self.drop = nn.Dropout1d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.drop(torch.relu(self.conv(F.pad(x, (self.pad, 0))))))


class Minimal(nn.Module):
    """minGRU: a recurrence without a nonlinearity, by cumulative sums of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k = self.gate(self.norm(x))
        log_keep, log_take = -F.softplus(k), -F.softplus(-k)
        run = log_keep.cumsum(1)
        log_h = run + torch.logcumsumexp(log_take + F.logsigmoid(self.value(x)) - run, 1)
        return x + log_h.exp()


def speech(step: int) -> Batch:
    """Eight bands over time, labels, and how many of them there are."""
    return torch.randn(2, 8, 40), torch.randint(1, 12, (2, 6)), torch.tensor([6, 4])


def packed(step: int) -> Batch:
    """Rows of three lengths."""
    return torch.randn(3, 12, 8), torch.tensor([12, 7, 9 - step])


def wave(step: int) -> Batch:
    """A signal and a class for each sample."""
    return torch.randn(2, 1, 48), torch.randint(16, (2, 48))


TABLE: list[Entry] = [
    by_hand("lstm", lambda: Layers(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1), WIDTH), normal(4, 16, 8)),
    by_hand("gru", lambda: Layers(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1), WIDTH), normal(4, 16, 8)),
    by_hand("rnn", lambda: Layers(nn.RNN(WIDTH, WIDTH, 2, batch_first=True), WIDTH), normal(4, 16, 8)),
    by_hand("lstm-packed-bidirectional", Packed, packed),
    by_hand(
        "gru-cells",
        lambda: Stack(nn.Linear(8, WIDTH), [GRUBlock() for _ in range(4)], nn.Linear(WIDTH, 8)),
        normal(64, 8),
    ),
    by_hand("lstm-cells-unrolled", Unrolled, normal(4, 8, 8)),
    by_hand("deep-speech-ctc", DeepSpeech, speech, watched_bytes=16),  # lengths, which it makes lists of otherwise
    by_hand(
        "s4d", lambda: Stack(nn.Linear(4, WIDTH), [Diagonal() for _ in range(3)], nn.Linear(WIDTH, 4)), normal(2, 32, 4)
    ),
    by_hand(
        "selective-scan",
        lambda: Stack(nn.Linear(4, WIDTH), [Selective() for _ in range(2)], nn.Linear(WIDTH, 4)),
        normal(2, 10, 4),
    ),
    by_hand("wavenet", Skips, wave),
    by_hand(
        "tcn-weight-norm",
        lambda: Stack(nn.Conv1d(4, WIDTH, 1), [Causal(2**n) for n in range(4)], nn.Conv1d(WIDTH, 4, 1)),
        normal(2, 4, 32),
    ),
    by_hand(
        "min-gru",
        lambda: Stack(nn.Linear(4, WIDTH), [Minimal() for _ in range(3)], nn.Linear(WIDTH, 4)),
        normal(2, 24, 4),
    ),
]
