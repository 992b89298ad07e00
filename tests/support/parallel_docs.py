"""What ranks do for tests/parallel/test_parallel_docs.py: the examples of docs/parallel.md, as they stand there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from jettison.models.reference import Gpt, GptConfig
from jettison.train.pipeline import StageModule

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
CONFIG = GptConfig(layers=2, hidden=32, heads=4, vocab=64, positions=16, dropout=0.1)
B, S, MICRO_BATCHES = 2, 16, 4


def examples() -> list[str]:
    """Python on the page, for a machine without an accelerator."""
    parts = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    return [part.split("```")[0].replace('"cuda"', '"cpu"') for part in parts]


def made() -> Gpt:
    torch.manual_seed(0)
    return Gpt(CONFIG)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, CONFIG.vocab, (B * MICRO_BATCHES, S), generator=generator) for _ in range(2))  # type: ignore[return-value]


def run(_: Any) -> list[dict[str, Any]]:
    """For each example: does every parameter have a gradient, and was anything dropped?"""
    import transformers

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    ids, labels = data()
    llama = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
    )
    part = StageModule(made(), range(rank, rank + 1), seq=S)
    stage = {
        "part": part,
        "rank": rank,
        "ranks": ranks,
        "device": torch.device("cpu"),
        "micro_batches": MICRO_BATCHES,
        "micro_batch": B,
        "seq": S,
        "hidden": CONFIG.hidden,
        "loss_fn": part.loss,
        "ids": ids,
        "labels": labels,
    }
    shards = [
        {"model": made(), "ids": ids[:B], "labels": labels[:B], "ranks": ranks, "budget": "315KiB"} for _ in range(2)
    ]
    shards[1]["micro_batches"] = list(zip(ids.split(B), labels.split(B), strict=True))
    whole = transformers.LlamaForCausalLM(llama)
    tensor = {"model": whole, "dp": 1, "t": ranks, "seed": 3, "batch": {"input_ids": ids, "labels": ids}}
    found = []
    for example, names in zip(examples(), (tensor, *shards, stage), strict=True):
        exec(compile(example, str(PAGE), "exec"), names)
        module = names.get("part", names.get("model"))
        reports = names["handle"].report() if "handle" in names else []
        found.append(
            {
                "without": [name for name, p in module.named_parameters() if p.grad is None],
                "dropped": sum(report.slots_dropped for report in reports),
                "losses": len(names.get("losses", ())),
            }
        )
    return found
