"""Reference models: small and readable, without code for parallelism.

`Gpt` is the transformer of arXiv 2205.05198, Figures 2 and 3: pre-norm, learned positions, dropout, scores and
probabilities as tensors, a GeLU block of 4h, activations s × b × h as in Megatron. In 16-bit one of its layers holds
sbh(34 + 5as/h) bytes for backward, and the statistics of two norms. `Llama` is the other common form (arXiv
2302.13971, grouped heads of 2305.13245): RMSNorm, rotary positions, SwiGLU, fused attention, b × s × h.

s sequence · b micro-batch · h hidden · a heads · k key-value heads · d head dim · f feed-forward width · V vocabulary.
Both infer the number of heads from their tensors, so that a rank may have some of them. They also take some tokens of a
sequence with their positions, if `core` reads the keys of the other ranks. With document numbers (`document_numbers`),
attention stays within the documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.core.errors import UsageError
from jettison.core.files import read_table

Part = tuple[Tensor, int]
"""Positions of a rank's n tokens, and the length s of their sequence. Documents cover all of it, b × s."""


class Reference(nn.Module):
    """A language model.

    ``seq_first``: activations are s × b × h; ``embedded``: function of ids that returns the first layer's input;
    ``layer_inputs``: function that returns each layer's arguments, except its hidden states.
    """

    seq_first: bool
    config: Any
    layers: nn.ModuleList
    embedded: Callable[..., Tensor]
    layer_inputs: Callable[..., tuple[Any, ...]]

    def forward(
        self,
        ids_bs: Tensor,
        labels_bs: Tensor | None = None,
        documents_bs: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """Logits; or the mean loss, if labels (the next token of every position) are given."""
        x = self.embedded(ids_bs, documents_bs, part)
        inputs = self.layer_inputs(ids_bs.shape[1], x, documents_bs, part)
        for layer in self.layers:
            x = layer(x, *inputs)
        logits = self.head(self.norm(x))
        return logits if labels_bs is None else self.loss(logits, labels_bs)

    def loss(self, logits: Tensor, labels_bs: Tensor) -> Tensor:
        """Mean loss of all tokens."""
        return mean_loss(logits, labels_bs.t() if self.seq_first else labels_bs)


@dataclass(frozen=True, kw_only=True, slots=True)
class GptConfig:
    """Sizes of a `Gpt`. Raise `UsageError` if the heads do not divide h."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UsageError(f"got {self.heads} heads of a hidden size of {self.hidden}; expected heads that divide it")

    @property
    def head_dim(self) -> int:
        """d."""
        return self.hidden // self.heads


class Dropout(nn.Module):
    """Dropout whose mask takes one byte an element on every device."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share of x and scale the rest, in training mode."""
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p else x


class GptAttention(nn.Module):
    """q, k and v of a head are neighbours in ``qkv``'s outputs, so that a run of outputs is a run of whole heads."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.dropout = Dropout(config.dropout)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.core: Callable[..., Tensor] = written_out

    def forward(self, x_sbh: Tensor, mask: Tensor) -> Tensor:
        """Return the addition to the residual stream, before dropout; the mask is s × s, or b × 1 × s × s."""
        s, b, _ = x_sbh.shape
        d = self.head_dim
        heads = self.qkv(x_sbh).view(s, b, -1, 3 * d)
        q, k, v = (part.view(s, -1, d).transpose(0, 1) for part in heads.chunk(3, dim=-1))
        if mask.dim() == 4:
            mask = mask.expand(-1, q.shape[0] // b, -1, -1).flatten(0, 1)  # once for each head
        return self.out(self.core(q, k, v, mask, self.dropout).transpose(0, 1).reshape(s, b, -1))


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention's core with scores and probabilities as tensors; all are (b a) × s × d."""
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)  # keeps q and k, not the mask
    return torch.bmm(dropout(scores.softmax(dim=-1)), v)


class GptMlp(nn.Module):
    """Up to 4h, GeLU, down again."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Return the addition to the residual stream, before dropout."""
        return self.down(functional.gelu(self.up(x_sbh)))


class GptLayer(nn.Module):
    """Attention and feed-forward, each after a norm, each with dropout before it is added."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = GptAttention(config)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = GptMlp(config)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x_sbh: Tensor, mask: Tensor) -> Tensor:
        x_sbh = x_sbh + self.attention_dropout(self.attention(self.attention_norm(x_sbh), mask))
        return x_sbh + self.mlp_dropout(self.mlp(self.mlp_norm(x_sbh)))


class Gpt(Reference):
    """The head's weight is the token embedding's; activations are s × b × h."""

    seq_first = True

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(GptLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        _initialise(self)
        self.head.weight = self.tokens.weight

    def embedded(self, ids_bs: Tensor, documents_bs: Tensor | None, part: Part | None = None) -> Tensor:
        if documents_bs is not None:
            places = positions_within(documents_bs)
            places = (places if part is None else places[:, part[0]]).t().contiguous()
        elif part is not None:
            places = part[0].unsqueeze(1)
        else:
            places = torch.arange(ids_bs.shape[1], device=ids_bs.device).unsqueeze(1)
        return self.dropout(self.tokens(ids_bs.t().contiguous()) + self.positions(places))

    def layer_inputs(
        self, s: int, like: Tensor, documents_bs: Tensor | None, part: Part | None = None
    ) -> tuple[Tensor]:
        if documents_bs is not None:
            return (document_mask(documents_bs, gemm_dtype(like), None if part is None else part[0]),)
        return (causal_mask(s, like) if part is None else causal_rows_mask(*part, like.dtype),)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes of a `Llama`. Raise `UsageError` if the key-value heads do not divide the heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"got {self.kv_heads} key-value heads for {self.heads}; expected a number that divides it")


class LlamaAttention(nn.Module):
    """Grouped heads, rotary positions, one kernel."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, d = config.hidden, config.head_dim
        self.head_dim = d
        self.query = nn.Linear(h, config.heads * d, bias=False)
        self.key = nn.Linear(h, config.kv_heads * d, bias=False)
        self.value = nn.Linear(h, config.kv_heads * d, bias=False)
        self.out = nn.Linear(config.heads * d, h, bias=False)
        self.core: Callable[..., Tensor] = fused

    def forward(self, x_bsh: Tensor, rotary: tuple[Tensor, Tensor], mask_b1ss: Tensor | None = None) -> Tensor:
        """Return the addition to the residual stream; without a mask attention is causal."""
        b, s, _ = x_bsh.shape
        q, k, v = (
            layer(x_bsh).view(b, s, -1, self.head_dim).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        out = self.core(q, k, v, mask_b1ss)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))


