"""Architectures in which a state is carried along the sequence: what differs, one entry a ``model_type``.

Defaults are those of transformers 5, as in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.families import SIZES, DropoutKeys, Experts, Family, ScanKind
from jettison.spec.model import Norm, NormKind, QkNorm, Router

_RMS: Final = Norm(kind=NormKind.RMS)
_RMS_OFFSET: Final = Norm(kind=NormKind.RMS, offset=True)
_DELTA: Final[dict[str, Any]] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN: Final[dict[str, Any]] = {
    **_DELTA,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
}
_QWEN_EXPERTS: Final = Experts(
    router=Router.SOFTMAX_TOPK, normalised=True, shared_width="shared_expert_intermediate_size", shared_gate=True
)
_SPARSE: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def _qwen(scan: ScanKind, *, required: tuple[str, ...], experts: Experts | None = None, **more: Any) -> Family:
    return Family(
        norm=_RMS_OFFSET,
        required=(*SIZES, *required),
        defaults={**_QWEN, **more},
        qk_norm=QkNorm.HEAD,
        gated_attention=True,
        rotary_key="partial_rotary_factor",
        scan=scan,
        experts=experts,
    )


_MAMBA2: Final[dict[str, Any]] = {
    "n_groups": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "layer_types": None,
}
_MAMBA1: Final[dict[str, Any]] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
    "layer_types": None,
}
_ENDLESS: Final = 1 << 20
"""Tokens that are asked for at most where nothing is said: a state has no longest sequence."""

HYBRIDS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "jamba": Family(
            norm=_RMS,
            required=(*SIZES, "intermediate_size"),
            spelling={"num_experts": ("num_experts", "num_local_experts")},
            defaults={
                **_MAMBA1,
                "num_key_value_heads": 8,
                "hidden_act": "silu",
                "attention_dropout": 0.0,
                "max_position_embeddings": 262144,
                "num_experts": 16,
                "num_experts_per_tok": 2,
                "mlp_only_layers": None,
            },
            refused=("use_mambapy",),
            scan=ScanKind.NORMED_MAMBA1,
            rotary=False,
            experts=Experts(router=Router.SOFTMAX_TOPK, width="intermediate_size"),
        ),
        "mamba": Family(
            norm=_RMS,
            required=("hidden_size", "num_hidden_layers", "vocab_size"),
            spelling={
                "mamba_inner": ("intermediate_size",),
                "mamba_d_state": ("state_size",),
                "mamba_d_conv": ("conv_kernel",),
                "mamba_expand": ("expand",),
                "mamba_dt_rank": ("time_step_rank",),
                "mamba_conv_bias": ("use_conv_bias",),
                "mamba_proj_bias": ("use_bias",),
            },
            defaults={**_MAMBA1, "mamba_inner": None, "residual_in_fp32": True, "max_position_embeddings": _ENDLESS},
            refused=("use_mambapy",),
            scan=ScanKind.MAMBA1,
            lone=True,
            rotary=False,
            dropout=DropoutKeys(attention=None),
        ),
        "mamba2": Family(
            norm=_RMS,
            required=(
                "hidden_size",
                "num_hidden_layers",
                "vocab_size",
                "mamba_num_heads",
                "mamba_head_dim",
                "ssm_state_size",
            ),
            spelling={
                "mamba_num_heads": ("num_heads",),
                "mamba_head_dim": ("head_dim",),
                "ssm_state_size": ("state_size",),
            },
            defaults={**_MAMBA2, "chunk_size": 256, "residual_in_fp32": True, "max_position_embeddings": _ENDLESS},
            scan=ScanKind.MAMBA2,
            lone=True,
            rotary=False,
            dropout=DropoutKeys(attention=None),
        ),
        "nemotron_h": Family(
            norm=_RMS,
            required=("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"),
            spelling={"hidden_act": ("mlp_hidden_act",), "num_experts": ("n_routed_experts", "num_local_experts")},
            defaults={
                **_MAMBA2,
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "chunk_size": 128,
                "num_hidden_layers": None,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "hidden_act": "relu2",
                "attention_dropout": 0.0,
                "mlp_bias": False,
                "max_position_embeddings": 4096,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 7688,
                "moe_shared_expert_intermediate_size": 7688,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": True,
                "moe_latent_size": None,
            },
            gated=False,
            scan=ScanKind.MAMBA2,
            lone=True,
            rotary=False,
            experts=Experts(
                router=Router.SIGMOID_GROUPS, correction_bias=True, shared_width="moe_shared_expert_intermediate_size"
            ),
        ),
        "qwen3_next": _qwen(
            ScanKind.GROUPED_DELTA,
            required=("intermediate_size", *_SPARSE),
            experts=Experts(
                router=Router.SOFTMAX_TOPK, shared_width="shared_expert_intermediate_size", shared_gate=True
            ),
            mlp_only_layers=None,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        ),
        "qwen3_5_text": _qwen(ScanKind.DELTA, required=("intermediate_size",), num_key_value_heads=4),
        "qwen3_5_moe_text": _qwen(ScanKind.DELTA, required=_SPARSE, experts=_QWEN_EXPERTS),
    }
)
"""By ``model_type``."""
HYBRID_WRAPPERS: Final = MappingProxyType({"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"})
"""See `families.WRAPPERS`."""
