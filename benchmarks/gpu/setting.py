"""Where the kit runs, and what several sections do there: a step's time, its peak, a planner."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import Loop
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.step import fake_optimizer
from jettison.planner.planner import Planner, make_planner
from jettison.planner.readiness import traced


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device, and how large cases are.

    Args:
        tiny: sizes that a CPU runs in seconds; what they measure says nothing about speed.
        rounds: of everything that is timed.
        compiles: whether `torch.compile` is compared with.
    """

    device: torch.device
    tiny: bool
    rounds: int
    compiles: bool = True


def planner_for(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer | None = None) -> Planner:
    """What `auto_checkpoint` makes, once for several budgets. The output, a loss, is held until the step is over."""
    trace = traced(model, batch, loop=Loop(keep_output=True))
    elsewhere = elsewhere_bytes(
        model, batch, optimizer
    )  # after the trace, whose tables of positions stay on the device
    trace = replace(trace, loop=replace(trace.loop, elsewhere_bytes=elsewhere))
    mirrored = None if optimizer is None else fake_optimizer(optimizer, model, trace)
    return make_planner(trace, optimizer=mirrored)


def milliseconds(step: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Of each of several steps, the device's work included."""
    samples = []
    gc.collect()
    for _ in range(rounds):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            step()
            samples.append(1e3 * (time.perf_counter() - begun))
    return samples


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    """The lower one, the median, the upper one."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def fingerprints(model: nn.Module) -> dict[str, int]:
    """A number for each gradient that changes with its bits, computed where the gradient is."""
    return {name: _fingerprint(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _fingerprint(tensor: Tensor) -> int:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().reshape(-1).view(words[tensor.element_size()])
    total = 0
    for index, piece in enumerate(bits.split(1 << 24)):
        place = torch.arange(piece.numel(), device=piece.device).mul_(0x9E3779B97F4A7C1).add_(2 * index + 1)
        total += int(place.mul_(piece).sum())
    return total


@functools.cache
def why_no_compiler(kind: str) -> str:
    """Why `torch.compile` cannot be compared with on this kind of device; empty where it can."""
    try:
        compiled = torch.compile(lambda x: (x * 2 + 1).sum(), fullgraph=True)
        compiled(torch.ones(64, device=kind, requires_grad=True)).backward()
    except Exception as error:  # Triton, a C compiler or Python's headers may be missing: each fails in its own way
        return f"torch.compile does not work here, {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return ""


@contextlib.contextmanager
def restored_determinism() -> Iterator[None]:
    """Whatever is said about deterministic algorithms inside is taken back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def name_of(device: torch.device) -> str:
    """The device's own, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
