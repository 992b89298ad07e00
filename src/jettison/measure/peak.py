"""The peak of allocated bytes in one step, as the allocator reports it: the judge of every prediction."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jettison.measure.memory import unique_bytes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the CPU profiler otherwise writes two lines to stderr for every step

ALLOCATION_EVENT = "[memory]"


@dataclass(frozen=True, kw_only=True)
class PeakReport:
    """Bytes of one step. `peak_bytes` includes `static_bytes`, what was alive before the step.

    `reserved_bytes` and `requested_bytes` are the CUDA caching allocator's (segments it holds, and the peak before it
    rounds blocks up); None on the CPU.
    """

    peak_bytes: int
    static_bytes: int
    after_bytes: int
    source: Literal["profiler", "cuda"]
    reserved_bytes: int | None = None
    requested_bytes: int | None = None

    @property
    def step_bytes(self) -> int:
        """What the step adds, at its peak, to what was there before."""
        return self.peak_bytes - self.static_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data; byte counts are integers."""
        return asdict(self)


def measured_peak(step: Callable[[], object], *, static_tensors: Iterable[Tensor]) -> PeakReport:
    """Run `step` once and report its peak of allocated bytes.

    On the CPU: the profiler's allocation events, replayed in time order from the bytes of the distinct storages of
    `static_tensors`. On CUDA (any static tensor there): `max_memory_allocated`, which also holds whatever else the
    process has on the device. `static_tensors` must list what is alive before the step (see `memory.static_tensors`).
    """
    tensors = tuple(static_tensors)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"static_tensors lie on several CUDA devices, {names}: measure one at a time")
    gc.collect()
    if devices:
        return _cuda_peak(step, devices.pop())
    return _cpu_peak(step, unique_bytes(tensors))


def allocation_deltas(step: Callable[[], object]) -> list[int]:
    """Bytes allocated (positive) and freed (negative) on the CPU while `step` runs, in time order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == ALLOCATION_EVENT]
    events.sort(key=lambda event: event.start_ns())
    return [int(event.nbytes()) for event in events if event.device_type() == torch.autograd.DeviceType.CPU]


def _cpu_peak(step: Callable[[], object], static_bytes: int) -> PeakReport:
    live_bytes = peak_bytes = static_bytes
    for delta_bytes in allocation_deltas(step):
        live_bytes += delta_bytes
        peak_bytes = max(peak_bytes, live_bytes)
    return PeakReport(peak_bytes=peak_bytes, static_bytes=static_bytes, after_bytes=live_bytes, source="profiler")


def _cuda_peak(step: Callable[[], object], device: torch.device) -> PeakReport:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    static_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    statistics = torch.cuda.memory_stats(device)
    return PeakReport(
        peak_bytes=torch.cuda.max_memory_allocated(device),
        static_bytes=static_bytes,
        after_bytes=torch.cuda.memory_allocated(device),
        source="cuda",
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        requested_bytes=int(statistics.get("requested_bytes.all.peak", 0)) or None,
    )
