"""Is somebody else using the machine? Linux says how long its cores were busy; what we did ourselves comes off."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

MOST = 0.12
"""Cores that others may keep busy, on average, while something counts as measured in quiet."""


class Others:
    """Around a measurement: how many cores others, and the hypervisor, kept busy. None where it is no Linux."""

    cores = 0.0

    def __enter__(self) -> Others:
        self._start = time.perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, busy, own = self._start
        others = (_busy_seconds() - busy) - (_own_seconds() - own)
        self.cores = max(0.0, others) / (time.perf_counter() - wall)

    @property
    def quiet(self) -> bool:
        """Was there next to nothing?"""
        return self.cores <= MOST


def _own_seconds() -> float:
    return sum(os.times()[:2])


def _busy_seconds() -> float:
    """Of all cores together, since the machine was started; time that was stolen from it counts."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
