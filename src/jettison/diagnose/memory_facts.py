"""Facts about a run's memory, from a snapshot, a log, or `jettison.watch`; and its growth from step to step.

None: the source does not state it. No fact is derived from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

NEARLY_FULL: Final = 0.02
"""Share of a device: with less free memory, the device is full for any request."""
CPU_ALLOCATOR: Final = "the CPU's allocator"
"""`MemoryFacts.what` of a request of PyTorch's on the host."""


class StepPhase(StrEnum):
    """Phases of a training step, by the words that stacks give (`diagnose.frames`)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    SAVING = "saving"
    """A checkpoint is written: FSDP all-gathers unsharded parameters for it."""
    UNKNOWN = "unknown"


class Failure(StrEnum):
    """Kinds of failures."""

    REQUEST = "request"
    """PyTorch's allocator ran out of device memory."""
    KILLED = "killed"
    """The operating system or a scheduler killed the process: the host's memory."""
    HOST = "host"
    """An allocation on the host failed: the CPU's allocator, pinned memory, a NumPy array."""
    SHARED = "shared memory"
    """/dev/shm, in which workers of a data loader share batches, is full."""
    LIBRARY = "library"
    """A library or the driver ran out of memory outside of PyTorch's allocator: NCCL, cuBLAS, a context."""
    SERVER = "server"
    """An inference server had no memory left for its cache, without a failed request."""


