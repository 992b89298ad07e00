"""Peak bytes and step time of Jettison and its peers, on the same models, in the same rounds.

    python -m benchmarks.peers --models llama gpt2 qwen3 --rounds 12 --date 2026-01-31

A step is forward and backward from no gradients; `zero_grad(set_to_none=True)` is in the time and not in the peak. Each
rival has a model of its own, equal to the bit, so that rounds interleave without applying and removing. The loss and
every gradient of each rival are compared with those of the section's first, bit by bit, from one random stream.

On a CPU, memory that was let go of stays with the process (`--malloc kept`), as it does with a device's caching
allocator and with the allocators that PyTorch's tuning guide asks for. glibc's own rule gives the end of its heap back
to the system and takes it again, in some rivals' steps and not in others', by what lies at the end: up to a tenth of a
step, which says nothing about any of them. `--malloc default` leaves it so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.jettison_rows import at_peak, attempt, keep_all, stopwatch
from benchmarks.models import BUILDERS, Batch, Size, build, loss_of
from benchmarks.rivals import COMPILED, EAGER, Rival
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.runtime.chunked_loss import whole_losses
from jettison.verify.differences import same_bits
from jettison.verify.timing import interleaved

RESULTS = Path(__file__).parent / "results"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
STOPPED_STEPS = 5  # in which ops that run again are timed, after the rounds
SECTIONS = {"eager": EAGER, "compile": COMPILED}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rival on one model.

    Args:
        budget_bytes: what Jettison was asked to stay under; None for the others.
        again_seconds: of the ops that run again in a step of Jettison's on a CPU, by a stopwatch around each.
    """

    model: str
    section: str
    rival: str
    peak_bytes: int
    static_bytes: int
    budget_bytes: int | None
    again_seconds: float | None
    median_seconds: float
    min_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gradients_identical: bool


@dataclass(kw_only=True)
class Trial:
    """A rival under test, on a model of its own."""

    rival: Rival
    model: nn.Module
    batch: Batch
    peak_bytes: int
    static_bytes: int
    identical: bool
    budget_bytes: int | None = None
    again_seconds: float | None = None

    def step(self) -> torch.Tensor:
        """Gradients from nothing; the loss, detached."""
        self.model.zero_grad(set_to_none=True)
        with whole_losses() if self.budget_bytes is None else nullcontext():  # else plans would speed up their rivals
            loss = loss_of(self.model, self.batch)
        loss.backward()
        return loss.detach()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 on success."""
    options = _parser().parse_args(arguments)
    kept = options.malloc == "kept" and options.device == "cpu" and keep_memory()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    size = Size(layers=options.layers, hidden=options.hidden, sequence=options.sequence, vocabulary=options.vocabulary)
    size = replace(size, dtype=getattr(torch, options.dtype))
    rows: list[Row] = []
    out = options.json or RESULTS / f"peers-{options.device}-{options.dtype}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for section in options.sections:
        shrunk = replace(size, layers=options.compile_layers or size.layers) if section == "compile" else size
        for name in options.models:
            rows += run_section(section, name, shrunk, options.rounds, options.device, jettison=not options.no_jettison)
            document = _document(
                options, size, rows, kept
            )  # after each model: hours of rounds are not lost with the last
            out.write_text(json.dumps(document, indent=1) + "\n")
            out.with_suffix(".md").write_text(markdown(document, rows))
    show(rows)
    _say(f"written: {out} and {out.with_suffix('.md')}")
    return 0


def keep_memory() -> bool:
    """What malloc is given back stays with this process. Whether that could be had: of glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    most = 2**31 - 1  # bytes: neither trimmed at the end of the heap, nor mapped, and unmapped, each by itself
    return mallopt(M_TRIM_THRESHOLD, most) == 1 and mallopt(M_MMAP_THRESHOLD, most) == 1


def run_section(section: str, name: str, size: Size, rounds: int, device: str, *, jettison: bool) -> list[Row]:
    """All rivals of one section on one model; the section's first rival is the baseline of its ratios."""
    trials: list[Trial] = []
    for rival in SECTIONS[section]:
        trials += _try(rival, name, size, device, trials)
    if jettison and section == "eager":
        extra: list[tuple[Rival, int | None]] = [(keep_all(), None)]
        extra += [(at_peak(trial.rival.name, trial.peak_bytes), trial.peak_bytes) for trial in trials[1:]]
        for rival, budget_bytes in extra:
            trials += _try(rival, name, size, device, trials, budget_bytes)
    if not trials:
        return []
    _say(f"{name}: {rounds} interleaved rounds of {len(trials)} cases")
    timing = interleaved(rounds, {trial.rival.name: trial.step for trial in trials}, warmup=2)
    for trial in trials:
        if trial.budget_bytes is not None and device == "cpu":
            trial.again_seconds = _again_seconds(trial)
    return [_row(section, name, trial, timing[trial.rival.name]) for trial in trials]


