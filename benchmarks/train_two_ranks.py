"""The two-ranks recipe beside DTensor's own tensor and sequence parallelism: peak of a step on each rank, and losses.

    python -m benchmarks.train_two_ranks [--steps 12] [--json benchmarks/results/train-two-ranks-cpu.json]

Starts 2 gloo ranks and trains the recipe's model in each of the ways of `WAYS`, with `jettison train`'s own loop: the
same data, weights, optimizer and meter. Only what shards the layers and what is computed again differ. Peaks are of the
second step, the first one that starts with the optimizer's state, and of the rank where they are highest.

The loop seeds the ranks apart, as sequence parallelism wants it, for all ways alike. They draw in the same places, so
that losses can be compared with the recipe's dropout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.train.recipe import CheckpointSection, LogSection, PlanSection, TrainRecipe, read_recipe

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "two-ranks.toml"
RESULT = ROOT / "benchmarks" / "results" / "train-two-ranks-cpu.json"
TOLERANCE = 1e-4
"""Of losses, relative: fp32 sums in another order, added up over the steps."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train the model.

    Args:
        stock: layers are sharded by torch's own styles.
        checkpointed: every layer runs under `torch.utils.checkpoint`.
        budget: "recipe", or the way whose peak it is; without, nothing is computed again but for ``checkpointed``.
    """

    name: str
    stock: bool = False
    checkpointed: bool = False
    budget: str | None = None


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "stock": Way(name="DTensor's own TP + SP", stock=True),
        "stock-checkpoint": Way(
            name="DTensor's own TP + SP, torch.utils.checkpoint on each layer", stock=True, checkpointed=True
        ),
        "ours": Way(name="Jettison's TP + SP, no plan"),
        "ours-budget": Way(name="Jettison's TP + SP, under the recipe's budget", budget="recipe"),
        "ours-tight": Way(name="Jettison's TP + SP, under the second row's peak", budget="stock-checkpoint"),
    }
)


# on the ranks ---------------------------------------------------------------------------------------------------------


def shard_by_torch(model: Any, mesh: Any) -> None:
    """The reference GPT by `torch.distributed.tensor.parallel`, as its tutorial does a transformer. s is dim 0 here."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def gathered(*others: None) -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(0), *others), desired_input_layouts=(Replicate(), *others))

    def embedding() -> RowwiseParallel:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))

    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "attention": gathered(None),
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(0)),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "mlp": gathered(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(layer, mesh, plan)
    tied = model.head.weight is model.tokens.weight
    around = {
        "tokens": embedding(),
        "positions": embedding(),
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, around)
    if tied:
        model.head.weight = model.tokens.weight


@contextmanager
def sharding(way: Way) -> Iterator[None]:
    """The loop shards layers in this way."""
    from torch.utils.checkpoint import checkpoint

    from jettison.train.rank_layout import Places

    ours = Places.split_layers

    def split(places: Places, model: Any) -> None:
        if way.stock:
            shard_by_torch(model, places.mesh["tp"])
        else:
            ours(places, model)
        for layer in model.layers if way.checkpointed else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    Places.split_layers = split  # type: ignore[method-assign]
    try:
        yield
    finally:
        Places.split_layers = ours  # type: ignore[method-assign]


def measure(steps: int, folder: Path, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """On every rank: what each way comes to."""
    made = replace(read_recipe(str(RECIPE)), steps=steps, checkpoint=CheckpointSection())
    out: dict[str, Any] = {}
    for key in ways:
        plan = made.plan if WAYS[key].budget == "recipe" else PlanSection()
        if WAYS[key].budget in out:
            plan = PlanSection(budget=f"{out[WAYS[key].budget]['peak_bytes']}B")
        log = LogSection(folder=str(folder / key))
        out[key] = run(replace(made, plan=plan, log=log), WAYS[key])
    return out


def run(recipe: TrainRecipe, way: Way) -> dict[str, Any]:
    """Peaks, seconds and losses of one run."""
    from jettison.cli.train import train

    with sharding(way):
        result = train(recipe)
    assert result.second_step_peaks is not None
    lines = map(json.loads, Path(recipe.log.folder, "log.jsonl").read_text("utf-8").splitlines())
    return {
        "peak_bytes": result.second_step_peaks.peak_bytes,
        "phases": result.second_step_peaks.phases,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "step_seconds": result.step_seconds,
        "losses": [line["loss"] for line in lines if line["event"] == "step"],
    }


# the table ------------------------------------------------------------------------------------------------------------


def on_ranks(steps: int) -> dict[str, Any]:
    """`measure` on two gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            "2",
            "-m",
            "benchmarks.train_two_ranks",
            "--steps",
            str(steps),
            "--rank",
            folder,
        ]
        subprocess.run(command, check=True, timeout=1800, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text("utf-8"))
        return found


def table(found: Mapping[str, Any]) -> str:
    """Markdown."""
    budget = parse_bytes(str(read_recipe(str(RECIPE)).plan.budget))
    stock = found["stock"]["peak_bytes"]
    rows = [
        f"| 2 gloo ranks | peak of a rank | of DTensor's | within {format_bytes(budget)} | loss at the end |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for key, way in WAYS.items():
        peak = found[key]["peak_bytes"]
        share, fits = f"{100 * peak / stock:.1f} %", "yes" if peak <= budget else "no"
        loss = f"{found[key]['losses'][-1]:.6f}"
        rows.append(f"| {way.name} | {format_bytes(peak)} | {share} | {fits} | {loss} |")
    predicted = format_bytes(found["ours-budget"]["predicted_peak_bytes"])
    text = f"Under the recipe's budget {predicted} were predicted. The losses of all steps differ by at most"
    return "\n".join(rows) + f"\n\n{text} {largest_difference(found):.0e} of their value.\n"


def largest_difference(found: Mapping[str, Any]) -> float:
    """Relative, of a loss of any way from DTensor's, over all steps."""
    expected = found["stock"]["losses"]
    pairs = [zip(one["losses"], expected, strict=True) for one in found.values()]
    return max(abs(a / b - 1) for pair in pairs for a, b in pair)


def write(found: Mapping[str, Any], steps: int, result: Path) -> None:
    """Write the figures, and a table of them."""
    document = {"schema": "jettison.benchmark/1", "recipe": RECIPE.name, "steps": steps, "ways": found}
    result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = table(found)
    result.with_suffix(".md").write_text(f"# The two-ranks recipe\n\n{text}", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Measure and write; with ``--rank`` this is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is None:
        found = on_ranks(given.steps)
        write(found, given.steps, given.json)
        print(table(found))
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    found = measure(given.steps, given.rank)
    if distributed.get_rank() == 0:
        (given.rank / "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # as tests/support/ranks.py does, and why


if __name__ == "__main__":
    main(sys.argv[1:])
