"""Tensors that wait on the host: gradients to the bit however slow copies are, races, what pinning takes, the peak.

Copies are stalled by kernels that do nothing for milliseconds (``torch.cuda._sleep``), on the way out, on the way back
and both: a wait that is missing then shows in the gradients each time. torch's CUDA sanitizer watches a run in a
process of its own (``TORCH_CUDA_SANITIZER=1``), and, so that its silence means something, one whose engine waits for
nothing.
Without a device a recorder takes its place: it runs copies as late, as early and in as mixed an order as is legal, and
looks for races itself.

    python3 -m benchmarks.gpu.offload [--careless]      # what the sanitizer watches
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jettison
from benchmarks.gpu.cases import Column, Found, Log, Skip, mib
from benchmarks.gpu.gradients import FP32, Kind, Run, differences
from benchmarks.gpu.setting import Setting, restored_determinism
from jettison.capture.model_trace import Loop
from jettison.core.objects import swapped
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.step import dry_run_batch, fake_optimizer
from jettison.planner.apply import policies_of
from jettison.planner.handle import Applied
from jettison.planner.readiness import traced
from jettison.runtime.device import Accelerator, Event, Slab, Stream, StreamDevice
from jettison.solve.checkpoint_policy import Full, KeepAll, Offload

STALL_CYCLES = 5_000_000
"""Some milliseconds a copy: longer than any kernel between two of them takes."""
SANITIZER_SECONDS = 240
RACE = "CSAN detected a possible data race"
POLICIES: Mapping[str, Offload] = {"all": Offload(smallest_bytes=1), "inputs": Offload(keeps=Full(), smallest_bytes=1)}
KINDS = (
    Kind(family="llama", kernel="flash"),
    Kind(family="gpt", kernel="math", dtype=FP32, dropout=0.1, tiny=True),
    Kind(family="llama", kernel="flash", dtype=FP32, autocast=True),
    Kind(family="mixtral", kernel="flash"),
    Kind(family="lora", kernel="flash"),
)
COLUMNS = (
    Column(title="plain MiB", key="plain_peak_bytes", show=mib),
    Column(title="its peak MiB", key="peak_bytes", show=mib),
    Column(title="predicted MiB", key="predicted_peak_bytes", show=mib),
    Column(title="on the host MiB", key="host_bytes", show=mib),
    Column(title="pinned MiB", key="pinned_bytes", show=mib),
    Column(title="copies a step", key="copies"),
    Column(title="races", key="races"),
)


class Stalled(Accelerator):
    """Copies come late, on the ways that are named."""

    def __init__(self, device: torch.device, *ways: str) -> None:
        super().__init__(device)
        self.ways = ways

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """See `Device`."""
        if "out" in self.ways:
            with self.sends:
                torch.cuda._sleep(STALL_CYCLES)
        super().send(source, slab, offset)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """See `Device`."""
        if "back" in self.ways:
            with self.fetches:
                torch.cuda._sleep(STALL_CYCLES)
        super().fetch(slab, offset, into)


class Careless(Accelerator):
    """Waits for nothing: whoever looks for races must find some."""

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device`."""


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Families under both policies; then the sanitizer."""
    log.columns = COLUMNS
    longest = 1.0 if setting.device.type == "cpu" else 10.0
    for kind in KINDS:
        for word in POLICIES:
            if quick and not (kind.tiny and word == "all"):
                continue
            case = log.case(
                f"{kind.name}, {word}", lambda kind=kind, word=word: prove(kind, word, setting), expect=longest
            )
            longest = max(longest, 0.7 * case.seconds)
    log.case("races", lambda: sanitized(setting, careless=False), expect=longest)
    log.case("races that are there are found", lambda: sanitized(setting, careless=True), expect=longest)


def prove(kind: Kind, word: str, setting: Setting) -> Found:
    """Three steps next to a plain model's, once for each way in which copies can come."""
    with restored_determinism():
        torch.use_deterministic_algorithms(True, warn_only=True)
        plain, again = Run(kind, setting).train(), Run(kind, setting).train()
        if differences(again, plain):
            raise Skip("plain training differs from itself, under deterministic algorithms as well")
        moving = Run(kind, setting)
        predicted = _predicted(moving, word)
        with moving.settings():
            handle = jettison.apply(moving.model, POLICIES[word], batch=moving.batch)
        problems: list[str] = []
        with handle:
            engine = handle.offload
            if engine is None:
                return Found(problems=["nothing moves"])
            with _counted(engine.device) as copied:
                usual = moving.train()
            copies = len(copied) // len(usual.peaks)
            problems += [f"copies as they come: {what}" for what in differences(usual, plain)[:2]]
            for name, slowed in _ways(handle, setting.device):
                slowed()
                problems += [f"{name}: {what}" for what in differences(moving.train(), plain)[:2]]
            problems += [str(race) for race in getattr(engine.device, "races", [])[:2]]
            figures = {
                "plain_peak_bytes": max(plain.peaks),
                "peak_bytes": max(usual.peaks),
                "predicted_peak_bytes": predicted,
                "host_bytes": engine.pool.peak_bytes,
                "pinned_bytes": engine.pool.real_bytes,
                "copies": copies,
            }
            problems += _pinned_otherwise(engine.pool.real_bytes, setting.device)
    if figures["peak_bytes"] >= figures["plain_peak_bytes"]:
        problems.append("the peak is not below a plain step's")
    return Found(figures=figures, problems=problems)


