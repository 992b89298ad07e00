"""Self-attention: projections, rotary positions, and the core between them, eager or as one kernel.

a heads · k key-value heads · d head dim. q, k and v are b × heads × s × d; tp shards the heads, cp the sequence.
"""

from __future__ import annotations

from jettison.formula.basic import add, batched_product, cast, copy, dropout, enter, leave, linear, multiply, scale
from jettison.formula.norm import norm
from jettison.formula.tape import Places, Value
from jettison.formula.writer import Writer, saved
from jettison.spec.kernels import AttentionKernel
from jettison.spec.model import Attention, Norm, QkNorm

HEADS, ROWS, KEYS = 1, 2, 3
"""Dims of q, k, v and of the scores."""
CORE = "arXiv 2205.05198 §4.1, attention core"


def attention(w: Writer, x: Value, spec: Attention, norm_spec: Norm) -> Value:
    """The whole block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope("attention"):
        whole, kept = enter(w, x)
        q, k, v = _project(w, whole, kept, spec, norm_spec)
        if spec.rotary_dim:
            q, k = (rotate(w, x, spec.rotary_dim) for x in (q, k))
        context = core(w, q, k, v, spec)
        out = linear(
            w, context, w.run.model.hidden, "out", bias=spec.out_bias, split="row", role="projection input",
            reference="arXiv 2205.05198 §4.1, linear projection: 2sbh",
        )  # fmt: skip
        return leave(w, out)


def head_places(w: Writer) -> Places:
    """Placement of q, k and v."""
    places = [("tp", HEADS)] if w.tp > 1 else []
    places += [("cp", ROWS)] if w.run.layout.cp > 1 else []
    return tuple(sorted(places))


def heads_of(w: Writer, x: Value, heads: int, head_dim: int) -> Value:
    """s and the features of a projection as heads: a view."""
    return w.tape.view(x, (w.run.micro_batch, heads, w.run.seq, head_dim), head_places(w))


def _project(w: Writer, x: Value, kept: Value, spec: Attention, norm_spec: Norm) -> tuple[Value, Value, Value]:
    d, more = spec.head_dim, {"bias": spec.qkv_bias, "split": "column", "keeps": kept}
    reference = "arXiv 2205.05198 §4.1, shared input of Q, K and V: 2sbh"
    widths = (spec.heads * d, spec.kv_heads * d, spec.kv_heads * d)
    if spec.fused_qkv:
        joint = linear(w, x, sum(widths), "qkv", reference=reference, **more)  # type: ignore[arg-type]
        parts = [w.tape.view(joint, (*joint.shape[:-1], width)) for width in widths]
    else:
        names = ("query", "key", "value")
        parts = [
            linear(w, x, width, name, reference=reference, **more)  # type: ignore[arg-type]
            for name, width in zip(names, widths, strict=True)
        ]
    q, k, v = parts
    if spec.qk_norm is QkNorm.WIDTH:
        q, k = (norm(w, x, norm_spec, f"{name}_norm", split=True) for x, name in ((q, "query"), (k, "key")))
    q, k, v = (heads_of(w, x, h, d) for x, h in ((q, spec.heads), (k, spec.kv_heads), (v, spec.kv_heads)))
    if spec.qk_norm is QkNorm.HEAD:
        q, k = (norm(w, x, norm_spec, f"{name}_norm") for x, name in ((q, "query"), (k, "key")))
    return q, k, v


def rotate(w: Writer, x: Value, dim: int) -> Value:
    """Rotary positions (arXiv 2104.09864) on the first ``dim`` of each head; backward needs the tables only."""
    cosine, sine = (w.table(f"rotary {name}", (w.run.seq, dim), x.dtype) for name in ("cosine", "sine"))
    if w.kernels.fused_rotary:
        return w.tape.op("rotary", [x, cosine, sine])
    part = x if dim == x.shape[-1] else w.tape.view(x, (*x.shape[:-1], dim))
    straight = multiply(w, part, cosine, ("", "rotary table"))
    half = w.tape.op("aten.neg.default", [part], (*part.shape[:-1], dim // 2))
    turned = w.tape.op("aten.cat.default", [half, part], part.shape)
    out = add(w, straight, multiply(w, turned, sine, ("", "rotary table")))
    if part is x:
        return out
    return w.tape.op("aten.cat.default", [out, x], x.shape)


def core(w: Writer, q: Value, k: Value, v: Value, spec: Attention) -> Value:
    """softmax(q k^T) v, as b × s × (heads d)."""
    if w.kernels.repeat_kv and w.kernels.attention is AttentionKernel.EAGER:
        k, v = (_repeat(w, x, spec.heads) for x in (k, v))
    shape, places = w.shape(spec.heads * v.shape[-1]), w.on_tp(2)
    if w.kernels.attention is AttentionKernel.FLASH:
        return w.tape.view(flash(w, q, k, v), shape, places)
    return copy(w, eager(w, q, k, v, spec), shape, places)


def _repeat(w: Writer, x: Value, heads: int) -> Value:
    """Copies of key-value heads until every query head has its own."""
    if x.shape[HEADS] == heads:
        return x
    return copy(w, x, (x.shape[0], heads, *x.shape[2:]))


def flash(w: Writer, q: Value, k: Value, v: Value) -> Value:
    """One kernel (arXiv 2205.14135): q, k, v, the output and a log-sum-exp a row stay; scores never exist."""
    places = head_places(w)
    shape = (*q.shape[:-1], v.shape[-1])
    out = w.tape.empty(shape, q.dtype, places, grad=True)
    rows = w.tape.empty(q.shape[:-1], "float32", places)
    keys = k.shape[ROWS]
    local = out.local_shape
    flops = 2 * local[0] * local[1] * local[2] * keys * (q.shape[-1] + v.shape[-1])
    reference = "arXiv 2205.14135, Algorithm 2"
    names = ("attention query", "attention key", "attention value")
    kept = [saved(x, name, reference) for x, name in zip((q, k, v), names, strict=True)]
    kept += [saved(out, "attention output", reference), saved(rows, "attention statistics", reference)]
    w.tape.record("aten._scaled_dot_product_flash_attention.default", [q, k, v], [out, rows], saves=kept, flops=flops)
    return out


def eager(w: Writer, q: Value, k: Value, v: Value, spec: Attention) -> Value:
    """Scores, softmax and dropout as tensors: 2as^2b for the softmax, as^2b for the mask, 2as^2b for its result.

    Products of b × heads × s × d tensors run as batches of matrices, for which torch copies what is no such batch.
    """
    scores_shape = (*q.shape[:3], k.shape[ROWS])
    places = head_places(w)
    if w.run.layout.cp > 1:  # every rank's rows meet all keys
        k, v = (
            w.tape.collective(
                "all_gather_into_tensor", "cp", x, tuple(p for p in x.places if p[0] != "cp"),
                backward="reduce_scatter_tensor",
            )
            for x in (k, v)
        )  # fmt: skip
    q, k = (as_batch(w, x) for x in (q, k))
    roles = ("attention query", "attention key")
    scores = batched_product(w, q, k, scores_shape, places, q.shape[-1], roles, CORE)
    scores = scale(w, scores)
    if spec.softcap:
        scores = _softcap(w, scores)
    scores = _mask(w, scores)
    probabilities = _softmax(w, scores, q.dtype)
    probabilities = dropout(w, probabilities, site=w.run.model.dropout_sites.attention, reference=f"{CORE}: as^2b")
    roles = ("attention probabilities", "attention value")
    out_shape = (*q.shape[:3], v.shape[-1])
    return batched_product(w, probabilities, as_batch(w, v), out_shape, places, k.shape[ROWS], roles, CORE)


def as_batch(w: Writer, x: Value) -> Value:
    """b × heads × s × d as (b heads) × s × d: a copy, unless heads are outermost in memory already."""
    return x if not w.kernels.batch_first else copy(w, x)


def _mask(w: Writer, scores: Value) -> Value:
    """Causal masking; one kernel with the softmax where scores stay 16-bit."""
    return (
        add(w, scores, w.table("attention mask", scores.shape[ROWS:], scores.dtype))
        if w.kernels.scores_float32
        else scores
    )


def _softcap(w: Writer, scores: Value) -> Value:
    """c * tanh(scores / c): Gemma 2."""
    scores = scale(w, scores)
    out = w.tape.empty(scores.shape, scores.dtype, scores.places, grad=True)
    w.tape.record("aten.tanh.default", [scores], [out], saves=[saved(out, "capped scores")])
    return scale(w, out)


def _softmax(w: Writer, scores: Value, dtype: str) -> Value:
    """The result stays. In fp32 it is cast back afterwards, which makes another tensor."""
    wide = "float32" if w.kernels.scores_float32 else scores.dtype
    scores = cast(w, scores, wide)
    out = w.tape.empty(scores.shape, wide, scores.places, grad=True)
    w.tape.record(
        "aten._softmax.default", [scores], [out], saves=[saved(out, "softmax output", f"{CORE}, softmax: 2as^2b")]
    )
    return cast(w, out, dtype)
