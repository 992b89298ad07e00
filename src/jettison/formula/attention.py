"""Self-attention: projections, rotary positions, and the attention core, written out or as one kernel.

a heads · k key-value heads · d head dim. q, k and v are b × heads × s × d; tp shards the heads, cp the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from jettison.formula.norm import norm
from jettison.formula.ops import (
    add,
    batched_matmul,
    cast,
    copy,
    dropout,
    enter,
    for_matmul,
    leave,
    linear,
    multiply,
    name_given,
    scale,
)
from jettison.formula.tape import GATHER, SCATTER, Collective, Places, Saved, Value, Writer
from jettison.ledger.program import Anchor
from jettison.spec.kernels import AttentionKernel, CpCommType, Device, Documents
from jettison.spec.model import Attention, Biases, Norm, NormKind, QkNorm

HEADS, ROWS = 1, 2
"""Dims of q, k, v and of the scores."""
READ = "encoder output"
CORE = "arXiv 2205.05198 §4.1, attention core"
_LENGTH = Norm(kind=NormKind.RMS, weight=False)


def attention(w: Writer, x: Value, spec: Attention, norm_spec: Norm, *, asks: bool = False) -> Value:
    """The attention block, from the normed residual stream to what is added to it (without its dropout).

    Args:
        asks: cross-attention: keys and values are projections of the encoder's output, which no layer pays for.
    """
    with w.tape.scope("cross_attention" if asks else "attention"):
        whole, kept = enter(w, x)
        gate: Value | None = None
        if asks:
            q, k, v = _ask(w, whole, kept, spec)
        else:
            q, k, v, gate = _project(w, whole, kept, spec, norm_spec)
        if w.kernels.copied_heads:
            q, k, v = copy(w, scale(w, q)), copy(w, k), copy(w, v)
        if spec.rotary_dim and not w.kernels.packed_heads:
            given = q, k
            q, k = (rotate(w, x, spec.rotary_dim, name) for x, name in ((q, "query"), (k, "key")))
            if not w.kernels.fused_rotary:  # `apply_rotary_pos_emb` keeps references to both until it returns
                w.tape.name(*given)
        if spec.qk_norm is QkNorm.HEAD and w.kernels.norms_after_rotary:
            q, k = (norm(w, x, norm_spec, f"{name}_norm") for x, name in ((q, "query"), (k, "key")))
        if spec.qk_norm is QkNorm.LENGTH:
            q, k = (norm(w, x, _LENGTH, f"{name}_norm") for x, name in ((q, "query"), (k, "key")))
        if spec.scaled_queries:
            q = _scaled(w, q)
        joined = bool(spec.rotary_dim) and w.kernels.concatenated_rotary and not w.kernels.fused_rotary
        joined = joined or w.kernels.copied_heads
        joined = joined or (w.kernels.packed_heads and w.run.micro_batch > 1)
        context = core(w, q, k, v, spec, joined=joined)
        if gate is not None:
            gate = copy(w, gate)  # gates and queries are interleaved
            opened = w.tape.op("aten.sigmoid.default", [gate], keeps="attention gate")
            context = multiply(w, context, opened, ("attention output", "attention gate"))
        out = projected(w, context, bias=spec.out_bias, reference="arXiv 2205.05198 §4.1, linear projection: 2sbh")
        # modeling_llama.py, LlamaAttention.forward: query_states, key_states, value_states
        if w.kernels.model_code:
            w.tape.name(q, k, v)
        out = leave(w, out)
        name_given(w, x, whole)
        return out


def projected(w: Writer, context: Value, *, bias: bool, reference: str) -> Value:
    """Output projection of attention, partial sums over tp."""
    more = {"split": "row", "role": "projection input", "reference": reference, "original": True}
    return linear(w, context, w.run.model.hidden, "out", bias=bias, **more)  # type: ignore[arg-type]


def head_places(w: Writer) -> Places:
    """Placement of q, k and v."""
    places = [("tp", HEADS)] if w.tp > 1 else []
    places += [("cp", ROWS)] if w.run.layout.cp > 1 else []
    return tuple(sorted(places))


def heads_of(w: Writer, x: Value, heads: int, head_dim: int, seq: int | None = None) -> Value:
    """View s and the features of a projection as heads."""
    rows = w.run.seq if seq is None else seq
    return w.tape.view(x, (w.run.micro_batch, heads, rows, head_dim), head_places(w))


def _ask(w: Writer, x: Value, kept: Value, spec: Attention) -> tuple[Value, Value, Value]:
    """Queries from the decoder, keys and values from the encoder's output."""
    length, model = w.run.source_seq, w.run.model
    b, d = w.run.micro_batch, spec.head_dim
    shape = (b, length, model.hidden) if w.kernels.batch_first else (length, b, model.hidden)
    read = w.tape.source(READ, shape, w.compute, w.outside(), grad=True, free=True)
    whole, kept_of_it = enter(w, read)
    q = linear(w, x, spec.heads * d, "query", bias=spec.qkv_bias, split="column", keeps=kept)
    k, v = (
        linear(w, whole, spec.kv_heads * d, name, bias=bias, split="column", keeps=kept_of_it, role=READ)
        for name, bias in (("key", spec.qkv_bias and spec.key_bias), ("value", spec.qkv_bias))
    )
    return heads_of(w, q, spec.heads, d), *(heads_of(w, y, spec.kv_heads, d, length) for y in (k, v))  # type: ignore[return-value]


