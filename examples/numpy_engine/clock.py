"""Seconds of a step that nobody has run: work on one clock, copies to the host on another, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a data sheet says, here an A100's. One direction of the link; a kernel reaches none of these in practice."""

    flops_per_second: float = 312e12
    memory_bytes_per_second: float = 2.039e12
    link_bytes_per_second: float = 32e9


@dataclass
class Clock:
    """A kernel lasts as long as its matmuls or its traffic, whichever is longer. Copies wait for one another."""

    machine: Machine
    now: float = 0.0
    waited_seconds: float = 0.0
    _link_free: float = 0.0
    _done: dict[str, float] = field(default_factory=dict)

    def work(self, flops: int, moved_bytes: int) -> None:
        """A kernel runs."""
        self.now += max(flops / self.machine.flops_per_second, moved_bytes / self.machine.memory_bytes_per_second)

    def copy(self, name: str, size_bytes: int) -> None:
        """A copy joins the queue of the link. Work goes on."""
        self._link_free = max(self._link_free, self.now) + size_bytes / self.machine.link_bytes_per_second
        self._done[name] = self._link_free

    def wait(self, name: str) -> None:
        """Work stops until a copy is done."""
        late = max(0.0, self._done.pop(name) - self.now)
        self.now += late
        self.waited_seconds += late
