"""Whole steps as CUDA graphs: a captured planned step compared with a captured plain one.

Asked is the time of the plain graph and of the kernels that recompute, 2 % more at most. Those kernels' time is what a
planned step without witnesses runs on the device more than a plain one, by torch's profiler. Gradients of replays are
those of the plain graph's replays, dropout included. Without a device steps run instead of replays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import jettison
from benchmarks.gpu.cases import Column, Found, Log
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.glance import Line
from benchmarks.gpu.host import kernel_milliseconds
from benchmarks.gpu.setting import Setting, fingerprints, milliseconds

WARM_UP = 3
ASKED = 1.02
MODELS = {
    "llama": (Size(layers=12, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=8192, sequence=512), Variant()),
    "gpt": (Size(layers=12, hidden=512, heads=8, vocab=8192, sequence=256), Variant(dropout=0.1)),
}
TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, micro_batch=2)
COLUMNS = (
    Column(title="eager ms", key="eager_milliseconds", show="{:.2f}".format),
    Column(title="graph ms", key="milliseconds", show="{:.2f}".format),
    Column(title="recomputed kernels ms", key="recomputed_milliseconds", show="{:.2f}".format),
    Column(title="plain graph ms", key="plain_milliseconds", show="{:.2f}".format),
    Column(title="÷ plain graph", key="ratio", show="{:.3f}".format),
    Column(title="÷ asked for", key="of_asked", show="{:.3f}".format),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A model of a family and its batch, from one seed: its step, and the same captured."""

    model: nn.Module
    batch: dict[str, torch.Tensor]

    def clear(self) -> None:
        """No gradients: the next backward makes them."""
        self.model.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Forward and backward."""
        self.model(**self.batch).backward()

    def eager(self) -> None:
        """A step as a loop has it."""
        self.clear()
        self.run()

    def captured(self, device: torch.device) -> Callable[[], None]:
        """Return the function that replays it; warm-up steps run on a side stream first."""
        if device.type != "cuda":
            for _ in range(WARM_UP):
                self.eager()
            return self.eager
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.eager()
        torch.cuda.current_stream(device).wait_stream(side)
        self.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph.replay

    def gradients(self, replay: Callable[[], None]) -> dict[str, int]:
        """Gradients of a replay from one random state."""
        torch.manual_seed(7)
        replay()
        return fingerprints(self.model)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Two models, two policies."""
    log.columns = COLUMNS
    for family in ("llama",) if quick else MODELS:
        for policy in ("full",) if quick else ("full", "selective-op", "none"):
            expect = 6.0 if setting.device.type == "cuda" else 1.0
            log.case(f"{family}, {policy}", lambda f=family, p=policy: _one(setting, f, p), expect=expect)


def _one(setting: Setting, family: str, policy: str) -> Found:
    device = setting.device
    size, variant = MODELS[family]

    def made() -> Step:
        model, batch = build(family, TINY if setting.tiny else size, device, torch.bfloat16, variant)
        return Step(model=model, batch=batch)

    plain, planned = made(), made()
    with jettison.apply(planned.model, policy, batch=planned.batch, check="off"):
        for step in (plain, planned):
            for _ in range(WARM_UP):
                step.eager()
        recomputed = kernel_milliseconds(planned.eager, device) - kernel_milliseconds(plain.eager, device)
    problems = []
    with jettison.apply(planned.model, policy, batch=planned.batch) as handle:
        replay, plainly = planned.captured(device), plain.captured(device)
        expected = plain.gradients(plainly)
        if expected == plain.gradients(plainly) and planned.gradients(replay) != expected:
            problems.append("gradients of a replay differ from a plain graph's")
        times = {True: list[float](), False: list[float]()}
        for number in range(2 * setting.rounds):
            times[number % 2 == 0] += milliseconds(replay if number % 2 == 0 else plainly, 1, device)
        handle.report()  # raises where a replay recomputed a wrong value
        eager = statistics.median(milliseconds(planned.eager, setting.rounds, device))
    took, usual = (statistics.median(times[word]) for word in (True, False))
    asked = ASKED * (usual + max(0.0, recomputed)) / usual
    line = Line(model=f"{family}, whole-step graph", peer="plain graph", ours=policy, ratio=took / usual, asked=asked)
    return Found(
        figures={
            "eager_milliseconds": eager,
            "milliseconds": took,
            "recomputed_milliseconds": recomputed,
            "plain_milliseconds": usual,
            "ratio": took / usual,
            "of_asked": took / usual / asked,
            "line": line.document(),
        },
        problems=problems,
    )
