"""The start of a model: token, position and segment embeddings; patches of images, frames of sound.

NOTE [ Two stacks ]
The encoder's layers come first, then those of the decoder with cross-attention. Each is a region like any other, at its
own length. Whatever runs before the first layer and between the two stacks belongs to the embedding's region, as in a
recorded model: the input of the norm between them and its result are held as long as the embedding's own tensors.
Layers of the decoder read that result without paying for it.
"""

from __future__ import annotations

from dataclasses import replace

from jettison.formula.attention import READ
from jettison.formula.mlp import activation
from jettison.formula.norm import norm, statistics_dtype
from jettison.formula.ops import add, cast, convolution, copy, dropout, leave, linear, scale, weight_copies
from jettison.formula.tape import Places, Saved, Value, Weight, Writer
from jettison.spec.fine_tuning import TABLE
from jettison.spec.kernels import AttentionKernel
from jettison.spec.model import (
    Activation,
    Attention,
    Audio,
    EncoderInput,
    LatentAttention,
    Norm,
    NormKind,
    Pair,
    Patches,
)

POSITIONS, TOKENS = "position ids", "tokens"
FEATURES = "image features"
_NORM = Norm(kind=NormKind.LAYER, bias=True)


def embedding(w: Writer) -> Value:
    """The input of the first layer. The vocabulary is sharded over tp."""
    model = w.run.model
    if not (w.kernels.fused_rotary or w.kernels.expanded_rotary or w.kernels.indexed_rotary):
        rotary_tables(w)
    if model.patches is not None:
        return _patched(w, model.patches)
    if model.audio is not None:
        return _closed(w, hear(w, model.audio))
    if model.pair is not None:
        _seen(w, model.pair)
    if model.source is not None:
        read_source(w, model.source)
    eager = w.kernels.attention is AttentionKernel.EAGER
    if (w.kernels.filled_masks and eager) or (w.kernels.always_masks and not eager):
        _masks(w)
    if w.run.padding and any(layer.scan is not None for layer in model.described):
        w.tape.hold(w.tape.source("token mask", w.shape(), "int64"), "token mask")
    x = _scaled_tokens(w)
    if model.token_types:
        x = add(w, x, _looked_up(w, "segments", model.token_types, "segment ids"))
    if model.learned_positions:
        x = add(w, x, _looked_up(w, "positions", model.position_rows or model.max_positions, POSITIONS))
    with w.tape.scope("unused"):
        for name, shape in model.unused_weights:
            w.parameter(name, *shape)
    return _closed(w, x)


def _scaled_tokens(w: Writer, *, declared: bool = True) -> Value:
    x = looked_up_tokens(w, declared=declared)
    return scale(w, x) if w.run.model.embedding_scale else x


def _closed(w: Writer, x: Value) -> Value:
    """The embedding's norm and dropout."""
    model = w.run.model
    if model.embedding_norm is not None:
        x = norm(w, x, model.embedding_norm, "norm")
    x = dropout(w, x, site=model.dropout_sites.embedding, reference="arXiv 2205.05198 §4.3: sbh")
    return x if x.dtype == w.table_dtype else cast(w, x, w.stream)


def read_source(w: Writer, spec: EncoderInput) -> None:
    """The encoder's input, and the encoder output that a decoder reads: NOTE [ Two stacks ]."""
    inner = replace(w, run=replace(w.run, seq=w.run.source_seq))
    model = w.run.model
    with w.tape.scope("encoder"):
        x = _heard(inner, spec.sound) if spec.sound else _scaled_tokens(inner, declared=False)
        if spec.sound:
            table = inner.parameter("positions", spec.position_rows, model.hidden, fixed=not spec.trained_positions)
            x = w.tape.op("aten.add.Tensor", [x], dtype=inner.compute, passes=True, weights=[table])
        elif spec.position_rows:
            x = add(inner, x, _looked_up(inner, "positions", spec.position_rows, POSITIONS, batched=True))
        _closed(inner, x)
        read = inner.hidden(READ if model.final_norm is None else "norm input")
        if model.final_norm is not None:
            read = norm(inner, read, model.final_norm, "output_norm")
            read = dropout(inner, read, site=model.dropout_sites.output)
        if not w.run.precision.casts:  # under autocast each layer of the decoder keeps its own copy
            w.tape.hold(read, READ)
    w.follow(inner)


