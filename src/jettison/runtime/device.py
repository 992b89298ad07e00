"""What moving tensors to the host asks of a device: streams, events, memory on it, pinned memory beside it, copies.

`accelerator.Accelerator` implements it on whatever `torch.accelerator` knows, `OnHost` where there is none, and
`Imagined` in dry runs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Stream = Any
"""An order of work on the device; equal to itself alone."""
Event = Any
"""A point in a stream's work."""


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """Pinned host memory. ``nbytes`` can be written to, ``real_bytes`` were taken from the host for it."""

    memory: Any
    nbytes: int
    real_bytes: int


class Device(Protocol):
    """See the module docstring. Nothing here makes Python wait, except `pin`.

    Copies to the host go through ``sends``, those back through ``fetches``; what computes is `current_stream`.
    """

    @property
    def sends(self) -> Stream: ...

    @property
    def fetches(self) -> Stream: ...

    def current_stream(self) -> Stream:
        """Where ops run that Python calls now. It changes: under FSDP2, in backward, in user code."""

    def record(self, stream: Stream) -> Event:
        """The point that the stream's work has reached, counted in what was queued."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued in ``stream`` from here on comes after the event."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Bytes on the device, from the current stream's memory: they may still be in use by its earlier work."""

    def rounded(self, nbytes: int) -> int:
        """Bytes that pinning ``nbytes`` takes from the host."""

    def pin(self, nbytes: int) -> Slab:
        """Host memory that copies need not be staged for."""

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """Queue a copy of ``source``, flat bytes, to the host, in ``sends``."""

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """Queue a copy to ``into``, flat bytes, from the host, in ``fetches``."""


def whole_pages(nbytes: int) -> int:
    """What pinning takes where there is no accelerator."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(nbytes: int) -> int:
    """What torch's allocator of pinned memory takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def rounding_of(place: torch.device) -> Callable[[int], int]:
    """What pinning so many bytes takes from the host of a device."""
    return whole_pages if place.type == "cpu" else power_of_two


class Imagined:
    """A device for fake tensors: it allocates as a real one does, and nothing is copied.

    Args:
        place: which one.
    """

    sends = fetches = None

    def __init__(self, place: torch.device) -> None:
        self._rounded = rounding_of(place)
        self._like: Tensor | None = None  # without elements; fake, also where no mode makes new tensors so

    def current_stream(self) -> Stream:
        """See `Device`."""
        return None

    def record(self, stream: Stream) -> Event:
        """See `Device`."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device`."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Device`."""
        assert self._like is not None  # nothing comes back that did not go
        return self._like.new_empty(nbytes)

    def rounded(self, nbytes: int) -> int:
        """See `Device`."""
        return self._rounded(nbytes)

    def pin(self, nbytes: int) -> Slab:
        """See `Device`."""
        real_bytes = self.rounded(nbytes)
        return Slab(None, real_bytes, real_bytes)

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """See `Device`."""
        if self._like is None:
            self._like = source.new_empty(0)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """See `Device`."""


class OnHost(Imagined):
    """The CPU: copies run when they are queued, to memory that torch's allocators do not count."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pin(self, nbytes: int) -> Slab:
        """See `Device`."""
        real_bytes = self.rounded(nbytes)
        return Slab((ctypes.c_char * real_bytes).from_buffer(mmap.mmap(-1, real_bytes)), real_bytes, real_bytes)

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """See `Device`."""
        ctypes.memmove(ctypes.addressof(slab.memory) + offset, source.data_ptr(), source.numel())

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """See `Device`."""
        ctypes.memmove(into.data_ptr(), ctypes.addressof(slab.memory) + offset, into.numel())
