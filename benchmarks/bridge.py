"""Megatron-Bridge's own notes on peaks: what its recipes allocated on H100, and how they are described.

`tests/facts/published_memory.csv`. Its reports count 10^9 bytes as a GB (``training/utils/train_utils.py``,
``report_memory``).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

FACTS: Final = Path(__file__).parent.parent / "tests" / "facts" / "published_memory.csv"
GB: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class BridgeRow:
    """One run, GB as published."""

    name: str
    gb: float
    run: Run

    def predicted(self) -> float:
        """GB of the worst rank, with even routing."""
        return forecast(self.run).worst.peak.nbytes / GB


def moonlight() -> ModelSpec:
    """Moonlight 16B-A3B, as its config.json says."""
    values = {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return parse_config(values, name="moonlight")


def rows() -> list[BridgeRow]:
    """Those whose recipes are in the repository and do what is described."""
    with FACTS.open(encoding="utf-8") as file:
        return list(_rows(list(csv.DictReader(file))))


def _rows(facts: list[dict[str, str]]) -> Iterator[BridgeRow]:
    common: dict[str, Any] = {"like": "megatron-0.19", "loss": "te", "seq": 4096, "micro_batch": 1, "zero": 1}
    for row in facts:
        modules = row["recompute"].removeprefix("selective:").strip("[]").replace(" ", ",")
        again = None if row["recompute"] == "none" else modules
        if row["model"] == "Moonlight-16B-A3B":
            more = {"precision": "bf16-bridge", "tp": 2, "dp": 4, "ep": 8, "expert_tp": 1, "micro_batches": 1}
            model = moonlight()
        elif row["source"].endswith("#3880"):
            more = {"precision": "bf16", "dp": 16, "ep": 16, "micro_batches": 64}
            model = preset("qwen3-30b-a3b")
        else:
            continue
        asked = RunRequest(**common, **more, dispatcher="alltoall", recompute_modules=again)
        words = f"{row['model']}, {f'again {again}' if again else 'nothing again'}"
        yield BridgeRow(name=words, gb=float(row["memory_gib"]), run=resolve(model, asked).run)


if __name__ == "__main__":
    for found in rows():
        value = found.predicted()
        print(f"{found.name:50} {found.gb:7.3f} {value:7.3f} {100 * (value / found.gb - 1):+5.1f} %")
