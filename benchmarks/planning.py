"""CPU seconds that planning a live step takes, from before `jettison.auto_checkpoint` to after it.

    python -m benchmarks.planning [--cases toy gpt2-smallest ...] [--profile toy] [--json FILE]

Each case runs in a process of its own, on one thread; imports of torch, transformers and Jettison are not counted,
processes that planning starts are. A budget is a share of the way from the smallest budget (0.0) to no checkpointing
(1.0); the smallest budget of a model is what its `Infeasible` case is told. With ``--profile`` a case runs under
cProfile, and the dearest functions are printed. Of several ranks the slowest counts.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = {"toy": 2.0, "layers": 5.0, "gpt2": 8.0, "ranks": 10.0, "kept": 0.5}
"""CPU seconds asked for, by the first word of a case's group."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planned step.

    Args:
        share: of the way from the smallest budget to no checkpointing; None: a budget that nothing fits.
        ranks: processes; more than one run under torchrun.
        kept: the plan was made before, and is read from a file.
        target: see `TARGETS`; empty where none is asked for.
    """

    build: str
    share: float | None = 0.5
    ranks: int = 1
    kept: bool = False
    target: str = ""


CASES = {
    "toy-infeasible": Case(build="toy", share=None, target="toy"),
    "toy": Case(build="toy", target="toy"),
    "toy-smallest": Case(build="toy", share=0.02, target="toy"),
    "toy-kept": Case(build="toy", kept=True, target="kept"),
    "layers12-infeasible": Case(build="layers12", share=None, target="layers"),
    "layers12": Case(build="layers12", target="layers"),
    "moe-infeasible": Case(build="moe", share=None, target="layers"),
    "moe": Case(build="moe", target="layers"),
    "gpt2-infeasible": Case(build="gpt2", share=None, target="gpt2"),
    "gpt2-roomy": Case(build="gpt2", share=1.5, target="gpt2"),
    "gpt2-half": Case(build="gpt2", target="gpt2"),
    "gpt2-smallest": Case(build="gpt2", share=0.02, target="gpt2"),
    "gpt2-kept": Case(build="gpt2", kept=True, target="kept"),
    "loop-infeasible": Case(build="loop", share=None, target="layers"),
    "loop": Case(build="loop", target="layers"),
    "fsdp2-infeasible": Case(build="fsdp2", share=None, ranks=2, target="ranks"),
    "fsdp2": Case(build="fsdp2", ranks=2, target="ranks"),
    "interleaved-infeasible": Case(build="interleaved", share=None, ranks=2, target="ranks"),
    "interleaved": Case(build="interleaved", ranks=2, target="ranks"),
}
"""A model's `Infeasible` case comes first: it tells what the others' budgets are shares of."""


Planning = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of `auto_checkpoint` but for the budget."""


def _gpt2_like(layers: int, hidden: int, vocabulary: int, sequence: int, rows: int, **more: Any) -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = GPT2Config(vocab_size=vocabulary, n_positions=1024, n_embd=hidden, n_layer=layers, n_head=heads, **more)
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, vocabulary, (rows, sequence))
    return model, {"input_ids": ids, "labels": ids.clone()}


def _with_adamw(model: Any, batch: Any) -> Planning:
    import torch

    return (model, batch), {"optimizer": torch.optim.AdamW(model.parameters(), 1e-3)}


def _toy() -> Planning:
    return _with_adamw(*_gpt2_like(4, 64, 256, 64, 4))


def _layers12() -> Planning:
    return _with_adamw(*_gpt2_like(12, 512, 4096, 128, 4))


def _gpt2() -> Planning:
    return _with_adamw(*_gpt2_like(12, 768, 50257, 256, 2))


def _moe() -> Planning:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    ids = torch.randint(0, 512, (4, 64))
    return _with_adamw(MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()})


def _accumulating(model: Any, batch: Any) -> None:
    for rows in zip(*(one.chunk(4) for one in batch.values()), strict=True):
        (model(**dict(zip(batch, rows, strict=True))).loss / 4).backward()


def _loop() -> Planning:
    (model, batch), more = _with_adamw(*_gpt2_like(6, 128, 512, 64, 8))
    return (model, batch), {**more, "step": _accumulating}


def _fsdp2() -> Planning:
    from torch.distributed.fsdp import fully_shard

    model, batch = _gpt2_like(6, 128, 512, 64, 8)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    args, more = _with_adamw(model, batch)
    return args, {**more, "step": _accumulating}


def _interleaved() -> Planning:
    import torch
    from torch import distributed, nn
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.manual_seed(0)
    rank, ranks, width = distributed.get_rank(), distributed.get_world_size(), 64
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(8)]
    each = len(layers) // (2 * ranks)
    mine = [rank, rank + ranks]
    stages = [
        PipelineStage(nn.Sequential(*layers[n * each : (n + 1) * each]), n, 2 * ranks, torch.device("cpu"))
        for n in mine
    ]
    schedule = ScheduleInterleaved1F1B(stages, 8, nn.functional.mse_loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]

    def step(schedule: Any, x: Any) -> None:
        schedule.step(*[x] * (rank == 0), target=x if rank == ranks - 1 else None, return_outputs=False)

    batch = torch.randn(16, 32, width)
    return (schedule, batch), {"optimizer": torch.optim.AdamW(parameters, 1e-3), "step": step}