def _project(
    w: Writer, x: Value, kept: Value, spec: Attention, norm_spec: Norm
) -> tuple[Value, Value, Value, Value | None]:
    """Queries, keys, values, and the gate of the output, if there is one."""
    d, more = spec.head_dim, {"split": "column", "keeps": kept}
    reference = "arXiv 2205.05198 §4.1, shared input of Q, K and V: 2sbh"
    names, heads = ("query", "key", "value"), (spec.heads, spec.kv_heads, spec.kv_heads)
    widths = ((2 if spec.gated else 1) * spec.heads * d, spec.kv_heads * d, spec.kv_heads * d)
    gates: list[Value] = []

    def of_heads(x: Value, number: int) -> Value:
        """View as heads, with QK norm where the model has it."""
        if number == 0 and spec.gated:
            gates.append(w.tape.view(x, (*x.shape[:-1], spec.heads * d)))
        if number < 2 and spec.qk_norm is QkNorm.WIDTH:
            x = norm(w, x, norm_spec, f"{names[number]}_norm", split=True)
        x = heads_of(w, x, heads[number], d)
        if number < 2 and spec.qk_norm is QkNorm.HEAD and not w.kernels.norms_after_rotary:
            x = norm(w, x, norm_spec, f"{names[number]}_norm")
        if number < 2 and spec.qk_norm is QkNorm.APIECE:
            x = norm(w, x, replace(norm_spec, bias=False), f"{names[number]}_norm", apiece=True)
        return x

    if spec.fused_qkv or w.kernels.fused_projections or w.kernels.joint_qkv:
        more["parts"] = tuple(zip(names, widths, strict=True)) if w.kernels.joint_qkv else ()
        joint = linear(w, x, sum(widths), "qkv", bias=spec.qkv_bias, reference=reference, **more)  # type: ignore[arg-type]
        joint = _clipped(w, joint) if spec.clipped else joint
        if w.kernels.packed_heads:
            return *packed_heads(w, joint, spec), None
        if w.kernels.split_projections:
            parts = w.tape.split(joint, widths)
        else:
            parts = [w.tape.view(joint, (*joint.shape[:-1], width)) for width in widths]
        q, k, v = (of_heads(part, number) for number, part in enumerate(parts))
    else:
        biases = (spec.qkv_bias, spec.qkv_bias and spec.key_bias, spec.qkv_bias)
        parts, inline = [], w.kernels.inline_norms and not spec.clipped
        for number, (name, width, bias) in enumerate(zip(names, widths, biases, strict=True)):
            part = linear(w, x, width, name, bias=bias, reference=reference, **more)  # type: ignore[arg-type]
            parts.append(of_heads(part, number) if inline else part)
        if not inline:
            parts = [_clipped(w, part) for part in parts] if spec.clipped else parts
            parts = [of_heads(part, number) for number, part in enumerate(parts)]
        q, k, v = parts
    gate = gates[0] if gates else None
    if w.kernels.indexed_kv and spec.kv_heads < spec.heads:
        k, v = (_indexed(w, x, spec) for x in (k, v))
    return q, k, v, gate


def _indexed(w: Writer, x: Value, spec: Attention) -> Value:
    """Keys or values expanded to all query heads by an index tensor, which copies them."""
    number = w.tape.op("aten.lift_fresh.default", [w.table("index in the group", (1,), "int64")], grad=False)
    x = w.tape.op("aten.index.Tensor", [x, number], saves=[Saved(number, "index in the group")])
    return x if spec.kv_heads == 1 else _repeat(w, x, spec.heads)


