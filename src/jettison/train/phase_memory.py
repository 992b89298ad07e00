"""Peak bytes of each phase of a step: from the allocator on a GPU, from the profiler or a counter on a CPU.

On a CPU both slow a step down, so only the first steps are measured. The profiler's allocations are replayed in time
order, from the bytes alive before the step. Gloo's threads free tensors, too, which the profiler does not see. With
gloo, `AllocationCounter` follows every storage until it is freed, without memory inside one kernel call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from jettison.dryrun.counter import AllocationCounter, PhaseMarks, Workspace, profiled_phases, unique_bytes
from jettison.ledger.step_levels import StepLevels

_COLLECTIVES: Final = ("c10d", "_c10d_functional")


@dataclass(frozen=True, kw_only=True)
class PhasePeaks:
    """Peak of allocated bytes in each phase of one step, on one rank, parameters and the like included."""

    phases: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values(), default=0)


@dataclass(eq=False)
class MemoryMeter:
    """Measures steps: `step` around each, `phase` around its parts.

    Args:
        left: steps to measure on a CPU.
        alive: tensors before a step.
        storages: follow storages on a CPU, instead of the allocator.
        workspace: temporary bytes of a kernel, if storages are followed; None: not counted.
    """

    device: torch.device
    left: int
    alive: Callable[[], list[Tensor]]
    storages: bool = False
    workspace: Workspace | None = None
    _phases: dict[str, int] | None = field(default=None, init=False)
    _counter: _Counter | None = field(default=None, init=False)
    _phase_levels: list[tuple[str, list[int]]] = field(default_factory=list, init=False)

    @property
    def levels(self) -> StepLevels | None:
        """Bytes over the last measured step; on a GPU only the peaks of its phases."""
        return StepLevels.of(self._phase_levels)

    @property
    def measuring(self) -> bool:
        return self.device.type == "cuda" or self.left > 0

    @contextmanager
    def step(self) -> Iterator[Callable[[], PhasePeaks | None]]:
        """Measure one step; the yielded function returns the peaks after the step, None if it was not measured."""
        found: dict[str, int] | None = {} if self.measuring else None
        self._phases = found
        if found is not None:
            self._phase_levels = []
        with self._watching():
            yield lambda: PhasePeaks(phases=found) if found else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the step. A name may repeat: the highest of its peaks counts."""
        if self._phases is None:
            yield
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self._note(name, [torch.cuda.max_memory_allocated(self.device)])
        elif self._counter is not None:
            self._counter.reset_peak()
            self._counter.phase(name, first=True)
            yield
            peak = self._counter.peak_bytes
            self._note(name, [*self._counter.phase_levels[-1][1], peak])
        else:
            with PhaseMarks().phase(name):
                yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self._phases is None or self.device.type == "cuda":
            yield
            return
        self.left -= 1
        gc.collect()
        if not self.storages:
            with profiled_phases(unique_bytes(self.alive())) as phases:
                yield
            for name, levels in phases[1:]:
                self._note(name, levels)
            return
        self._counter = _Counter(self.alive(), record_levels=True, workspace=self.workspace)
        try:
            with self._counter:
                yield
        finally:
            self._counter = None

    def _note(self, name: str, levels: list[int]) -> None:
        assert self._phases is not None
        self._phases[name] = max(*levels, self._phases.get(name, 0))
        if self._phase_levels and self._phase_levels[-1][0] == name:
            self._phase_levels[-1][1].extend(levels)
        else:
            self._phase_levels.append((name, levels))


class _Counter(AllocationCounter):
    """Counts tensors inside wrappers, not the wrappers. A new peak counts once gloo's threads have freed theirs."""

    _sending = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # called once more, with the tensors inside
        self._sending |= func.namespace in _COLLECTIVES
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _raise_peak(self, live_bytes: int) -> None:
        if self._sending and live_bytes > self._peak_bytes:
            before, self._sending = self._live_bytes, False
            self._wait()
            live_bytes -= before - self._live_bytes
        super()._raise_peak(live_bytes)

    def _wait(self) -> None:
        left, unchanged = -1, 0
        while unchanged < 3:
            left, unchanged = self._live_bytes, unchanged + 1 if left == self._live_bytes else 0
            time.sleep(5e-4)
