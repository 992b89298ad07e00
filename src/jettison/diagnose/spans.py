"""Stretches of time as pairs of whole numbers: joined, cut, subtracted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def joined(spans: Iterable[Span], *, gap: int = 0) -> list[Span]:
    """Merge overlapping spans, and neighbours with at most ``gap`` between them; in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> int:
    """Length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def within(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Cut spans to a window."""
    return [(max(a, start), min(b, end)) for a, b in spans if min(b, end) > max(a, start)]


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Subtract ``others`` from ``spans``; both joined."""
    found: list[Span] = []
    at = 0
    for start, end in spans:
        while at and others[at - 1][1] > start:
            at -= 1
        begin = start
        while at < len(others) and others[at][0] < end:
            if others[at][1] > begin:
                if others[at][0] > begin:
                    found.append((begin, others[at][0]))
                begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> int:
    """Length of the intersection; both joined."""
    return total(spans) - total(without(spans, others))
