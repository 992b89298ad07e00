"""What a rank's model is called with: documents kept apart, and a part of every sequence.

Rows are windows of one long text; a token that the recipe names may end a document. Attention then stays within
documents, and positions are counted from their beginnings. What comes first in a document is still predicted from the
end of the one before: every token counts in the loss, so that it is the same mean on every layout.

With context parallelism labels are shifted before they are cut, so that a token at the end of a rank's piece is asked
for what follows it on another rank. Every rank's loss is the mean over its tokens, as many as any other's, so that the
mean over ranks, which data parallelism takes of gradients, is that over all tokens.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.core.errors import UsageError
from jettison.models.documents import causal_rows_mask, document_mask, document_numbers, positions_within
from jettison.models.reference import Gpt, Llama
from jettison.parallel.context import Context
from jettison.parallel.context_models import asked_kernel
from jettison.train.build_model import Built
from jettison.train.data import Corpus

_NEEDED: Final = ("input_ids", "labels", "position_ids", "attention_mask")
_AT_A_TIME: Final = 1 << 22  # tokens that are looked at


def check_occurs(corpus: Corpus, end: int) -> None:
    """Is there such a token?

    Raises:
        UsageError: nowhere, so that all of the text would be one document.
    """
    for start in range(0, len(corpus.tokens), _AT_A_TIME):
        if np.any(corpus.tokens[start : start + _AT_A_TIME] == end):
            return
    raise UsageError(f"data.document_end: got {end}, which is nowhere in the text; expected what ends a document")


def keep_apart(built: Built, end: int, *, bf16: bool) -> Built:
    """The same model, called with what keeps documents apart.

    Args:
        end: the token that ends a document.
        bf16: attention is computed in bf16, whatever parameters are.

    Raises:
        UsageError: it is not known how to tell this model.
    """
    model = built.model
    if isinstance(model, Gpt | Llama):
        return replace(built, call=lambda rows: (*built.call(rows), document_numbers(rows[:, :-1], end)))
    _check(model)
    dtype = _dtype(model, bf16=bf16)

    def call(rows: Tensor) -> dict[str, Any]:
        documents_bs = document_numbers(rows[:, :-1], end)
        told = {"position_ids": positions_within(documents_bs), "attention_mask": document_mask(documents_bs, dtype)}
        return built.call(rows) | told

    return replace(built, call=call)


def _check(model: nn.Module) -> None:
    """Does it take positions and a mask, and is there nothing in it but attention that goes by the mask?"""
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    name = type(model).__name__
    missing = [word for word in _NEEDED if word not in takes]
    if missing or getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        what = f"its forward does not take {missing[0]}" if missing else "its attention is neither eager nor sdpa"
        raise _refused(name, what)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise _refused(name, f"it has layers of {', '.join(sorted(kinds))}")
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        raise _refused(name, "its attention has a sliding window")
    if _hears_across(_with_weights(model)):
        raise _refused(name, "what it says of one document changes with the one before")


def _with_weights(model: nn.Module) -> nn.Module:
    """The model; where its weights are made later, one of the same configuration that is as small as that can be had:
    one layer, a few words.
    """
    if next(model.parameters()).device.type != "meta":
        return model
    config: Any = copy.deepcopy(getattr(model, "config", None))
    kind: Any = type(model)
    try:
        config.num_hidden_layers, config.vocab_size = 1, 8
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        with torch.random.fork_rng(), torch.device("cpu"):
            made: nn.Module = kind(config)
            return made
    except Exception as error:  # of anybody's constructor
        what = f"it cannot be tried in small before it has weights ({type(error).__name__}); say model.build = 'whole'"
        raise _refused(type(model).__name__, what) from error


@torch.no_grad()
def _hears_across(model: nn.Module) -> bool:
    """Do logits of a second document depend on the first one?"""
    device = next(model.parameters()).device
    documents_bs = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=device)
    ids_bs = torch.tensor([[1, 2, 3, 0, 1, 2, 3, 1], [3, 1, 1, 0, 1, 2, 3, 1]], device=device)
    dtype = _dtype(model, bf16=False)
    told = {"position_ids": positions_within(documents_bs), "attention_mask": document_mask(documents_bs, dtype)}
    trained = {module: module.training for module in model.modules()}
    model.eval()
    try:
        one, other = (model(input_ids=row[None], **told).logits[:, 4:] for row in ids_bs)
    finally:
        for module, mode in trained.items():
            module.training = mode
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def _refused(name: str, what: str) -> UsageError:
    return UsageError(
        f"data.document_end: documents cannot be kept apart in a {name}: {what}. Use another model, or leave "
        "document_end out, and let attention see the documents before"
    )


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
    dtype = _dtype(built.model, bf16=bf16)
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


def _dtype(model: nn.Module, *, bf16: bool) -> torch.dtype:
    """In which attention is computed."""
    return torch.bfloat16 if bf16 else next(p.dtype for p in model.parameters() if p.is_floating_point())