def fused(q: Tensor, k: Tensor, v: Tensor, mask_b1ss: Tensor | None = None) -> Tensor:
    """Attention's core as one kernel; all are b × heads × s × d."""
    if mask_b1ss is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if (groups := q.shape[1] // k.shape[1]) > 1:  # kernels that take a mask know none
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_b1ss)


class LlamaMlp(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Return the addition to the residual stream."""
        return self.down(functional.silu(self.gate(x_bsh)) * self.up(x_bsh))


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.mlp = LlamaMlp(config)

    def forward(self, x_bsh: Tensor, rotary: tuple[Tensor, Tensor], *mask: Tensor) -> Tensor:
        x_bsh = x_bsh + self.attention(self.attention_norm(x_bsh), rotary, *mask)
        return x_bsh + self.mlp(self.mlp_norm(x_bsh))


class Llama(Reference):
    """The head has a weight of its own; activations are b × s × h."""

    seq_first = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        _initialise(self)

    def embedded(self, ids_bs: Tensor, documents_bs: Tensor | None, part: Part | None = None) -> Tensor:
        embedded: Tensor = self.tokens(ids_bs)  # positions are relative
        return embedded

    def layer_inputs(
        self, s: int, like: Tensor, documents_bs: Tensor | None, part: Part | None = None
    ) -> tuple[Any, ...]:
        rotary = rotary_tables(s, self.config, like, None if part is None else part[0])
        if documents_bs is None:
            return (rotary,)
        return (rotary, document_mask(documents_bs, gemm_dtype(like), None if part is None else part[0]))


ARCHITECTURES: Final[Mapping[str, Any]] = read_table(Path(__file__).with_suffix(".toml"))
_KINDS: Final = ((Gpt, GptConfig), (Llama, LlamaConfig))
RECORD: Final[Mapping[str, tuple[Any, Any]]] = {kind.__name__.lower(): (kind, sizes) for kind, sizes in _KINDS}
"""Models of record and their sizes, by architecture."""


def causal_mask(s: int, like: Tensor) -> Tensor:
    """Additive mask: 0 for visible keys, minus infinity for others: s × s."""
    return torch.full((s, s), float("-inf"), dtype=like.dtype, device=like.device).triu(1)


def rotary_tables(
    s: int, config: LlamaConfig, like: Tensor, positions_s: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (arXiv 2104.09864), s × d: of the first s positions, or of these."""
    d = config.head_dim
    rates = config.rope_base ** (-torch.arange(0, d, 2, device=like.device, dtype=torch.float32) / d)
    places = torch.arange(s, device=like.device, dtype=torch.float32) if positions_s is None else positions_s.float()
    angles = torch.outer(places, rates).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x_basd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of each head by their position's angles."""
    first, second = x_basd.chunk(2, dim=-1)
    return x_basd * cos_sd + torch.cat((-second, first), dim=-1) * sin_sd


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, in fp32 at least. Labels of -100 do not count."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), labels.reshape(-1))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


# documents ------------------------------------------------------------------------------------------------------------
#
# Several documents in one row of tokens: which one a token is in, where in it, and what attention may see
# s sequence · b micro-batch.


def document_numbers(ids_bs: Tensor, end: int) -> Tensor:
    """The number, within its row, of the document that each token is in: b × s. ``end`` is a document's last token."""
    ends = (ids_bs == end).long()
    return ends.cumsum(1) - ends


def positions_within(documents_bs: Tensor) -> Tensor:
    """Position of each token in its document: b × s."""
    places = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    begins = functional.pad(documents_bs.diff(dim=1), (1, 0)) != 0
    return places - torch.where(begins, places, 0).cummax(1).values


def document_mask(documents_bs: Tensor, dtype: torch.dtype, positions_n: Tensor | None = None) -> Tensor:
    """Additive mask: 0 for a token and earlier ones of its document, else minus infinity: b × 1 × s × s.
    Added to scores: kernels that take a mask of bits make one of these from it, each layer its own. ``positions_n``: of
    the tokens whose rows are wanted, b × 1 × n × s; by default all.
    """
    if positions_n is None:
        seen = (documents_bs.unsqueeze(2) == documents_bs.unsqueeze(1)).tril().unsqueeze(1)
    else:
        alike = documents_bs[:, positions_n].unsqueeze(2) == documents_bs.unsqueeze(1)
        seen = (alike & _not_after(positions_n, documents_bs.shape[1])).unsqueeze(1)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def causal_rows_mask(positions_n: Tensor, s: int, dtype: torch.dtype) -> Tensor:
    """Rows, at these positions, of a causal mask of s keys: n × s."""
    seen = _not_after(positions_n, s)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _not_after(positions_n: Tensor, s: int) -> Tensor:
    return torch.arange(s, device=positions_n.device) <= positions_n.unsqueeze(1)


def gemm_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype in which matmuls of such tensors are computed."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
