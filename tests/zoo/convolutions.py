"""Images by hand: norms with buffers, dense and skip connections, diffusion, quantisers, operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, Stack, by_hand, normal

WIDTH = 16


def labelled(step: int) -> Batch:
    """Images and classes."""
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


class Classifier(nn.Module):
    """Blocks, a mean over the image, cross entropy."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, WIDTH, 3, padding=1), nn.ModuleList(blocks)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def vgg() -> nn.Module:
    """Convolution, batch norm, activation in place, pooling, dropout."""
    return nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
    )


class Dense(nn.Module):
    """DenseNet: the input is concatenated to what is made of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.dropout(self.conv(torch.relu(self.norm(x))), 0.1, self.training)], 1)


class Squeeze(nn.Module):
    """An inverted residual with squeeze and excitation and drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(WIDTH, 2 * WIDTH, 1),
            nn.BatchNorm2d(2 * WIDTH),
            nn.SiLU(inplace=True),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1, groups=2 * WIDTH),
            nn.BatchNorm2d(2 * WIDTH),
            nn.SiLU(inplace=True),
        )
        self.squeeze, self.excite = nn.Linear(2 * WIDTH, 4), nn.Linear(4, 2 * WIDTH)
        self.out = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3))))))
        y = self.out(y * scale[:, :, None, None])
        keep = torch.rand(len(x), 1, 1, 1) < 0.8
        return x + y * keep / 0.8


class Grouped(nn.Module):
    """A diffusion U-Net's residual block: group norm, SiLU, a time embedding, dropout."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(WIDTH, outer)
        self.norm2, self.conv2 = nn.GroupNorm(4, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))


class Attention(nn.Module):
    """Attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.flatten(2).transpose(1, 2).unsqueeze(1) for p in self.qkv(self.norm(x)).chunk(3, 1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.squeeze(1).transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Predicts the noise at a random time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.ModuleList([Grouped(WIDTH, WIDTH), Grouped(WIDTH, 2 * WIDTH)])
        self.middle, self.attention = Grouped(2 * WIDTH, 2 * WIDTH), Attention(2 * WIDTH)
        self.up = nn.ModuleList([Grouped(4 * WIDTH, WIDTH), Grouped(2 * WIDTH, WIDTH)])
        self.head = nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 50))

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.randint(50, (len(x),)), torch.randn_like(x)
        alpha = self.alphas[t][:, None, None, None]
        angles = t[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 4.0)
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        h, skips = self.stem(alpha.sqrt() * x + (1 - alpha).sqrt() * noise), []
        for block in self.down:
            h = block(h, emb)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.attention(self.middle(h, emb))
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = block(torch.cat([h, skips.pop()], 1), emb)
        return F.mse_loss(self.head(h), noise)


class DiT(nn.Module):
    """A transformer block whose norms a condition modulates."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU("tanh"), nn.Linear(64, width))
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulate(F.silu(c)).unsqueeze(1).chunk(6, -1)
        h = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Flowing(nn.Module):
    """Flow matching with DiT blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.time = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(1, 32)
        self.layers = nn.ModuleList(DiT() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.rand(len(x), 1)
        h, c = self.stem(torch.lerp(noise, x, t.unsqueeze(-1))), self.time(t)
        for block in self.layers:
            h = block(h, c)
        return F.mse_loss(self.head(h), x - noise)


class VAE(nn.Module):
    """Strided convolutions to a normal distribution and transposed ones back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, WIDTH, 4, 2, 1), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1)
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.encode(x).chunk(2, 1)
        z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).mean()
        return F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid()) + 0.1 * kl


class Quantiser(nn.Module):
    """A residual vector quantiser whose codes follow a moving average in buffers."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        index = torch.cdist(h, self.codes).argmin(-1)
        chosen = F.one_hot(index, len(self.codes)).to(h.dtype)
        quantised = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ h, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(-1).clamp_min(1e-3))
        return x + h + (quantised - h).detach() + 0.1 * (h - quantised.detach()).square()


class Finite(nn.Module):
    """Finite scalar quantisation: rounding with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = 3.5 * torch.tanh(self.down(x))
        return x + self.up(z + (z.round() - z).detach())


class Spectral(nn.Module):
    """A Fourier neural operator's layer: a complex product over low frequencies."""

    def __init__(self, modes: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, modes, modes, dtype=torch.cfloat) / WIDTH)
        self.local = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        m, f = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(f)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


class Masked(nn.Conv2d):
    """PixelCNN: a convolution that sees nothing to the right and below."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 3, padding=1)
        mask = torch.ones(3, 3)
        mask[1, 2:] = mask[2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.elu(F.conv2d(x, self.weight * self.mask, self.bias, padding=1))


class Discriminator(nn.Module):
    """Spectrally normalised convolutions: each forward moves the vectors of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 3, padding=1)) for a, b in sizes
        )
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        scores = []
        for x in (real, made):
            for layer in self.layers:
                x = F.leaky_relu(layer(x), 0.2)
            scores.append(self.head(x.mean((2, 3))))
        return torch.relu(1 - scores[0]).mean() + torch.relu(1 + scores[1]).mean()


class Mixer(nn.Module):
    """MLP-Mixer: over the tokens, then over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.over_tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.over_channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


TABLE: list[Entry] = [
    by_hand("vgg-batch-norm", lambda: Classifier([vgg() for _ in range(3)], WIDTH), labelled),
    by_hand("dense-net", lambda: Classifier([Dense(WIDTH + 8 * n) for n in range(3)], WIDTH + 24), labelled),
    by_hand("efficient-net", lambda: Classifier([Squeeze() for _ in range(3)], WIDTH), labelled),
    by_hand("diffusion-unet", UNet, normal(2, 3, 16, 16)),
    by_hand("dit-flow-matching", Flowing, normal(2, 12, 8)),
    by_hand("vae", VAE, normal(2, 3, 16, 16)),
    by_hand("vq-ema", lambda: Stack(nn.Linear(6, 8), [Quantiser() for _ in range(3)], nn.Linear(8, 6)), normal(32, 6)),
    by_hand("fsq", lambda: Stack(nn.Linear(6, 8), [Finite() for _ in range(3)], nn.Linear(8, 6)), normal(32, 6)),
    by_hand(
        "fourier-operator",
        lambda: Stack(nn.Conv2d(2, WIDTH, 1), [Spectral() for _ in range(3)], nn.Conv2d(WIDTH, 2, 1)),
        normal(2, 2, 12, 12),
    ),
    by_hand(
        "pixel-cnn",
        lambda: Stack(nn.Conv2d(1, WIDTH, 1), [Masked() for _ in range(3)], nn.Conv2d(WIDTH, 4, 1)),
        normal(2, 1, 12, 12),
    ),
    by_hand("gan-spectral-norm", Discriminator, lambda step: (torch.randn(2, 3, 12, 12), torch.randn(2, 3, 12, 12))),
    by_hand(
        "mlp-mixer", lambda: Stack(nn.Linear(8, 32), [Mixer() for _ in range(3)], nn.Linear(32, 8)), normal(2, 16, 8)
    ),
]