def _scaled(w: Writer, q: Value) -> Value:
    """Queries times a factor of their position, which each block computes itself."""
    positions = w.table("positions", (w.run.seq,), "float32")
    dtype = "float32" if w.kernels.fp32_position_scales else q.dtype
    factor = w.tape.op("aten.log1p.default", [positions], (w.run.seq, 1), dtype)
    return cast(w, multiply(w, q, factor, ("", "factor of positions"), dtype), q.dtype)


def _clipped(w: Writer, x: Value) -> Value:
    """Values clamped to a bound; backward recomputes the mask from the input."""
    return w.tape.op("aten.clamp.default", [x], saves=[Saved(x, "clipped projection")])


def core(w: Writer, q: Value, k: Value, v: Value, spec: Attention, *, joined: bool = False) -> Value:
    """softmax(q k^T) v, as b × s × (heads d).

    Args:
        joined: q comes out of a concatenation and has heads outermost in memory; a fused kernel's output follows it.
    """
    added = None if spec.biases is Biases.NONE else made_biases(w, spec, q.shape[ROWS], k.shape[ROWS])
    masked = added is not None or has_mask_tensor(w, spec)
    fused = w.kernels.attention is AttentionKernel.FLASH
    added = as_mask(w, spec, added) if fused and added is not None else added
    lone = w.kernels.indexed_kv and k.shape[HEADS] < q.shape[HEADS]  # never grouped by a fused kernel
    grouped = k.shape[-1] == v.shape[-1] <= 256  # which fused kernels can share among query heads
    apart = not fused or (masked and not lone) or w.kernels.always_repeat_kv or not grouped
    if w.kernels.repeat_kv and apart:
        k, v = (_repeat(w, x, spec.heads) for x in (k, v))
    repeated = (k, v) if w.kernels.model_code else ()
    shape, places = w.shape(spec.heads * v.shape[-1]), w.on_tp(2)
    if not fused:
        out = eager(w, q, k, v, spec, added, joined=joined)
    elif written := lone or _falls_back(w, q, v, added):
        out = written_out(w, q, k, v, spec, added)
    else:
        q, k, v, back = _as_kernels_take_them(w, q, k, v)
        out = flash(w, q, k, v, masked=masked, sinks=spec.sinks, alibi=spec.alibi, added=added)
        out = copy(w, out) if back else out
    if repeated:  # modeling_llama.py, eager_attention_forward: key_states, value_states
        w.tape.name(*repeated)
    copied = (not fused or written or joined) and out.local_shape[HEADS] > 1
    return copy(w, out, shape, places) if copied else w.tape.view(out, shape, places)


def _as_kernels_take_them(w: Writer, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value, bool]:
    """Query, key and value in the layout of a fused kernel, and whether its output is copied back.

    A fused QKV output is passed as views if heads of all three follow each other. If keys are rotated and values are
    not, or a group of heads shares keys, strides or offsets differ: TransformerEngine makes all three contiguous
    (``utils.py``, ``get_qkv_layout``), and the fused QKV output is freed. The other copies:

    ``transformer_engine/pytorch/attention/dot_product_attention/``: in ``backends.py``, ``FlashAttention.forward``,
    ``x.transpose(0, 1).contiguous()`` of each, and ``output.contiguous()``; in ``context_parallel.py``,
    ``AttnFuncWithCPAndKVP2P.forward``, ``p2p_comm_buffers[0] = torch.cat((k.view(-1), v.view(-1)))``, of which the last
    is saved, and in ``AttnFuncWithCPAndQKVOA2A.forward`` what ``flash_attn_a2a_communicate`` makes of q, k and v, and
    of the output on the way back.
    """
    apart = k.storage != v.storage or q.local_shape[HEADS] != k.local_shape[HEADS]
    if w.kernels.fused_projections and apart:
        q, k, v = (x if x.storage == x.index else copy(w, x) for x in (q, k, v))
    exchange = w.kernels.cp_comm_type if w.run.layout.cp > 1 else CpCommType.RING
    if exchange is CpCommType.A2A:
        return copy(w, q), copy(w, k), copy(w, v), True
    back = w.kernels.copied_attention and w.run.micro_batch > 1  # with one sequence, b × s and s × b are the same
    if w.kernels.copied_attention:
        q, k, v = (copy(w, x) if back or x.storage != x.index else x for x in (q, k, v))
    if exchange is CpCommType.P2P:
        k, v = (copy(w, x) for x in (k, v))  # two halves of one buffer
    return q, k, v, back


