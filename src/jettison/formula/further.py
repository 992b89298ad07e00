"""Layers that predict further tokens (arXiv 2412.19437 §2.2), as Megatron-Core builds them: `--mtp-num-layers`.

NOTE [ Further tokens ]
``megatron/core/transformer/multi_token_prediction.py``: on the last stage, after the final norm, each depth embeds the
tokens one place on (with a copy of the embedding, ``gpt_model.py``, where that is another stage's), norms them and the
hidden states (``enorm``, ``hnorm``), joins both and multiplies (``eh_proj``, 2h to h, its columns over tp, gathered and
scattered along s again), runs one layer as the last of the model is, and norms. ``MultiTokenPredictionBlock.forward``
joins the hidden states of all depths at its end; ``process_mtp_loss`` gives each to the model's own head and loss,
those of further tokens first, and ``MTPLossAutoScaler`` ties their losses to the hidden states that the head reads
last. A checkpoint of such a layer begins behind the final norm and the embedding (``_checkpointed_forward``).
"""

from __future__ import annotations

from typing import Final

from jettison.formula.basic import enter, linear
from jettison.formula.embedding import looked_up_tokens
from jettison.formula.layer import layer
from jettison.formula.norm import norm
from jettison.formula.tape import Value
from jettison.formula.writer import Writer
from jettison.spec.model import Layer

JOINED: Final = "joined hidden states"


def further(w: Writer, x: Value, spec: Layer) -> Value:
    """From the residual stream, or the hidden states of the depth before, to those of this depth; of the last, to all.

    See NOTE [ Further tokens ].
    """
    model = w.run.model
    if spec.ahead == 1 and model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
    with w.tape.scope("mtp"):
        tokens = looked_up_tokens(w, tied=True, declared=spec.ahead == 1)
    hidden = layer(w, _joined(w, tokens, x, spec), spec)
    hidden = norm(w, hidden, spec.norm, "mtp_norm")
    if spec.ahead < model.further:
        return hidden
    rows = list(hidden.shape)
    rows[w.seq_dim] *= model.further + 1
    parts = [hidden]
    if spec.ahead > 1:  # what depths before have given to the list is held by their norms
        rest = list(hidden.shape)
        rest[w.seq_dim] *= model.further - 1
        parts.append(w.table(JOINED, tuple(rest), w.compute, w.outside()))
    parts.append(x)
    return w.tape.op("aten.cat.default", parts, tuple(rows), places=w.outside())


def _joined(w: Writer, tokens: Value, hidden: Value, spec: Layer) -> Value:
    """Norms, and the product of both."""
    width = w.run.model.hidden
    tokens, hidden = norm(w, tokens, spec.norm, "enorm"), norm(w, hidden, spec.norm, "hnorm")
    both = w.tape.op("aten.cat.default", [tokens, hidden], w.shape(2 * width))
    whole, kept = enter(w, both)
    out = linear(w, whole, width, "eh_proj", bias=False, split="column", keeps=kept)
    if w.tp == 1:
        return out
    out = w.tape.collective("all_gather_into_tensor", "tp", out, w.inside(), backward=None)
    return w.tape.op("aten.clone.default", [out], places=w.outside()) if w.run.layout.sp else out