def _heard(w: Writer, rows: int) -> Value:
    """A spectrum as tokens: convolutions over three frames, the second with stride 2 (arXiv 2212.04356 §2.2)."""
    b, frames, hidden = w.run.micro_batch, 2 * w.run.seq, w.run.model.hidden
    x = w.tape.source("spectrum", (b, rows, frames), w.compute)
    for name, width, length in (("first", rows, frames), ("second", hidden, w.run.seq)):
        with w.tape.scope(name):
            weights = [w.parameter("weight", hidden, width, 3), w.parameter("bias", hidden)]
        x = convolution(w, x, (b, hidden, length), weights, 3 * width)
        x = activation(w, x, Activation.GELU)
    return w.tape.view(x, w.shape(hidden))


def _seen(w: Writer, pair: Pair) -> None:
    """The image tower's ends: before its first layer and after its last."""
    inner = tower(w, pair)
    assert pair.images.patches is not None, "a tower of images without images"
    with w.tape.scope("images"):
        _patched(inner, pair.images.patches)
        show(inner, pair)
    w.follow(inner)


def _patched(w: Writer, spec: Patches) -> Value:
    """An image as tokens: a convolution with stride equal to its kernel, the class token, learned positions."""
    hidden, batch = w.run.model.hidden, w.run.micro_batch
    pixels = w.tape.source("pixels", (batch, spec.channels, spec.height, spec.width), w.compute)
    with w.tape.scope("patches"):
        weights = [w.parameter("weight", hidden, spec.channels, spec.patch, spec.patch)]
        weights += [w.parameter("bias", hidden)] if spec.bias else []
    x = convolution(w, pixels, (batch, spec.count, hidden), weights, spec.channels * spec.patch**2, "pixels")
    if spec.class_token:
        first = w.parameter("class_token", hidden)
        x = w.tape.op("aten.cat.default", [x], (batch, spec.tokens, hidden), w.compute, weights=[first])
    x = w.tape.view(x, w.shape(hidden))
    positions = w.parameter("positions", spec.tokens, hidden)
    x = w.tape.op("aten.add.Tensor", [x], dtype=w.compute, passes=True, weights=[positions])
    return _closed(w, x)


def looked_up_tokens(w: Writer, *, tied: bool = False, declared: bool) -> Value:
    """Token embeddings looked up in the vocabulary's table.

    Args:
        tied: the table belongs to another region.
        declared: this region declares the table, or its stage's copy.
    """
    model, weights = w.run.model, []
    ids = w.tape.source("token ids", w.shape(), "int64", w.inside())
    if declared:
        ways, sizes = _whole_gradient(w), (model.vocab, model.hidden)
        weights.append(w.parameter(TOKENS, *sizes, split=0, tied=tied, table=True, gradient_ways=ways, module=TABLE))
    learned = not weights[0].frozen if declared else w.run.tuning is None
    return leave(w, _rows(w, ids, "token ids", weights, w.shape(model.hidden), w.inside(), grad=learned))


def _rows(
    w: Writer, ids: Value, role: str, weights: list[Weight], shape: tuple[int, ...], places: Places, *, grad: bool
) -> Value:
    """Rows of a table by their ids, which are saved."""
    kept, name = [Saved(ids, role)], "aten.embedding.default"
    return w.tape.op(name, [ids], shape, w.table_dtype, places, saves=kept, weights=weights, grad=grad)


