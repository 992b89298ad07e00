"""Architectures in which a state is carried along the sequence: what differs, one entry a ``model_type``.

Defaults are those of transformers 5, as in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.families import SIZES, Experts, Family, ScanKind
from jettison.spec.model import Norm, NormKind, QkNorm, Router

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


HYBRIDS: Final[Mapping[str, Family]] = MappingProxyType(
    {
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
