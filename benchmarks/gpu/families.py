"""The kit's families: the zoo's kinds of architecture in torch alone, small, each with a batch of its own.

A family is made by a function of a `Size`, whether grouped heads are repeated, and a share of dropout. The same seed
makes the same weights and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.parts import Attention, Bottleneck, Experts, Gated, LatentAttention, Mlp, StateSpace, grouped_mm
from jettison.models.reference import Gpt, GptConfig, Llama, LlamaConfig, mean_loss, rotary_tables

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """L layers, h hidden, a heads, k key-value heads, f FFN width, V vocabulary, s sequence, b micro-batch."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    ffn: int = 1408
    vocab: int = 2048
    sequence: int = 256
    micro_batch: int = 4
    experts: int = 8

    def llama(self) -> LlamaConfig:
        """The same sizes for the model of record."""
        return LlamaConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            ffn=self.ffn,
            vocab=self.vocab,
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a case asks of a family beside its size."""

    repeat: bool = False  # grouped heads spelt out
    dropout: float = 0.0


class Decoder(nn.Module):
    """Tokens, blocks, norm, head, loss. ``block(index)`` makes a block that is called with x and the rotary tables."""

    def __init__(self, size: Size, block: Callable[[int], nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.config = size.llama()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(block(index) for index in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.hidden, eps=1e-6), nn.Linear(size.hidden, size.vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """The mean loss."""
        x_bsh = self.tokens(ids_bs)
        rotary = rotary_tables(ids_bs.shape[1], self.config, x_bsh)
        for layer in self.layers:
            x_bsh = layer(x_bsh, rotary)
        return mean_loss(self.head(self.norm(x_bsh)), labels_bs)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, one after the other or side by side, with or without a window."""

    def __init__(
        self, hidden: int, attention: nn.Module, mlp: nn.Module, *, side_by_side: bool = False, window: int = 0
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.mlp_norm = nn.Identity() if side_by_side else nn.RMSNorm(hidden, eps=1e-6)
        self.attention, self.mlp, self.side_by_side, self.window = attention, mlp, side_by_side, window

    def forward(self, x_bsh: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the block."""
        normed = self.norm(x_bsh)
        if isinstance(self.attention, StateSpace):
            mixed = self.attention(normed)
        elif isinstance(self.attention, LatentAttention):
            mixed = self.attention(normed, rotary)
        elif self.window:
            places = torch.arange(x_bsh.shape[1], device=x_bsh.device)
            behind = places.unsqueeze(1) - places
            mixed = self.attention(normed, rotary=rotary, mask=(behind >= 0) & (behind < self.window))
        else:
            mixed = self.attention(normed, rotary=rotary, causal=True)
        if self.side_by_side:
            return x_bsh + mixed + self.mlp(normed)
        x_bsh = x_bsh + mixed
        return x_bsh + self.mlp(self.mlp_norm(x_bsh))


class GptBlock(nn.Module):
    """Pre-norm, biases, GeLU, dropout in attention and after both halves."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        h = size.hidden
        self.norm, self.mlp_norm, self.dropout = nn.LayerNorm(h), nn.LayerNorm(h), nn.Dropout(dropout)
        self.attention = Attention(h, size.heads, size.heads, dropout=dropout)
        self.mlp = Mlp(h, 4 * h, dropout)

    def forward(self, x_bsh: Tensor, _rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the block."""
        x_bsh = x_bsh + self.dropout(self.attention(self.norm(x_bsh), causal=True))
        return x_bsh + self.mlp(self.mlp_norm(x_bsh))


class EncoderBlock(nn.Module):
    """Post-norm as in BERT, under a mask of which tokens are padding; with a memory, a decoder's of T5 kind."""

    def __init__(self, size: Size, dropout: float, *, cross: bool = False) -> None:
        super().__init__()
        h = size.hidden
        self.attention = Attention(h, size.heads, size.heads, dropout=dropout)
        self.cross = Attention(h, size.heads, size.heads, dropout=dropout) if cross else None
        self.mlp, self.dropout = Mlp(h, 4 * h, dropout), nn.Dropout(dropout)
        self.norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.cross_norm = nn.LayerNorm(h) if cross else nn.Identity()

    def forward(self, x_bsh: Tensor, mask: Tensor, memory_bsh: Tensor | None = None) -> Tensor:
        """The residual stream after the block."""
        x_bsh = self.norm(x_bsh + self.dropout(self.attention(x_bsh, mask=mask)))
        if self.cross is not None:
            x_bsh = self.cross_norm(x_bsh + self.dropout(self.cross(x_bsh, memory_bsh)))
        return self.mlp_norm(x_bsh + self.mlp(x_bsh))


class Bert(nn.Module):
    """An encoder of padded sequences."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.sequence, size.hidden)
        self.layers = nn.ModuleList(EncoderBlock(size, dropout) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocab)

    def forward(self, ids_bs: Tensor, labels_bs: Tensor, is_word_bs: Tensor) -> Tensor:
        """The mean loss over words."""
        x_bsh = self.tokens(ids_bs) + self.places(torch.arange(ids_bs.shape[1], device=ids_bs.device))
        mask_b11s = is_word_bs[:, None, None, :].expand(-1, 1, ids_bs.shape[1], -1)
        for layer in self.layers:
            x_bsh = layer(x_bsh, mask_b11s)
        return mean_loss(self.head(x_bsh), labels_bs)


class Translator(nn.Module):
    """Encoder and decoder with cross-attention and learned biases by distance, as in T5."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.distances = nn.ModuleList(nn.Embedding(2 * size.sequence, size.heads) for _ in range(2))
        self.encoder = nn.ModuleList(EncoderBlock(size, dropout) for _ in range(size.layers))
        self.layers = nn.ModuleList(EncoderBlock(size, dropout, cross=True) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def _bias(self, which: int, s: int, device: torch.device) -> Tensor:
        places = torch.arange(s, device=device)
        table: Tensor = self.distances[which](places.unsqueeze(1) - places + s)
        return table.permute(2, 0, 1).unsqueeze(0).contiguous()

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """The mean loss."""
        s = ids_bs.shape[1]
        memory = self.tokens(ids_bs)
        for layer in self.encoder:
            memory = layer(memory, self._bias(0, s, ids_bs.device))
        future = torch.ones(s, s, dtype=torch.bool, device=ids_bs.device).triu(1)
        bias = self._bias(1, s, ids_bs.device).masked_fill(future, float("-inf"))
        x_bsh = self.tokens(labels_bs)
        for layer in self.layers:
            x_bsh = layer(x_bsh, bias, memory)
        return mean_loss(self.head(x_bsh), labels_bs)


class Pictures(nn.Module):
    """Patches or a stem, blocks of one kind, the mean over places, classes."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], width: int, *, flat: bool) -> None:
        super().__init__()
        self.stem, self.layers, self.head, self.flat = stem, nn.ModuleList(blocks), nn.Linear(width, 10), flat

    def forward(self, pixels: Tensor, classes: Tensor) -> Tensor:
        """The mean loss."""
        x = self.stem(pixels)
        x = x.flatten(2).transpose(1, 2) if self.flat else x
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x.mean(1) if self.flat else x.mean((2, 3))).float(), classes)


class Recurrent(nn.Module):
    """A GRU behind a norm, around a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(hidden), nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, x_bsh: Tensor, _rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the block."""
        out: Tensor = x_bsh + self.cell(self.norm(x_bsh))[0]
        return out


class LowRank(nn.Module):
    """A frozen product and what two narrow ones add to it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The product, adapted."""
        return self.base(x) + self.up(self.down(x))


# families -------------------------------------------------------------------------------------------------------------


def _decoder(size: Size, variant: Variant, **how: Any) -> nn.Module:
    heads, norm_heads, mlp = how.pop("kv_heads", size.kv_heads), how.pop("norm_heads", False), how.pop("mlp", Gated)
    tied = how.pop("tied", False)

    def block(_index: int) -> nn.Module:
        attention = Attention(size.hidden, size.heads, heads, dropout=0.0, norm_heads=norm_heads, repeat=variant.repeat)
        return Block(size.hidden, attention, mlp(size.hidden, size.ffn), **how)

    return Decoder(size, block, tied=tied)


def _experts(size: Size, variant: Variant) -> nn.Module:
    if grouped_mm is None:
        raise NotImplementedError(f"torch {torch.__version__} has no grouped product")
    return _decoder(size, variant, mlp=lambda h, f: Experts(h, f // 2, size.experts, 2))


def _eager(size: Size, variant: Variant) -> nn.Module:
    return Gpt(
        GptConfig(
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
            vocab=size.vocab,
            positions=size.sequence,
            dropout=variant.dropout,
        )
    )


def _latent(size: Size, _variant: Variant) -> nn.Module:
    h = size.hidden
    return Decoder(size, lambda _i: Block(h, LatentAttention(h, size.heads), Gated(h, size.ffn)))


def _state_space(size: Size, _variant: Variant) -> nn.Module:
    h = size.hidden
    return Decoder(size, lambda _i: Block(h, StateSpace(h, size.heads, 32), Gated(h, size.ffn)))


def _adapted(size: Size, variant: Variant) -> nn.Module:
    model = _decoder(size, variant).requires_grad_(False)
    for layer in model.layers:  # type: ignore[union-attr]
        for name in ("query", "value"):
            setattr(layer.attention, name, LowRank(getattr(layer.attention, name), 8))
    return model


def _vision(size: Size, variant: Variant) -> nn.Module:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(
            size.hidden, size.heads, 4 * size.hidden, variant.dropout, batch_first=True, norm_first=True
        )

    stem = nn.Conv2d(3, size.hidden, 8, stride=8)
    return Pictures(stem, [block() for _ in range(size.layers)], size.hidden, flat=True)


def _convolutions(size: Size, _variant: Variant) -> nn.Module:
    width = size.hidden // 8
    stem = nn.Sequential(nn.Conv2d(3, width, 7, stride=4, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return Pictures(stem, [Bottleneck(width) for _ in range(size.layers)], width, flat=False)


FAMILIES: Mapping[str, Callable[[Size, Variant], nn.Module]] = MappingProxyType(
    {
        "llama": lambda size, _variant: Llama(size.llama()),
        "llama-repeated": _decoder,  # the same arithmetic; key heads can be repeated for kernels that want it
        "qwen3": lambda size, variant: _decoder(size, variant, norm_heads=True),
        "falcon": lambda size, variant: _decoder(size, variant, kv_heads=1, side_by_side=True),
        "gemma": lambda size, variant: _decoder(
            size, variant, window=size.sequence // 4, tied=True, mlp=lambda h, f: Gated(h, f, gelu=True)
        ),
        "mixtral": _experts,
        "deepseek": _latent,
        "mamba": _state_space,
        "lora": _adapted,
        "gpt": lambda size, variant: Decoder(size, lambda _i: GptBlock(size, variant.dropout), tied=True),
        "gpt-eager": _eager,
        "gru": lambda size, _variant: Decoder(size, lambda _i: Recurrent(size.hidden)),
        "bert": lambda size, variant: Bert(size, variant.dropout),
        "t5": lambda size, variant: Translator(size, variant.dropout),
        "vit": _vision,
        "resnet": _convolutions,
    }
)


def build(
    family: str, size: Size, device: torch.device, dtype: torch.dtype, variant: Variant, *, seed: int = 0
) -> tuple[nn.Module, Batch]:
    """A model in training mode and its batch: the same bits for the same arguments.

    Raises:
        NotImplementedError: this torch lacks an op that the family is made of.
    """
    torch.manual_seed(seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made in it: a copy in fp32 might not fit
    try:
        with device:
            model = FAMILIES[family](size, variant)
    finally:
        torch.set_default_dtype(usual)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            nn.init.normal_(parameter, std=1 / math.sqrt(size.hidden))
    return model.train(), batch_of(family, size, device, dtype)


def batch_of(family: str, size: Size, device: torch.device, dtype: torch.dtype) -> Batch:
    """What the family is called with, drawn on the CPU."""
    generator = torch.Generator().manual_seed(1)
    if family in ("vit", "resnet"):
        side = 8 * math.isqrt(size.sequence)
        pixels = torch.randn(size.micro_batch, 3, side, side, generator=generator)
        classes = torch.randint(0, 10, (size.micro_batch,), generator=generator)
        return {"pixels": pixels.to(device, dtype), "classes": classes.to(device)}
    ids, labels = (
        torch.randint(0, size.vocab, (size.micro_batch, size.sequence), generator=generator).to(device)
        for _ in range(2)
    )
    batch = {"ids_bs": ids, "labels_bs": labels}
    if family == "bert":
        lengths = torch.arange(size.micro_batch).add(1).mul(size.sequence).div(size.micro_batch, rounding_mode="floor")
        batch["is_word_bs"] = (torch.arange(size.sequence) < lengths.unsqueeze(1)).to(device)
    return batch
