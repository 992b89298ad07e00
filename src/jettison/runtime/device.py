"""What moving tensors to the host asks of a device: streams, events, memory on it, pinned memory beside it, copies.

`accelerator.Accelerator` is one on whatever `torch.accelerator` knows, `OnHost` where there is none.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Stream = Any
"""An order of work on the device; equal to itself alone."""
Event = Any
"""A point in a stream's work."""


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """Pinned host memory: so many bytes, all that pinning has taken from the host."""

    memory: Any
    nbytes: int


def whole_pages(nbytes: int) -> int:
    """What pinning takes where there is no accelerator."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(nbytes: int) -> int:
    """What torch's allocator of pinned memory takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def rounding_of(place: torch.device) -> Callable[[int], int]:
    """What pinning so many bytes takes from the host of a device."""
    return whole_pages if place.type == "cpu" else power_of_two


class StreamDevice:
    """What a device does. Nothing here makes Python wait, except `pin`. Copies to the host go through the stream
    ``sends``, those back through ``fetches``; what computes is `current_stream`.

    This one is for fake tensors: it allocates as the device of ``place`` does, and copies nothing.
    """

    sends: Stream = None
    fetches: Stream = None

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.rounded = rounding_of(place)
        self._like: Tensor | None = None  # without elements; fake, also where no mode makes new tensors so

    def current_stream(self) -> Stream:
        """Where ops run that Python calls now. It changes: under FSDP2, in backward, in user code."""
        return None

    def record(self, stream: Stream) -> Event:
        """The point that the stream's work has reached, counted in what was queued."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued in ``stream`` from here on comes after the event."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Bytes on the device, from the current stream's memory: they may still be in use by its earlier work."""
        assert self._like is not None  # nothing comes back that did not go
        return self._like.new_empty(nbytes)

    def pin(self, nbytes: int) -> Slab:
        """Host memory that copies need not be staged for: all that rounding takes."""
        return Slab(self._memory(taken := self.rounded(nbytes)), taken)

    def _memory(self, nbytes: int) -> Any:
        return None

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """Queue a copy of ``source``, flat bytes, to the host, in ``sends``."""
        if self._like is None:
            self._like = source.new_empty(0)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """Queue a copy to ``into``, flat bytes, from the host, in ``fetches``."""


class OnHost(StreamDevice):
    """The CPU: copies run when they are queued, to memory that torch's allocators do not count."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _memory(self, nbytes: int) -> Any:
        return (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes))

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        ctypes.memmove(ctypes.addressof(slab.memory) + offset, source.data_ptr(), source.numel())

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        ctypes.memmove(into.data_ptr(), ctypes.addressof(slab.memory) + offset, into.numel())
