"""The blocks of a layer from a Hugging Face ``config.json``: attention, feed-forward block, experts.

Sizes have to be in the file; the rest falls back on the architecture's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, Final

from jettison.errors import UsageError
from jettison.spec.config_fields import TRACE, ConfigFields
from jettison.spec.model import Attention, LatentAttention, Mlp, Moe
from jettison.spec.two_stacks import biases

_OUT_BIAS: Final = "attention_out_bias"
_ROTARY_DIM: Final = "rotary_dim"


def attention_of(fields: ConfigFields) -> Attention:
    family = fields.family
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = fields.optional_size("head_dim")
    if head_dim is None and hidden % heads and not (family.floored_heads and heads <= hidden):
        expected = f"a divisor of the hidden size {hidden}" + (", or a head_dim" if fields.knows("head_dim") else "")
        raise fields.error("num_attention_heads", expected)
    head_dim = hidden // heads if head_dim is None else head_dim
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=family.qkv_bias or fields.flag("attention_bias"),
        key_bias=family.key_bias,
        out_bias=family.out_bias or fields.flag(_OUT_BIAS if fields.knows(_OUT_BIAS) else "attention_bias"),
        fused_qkv=family.fused_qkv,
        qk_norm=family.qk_norm,
        rotary_dim=_rotated(fields, head_dim) if family.rotary and not family.alibi else 0,
        softcap=bool(fields.number("attn_logit_softcapping")),
        sinks=family.sinks,
        alibi=family.alibi,
        clipped=bool(fields.number("clip_qkv")),
        gated=family.gated_attention,
        causal=_causal(fields),
        **biases(fields),
    )


def _causal(fields: ConfigFields) -> bool:
    if fields.family.bidirectional:
        return False
    if fields.knows("is_decoder"):
        return fields.flag("is_decoder")
    return not fields.flag("use_bidirectional_attention")


def _rotated(fields: ConfigFields, head_dim: int) -> int:
    """How much of a head is rotated: two numbers for each frequency, of which an odd share has one more."""
    dim = int(head_dim * _rotated_share(fields, head_dim))
    return dim + dim % 2 if dim < head_dim else dim


def _rotated_share(fields: ConfigFields, head_dim: int) -> float:
    """Share of a head that is rotated. transformers 5 writes it into ``rope_parameters``, and that counts first; older
    files may say how much of a head it is.
    """
    key = fields.family.rotary_key
    if key is None:
        return 1.0
    share: Any = fields.number(key)
    if key == _ROTARY_DIM:
        share = share / head_dim if share else 1.0
    for nest in ("rope_parameters", "rope_scaling"):
        nested = fields.values.get(nest)
        if isinstance(nested, Mapping) and nested.get("partial_rotary_factor") is not None:
            key, share = f"{nest}.partial_rotary_factor", nested["partial_rotary_factor"]
            break
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UsageError(f"{fields.name}: got {key} {short(share)}; expected a share above 0 and at most 1")
    return share


def latent_attention_of(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        heads=fields.size("num_attention_heads"),
        query_rank=fields.optional_size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )


def mlp_of(fields: ConfigFields) -> Mlp:
    family = fields.family
    ffn = fields.optional_size("intermediate_size")
    if ffn is None:
        if "intermediate_size" in family.required:
            raise fields.error("intermediate_size", "a whole number of 1 or more")
        ffn = 4 * fields.size("hidden_size")  # GPT-2's rule
    return Mlp(
        ffn=ffn,
        activation=fields.activation(),
        gated=family.gated,
        bias=family.mlp_bias or fields.flag("mlp_bias"),
        fused_gate_up=family.fused_gate_up,
    )


def experts_of(fields: ConfigFields) -> Moe:
    style = fields.family.experts
    assert style is not None, "a sparse layer of a family without experts"
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias", f"false where there are experts: only shared ones would have it; or {TRACE}")
    experts, ffn = fields.size("num_experts"), fields.size(style.width)
    top_k = fields.size("num_experts_per_tok")
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most the {experts} experts")
    groups, top_groups = _groups(fields, experts)
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=ffn,
        activation=fields.activation(),
        router=style.router,
        gated=fields.family.gated,
        bias=style.bias,
        router_bias=style.router_bias,
        correction_bias=style.correction_bias,
        normalise_top_k=style.normalised or fields.flag("norm_topk_prob"),
        shared_ffn=ffn * (fields.optional_size("n_shared_experts", least=0) or 0)
        if style.shared_width is None
        else fields.size(style.shared_width, least=0 if style.shared_fused else 1),  # Granite's may have none
        correction_frozen=style.correction_frozen,
        clamped_sum=style.clamped_sum,
        weighted_inputs=style.weighted_inputs,
        jitters=fields.size("jitters", least=0) if fields.knows("jitters") else 0,
        shared_gate=style.shared_gate,
        shared_fused=style.shared_fused,
        groups=groups,
        top_groups=top_groups,
        latent=fields.optional_size("moe_latent_size") or 0,
    )


def _groups(fields: ConfigFields, experts: int) -> tuple[int, int]:
    """Into how many groups the experts are sorted, and how many of them a token may reach."""
    if fields.knows("topk_method"):
        method = fields.value("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", "greedy or group_limited_greedy")
        if method == "greedy":
            return 1, 1
    groups = fields.optional_size("n_group") or 1
    top_groups = fields.optional_size("topk_group") or groups
    if experts % groups:
        raise fields.error("n_group", f"a divisor of the {experts} experts")
    if top_groups > groups:
        raise fields.error("topk_group", f"at most the {groups} groups")
    return groups, top_groups
