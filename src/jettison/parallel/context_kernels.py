"""Rows of causal attention that begin somewhere in the sequence: one fused kernel's forward, and its backward.

They are ops of their own, `jettison::causal_rows` and `jettison::causal_rows_backward`. A recording sees ops and
shapes, and what a kernel has to read hangs on where a rank's rows begin. As one op over whole keys it has the same
shapes on all ranks, so that one plan is for all of them; where they begin is a constant. What a kernel takes inside the
op is priced as every kernel's workspace is.

b micro-batch · a heads · k key-value heads · m rows at hand · s sequence · d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_aten = torch.ops.aten


def kernel_fits(q: Tensor) -> bool:
    """Is there a fused kernel for queries like these? CUDA's that knows causal rows is for 16-bit and some widths."""
    if q.device.type in ("cpu", "meta"):
        return q.is_floating_point()
    d = q.shape[-1]
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256


@torch.library.custom_op("jettison::causal_rows", mutates_args=())
def causal_rows(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the rows from ``start`` on over all that is not after them, and the log of each row's sum.

    Args:
        q: b × a × m × d.
        k, v: b × k × s × d, the whole sequence.
    """
    k, v = (part.narrow(2, 0, start + q.shape[2]) for part in (k, v))
    if q.is_cuda:  # its causal mask is aligned to the lower right corner
        out, sums, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        return out, sums
    mask = _mask(q, start)
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out, sums.contiguous()


@torch.library.custom_op("jettison::causal_rows_backward", mutates_args=())
def causal_rows_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of the keys and values up to the last of these rows."""
    k, v = (part.narrow(2, 0, start + q.shape[2]) for part in (k, v))
    if q.is_cuda:
        places: tuple[Any, ...] = (None, None, q.shape[2], k.shape[2])
        drawn = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
        )
        made = _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, sums, *places, 0.0, True, *drawn, scale=scale
        )
    else:
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, out, sums, 0.0, False, attn_mask=_mask(q, start), scale=scale
        )
    dq, dk, dv = made
    return dq, dk, dv


def _mask(q: Tensor, start: int) -> Tensor:
    """The CPU's kernel has a causal mask for squares alone."""
    rows = torch.arange(start, start + q.shape[2], device=q.device)
    later = torch.arange(start + q.shape[2], device=q.device) > rows.unsqueeze(1)
    return torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, float("-inf"))


def _sums_like(q: Tensor) -> Tensor:
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape[:3], dtype=wide)


def _by_rows(x: Tensor) -> Tensor:
    """As the kernels lay out their gradients: heads inside rows."""
    b, a, m, d = x.shape
    return x.new_empty((b, m, a, d)).transpose(1, 2)


@causal_rows.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _sums_like(q)


@causal_rows_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (part.narrow(2, 0, start + q.shape[2]) for part in (k, v))
    return _by_rows(q), _by_rows(k), _by_rows(v)


@register_flop_formula(torch.ops.jettison.causal_rows)
def _flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of all keys, whatever the mask hides: as attention is counted everywhere."""
    b, a, m, d = q
    return int(2 * b * a * m * k[2] * (d + v[3]))
