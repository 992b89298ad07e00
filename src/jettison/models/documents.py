"""Several documents in one row of tokens: which one a token is in, where in it, and what attention may see.

s sequence · b micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
    """0 where a token may look, itself and what stands before it in its document; else minus infinity: b × 1 × s × s.

    Added to scores: kernels that take a mask of bits make one of these from it, each layer its own.

    Args:
        positions_n: of the tokens whose rows are wanted, b × 1 × n × s; all of them where left out.
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


def product_dtype(like: Tensor) -> torch.dtype:
    """Return the type that matmuls of such tensors are computed in."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
