"""What stands before the first layer: token, position and segment embeddings; patches of images, frames of sound.

NOTE [ Two stacks ]
An encoder's layers come first in a model, then those of the decoder that asks it; each is a region as any other, at its
own length. What is before the first layer and what is between the two stacks belongs to the region of the embedding, as
in a recorded model: the input of the norm between them and its result are held as long as the embedding's own. Layers
of the decoder read that result, and none pays for it.
"""

from __future__ import annotations

from dataclasses import replace

from jettison.formula.attention import READ
from jettison.formula.basic import add, cast, convolution, dropout, scale
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.pair import show, tower
from jettison.formula.sound import hear
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.inputs import Patches, Source
from jettison.spec.kernels import AttentionKernel
from jettison.spec.model import Activation, Attention, LatentAttention, Pair

POSITIONS, TOKENS = "position ids", "tokens"


def embedding(w: Writer) -> Value:
    """The residual stream as the first layer is given it. The vocabulary is sharded over tp."""
    model = w.run.model
    if not (w.kernels.fused_rotary or w.kernels.spread_rotary or w.kernels.looked_up_rotary):
        rotary_tables(w)
    if model.patches is not None:
        return _patched(w, model.patches)
    if model.waves is not None:
        return _closed(w, hear(w, model.waves))
    if model.pair is not None:
        _seen(w, model.pair)
    if model.source is not None:
        read_source(w, model.source)
    eager = w.kernels.attention is AttentionKernel.EAGER
    if (w.kernels.filled_masks and eager) or (w.kernels.made_masks and not eager):
        _masks(w)
    if w.run.padding and any(layer.scan is not None for layer in model.described):
        w.tape.hold(w.tape.source("token mask", w.shape(), "int64"), "token mask")
    x = _scaled_tokens(w)
    if model.token_types:
        x = add(w, x, _looked_up(w, "segments", model.token_types, "segment ids"))
    if model.learned_positions:
        x = add(w, x, _looked_up(w, "positions", model.position_rows or model.max_positions, POSITIONS))
    with w.tape.scope("beside"):
        for name, shape in model.beside:
            w.parameter(name, *shape)
    return _closed(w, x)


def _scaled_tokens(w: Writer, *, declared: bool = True) -> Value:
    x = looked_up_tokens(w, declared=declared)
    return scale(w, x) if w.run.model.embedding_scale else x


def _closed(w: Writer, x: Value) -> Value:
    """With the embedding's norm and dropout."""
    model = w.run.model
    if model.embedding_norm is not None:
        x = norm(w, x, model.embedding_norm, "norm")
    x = dropout(w, x, site=model.dropout_sites.embedding, reference="arXiv 2205.05198 §4.3: sbh")
    return cast(w, x, w.stream)


def read_source(w: Writer, spec: Source) -> None:
    """What an encoder is given, and what it returns: NOTE [ Two stacks ]."""
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
        if not w.run.precision.casts:  # under autocast each layer of the decoder keeps copies of its own
            w.tape.hold(read, READ)
    w.follow(inner)


def _heard(w: Writer, rows: int) -> Value:
    """A spectrum as tokens: convolutions over three frames, the second for every other one (arXiv 2212.04356 §2.2)."""
    b, frames, hidden = w.run.micro_batch, 2 * w.run.seq, w.run.model.hidden
    x = w.tape.source("spectrum", (b, rows, frames), w.compute)
    for name, width, length in (("first", rows, frames), ("second", hidden, w.run.seq)):
        with w.tape.scope(name):
            weights = [w.parameter("weight", hidden, width, 3), w.parameter("bias", hidden)]
        x = convolution(w, x, (b, hidden, length), weights, 3 * width)
        x = activation(w, x, Activation.GELU)
    return w.tape.view(x, w.shape(hidden))


def _seen(w: Writer, pair: Pair) -> None:
    """Images, before the first layer of their tower and after the last."""
    inner = tower(w, pair)
    assert pair.images.patches is not None, "a tower of images without images"
    with w.tape.scope("images"):
        _patched(inner, pair.images.patches)
        show(inner, pair)
    w.follow(inner)


def _patched(w: Writer, spec: Patches) -> Value:
    """An image as tokens: a convolution whose window moves by its own width, the class token, learned positions."""
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


