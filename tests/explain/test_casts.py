"""What is said of autocast where its casts are not written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


SCAN = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 320}


def test_it_is_said_where_the_casts_are_not_written_down(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SCAN), encoding="utf-8")
    (sentence,) = said(str(path), precision="bf16-autocast")
    matrices = 3 * (48 * 192 + 96 * (3 + 2 * 8) + 3 * 96 + 96 * 48) + 320 * 48
    assert f"up to {format_bytes(2 * matrices)} after a forward" in sentence
    assert not said(str(path), precision="bf16-autocast", dp=2, zero=3)


def test_nothing_is_said_where_they_are_counted_or_not_made(config: str) -> None:
    for words in ({"precision": "bf16"}, {"precision": "bf16-autocast"}, {"precision": "bf16-autocast", "lora": "4"}):
        assert not said(config, **words)