def _falls_back(w: Writer, q: Value, v: Value, added: Value | None) -> bool:
    """Whether sdpa falls back to its math path: on CPU for dropout, values of other widths, or trained masks."""
    dropped = w.run.model.dropout_sites.attention and w.run.dropout > 0
    learned = added is not None and added.grad
    return w.kernels.device is Device.CPU and (dropped or learned or q.shape[-1] != v.shape[-1])


def _repeat(w: Writer, x: Value, heads: int) -> Value:
    """Key-value heads copied so that every query head has its own. A single head is expanded as a view."""
    if x.shape[HEADS] == heads:
        return x
    shape = (x.shape[0], heads, *x.shape[2:])
    return w.tape.view(x, shape) if x.shape[HEADS] == 1 else copy(w, x, shape)


def flash(
    w: Writer,
    q: Value,
    k: Value,
    v: Value,
    *,
    masked: bool = False,
    sinks: bool = False,
    alibi: bool = False,
    added: Value | None = None,
) -> Value:
    """One kernel (arXiv 2205.14135): q, k, v, the output and a log-sum-exp a row are saved; scores never exist.

    Args:
        masked: the kernel reads an additive mask, b × 1 × s × s, and saves it.
    """
    places = head_places(w)
    q, k, v = (for_matmul(w, x) for x in (q, k, v))
    shape = (*q.shape[:-1], v.shape[-1])
    out = w.tape.empty(shape, q.dtype, places, grad=q.grad or k.grad or v.grad)
    rows = w.tape.empty(q.shape[:-1], "float32", places)
    keys = k.shape[ROWS]
    seen = w.run.packed if w.run.packed and not masked else keys  # keys that each row attends to
    local = out.local_shape
    flops = 2 * local[0] * local[1] * local[2] * seen * (q.shape[-1] + v.shape[-1])
    reference = "arXiv 2205.14135, Algorithm 2"
    names = ("attention query", "attention key", "attention value")
    kept = [Saved(x, name, reference) for x, name in zip((q, k, v), names, strict=True)]
    kept += [Saved(out, "attention output", reference), Saved(rows, "attention statistics", reference)]
    inputs, passing = [q, k, v], 0
    if w.run.layout.cp > 1 and w.kernels.cp_comm_type is CpCommType.GATHER and not masked:
        gathered, passing = _gathered(w, q, k, v)
        inputs += gathered
    if masked:
        inputs.append(_mask_tensor(w, q, keys, alibi=alibi) if added is None else added)
        kept.append(Saved(inputs[-1], "attention mask"))
    kept += [Saved(bounds, "document bounds") for bounds in document_bounds(w)]
    w.tape.record(
        "aten._scaled_dot_product_flash_attention.default",
        inputs,
        [out, rows],
        saves=kept,
        flops=flops,
        # the kernel makes the biases' gradient for each sequence of a batch before they are summed
        workspace=(q.local_shape[0] * added.nbytes if added is not None and added.grad else 0) + passing,
        weights=[w.parameter("sinks", q.shape[HEADS], split=0)] if sinks else [],
    )
    return out


def _gathered(w: Writer, q: Value, k: Value, v: Value) -> tuple[list[Value], int]:
    """Keys and values all-gathered over cp, which nothing saves, and the workspace of the backward.

    ``_CausalAttention`` of `parallel.context_parallel`: each is all-gathered and put in order. Forward works on two
    pieces of rows and joins them. Backward all-gathers both again; the last rows' gradients cover as many keys and
    values (rank 0, whose last piece is the end of the sequence), the first rows' one piece of 2c. They are summed;
    keys' gradients are stacked in the ranks' order, scattered and joined, then values'.
    """
    found = []
    for x in (k, v):
        places = tuple(p for p in x.places if p[0] != "cp")
        stacked = w.tape.op(f"c10d.{GATHER}", [x], places=places, grad=False)
        found.append(w.tape.op("aten.cat.default", [stacked], grad=False))
        w.tape.collectives.append(Collective(GATHER, "cp", stacked.nbytes, backward=False, step=len(w.tape.steps)))
        for kind in (GATHER, SCATTER):
            w.tape.collectives.append(Collective(kind, "cp", stacked.nbytes, backward=True, step=len(w.tape.steps)))
    found.append(w.tape.op("aten.empty.memory_format", [q], grad=False))
    whole, own = sum(x.nbytes for x in found[:2]), k.nbytes + v.nbytes
    working = 2 * whole + q.nbytes + own // 2
    scattering = whole + found[0].nbytes + q.nbytes + 2 * k.nbytes
    return found, max(working, scattering, 2 * q.nbytes + own) - q.nbytes - own


