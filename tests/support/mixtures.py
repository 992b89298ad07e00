"""Tiny mixtures of experts, for `support.formula_cases`: whoever imports this has them in `FAMILIES`."""

from __future__ import annotations

from support.formula_cases import FAMILIES, HIDDEN, LAYERS, TinyFamily

_GROUPED = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "experts_implementation": "grouped_mm",
}
_LATENT = {
    **_GROUPED,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SOME = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}

MIXTURES = {
    "mixtral": TinyFamily(model="MixtralForCausalLM", config="MixtralConfig", settings={**_GROUPED, **_SOME}),
    "qwen3_moe": TinyFamily(
        model="Qwen3MoeForCausalLM",
        config="Qwen3MoeConfig",
        settings={
            **_GROUPED,
            "head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": TinyFamily(
        model="DeepseekV2ForCausalLM",
        config="DeepseekV2Config",
        settings={**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "head_dim": 8},
    ),
    "deepseek_v3": TinyFamily(
        model="DeepseekV3ForCausalLM",
        config="DeepseekV3Config",
        settings={**_LATENT, "q_lora_rank": 28, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    ),
    "gpt_oss": TinyFamily(
        model="GptOssForCausalLM",
        config="GptOssConfig",
        settings={**_GROUPED, **_SOME, "head_dim": 24, "pad_token_id": 0, "sliding_window": 8},
        attentions=("eager",),
    ),
}
FAMILIES.update(MIXTURES)
