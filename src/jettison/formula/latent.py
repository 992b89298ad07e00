"""Multi-head latent attention: queries and key-values pass a low rank, and positions travel beside them.

DeepSeek-V2 (arXiv 2405.04434 §2.1). a heads · r_q, r_kv ranks · n, p, v the parts of a head: without positions, with
them, and of the value. Training expands keys and values for every head; the latent form that decoding uses is another
program. A fused kernel on CUDA is taken to accept keys that are wider than values, as FlashAttention-3 and cuDNN do;
PyTorch's for the CPU does not, and its scaled_dot_product_attention falls back.

Tensor parallelism as in Megatron-LM: what leads down to the ranks is whole on every device and works on the sequence
shard, what leads up again is split by heads and enters like any column-parallel product.
"""

from __future__ import annotations

from jettison.formula.attention import core, head_places, heads_of
from jettison.formula.basic import copy, enter, leave, linear, wider
from jettison.formula.norm import norm
from jettison.formula.rotation import rotate
from jettison.formula.tape import Value
from jettison.formula.writer import Writer
from jettison.spec.model import Attention, LatentAttention, Norm

REFERENCE = "arXiv 2405.04434 §2.1"


def latent_attention(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> Value:
    """The whole block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope("attention"):
        q = _query(w, x, spec, norm_spec)
        k, v = _key_value(w, x, spec, norm_spec)
        expanded = Attention(heads=spec.heads, kv_heads=spec.heads, head_dim=spec.query_dim)
        context = core(w, q, k, v, expanded, joined=not w.kernels.fused_rotary)
        out = linear(
            w,
            context,
            w.run.model.hidden,
            "out",
            bias=spec.bias,
            split="row",
            role="projection input",
            reference=f"{REFERENCE}, eq. 19",
            original=True,
        )
        return leave(w, out)


def _query(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> Value:
    """b × a × s × (n + p)."""
    if spec.query_rank is not None:
        down = linear(w, x, spec.query_rank, "query_down", bias=spec.bias, reference=f"{REFERENCE}, eq. 12")
        x = norm(w, down, norm_spec, "query_norm")
    whole, kept = enter(w, x)
    q = linear(
        w,
        whole,
        spec.heads * spec.query_dim,
        "query",
        bias=False,
        split="column",
        keeps=kept,
        reference=f"{REFERENCE}, eq. 13",
    )
    q = heads_of(w, q, spec.heads, spec.query_dim)
    plain, turning = (w.tape.view(q, (*q.shape[:-1], width)) for width in (spec.nope_dim, spec.rope_dim))
    turned = rotate(w, turning, spec.rope_dim)
    return w.tape.op("aten.cat.default", [plain, turned], q.shape, wider(plain, turned))


def _key_value(w: Writer, x: Value, spec: LatentAttention, norm_spec: Norm) -> tuple[Value, Value]:
    """b × a × s × (n + p), and b × a × s × v. All heads share the part of a key that has positions."""
    joint = linear(
        w, x, spec.kv_rank + spec.rope_dim, "key_value_down", bias=spec.bias, reference=f"{REFERENCE}, eq. 9 and 15"
    )
    latent, turning = (w.tape.view(joint, (*joint.shape[:-1], width)) for width in (spec.kv_rank, spec.rope_dim))
    whole, kept = enter(w, norm(w, latent, norm_spec, "key_value_norm"))
    width = spec.nope_dim + spec.value_dim
    expanded = linear(
        w,
        whole,
        spec.heads * width,
        "key_value",
        bias=False,
        split="column",
        keeps=kept,
        reference=f"{REFERENCE}, eq. 10 and 11",
    )
    expanded = heads_of(w, expanded, spec.heads, width)
    plain, v = (w.tape.view(expanded, (*expanded.shape[:-1], width)) for width in (spec.nope_dim, spec.value_dim))
    shared, _ = enter(w, turning)
    one_head = (w.run.micro_batch, 1, w.run.seq, spec.rope_dim)
    places = tuple(p for p in head_places(w) if p[0] != "tp")
    turned = rotate(w, w.tape.view(shared, one_head, places), spec.rope_dim)
    key_shape = (*expanded.shape[:-1], spec.query_dim)
    k = w.tape.op("aten.cat.default", [plain, turned], key_shape, wider(plain, turned), expanded.places)
    # Fused attention that keeps v would keep all of the expanded tensor that v is a part of. Megatron-LM copies it.
    return k, copy(w, v) if w.kernels.fused_rotary else v
