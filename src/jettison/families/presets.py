"""Published models by name, as the configurations that their publishers give; a `ModelSpec` is made when asked for.

Each group names its source: the model cards' ``config.json`` on the Hugging Face hub, or a paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from jettison.errors import UsageError
from jettison.families.config import parse_config
from jettison.spec.model import ModelSpec

_Config = Mapping[str, Any]


def _gpt(hidden: int, layers: int, heads: int, **more: Any) -> _Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}
    return {"model_type": "gpt2", **sizes, **more}


def _paper_gpt(hidden: int, layers: int, heads: int) -> _Config:
    more = {"vocab_size": 51200, "n_positions": 2048, "activation_function": "gelu_pytorch_tanh", "dtype": "float16"}
    return _gpt(hidden, layers, heads, **more)


def _decoder(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, kv: int | None, vocab: int, positions: int, **more: Any
) -> _Config:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": positions}
    return {"model_type": kind, **sizes, **attention, "dtype": "bfloat16", **more}


def _neox(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> _Config:
    return _decoder("gpt_neox", hidden, ffn, layers, heads, None, 50432, 2048, **{"dtype": "float16", **more})


def _mixtral(hidden: int, ffn: int, layers: int, heads: int, positions: int) -> _Config:
    routing = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return _decoder("mixtral", hidden, ffn, layers, heads, 8, 32000, positions, **routing)


def _qwen3_moe(hidden: int, ffn: int, layers: int, heads: int, expert_ffn: int) -> _Config:
    routing = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_ffn}
    more = {"head_dim": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _decoder("qwen3_moe", hidden, ffn, layers, heads, 4, 151936, 40960, **routing, **more)


def _deepseek(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, vocab: int, query_rank: int | None, **more: Any
) -> _Config:
    ranks = {"q_lora_rank": query_rank, "kv_lora_rank": 512}
    dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _decoder(kind, hidden, ffn, layers, heads, heads, vocab, 163840, **ranks, **dims, **more)


def _gpt_oss(layers: int, experts: int) -> _Config:
    more = {"head_dim": 64, "sliding_window": 128, "num_local_experts": experts, "num_experts_per_tok": 4}
    return _decoder("gpt_oss", 2880, 2880, layers, 64, 8, 201088, 131072, **more)


def _bert(hidden: int, ffn: int, layers: int, heads: int) -> _Config:
    return _decoder("bert", hidden, ffn, layers, heads, None, 30522, 512, type_vocab_size=2)


_LLAMA3_405B: Final = _decoder("llama", 16384, 53248, 126, 128, 8, 128256, 131072)

PRESETS: Final[Mapping[str, _Config]] = MappingProxyType(
    {
        # arXiv 2205.05198 Table 3: GPTs with learned positions, GELU, 4h, tied embeddings, dropout 0.1
        "gpt-22b": _paper_gpt(6144, 48, 64),
        "gpt-175b": _paper_gpt(12288, 96, 96),
        "gpt-530b": _paper_gpt(20480, 105, 128),
        "gpt-1t": _paper_gpt(25600, 128, 160),
        # huggingface.co/openai-community/gpt2, gpt2-medium, gpt2-large, gpt2-xl
        "gpt2": _gpt(768, 12, 12),
        "gpt2-medium": _gpt(1024, 24, 16),
        "gpt2-large": _gpt(1280, 36, 20),
        "gpt2-xl": _gpt(1600, 48, 25),
        # huggingface.co/EleutherAI/gpt-neox-20b, pythia-6.9b
        "gpt-neox-20b": _neox(6144, 24576, 44, 64, hidden_act="gelu_fast"),
        "pythia-6.9b": _neox(4096, 16384, 32, 32),
        # huggingface.co/meta-llama/Llama-2-7b-hf, Llama-2-13b-hf, Llama-2-70b-hf
        "llama2-7b": _decoder("llama", 4096, 11008, 32, 32, 32, 32000, 4096, dtype="float16"),
        "llama2-13b": _decoder("llama", 5120, 13824, 40, 40, 40, 32000, 4096, dtype="float16"),
        "llama2-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 32000, 4096, dtype="float16"),
        # huggingface.co/meta-llama/Meta-Llama-3-8B, Meta-Llama-3-70B
        "llama3-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
        "llama3-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
        # huggingface.co/meta-llama/Llama-3.1-8B, Llama-3.1-70B, Llama-3.1-405B
        "llama3.1-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
        "llama3.1-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
        "llama3.1-405b": _LLAMA3_405B,
        "llama3-405b": _LLAMA3_405B,
        # benchmarks of the Ultra-Scale Playbook, github.com/huggingface/nanotron scripts/scaling_benchmarks.py: as many
        # key-value heads as heads, embeddings tied below a width of 10,000
        "llama-1b-mha": _decoder("llama", 2048, 8192, 16, 32, 32, 131072, 4096, tie_word_embeddings=True),
        "llama-3b-mha": _decoder("llama", 3072, 8192, 28, 32, 32, 131072, 4096, tie_word_embeddings=True),
        "llama-8b-mha": _decoder("llama", 4096, 14336, 32, 32, 32, 131072, 4096),
        # huggingface.co/mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1
        "mistral-7b": _decoder("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
        "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32768),
        "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 65536),
        # huggingface.co/Qwen/Qwen2-7B, Qwen2-72B
        "qwen2-7b": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, max_window_layers=28),
        "qwen2-72b": _decoder("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072, max_window_layers=80),
        # huggingface.co/Qwen/Qwen3-8B, Qwen3-32B, Qwen3-30B-A3B, Qwen3-235B-A22B
        "qwen3-8b": _decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
        "qwen3-32b": _decoder("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
        "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 768),
        "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 1536),
        # huggingface.co/deepseek-ai/DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V3
        "deepseek-v2": _deepseek(
            "deepseek_v2",
            5120,
            12288,
            60,
            128,
            102400,
            1536,
            n_routed_experts=160,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            n_group=8,
            topk_group=3,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
        ),
        "deepseek-v2-lite": _deepseek(
            "deepseek_v2",
            2048,
            10944,
            27,
            16,
            102400,
            None,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            norm_topk_prob=False,
        ),
        "deepseek-v3": _deepseek(
            "deepseek_v3",
            7168,
            18432,
            61,
            128,
            129280,
            1536,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
        ),
        # huggingface.co/google/gemma-2-9b-it, gemma-2-27b-it, gemma-3-27b-it (its text model)
        "gemma2-9b": _decoder("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, sliding_window=4096),
        "gemma2-27b": _decoder("gemma2", 4608, 36864, 46, 32, 16, 256000, 8192, head_dim=128, sliding_window=4096),
        "gemma3-27b": _decoder(
            "gemma3_text", 5376, 21504, 62, 32, 16, 262208, 131072, head_dim=128, sliding_window=1024
        ),
        # huggingface.co/microsoft/Phi-3-mini-4k-instruct
        "phi3-mini": _decoder("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
        # huggingface.co/allenai/OLMo-2-1124-7B, OLMo-2-1124-13B
        "olmo2-7b": _decoder("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, dtype="float32"),
        "olmo2-13b": _decoder("olmo2", 5120, 13824, 40, 40, 40, 100352, 4096, dtype="float32"),
        # huggingface.co/openai/gpt-oss-20b, gpt-oss-120b
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        # huggingface.co/google-bert/bert-base-uncased, bert-large-uncased
        "bert-base": _bert(768, 3072, 12, 12),
        "bert-large": _bert(1024, 4096, 24, 16),
    }
)
"""Configurations by name, in the form of a ``config.json``: transformers' own classes take them too."""

_OF_THE_PAPER: Final = frozenset({"gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"})


def unknown_preset(name: str, others: str) -> UsageError:
    """What to say to a name that is none. ``others``: what else will do, where a sentence begins."""
    from difflib import get_close_matches  # only where it is needed: every start of the command line counts

    close = get_close_matches(name.lower(), PRESETS, n=4, cutoff=0.5)
    hint = f"the closest are {', '.join(close)}" if close else f"expected one of {', '.join(PRESETS)}"
    return UsageError(f"got the model {name!r}; {hint}. {others} will do as well")


@cache
def preset(name: str) -> ModelSpec:
    """A published model by name.

    Raises:
        UsageError: no such name; the message has those that are close.
    """
    if name not in PRESETS:
        raise unknown_preset(name, "A config.json or its folder")
    model = parse_config(PRESETS[name], name=name)
    return replace(model, family="paper") if name in _OF_THE_PAPER else model
