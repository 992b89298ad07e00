"""Bytes that a piece of a training step allocates, frees, and rises to: the one algebra of memory over time."""

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
    """A phase, and the region at work in it; "" of no region."""

    phase: Phase
    name: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a step: it leaves ``net`` bytes more than it found, and is ``peak`` bytes above them at its highest.

    Pieces compose, in any grouping: an allocation is (n, n), what is freed again (0, n), and ``where`` is the label of
    the first of the highest pieces.
    """

    net: int
    peak: int
    where: Where | None = None

    def __add__(self, then: Span) -> Span:
        """Return this piece and then the other."""
        above = self.net + then.peak
        if self.peak >= above:
            return Span(self.net + then.net, self.peak, self.where)
        return Span(self.net + then.net, above, then.where)

    def times(self, count: int) -> Span:
        """Return so many of it, one after the other."""
        return Span(count * self.net, self.peak + max(0, (count - 1) * self.net), self.where)


def levels(spans: Sequence[Span], sequence: Iterable[int], level: int) -> Iterator[int]:
    """Yield the bytes before each piece of a product, and after the last one.

    Args:
        sequence: of each piece, its number among ``spans``.
        level: bytes before the first piece.
    """
    nets = [span.net for span in spans]
    return accumulate(map(nets.__getitem__, sequence), initial=level)


def peaks(spans: Sequence[Span], sequence: Sequence[int], level: int) -> Iterator[int]:
    """Yield the bytes at the highest of each piece of a product; their maximum is the product's peak. See `levels`."""
    above = [span.peak for span in spans]
    return map(add, levels(spans, sequence, level), map(above.__getitem__, sequence))
