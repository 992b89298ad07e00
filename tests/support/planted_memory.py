"""Memory histories with a known fault, in the structure of torch's snapshots: steps of a loop, event by event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.snapshot_cases import ENGINE, FORWARD, OPTIMIZER, block, event, segment

MIB = 1 << 20
HEAD = [
    {"name": "cross_entropy", "filename": "/venv/site-packages/torch/nn/functional.py", "line": 3400},
    {"name": "lm_head_loss", "filename": "/home/me/model/head.py", "line": 30},
    {"name": "_call_impl", "filename": "/venv/site-packages/torch/nn/modules/module.py", "line": 1780},
]
KEEPS = [
    {"name": "track", "filename": "/home/me/metrics.py", "line": 77},
    {"name": "forward", "filename": "/home/me/model/model.py", "line": 5},
]
PREFETCH = [{"name": "to_device", "filename": "/home/me/data.py", "line": 8}]
SETUP = [{"name": "__init__", "filename": "/home/me/model/model.py", "line": 3}]


class Tape:
    """A device that is watched."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._next = 0x7F00_0000_0000
        self._time_us = 0

    @property
    def live_bytes(self) -> int:
        return sum(size for size, _ in self.live.values())

    def alloc(self, size: int, frames: list[dict[str, Any]] = FORWARD) -> int:
        address, self._next = self._next, self._next + size
        self.live[address] = size, frames
        self._event("alloc", address, size, frames)
        return address

    def free(self, *addresses: int) -> None:
        for address in addresses:
            size, _ = self.live.pop(address)
            self._event("free_requested", address, size, [])
            self._event("free_completed", address, size, [])

    def oom(self, size: int, free: int, frames: list[dict[str, Any]] = FORWARD) -> None:
        self._event("oom", 0, size, frames)
        self.trace[-1]["device_free"] = free

    def _event(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        self._time_us += 10
        self.trace.append(event(action, address, size, frames, self._time_us))

    def step(
        self,
        *,
        layers: int = 4,
        activation: int = 8 * MIB,
        gradient: int = 2 * MIB,
        keep: int = 0,
        temporary: int = MIB,
    ) -> None:
        """Forward, backward, optimizer; ``keep`` bytes stay."""
        held = [self.alloc(activation) for _ in range(layers)]
        if keep:
            self.alloc(keep, KEEPS)
        gradients = []
        for address in reversed(held):
            gradients.append(self.alloc(gradient, ENGINE))
            self.free(address)
        self.free(self.alloc(temporary, OPTIMIZER))
        self.free(*gradients)

    def begin(self, *, parameters: int = 16 * MIB, state: int = 32 * MIB, **step: int) -> None:
        """Parameters, the first step, and the optimizer's state, which appears in it."""
        self.alloc(parameters, SETUP)
        self.step(**step)
        self.alloc(state, OPTIMIZER)

    def content(self, pieces: Sequence[int] = (), settings: Mapping[str, object] | None = None) -> dict[str, Any]:
        """What a snapshot holds: one segment for each live block, the first ones with a free piece behind it."""
        segments = []
        for at, (address, (size, frames)) in enumerate(self.live.items()):
            blocks = [block(address, size, size, "active_allocated", frames)]
            if at < len(pieces):
                blocks.append(block(address + size, pieces[at], 0, "inactive", []))
            segments.append(segment(address, blocks))
        return {
            "segments": segments, "device_traces": [self.trace], "allocator_settings": dict(settings or {}),
            "external_annotations": [],
        }  # fmt: skip


def message(
    *, asked: str, free: str, allocated: str, unused: str, used: str, others: str = "", total: str = "79.15"
) -> str:
    """PyTorch's own words, since 2.1; sizes in GiB."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of "
        f"{total} GiB of which {free} GiB is free. {others}Including non-PyTorch memory, this process has {used} GiB "
        f"memory in use. Of the allocated memory {allocated} GiB is allocated by PyTorch, and {unused} GiB is reserved "
        "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)\n"
    )


def traceback(*frames: tuple[str, int, str]) -> str:
    """As Python prints it, outermost first."""
    lines = [f'  File "{file}", line {line}, in {name}\n    x\n' for file, line, name in frames]
    return "Traceback (most recent call last):\n" + "".join(lines)
