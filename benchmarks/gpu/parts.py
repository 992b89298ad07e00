"""Parts of which the kit's families are made: torch alone, nothing else installed.

s sequence · b micro-batch · h hidden · a heads · k key-value heads · d head dim · f FFN width · E experts
t tokens, b·s
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.models.reference import rotate

grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""Rows of each group times a matrix of its own, in one kernel; None where this torch has none."""
ALIGNED = 16


class Attention(nn.Module):
    """Fused attention, over itself or over a memory; which kernel runs is for `torch.nn.attention.sdpa_kernel` to say.

    ``repeat`` spells grouped heads out, for kernels that know only as many key heads as query heads.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, *, dropout: float, norm_heads: bool = False, repeat: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = d = hidden // heads
        self.groups, self.repeat, self.dropout = heads // kv_heads, repeat, dropout
        self.query, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.key, self.value = nn.Linear(hidden, kv_heads * d), nn.Linear(hidden, kv_heads * d)
        self.query_norm = nn.RMSNorm(d, eps=1e-6) if norm_heads else None
        self.key_norm = nn.RMSNorm(d, eps=1e-6) if norm_heads else None

    def forward(
        self,
        x_bsh: Tensor,
        memory_bsh: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """What the block adds to the residual stream. ``mask`` is added to, or chooses among, scores ``b a s s``."""
        b, s, h = x_bsh.shape
        source = x_bsh if memory_bsh is None else memory_bsh
        q = self.query(x_bsh).view(b, s, -1, self.head_dim).transpose(1, 2)
        k, v = (f(source).view(b, source.shape[1], -1, self.head_dim).transpose(1, 2) for f in (self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        grouped = self.groups > 1 and not self.repeat
        if self.groups > 1 and self.repeat:
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        p = self.dropout if self.training else 0.0
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.to(q.dtype)  # autocast's is not the table's
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=grouped
        )
        return self.out(out.transpose(1, 2).reshape(b, s, h))


class LatentAttention(nn.Module):
    """Keys and values of one narrow latent (arXiv 2405.04434): heads of 3d/2 for scores and of d for values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d = heads, hidden // heads
        self.query = nn.Linear(hidden, heads * (self.d + self.d // 2), bias=False)
        self.down = nn.Linear(hidden, hidden // 4 + self.d // 2, bias=False)
        self.norm = nn.RMSNorm(hidden // 4, eps=1e-6)
        self.up = nn.Linear(hidden // 4, heads * 2 * self.d, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_bsh: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """What the block adds to the residual stream."""
        b, s, h = x_bsh.shape
        turned = [table[:, : self.d // 2] for table in rotary]
        q = self.query(x_bsh).view(b, s, self.heads, -1).transpose(1, 2)
        latent, key = self.down(x_bsh).split((h // 4, self.d // 2), dim=-1)
        k, v = self.up(self.norm(latent)).view(b, s, self.heads, -1).transpose(1, 2).chunk(2, dim=-1)
        q = torch.cat((q[..., : self.d], rotate(q[..., self.d :], *turned)), dim=-1)
        k = torch.cat((k, rotate(key.unsqueeze(1), *turned).expand(b, self.heads, s, -1)), dim=-1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, h))


class Gated(nn.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202), gate and up in one product."""

    def __init__(self, hidden: int, ffn: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.act = nn.GELU(approximate="tanh") if gelu else nn.SiLU()

    def forward(self, x_bsh: Tensor) -> Tensor:
        """What the block adds to the residual stream."""
        gate, up = self.up(x_bsh).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Mlp(nn.Module):
    """Up, GeLU, down, dropout."""

    def __init__(self, hidden: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden), nn.Dropout(dropout)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """What the block adds to the residual stream."""
        return self.dropout(self.down(functional.gelu(self.up(x_bsh))))


class Experts(nn.Module):
    """The best k of E gated experts for each token, their products grouped into one kernel each.

    Each expert's rows begin at a multiple of 16, as kernels want them, and the last one has all that is left over, in
    rows of zeros: shapes do not depend on where tokens go, and no row is left unwritten.
    """

    def __init__(self, hidden: int, ffn: int, experts: int, best: int) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * ffn) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) * 0.02)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """What the block adds to the residual stream."""
        x_th = x_bsh.flatten(0, 1)
        weights, chosen = self.router(x_th).float().softmax(dim=-1).topk(self.best, dim=-1)
        source, ends, place = self._rows(chosen.flatten(), x_th.shape[0])
        rows = torch.cat((x_th, x_th.new_zeros(1, x_th.shape[1])))[source]
        gate, up = grouped_mm(rows, self.up, offs=ends).chunk(2, dim=-1)
        out = grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        back = out[place].view(x_th.shape[0], self.best, -1)
        return (back * weights.to(back.dtype).unsqueeze(-1)).sum(1).view_as(x_bsh)

    def _rows(self, expert: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which token is in each row (one past the last: none), where experts end, and each choice's row."""
        experts = self.up.shape[0]
        is_for = expert.unsqueeze(1) == torch.arange(experts, device=expert.device)
        counts = is_for.sum(0)
        room = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
        ends = room.cumsum(0)
        place = (ends - room)[expert] + (is_for.cumsum(0) - 1).gather(1, expert.unsqueeze(1)).squeeze(1)
        total = expert.numel() + experts * ALIGNED
        nobody = torch.full((total,), tokens, device=expert.device)
        source = nobody.scatter(0, place, torch.arange(expert.numel(), device=expert.device) // self.best)
        last = torch.arange(experts, device=expert.device) == experts - 1
        return source, torch.where(last, total, ends).to(torch.int32), place


class StateSpace(nn.Module):
    """A gated state-space mixer in its quadratic form (arXiv 2405.21060), behind a short causal convolution."""

    def __init__(self, hidden: int, heads: int, state: int) -> None:
        super().__init__()
        self.heads, self.state = heads, state
        self.into = nn.Linear(hidden, 2 * hidden + 2 * state + heads, bias=False)
        self.short = nn.Conv1d(hidden, hidden, 4, padding=3, groups=hidden)
        self.norm, self.out = nn.RMSNorm(hidden, eps=1e-6), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """What the block adds to the residual stream."""
        b, s, h = x_bsh.shape
        x, gate, keys, queries, decay = self.into(x_bsh).split((h, h, self.state, self.state, self.heads), dim=-1)
        x = functional.silu(self.short(x.transpose(1, 2))[..., :s].transpose(1, 2))
        fading_bas = -functional.softplus(decay.float()).cumsum(1).transpose(1, 2)
        past = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        kept_bass = (fading_bas.unsqueeze(-1) - fading_bas.unsqueeze(-2)).masked_fill(~past, float("-inf")).exp()
        scores_bass = kept_bass.to(x.dtype) * (queries @ keys.transpose(1, 2)).unsqueeze(1)
        y = scores_bass @ x.view(b, s, self.heads, -1).transpose(1, 2)
        return self.out(self.norm(y.transpose(1, 2).reshape(b, s, h) * functional.silu(gate)))


class Bottleneck(nn.Module):
    """Two convolutions with batch norms around a residual; c × c pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The next image."""
        y = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(x + self.second_norm(self.second(y)))
