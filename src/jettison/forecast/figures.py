"""What is known of one candidate of a search, small enough to be sent and written by the thousand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


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
    """

    peak_bytes: int
    static_bytes: int
    host_bytes: int = 0
    seconds: Seconds | None = None
    policies: tuple[str, ...] = ()

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
        peak_bytes=int(document["peak_bytes"]), static_bytes=int(document["static_bytes"]),
        host_bytes=int(document["host_bytes"]), policies=tuple(map(str, document["policies"])),
        seconds=None if seconds is None else Seconds(**{f.name: float(seconds[f.name]) for f in fields(Seconds)}),
    )  # fmt: skip
