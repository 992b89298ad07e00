"""Context parallelism: what a rank's model is called with, which has a part of every sequence.

Labels are shifted before they are cut, so that a token at the end of a rank's piece is asked for what follows it on
another rank. Every rank's loss is the mean over its tokens, as many as any other's, so that the mean over ranks, which
data parallelism takes of gradients, is that over all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jettison.errors import UsageError
from jettison.models.documents import causal_rows_mask, document_mask, document_numbers, positions_within
from jettison.models.reference import Gpt, Llama
from jettison.parallel.context import Context
from jettison.parallel.context_models import asked_kernel
from jettison.train.build_model import Built


def in_parts(built: Built, context: Context, *, end: int | None, bf16: bool) -> Built:
    """The same model, after `apply_context_parallel`, called with this rank's tokens.

    Args:
        end: the token that ends a document, where documents are kept apart.
        bf16: attention is computed in bf16, whatever parameters are.

    Raises:
        UsageError: a factory's loss, of which it is not known over how many tokens it is a mean.
    """
    if built.loss_fn is not None:
        raise UsageError(
            "layout.cp: the factory has a loss function of its own, which would have to know over how many tokens of "
            "all ranks it is a mean; expected a model that is given labels and returns its loss"
        )
    if isinstance(built.model, Gpt | Llama):
        return replace(built, call=lambda rows: _for_record(rows, context, end))
    dtype = torch.bfloat16 if bf16 else next(p.dtype for p in built.model.parameters() if p.is_floating_point())
    masked = asked_kernel(built.model) == "eager"
    return replace(built, call=lambda rows: _for_hub(rows, context, end, dtype if masked or end is not None else None))


def _for_record(rows: Tensor, context: Context, end: int | None) -> dict[str, Any]:
    ids_bs, seq = rows[:, :-1], rows.shape[1] - 1
    return {
        "ids_bs": context.take(ids_bs, 1),
        "labels_bs": context.take(rows[:, 1:], 1),
        "documents_bs": None if end is None else document_numbers(ids_bs, end),
        "part": (context.positions(seq, rows.device), seq),
    }


def _for_hub(rows: Tensor, context: Context, end: int | None, masked: torch.dtype | None) -> dict[str, Any]:
    """transformers' models take labels that are shifted already by name, and the number of tokens to divide by: the
    last token of a sequence has no label, and its rank one less to count.
    """
    ids_bs, seq = rows[:, :-1], rows.shape[1] - 1
    positions_n = context.positions(seq, rows.device)
    own = context.take(ids_bs, 1)
    told: dict[str, Any] = {
        "input_ids": own,
        "labels": own,
        "shift_labels": context.take(functional.pad(ids_bs[:, 1:], (0, 1), value=-100), 1),
        "num_items_in_batch": rows.shape[0] * (seq - 1) / context.axis.size,
        "position_ids": positions_n.unsqueeze(0),
    }
    if end is not None:
        assert masked is not None
        documents_bs = document_numbers(ids_bs, end)
        told["position_ids"] = positions_within(documents_bs)[:, positions_n]
        told["attention_mask"] = document_mask(documents_bs, masked, positions_n)
    elif masked is not None:
        told["attention_mask"] = causal_rows_mask(positions_n, seq, masked)[None, None]
    return told