def _mask_tensor(w: Writer, q: Value, keys: int, *, alibi: bool) -> Value:
    """The additive mask of 0 and minus infinity, made from all layers' boolean mask, or the one with distances."""
    if alibi and w.kernels.always_masks:
        given = w.table(MASK, (*q.shape[:ROWS], q.shape[ROWS], keys), w.compute, head_places(w))
        return for_matmul(w, given)  # each layer's kernel casts an fp32 mask
    shape = (w.run.micro_batch, 1, q.shape[ROWS], keys)
    places = tuple(p for p in q.places if p[0] == "cp")
    given = w.table(MASK, shape, "bool", places)
    return w.tape.op("aten.where.ScalarOther", [given], dtype=q.dtype)


def written_out(w: Writer, q: Value, k: Value, v: Value, spec: Attention, added: Value | None) -> Value:
    """scaled_dot_product_attention without a fused kernel: in fp32, with scaling and grouped heads.

    ``aten/src/ATen/native/transformers/attention.cpp``, ``_scaled_dot_product_attention_math``: ``query_acc``,
    ``key_acc``, ``value_acc`` and the scaled ``q`` are referenced until it returns, and it also returns probabilities.
    """
    q, k, v = (for_matmul(w, x) for x in (q, k, v))
    places, dtype = head_places(w), q.dtype
    k, v = (x if x.shape[HEADS] == 1 else _repeat(w, x, spec.heads) for x in (k, v))
    wide = q, k, v = tuple(cast(w, x, "float32") for x in (q, k, v))
    q, k = (scale(w, x) for x in (q, k))
    scaled = q
    k, v = (_repeat(w, x, spec.heads) for x in (k, v))
    q, k = (as_batch(w, x) for x in (q, k))
    scores_shape = (*q.shape[:3], k.shape[ROWS])
    roles = ("attention query", "attention key")
    scores = batched_matmul(w, q, k, scores_shape, places, q.shape[-1], roles, dtype="float32", inner=True)
    scores = _mask(w, scores, spec) if added is None else add(w, scores, added)
    seen = _softmax(w, scores, "float32", spec, "aten._safe_softmax.default")
    seen = dropout(w, seen, site=w.run.model.dropout_sites.attention)
    roles = ("attention probabilities", "attention value")
    shape = (*q.shape[:3], v.shape[-1])
    made = batched_matmul(w, seen, as_batch(w, v), shape, places, k.shape[ROWS], roles, dtype="float32", inner=True)
    out = cast(w, made, dtype)
    returned = [seen] if seen.dtype == dtype else [w.tape.op("aten._to_copy.default", [seen], dtype=dtype, grad=False)]
    w.tape.name(*wide, scaled, made, *returned)
    return out


def eager(
    w: Writer, q: Value, k: Value, v: Value, spec: Attention, added: Value | None, *, joined: bool = False
) -> Value:
    """Scores, softmax and dropout as tensors: 2as^2b for the softmax, as^2b for the mask, 2as^2b for its result.

    Matmuls of b × heads × s × d tensors run as batched matmuls; torch copies operands without a single batch stride.

    Args:
        joined: q and k come out of a concatenation, see `core`.
    """
    scores_shape = (*q.shape[:3], k.shape[ROWS])
    places = head_places(w)
    if w.run.layout.cp > 1:  # keys of all ranks
        whole = tuple(p for p in k.places if p[0] != "cp")
        k, v = (w.tape.collective(GATHER, "cp", x, whole, backward=SCATTER) for x in (k, v))
    dtype = "float32" if w.kernels.fp32_scores else q.dtype
    out_dtype = v.dtype if w.kernels.fp32_scores else q.dtype
    q, k = (cast(w, x, dtype) if joined else as_batch(w, cast(w, x, dtype)) for x in (q, k))
    roles = ("attention query", "attention key")
    scores = batched_matmul(w, q, k, scores_shape, places, q.shape[-1], roles, CORE, dtype=dtype)
    if not w.kernels.fused_softmax:
        scores = scale(w, scores)
    if spec.softcap:
        tanh = w.tape.op("aten.tanh.default", [scale(w, scores)], keeps="capped scores")
        scores = scale(w, tanh)  # c * tanh(scores / c): Gemma 2
    if spec.alibi:
        scores = add(w, scores, w.table("distances", (spec.heads, 1, k.shape[ROWS]), scores.dtype, ()))
    scores = scores if added is None else add(w, scores, added)
    if not w.kernels.fused_softmax:
        scores = _mask(w, scores, spec)
    wide = "float32" if w.kernels.scores_float32 or w.listed else scores.dtype
    probabilities = _softmax(w, scores, wide, spec)
    if not w.kernels.uncast_probabilities:
        probabilities = cast(w, probabilities, out_dtype)
    probabilities = dropout(w, probabilities, site=w.run.model.dropout_sites.attention, reference=f"{CORE}: as^2b")
    roles = ("attention probabilities", "attention value")
    out_shape = (*q.shape[:3], v.shape[-1])
    return batched_matmul(w, probabilities, as_batch(w, v), out_shape, places, k.shape[ROWS], roles, CORE)


