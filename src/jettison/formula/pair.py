"""Images held against texts: what each becomes, and the loss of a batch in which every text knows its image.

arXiv 2103.00020 §2.3 and transformers' ``models/clip/modeling_clip.py``. What images become belongs to the region of
the embedding (NOTE [ Two stacks ] in `formula.embedding`) and is held for the head. Each rank compares its own batch.
"""

from __future__ import annotations

from dataclasses import replace

from jettison.formula.basic import add, batched_product, cast, discrete, linear, multiply, power, scale
from jettison.formula.norm import norm
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.model import Pair

FEATURES = "image features"


def tower(w: Writer, pair: Pair) -> Writer:
    """Who writes what belongs to images."""
    return replace(w, run=replace(w.run, model=pair.images, seq=pair.tokens))


def show(w: Writer, pair: Pair) -> None:
    """From the first token of the last layer to features. ``w`` is the `tower`'s."""
    batch = w.run.micro_batch
    first = w.tape.view(w.hidden("norm input"), (batch, pair.images.hidden))
    if pair.images.final_norm is not None:
        first = norm(w, first, pair.images.final_norm, "output_norm")
    w.tape.hold(linear(w, first, pair.width, "projection", bias=False, head=True), FEATURES)


def contrast(w: Writer, x: Value, pair: Pair) -> Value:
    """From the last layer of texts to the loss, over the rows of a micro-batch."""
    model, batch = w.run.model, w.run.micro_batch
    if model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
    ids = w.table("token ids", w.shape(), "int64")
    rows = w.tape.op("aten.arange.default", [ids], (batch,), grad=False)
    ends = discrete(w, ids, "aten.argmax.default", (batch,))
    kept = [saved(rows, "rows"), saved(ends, "ends of texts")]
    last = w.tape.op("aten.index.Tensor", [x, rows, ends], (batch, model.hidden), places=(), saves=kept)
    text = linear(w, last, pair.width, "projection", bias=False, head=True)
    image = w.tape.source(FEATURES, (batch, pair.width), w.products, grad=True, free=True)
    image, text = (_direction(w, each) for each in (image, text))
    roles = ("text direction", "image direction")
    logits = batched_product(w, text, image, (batch, batch), (), pair.width, roles)
    logits = multiply(w, logits, _temperature(w), ("logits", "temperature"))
    losses = [_cross_entropy(w, each, rows) for each in (logits, w.tape.view(logits, logits.shape))]
    return scale(w, add(w, *losses))


def _direction(w: Writer, x: Value) -> Value:
    """x over its length."""
    square = power(w, x, "features")
    length = power(w, w.tape.op("aten.sum.dim_IntList", [square], (x.shape[0], 1)), "squared length")
    return w.tape.op("aten.div.Tensor", [x, length], saves=[saved(length, "length"), saved(x, "features")])


def _temperature(w: Writer) -> Value:
    """The exponential of a learned number."""
    weight = w.parameter("temperature")
    held = w.tape.source(
        "temperature", (), w.held(frozen=weight.frozen), weight.places, grad=not weight.frozen, free=True
    )
    narrow, out = cast(w, held, w.compute), w.tape.empty((), w.compute, grad=held.grad)
    w.tape.record("aten.exp.default", [narrow], [out], saves=[saved(out, "temperature")], weights=[weight])
    return out


def _cross_entropy(w: Writer, logits: Value, rows: Value) -> Value:
    """Each row's own column is the right one."""
    wide = cast(w, logits, "float32") if w.kernels.loss_float32 else logits
    found = w.tape.empty(wide.shape, wide.dtype, grad=True)
    w.tape.record("aten._log_softmax.default", [wide], [found], saves=[saved(found, "log-softmax output")])
    labels = w.tape.op("aten.arange.default", [rows], grad=False)
    loss, weight = w.tape.empty((), wide.dtype, grad=True), w.tape.empty((), wide.dtype)
    kept = [saved(found, "log-softmax output"), saved(labels, "labels"), saved(weight, "loss weight")]
    w.tape.record("aten.nll_loss_forward.default", [found, labels], [loss, weight], saves=kept)
    return loss