@contextmanager
def _counted(device: StreamDevice) -> Iterator[list[int]]:
    """The bytes of each copy that is queued within the context."""
    found: list[int] = []

    def counting(copy: Callable[..., None], given: int) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            found.append(args[given].numel())
            copy(*args)

        return counted

    with swapped(device, send=counting(device.send, 0), fetch=counting(device.fetch, 2)):
        yield found


def _predicted(moving: Run, word: str) -> int:
    """What the dry run of a step says, its optimizer included."""
    elsewhere = elsewhere_bytes(moving.model, moving.batch, moving.optimizer)
    loop = Loop(keep_output=True, elsewhere_bytes=elsewhere)
    with moving.settings():
        found = traced(moving.model, moving.batch, loop=loop)
    policies, segments = policies_of(POLICIES[word], [call.name for call in found.calls])
    optimizer = fake_optimizer(moving.optimizer, moving.model, found)
    return dry_run_batch(found, policies, KeepAll(), segments, optimizer=optimizer).peak_bytes


def _ways(handle: Applied, device: torch.device) -> list[tuple[str, Callable[[], None]]]:
    engine = handle.offload
    assert engine is not None
    found: list[tuple[str, Callable[[], None]]] = []
    if device.type == "cpu":
        from tests.support.recorder import Earliest, Latest, recorder_of  # no part of the kit on a GPU

        recorder = recorder_of(engine)
        for name, order in (("copies late", Latest()), ("copies early", Earliest())):
            found.append((name, lambda order=order: setattr(recorder, "order", order)))
        return found
    for ways in (("out",), ("back",), ("out", "back")):
        name = f"copies stalled on the way {' and '.join(ways)}"
        found.append((name, lambda ways=ways: setattr(engine, "device", Stalled(device, *ways))))
    return found


def _pinned_otherwise(real_bytes: int, device: torch.device) -> list[str]:
    """Whether torch's allocator says that it has pinned something else than the pool counts, where it says so."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if device.type == "cpu" or statistics is None:
        return []
    pinned = int(statistics().get("allocated_bytes.current", real_bytes))
    return [] if pinned >= real_bytes else [f"{real_bytes} bytes are counted as pinned, torch says {pinned}"]


def sanitized(setting: Setting, *, careless: bool) -> Found:
    """How many races are found where none is, and where the engine waits for nothing."""
    if setting.device.type == "cpu":
        from tests.support.recorder import Recorder

        recorder: Any = Recorder()
        if careless:
            recorder.wait = lambda stream, event: None
        races = _watched(setting.device, recorder)
    else:
        races = _sanitizer_says(careless)
    problems = [] if bool(races) is careless else [f"{races} races were found"]
    return Found(figures={"races": races}, problems=problems)


def _watched(device: torch.device, instead: Any = None) -> int:
    """Two steps of a small model; races that a recorder has seen."""
    setting = Setting(device=device, tiny=True, rounds=1)
    moving = Run(Kind(family="gpt", kernel="math", dtype=FP32, dropout=0.1), setting)
    with moving.settings():
        handle = jettison.apply(moving.model, POLICIES["all"], batch=moving.batch, check="off")
    engine = handle.offload
    assert engine is not None
    if instead is not None:
        engine.device = instead
    with handle, getattr(instead, "watching", nullcontext)():
        losses: list[Tensor] = []
        for _ in range(2):
            moving.optimizer.zero_grad(set_to_none=True)
            moving.step(losses)
    return len(getattr(instead, "races", ()))


def _sanitizer_says(careless: bool) -> int:
    """Of a process of its own: it watches from the start, and every op is slower under it."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.offload", *(["--careless"] if careless else [])]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=environment, timeout=SANITIZER_SECONDS, check=False
    )
    races = (done.stdout + done.stderr).count(RACE)
    if not races and done.returncode:
        raise RuntimeError(f"the watched run ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return races


if __name__ == "__main__":
    here = torch.device("cuda", torch.cuda.current_device())
    _watched(here, Careless(here) if "--careless" in sys.argv else None)
    torch.cuda.synchronize()