def as_batch(w: Writer, x: Value) -> Value:
    """b × heads × s × d as (b heads) × s × d: a copy, unless one stride leads from each matrix to the next."""
    batch, heads = x.local_shape[:ROWS]
    apart = w.kernels.batch_first and not w.kernels.copied_heads
    return copy(w, x) if apart and batch > 1 and heads > 1 else x


def _mask(w: Writer, scores: Value, spec: Attention) -> Value:
    """Scores with an additive mask, or with masked positions filled."""
    if w.kernels.filled_masks:
        mask = w.table(MASK, (w.run.micro_batch, 1, *scores.shape[ROWS:]), "bool")
        return w.tape.op("aten.masked_fill.Scalar", [scores, mask], saves=[Saved(mask, "attention mask")])
    there = w.run.precision.casts and (spec.causal or w.run.padding)
    dtype = w.compute if there else scores.dtype
    return add(w, scores, w.table(MASK, scores.shape[ROWS:], dtype))


def _softmax(w: Writer, scores: Value, dtype: str, spec: Attention, op: str = "aten._softmax.default") -> Value:
    """Softmax in ``dtype`` of scores cast to it. The result is saved."""
    scores = cast(w, scores, dtype)
    if spec.sinks:
        return softmax_with_sinks(w, scores, op)
    return w.tape.op(op, [scores], dtype=dtype, keeps="softmax output", reference=f"{CORE}, softmax: 2as^2b")


# Biases of scores by distance: 1 × heads × queries × keys, made once for a stack or by each layer ---------------------
#
# arXiv 1910.10683 §2.1: distances are sorted into buckets, and a table has a number for each bucket and head. In
# transformers (``models/t5/modeling_t5.py``, ``T5Attention.compute_bias``) the first layer looks all of them up and
# hands the result on; cross-attention has zeros in their place. Under ``gradient_checkpointing_enable`` they require
# a gradient (``T5Attention.forward``, ``position_bias.requires_grad``), which no fused kernel of a CPU makes.


REFERENCE = "arXiv 1910.10683 §2.1"
BIASES = "position biases"


def made_biases(w: Writer, spec: Attention, rows: int, keys: int) -> Value:
    """Biases added to scores. Biases handed on to other layers are not recomputed, since those layers keep them."""
    shape = (1, spec.heads, rows, keys)
    places = (("tp", 1),) if w.tp > 1 else ()
    dtype = w.compute if spec.buckets else w.matmul_dtype  # zeros have the dtype of queries
    if spec.biases is Biases.GIVEN:  # frozen tables require no gradient, unless the code asks for one
        learned = (spec.buckets > 0 and w.run.tuning is None) or w.kernels.learned_zeros
        return w.tape.source(BIASES, shape, dtype, places, grad=learned, free=True)
    anchor = Anchor.HANDED if spec.biases is Biases.FIRST else None
    with w.tape.scope("biases"):
        positions = w.table("positions", (keys,), "int64")
        if not spec.buckets:
            learned = w.kernels.learned_zeros
            return w.tape.op("aten.zeros.default", [positions], shape, dtype, places, anchor=anchor, grad=learned)
        buckets = w.tape.op("aten.add.Tensor", [positions], (rows, keys), grad=False)
        made = w.tape.op(
            "aten.embedding.default",
            [buckets],
            (rows, keys, spec.heads),
            w.compute,
            (("tp", 2),) if w.tp > 1 else (),
            saves=[Saved(buckets, "relative position bucket", REFERENCE)],
            weights=[w.parameter("table", spec.buckets, spec.heads, split=1)],
            anchor=anchor,
        )
    return w.tape.view(made, shape, places)


