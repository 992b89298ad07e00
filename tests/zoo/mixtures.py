"""Mixtures of experts: routing by value, auxiliary losses, gathers of as many rows as the router says."""

from __future__ import annotations

from zoo.decoders import BASE, DROP, GATED, IDS, NARROW
from zoo.entry import VOCABULARY, Entry, hugging_face, pairs, tokens

TABLE: list[Entry] = [
    hugging_face(
        "mixtral-router-loss", "MixtralForCausalLM", "MixtralConfig", tokens(16), **NARROW, **DROP,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_jitter_noise=0.1,
    ),
    hugging_face(
        "qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", tokens(16), **GATED, **DROP, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, output_router_logits=True,
    ),
    hugging_face(
        "gpt-oss", "GptOssForCausalLM", "GptOssConfig", tokens(16), **NARROW, **DROP, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    ),
    hugging_face(
        "jetmoe", "JetMoeForCausalLM", "JetMoeConfig", tokens(16), **IDS, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=32, max_position_embeddings=64,
        num_local_experts=4, num_experts_per_tok=2, values_decide=True,
    ),
    hugging_face(
        "llama4", "Llama4ForCausalLM", "Llama4TextConfig", tokens(16), **NARROW, intermediate_size_mlp=64,
        num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=8, moe_layers=[1],
    ),
    hugging_face(
        "minimax", "MiniMaxForCausalLM", "MiniMaxConfig", tokens(16), **NARROW, **DROP, num_local_experts=4,
        num_experts_per_tok=2, block_size=8, layer_types=["linear_attention", "full_attention"],
    ),
    hugging_face(
        "olmoe", "OlmoeForCausalLM", "OlmoeConfig", tokens(16), **GATED, **DROP, num_experts=4, num_experts_per_tok=2,
    ),
    hugging_face(
        "granite-moe", "GraniteMoeForCausalLM", "GraniteMoeConfig", tokens(16), **GATED, **DROP, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    hugging_face(
        "phimoe", "PhimoeForCausalLM", "PhimoeConfig", tokens(16), **GATED, **DROP, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    hugging_face(
        "deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", tokens(16), **BASE, **DROP,
        num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4,
    ),
    hugging_face(
        "jamba", "JambaForCausalLM", "JambaConfig", tokens(12), **{**GATED, "num_hidden_layers": 3}, **DROP,
        attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4,
        num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    hugging_face(
        "switch-transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", pairs(16, 12),
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_sparse_encoder_layers=1,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=4, num_experts=4, expert_capacity=16,
        router_jitter_noise=0.1, dropout_rate=0.1, pad_token_id=0, decoder_start_token_id=0,
    ),
]  # fmt: skip
