"""Peak bytes of each phase of a step: from the allocator on a GPU, from the profiler on a CPU.

On a CPU the profiler slows a step down and only the first steps are measured. Allocations are replayed in time order,
from the bytes of what was alive before the step.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from jettison.measure.memory import unique_bytes
from jettison.measure.peak import ALLOCATION_EVENT

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the CPU profiler otherwise writes two lines to stderr for every step

_MARK: Final = "jettison.phase."


@dataclass(frozen=True, kw_only=True)
class PhasePeaks:
    """Peak of allocated bytes in each phase of one step, on one rank, what lives all along included."""

    phases: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Of the whole step."""
        return max(self.phases.values(), default=0)


class MemoryMeter:
    """Measures steps: `step` around each, `phase` around the parts of it."""

    def __init__(self, device: torch.device, steps_on_cpu: int, alive: Callable[[], list[Tensor]]) -> None:
        self._device = device
        self._left = steps_on_cpu
        self._alive = alive
        self._phases: dict[str, int] | None = None
        self._profiling = False

    @property
    def measuring(self) -> bool:
        """Will the next step be measured?"""
        return self._device.type == "cuda" or self._left > 0

    @contextmanager
    def step(self) -> Iterator[Callable[[], PhasePeaks | None]]:
        """One step; the function that it gives has the peaks once the step is over, None where it was not measured."""
        self._phases = {} if self.measuring else None
        found = self._phases
        if self._device.type == "cuda" or found is None:
            yield lambda: PhasePeaks(phases=found) if found else None
            return
        self._left -= 1
        gc.collect()
        static_bytes = unique_bytes(self._alive())
        self._profiling = True
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                yield lambda: PhasePeaks(phases=found) if found else None
        finally:
            self._profiling = False
        found.update(_replayed(profiler.profiler.kineto_results, static_bytes))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step. A name may come back: the highest of its peaks counts."""
        if self._phases is None:
            yield
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak = torch.cuda.max_memory_allocated(self._device)
            self._phases[name] = max(peak, self._phases.get(name, 0))
        else:
            with record_function(_MARK + name) if self._profiling else nullcontext():
                yield


def _replayed(results: Any, static_bytes: int) -> dict[str, int]:
    """The highest level within each marked stretch of time."""
    marks: list[tuple[int, int, str]] = []
    changes: list[tuple[int, int]] = []
    for event in results.events():
        name = event.name()
        if name == ALLOCATION_EVENT:
            if event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            marks.append((event.start_ns(), event.end_ns(), name.removeprefix(_MARK)))
    marks.sort()
    changes.sort(key=lambda change: change[0])
    peaks: dict[str, int] = {}
    live = static_bytes
    index = 0
    for start, end, name in marks:
        while index < len(changes) and changes[index][0] < start:
            live += changes[index][1]
            index += 1
        highest = live
        while index < len(changes) and changes[index][0] <= end:
            live += changes[index][1]
            highest = max(highest, live)
            index += 1
        peaks[name] = max(highest, peaks.get(name, 0))
    return peaks