def as_mask(w: Writer, spec: Attention, added: Value) -> Value:
    """Position biases as a fused kernel takes them: heads outermost in memory, future keys masked. Zeros need no copy.

    transformers' ``integrations/sdpa_attention.py``, ``create_position_bias_mask``.
    """
    if not spec.buckets:
        return added
    if spec.causal:
        positions = w.table("positions", added.shape[-1:], "int64")
        seen = w.tape.op("aten.ge.Tensor", [positions], (1, 1, *added.shape[2:]), "bool", grad=False)
        added = w.tape.op("aten.where.self", [added, seen], saves=[Saved(seen, "attention mask")])
    return copy(w, added)


# Masks and document bounds: is a mask a tensor, and where do packed documents begin? ----------------------------------


MASK: Final = "attention mask"
"""Role of the mask that layers are given."""


def has_mask_tensor(w: Writer, spec: Attention) -> bool:
    """Whether a fused kernel needs a mask tensor. A window no longer than the sequence needs one too."""
    windowed = spec.window is not None and spec.window <= w.run.seq
    both_ways = w.kernels.bidirectional_masks and not spec.causal
    given = w.kernels.tensor_masks and (windowed or both_ways or w.run.padding or w.kernels.always_masks)
    # masking_utils.py: flash_attention_mask makes none
    return w.kernels.documents is Documents.MASK and bool(w.run.packed or given)


