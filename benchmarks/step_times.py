"""Are predicted step times right on this machine? Calibrate it, then predict models that were never timed, then time.

    python -m benchmarks.step_times [--rounds 12] [--hardware FILE.toml] [--json benchmarks/results/step-times-cpu.json]

NOTE [ A fair step ]
A step is what an estimate describes: forward and backward of one micro-batch, the gradients' norm and clipping, a fused
AdamW. One CPU thread does it, and its own seconds are counted, as in the calibration: on a shared machine the wall's
would be of the neighbours. They still share caches and memory, and can only make a step longer, so that the lower
quartile of the rounds is what counts, there and here. glibc gives memory back to the kernel when a step frees it and
has it cleared again in the next, which costs up to a tenth of a step and depends on how much is held; `keep_memory`
stops that. With `--patience`, rounds in which others kept a core busy do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import jettison
from benchmarks.quiet import Others
from benchmarks.step_rows import Row, markdown, summary
from jettison.diagnose.machine_calibration import calibrate, hardware_toml
from jettison.families.config import parse_config
from jettison.families.family import kernels_for
from jettison.formula.region import layer_region
from jettison.predict.stages import KeptBuffers
from jettison.predict.time import estimate
from jettison.solve.checkpoint_policy import policy_named
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run

RESULTS = Path(__file__).parent / "results"
POLICIES = ("none", "full", "every:2", "plan")
PLAN = ("full", "selective-op", "none")
"""A plan: what layers do, in turn."""
LEAST = 7
"""Rounds in which nobody else used the machine."""
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
                "model_type": "gpt2",
                "vocab_size": self.vocabulary,
                "n_embd": self.hidden,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_positions": self.seq,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        return {
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": -(-self.hidden * 8 // 3 // 32) * 32,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": self.seq,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


def _small(
    family: str, hidden: int, layers: int, seq: int, batch: int, heads: int, kv_heads: int | None = None
) -> Small:
    return Small(
        family=family, hidden=hidden, layers=layers, seq=seq, batch=batch, heads=heads, kv_heads=kv_heads or heads
    )


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


# predicted ------------------------------------------------------------------------------------------------------------


def run_of(small: Small, policy: str) -> Run:
    """The run as an estimate takes it, from the config alone."""
    model = parse_config(small.config(), name=small.name)
    return Run(
        model=model,
        seq=small.seq,
        micro_batch=small.batch,
        precision=PRECISIONS["fp32"],
        kernels=kernels_for(model, "huggingface").with_attention("sdpa").on_cpu(),
        recompute=Recompute.parse("none" if policy == "plan" else policy, layers=model.depth),
    )


def predicted_seconds(small: Small, policy: str, machine: Hardware) -> float:
    """Of a step."""
    run = run_of(small, policy)
    chosen = None
    if policy == "plan":
        words = [PLAN[i % len(PLAN)] for i in range(run.model.depth)]
        programs = [layer_region(run.signature, layer).program for layer in run.model.layers]
        pairs = zip(words, programs, strict=True)
        chosen = [None if word == "none" else KeptBuffers(policy_named(word).kept(program)) for word, program in pairs]
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


def measure(small: Small, rounds: int, *, patience: int = 1) -> Mapping[str, Timed]:
    """All policies in interleaved rounds.

    Args:
        patience: a round in which others used the machine does not count, and there are at most so many times as many
            rounds; where fewer than `LEAST` count, all do.
    """
    steps = {policy: step_of(small, policy) for policy in POLICIES}
    for step in steps.values():
        step()
        step()  # the first makes the optimizer's state, and the second finds memory as all later ones do
    every: list[tuple[bool, Mapping[str, tuple[float, float]]]] = []
    for number in range(patience * rounds):
        with Others() as others:
            samples = _round(steps, POLICIES[:: 1 if number % 2 == 0 else -1])
        every.append((others.quiet, samples))
        if sum(quiet for quiet, _ in every) == rounds:
            break
        if not others.quiet and patience > 1:
            time.sleep(1)
    chosen = [samples for quiet, samples in every if quiet]
    if len(chosen) < LEAST:
        chosen = [samples for _, samples in every]
    return MappingProxyType(
        {p: Timed([samples[p][0] for samples in chosen], [samples[p][1] for samples in chosen]) for p in POLICIES}
    )


def _round(steps: Mapping[str, Callable[[], None]], order: Sequence[str]) -> Mapping[str, tuple[float, float]]:
    """One step of each: the thread's seconds and the wall's."""
    found = {}
    gc.collect()
    gc.disable()
    for policy in order:
        wall, thread = time.perf_counter(), time.thread_time()
        steps[policy]()
        found[policy] = time.thread_time() - thread, time.perf_counter() - wall
    gc.enable()
    return found


def rows_of(small: Small, machine: Hardware, found: Mapping[str, Timed]) -> list[Row]:
    """Predicted beside measured."""
    plain = found["none"].thread
    predicted = {policy: predicted_seconds(small, policy, machine) for policy in POLICIES}
    rows = []
    for policy in POLICIES:
        samples = found[policy].thread
        low, middle, high = quartiles(samples)
        ratio_low, _, ratio_high = quartiles([a / b for a, b in zip(samples, plain, strict=True)])
        rows.append(
            Row(
                model=small.name,
                policy=policy,
                predicted_seconds=predicted[policy],
                seconds=low,
                median_seconds=middle,
                high_seconds=high,
                wall_seconds=statistics.median(found[policy].wall),
                predicted_ratio=predicted[policy] / predicted["none"],
                ratio=low / quartiles(plain)[0],
                ratio_low=ratio_low,
                ratio_high=ratio_high,
            )
        )
    return rows


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


# all of it ------------------------------------------------------------------------------------------------------------


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
        rows += rows_of(small, machine, measure(small, options.rounds, patience=options.patience))
        for row in rows[-len(POLICIES) :]:
            _say("  ".join(row.cells))
    document = {
        "schema": "jettison.step-times/1",
        "device": machine.name,
        "torch": torch.__version__,
        "threads": 1,
        "date": options.date,
        "rounds": options.rounds,
        "patience": options.patience,
        "memory_kept": kept,
        "plan": PLAN,
        "calibration": calibrated,
        "summary": asdict(summary(rows)),
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.json.with_suffix(".md").write_text(markdown(document, rows), encoding="utf-8")
    _say(f"{summary(rows)}\nwritten: {options.json} and {options.json.with_suffix('.md')}")
    return 0


def _machine(options: argparse.Namespace) -> tuple[Hardware, str]:
    """The machine's figures, and the text of their file, which is all that predictions are made from."""
    if options.hardware is not None:
        text = options.hardware.read_text(encoding="utf-8")
    else:
        _say("calibrating")
        text = _calibrated(options)
    return machine_of(text), text


def _calibrated(options: argparse.Namespace) -> str:
    """The file's text; measured again where others used the machine meanwhile."""
    for _ in range(options.patience):
        with Others() as others:
            text = hardware_toml(calibrate("cpu", short=options.quick))
        if others.quiet:
            break
        _say(f"others kept {others.cores:.2f} cores busy")
        time.sleep(10)
    return text


def machine_of(text: str) -> Hardware:
    """What a hardware file says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        file.write_text(text, encoding="utf-8")
        return hardware(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_times", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=sorted({small.family for small in MODELS}))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--patience", type=int, default=1, help="times as many rounds, to find some in which it is quiet"
    )
    parser.add_argument("--quick", action="store_true", help="calibrate with fewer shapes and rounds")
    parser.add_argument("--hardware", type=Path, help="a calibrated file, instead of calibrating")
    parser.add_argument("--date", help="written into the results; left out by default")
    parser.add_argument("--json", type=Path, default=RESULTS / "step-times-cpu.json", help="the .md lies beside it")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
