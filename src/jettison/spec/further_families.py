"""More architectures of the same blocks: what differs, one entry a ``model_type``; see `more_families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.families import FAMILIES, SIZES, DropoutKeys, Experts, Family
from jettison.spec.model import Arrangement, Norm, NormKind, QkNorm, Router

_LAYER_NORM: Final = Norm(kind=NormKind.LAYER, bias=True)
_RMS: Final = Norm(kind=NormKind.RMS)
_GROUPED: Final[dict[str, Any]] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
}
_BIASED: Final = {**_GROUPED, "attention_bias": False}
_BOTH_BIASED: Final = {**_BIASED, "mlp_bias": False}
_WINDOWED: Final = {"layer_types": None, "sliding_window": 4096, "sliding_window_pattern": 4}
_SPARSE: Final = (*SIZES, "intermediate_size", "num_experts", "num_experts_per_tok")
_LOCAL: Final = {"num_experts": ("num_local_experts", "num_experts")}
_HALF_ROTATED: Final = {
    **_BIASED,
    "attention_out_bias": False,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}
_LEARNED: Final[dict[str, Any]] = {
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rotary": False,
    "more_positions": 2,
}

FURTHER: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "biogpt": Family(
            norm=_LAYER_NORM,
            defaults={
                "hidden_act": "gelu",
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
                "scale_embedding": True,
                "hidden_dropout_prob": 0.1,
                "attention_probs_dropout_prob": 0.1,
            },
            embedding_scale=True,
            refused=("activation_dropout", "layerdrop"),
            dropout=DropoutKeys(
                embedding="hidden_dropout_prob",
                attention="attention_probs_dropout_prob",
                residual="hidden_dropout_prob",
            ),
            **_LEARNED,
        ),
        "camembert": FAMILIES["bert"],
        "cohere": Family(
            norm=Norm(kind=NormKind.LAYER),
            defaults={**_BIASED, "tie_word_embeddings": True, "max_position_embeddings": 8192},
            arrangement=Arrangement.SHARED,
        ),
        "cohere2": Family(
            norm=Norm(kind=NormKind.LAYER),
            defaults={**_BIASED, **_WINDOWED, "tie_word_embeddings": True, "max_position_embeddings": 8192},
            arrangement=Arrangement.SHARED,
            plain_where_full=True,
        ),
        "ernie4_5": Family(
            norm=_RMS,
            spelling={"attention_bias": ("use_bias",), "mlp_bias": ("use_bias",)},
            defaults={**_BOTH_BIASED, "tie_word_embeddings": True, "max_position_embeddings": 131072},
            dropout=DropoutKeys(attention=None),
        ),
        "flex_olmo": Family(
            norm=_RMS,
            required=_SPARSE,
            defaults={**_BIASED, "norm_topk_prob": False},
            arrangement=Arrangement.POST,
            qk_norm=QkNorm.WIDTH,
            experts=Experts(router=Router.SOFTMAX_TOPK, width="intermediate_size"),
        ),
        "glm": Family(norm=_RMS, defaults=_HALF_ROTATED, fused_gate_up=True, rotary_key="partial_rotary_factor"),
        "glm4": Family(
            norm=_RMS,
            defaults=_HALF_ROTATED,
            arrangement=Arrangement.SANDWICH,
            fused_gate_up=True,
            rotary_key="partial_rotary_factor",
        ),
        "granite": Family(norm=_RMS, defaults={**_BOTH_BIASED, "max_position_embeddings": 2048}),
        "granitemoe": Family(
            norm=_RMS,
            required=_SPARSE,
            spelling=_LOCAL,
            defaults={**_BIASED, "max_position_embeddings": 2048},
            experts=Experts(router=Router.TOPK_SOFTMAX, width="intermediate_size", normalised=True),
        ),
        "granitemoeshared": Family(
            norm=_RMS,
            required=(*_SPARSE, "shared_intermediate_size"),
            spelling=_LOCAL,
            defaults={**_BIASED, "max_position_embeddings": 2048},
            experts=Experts(
                router=Router.TOPK_SOFTMAX,
                width="intermediate_size",
                normalised=True,
                shared_width="shared_intermediate_size",
                shared_fused=True,
            ),
        ),
        "helium": Family(norm=_RMS, defaults={**_BOTH_BIASED, "head_dim": 128, "attention_out_bias": False}),
        "internlm3": Family(
            norm=_RMS,
            spelling={"attention_bias": ("qkv_bias", "attention_bias"), "mlp_bias": ("bias", "mlp_bias")},
            defaults={**_BOTH_BIASED, "max_position_embeddings": 32768},
        ),
        "minimax_m2": Family(
            norm=_RMS,
            required=_SPARSE,
            spelling=_LOCAL,
            defaults={**_GROUPED, "max_position_embeddings": 196608, "rotary_dim": None},
            qk_norm=QkNorm.WIDTH,
            rotary_key="rotary_dim",
            experts=Experts(
                router=Router.SIGMOID_GROUPS, width="intermediate_size", normalised=True, correction_bias=True
            ),
        ),
        "ministral": Family(
            norm=_RMS,
            defaults={**_GROUPED, "layer_types": None, "sliding_window": 4096, "max_position_embeddings": 32768},
        ),
        "nemotron": Family(
            norm=Norm(kind=NormKind.LAYER, bias=True, offset=True),
            defaults={**_BOTH_BIASED, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
            gated=False,
            rotary_key="partial_rotary_factor",
        ),
        "olmo": Family(
            norm=Norm(kind=NormKind.LAYER, weight=False),
            defaults={**_BIASED, "max_position_embeddings": 2048},
            refused=("clip_qkv",),
        ),
        "opt": Family(
            norm=_LAYER_NORM,
            spelling={"intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",)},
            defaults={
                "hidden_act": "relu",
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "attention_dropout": 0.0,
                "dropout": 0.1,
            },
            refused=("layerdrop", "_remove_final_layer_norm"),
            dropout=DropoutKeys(residual="dropout"),
            **_LEARNED,
        ),
        "phi": Family(
            norm=_LAYER_NORM,
            defaults={
                **_GROUPED,
                "hidden_act": "gelu_new",
                "max_position_embeddings": 2048,
                "partial_rotary_factor": 0.5,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
            },
            arrangement=Arrangement.SHARED,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            rotary_key="partial_rotary_factor",
            dropout=DropoutKeys(embedding="embd_pdrop", attention="attention_dropout", residual="resid_pdrop"),
        ),
        "qwen2_moe": replace(
            FAMILIES["qwen3_moe"],
            required=(*FAMILIES["qwen3_moe"].required, "shared_expert_intermediate_size"),
            defaults={**FAMILIES["qwen3_moe"].defaults, "num_key_value_heads": 16, "max_window_layers": 28},
            qk_norm=QkNorm.NONE,
            qkv_bias=True,
            experts=Experts(
                router=Router.SOFTMAX_TOPK, shared_width="shared_expert_intermediate_size", shared_gate=True
            ),
        ),
        "qwen2_vl_text": FAMILIES["qwen2"],
        "qwen2_5_vl_text": FAMILIES["qwen2"],
        "qwen3_vl_text": FAMILIES["qwen3"],
        "qwen3_vl_moe_text": replace(
            FAMILIES["qwen3_moe"], experts=Experts(router=Router.SOFTMAX_TOPK, normalised=True)
        ),
        "roberta": FAMILIES["bert"],
        "xlm-roberta": FAMILIES["bert"],
    }
)
"""By ``model_type``."""
