"""Mixtures of experts, latent attention and attention sinks in closed form, against transformers and by hand."""

from __future__ import annotations

import pytest
from formula_cases import FAMILIES, HIDDEN, LAYERS, FormulaCase, TinyFamily, cases, counts, differences

GROUPED = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
GROUPED_MM = {"experts_implementation": "grouped_mm"}

MIXTURES = {
    "mixtral": TinyFamily(
        model="MixtralForCausalLM", config="MixtralConfig",
        settings={**GROUPED, **GROUPED_MM, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": TinyFamily(
        model="Qwen3MoeForCausalLM", config="Qwen3MoeConfig",
        settings={
            **GROUPED, **GROUPED_MM, "head_dim": 24, "intermediate_size": 96, "moe_intermediate_size": 24,
            "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": TinyFamily(
        model="DeepseekV2ForCausalLM", config="DeepseekV2Config",
        settings={**LATENT, **GROUPED_MM, "q_lora_rank": None, "n_shared_experts": 2, "head_dim": 8},
    ),
    "deepseek_v3": TinyFamily(
        model="DeepseekV3ForCausalLM", config="DeepseekV3Config",
        settings={
            **LATENT, **GROUPED_MM, "q_lora_rank": 28, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        },
    ),
    "gpt_oss": TinyFamily(
        model="GptOssForCausalLM", config="GptOssConfig",
        settings={
            **GROUPED, **GROUPED_MM, "head_dim": 24, "intermediate_size": 48, "num_local_experts": 4,
            "num_experts_per_tok": 2, "pad_token_id": 0, "sliding_window": 8,
        },
    ),
}  # fmt: skip
FAMILIES.update(MIXTURES)


@pytest.mark.parametrize("case", [case for family in MIXTURES for case in cases(family)], ids=str)
def test_saved_tensors_are_those_of_transformers(case: FormulaCase) -> None:
    assert [str(d) for d in differences(case)] == []


@pytest.mark.parametrize("family", MIXTURES)
def test_parameters(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs
