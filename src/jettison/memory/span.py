"""Spans: net bytes and peak bytes of any piece of a training step, and how they compose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import add
from typing import NamedTuple


class Phase(StrEnum):
    """Parts of a training step."""

    BEFORE = "before forward"
    FORWARD = "forward"
    LOSS = "loss"
    FROZEN = "frozen model"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    AFTER = "after the step"


class Where(NamedTuple):
    """A phase and the region that runs in it; "" for no region."""

    phase: Phase
    name: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a step: it ends ``net`` bytes above its start, and rises at most ``peak`` bytes above its start.

    Spans compose, in any grouping: an allocation is (n, n), a transient buffer (0, n). ``where``: of the peak.
    """

    net: int
    peak: int
    where: Where | None = None

    def __add__(self, then: Span) -> Span:
        """Return the span of this piece followed by the other."""
        above = self.net + then.peak
        if self.peak >= above:
            return Span(self.net + then.net, self.peak, self.where)
        return Span(self.net + then.net, above, then.where)

    def times(self, count: int) -> Span:
        """Return the span of ``count`` such pieces in a row."""
        return Span(count * self.net, self.peak + max(0, (count - 1) * self.net), self.where)


def levels(spans: Sequence[Span], sequence: Iterable[int], level: int) -> Iterator[int]:
    """Yield the bytes before each piece of a product, and after the last one.

    Args:
        sequence: for each piece, its index in ``spans``.
        level: bytes before the first piece.
    """
    nets = [span.net for span in spans]
    return accumulate(map(nets.__getitem__, sequence), initial=level)


def peaks(spans: Sequence[Span], sequence: Sequence[int], level: int) -> Iterator[int]:
    """Yield the highest bytes during each piece; their maximum is the product's peak. See `levels`."""
    above = [span.peak for span in spans]
    return map(add, levels(spans, sequence, level), map(above.__getitem__, sequence))
