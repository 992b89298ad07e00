"""Architectures that are blocks of others put together anew: what differs, one entry a ``model_type``.

`families` has those that others are made of. Defaults are those of transformers 5, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.decoder_families import DECODERS
from jettison.spec.encoder_families import ENCODER_WRAPPERS, ENCODERS
from jettison.spec.families import FAMILIES, SIZES, WRAPPERS, DropoutKeys, Experts, Family
from jettison.spec.further_families import FURTHER
from jettison.spec.hybrid_families import HYBRID_WRAPPERS, HYBRIDS
from jettison.spec.mixture_families import MIXTURES
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
_WINDOWED: Final = {"layer_types": None, "sliding_window": 4096}
_RESIDUAL: Final = DropoutKeys(residual="residual_dropout")
_EXPERT_SIZES: Final = ("num_experts", "num_experts_per_tok")

MORE: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "arcee": Family(norm=_RMS, defaults={**_BOTH_BIASED, "hidden_act": "relu2"}, gated=False),
        "cwm": Family(norm=_RMS, defaults={**_BOTH_BIASED, **_WINDOWED, "num_key_value_heads": 8, "head_dim": 128}),
        "exaone4": Family(
            norm=_RMS,
            defaults={**_GROUPED, **_WINDOWED, "sliding_window_pattern": 4},
            arrangement=Arrangement.POST,
            qk_norm=QkNorm.HEAD,
            plain_where_full=True,
        ),
        "hunyuan_v1_dense": Family(norm=_RMS, defaults=_BIASED, qk_norm=QkNorm.HEAD),
        "jais2": Family(
            norm=_LAYER_NORM,
            defaults={**_BOTH_BIASED, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
            gated=False,
        ),
        "kimi_k2": FAMILIES["deepseek_v3"],
        "olmo3": Family(
            norm=_RMS,
            defaults={**_BIASED, **_WINDOWED, "sliding_window_pattern": 4},
            arrangement=Arrangement.POST,
            qk_norm=QkNorm.WIDTH,
        ),
        "olmoe": Family(
            norm=_RMS,
            required=(*SIZES, "intermediate_size", *_EXPERT_SIZES),
            spelling={"num_experts": ("num_experts", "num_local_experts")},
            defaults={**_BIASED, "norm_topk_prob": False},
            qk_norm=QkNorm.WIDTH,
            experts=Experts(router=Router.SOFTMAX_TOPK, width="intermediate_size"),
        ),
        "seed_oss": Family(
            norm=_RMS,
            defaults={**_BOTH_BIASED, "attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.1},
            dropout=_RESIDUAL,
        ),
        "smollm3": Family(
            norm=_RMS,
            defaults={**_BOTH_BIASED, "no_rope_layers": None, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        ),
        "stablelm": Family(
            norm=_LAYER_NORM,
            spelling={"attention_bias": ("use_qkv_bias",)},
            defaults={**_BIASED, "attention_out_bias": False, "partial_rotary_factor": 0.25},
            rotary_key="partial_rotary_factor",
            refused=("hidden_dropout",),
        ),
        "starcoder2": Family(
            norm=_LAYER_NORM,
            spelling={"attention_bias": ("use_bias",), "mlp_bias": ("use_bias",)},
            defaults={
                **_BOTH_BIASED,
                "attention_bias": True,
                "mlp_bias": True,
                "hidden_act": "gelu_pytorch_tanh",
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
                "sliding_window": None,
                "residual_dropout": 0.0,
                "embedding_dropout": 0.0,
            },
            gated=False,
            dropout=DropoutKeys(embedding="embedding_dropout", residual="residual_dropout"),
        ),
    }
)
"""By ``model_type``."""
EVERY_FAMILY: Final[Mapping[str, Family]] = MappingProxyType(
    {**FAMILIES, **MORE, **FURTHER, **DECODERS, **MIXTURES, **ENCODERS, **HYBRIDS}
)
EVERY_WRAPPER: Final[Mapping[str, str]] = MappingProxyType(
    {
        **WRAPPERS,
        **ENCODER_WRAPPERS,
        **HYBRID_WRAPPERS,
        "llama4": "llama4_text",
        "llava_next": "llama",
        "llava_onevision": "qwen2",
        "internvl": "qwen2",
        "mistral3": "mistral",
        "paligemma": "gemma",
        "idefics3": "llama",
        "smolvlm": "llama",
        "qwen2_vl": "qwen2_vl_text",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen3_vl": "qwen3_vl_text",
        "qwen3_vl_moe": "qwen3_vl_moe_text",
    }
)
"""See `WRAPPERS`; the towers beside the text are left out, and said to be."""
