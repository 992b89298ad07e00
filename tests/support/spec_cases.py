"""Tiny configurations of every family, as transformers writes them, and what is read out of them."""

import json
import re
from typing import Any

import torch
import transformers

from jettison.families.config import parse_config
from jettison.spec.model import ModelSpec

Config = dict[str, Any]

COMMON = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 256, "pad_token_id": 0}
GATED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
LATENT = {
    **GATED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 2,
}
QWEN_MOE = {**GATED, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

TINY: dict[str, tuple[str, Config]] = {
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 256, "n_positions": 128}),
    "gpt2-inner": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_inner": 200}),
    "gpt_neox": ("GPTNeoX", {**COMMON, "intermediate_size": 96, "hidden_dropout": 0.2}),
    "gpt_neox-serial": (
        "GPTNeoX",
        {**COMMON, "intermediate_size": 96, "use_parallel_residual": False, "rotary_pct": 0.5, "attention_bias": False},
    ),
    "llama": ("Llama", GATED),
    "llama-biased": (
        "Llama",
        {
            **GATED,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "attention_dropout": 0.3,
        },
    ),
    "mistral": ("Mistral", {**GATED, "sliding_window": 32}),
    "mistral-open": ("Mistral", {**GATED, "sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**GATED, "sliding_window": 32}),
    "qwen2-window": ("Qwen2", {**GATED, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}),
    "qwen3": ("Qwen3", GATED),
    "qwen3-window": (
        "Qwen3",
        {**GATED, "head_dim": 24, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE),
    "qwen3_moe-mixed": (
        "Qwen3Moe",
        {
            **QWEN_MOE,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 32,
        },
    ),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v2-groups": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "gemma": ("Gemma", {**GATED, "head_dim": 24}),
    "gemma2": ("Gemma2", {**GATED, "sliding_window": 32}),
    "gemma2-plain": (
        "Gemma2",
        {
            **GATED,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 6,
        },
    ),
    "gemma3_text": ("Gemma3Text", {**GATED, "num_hidden_layers": 8, "sliding_window": 32}),
    "gemma3_text-pattern": ("Gemma3Text", {**GATED, "sliding_window": 32, "sliding_window_pattern": 3}),
    "phi3": ("Phi3", {**GATED, "sliding_window": 32, "resid_pdrop": 0.1}),
    "phi3-partial": ("Phi3", {**GATED, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", GATED),
    "gpt_oss": ("GptOss", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "bert": ("Bert", {**COMMON, "intermediate_size": 96, "type_vocab_size": 3}),
}


def configuration(case: str) -> transformers.PreTrainedConfig:
    name, settings = TINY[case]
    return getattr(transformers, f"{name}Config")(**settings)


def decoded(case: str) -> Config:
    return json.loads(configuration(case).to_json_string(use_diff=False))


def spec(case: str, **changes: Any) -> ModelSpec:
    return parse_config({**decoded(case), **changes}, name="tiny")


def weights(case: str) -> dict[str, tuple[int, ...]]:
    config = configuration(case)
    auto = transformers.AutoModelForMaskedLM if case == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in auto.from_config(config).named_parameters()}


def of_layer(shapes: dict[str, tuple[int, ...]], index: int) -> dict[str, tuple[int, ...]]:
    """Weights of one layer, by what follows its number."""
    found = re.compile(rf"\.(?:h|layers|layer)\.{index}\.(.*)")
    return {match[1]: shape for name, shape in shapes.items() if (match := found.search(name))}
