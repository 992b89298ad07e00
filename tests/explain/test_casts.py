"""Copies that autocast makes of weights: what is said of them is what a forward keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jettison.explain.advice import casts
from jettison.predict.forecast import forecast
from jettison.predict.run_request import RunRequest, run_of
from jettison.units import format_bytes

SIZES = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES), encoding="utf-8")
    return str(path)


def said(config: str, **words: object) -> list[str]:
    return list(casts(forecast(run_of(config, RunRequest(seq=16, **words)))))  # type: ignore[arg-type]


def test_copies_are_those_that_a_forward_keeps(config: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SIZES.items() if k != "model_type"}))
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randint(0, 320, (1, 16)))
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    del out
    assert found == 2 * (3 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 112) + 320 * 48)
    (sentence,) = said(config, precision="bf16-autocast")
    assert format_bytes(found) in sentence


def test_nothing_is_said_where_they_are_counted_or_not_made(config: str) -> None:
    assert not said(config, precision="bf16")
    assert not said(config, precision="bf16-autocast", dp=2, zero=3)
    assert not said(config, precision="bf16-autocast", lora="4")
    assert said(config, precision="bf16-autocast", dp=2, zero=2)