BUILDERS: dict[str, Callable[[], Planning]] = {
    "toy": _toy,
    "layers12": _layers12,
    "moe": _moe,
    "gpt2": _gpt2,
    "loop": _loop,
    "fsdp2": _fsdp2,
    "interleaved": _interleaved,
}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended; user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run_case(name: str, budget_bytes: int, plan: str | None = None, profiled: str | None = None) -> dict[str, Any]:
    """Plan a case in this process; seconds and what was found.

    Args:
        plan: where the plan is kept.
        profiled: a file for cProfile's figures.
    """
    import torch

    import jettison

    torch.set_num_threads(1)
    case = CASES[name]
    if case.ranks > 1:
        torch.distributed.init_process_group("gloo")
    args, more = BUILDERS[case.build]()
    if plan:
        more["plan"] = plan
    budget = jettison.Bytes(budget_bytes)
    planner = jettison.auto_checkpoint
    profiler = cProfile.Profile() if profiled else None
    begin = cpu_seconds()
    found: dict[str, Any] = {}
    if profiler is not None:
        profiler.enable()
    try:
        made = planner(*args, budget, **more).plan
        found = {"peak_bytes": made.predicted.peak_bytes, "hash": made.hash, "minimum": made.minimum_budget_bytes}
    except jettison.Infeasible as error:
        found = {"minimum": error.minimum_budget_bytes}
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profiled)
    found["seconds"] = cpu_seconds() - begin
    if case.ranks > 1:
        every: list[Any] = [None] * case.ranks
        torch.distributed.all_gather_object(every, found)
        found = max(every, key=lambda one: one["seconds"]) | {"minimum": max(one["minimum"] for one in every)}
        torch.distributed.destroy_process_group()
    return found


def plain_budget(build: str, ranks: int) -> str:
    """The case that says what a step takes without checkpointing: a budget that is larger than any."""
    return next(name for name, case in CASES.items() if case.build == build and case.ranks == ranks and case.share)


def _start(name: str, budget_bytes: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """A case in a process, or on ranks, of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = ["-m", "benchmarks.planning", "--one", name, str(budget_bytes), str(answer), *more]
        command = [sys.executable, *words]
        if CASES[name].ranks > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(CASES[name].ranks), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.exists():
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _follow(name: str, budget_bytes: int) -> dict[str, Any]:
    """A case whose plan another process has made and kept."""
    with tempfile.TemporaryDirectory() as folder:
        plan = ["--plan", str(Path(folder) / "plan.json")]
        _start(name, budget_bytes, plan)
        return _start(name, budget_bytes, plan)


def _profiled(name: str, budget_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "profile")
        _start(name, budget_bytes, ["--dump", file])
        shown = pstats.Stats(file)
        shown.sort_stats("tottime").print_stats(40)
        shown.sort_stats("cumulative").print_stats(70)


def measure(names: Sequence[str], budgets: dict[str, tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """Rows, printed as they come.

    Args:
        budgets: by model, the smallest budget and the peak without checkpointing; filled as they become known.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        case = CASES[name]
        budget = _budget(name, budgets)
        found = _follow(name, budget) if case.kept else _start(name, budget)
        if case.share is None:
            budgets.setdefault(case.build, (found["minimum"], 0))
        rows[name] = found
        target = TARGETS.get(case.target)
        asked = "" if target is None else f"of {target:4.1f}{'' if found['seconds'] <= target else '  MISSED'}"
        what = f"smallest {found['minimum']:>13,}  peak {found.get('peak_bytes', 0):>13,}  {found.get('hash', '')[:12]}"
        print(f"{name:24} {found['seconds']:6.2f} s {asked:16} {what}", flush=True)
    return rows


def _budget(name: str, budgets: dict[str, tuple[int, int]]) -> int:
    case = CASES[name]
    if case.share is None:
        return 1
    if case.build not in budgets:
        least = next(one for one, other in CASES.items() if other.build == case.build and other.share is None)
        budgets[case.build] = (_start(least, 1)["minimum"], 0)
    smallest, plain = budgets[case.build]
    if not plain:
        plain = _start(name, 1 << 46)["peak_bytes"]
        budgets[case.build] = smallest, plain
    return smallest + round(case.share * (plain - smallest))


def main() -> int:
    """Print rows as they come; 1 where a case takes longer than is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--profile", choices=list(CASES))
    parser.add_argument("--json", type=Path, help="rows go there; budgets are taken from a file that is there")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "BYTES", "ANSWER"), help=argparse.SUPPRESS)
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        warnings.simplefilter("ignore")
        name, nbytes, answer = asked.one
        first = int(os.environ.get("RANK", "0")) == 0
        found = run_case(name, int(nbytes), plan=asked.plan, profiled=asked.dump if first else None)
        if first:
            Path(answer).write_text(json.dumps(found))
        return 0
    before = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    budgets = {name: tuple(ends) for name, ends in before.get("budgets", {}).items()}
    if asked.profile:
        _profiled(asked.profile, _budget(asked.profile, budgets))
        return 0
    rows = measure(asked.cases, budgets)
    if asked.json:
        asked.json.write_text(json.dumps({"budgets": budgets, "rows": before.get("rows", {}) | rows}, indent=1) + "\n")
    missed = [name for name, row in rows.items() if CASES[name].target and row["seconds"] > TARGETS[CASES[name].target]]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
