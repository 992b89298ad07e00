"""Bytes that are alive over a step, in so few points that a document can carry them.

Clocks of a dry run and of a real step have nothing in common. What both have is the order in which
they allocate, so a phase is cut into stretches of equally many levels, and of each the lowest and the highest are kept:
no peak gets lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

POINTS = 240
"""Of a whole step, at most; a phase has one at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseLevels:
    """One phase: how many levels there were, and the extremes of each of its stretches, in order."""

    phase: str
    levels: int
    low_bytes: tuple[int, ...]
    high_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.low_bytes) != len(self.high_bytes) or not self.high_bytes:
            raise ValueError(f"phase {self.phase!r} has {len(self.low_bytes)} lows and {len(self.high_bytes)} highs")

    @property
    def peak_bytes(self) -> int:
        """The highest level of the phase."""
        return max(self.high_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLevels:
    """A step, phase after phase."""

    phases: tuple[PhaseLevels, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest level of the step."""
        return max(phase.peak_bytes for phase in self.phases)

    def peak_of(self, phase: str) -> int | None:
        """The highest level of the phases of that name; None where there are none."""
        return max((found.peak_bytes for found in self.phases if found.phase == phase), default=None)

    @classmethod
    def of(cls, stretches: Iterable[tuple[str, Sequence[int]]], *, beside_bytes: int = 0) -> StepLevels | None:
        """From all levels of each phase; None where there are none.

        Args:
            beside_bytes: on top of each.
        """
        known = [(name, levels) for name, levels in stretches if levels]
        total = sum(len(levels) for _, levels in known)
        phases = tuple(
            _phase(name, levels, max(1, POINTS * len(levels) // total), beside_bytes) for name, levels in known
        )
        return cls(phases=phases) if phases else None


def _phase(name: str, levels: Sequence[int], points: int, beside_bytes: int) -> PhaseLevels:
    points = min(points, len(levels))
    cuts = [len(levels) * i // points for i in range(points + 1)]
    parts = [levels[a:b] for a, b in pairwise(cuts)]
    return PhaseLevels(
        phase=name,
        levels=len(levels),
        low_bytes=tuple(min(part) + beside_bytes for part in parts),
        high_bytes=tuple(max(part) + beside_bytes for part in parts),
    )