def _whole_gradient(w: Writer) -> int:
    """Size of the gradient that DTensor makes of the full table on every rank, in shards; the shard is a view of it.

    ``torch/distributed/tensor/_ops/_embedding_ops.py``, ``embedding_dense_backward_strategy``: no rule shards rows, so
    every rank has the full gradient, of which ``Shard._split_tensor`` takes a part without a copy. nanotron
    has no DTensor: ids of other shards are masked (``parallel/tensor_parallel/nn.py``, ``TensorParallelEmbedding``).
    """
    return w.tp if w.run.layout.gathered_inputs and not w.kernels.packed_heads else 1


def _masks(w: Writer) -> None:
    """Attention masks of each sequence, with distances of each head. Kept for all layers."""
    rows, mixers = (w.run.micro_batch, 1, w.run.seq, w.run.seq), [one.attention for one in w.run.model.described]
    heads = [mixer.heads for mixer in mixers if isinstance(mixer, Attention) and mixer.alibi]
    with w.tape.scope("mask"):
        seen = w.table("seen", rows, "bool")
        if w.kernels.filled_masks:
            w.tape.hold(w.tape.op("aten.logical_not.default", [seen]), "attention mask")
        elif heads and not w.run.precision.casts:  # under autocast each layer keeps its own copy
            shape = (rows[0], heads[0], *rows[2:])
            w.tape.hold(w.tape.op("aten.masked_fill.Scalar", [seen], shape, w.compute), "attention mask")


def rotary_tables(w: Writer) -> None:
    """Cosines and sines, 1 × s × the rotated dims of a head, or half of them. Made once and kept for all layers.

    Models with positions for images in text have a table for each sequence, b × s.
    """
    rows = w.run.micro_batch if w.kernels.batched_rotary or w.run.packed else 1
    mixers = [layer.attention for layer in w.run.model.described]
    kinds = dict.fromkeys(_rotation(w, each) for each in mixers if isinstance(each, Attention | LatentAttention))
    with w.tape.scope("rotary"):
        for dim, _ in kinds:
            if dim:
                places = (("cp", 1),) if w.run.layout.cp > 1 else ()
                paired = w.kernels.paired_rotary or w.kernels.complex_rotary
                width = dim // 2 if paired else dim
                angles = w.table("rotary angles", (rows, w.run.seq, width), "float32", places)
                if w.kernels.complex_rotary:
                    w.tape.hold(w.tape.op("aten.polar.default", [angles], dtype="complex64"), "rotary table")
                    continue
                for function in ("cos", "sin"):
                    table = w.tape.op(f"aten.{function}.default", [angles])
                    w.tape.hold(table if w.kernels.fp32_rotary else cast(w, table, w.compute), "rotary table")


def _rotation(w: Writer, attention: Attention | LatentAttention) -> tuple[int, bool]:
    """Key of a layer's rotary tables: layers with equal keys share them."""
    if isinstance(attention, LatentAttention):
        return attention.rope_dim, False
    return attention.rotary_dim, w.kernels.rotary_by_window and attention.window is not None


def _looked_up(w: Writer, name: str, rows: int, ids_name: str, *, batched: bool = False) -> Value:
    """Embeddings from a small table, in most code the same for every sequence of the batch."""
    weight = w.parameter(name, rows, w.run.model.hidden, table=True)
    shape = (1, w.run.seq) if w.kernels.batch_first else (w.run.seq, 1)
    if w.kernels.batched_positions or batched or (w.run.packed and ids_name == POSITIONS):
        shape = w.shape()[0], w.shape()[1]
    stored = ids_name == POSITIONS and w.kernels.stored_positions and not w.run.packed
    ids = w.tape.source(ids_name, shape, "int64", w.outside(), free=stored)
    sizes, learned = (*shape, w.run.model.hidden), not weight.frozen
    return _rows(w, ids, ids_name, [weight], sizes, w.outside(), grad=learned)


# Contrastive image-text models: both ends of the image tower ----------------------------------------------------------


def tower(w: Writer, pair: Pair) -> Writer:
    """Writer for the image tower."""
    return replace(w, run=replace(w.run, model=pair.images, seq=pair.tokens))


