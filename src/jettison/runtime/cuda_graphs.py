"""Capture of a step into a CUDA graph: what is refused there.

NOTE [ Captured steps ]
Under `torch.cuda.graph` Python runs once, and a replay launches the kernels that were captured. Of a planned step after
its warm-up, forward, recomputation and comparisons are all in the graph, and nothing synchronizes.

- Work that Python does once (a plan for another batch, a recording, a first checked run) is not part of a step: a
  capture that needs it is refused, and so is one that moves tensors to the CPU.
- Random states: `torch.cuda.get_rng_state` and `set_rng_state` work under capture. They read and set the offset within
  the graph, to which each replay adds the generator's own. Forward and recomputation have to be in one graph.
- Differences set a flag on the device, which lives outside of the graph: see `witness.tell_replays`.
"""

from __future__ import annotations

import torch

from jettison.core.errors import UsageError


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
