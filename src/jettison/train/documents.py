"""Documents that share a row are kept apart: what a model is told of them, and whether it listens.

Rows are windows of one long text, as without this; a token that the recipe names ends a document. Attention then stays
within documents, and positions are counted from their beginnings. What comes first in a document is still predicted
from the end of the one before: every token counts in the loss, so that it is the same mean on every layout.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from jettison.errors import UsageError
from jettison.models.documents import document_mask, document_numbers, positions_within
from jettison.models.reference import Gpt, Llama
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
    dtype = torch.bfloat16 if bf16 else next(p.dtype for p in model.parameters() if p.is_floating_point())

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
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
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