def show(w: Writer, pair: Pair) -> None:
    """Project the first token of the last layer to image features. ``w`` is the `tower`'s."""
    batch = w.run.micro_batch
    first = w.tape.view(w.hidden("norm input"), (batch, pair.images.hidden))
    if pair.images.final_norm is not None:
        first = norm(w, first, pair.images.final_norm, "output_norm")
    w.tape.hold(linear(w, first, pair.width, "projection", bias=False, head=True), FEATURES)


# Sound as tokens: arXiv 2006.11477 §2 and transformers' ``models/wav2vec2/modeling_wav2vec2.py`` ---
#
# Convolutions are unsharded on every rank.


def hear(w: Writer, spec: Audio) -> Value:
    """Sound as tokens, before the norm and the dropout that end an embedding."""
    samples, hidden = spec.heard(w.run.source_seq, w.run.seq), w.run.model.hidden
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
    """Norm of each channel over its sequence; the input and two numbers a channel are saved."""
    x = cast(w, x, "float32") if w.listed else x
    out = w.tape.empty(x.shape, x.dtype, x.places, grad=True)
    statistics = [w.tape.empty(x.shape[:2], statistics_dtype(w, x)) for _ in range(2)]
    with w.tape.scope("norm"):
        weights = [w.parameter(name, x.shape[1]) for name in ("weight", "bias")]
        kept = [Saved(x, "norm input"), *(Saved(one, "norm statistics") for one in statistics)]
        w.tape.record("aten.native_group_norm.default", [x], [out, *statistics], saves=kept, weights=weights)
    return out


def _masked(w: Writer, x: Value, spec: Audio) -> Value:
    """SpecAugment masks (arXiv 1904.08779): a learned vector over some tokens, zeros over some features; masks stay."""
    weights = [w.parameter("mask", w.run.model.hidden)] if spec.mask else []
    for name, wanted, shape in (
        ("mask of tokens", spec.masked_time, (w.run.micro_batch, w.run.seq)),
        ("mask of features", spec.masked_features, (w.run.micro_batch, w.run.model.hidden)),
    ):
        if wanted:
            mask = w.tape.source(name, shape, "bool")
            used = weights if name == "mask of tokens" else []
            x = w.tape.op("aten.index_put.default", [x, mask], saves=[Saved(mask, name)], weights=used)
    return x


def _positions(w: Writer, x: Value, spec: Audio) -> Value:
    """Convolutional positions in groups of channels, with weight norm: a direction and a length a column."""
    b, s, hidden, kernel = w.run.micro_batch, w.run.seq, w.run.model.hidden, spec.position_kernel
    width = hidden // spec.position_groups
    with w.tape.scope("positions"):
        lengths = w.parameter("lengths", 1, 1, kernel)
        directions = w.parameter("directions", hidden, width, kernel)
        held = w.read(directions, "directions")
        weight = w.tape.empty(directions.shape, w.compute, grad=True)
        norms = w.tape.empty(lengths.shape, "float32")
        w.tape.record(
            "aten._weight_norm_interface.default",
            [cast(w, held, w.compute)],
            [weight, norms],
            saves=[Saved(norms, "norms of directions")],
            weights=[lengths, directions],
        )
        bias = w.parameter("bias", hidden)
        copies = weight_copies(w, [bias])
        weight = cast(w, weight, w.matmul_dtype)
        rows = cast(w, w.tape.view(x, (b, hidden, s)), w.matmul_dtype)
        out = w.tape.op(
            "aten.convolution.default",
            [rows, weight, *copies],
            (b, hidden, s + 1 - kernel % 2),
            dtype=w.matmul_dtype,
            saves=[Saved(rows, "convolution input"), Saved(weight, "convolution weight")],
            weights=[bias],
            contracted=width * kernel,
        )
        return w.tape.view(activation(w, w.tape.view(out, (b, hidden, s)), spec.activation), w.shape(hidden))
