"""Compiled blocks: torch's activation_memory_budget, and Jettison under the peak that it came to.

    python -m benchmarks.compiled --models llama gpt2 --rounds 10 --date 2026-01-31

Each block is compiled by itself, as torchtitan does, on both sides; what is around the blocks runs op by op. A step is
forward and backward. For each of torch's budgets its measured peak is the budget in bytes that Jettison is given, and
the 256 bytes that every plan leaves for what no dispatch mode sees. All cases are timed in the same interleaved rounds,
on one thread by the processor's clock, on several by the wall's. Losses and gradients are compared with those of the
same compiled blocks without a budget, bit by bit, from one random stream; and with finite differences of the loss along
those gradients, from the same stream: a dropout mask that backward draws anew gives the slope of another function.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jettison
from benchmarks.models import BUILDERS, Batch, Size, build, loss_of
from benchmarks.rivals import compiled_blocks
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner.planner import UNSEEN_BYTES
from jettison.verify.differences import same_bits
from jettison.verify.timing import interleaved

RESULTS = Path(__file__).parent / "results"
STRIDE = 0.02  # of all parameters together, along the gradient
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(kw_only=True)
class Case:
    """One way to run a model of its own."""

    name: str
    model: nn.Module
    batch: Batch
    peak_bytes: int = 0
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    identical: bool = True
    slope_ratio: float = 1.0  # of the gradient to finite differences

    def step(self) -> torch.Tensor:
        """Gradients from nothing; the loss, detached."""
        self.model.zero_grad(set_to_none=True)
        loss = loss_of(self.model, self.batch)
        loss.backward()
        return loss.detach()

    def settle(self, first: Case | None) -> None:
        """Measure the peak, and compare with the first case."""
        self.step()
        self.step()
        self.model.zero_grad(set_to_none=True)
        static = static_tensors(self.model, self.batch)
        self.peak_bytes = measured_peak(
            lambda: loss_of(self.model, self.batch).backward(), static_tensors=static
        ).peak_bytes
        self.identical = first is None or _same(first, self)
        self.slope_ratio = self._slope_ratio(first or self)

    def _slope_ratio(self, first: Case) -> float:
        """The slope that backward gives along the first case's gradient, beside that of the loss itself."""
        parameters = list(self.model.parameters())
        torch.manual_seed(7)
        first.step()
        along = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in first.model.parameters()]
        scale = STRIDE / float(torch.stack([a.norm() for a in along]).norm())
        torch.manual_seed(7)
        self.step()
        pairs = zip(parameters, along, strict=True)
        slope = scale * sum(float((p.grad.double() * a.double()).sum()) for p, a in pairs if p.grad is not None)
        kept = [p.detach().clone() for p in parameters]
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, before, a in zip(parameters, kept, along, strict=True):
                    p.copy_(before + sign * scale * a)
            torch.manual_seed(7)
            ends.append(float(loss_of(self.model, self.batch).detach()))
        with torch.no_grad():
            for p, before in zip(parameters, kept, strict=True):
                p.copy_(before)
        return slope / ((ends[0] - ends[1]) / 2)


def _same(first: Case, other: Case) -> bool:
    losses = []
    for each in (first, other):
        torch.manual_seed(7)
        losses.append(each.step())
    pairs = zip(first.model.parameters(), other.model.parameters(), strict=True)
    return same_bits(*losses) and all(same_bits(a.grad, b.grad) for a, b in pairs if a.grad is not None)  # type: ignore[arg-type]


def torchs(name: str, size: Size, budget: float) -> Case:
    """Blocks compiled under torch's budget."""
    model, batch = build(name, size)
    compiled_blocks(budget)(model, batch)
    return Case(name=f"torch, budget {budget}", model=model, batch=batch)


def ours(name: str, size: Size, budget_bytes: int, beside: str) -> Case | None:
    """Blocks compiled under a plan; None where no plan fits."""
    model, batch = build(name, size)
    try:
        handle = jettison.auto_checkpoint(model, batch, Bytes(budget_bytes), keep_output=False, compile="blocks")
    except Infeasible as error:
        _say(f"{name}: at {budget_bytes}: {error}")
        return None
    assert handle.plan is not None
    predicted = handle.plan.predicted.peak_bytes
    name = f"Jettison at the peak of {beside}"
    return Case(name=name, model=model, batch=batch, budget_bytes=budget_bytes, predicted_bytes=predicted)


def run(name: str, size: Size, rounds: int) -> list[dict[str, Any]]:
    """All cases of one model."""
    cases: list[Case] = []
    for budget in BUDGETS:
        _say(f"{name}: torch's budget {budget}")
        case = torchs(name, size, budget)
        case.settle(cases[0] if cases else None)
        cases.append(case)
    for theirs in list(cases):
        _say(f"{name}: Jettison at {theirs.peak_bytes}")
        made = ours(name, size, theirs.peak_bytes + UNSEEN_BYTES, theirs.name)
        if made is not None:
            made.settle(cases[0])
            cases.append(made)
    _say(f"{name}: {rounds} rounds of {len(cases)} cases")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    timing = interleaved(rounds, {case.name: case.step for case in cases}, clock=clock)
    return [_row(name, case, timing[case.name]) for case in cases]


def _row(model: str, case: Case, timing: Any) -> dict[str, Any]:
    return {
        "model": model,
        "case": case.name,
        "budget_bytes": case.budget_bytes,
        "predicted_bytes": case.predicted_bytes,
        "peak_bytes": case.peak_bytes,
        "gradients_identical": case.identical,
        "slope_ratio": case.slope_ratio,
        "median_seconds": timing.median_seconds,
        "ratio": timing.ratio,
        "ratio_low": timing.ratio_low,
        "ratio_high": timing.ratio_high,
    }


def markdown(document: dict[str, Any]) -> str:
    """The page beside the figures."""
    lines = [
        "# Compiled blocks under a budget",
        "",
        f"{document['machine']}, {document['cores']} cores with a load of {document['load']:.1f} at the start, torch "
        f"{document['torch']}, {document['threads']} thread(s) timed by the {document['clock']}, {document['rounds']} "
        f"rounds, {document['date']}. {document['size']}. Times are medians of ratios to torch's budget 1.0 in the "
        "same round.",
        "",
        "| model | case | budget | predicted | peak | time | quartiles | gradients | slope ÷ finite differences |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for row in document["rows"]:
        budget, predicted = (f"{row[k]:,}" if row[k] else "" for k in ("budget_bytes", "predicted_bytes"))
        same = "equal" if row["gradients_identical"] else "other bits"
        lines.append(
            f"| {row['model']} | {row['case']} | {budget} | {predicted} | {row['peak_bytes']:,} | {row['ratio']:.3f} | "
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f} | {same} | {row['slope_ratio']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BUILDERS), default=["llama", "gpt2", "qwen3"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--date", required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled-blocks-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    size = Size(layers=options.layers, hidden=options.hidden, sequence=options.sequence, dtype=torch.float32)
    document: dict[str, Any] = {
        "date": options.date,
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": options.threads,
        "clock": "processor's clock" if options.threads == 1 else "wall's clock",
        "rounds": options.rounds,
        "size": asdict(size) | {"dtype": "float32"},
        "rows": [],
    }
    for name in options.models:
        document["rows"] += run(name, size, options.rounds)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(markdown(document))
    sys.stdout.write(markdown(document))
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
