"""Ranges of published runs by class, from the rows of docs/accuracy.csv: the statistics of `benchmarks.accuracy`.

See NOTE [ Ranges of published runs ] in `jettison.predict.ranges`.

NOTE [ Sources, not rows ]
Rows of one source err together: one table has one cluster, one release and one person who measured. So each source
weighs one, however many rows it has, and a range is held against rows of sources that took no part in it. A source is a
publisher; of a vendor who publishes the same configurations again with each release, a model, since one configuration
errs alike in all of them.

NOTE [ Pooling ]
A class counts as `ENOUGH` sources. What it lacks it borrows from the class above: the sources there that it does not
have share the weight that is missing, in equal parts. So a class of one source has a fifth of a say in its range, and
one of five or more has all of it.

NOTE [ Expected times ]
The model counts as `ENOUGH` sources that say 1: of a class of n sources the expected time is n / (n + 5) of the way
from what is modelled to the median. By ranges of other sources that is nearer than either end for rows that took no
part. Bytes are counted, and stay what they are.

NOTE [ Tails ]
The ends are weighted quantiles, with as much outside of each as `TAILS` allows: the first of these with which ranges
hold four in five of rows that took no part, both counted by rows and by sources, each figure for itself. The quantile
theorem for exchangeable rows would take a tenth; sources are few and no sample of anything, so it is less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, permutations
from statistics import mean
from typing import Final

from jettison.predict.ranges import AGREES, ALL, ANCHOR_WEIGHT, ANCHORED, UNEVEN, Measure, Range, classes_of

ENOUGH: Final = 5
"""Sources."""
TAILS: Final = (0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0)
CLAIMED: Final = 0.8
FIGURES: Final = {
    "time": Measure.TIME,
    "allocated": Measure.ALLOCATED,
    "reserved": Measure.FRAGMENTS,
    "device": Measure.FRAGMENTS,
}
"""What was published, and what range it is held against."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure over what is predicted: a ratio, of fragments what `Measure` says."""

    figure: str
    source: str
    stack: str
    kind: str
    hardware: str
    run: str
    value: float

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Its own first; bytes are not told apart by hardware."""
        return classes_of(FIGURES[self.figure], self.stack, self.kind, self.hardware)


# ranges ---------------------------------------------------------------------------------------------------------------


def anchored(measure: Measure, rows: Sequence[Row]) -> list[Row]:
    """Every row as it is off where another of its source and class was measured: `jettison.predict.anchor`.

    A time is divided by the other's; fragments are a weighted mean of the other's and the class's; of allocated
    bytes an anchor that the ledger agrees with says that the stack was read, and mends nothing.
    """

    @cache
    def expected(source: str, classes: tuple[str, ...]) -> float:
        return quantile(pool([row for row in rows if row.source != source], classes).values(), 0.5)

    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.classes[0]].append(row)
    found = []
    for alike in groups.values():
        if measure is Measure.ALLOCATED:  # whichever of those it was, it says the same
            agree = [row for row in alike if abs(row.value - 1) <= AGREES]
            found += [_near(row, row.value) for row in alike if agree and agree != [row]]
            continue
        for one, other in permutations(alike, 2):
            value = other.value / one.value
            if measure is Measure.FRAGMENTS:
                of_class = expected(other.source, other.classes)
                value = other.value - ANCHOR_WEIGHT * one.value - (1 - ANCHOR_WEIGHT) * of_class
            found.append(_near(other, value))
    return found


def _near(row: Row, value: float) -> Row:
    return replace(row, stack="", kind=ANCHORED, hardware="", value=value)


Weighted = Sequence[tuple[float, float]]
"""Values with weights, in order."""


def pool(rows: Sequence[Row], classes: Sequence[str]) -> dict[str, tuple[float, list[float]]]:
    """Sources with their weights and values: see NOTE [ Pooling ]."""
    found: dict[str, tuple[float, list[float]]] = {}
    for kind in classes:
        lacking = ENOUGH - sum(weight for weight, _ in found.values())
        more: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            if kind in row.classes and row.source not in found:
                more[row.source].append(row.value)
        if more:
            weight = min(1.0, lacking / len(more)) if found else 1.0
            found |= {source: (weight, values) for source, values in more.items()}
        if sum(weight for weight, _ in found.values()) >= ENOUGH - 1e-9:
            break
    return found


def quantile(sources: Iterable[tuple[float, list[float]]], share: float) -> float:
    """The least value with so much of the weight at it or below."""
    pairs = sorted((value, weight / len(values)) for weight, values in sources for value in values)
    below = list(accumulate(weight for _, weight in pairs))
    return pairs[min(len(pairs) - 1, bisect_left(below, share * below[-1] - 1e-9))][0]


def stated(measure: Measure, rows: Sequence[Row], classes: Sequence[str], tail: float) -> Range:
    """What a class states: its low end, what is expected, and its high end."""
    found = pool(rows, classes)
    low, high = (quantile(found.values(), share) for share in (tail, 1 - tail))
    middle = quantile(found.values(), 0.5)
    sources = sum(weight for weight, _ in found.values())
    expected = {
        Measure.ALLOCATED: 1.0,
        Measure.FRAGMENTS: middle,
        Measure.TIME: 1 + sources / (sources + ENOUGH) * (middle - 1),
    }[measure]
    return Range(expected=expected, low=min(low, expected), high=max(high, expected))


def stated_uneven(rows: Sequence[Row], even: Sequence[Row], tail: float) -> Range:
    """Range of fragments where lengths differ: see NOTE [ Ranges of published runs ] in `predict.ranges`."""
    found = stated(Measure.FRAGMENTS, [*rows, *even], (UNEVEN, ALL), tail)
    return replace(found, high=quantile(pool(rows, (UNEVEN,)).values(), 1 - TAILS[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A row, the range of all other sources, and whether that holds it."""

    row: Row
    range: Range

    @property
    def inside(self) -> bool:
        """Does it?"""
        return self.range.low - 1e-9 <= self.row.value <= self.range.high + 1e-9


def cross_validated(measure: Measure, rows: Sequence[Row], tail: float) -> list[Held]:
    """Every row against the range that all other sources give its class."""
    without = {source: [row for row in rows if row.source != source] for source in {row.source for row in rows}}

    @cache
    def found(source: str, classes: tuple[str, ...]) -> Range:
        return stated(measure, without[source], classes, tail)

    return [Held(row=row, range=found(row.source, row.classes)) for row in rows]


def shares(held: Sequence[Held]) -> tuple[float, float]:
    """Of rows, and of sources, each of which counts once, that ranges hold."""
    by_source: defaultdict[str, list[bool]] = defaultdict(list)
    for one in held:
        by_source[one.row.source].append(one.inside)
    return mean(one.inside for one in held), mean(mean(inside) for inside in by_source.values())


def of_measure(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """Rows that are held against one: those of uneven lengths have one publisher, and nobody else's range."""
    return [row for row in rows if FIGURES[row.figure] is measure and UNEVEN not in row.classes]


def tail_of(measure: Measure, rows: Sequence[Row]) -> tuple[float, list[Held]]:
    """How much is outside of each end, and how the ranges hold: see NOTE [ Tails ]."""
    for tail in TAILS:
        held = cross_validated(measure, rows, tail)
        groups = [[one for one in held if one.row.figure == figure] for figure in {row.figure for row in rows}]
        if min(min(shares(group)) for group in groups) >= CLAIMED:
            break
    return tail, held
