"""What is known of one candidate of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from jettison.search.space import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Of a step, and what they go into.

    Args:
        least: of a step of the same setup under any plan, where this is the one that computes nothing again.
    """

    step: float
    least: float
    compute: float
    communication: float
    bubble: float
    recompute: float
    other: float
    mfu: float
    tokens_per_second_per_gpu: float

    @property
    def parts(self) -> dict[str, float]:
        """By what they go into; they add up to the step."""
        names = ("compute", "communication", "bubble", "recompute", "other")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Bytes of the worst rank, and the seconds of a step where they were asked for.

    Args:
        peak_bytes: where a planner finds nothing that fits, the fewest bytes that it could have done with.
        static_bytes: of any plan of the same setup, at least.
        host_bytes: of what is offloaded.
        policies: by stage, what a planner does with its layers.
        whole: of each window of micro-batches, those that are kept whole.
    """

    peak_bytes: int
    static_bytes: int
    host_bytes: int = 0
    seconds: Seconds | None = None
    policies: tuple[str, ...] = ()
    whole: int = 0

    def document(self) -> dict[str, Any]:
        """For a state file; `figures_of` reads it."""
        return asdict(self)


def figures_of(document: Mapping[str, Any]) -> Figures:
    """What `Figures.document` wrote.

    Raises:
        KeyError, TypeError, ValueError: it did not.
    """
    seconds = document["seconds"]
    return Figures(
        peak_bytes=int(document["peak_bytes"]),
        static_bytes=int(document["static_bytes"]),
        host_bytes=int(document["host_bytes"]),
        policies=tuple(map(str, document["policies"])),
        whole=int(document.get("whole", 0)),
        seconds=None if seconds is None else Seconds(**{f.name: float(seconds[f.name]) for f in fields(Seconds)}),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A candidate that was worked out.

    Args:
        number: of its setup in the space, and of its plan.
        limit_bytes: for its tensors, on a device.
        host_limit_bytes: for what it offloads; None: not stated.
    """

    candidate: Candidate
    figures: Figures
    number: tuple[int, int]
    limit_bytes: int
    host_limit_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Its peak."""
        return self.figures.peak_bytes

    @property
    def lacks(self) -> int:
        """Bytes, of the device or of the host; 0 or less where it fits."""
        of_host = 0 if self.host_limit_bytes is None else self.figures.host_bytes - self.host_limit_bytes
        return max(self.figures.peak_bytes - self.limit_bytes, of_host)

    @property
    def fits(self) -> bool:
        """Is there room for it, and was it timed?"""
        return self.lacks <= 0 and self.figures.seconds is not None

    @property
    def seconds(self) -> Seconds:
        """Of one that fits."""
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def rank(self) -> tuple[float, int, tuple[int, int]]:
        """The smaller, the better."""
        return self.seconds.step, self.figures.peak_bytes, self.number
