"""What a search goes by: what there is for tensors, what is open, and what a candidate has to be better than."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Final

from jettison.predict.allowance import available_to
from jettison.search.bounds import SHAVED
from jettison.search.space import Setup, Space
from jettison.spec.hardware import Hardware

_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Room:
    """What there is for tensors.

    Args:
        scale: times what the hardware has, and times the budget.
        margin: what is left beside the expected allowance, as `allowance.available_to` has it.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    scale: Fraction = Fraction(1)
    margin: float = 0.0

    def limit_bytes(self, setup: Setup, space: Space) -> int:
        """For a setup: contexts and communicators come off, and the margin."""
        left = available_to(self._device, setup.layout, space.template.kernels.device, self.margin)
        return left if self.budget_bytes is None else min(left, int(self.scale * self.budget_bytes))

    @cached_property
    def _device(self) -> Hardware:
        memory, usable = (int(self.scale * n) for n in (self.hardware.memory_bytes, self.hardware.usable_bytes))
        return replace(self.hardware, memory_bytes=memory, usable_bytes=usable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Plans of one setup that take at least so many seconds and bytes.

    Args:
        setup: its number in the space.
        plain: `none` is to be worked out, for itself and as a bound of the others; otherwise, these others.
        ranks: could it improve on what is known of its setup?
    """

    setup: int
    plain: bool
    seconds: float
    nbytes: int
    ranks: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a candidate has to be better than.

    Args:
        fastest: seconds of the best; infinite until there is one.
        last: of the last whose place is to be exact.
        reach: of the front; None: there is no need of one.
        times, peaks: of the front, the fastest first.
    """

    fastest: float
    last: float
    reach: float | None
    times: list[float]
    peaks: list[int]

    def matters(self, seconds: float, nbytes: int, *, ranks: bool, named: bool) -> bool:
        """Could a candidate with these bounds be listed, or be on the front?

        Args:
            ranks: it could be the best of its setup.
            named: it is no planner's, whose choice is asked for afterwards.
        """
        shaved = seconds * (1 - SHAVED)
        if ranks and shaved <= self.last:
            return True
        if self.reach is None or not named or shaved > self.reach * self.fastest:
            return False
        return nbytes <= self.below(seconds)

    def below(self, seconds: float) -> int:
        """What a candidate that takes so many seconds may need, at most, to be on the front."""
        at = bisect_right(self.times, seconds * (1 - SHAVED))
        return self.peaks[at - 1] - 1 if at else _UNBOUNDED
