"""`StreamDevice` for `torch.accelerator`'s devices (CUDA, ROCm, XPU, others with streams); CUDA graph capture.

NOTE [ Captured steps ]
Under `torch.cuda.graph` Python runs once, and a replay launches the kernels that were captured. Of a planned step after
its warm-up, forward, recomputation and the comparison of witnesses are all in the graph, and nothing synchronizes with
the device.

- Work that Python does once (a plan for another batch, a recording, a first checked run) is not part of a step: a
  capture that needs it is refused, and so is one that moves tensors to the CPU.
- Random states: `torch.cuda.get_rng_state` and `set_rng_state` work under capture. They read and set the offset within
  the graph, to which each replay adds the generator's own. Forward and recomputation have to be in one graph.
- Differences set a flag on the device, which lives outside of the graph: see `witness.tell_replays`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.core.errors import UsageError
from jettison.runtime.device import Event, OnHost, Slab, Stream, StreamDevice


def is_capturing() -> bool:
    """Whether ops are being captured into a CUDA graph instead of running. See NOTE [ Captured steps ]."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(why: str) -> None:
    """Raise `UsageError` while a CUDA graph is being captured: a replay would not repeat the work that follows."""
    if is_capturing():
        raise UsageError(
            f"a CUDA graph is being captured, and {why}, which a replay would not repeat. Run three training steps on "
            "the same shapes and settings before the capture"
        )


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