def phase_named(word: str) -> StepPhase:
    """Return the phase of a stack's role; unknown where it is the ledger's word for a tensor."""
    return StepPhase(word) if word in set(StepPhase) else StepPhase.UNKNOWN


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Live bytes of one line of the program at a moment."""

    module: str
    role: str
    nbytes: int
    site: str = ""
    """The innermost line of it outside of torch."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """One step.

    Args:
        between_bytes: allocated when it began, by tensors that outlive steps.
        peak_bytes: peak of allocated bytes.
        batch: shapes of its batch; ``batch_elements``: their number of elements.
    """

    step: int
    between_bytes: int
    peak_bytes: int | None = None
    batch: str = ""
    batch_elements: int | None = None


@dataclass(frozen=True, kw_only=True)
class Survivor(MemoryPart):
    """A line that leaks in most steps: ``nbytes`` in total, from ``steps`` steps."""

    steps: int

    @property
    def bytes_per_step(self) -> int:
        """Average of a step."""
        return self.nbytes // self.steps


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Facts about one moment of a run, and the steps before it.

    Args:
        source: what it was read from, as a message calls it.
        failed: a request failed. Without it, everything is about the highest moment.
        requested_bytes: by that request.
        free_bytes: of the device then, or below the limit that was set for the process.
        total_bytes: of the device, or that limit.
        allocated_bytes: by tensors then.
        unused_bytes: that PyTorch holds then, in pieces of segments that are otherwise in use.
        private_bytes: that PyTorch holds then, unused, in private pools (CUDA graphs): nothing else may use them.
        largest_piece_bytes: of the unused ones.
        other_processes_bytes: that other processes hold.
        outside_bytes: that this process holds outside of PyTorch's allocator.
        unaccounted_bytes: neither free nor PyTorch's, and the source names no process: either of these two.
        shared_bytes: that PyTorch holds above the device's capacity: the driver's shared or virtual memory.
        expandable: expandable segments are switched on.
        failure: what failed.
        site: the line of the program that asked.
        logits: the line that asked is in the head or the loss of a language model.
        fused_attention: the traceback is in an attention kernel that never makes scores.
        trainer: the framework whose loop the traceback shows, by its name in `trainers.toml`.
        evaluating: the traceback is of an evaluation or of generation: there is no backward.
        colocated: the log speaks of an inference server, which may share the device with the trainer.
        own_optimizer: the optimizer that steps is none of torch's.
        places_known: what steps leave behind is in ``survivors``, and nowhere else.
        device: type of the device, as `torch.device` has it; ``hip`` is AMD's.
        what: that asked, where it was not PyTorch's allocator.
        notes: what the reader has to know about the source.
    """

    source: str
    failed: bool
    requested_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    unused_bytes: int | None = None
    private_bytes: int = 0
    largest_piece_bytes: int | None = None
    other_processes_bytes: int = 0
    outside_bytes: int = 0
    unaccounted_bytes: int = 0
    shared_bytes: int = 0
    expandable: bool | None = None
    failure: Failure = Failure.REQUEST
    phase: StepPhase = StepPhase.UNKNOWN
    site: str = ""
    logits: bool = False
    fused_attention: bool = False
    trainer: str = ""
    evaluating: bool = False
    colocated: bool = False
    own_optimizer: bool = False
    parts: tuple[MemoryPart, ...] = ()
    steps: tuple[StepBytes, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    places_known: bool = False
    device: str = "cuda"
    what: str = ""
    notes: tuple[str, ...] = ()

    @property
    def short_bytes(self) -> int | None:
        """Bytes that were missing, if all that is free could be used.

        Of a device that is full but for a remainder, all that was asked for: a driver does not hand out its last pages.
        """
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        if self.requested_bytes <= self.free_bytes < NEARLY_FULL * (self.total_bytes or 0):
            return self.requested_bytes
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def holders(self) -> tuple[tuple[str, int], ...]:
        """Who holds the device's bytes: name and bytes, in this order. Together they are its capacity."""
        named = {
            "tensors": self.allocated_bytes or 0,
            "reserved, unallocated": self.unused_bytes or 0,
            "private pools": self.private_bytes,
            "this process, outside PyTorch": self.outside_bytes,
            "other processes": self.other_processes_bytes,
            "another process, or this one outside PyTorch": self.unaccounted_bytes,
            "free": self.free_bytes or 0,
            "shared or virtual memory": -self.shared_bytes,
        }
        return tuple((name, nbytes) for name, nbytes in named.items() if nbytes)


FIRST_STEPS: Final = 2
"""First steps, which allocate permanent state: the optimizer's, caches, compiled code."""
FEWEST_STEPS: Final = 4
"""Steps after the first ones that a report of growth needs."""
SHARE_OF_STEPS: Final = 0.6
"""Steps in which a line has to leak, one in the first third: prefetched batches live in the last few only."""
_LEVELS: Final = 5
_SHARE_GROWING: Final = 0.8
_LEAST_GROWTH: Final = 0.01
"""Least growth, as a share of the bytes between steps, over all steps after the first."""


def never_falls(levels: Sequence[int]) -> bool:
    """Whether levels never fall and grow in each third of the steps, as of an occasional leak."""
    if any(after < before for before, after in pairwise(levels)):
        return False
    last = len(levels) - 1
    thirds = [levels[round(part * last / 3)] for part in range(4)]
    return all(6 * (after - before) > thirds[-1] - thirds[0] for before, after in pairwise(thirds))


def grown_bytes(facts: MemoryFacts) -> int:
    """Return the growth of the bytes between steps after the first ones; 0: no steady growth."""
    left = sum(one.nbytes for one in facts.survivors)
    if left or facts.places_known:
        return left
    levels = [step.between_bytes for step in facts.steps[FIRST_STEPS:]]
    if len(levels) < _LEVELS:
        return 0
    rises = [after - before for before, after in pairwise(levels)]
    growing = sum(rise > 0 for rise in rises) / len(rises)
    total = levels[-1] - levels[0]
    steady = growing == 1
    if len(rises) >= 8:
        each = len(levels) // 3  # whatever garbage collections free, the lowest level rises from third to third
        first, middle, last = min(levels[:each]), min(levels[each:-each]), min(levels[-each:])
        steady = never_falls(levels) or (growing >= _SHARE_GROWING and first < middle < last)
    return total if steady and total >= _LEAST_GROWTH * levels[0] else 0
