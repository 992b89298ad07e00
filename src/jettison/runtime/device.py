"""Devices that tensors are offloaded from: streams, events, their memory, and pinned CPU memory.

`Accelerator` is for `torch.accelerator`'s devices (CUDA, ROCm, XPU, others with streams), `OnHost` for the CPU.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jettison.core.errors import UsageError
from jettison.runtime.cuda_graphs import is_capturing

Stream = Any
"""An order of work on the device; equal to itself alone."""
Event = Any
"""A point in a stream's work."""


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """A block of pinned CPU memory, with the bytes that pinning really took."""

    memory: Any
    nbytes: int


def whole_pages(nbytes: int) -> int:
    """Bytes that pinning takes without an accelerator: whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(nbytes: int) -> int:
    """Bytes that torch's caching allocator of pinned memory takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def rounding_of(place: torch.device) -> Callable[[int], int]:
    """Round-up of pinned memory for a device."""
    return whole_pages if place.type == "cpu" else power_of_two


class StreamDevice:
    """Operations of a device. Only `pin` makes Python wait. Copies to the CPU are queued in the stream ``sends``,
    copies back in ``fetches``; ops run in `current_stream`.

    This base class is for fake tensors: it allocates as the device of ``place`` does, and copies nothing.
    """

    sends: Stream = None
    fetches: Stream = None

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.rounded = rounding_of(place)
        self._like: Tensor | None = None  # empty; fake, also where no mode makes new tensors fake

    def current_stream(self) -> Stream:
        """Stream in which Python's ops run now. It changes: under FSDP2, in backward, in user code."""
        return None

    def record(self, stream: Stream) -> Event:
        """Record an event after the work that is queued in the stream so far."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work in ``stream`` wait for the event."""

    def record_use(self, stream: Stream, source: Tensor) -> None:
        """If ``source`` is another stream's memory, hold it after its release until work then in ``stream`` ends."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate bytes on the device from the current stream's memory: its earlier work may still use them."""
        assert self._like is not None  # nothing is fetched before something was sent
        return self._like.new_empty(nbytes)

    def pin(self, nbytes: int) -> Slab:
        """Allocate pinned CPU memory, including all that rounding takes."""
        return Slab(self._memory(taken := self.rounded(nbytes)), taken)

    def _memory(self, nbytes: int) -> Any:
        return None

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """Queue a copy of ``source``, flat bytes, to the CPU, in ``sends``."""
        if self._like is None:
            self._like = source.new_empty(0)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """Queue a copy to ``into``, flat bytes, from the CPU, in ``fetches``."""


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


class Accelerator(OnHost):
    """One device with two streams of our own, one per direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.sends, self.fetches = torch.Stream(device), torch.Stream(device)

    def current_stream(self) -> Stream:
        """See `StreamDevice`. Raises `UsageError` in a capture, which would freeze the order of host and device."""
        if is_capturing():
            raise UsageError(
                "a CUDA graph is being captured under a plan that offloads tensors to the CPU; expected one that only "
                "keeps and recomputes (offload=False, another policy)"
            )
        return torch.accelerator.current_stream(self.place)

    def record(self, stream: Stream) -> Event:
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def record_use(self, stream: Stream, source: Tensor) -> None:
        source.record_stream(stream)

    def _memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        with self.sends:
            slab.memory[offset : offset + source.numel()].copy_(source, non_blocking=True)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        with self.fetches:
            into.copy_(slab.memory[offset : offset + into.numel()], non_blocking=True)


def device_for(device: torch.device) -> StreamDevice:
    """Return the stream device of a torch device. Raises `UsageError` without streams or readable memory statistics."""
    if device.type == "cpu":
        return OnHost(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        raise UsageError(f"got tensors on {device} to move to the host; expected an accelerator of torch's, or the CPU")
    return Accelerator(device)
