"""Mixtures of experts with routers of their own: what differs, one entry a ``model_type``; see `more_families`.

Some write their configuration in words of their own; `own_words` puts those into the usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.families import SIZES, DropoutKeys, Experts, Family
from jettison.spec.model import Norm, NormKind, QkNorm, Router

_RMS: Final = Norm(kind=NormKind.RMS)
_BIASED: Final[dict[str, Any]] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "max_position_embeddings": 131072,
}
_SPARSE: Final = (*SIZES, "intermediate_size", "num_experts", "num_experts_per_tok")
_BESIDE_DENSE: Final = (*_SPARSE, "moe_intermediate_size")
_GROUPED_EXPERTS: Final = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}

MIXTURES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "dbrx": Family(
            norm=Norm(kind=NormKind.LAYER),
            required=_SPARSE,
            spelling={
                "hidden_size": ("d_model",),
                "num_hidden_layers": ("n_layers",),
                "num_attention_heads": ("n_heads",),
                "max_position_embeddings": ("max_seq_len",),
                "num_key_value_heads": ("kv_n_heads",),
                "intermediate_size": ("ffn_hidden_size",),
                "num_experts": ("moe_num_experts",),
                "num_experts_per_tok": ("moe_top_k",),
            },
            defaults={
                "num_key_value_heads": 1,
                "max_position_embeddings": 2048,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "clip_qkv": None,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "norm_topk_prob": True,
                "jitters": 0,
            },
            fused_qkv=True,
            experts=Experts(router=Router.SOFTMAX_TOPK, width="intermediate_size"),
            dropout=DropoutKeys(attention="attn_pdrop", residual="resid_pdrop"),
        ),
        "dots1": Family(
            norm=_RMS,
            required=_BESIDE_DENSE,
            spelling={"num_experts": ("n_routed_experts", "num_experts")},
            defaults={
                **_BIASED,
                **_GROUPED_EXPERTS,
                "max_position_embeddings": 2048,
                "layer_types": None,
                "sliding_window": 4096,
                "max_window_layers": 62,
                "n_shared_experts": None,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
            },
            qk_norm=QkNorm.HEAD,
            experts=Experts(router=Router.SIGMOID_GROUPS, correction_bias=True),
        ),
        "ernie4_5_moe": Family(
            norm=_RMS,
            required=_BESIDE_DENSE,
            spelling={
                "attention_bias": ("use_bias",),
                "mlp_bias": ("use_bias",),
                "num_experts": ("moe_num_experts",),
                "num_experts_per_tok": ("moe_k",),
                "n_shared_experts": ("moe_num_shared_experts",),
            },
            defaults={
                **_BIASED,
                "mlp_bias": False,
                "tie_word_embeddings": True,
                "n_shared_experts": 2,
                "mlp_only_layers": None,
            },
            experts=Experts(
                router=Router.SOFTMAX_TOPK,
                normalised=True,
                correction_bias=True,
                correction_frozen=True,
                clamped_sum=True,
            ),
            dropout=DropoutKeys(attention=None),
        ),
        "glm4_moe": Family(
            norm=_RMS,
            required=_BESIDE_DENSE,
            spelling={"num_experts": ("n_routed_experts", "num_experts")},
            defaults={
                **_BIASED,
                **_GROUPED_EXPERTS,
                "attention_out_bias": False,
                "partial_rotary_factor": 0.5,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
            },
            rotary_key="partial_rotary_factor",
            floored_heads=True,
            experts=Experts(router=Router.SIGMOID_GROUPS, correction_bias=True),
        ),
        "hunyuan_v1_moe": Family(
            norm=_RMS,
            required=_SPARSE,
            spelling={"num_experts_per_tok": ("moe_topk",)},
            defaults={**_BIASED, "max_position_embeddings": 2048},
            qk_norm=QkNorm.HEAD,
            experts=Experts(
                router=Router.SOFTMAX_TOPK, width="intermediate_size", normalised=True, shared_width="intermediate_size"
            ),
        ),
        "llama4_text": Family(
            norm=_RMS,
            required=(*_SPARSE, "moe_intermediate_size"),
            spelling={"num_experts": ("num_local_experts", "num_experts")},
            defaults={
                **_BIASED,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "layer_types": None,
                "sliding_window": 8192,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "mlp_only_layers": None,
            },
            qk_norm=QkNorm.LENGTH,
            scaled_where_plain=True,
            experts=Experts(router=Router.TOPK_SIGMOID, shared_width="moe_intermediate_size", weighted_inputs=True),
        ),
        "phimoe": Family(
            norm=Norm(kind=NormKind.LAYER, bias=True),
            required=_SPARSE,
            spelling={"num_experts": ("num_local_experts", "num_experts")},
            defaults={**_BIASED, "num_key_value_heads": 8, "sliding_window": None, "lm_head_bias": False, "jitters": 0},
            experts=Experts(router=Router.SPARSE_MIXER, width="intermediate_size"),
        ),
    }
)
"""By ``model_type``."""
