"""What is known of a run's memory, whoever recorded it: a snapshot, a log, or `jettison.watch`.

None means that the source does not say. Nothing here is guessed from another figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Of a training step; the words that stacks give (see traces/frames.py)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    UNKNOWN = "unknown"


def phase_named(word: str) -> Phase:
    """The phase of a stack's role; unknown where it is the ledger's word for a tensor."""
    return Phase(word) if word in set(Phase) else Phase.UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one place of the program holds at the moment in question."""

    module: str
    role: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """One step.

    Args:
        between_bytes: allocated when it began: what outlives steps.
        peak_bytes: the most that was allocated during it.
        batch: shapes that it was given, in words; ``batch_elements`` is how many numbers that is.
    """

    step: int
    between_bytes: int
    peak_bytes: int | None = None
    batch: str = ""
    batch_elements: int | None = None


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A place that leaves something behind in most steps: ``nbytes`` altogether, from ``steps`` different ones."""

    module: str
    role: str
    nbytes: int
    steps: int

    @property
    def bytes_per_step(self) -> int:
        """On average."""
        return self.nbytes // self.steps


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """All of it.

    Args:
        source: what it was read from, as a message calls it.
        failed: a request failed. Without it, everything is about the highest moment.
        asked_bytes: by that request.
        free_bytes: of the device then, or below the limit that was set for the process.
        total_bytes: of the device, or that limit.
        allocated_bytes: by tensors then.
        unused_bytes: that PyTorch holds then, in pieces of segments that are otherwise in use.
        largest_piece_bytes: of these.
        other_processes_bytes: that other processes hold.
        outside_bytes: that this process holds beside PyTorch's allocator.
        expandable: expandable segments are switched on.
        site: the line of the program that asked.
        notes: what the reader has to know about the source.
    """

    source: str
    failed: bool
    asked_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    unused_bytes: int | None = None
    largest_piece_bytes: int | None = None
    other_processes_bytes: int = 0
    outside_bytes: int = 0
    expandable: bool | None = None
    phase: Phase = Phase.UNKNOWN
    site: str = ""
    parts: tuple[Part, ...] = ()
    steps: tuple[StepBytes, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    device: str = "cuda"
    notes: tuple[str, ...] = ()

    @property
    def short_bytes(self) -> int | None:
        """How much more there would have had to be, if all that is free could be used."""
        if self.asked_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.asked_bytes - self.free_bytes)
