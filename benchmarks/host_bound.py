"""Host time of a step: kernels so small that nothing else counts.

    python -m benchmarks.host_bound [--models llama gpt2 qwen3_moe] [--rounds 25]

16 layers, hidden size 32, 8 tokens, fp32, one thread: CPU seconds of the thread that runs forward and backward, divided
by those of plain PyTorch in the same round. On an accelerator the same Python runs while kernels do; a step is bound by
the host wherever kernels take less time than this.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jettison
from benchmarks.models import Batch, Size, build, loss_of
from benchmarks.rivals import Rival, Undo, full_checkpoint, plain, selective_checkpoint
from jettison.verify.differences import same_bits
from jettison.verify.timing import interleaved

SIZE = Size(
    layers=16, hidden=32, heads=4, kv_heads=2, ffn=64, vocabulary=128, sequence=8, micro_batch=1, dtype=torch.float32
)
RESULTS = Path(__file__).parent / "results"


def identity_hooks(model: nn.Module, _batch: Batch) -> Undo:
    """Saved-tensor hooks that do nothing, around the whole model: the least that any hook costs."""
    forward = model.forward

    def hooked(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return forward(*args, **kwargs)

    model.forward = hooked
    return Undo()


def policy(name: str) -> Rival:
    """Every layer under one policy of Jettison's."""
    return Rival(name=f"jettison {name}", apply=lambda model, batch: jettison.apply(model, name, batch=batch))


RIVALS = (
    Rival(name="plain", apply=plain),
    Rival(name="hooks that do nothing", apply=identity_hooks),
    Rival(name="checkpoint, every layer", apply=full_checkpoint(1)),
    Rival(name="selective contexts, save matmuls", apply=selective_checkpoint),
    *(policy(name) for name in ("none", "selective-op", "every:2", "full")),
)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of one model, by rival; and whether each rival's gradients are bitwise those of plain PyTorch."""
    steps: dict[str, Callable[[], None]] = {}
    models = []
    for rival in RIVALS:
        model, batch = build(name, SIZE)
        rival.apply(model, batch)
        models.append(model)
        steps[rival.name] = _step(model, batch)
    timing = interleaved(rounds, steps, warmup=3, clock=time.thread_time)
    for step in steps.values():
        torch.manual_seed(0)
        step()
    return {
        rival.name: {
            "ratio": case.ratio,
            "ratio_low": case.ratio_low,
            "ratio_high": case.ratio_high,
            "median_milliseconds": case.median_seconds * 1000,
            "gradients_identical": _same_gradients(models[0], model),
        }
        for rival, model, case in zip(RIVALS, models, timing.values(), strict=True)
    }


def _step(model: nn.Module, batch: Batch) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()

    return step


def _same_gradients(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all((a.grad is None and b.grad is None) or same_bits(a.grad, b.grad) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "gpt2", "qwen3_moe"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, default=RESULTS / "host-bound-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {name: measure(name, options.rounds) for name in options.models}
    document = {"size": SIZE.describe(), "rounds": options.rounds, "torch": torch.__version__, "models": found}
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    text = table(found)
    options.json.with_suffix(".md").write_text(text)
    print(text)
    return 0 if all(row["gradients_identical"] for rows in found.values() for row in rows.values()) else 1


def table(found: dict[str, dict[str, Any]]) -> str:
    """Ratios as Markdown, one column a model."""
    lines = [
        "# Host time of a step ÷ plain PyTorch's",
        "",
        "`python -m benchmarks.host_bound`: " + (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip(),
        "",
        "| | " + " | ".join(found) + " |",
        "| --- |" + " ---: |" * len(found),
    ]
    for rival in RIVALS:
        ratios = [f"{rows[rival.name]['ratio']:.2f}" for rows in found.values()]
        lines.append(f"| {rival.name} | " + " | ".join(ratios) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
