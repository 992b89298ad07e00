"""Looking up ids in a shard of an embedding's rows: zeros for those that other ranks have. Saves the ids alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def vocabulary_lookup(ids: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
    """Rows of ids in [first, first + rows of weight), zeros for all others.

    Args:
        padding_idx: of the whole vocabulary; its row gets no gradient.
    """
    out: Tensor = _Lookup.apply(ids, weight, first, padding_idx)
    return out


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.where = first, weight.shape[0], padding_idx
        local, elsewhere = _local_ids(ids, first, weight.shape[0])
        return torch.nn.functional.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        first, rows, padding_idx = ctx.where
        local, elsewhere = _local_ids(ids, first, rows)
        if padding_idx is not None:
            elsewhere = elsewhere | (ids == padding_idx)
        dy = dy.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        dw = torch.ops.aten.embedding_dense_backward(dy, local, rows, -1, False)
        return None, dw, None, None


def _local_ids(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    local = ids - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere
