"""The models that the benchmarks train: random weights, built here, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """L layers, h hidden, a heads, k KV heads, f FFN width (gated models), V vocabulary, s sequence, b micro-batch."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocabulary: int = 8192
    sequence: int = 512
    micro_batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    attention: str = "sdpa"

    def describe(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}


def build(name: str, size: Size, device: str = "cpu") -> tuple[nn.Module, Batch]:
    """A model in training mode and its batch (`input_ids`, `labels`), the same for the same arguments."""
    if name not in BUILDERS:
        raise ValueError(f"got model {name!r}, expected one of {sorted(BUILDERS)}")
    torch.manual_seed(0)
    with torch.device(device):
        model = BUILDERS[name](size)
    model = model.to(size.dtype).train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocabulary, (size.micro_batch, size.sequence), generator=generator).to(device)
    return model, {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss alone: the rest of the output, logits first, is let go before backward."""
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The repeated layers, in order."""
    if hasattr(model, "transformer"):
        inner = model.transformer.h
    else:
        inner = model.layers if hasattr(model, "layers") else model.model.layers
    assert isinstance(inner, nn.ModuleList)
    return inner


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_gated(size)))


def _qwen3(size: Size) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_gated(size), head_dim=size.hidden // size.heads))


def _qwen3_moe(size: Size) -> nn.Module:
    """Eight experts of which a token takes two; each is as wide as the FFN of a dense model is."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": size.ffn}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_gated(size), **experts, head_dim=size.hidden // size.heads))


def _gpt2(size: Size) -> nn.Module:
    """FFN width is 4h; dropout is GPT-2's own 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.sequence,
        vocab_size=size.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=size.attention,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its name does not say so, and the warning about that does not compile
    return model


def _gated(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.ffn,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.sequence,
        "use_cache": False,
        "attn_implementation": size.attention,
    }


BUILDERS: dict[str, Callable[[Size], nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
