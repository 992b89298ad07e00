"""Sound: convolutions before the first layer, and the loss of a text that is aligned with it.

arXiv 2006.11477 §2 and transformers' ``models/wav2vec2/modeling_wav2vec2.py``. Convolutions are whole on every rank.
"""

from __future__ import annotations

from jettison.formula.basic import add, cast, convolution, copy, dropout, enter, for_product, linear, weight_copies
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.kernels import Device
from jettison.spec.model import Norm, NormKind
from jettison.spec.waves import Waves

_NORM = Norm(kind=NormKind.LAYER, bias=True)


def samples_of(w: Writer, spec: Waves) -> int:
    """Of a sequence: as many as are asked for, or the fewest that make its tokens."""
    return w.run.source_seq or spec.samples(w.run.seq)


def hear(w: Writer, spec: Waves) -> Value:
    """Tokens, before the norm and the dropout that end an embedding."""
    samples, hidden = samples_of(w, spec), w.run.model.hidden
    x = w.tape.source("sound", (w.run.micro_batch, 1, samples), w.compute, grad=True)
    layers = zip(spec.channels, spec.kernels, spec.lengths(samples), strict=True)
    for number, (channels, kernel, length) in enumerate(layers):
        with w.tape.scope(f"convolutions.{number}"):
            x = _convolved(w, x, channels, kernel, length, bias=spec.bias)
            if not spec.group_norm:
                x = norm(w, copy(w, x, (w.run.micro_batch, length, channels)), _NORM, "norm")
                x = w.tape.view(activation(w, x, spec.activation), (w.run.micro_batch, channels, length))
                continue
            x = activation(w, _channel_norm(w, x) if number == 0 else x, spec.activation)
    x = w.tape.view(x, w.shape(spec.channels[-1]))
    x = norm(w, x, _NORM, "norm_of_features") if spec.projection_norm else x
    x = linear(w, x, hidden, "projection", bias=True)
    x = _masked(w, dropout(w, x, site=w.run.model.dropout_sites.projected), spec)
    return add(w, x, _positions(w, x, spec))


def _convolved(w: Writer, x: Value, channels: int, kernel: int, length: int, *, bias: bool) -> Value:
    width = x.shape[1]
    weights = [w.parameter("weight", channels, width, kernel)] + ([w.parameter("bias", channels)] if bias else [])
    shape = (x.shape[0], channels, length)
    return convolution(w, x, shape, weights, width * kernel)


def _channel_norm(w: Writer, x: Value) -> Value:
    """Each channel over all of its sequence; the input and two numbers a channel stay."""
    x = cast(w, x, "float32") if w.listed else x
    dtype = x.dtype if w.kernels.device is Device.CPU else "float32"
    out = w.tape.empty(x.shape, x.dtype, x.places, grad=True)
    statistics = [w.tape.empty(x.shape[:2], dtype) for _ in range(2)]
    with w.tape.scope("norm"):
        weights = [w.parameter(name, x.shape[1]) for name in ("weight", "bias")]
        kept = [saved(x, "norm input"), *(saved(one, "norm statistics") for one in statistics)]
        w.tape.record("aten.native_group_norm.default", [x], [out, *statistics], saves=kept, weights=weights)
    return out


def _masked(w: Writer, x: Value, spec: Waves) -> Value:
    """A learned vector over some tokens, zeros over some features (arXiv 1904.08779); the masks stay."""
    weights = [w.parameter("mask", w.run.model.hidden)] if spec.mask else []
    for name, wanted, shape in (
        ("mask of tokens", spec.masked_time, (w.run.micro_batch, w.run.seq)),
        ("mask of features", spec.masked_features, (w.run.micro_batch, w.run.model.hidden)),
    ):
        if wanted:
            mask = w.tape.source(name, shape, "bool")
            used = weights if name == "mask of tokens" else []
            x = w.tape.op("aten.index_put.default", [x, mask], saves=[saved(mask, name)], weights=used)
    return x


