"""What the GPU scripts share: one case at a time on the device, its bytes, its time, and Jettison's rows."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.jettison_rows import attempt
from benchmarks.rivals import Rival
from jettison.measure import measured_peak
from jettison.measure.memory import static_tensors

RESULTS = Path(__file__).parents[1] / "results"
Build = Callable[[], tuple[nn.Module, Any]]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CudaRow:
    """One case. Bytes are the caching allocator's; times are CUDA events around forward and backward.

    `ratio` is its median time ÷ that of plain autograd right after it, on the same model.
    """

    case: str
    peak_bytes: int
    reserved_bytes: int
    requested_bytes: int | None
    static_bytes: int
    budget_bytes: int | None
    median_milliseconds: float
    ratio: float


def require_cuda(script: str) -> None:
    """Exit with 2 and a reason where no CUDA device can be used."""
    if not torch.cuda.is_available():
        print(f"{script}: no CUDA device here; not measured. Run it on a machine with one.", file=sys.stderr)
        raise SystemExit(2)


def parse(script: str, description: str) -> argparse.Namespace:
    """The options that all GPU scripts take, after checking for a device."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{script}", description=description)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-jettison", action="store_true", help="peers only")
    parser.add_argument("--date", help="written into the results; left out by default")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{script}-cuda.json")
    options = parser.parse_args()
    require_cuda(script)
    return options


def run_cases(cases: Sequence[tuple[Rival, int | None]], build: Build, loss_of: Loss, rounds: int) -> list[CudaRow]:
    """Each case on one model, applied and removed in turn, timed between plain runs; the first case is plain."""
    model, batch = build()
    rows = []
    for rival, budget_bytes in cases:
        print(f"{rival.name} …", file=sys.stderr, flush=True)
        row = _run(rival, budget_bytes, model, batch, loss_of, rounds)
        rows += [] if row is None else [row]
    return rows


def _run(
    rival: Rival, budget_bytes: int | None, model: nn.Module, batch: Any, loss_of: Loss, rounds: int
) -> CudaRow | None:
    model.zero_grad(set_to_none=True)
    handle = attempt(rival, model, batch, lambda text: print(text, file=sys.stderr))
    if handle is None:
        return None

    def step() -> None:
        loss_of(model, batch).backward()

    try:
        for _ in range(3):
            step()
            model.zero_grad(set_to_none=True)
        report = measured_peak(step, static_tensors=static_tensors(model, batch))
        treated = _times(step, model, rounds)
    except torch.OutOfMemoryError as error:
        print(f"{rival.name}: out of memory ({str(error)[:120]})", file=sys.stderr)
        return None
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    plain = _plain_times(step, model, rounds)
    return CudaRow(
        case=rival.name,
        peak_bytes=report.peak_bytes,
        reserved_bytes=report.reserved_bytes or 0,
        requested_bytes=report.requested_bytes,
        static_bytes=report.static_bytes,
        budget_bytes=budget_bytes,
        median_milliseconds=statistics.median(treated),
        ratio=statistics.median(treated) / statistics.median(plain) if plain else float("nan"),
    )


def _plain_times(step: Callable[[], None], model: nn.Module, rounds: int) -> list[float]:
    """Plain autograd right after the case, on the same model; empty where plain autograd does not fit."""
    try:
        _times(step, model, 2)
        return _times(step, model, rounds)
    except torch.OutOfMemoryError:
        return []


def _times(step: Callable[[], None], model: nn.Module, rounds: int) -> list[float]:
    samples = []
    gc.collect()
    for _ in range(rounds):
        model.zero_grad(set_to_none=True)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return samples


def write(options: argparse.Namespace, description: str, rows: Iterable[CudaRow]) -> None:
    """Print a table; write it and the rows."""
    rows = list(rows)
    lines = [
        f"# {description}",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}" + (f", {options.date}" if options.date else ""),
        "",
        "| case | peak GiB | reserved GiB | step ms | ratio to plain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        peak, reserved = row.peak_bytes / 2**30, row.reserved_bytes / 2**30
        lines.append(f"| {row.case} | {peak:.3f} | {reserved:.3f} | {row.median_milliseconds:.2f} | {row.ratio:.3f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    document = {
        "schema": "jettison.peers/1",
        "description": description,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": options.date,
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(text)
