"""Are predicted step times right on this machine? Calibrate it, then predict models that were never timed, then time.

    python -m benchmarks.step_times [--rounds 12] [--hardware FILE.toml] [--json benchmarks/results/step-times-cpu.json]

NOTE [ A fair step ]
A step is what an estimate describes: forward and backward of one micro-batch, the gradients' norm and clipping, a fused
AdamW. One CPU thread does it, and its own seconds are counted, as in the calibration: on a shared machine the wall's
would be of the neighbours. glibc gives memory back to the kernel when a step frees it and has it cleared again in the
next, which costs up to a tenth of a step and depends on how much is held; `keep_memory` stops that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import jettison
from jettison.forecast.time import estimate
from jettison.formula.region import layer_region
from jettison.measure.calibrate import calibrate, hardware_toml
from jettison.plan.treatment import treatment
from jettison.spec.config import parse_config
from jettison.spec.conventions import kernels_for
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Recompute, Run

RESULTS = Path(__file__).parent / "results"
POLICIES = ("none", "full", "every:2", "plan")
PLAN = ("full", "selective-op", "none")
"""A plan: what layers do, in turn."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


@dataclass(frozen=True, kw_only=True)
class Small:
    """A small model and its batch. Gated families are 8/3 as wide inside, rounded up."""

    family: str
    hidden: int
    layers: int
    seq: int
    batch: int
    heads: int
    kv_heads: int
    vocabulary: int = 4096

    @property
    def name(self) -> str:
        """Such as llama h256 L8 s128 b4."""
        return f"{self.family} h{self.hidden} L{self.layers} s{self.seq} b{self.batch}"

    def config(self) -> dict[str, Any]:
        """As config.json has it. Nothing drops out."""
        if self.family == "gpt2":
            return {
                "model_type": "gpt2", "vocab_size": self.vocabulary, "n_embd": self.hidden, "n_layer": self.layers,
                "n_head": self.heads, "n_positions": self.seq, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
            }  # fmt: skip
        return {
            "model_type": self.family, "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": -(-self.hidden * 8 // 3 // 32) * 32, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads, "max_position_embeddings": self.seq, "bos_token_id": None,
            "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip


def _small(
    family: str, hidden: int, layers: int, seq: int, batch: int, heads: int, kv_heads: int | None = None
) -> Small:
    return Small(
        family=family, hidden=hidden, layers=layers, seq=seq, batch=batch, heads=heads, kv_heads=kv_heads or heads
    )  # fmt: skip


MODELS = (
    _small("gpt2", 128, 6, 128, 4, 4),
    _small("gpt2", 256, 4, 256, 4, 8),
    _small("gpt2", 384, 6, 128, 4, 12),
    _small("gpt2", 512, 4, 256, 2, 8),
    _small("llama", 192, 6, 256, 4, 6, 2),
    _small("llama", 256, 8, 128, 4, 8),
    _small("llama", 512, 4, 256, 2, 8, 4),
    _small("llama", 320, 6, 512, 1, 10, 5),
    _small("qwen3", 256, 6, 256, 2, 8, 4),
    _small("qwen3", 384, 4, 384, 2, 6, 3),
)
"""A calibration runs none of their shapes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model under one policy: seconds, and the ratio to the plain step, predicted and measured.

    ``low`` and ``high`` are quartiles over rounds; ``ratio`` is the median of ratios taken inside each round.
    """

    model: str
    policy: str
    predicted_seconds: float
    median_seconds: float
    low_seconds: float
    high_seconds: float
    wall_seconds: float
    predicted_ratio: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def error(self) -> float:
        """Of the predicted seconds, relative to the measured ones."""
        return self.predicted_seconds / self.median_seconds - 1

    @property
    def ratio_points(self) -> float:
        """Of the predicted ratio, in percentage points."""
        return 100 * (self.predicted_ratio - self.ratio)


# predicted ------------------------------------------------------------------------------------------------------------


def run_of(small: Small, policy: str) -> Run:
    """The run as an estimate takes it, from the config alone."""
    model = parse_config(small.config(), name=small.name)
    return Run(
        model=model, seq=small.seq, micro_batch=small.batch, precision=PRECISIONS["fp32"],
        kernels=kernels_for(model, "huggingface").with_attention("sdpa").on_cpu(),
        recompute=Recompute.parse("none" if policy == "plan" else policy, layers=model.depth),
    )  # fmt: skip


def predicted_seconds(small: Small, policy: str, machine: Hardware) -> float:
    """Of a step."""
    run = run_of(small, policy)
    chosen = None
    if policy == "plan":
        words = [PLAN[i % len(PLAN)] for i in range(run.model.depth)]
        programs = [layer_region(run.scene, layer).program for layer in run.model.layers]
        chosen = [None if w == "none" else treatment(w).kept(p) for w, p in zip(words, programs, strict=True)]
    return estimate(run, machine, chosen=chosen).step_seconds


# measured -------------------------------------------------------------------------------------------------------------


def keep_memory() -> bool:
    """Have glibc keep what is freed; False where there is no glibc. See NOTE [ A fair step ]."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    most = (1 << 31) - 1
    return all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, most), mallopt(_M_TOP_PAD, 64 << 20)])


def step_of(small: Small, policy: str) -> Callable[[], None]:
    """A training step of a real model under a policy."""
    import transformers

    values = {key: value for key, value in small.config().items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(small.family, **values, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, small.vocabulary, (small.batch, small.seq))
    batch = {"input_ids": ids, "labels": ids.clone()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if policy == "plan":
        prefix = "transformer.h" if small.family == "gpt2" else "model.layers"
        jettison.apply(model, {f"{prefix}.{i}": PLAN[i % len(PLAN)] for i in range(small.layers)}, batch=batch)
    elif policy != "none":
        jettison.apply(model, policy, batch=batch)

    def step() -> None:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Timed:
    """Samples of one policy, in the order of the rounds: the thread's seconds and the wall's."""

    thread: list[float]
    wall: list[float]


def measure(small: Small, rounds: int) -> Mapping[str, Timed]:
    """All policies in interleaved rounds."""
    steps = {policy: step_of(small, policy) for policy in POLICIES}
    for step in steps.values():
        step()
        step()  # the first makes the optimizer's state, and the second finds memory as all later ones do
    found = {policy: Timed([], []) for policy in POLICIES}
    for number in range(rounds):
        gc.collect()
        gc.disable()
        for policy in POLICIES[:: 1 if number % 2 == 0 else -1]:
            wall, thread = time.perf_counter(), time.thread_time()
            steps[policy]()
            found[policy].thread.append(time.thread_time() - thread)
            found[policy].wall.append(time.perf_counter() - wall)
        gc.enable()
    return MappingProxyType(found)


def rows_of(small: Small, machine: Hardware, found: Mapping[str, Timed]) -> list[Row]:
    """Predicted beside measured."""
    plain = found["none"].thread
    predicted = {policy: predicted_seconds(small, policy, machine) for policy in POLICIES}
    rows = []
    for policy in POLICIES:
        samples = found[policy].thread
        ratios = [a / b for a, b in zip(samples, plain, strict=True)]
        low, middle, high = quartiles(samples)
        ratio_low, ratio, ratio_high = quartiles(ratios)
        rows.append(
            Row(
                model=small.name, policy=policy, predicted_seconds=predicted[policy], median_seconds=middle,
                low_seconds=low, high_seconds=high, wall_seconds=statistics.median(found[policy].wall),
                predicted_ratio=predicted[policy] / predicted["none"], ratio=ratio, ratio_low=ratio_low,
                ratio_high=ratio_high,
            )
        )  # fmt: skip
    return rows


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


# all of it ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Over all rows: errors of seconds as shares, differences of ratios in points."""

    median_error: float
    worst_error: float
    median_ratio_points: float
    worst_ratio_points: float


def summary(rows: Sequence[Row]) -> Summary:
    """How far predictions are off, whichever way."""
    errors = [abs(row.error) for row in rows]
    points = [abs(row.ratio_points) for row in rows if row.policy != "none"]
    return Summary(
        median_error=statistics.median(errors), worst_error=max(errors), median_ratio_points=statistics.median(points),
        worst_ratio_points=max(points),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, time, write; 0 on success."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    kept = keep_memory()
    machine, calibrated = _machine(options)
    rows: list[Row] = []
    for small in MODELS:
        if options.models and small.family not in options.models:
            continue
        rows += rows_of(small, machine, measure(small, options.rounds))
        for row in rows[-len(POLICIES) :]:
            _say("  ".join(_cells(row)))
    document = {
        "schema": "jettison.step-times/1", "device": machine.name, "torch": torch.__version__, "threads": 1,
        "date": options.date, "rounds": options.rounds, "memory_kept": kept, "plan": PLAN, "calibration": calibrated,
        "summary": asdict(summary(rows)), "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.json.with_suffix(".md").write_text(markdown(document, rows), encoding="utf-8")
    _say(f"{summary(rows)}\nwritten: {options.json} and {options.json.with_suffix('.md')}")
    return 0


def _machine(options: argparse.Namespace) -> tuple[Hardware, str]:
    """The machine's figures, and the text of their file."""
    if options.hardware is not None:
        return hardware(options.hardware), options.hardware.read_text(encoding="utf-8")
    _say("calibrating")
    found = calibrate("cpu", short=options.quick)
    return found.hardware, hardware_toml(found)


def markdown(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table for people, with what was run."""
    found = summary(rows)
    when = f", {document['date']}" if document["date"] else ""
    lines = [
        f"# Step times on {document['device']}, predicted and measured",
        "",
        f"torch {document['torch']}, one thread, its own seconds, {document['rounds']} interleaved rounds{when}.",
        f"Figures of the machine from `jettison doctor --calibrate`, before any model ran. Plan: layers do "
        f"{', '.join(document['plan'])} in turn.",
        "",
        f"Step times are off by {found.median_error:.1%} (median; worst {found.worst_error:.1%}), ratios to plain by "
        f"{found.median_ratio_points:.1f} points (worst {found.worst_ratio_points:.1f}).",
        "",
        "| model | policy | predicted ms | measured ms | quartiles | off | predicted ratio | measured ratio | "
        "quartiles | off, points |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    plain = row.policy == "none"
    return (
        row.model,
        row.policy,
        f"{row.predicted_seconds * 1e3:.1f}",
        f"{row.median_seconds * 1e3:.1f}",
        f"{row.low_seconds * 1e3:.1f} to {row.high_seconds * 1e3:.1f}",
        f"{row.error:+.1%}",
        "" if plain else f"{row.predicted_ratio:.3f}",
        "" if plain else f"{row.ratio:.3f}",
        "" if plain else f"{row.ratio_low:.3f} to {row.ratio_high:.3f}",
        "" if plain else f"{row.ratio_points:+.1f}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_times", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=sorted({small.family for small in MODELS}))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="calibrate with fewer shapes and rounds")
    parser.add_argument("--hardware", type=Path, help="a calibrated file, instead of calibrating")
    parser.add_argument("--date", help="written into the results; left out by default")
    parser.add_argument("--json", type=Path, default=RESULTS / "step-times-cpu.json", help="the .md lies beside it")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
