"""Seconds of a call, taken in rounds over all calls: what disturbs a machine for a while disturbs all of them.

NOTE [ Whose seconds ]
A single thread is timed by the seconds that it ran, so that what else a shared machine does is not counted. Several
threads wait for each other, and a device is not asked: their seconds are the wall's, those of a device with an end that
waits for it. Either way others share caches and memory, and can only make a call longer: of many samples the lower
quartile counts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from jettison.progress import Progress, silent

SAMPLE_SECONDS = 2e-3
"""A sample repeats a call until it takes about as long as this: clocks are coarse, and starting one costs."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
GIVE_UP_SECONDS = 0.5
"""A call that takes longer is left out: it would eat the time of all others."""


class Clock(StrEnum):
    """Whose seconds: see NOTE [ Whose seconds ]."""

    THREAD = "seconds of one CPU thread"
    WALL = "wall-clock seconds"
    CUDA = "wall-clock seconds of the device"

    def now(self) -> float:
        """A moment, the device's work included."""
        if self is Clock.THREAD:
            return time.thread_time()
        if self is Clock.CUDA:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Probe:
    """One call whose seconds are wanted. ``run`` is given a number that grows, so that data need not be the same."""

    name: str
    run: Callable[[int], object]


def clock_for(device: torch.device) -> Clock:
    """The clock that suits a device."""
    if device.type == "cuda":
        return Clock.CUDA
    return Clock.THREAD if torch.get_num_threads() == 1 else Clock.WALL


def undisturbed(
    probes: Sequence[Probe], clock: Clock, *, seconds: float, needed: bool = False, say: Progress = silent
) -> dict[str, float]:
    """Seconds of each call: the lower quartile over rounds.

    Args:
        seconds: on the wall after which no further round begins; three there are anyway, and at most 25.
        needed: there is no doing without any of them; otherwise those that fail or take too long are left out.
    """
    deadline = time.perf_counter() + seconds
    samplers = []
    for probe in probes:
        say(f"trying {probe.name}")
        sampler = _Sampler(probe, clock, needed)
        if sampler.usable:
            samplers.append(sampler)
    samples: dict[str, list[float]] = {sampler.name: [] for sampler in samplers}
    enabled = gc.isenabled()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        say(f"round {number + 1} of {len(samplers)} calls")
        gc.collect()
        gc.disable()
        try:
            for sampler in samplers[:: 1 if number % 2 == 0 else -1]:
                samples[sampler.name].append(sampler.sample())
        finally:
            if enabled:
                gc.enable()
    return {name: statistics.quantiles(found, n=4, method="inclusive")[0] for name, found in samples.items()}


class _Sampler:
    """A probe, and how many calls make a sample of it."""

    def __init__(self, probe: Probe, clock: Clock, needed: bool) -> None:
        self.name, self._run, self._clock, self._turn = probe.name, probe.run, clock, 0
        self.usable, self._calls = True, 1
        try:
            self.sample()  # warms up
            once = self.sample()
        except (RuntimeError, NotImplementedError):  # an op that this device or this build does not have
            if needed:
                raise
            self.usable = False
            return
        self.usable = needed or once < GIVE_UP_SECONDS
        self._calls = max(1, min(1000, round(SAMPLE_SECONDS / max(once, 1e-7))))

    def sample(self) -> float:
        start = self._clock.now()
        for _ in range(self._calls):
            self._run(self._turn)
            self._turn += 1
        return (self._clock.now() - start) / self._calls
