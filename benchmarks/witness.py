"""What witnesses cost: one step with them ÷ the same step with the same hooks and without them.

    python -m benchmarks.witness [--device cuda] [--rounds 12] [--models llama gpt2 qwen3 llama-2048]

One model, one plan; between cases only `region.how` changes, so that the same recipes run in every case. Rounds are
interleaved and ratios are taken inside each round. Wall-clock and CPU seconds are both there: what else runs on a
shared machine moves the first and hardly the second. On CUDA kernel launches are counted, and the seconds after the
last kernel of backward in which the witnesses are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import jettison
from benchmarks.models import Batch, Size, build, loss_of
from jettison.planner import Applied
from jettison.runtime import witness
from jettison.runtime.witness import Check

RESULTS = Path(__file__).parent / "results"
CASES = (Check.OFF, Check.SAMPLED, Check.ALWAYS, Check.FULL)
SMALL = Size()
WIDE = replace(SMALL, layers=2, hidden=2048, heads=16, kv_heads=8, ffn=5632, sequence=512, micro_batch=1)
LONG = replace(WIDE, layers=6, sequence=2048, micro_batch=4)  # for accelerators: kernels that take longer than launches
MODELS = {
    "llama": ("llama", SMALL),
    "gpt2": ("gpt2", SMALL),
    "qwen3": ("qwen3", SMALL),
    "llama-2048": ("llama", WIDE),
    "llama-2048-long": ("llama", LONG),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case over all rounds; ratios are to the same step with ``check="off"``, medians and quartiles over rounds."""

    model: str
    policy: str
    check: str
    dropped: int  # saved tensors a step that are computed again
    wall_ratio: float
    wall_low: float
    wall_high: float
    cpu_ratio: float
    cpu_low: float
    cpu_high: float
    milliseconds: float
    launches: int | None  # kernels a step, on CUDA
    settle_milliseconds: float | None  # spent at the end of backward, where differences gather


def measure(name: str, policy: str, rounds: int, device: str) -> list[Row]:
    """All cases of one model under one policy."""
    kind, size = MODELS[name]
    model, batch = build(kind, size, device)
    with jettison.apply(model, policy, batch=batch) as handle:
        dropped = 0
        wall: dict[str, list[float]] = {case: [] for case in CASES}
        cpu: dict[str, list[float]] = {case: [] for case in CASES}
        for case in CASES * 2:
            _step(model, batch, handle, case)
            dropped = sum(report.slots_dropped for report in handle.report())
        for index in range(rounds):
            order = CASES[index % len(CASES) :] + CASES[: index % len(CASES)]
            for case in order if index % 2 else order[::-1]:
                seconds, processor = _timed(lambda case=case: _step(model, batch, handle, case), device)
                wall[case].append(seconds)
                cpu[case].append(processor)
        more = {case: _device_figures(model, batch, handle, case, device) for case in CASES}
    rows = []
    for case in CASES:
        walls = _ratios(wall[case], wall[Check.OFF])
        cpus = _ratios(cpu[case], cpu[Check.OFF])
        launches, settling = more[case]
        rows.append(
            Row(
                model=name,
                policy=policy,
                check=case,
                dropped=dropped,
                wall_ratio=walls[1],
                wall_low=walls[0],
                wall_high=walls[2],
                cpu_ratio=cpus[1],
                cpu_low=cpus[0],
                cpu_high=cpus[2],
                milliseconds=1e3 * statistics.median(wall[case]),
                launches=launches,
                settle_milliseconds=settling,
            )
        )
    return rows


def _step(model: nn.Module, batch: Batch, handle: Applied, case: Check) -> None:
    for region in handle.regions:
        region.how = case
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()


def _timed(run: Callable[[], None], device: str) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    if device == "cuda":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    found = time.perf_counter() - wall, time.process_time() - processor
    gc.enable()
    return found


def _ratios(of: list[float], to: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(of, to, strict=True)], n=4)
    return low, middle, high


def _device_figures(
    model: nn.Module, batch: Batch, handle: Applied, case: Check, device: str
) -> tuple[int | None, float | None]:
    if device != "cuda":
        return None, None
    spent: list[float] = []
    settle = witness.settle

    def timed(task: int) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        settle(task)
        spent.append(time.perf_counter() - start)

    witness.settle = timed
    try:
        _step(model, batch, handle, case)
    finally:
        witness.settle = settle
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _step(model, batch, handle, case)
        torch.cuda.synchronize()
    launches = sum(1 for event in profiler.profiler.kineto_results.events() if "LaunchKernel" in event.name())
    return launches, 1e3 * sum(spent)


def table(rows: list[Row], title: str) -> str:
    """The rows as Markdown."""
    lines = [
        f"# What witnesses cost ({title})",
        "",
        'Step time ÷ the same step under the same plan with `check="off"`: median of interleaved rounds, '
        "quartiles in brackets.",
        "",
        "| model | policy | check | again | wall | CPU seconds | ms a step | launches | end of backward, ms |",
        "| --- | --- | --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        launches = "" if row.launches is None else f"{row.launches:,}"
        settling = "" if row.settle_milliseconds is None else f"{row.settle_milliseconds:.2f}"
        lines.append(
            f"| {row.model} | {row.policy} | {row.check} | {row.dropped} "
            f"| {row.wall_ratio:.3f} ({row.wall_low:.3f}–{row.wall_high:.3f}) "
            f"| {row.cpu_ratio:.3f} ({row.cpu_low:.3f}–{row.cpu_high:.3f}) "
            f"| {row.milliseconds:.1f} | {launches} | {settling} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.witness", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--policies", nargs="+", default=["full", "selective-op"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    rows: list[Row] = []
    for name in options.models:
        for policy in options.policies:
            rows += measure(name, policy, options.rounds, options.device)
            print(table(rows[-len(CASES) :], name), flush=True)
    title = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, one thread"
    stem = options.out / f"witness-{options.device}"
    document: dict[str, Any] = {"device": title, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(table(rows, title), encoding="utf-8")


if __name__ == "__main__":
    main()
