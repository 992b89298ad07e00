"""One layer: token mixer and feed-forward block, with norms and residual sums in the model's arrangement."""

from __future__ import annotations

from jettison.formula.attention import attention, core, head_places, heads_of, projected, rotate
from jettison.formula.mlp import mlp
from jettison.formula.moe import moe
from jettison.formula.norm import norm
from jettison.formula.ops import add, cast, copy, dropout, enter, leave, linear, wider
from jettison.formula.ssm import gated_delta, selective_scan, state_space
from jettison.formula.tape import Value, Writer
from jettison.spec.model import (
    Arrangement,
    Attention,
    GatedDelta,
    LatentAttention,
    Layer,
    Mlp,
    Norm,
    SelectiveScan,
    StateSpaceDual,
)


def layer(w: Writer, x: Value, spec: Layer) -> Value:
    """The residual stream after the layer."""
    if spec.lone:
        inner = norm(w, cast(w, x, w.compute), spec.norm, "mlp_norm" if spec.attention is None else "attention_norm")
        return add(w, x, _dropped(w, _feed(w, inner, spec) if spec.attention is None else _attend(w, inner, spec)))
    match spec.arrangement:
        case Arrangement.PRE:
            normal = x if spec.plain_start else norm(w, x, spec.norm, "attention_norm")
            attended = _dropped(w, _attend(w, normal, spec))
            x = add(w, x, attended)
            if spec.cross is not None:
                normal = norm(w, x, spec.norm, "cross_attention_norm")
                x = add(w, x, _dropped(w, attention(w, normal, spec.cross, spec.norm, asks=True)))
            x = add(w, x, _dropped(w, _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec)))
            if w.kernels.named_attention:
                w.tape.name(attended)
            return x
        case Arrangement.PARALLEL:
            first = _dropped(w, _attend(w, norm(w, x, spec.norm, "attention_norm"), spec))
            second = _dropped(w, _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec))
            return add(w, add(w, second, first), x)
        case Arrangement.SHARED:
            normal = norm(w, x, spec.norm, "attention_norm")
            first, second = _dropped(w, _attend(w, normal, spec)), _dropped(w, _feed(w, normal, spec))
            return add(w, add(w, first, second), x)
        case Arrangement.POST:
            x = add(w, x, norm(w, _attend(w, x, spec), spec.norm, "attention_norm"))
            return add(w, x, norm(w, _feed(w, x, spec), spec.norm, "mlp_norm"))
        case Arrangement.SANDWICH:
            inner = _attend(w, norm(w, x, spec.norm, "attention_norm"), spec)
            x = add(w, x, norm(w, inner, spec.norm, "attention_output_norm"))
            inner = _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec)
            return add(w, x, norm(w, inner, spec.norm, "mlp_output_norm"))
        case Arrangement.OUTER:
            x = _normed_sum(w, _attend(w, x, spec), x, spec, "attention_norm", named=w.kernels.named_blocks)
            if spec.cross is not None:
                inner = attention(w, x, spec.cross, spec.norm, asks=True)
                x = _normed_sum(w, inner, x, spec, "cross_attention_norm", named=False)
            return _normed_sum(w, _feed(w, x, spec), x, spec, "mlp_norm", named=w.kernels.named_blocks)


def _normed_sum(w: Writer, inner: Value, x: Value, spec: Layer, name: str, *, named: bool) -> Value:
    inner = _dropped(w, inner)
    out = norm(w, add(w, inner, x), spec.norm, name)
    if named:
        w.tape.name(inner, x)
    return out


def _dropped(w: Writer, x: Value) -> Value:
    return dropout(w, x, site=w.run.model.dropout_sites.residual, reference="arXiv 2205.05198 §4.1, dropout mask: sbh")


def _attend(w: Writer, x: Value, spec: Layer) -> Value:
    match spec.attention:
        case Attention() as mixer:
            return attention(w, x, mixer, spec.norm)
        case LatentAttention() as mixer:
            return latent_attention(w, x, mixer, spec.norm)
        case GatedDelta() as mixer:
            return gated_delta(w, x, mixer)
        case StateSpaceDual() as mixer:
            return state_space(w, x, mixer)
        case SelectiveScan() as mixer:
            return selective_scan(w, x, mixer, spec.norm)
        case _:
            raise AssertionError(f"no formula for {spec.attention}")