def document_bounds(w: Writer) -> Iterator[Value]:
    """Offsets of packed documents, and the kernel's random state, as `torch.nn.attention.varlen` keeps both.

    transformers makes bounds in each layer (``prepare_fa_kwargs_from_position_ids``), others once for all layers.
    """
    if not w.run.packed or w.kernels.documents is not Documents.VARLEN:
        return
    shape = (w.run.micro_batch * -(-w.run.seq // w.run.packed) + 1,)
    if w.kernels.model_code:
        ids = w.table("position ids", w.shape(), "int64")
        yield w.tape.op("aten.nonzero.default", [ids], shape, "int32", ())
        return
    yield w.table("document bounds", shape, "int32")
    if w.kernels.varlen_random_state:
        yield w.tape.source("random state of the kernel", (2,), "int64")


# Attention sinks: a learned logit a head takes part in the softmax and takes weight from all keys ---------------------
#
# arXiv 2309.17453 §3.3, as gpt-oss has them.


SINKS = "arXiv 2309.17453 §3.3"


def softmax_with_sinks(w: Writer, scores: Value, op: str) -> Value:
    """Probabilities of the keys alone, b × a × s × s.

    Written out, the softmax is one column wider than its scores, and so is what stays of it; the row maxima are
    subtracted by hand, and autograd keeps where they were.
    """
    weights = [w.parameter("sinks", scores.shape[HEADS], split=0)]
    if w.kernels.fused_softmax:
        return w.tape.op(op, [scores], keeps="softmax output", reference=SINKS, weights=weights)
    wider = (*scores.shape[:-1], scores.shape[-1] + 1)
    joint = w.tape.op("aten.cat.default", [scores], wider, weights=weights)
    highest = w.tape.empty((*wider[:-1], 1), joint.dtype, joint.places, grad=joint.grad)
    where = w.tape.empty(highest.shape, "int64", joint.places)
    w.tape.record("aten.max.dim", [joint], [highest, where], saves=[Saved(where, "argmax")])
    shifted = w.tape.op("aten.sub.Tensor", [joint, highest], passes=True)
    return w.tape.view(w.tape.op(op, [shifted], keeps="softmax output", reference=SINKS), scores.shape)


# What nanotron's attention makes of its joint projection --------------------------------------------------------------
#
# NOTE [ Packed heads ]
# ``src/nanotron/models/llama.py`` of nanotron (9055c66), ``CausalSelfAttention.forward``:
#
# - ``qkv_states.view(s, b, 3, a, d).permute(2, 1, 0, 3, 4).contiguous()`` copies queries, keys and values out as one
# tensor where each head has keys of its own; where heads share them, each of the three is copied by itself. -
# ``torch.cat`` joins keys and values, and ``permute(1, 2, 0, 3, 4).contiguous()`` copies them again, which are the keys
# and values that attention keeps. They are rotated in place there (``apply_rotary_emb_kv_``). -
# ``FlashRotaryEmbedding`` rotates queries where they are (flash-attn, ``layers/rotary.py``: ``apply_rotary_emb_func``
# with ``inplace=True``). So the query that attention keeps is a third of the first copy, and all of it stays. - The
# output goes back to s x b x h by ``transpose(0, 1)``. The product that reads it folds s and b into one dim, which
# takes a copy where there are several sequences; attention saves its output as well.


def packed_heads(w: Writer, joint: Value, spec: Attention) -> tuple[Value, Value, Value]:
    """Query, key and value, each b x heads x s x d, rotated."""
    d, heads, groups = spec.head_dim, spec.heads, spec.kv_heads
    widths = (heads * d, groups * d, groups * d)
    if heads == groups:
        q, k, v = w.tape.split(copy(w, joint), widths)
    else:
        q, k, v = (copy(w, each) for each in w.tape.split(joint, widths))
    tables = [w.table(f"rotary {name}", (w.run.seq, d // 2), k.dtype) for name in ("cosine", "sine")]
    joined = w.tape.op("rotary", [k, v, *tables], (w.run.micro_batch, 2 * groups, w.run.seq, d), places=head_places(w))
    k, v = (w.tape.view(joined, (w.run.micro_batch, groups, w.run.seq, d)) for _ in range(2))
    return heads_of(w, q, heads, d), k, v


# Rotary positions of queries and keys, and the tables that they read --------------------------------------------------


def rotate(w: Writer, x: Value, dim: int, whose: str = "") -> Value:
    """Rotary positions (arXiv 2104.09864) on the first ``dim`` of each head; backward needs the tables only."""
    casts = w.run.precision.casts is not None
    wide = w.kernels.fp32_rotary or (casts and not w.kernels.rotary_per_tensor)  # those tables take the dtype of keys
    dtype = "float32" if wide else x.dtype
    back = w.kernels.complex_rotary or (w.kernels.fp32_rotary and not w.kernels.fp32_scores)
    out_dtype = dtype if casts and not back else x.dtype
    cosine, sine = (_table(w, f"rotary {name}", dim, dtype, whose) for name in ("cosine", "sine"))
    if w.kernels.fused_rotary:
        return w.tape.op("rotary", [x, cosine, sine])
    part = x if dim == x.shape[-1] else w.tape.view(x, (*x.shape[:-1], dim))
    if w.kernels.half_rotary_tables:
        part, dtype = cast(w, part, "float32"), "float32"
    straight = multiply(w, part, cosine, ("", "rotary table"), dtype)
    half = w.tape.op("aten.neg.default", [part], (*part.shape[:-1], dim // 2), workspace=_still_joined(w, part) // 2)
    turned = w.tape.op("aten.cat.default", [half, part], part.shape)
    out = cast(w, add(w, straight, multiply(w, turned, sine, ("", "rotary table"), dtype)), out_dtype)
    if dim == x.shape[-1] and not w.kernels.concatenated_rotary:
        return out
    return w.tape.op("aten.cat.default", [out, x], x.shape)


def _still_joined(w: Writer, x: Value) -> int:
    """Bytes of the turned halves' joint gradient, of which the half that was not negated is a view to the end.

    ``transformers/models/llama/modeling_llama.py``, ``rotate_half``: backward goes through ``-x2`` and its slice before
    that of ``x1``, whose gradient is a piece of what ``torch.cat`` was given. Other forms have no such pair.
    """
    return 0 if w.kernels.complex_rotary or w.kernels.paired_rotary or not w.kernels.model_code else x.nbytes


def _table(w: Writer, name: str, dim: int, dtype: str, whose: str) -> Value:
    """Cosines or sines: what all layers read, or a block's own, which it makes once, or once for what it rotates."""
    if w.kernels.indexed_rotary and w.run.packed:
        return _looked_up(w, dim, whose)
    if not w.kernels.expanded_rotary or w.kernels.fused_rotary:
        return w.table(name, (w.run.seq, dim), dtype)
    key = f"{whose} {name}" if w.kernels.rotary_per_tensor else name
    if key not in w.spread:
        half = w.table(name, (w.run.seq, dim // 2), dtype)
        w.spread[key] = w.tape.op("aten.repeat_interleave.self_int", [half], (w.run.seq, dim))
    return w.spread[key]


def _looked_up(w: Writer, dim: int, whose: str) -> Value:
    """Half of the rows that positions name, b × s × d in all: a view, since cosines and sines lie side by side."""
    shape = (w.run.micro_batch, w.run.seq, dim)
    if whose not in w.spread:
        rows = w.table("rotary table", (w.run.model.max_positions, dim), "float32")
        w.spread[whose] = w.tape.op("aten.index.Tensor", [rows], shape, "float32")
    return w.tape.view(w.spread[whose], (*shape[:-1], dim // 2))