def _positions(w: Writer, x: Value, spec: Waves) -> Value:
    """A convolution over neighbours, in groups of channels, whose weight is a direction and a length a column."""
    b, s, hidden, kernel = w.run.micro_batch, w.run.seq, w.run.model.hidden, spec.position_kernel
    width = hidden // spec.position_groups
    with w.tape.scope("positions"):
        lengths = w.parameter("lengths", 1, 1, kernel)
        directions = w.parameter("directions", hidden, width, kernel)
        held = w.tape.source(
            "directions", directions.shape, w.held(frozen=directions.frozen), grad=not directions.frozen, free=True
        )
        weight = w.tape.empty(directions.shape, w.compute, grad=True)
        norms = w.tape.empty(lengths.shape, "float32")
        w.tape.record(
            "aten._weight_norm_interface.default",
            [cast(w, held, w.compute)],
            [weight, norms],
            saves=[saved(norms, "norms of directions")],
            weights=[lengths, directions],
        )
        bias = w.parameter("bias", hidden)
        copies = weight_copies(w, [bias])
        weight, rows = for_product(w, weight), for_product(w, w.tape.view(x, (b, hidden, s)))
        out = w.tape.op(
            "aten.convolution.default",
            [rows, weight, *copies],
            (b, hidden, s + 1 - kernel % 2),
            dtype=w.products,
            saves=[saved(rows, "convolution input"), saved(weight, "convolution weight")],
            weights=[bias],
            contracted=width * kernel,
            copied=bool(copies),
        )
        return w.tape.view(activation(w, w.tape.view(out, (b, hidden, s)), spec.activation), w.shape(hidden))


def align(w: Writer, x: Value, spec: Waves) -> Value:
    """Logits, and the loss over all ways to read a text off them (connectionist temporal classification).

    ``torch.nn.functional.ctc_loss``, which keeps log-probabilities in fp32 and a row of 2 labels + 1 for each token.
    """
    model, b, s = w.run.model, w.run.micro_batch, w.run.seq
    whole, kept = enter(w, x)
    logits = linear(
        w, whole, model.vocab, "logits", bias=model.head.bias, split="column", keeps=kept, head=True, role="head input"
    )
    if w.tp > 1:
        logits = w.tape.collective("all_gather_into_tensor", "tp", logits, w.inside(), backward="reduce_scatter_tensor")
    wide = cast(w, logits, "float32")
    rows = w.tape.empty(wide.shape, "float32", wide.places, grad=True)
    w.tape.record("aten._log_softmax.default", [wide], [rows], saves=[saved(rows, "log-softmax output")])
    labels = spec.labels(samples_of(w, spec))
    numbers = [w.tape.source(name, (b,), "int64") for name in ("lengths of sequences", "lengths of labels")]
    targets = w.tape.source("labels", (b * labels,), "int64")
    loss = w.tape.empty((b,), "float32", grad=True)
    alphas = w.tape.empty((b, s, 2 * labels + 1), "float32")
    kept_now = [saved(rows, "log-softmax output"), saved(loss, "losses"), saved(alphas, "sums over alignments")]
    kept_now += [saved(one, "labels") for one in (*numbers, targets)]
    w.tape.record(
        "aten._ctc_loss.Tensor", [rows, targets, *numbers], [loss, alphas], saves=kept_now, workspace=alphas.nbytes
    )
    if spec.zero_infinity:
        endless = w.tape.op("aten.eq.Scalar", [loss], dtype="bool", grad=False)
        loss = w.tape.op("aten.where.self", [loss, endless], saves=[saved(endless, "endless losses")])
    if spec.mean_loss:
        divisor = w.tape.op("aten.clamp_min.default", [numbers[1]], grad=False)
        loss = w.tape.op("aten.div.Tensor", [loss, divisor], saves=[saved(divisor, "divisor")])
    return w.tape.op("aten.sum.default", [loss], ())
