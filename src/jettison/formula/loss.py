"""What stands after the last layer: the final norm, the product with the vocabulary, and the loss."""

from __future__ import annotations

from jettison.formula.basic import cast, enter, linear, scale
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.kernels import Loss

EXTRA = "arXiv 2205.05198 §4.3"


def head(w: Writer, x: Value) -> Value:
    """From the residual stream to the loss."""
    model = w.run.model
    if model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
    if model.head.transform is not None and model.embedding_norm is not None:
        x = linear(w, x, model.hidden, "transform", bias=True)
        x = norm(w, activation(w, x, model.head.transform), model.embedding_norm, "transform_norm")
    if w.kernels.loss in (Loss.FUSED, Loss.CHUNKED):
        return _without_logits(w, x)
    whole, kept = enter(w, x)
    logits = linear(
        w,
        whole,
        model.vocab,
        "logits",
        bias=model.head.bias,
        split="column",
        keeps=kept,
        tied=model.tied_embeddings,
        reference=f"{EXTRA}, output layer: 2sbh",
    )
    if model.head.softcap:
        logits = _softcap(w, logits)
    labels = _labels(w)
    return _vocab_parallel(w, logits, labels) if w.kernels.loss is Loss.VOCAB_PARALLEL else _upcast(w, logits, labels)


def _labels(w: Writer) -> Value:
    """Next tokens. Padded and shifted within the model, a single sequence's are a view with the padding still there."""
    shape = w.shape()
    if not w.kernels.shifted_labels or w.run.micro_batch > 1 or w.run.layout.cp > 1:  # cp: shifted before sharding
        return w.tape.source("labels", shape, "int64", w.inside())
    padded = w.tape.source("labels", (1, w.run.seq + 1), "int64")
    return w.tape.view(padded, shape, w.inside())


def _softcap(w: Writer, logits: Value) -> Value:
    """c * tanh(logits / c): Gemma 2."""
    logits = scale(w, logits)
    out = w.tape.empty(logits.shape, logits.dtype, logits.places, grad=True)
    w.tape.record("aten.tanh.default", [logits], [out], saves=[saved(out, "capped logits")])
    return scale(w, out)


def _upcast(w: Writer, logits: Value, labels: Value) -> Value:
    """torch's cross_entropy, on fp32 logits: the log-softmax stays, 4sbV. Sharded logits are gathered first."""
    if w.tp > 1:
        logits = w.tape.collective("all_gather_into_tensor", "tp", logits, w.inside(), backward="reduce_scatter_tensor")
    wide = cast(w, logits, "float32") if w.kernels.loss_float32 else logits
    rows = w.tape.empty(wide.shape, wide.dtype, wide.places, grad=True)
    w.tape.record(
        "aten._log_softmax.default", [wide], [rows], saves=[saved(rows, "log-softmax output", f"{EXTRA}: 4sbv")]
    )
    loss = w.tape.empty((), wide.dtype, grad=True)
    weight = w.tape.empty((), wide.dtype)
    kept = [saved(rows, "log-softmax output"), saved(labels, "labels"), saved(weight, "loss weight")]
    w.tape.record("aten.nll_loss_forward.default", [rows, labels], [loss, weight], saves=kept)
    return loss


def _vocab_parallel(w: Writer, logits: Value, labels: Value) -> Value:
    """Megatron's loss over a sharded vocabulary: its fp32 softmax stays, 4sbv/t, and where the targets are."""
    wide = cast(w, logits, "float32")
    probabilities = w.tape.empty(wide.shape, "float32", wide.places, grad=True)
    mask = w.tape.empty(labels.shape, "bool", labels.places)
    target = w.tape.empty(labels.shape, "int64", labels.places)
    loss = w.tape.empty((), "float32", grad=True)
    kept = [
        saved(probabilities, "softmax output", f"{EXTRA}, fp32 logits of the loss: 4sbv"),
        saved(mask, "target mask"),
        saved(target, "masked targets"),
    ]
    w.tape.record("vocab_parallel_cross_entropy", [wide, labels], [loss, probabilities, mask, target], saves=kept)
    return loss


def _without_logits(w: Writer, x: Value) -> Value:
    """Head and loss together. FUSED makes gradients at once: dx and dW stay. CHUNKED keeps x and starts over."""
    model = w.run.model
    whole, kept = enter(w, x)
    with w.tape.scope("logits"):
        weight = w.parameter("weight", model.vocab, model.hidden, split=0, tied=model.tied_embeddings)
    labels = _labels(w)
    chunks = w.kernels.loss_chunks
    tokens = whole.local_shape[0] * whole.local_shape[1]
    logits_bytes = -(-tokens // chunks) * (weight.numel // model.hidden) * 4
    flops = 2 * tokens * weight.numel
    loss = w.tape.empty((), "float32", grad=True)
    if w.kernels.loss is Loss.CHUNKED:
        kept_now = [saved(kept, "linear input"), saved(labels, "labels")]
        w.tape.record(
            "chunked_cross_entropy",
            [whole, labels],
            [loss],
            saves=kept_now,
            weights=[weight],
            flops=flops,
            workspace=2 * logits_bytes,
        )
        return loss
    dx = w.tape.empty(whole.shape, whole.dtype, whole.places)
    dw = w.tape.empty(weight.shape, w.compute, weight.places)
    kept_now = [saved(dx, "gradient of the head's input"), saved(dw, "gradient of the head's weight")]
    w.tape.record(
        "fused_linear_cross_entropy",
        [whole, labels],
        [loss, dx, dw],
        saves=kept_now,
        weights=[weight],
        flops=3 * flops,
        workspace=2 * logits_bytes,
    )
    return loss