def _try(
    rival: Rival, name: str, size: Size, device: str, earlier: list[Trial], budget_bytes: int | None = None
) -> list[Trial]:
    """Apply one rival to a fresh model and judge its bytes and gradients; empty where it cannot be applied."""
    _say(f"{name}: {rival.name}")
    model, batch = build(name, size, device)
    if attempt(rival, model, batch, _say) is None:
        return []
    trial = Trial(rival=rival, model=model, batch=batch, peak_bytes=0, static_bytes=0, identical=True)
    trial.budget_bytes = budget_bytes
    trial.step()
    trial.step()  # step 0 may verify or compile; the peak is that of a settled step
    model.zero_grad(set_to_none=True)
    report = measured_peak(lambda: loss_of(model, batch).backward(), static_tensors=static_tensors(model, batch))
    trial.peak_bytes, trial.static_bytes = report.peak_bytes, report.static_bytes
    trial.identical = not earlier or _same_step(earlier[0], trial)
    return [trial]


def _again_seconds(trial: Trial) -> float:
    """Of the ops that run again in a step: the median of some."""
    steps = []
    for _ in range(STOPPED_STEPS):
        with stopwatch(trial.model) as seconds:
            trial.step()
        steps.append(sum(seconds))
    return statistics.median(steps)


def _same_step(reference: Trial, trial: Trial) -> bool:
    """Loss and every gradient equal to the bit, from the same weights and the same random stream."""
    losses = []
    for each in (reference, trial):
        torch.manual_seed(7)
        losses.append(each.step())
    pairs = zip(reference.model.parameters(), trial.model.parameters(), strict=True)
    same = all(a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad) for a, b in pairs)
    return same and same_bits(*losses)


def _row(section: str, name: str, trial: Trial, timing: Any) -> Row:
    return Row(
        model=name,
        section=section,
        rival=trial.rival.name,
        peak_bytes=trial.peak_bytes,
        static_bytes=trial.static_bytes,
        budget_bytes=trial.budget_bytes,
        again_seconds=trial.again_seconds,
        median_seconds=timing.median_seconds,
        min_seconds=timing.min_seconds,
        ratio=timing.ratio,
        ratio_low=timing.ratio_low,
        ratio_high=timing.ratio_high,
        gradients_identical=trial.identical,
    )


def show(rows: Sequence[Row], printer: Callable[..., None] | None = None) -> None:
    """A table for the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="peak bytes and step time ÷ the section's plain run (median, quartiles of rounds)")
    for title in ("model", "rival", "peak MB", "step ms", "ops again ms", "ratio", "quartiles", "gradients"):
        table.add_column(title, justify="left" if title in ("model", "rival") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    (printer or Console().print)(table)


def markdown(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The same table for a file, with what was run."""
    size = ", ".join(f"{key} {value}" for key, value in document["size"].items())
    lines = [
        f"# Peers on {document['device']}",
        "",
        f"torch {document['torch']}, {document['threads']} threads, {document['rounds']} rounds, "
        f"memory that was let go of: {document['malloc']}" + (f", {document['date']}" if document["date"] else ""),
        "",
        f"{size}. GPT-2's FFN is 4h wide and it has dropout 0.1. MB = 10^6 bytes. Compiled models have "
        f"{document['compile_layers']} layers; their ratios are to compiled plain. "
        "Ops again: those that a step of Jettison's runs a second time, by a stopwatch around each.",
        "",
        "| model | rival | peak MB | step ms | ops again ms | ratio | quartiles | gradients |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.rival,
        f"{row.peak_bytes / 1e6:.1f}",
        f"{row.median_seconds * 1e3:.1f}",
        "" if row.again_seconds is None else f"{row.again_seconds * 1e3:.1f}",
        f"{row.ratio:.3f}",
        f"{row.ratio_low:.3f} to {row.ratio_high:.3f}",
        "identical" if row.gradients_identical else "differ",
    )


def _document(options: argparse.Namespace, size: Size, rows: Sequence[Row], kept: bool) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    return {
        "schema": "jettison.peers/1",
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": options.date,
        "rounds": options.rounds,
        "malloc": "kept" if kept else "default",
        "size": size.describe(),
        "compile_layers": options.compile_layers or size.layers,
        "rows": [asdict(row) for row in rows],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--sections", nargs="+", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compile-layers", type=int, help="fewer layers for the compiled section, to save time")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch CPU threads")
    parser.add_argument("--malloc", choices=("kept", "default"), default="kept", help="memory that was let go of")
    parser.add_argument("--date", help="written into the results; left out by default")
    parser.add_argument("--no-jettison", action="store_true", help="peers only")
    parser.add_argument("--json", type=Path, help="where to write; the .md lies beside it")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
