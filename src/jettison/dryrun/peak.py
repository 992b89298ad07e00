"""The peak of allocated bytes in one step, as the allocator reports it: the judge of every prediction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile, record_function

from jettison.capture.tensor_subclasses import parts_of
from jettison.core.process import by_default
from jettison.dryrun.counter import unique_bytes
from jettison.ledger.levels import StepLevels

ALLOCATION_EVENT = "[memory]"
_MARK = "jettison.step."
_FREED = "jettison.freed."


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
    levels: StepLevels | None = None  # over the marked phases of the step


@dataclass(kw_only=True)
class PhaseMarks:
    """Says to `measured_peak` which phase a step is in. ``device`` is set by it where the step runs on CUDA."""

    device: torch.device | None = None
    peaks: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step."""
        if self.device is None:
            with record_function(_MARK + name):
                yield
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        torch.cuda.synchronize(self.device)
        self.peaks.append((name, torch.cuda.max_memory_allocated(self.device)))


def measured_peak(
    step: Callable[[], object], *, static_tensors: Iterable[Tensor], marks: PhaseMarks | None = None
) -> PeakReport:
    """Run `step` once and report its peak of allocated bytes.

    On the CPU: the profiler's allocation events, replayed in time order from the bytes of the distinct storages of
    `static_tensors`; what the step frees of those counts until then, if nobody else holds them (give an iterator). On
    CUDA (any static tensor there): `max_memory_allocated`, which also holds whatever else the
    process has on the device. `static_tensors` must list what is alive before the step (see `counter.static_tensors`).
    """
    tensors = tuple(static_tensors)
    del static_tensors
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"static_tensors lie on several CUDA devices, {names}: measure one at a time")
    gc.collect()
    if devices:
        return _cuda_peak(step, devices.pop(), marks or PhaseMarks())
    static_bytes, watched = unique_bytes(tensors), _watched(tensors)
    del tensors
    return _cpu_peak(step, static_bytes, watched)


def allocation_deltas(step: Callable[[], object]) -> list[int]:
    """Bytes allocated (positive) and freed (negative) on the CPU while `step` runs, in time order."""
    return [nbytes for _, nbytes in _profiled(step)[0]]


def quiet_profiler() -> AbstractContextManager[None]:
    """The profiler does not write the two lines to stderr that it otherwise writes for each step."""
    return by_default("KINETO_LOG_LEVEL", "99")


def _watched(tensors: Iterable[Tensor]) -> list[weakref.ref[UntypedStorage]]:
    """References that mark, in the profiler's events, when memory on the CPU goes that was there before it began: torch
    knows the size of what was allocated under a profiler alone.
    """

    def mark(address: int, nbytes: int) -> Callable[[object], None]:
        def freed(_: object) -> None:
            with record_function(f"{_FREED}{address}.{nbytes}"):
                pass

        return freed

    storages = {s._cdata: s for t in tensors for part in parts_of(t) if (s := part.untyped_storage()).nbytes()}
    return [weakref.ref(s, mark(s.data_ptr(), s.nbytes())) for s in storages.values() if s.device.type == "cpu"]


def _first_freed(profiler: Any) -> dict[int, int]:
    """Bytes by address of what the profiler saw freed, and had been there before: those of whatever was allocated there
    last under a profiler, which may be another size by now.
    """
    left: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    first: dict[int, tuple[int, int]] = {}  # by address: when its first change was, and by how many bytes
    while left:
        event = left.pop()
        left += event.children
        if event.name == ALLOCATION_EVENT:
            change = event.start_time_ns, event.extra_fields.alloc_size
            first[event.extra_fields.ptr] = min(change, first.get(event.extra_fields.ptr, change))
    return {address: -nbytes for address, (_, nbytes) in first.items() if nbytes < 0}


def _profiled(step: Callable[[], object]) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """(time, bytes) of what is allocated and freed on the CPU, and (time, name) of where phases begin."""
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    changes, begins, freed = [], [], []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == ALLOCATION_EVENT:
            if event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), int(event.nbytes())))
        elif name.startswith(_MARK):
            begins.append((event.start_ns(), name.removeprefix(_MARK)))
        elif name.startswith(_FREED):
            freed.append((event.start_ns(), *map(int, name.removeprefix(_FREED).split("."))))
    known = _first_freed(profiler) if freed else {}
    changes += [(time, known.get(address, 0) - nbytes) for time, address, nbytes in freed]
    return sorted(changes, key=lambda change: change[0]), sorted(begins)


def _cpu_peak(step: Callable[[], object], static_bytes: int, watched: list[weakref.ref[UntypedStorage]]) -> PeakReport:
    changes, begins = _profiled(step)
    watched.clear()
    live_bytes = peak_bytes = static_bytes
    stretches: list[tuple[str, list[int]]] = [("before", [])]
    for time, delta_bytes in changes:
        while begins and begins[0][0] <= time:
            stretches.append((begins.pop(0)[1], [live_bytes]))
        live_bytes += delta_bytes
        peak_bytes = max(peak_bytes, live_bytes)
        stretches[-1][1].append(live_bytes)
    return PeakReport(
        peak_bytes=peak_bytes,
        static_bytes=static_bytes,
        after_bytes=live_bytes,
        source="profiler",
        levels=StepLevels.of(stretches[1:]),
    )


def _cuda_peak(step: Callable[[], object], device: torch.device, marks: PhaseMarks) -> PeakReport:
    marks.device = device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    static_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    statistics = torch.cuda.memory_stats(device)
    return PeakReport(
        peak_bytes=max(torch.cuda.max_memory_allocated(device), *(peak for _, peak in marks.peaks), 0),
        static_bytes=static_bytes,
        after_bytes=torch.cuda.memory_allocated(device),
        source="cuda",
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        requested_bytes=int(statistics.get("requested_bytes.all.peak", 0)) or None,
        levels=StepLevels.of((name, [peak]) for name, peak in marks.peaks),
    )
