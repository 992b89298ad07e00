"""The smallest budget against `torch.utils.checkpoint` on every block, for small models of many families.

    python benchmarks/smallest.py [family ...]

Both peaks are the allocator's own (one thread, CPU); parameters, gradients and batch included, no optimizer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from torch import nn

import jettison
from jettison.capture.blocks import find_blocks
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors

WORDS, ROWS, LENGTH = 96, 2, 64
PLAIN = {"vocab_size": WORDS, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "use_cache": False}
GROUPED = {**PLAIN, "num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "kv_channels": 16,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_cache": False,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **GROUPED,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "attention_chunk_size": 32,
            "moe_layers": [1, 3],
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {
            **PLAIN,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "lru_width": 64,
            "head_dim": 16,
            "attention_window_size": 32,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "longformer": (
        "LongformerForMaskedLM",
        "LongformerConfig",
        {
            **{k: v for k, v in PLAIN.items() if k != "use_cache"},
            "num_hidden_layers": 4,
            "max_position_embeddings": 256,
            "attention_window": [16] * 4,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": WORDS,
            "d_model": 64,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
    ),
}


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in training mode and its batch."""
    model_name, config_name, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    ids = torch.randint(3, WORDS, (ROWS, LENGTH))
    if name == "whisper":
        return model.train(), {"input_features": torch.randn(ROWS, 16, 64), "labels": ids[:, :32]}
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of a step that holds its output; the highest of three.

    The first counts: what a module holds on to from one step to the next (RecurrentGemma its last state, graph and all)
    is there before the second begins, and is taken off when that lets go of it.
    """

    def step() -> None:
        output = model(**batch)
        output.loss.backward()

    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        found.append(measured_peak(step, static_tensors=static_tensors(model, batch)).peak_bytes)
    return max(found)


def checkpointed(model: nn.Module) -> None:
    """Every block under torch's non-reentrant checkpoint."""
    for name in find_blocks(model):
        block = model.get_submodule(name)
        block.forward = _under_checkpoint(block.forward)


def _under_checkpoint(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def compare(name: str) -> None:
    """One line of the table."""
    model, batch = built(name)
    checkpointed(model)
    theirs = peak(model, batch)
    model, batch = built(name)
    try:
        jettison.auto_checkpoint(model, batch, Bytes(1))
    except Infeasible as refused:
        least, reason = refused.minimum_budget_bytes, refused.reason
    with jettison.auto_checkpoint(model, batch, Bytes(least)) as handle:
        ours = peak(model, batch)
    assert handle.plan is not None
    over = ours - least
    print(
        f"{name:16} checkpoint {theirs:>9,}  smallest budget {least:>9,} ({least / theirs:.3f})  predicted "
        f"{handle.plan.predicted.peak_bytes:>9,}  measured {ours:>9,}  over {over:>7,}  {reason}",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for family in sys.argv[1:] or FAMILIES:
        compare(family)
