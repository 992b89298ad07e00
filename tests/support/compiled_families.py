"""Small language models whose blocks are to be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def language_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=500, attn_implementation="eager", **sizes)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **small))
    config = transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **small)
    return transformers.Qwen3ForCausalLM(config)


class Loss(nn.Module):
    """A language model, and its loss as the only thing that comes out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def blocks_of(model: Loss) -> list[nn.Module]:
    inside = model.model
    return list(inside.transformer.h if hasattr(inside, "transformer") else inside.model.layers)
