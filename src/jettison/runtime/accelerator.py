"""`Device` on whatever `torch.accelerator` knows: CUDA, ROCm, XPU and others with streams."""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.errors import UsageError
from jettison.runtime.device import Device, Event, Slab, Stream, power_of_two
from jettison.runtime.recorder import Recorder


class Accelerator:
    """One device with two streams of our own, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sends: Stream = torch.Stream(device)
        self.fetches: Stream = torch.Stream(device)

    def current_stream(self) -> Stream:
        """See `Device`.

        Raises:
            UsageError: a graph is being captured, in which the order of host and device would be frozen.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured under a plan that moves tensors to the host; capture without such a "
                "plan, or train without graphs"
            )
        return torch.accelerator.current_stream(self.device)

    def record(self, stream: Stream) -> Event:
        """See `Device`."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device`."""
        stream.wait_event(event)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def rounded(self, nbytes: int) -> int:
        """See `Device`."""
        return power_of_two(nbytes)

    def pin(self, nbytes: int) -> Slab:
        """See `Device`. All that rounding takes is used."""
        real_bytes = self.rounded(nbytes)
        memory = torch.empty(real_bytes, dtype=torch.uint8, pin_memory=True)
        return Slab(memory, real_bytes, real_bytes)

    def send(self, source: Tensor, slab: Slab, offset: int) -> None:
        """See `Device`."""
        into = slab.memory[offset : offset + source.numel()]
        with self.sends:
            into.copy_(source, non_blocking=True)

    def fetch(self, slab: Slab, offset: int, into: Tensor) -> None:
        """See `Device`."""
        source = slab.memory[offset : offset + into.numel()]
        with self.fetches:
            into.copy_(source, non_blocking=True)


def device_for(device: torch.device) -> Device:
    """What moves tensors of this device.

    Raises:
        UsageError: it has neither streams nor memory that this process can read.
    """
    if device.type == "cpu":
        return Recorder()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        raise UsageError(f"got tensors on {device} to move to the host; expected an accelerator of torch's, or the CPU")
    return Accelerator(device)
