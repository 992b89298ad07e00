"""Step times on a noisy machine, compared by ratios within each round; and a description of the machine."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from jettison import __version__
from jettison.core.process import cores, package_version, uncollected
from jettison.core.units import format_bytes

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class CaseTiming:
    """One case over all rounds. `ratio`: median over rounds of its time ÷ the baseline's; low, high: quartiles."""

    name: str
    median_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    seconds: tuple[float, ...]


def interleaved(
    rounds: int, cases: Mapping[str, Callable[[], object]], *, warmup: int = 2, clock: Clock = time.perf_counter
) -> dict[str, CaseTiming]:
    """Time every case once a round, in an order that rotates and reverses; report each against the first, by name.

    Garbage is collected between rounds and never inside a case. CUDA is synchronised before and after each case.

    Args:
        clock: in seconds; `time.process_time` describes a step less well, but is steadier on a shared machine.
    """
    if rounds < 1 or not cases:
        raise ValueError(f"got {rounds} rounds of {len(cases)} cases; expected at least one of each")
    for _ in range(warmup):
        for case in cases.values():
            case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(rounds):
        gc.collect()
        with uncollected():
            for name in _order(list(cases), index):
                seconds[name].append(timed_seconds(cases[name], clock))
    return {name: _case(name, samples, seconds[next(iter(cases))]) for name, samples in seconds.items()}


def timed_seconds(case: Callable[[], object], clock: Clock) -> float:
    """Seconds of one call, the work of all CUDA devices in use included; wall time by default."""
    devices = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    start = _synchronized(devices, clock)
    case()
    return _synchronized(devices, clock) - start


def _order(names: list[str], index: int) -> list[str]:
    """Rotate and reverse the order, so that no case always runs on another's caches."""
    turn = index // 2 % len(names)
    rotated = names[turn:] + names[:turn]
    return rotated if index % 2 == 0 else rotated[::-1]


def _case(name: str, samples: list[float], base: list[float]) -> CaseTiming:
    ratios = sorted(sample / reference for sample, reference in zip(samples, base, strict=True))
    low, _, high = ratios * 3 if len(ratios) == 1 else statistics.quantiles(ratios, n=4, method="inclusive")
    return CaseTiming(
        name=name,
        median_seconds=statistics.median(samples),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        seconds=tuple(samples),
    )


def _synchronized(devices: Iterable[int], clock: Clock) -> float:
    for device in devices:
        torch.cuda.synchronize(device)
    return clock()


# environment of a measurement -----------------------------------------------------------------------------------------


_PACKAGES = ("transformers", "numpy")


def environment() -> dict[str, str]:
    """Versions, cores, accelerator, in display order. Nothing names a machine or its owner."""
    found = {
        "jettison": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: text for name in _PACKAGES if name in sys.modules and (text := package_version(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu cores": str(cores()),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["accelerator"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
        found["cuda"] = str(torch.version.cuda)
    return found