def _feed(w: Writer, x: Value, spec: Layer) -> Value:
    assert spec.mlp is not None, "a layer without a feed-forward block"
    return mlp(w, x, spec.mlp) if isinstance(spec.mlp, Mlp) else moe(w, x, spec.mlp)


# latent ---------------------------------------------------------------------------------------------------------------
#
# Multi-head latent attention: queries, keys and values pass through a low rank, positions in separate dims.
# DeepSeek-V2 (arXiv 2405.04434 §2.1). a heads · r_q, r_kv ranks · n, p, v dims of a head: without positions, with
# positions, of the value. Training expands keys and values for every head; the latent form of decoding is another
# program. A fused kernel on CUDA is taken to accept keys that are wider than values, as FlashAttention-3 and cuDNN do;
# PyTorch's for the CPU does not, and its scaled_dot_product_attention falls back.
#
# Tensor parallelism as in Megatron-LM: down projections are unsharded on every device and work on the sequence
# shard; up projections are split by heads, with the entry of any column-parallel linear layer.


REFERENCE = "arXiv 2405.04434 §2.1"


def latent_attention(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> Value:
    """The attention block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope("attention"):
        q = _query(w, x, spec, norm_spec)
        k, v = _key_value(w, x, spec, norm_spec)
        expanded = Attention(heads=spec.heads, kv_heads=spec.heads, head_dim=spec.query_dim)
        context = core(w, q, k, v, expanded, joined=not w.kernels.fused_rotary)
        return leave(w, projected(w, context, bias=spec.bias, reference=f"{REFERENCE}, eq. 19"))


def _query(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> Value:
    """Queries, b × a × s × (n + p)."""
    if spec.query_rank is not None:
        down = linear(w, x, spec.query_rank, "query_down", bias=spec.bias, reference=f"{REFERENCE}, eq. 12")
        x = norm(w, down, norm_spec, "query_norm")
    q = _up(w, x, spec.heads, spec.query_dim, "query", f"{REFERENCE}, eq. 13")
    plain, turning = (w.tape.view(q, (*q.shape[:-1], width)) for width in (spec.nope_dim, spec.rope_dim))
    turned = rotate(w, turning, spec.rope_dim)
    return w.tape.op("aten.cat.default", [plain, turned], q.shape, wider(plain, turned))


def _up(w: Writer, x: Value, heads: int, width: int, name: str, reference: str) -> Value:
    """Heads of a latent tensor, from all of the sequence."""
    whole, kept = enter(w, x)
    more = {"bias": False, "split": "column", "keeps": kept, "reference": reference}
    return heads_of(w, linear(w, whole, heads * width, name, **more), heads, width)  # type: ignore[arg-type]


def _key_value(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> tuple[Value, Value]:
    """Keys, b × a × s × (n + p), and values, b × a × s × v. All heads share the part of a key with positions."""
    joint = linear(
        w, x, spec.kv_rank + spec.rope_dim, "key_value_down", bias=spec.bias, reference=f"{REFERENCE}, eq. 9 and 15"
    )
    latent, turning = (w.tape.view(joint, (*joint.shape[:-1], width)) for width in (spec.kv_rank, spec.rope_dim))
    latent = norm(w, latent, norm_spec, "key_value_norm")
    width, reference = spec.nope_dim + spec.value_dim, f"{REFERENCE}, eq. 10 and 11"
    expanded = _up(w, latent, spec.heads, width, "key_value", reference)
    plain, v = (w.tape.view(expanded, (*expanded.shape[:-1], width)) for width in (spec.nope_dim, spec.value_dim))
    shared, _ = enter(w, turning)
    one_head = (w.run.micro_batch, 1, w.run.seq, spec.rope_dim)
    places = tuple(p for p in head_places(w) if p[0] != "tp")
    turned = rotate(w, w.tape.view(shared, one_head, places), spec.rope_dim)
    key_shape = (*expanded.shape[:-1], spec.query_dim)
    k = w.tape.op("aten.cat.default", [plain, turned], key_shape, wider(plain, turned), expanded.places)
    # A saved v would keep the expanded tensor of which it is a view, so Megatron-LM copies it.
    return k, copy(w, v) if w.kernels.fused_rotary else v
