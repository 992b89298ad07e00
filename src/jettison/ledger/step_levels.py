"""Allocated bytes over a step, in few enough points for a JSON document.

A dry run and a real step have different clocks but allocate in the same order. So a phase is cut into intervals of
equally many levels, and the lowest and the highest level of each interval are kept: no peak gets lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

POINTS = 240
"""Most points of a whole step; each phase has at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseLevels:
    """One phase: its number of levels, and the extremes of each of its intervals, in order."""

    phase: str
    levels: int
    low_bytes: tuple[int, ...]
    high_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.low_bytes) != len(self.high_bytes) or not self.high_bytes:
            raise ValueError(f"phase {self.phase!r} has {len(self.low_bytes)} lows and {len(self.high_bytes)} highs")

    @property
    def peak_bytes(self) -> int:
        """Highest level of the phase."""
        return max(self.high_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLevels:
    """The levels of a step, phase after phase."""

    phases: tuple[PhaseLevels, ...]

    @property
    def peak_bytes(self) -> int:
        """Highest level of the step."""
        return max(phase.peak_bytes for phase in self.phases)

    def peak_of(self, phase: str) -> int | None:
        """Highest level of the phases of that name; None without one."""
        return max((found.peak_bytes for found in self.phases if found.phase == phase), default=None)

    @classmethod
    def of(cls, phase_levels: Iterable[tuple[str, Sequence[int]]], *, extra_bytes: int = 0) -> StepLevels | None:
        """Build from all levels of each phase; None without any.

        Args:
            extra_bytes: added to every level.
        """
        known = [(name, levels) for name, levels in phase_levels if levels]
        total = sum(len(levels) for _, levels in known)
        phases = tuple(
            _phase(name, levels, max(1, POINTS * len(levels) // total), extra_bytes) for name, levels in known
        )
        return cls(phases=phases) if phases else None


def _phase(name: str, levels: Sequence[int], points: int, extra_bytes: int) -> PhaseLevels:
    points = min(points, len(levels))
    cuts = [len(levels) * i // points for i in range(points + 1)]
    parts = [levels[a:b] for a, b in pairwise(cuts)]
    return PhaseLevels(
        phase=name,
        levels=len(levels),
        low_bytes=tuple(min(part) + extra_bytes for part in parts),
        high_bytes=tuple(max(part) + extra_bytes for part in parts),
    )
