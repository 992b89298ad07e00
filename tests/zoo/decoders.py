"""Language models that predict the next token, with the settings that people train with: caches on, dropout on."""

from __future__ import annotations

from typing import Any

from zoo.entry import VOCABULARY, Entry, hugging_face, tokens

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE: dict[str, Any] = {
    **IDS, "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
GATED: dict[str, Any] = {**BASE, "num_key_value_heads": 2}
NARROW: dict[str, Any] = {**GATED, "head_dim": 8}
SHORT: dict[str, Any] = {**IDS, "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DROP = {"attention_dropout": 0.1}

TABLE: list[Entry] = [
    # its cache is on by default, and batches have another length
    hugging_face(
        "llama", "LlamaForCausalLM", "LlamaConfig", tokens(24, 18, 24), **GATED, **DROP,
    ),
    hugging_face("mistral", "MistralForCausalLM", "MistralConfig", tokens(24, 16), **NARROW, **DROP, sliding_window=8),
    hugging_face("qwen2", "Qwen2ForCausalLM", "Qwen2Config", tokens(24), **GATED, **DROP),
    hugging_face("qwen3", "Qwen3ForCausalLM", "Qwen3Config", tokens(24), **NARROW, **DROP),
    hugging_face(
        "qwen3-next", "Qwen3NextForCausalLM", "Qwen3NextConfig", tokens(24), **NARROW,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    hugging_face("gemma", "GemmaForCausalLM", "GemmaConfig", tokens(24), **NARROW, **DROP),
    hugging_face(
        "gemma2", "Gemma2ForCausalLM", "Gemma2Config", tokens(24), **NARROW, **DROP, sliding_window=8,
        query_pre_attn_scalar=8,
    ),
    hugging_face("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", tokens(24), **NARROW, sliding_window=8),
    hugging_face(
        "gemma3n", "Gemma3nForCausalLM", "Gemma3nTextConfig", tokens(24),
        **{**NARROW, "num_hidden_layers": 4, "intermediate_size": [64] * 4}, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8, laurel_rank=8, num_kv_shared_layers=2, sliding_window=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], altup_num_inputs=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    hugging_face("phi", "PhiForCausalLM", "PhiConfig", tokens(24), **BASE, **DROP, resid_pdrop=0.1),
    hugging_face("phi3", "Phi3ForCausalLM", "Phi3Config", tokens(24), **GATED, **DROP, resid_pdrop=0.1),
    hugging_face("gpt2", "GPT2LMHeadModel", "GPT2Config", tokens(24, 17, padded=True), **SHORT),
    hugging_face(
        "gpt-neo", "GPTNeoForCausalLM", "GPTNeoConfig", tokens(24), **IDS, vocab_size=VOCABULARY, hidden_size=32,
        num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8,
        max_position_embeddings=64, attention_dropout=0.1, resid_dropout=0.1, embed_dropout=0.1,
    ),
    hugging_face(
        "gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens(24), **BASE, **DROP, hidden_dropout=0.1,
    ),
    hugging_face("gptj", "GPTJForCausalLM", "GPTJConfig", tokens(24), **SHORT, rotary_dim=4, resid_pdrop=0.1),
    hugging_face("codegen", "CodeGenForCausalLM", "CodeGenConfig", tokens(24), **SHORT, rotary_dim=4, resid_pdrop=0.1),
    hugging_face(
        "opt-layerdrop", "OPTForCausalLM", "OPTConfig", tokens(24), **IDS, vocab_size=VOCABULARY,
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64, max_position_embeddings=64,
        word_embed_proj_dim=32, layerdrop=0.4, dropout=0.1,
    ),
    hugging_face(
        "xglm-layerdrop", "XGLMForCausalLM", "XGLMConfig", tokens(24), **IDS, vocab_size=VOCABULARY, d_model=32,
        num_layers=2, attention_heads=4, ffn_dim=64, max_position_embeddings=64, layerdrop=0.3,
    ),
    hugging_face(
        "biogpt-layerdrop", "BioGptForCausalLM", "BioGptConfig", tokens(24), **BASE, layerdrop=0.3,
    ),
    hugging_face(
        "bloom", "BloomForCausalLM", "BloomConfig", tokens(24, padded=True), **IDS, vocab_size=VOCABULARY,
        hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.1,
    ),
    hugging_face(
        "falcon", "FalconForCausalLM", "FalconConfig", tokens(24), **IDS, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.1, attention_dropout=0.1,
    ),
    hugging_face(
        "mpt", "MptForCausalLM", "MptConfig", tokens(24), vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4,
        max_seq_len=64, resid_pdrop=0.1,
    ),
    hugging_face("stablelm", "StableLmForCausalLM", "StableLmConfig", tokens(24), **GATED, **DROP, hidden_dropout=0.1),
    hugging_face(
        "starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", tokens(24), **GATED, **DROP, residual_dropout=0.1,
    ),
    hugging_face("olmo2", "Olmo2ForCausalLM", "Olmo2Config", tokens(24), **GATED, **DROP),
    hugging_face("cohere", "CohereForCausalLM", "CohereConfig", tokens(24), **GATED, **DROP),
    hugging_face("granite", "GraniteForCausalLM", "GraniteConfig", tokens(24), **GATED, **DROP),
    hugging_face("glm4", "Glm4ForCausalLM", "Glm4Config", tokens(24), **NARROW, **DROP),
    hugging_face("nemotron", "NemotronForCausalLM", "NemotronConfig", tokens(24), **GATED, **DROP),
    hugging_face("diffllama", "DiffLlamaForCausalLM", "DiffLlamaConfig", tokens(24), **GATED),
    hugging_face(
        "recurrent-gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", tokens(24),
        **{**GATED, "num_hidden_layers": 3}, **DROP, lru_width=32, attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    hugging_face(
        "mamba", "MambaForCausalLM", "MambaConfig", tokens(12), **IDS, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, state_size=4, use_mambapy=False,
    ),
    hugging_face(
        "mamba2", "Mamba2ForCausalLM", "Mamba2Config", tokens(16), **IDS, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=2, chunk_size=8,
    ),
    hugging_face(
        "openai-gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", tokens(24), vocab_size=VOCABULARY, n_embd=32,
        n_layer=2, n_head=4, n_positions=64,
    ),
    hugging_face(
        "xlnet", "XLNetLMHeadModel", "XLNetConfig", tokens(16), **IDS, vocab_size=VOCABULARY, d_model=32, n_layer=2,
        n_head=4, d_inner=64,
    ),
]  # fmt: skip