def looked_up_tokens(w: Writer, *, tied: bool = False, declared: bool = True) -> Value:
    """Rows of the vocabulary's table.

    Args:
        tied: the table is another region's.
        declared: it is this region that has the table, or the copy that its stage has.
    """
    model, layout = w.run.model, w.run.layout
    ids = w.tape.source("token ids", w.shape(), "int64", w.inside())
    table = w.parameter(TOKENS, model.vocab, model.hidden, split=0, tied=tied) if declared else None
    weights = [] if table is None else [w.tape.declare(replace(table, gradient_ways=_whole_gradient(w)))]
    x = w.tape.op(
        "aten.embedding.default",
        [ids],
        w.shape(model.hidden),
        w.compute,
        w.inside(),
        saves=[saved(ids, "token ids")],
        weights=weights,
        grad=not weights or not weights[0].frozen,
    )
    if w.tp > 1:
        kind = "reduce_scatter_tensor" if layout.sp else "all_reduce"
        back = "all_gather_into_tensor" if layout.sp else None
        x = w.tape.collective(kind, "tp", x, w.outside(), backward=back)
    return x


def _whole_gradient(w: Writer) -> int:
    """DTensor makes a sharded table's gradient as large as the table, and has its shard as a view of that.

    ``torch/distributed/tensor/_ops/_embedding_ops.py``, ``embedding_dense_backward_strategy``: there is no rule that
    shards rows, so every rank has the whole, of which ``Shard._split_tensor`` takes a part without a copy. nanotron
    has no DTensor: ids of other shards are masked (``parallel/tensor_parallel/nn.py``, ``TensorParallelEmbedding``).
    """
    return w.tp if w.run.layout.gathered_inputs and not w.kernels.packed_heads else 1


def _masks(w: Writer) -> None:
    """Which keys a query may not see, for each sequence; with distances, for each head. Kept for all layers."""
    rows, heads = (
        (w.run.micro_batch, 1, w.run.seq, w.run.seq),
        [
            layer.heads
            for layer in w.run.model.described
            if isinstance(layer.attention, Attention) and layer.attention.alibi
        ],
    )
    with w.tape.scope("mask"):
        seen = w.table("seen", rows, "bool")
        if w.kernels.filled_masks:
            w.tape.hold(w.tape.op("aten.logical_not.default", [seen]), "attention mask")
        elif heads and not w.run.precision.casts:  # each layer keeps a copy of its own
            shape = (rows[0], heads[0], *rows[2:])
            w.tape.hold(w.tape.op("aten.masked_fill.Scalar", [seen], shape, w.compute), "attention mask")


def rotary_tables(w: Writer) -> None:
    """Cosines and sines, 1 × s × what is rotated of a head, or half of it. Made once and kept for all layers.

    Code that places text among images has a table for each sequence, b × s.
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
                    w.tape.hold(table if w.kernels.wide_rotary else cast(w, table, w.compute), "rotary table")


def _rotation(w: Writer, attention: Attention | LatentAttention) -> tuple[int, bool]:
    """Layers for which this is equal share their tables."""
    if isinstance(attention, LatentAttention):
        return attention.rope_dim, False
    return attention.rotary_dim, w.kernels.rotary_by_window and attention.window is not None


def _looked_up(w: Writer, name: str, rows: int, ids_name: str, *, batched: bool = False) -> Value:
    """Rows of a small table, in most code the same for every sequence of the batch."""
    weight = w.parameter(name, rows, w.run.model.hidden)
    shape = (1, w.run.seq) if w.kernels.batch_first else (w.run.seq, 1)
    if w.kernels.batched_positions or batched or (w.run.packed and ids_name == POSITIONS):
        shape = w.shape()[0], w.shape()[1]
    stored = ids_name == POSITIONS and w.kernels.stored_positions and not w.run.packed
    ids = w.tape.source(ids_name, shape, "int64", w.outside(), free=stored)
    return w.tape.op(
        "aten.embedding.default",
        [ids],
        (*shape, w.run.model.hidden),
        w.compute,
        w.outside(),
        saves=[saved(ids, ids_name)],
        weights=[weight],
        grad=not weight.frozen,
    )
