"""Ranges of published runs by class, from the rows of docs/accuracy.csv: the statistics of `benchmarks.accuracy`.

See NOTE [ Ranges of published runs ] in `jettison.predict.ranges`.

NOTE [ Sources, not rows ]
Rows of one source err together: one table has one cluster, one release and one person who measured. So each source
weighs one, however many rows it has, and a range is held against rows of sources that took no part in it. A source is a
publisher. Anchors alone tell a vendor's models apart, who publishes the same configurations again with each release.

NOTE [ Pooling ]
A class counts as `ENOUGH` sources, seven for times and five for bytes: of 5 to 10 these have the narrowest ranges. What
it lacks it borrows from the class above: the sources there that it does not have share the weight that is missing, in
equal parts. So of bytes a class of one source has a fifth of a say in its range, and one of five or more has all of it.

NOTE [ Expected times ]
The model counts as `ENOUGH` sources that say 1: of a class of n sources the expected time is n / (n + 7) of the way
from what is modelled to the median. By ranges of other sources that is nearer than either end for rows that took no
part. Bytes are counted, and stay what they are; fragments are the median, or 0 where that is negative, as an allocator
reserves what is allocated: there bytes of those runs are modelled too high.

NOTE [ First answers ]
Most of today's residuals are of rows that were looked into, and whose causes were mended. A new row was not. So in the
ends of times and of allocated bytes a row of a blind round counts twice, as it was first answered and as it is today;
what is expected is of today alone. Allocated bytes depend on a framework's code, not on a cluster: of a stack with at
least `ROWS` rows, `CLAIMED` of them within `AGREES`, that code was read, and today's residuals alone count.

NOTE [ Ends ]
Ends are those of `ENDS` whose ranges are the narrowest, in the mean over rows, of all that hold four in five, each
figure for itself: of today's rows whose source took no part, by rows and by sources; and of first answers whose whole
round took no part, each publisher in a round counting once. Exchangeable rows would need a tenth outside of each end;
sources and rounds are few and no sample of anything. So ends of times and fragments are those tenths, moved away from
the expected value by a factor, at the low end as far as the class has been seen. Ends of fragments have a factor each:
with one for both the high end, which decides what fits, is a fifth longer than that takes. Allocated bytes agree or
are far off, so that theirs are quantiles further out. Each is the tighter of the two that holds as many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, permutations, product
from statistics import fmean
from typing import Final

from jettison.predict.ranges import AGREES, ANCHOR_WEIGHT, ANCHORED, UNEVEN, Measure, classes_of
from jettison.spec.device_allowance import Range

ROWS: Final = 5
CLAIMED: Final = 0.8
FIGURES: Final = {
    "time": Measure.TIME,
    "allocated": Measure.ALLOCATED,
    "reserved": Measure.FRAGMENTS,
    "device": Measure.FRAGMENTS,
}
"""What was published, and what range it is held against."""
ENOUGH: Final = {Measure.TIME: 7, Measure.ALLOCATED: 5, Measure.FRAGMENTS: 5}
"""Sources of a class that borrows nothing."""
Ends = tuple[float, float, float]
"""Share of the weight outside of each end, and factors on the distances of both ends from the expected value."""
MOVED: Final = tuple((0.1, 1 + low / 10, 1 + high / 10) for low, high in product(range(0, 31, 2), repeat=2))
ENDS: Final[dict[Measure, Sequence[Ends]]] = {
    Measure.TIME: tuple(ends for ends in MOVED if ends[1] == ends[2]),
    Measure.ALLOCATED: (*((0.1 * 0.8**n, 1.0, 1.0) for n in range(15)), (0.0, 1.0, 1.0)),
    Measure.FRAGMENTS: MOVED,
}
"""See NOTE [ Ends ]."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure over what is predicted: a ratio, of fragments what `Measure` says.

    Args:
        value: its residual. ``cached``: of fragments, cached segments in the same unit.
        first: that of the first answer, where one was recorded; ``round``: those that it was compared with.
    """

    figure: str
    source: str
    stack: str
    kind: str
    hardware: str
    run: str
    value: float
    cached: float = 0.0
    first: float | None = None
    round: str = ""

    @cached_property
    def publisher(self) -> str:
        """The source, without a vendor's model."""
        return self.source.partition(",")[0]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Its own first; bytes are not told apart by hardware."""
        return classes_of(FIGURES[self.figure], self.stack, self.kind, self.hardware)

    @cached_property
    def member_of(self) -> tuple[str, ...]:
        """Classes in which it counts. Those of one length borrow nothing from rows of changing length."""
        return self.classes[:1] if self.classes[0] == UNEVEN else self.classes


# ranges ---------------------------------------------------------------------------------------------------------------


@cache
def anchored(measure: Measure, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Every row as it is off where another of its source and class was measured: `jettison.diagnose.fit_anchor`.

    A time is divided by the other's; fragments are a weighted mean of the other's and the class's; of allocated
    bytes an anchor that the ledger agrees with says that the stack was read, and mends nothing.
    """

    @cache
    def expected(source: str, classes: tuple[str, ...]) -> float:
        return _spread(measure, [row for row in rows if row.source != source], classes)[0]

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
                of_class = other.cached + expected(other.source, other.classes)
                mean = ANCHOR_WEIGHT * (one.cached + one.value) + (1 - ANCHOR_WEIGHT) * of_class
                value = other.cached + other.value - mean
            found.append(_near(other, value))
    return tuple(found)


def _near(row: Row, value: float) -> Row:
    return replace(row, stack="", kind=ANCHORED, hardware="", value=value, first=None)


def pool(
    measure: Measure, rows: Sequence[Row], classes: Sequence[str], *, first: bool = False
) -> dict[str, tuple[float, list[float]]]:
    """Sources with their weights and values: see NOTE [ Pooling ].

    Args:
        first: with first answers.
    """
    enough = ENOUGH[measure]
    found: dict[str, tuple[float, list[float]]] = {}
    for kind in classes:
        lacking = enough - sum(weight for weight, _ in found.values())
        more: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            if kind in row.member_of and row.publisher not in found:
                more[row.publisher] += [row.value] if row.first is None or not first else [row.value, row.first]
        if more:
            weight = min(1.0, lacking / len(more)) if found else 1.0
            found |= {source: (weight, values) for source, values in more.items()}
        if sum(weight for weight, _ in found.values()) >= enough - 1e-9:
            break
    return found


Ordered = tuple[list[float], list[float]]
"""Values in order, and the weight at or below each."""


def ordered(sources: Iterable[tuple[float, list[float]]]) -> Ordered:
    """Values of sources with their weights."""
    pairs = sorted((value, weight / len(values)) for weight, values in sources for value in values)
    return [value for value, _ in pairs], list(accumulate(weight for _, weight in pairs))


def quantile(found: Ordered, share: float) -> float:
    """The least value with so much of the weight at it or below."""
    values, below = found
    return values[min(len(values) - 1, bisect_left(below, share * below[-1] - 1e-9))]


def code_read(rows: Sequence[Row], classes: Sequence[str]) -> bool:
    """Whether today's allocated bytes of a stack agree with what was measured: see NOTE [ First answers ]."""
    own = [abs(row.value - 1) <= AGREES for row in rows if classes[0] in row.member_of]
    of_a_stack = len(classes) > len(("kind", "all"))
    return of_a_stack and len(own) >= ROWS and fmean(own) >= CLAIMED


def stated(measure: Measure, rows: Sequence[Row], classes: Sequence[str], ends: Ends) -> Range:
    """What a class states: its low end, what is expected, and its high end."""
    return _between(*_spread(measure, rows, classes), ends)


def _spread(measure: Measure, rows: Sequence[Row], classes: Sequence[str]) -> tuple[float, Ordered]:
    """Expected value of a class, and the residuals that its ends are made of."""
    found = pool(measure, rows, classes)
    today = ordered(found.values())
    middle, sources = quantile(today, 0.5), sum(weight for weight, _ in found.values())
    expected = {
        Measure.ALLOCATED: 1.0,
        Measure.FRAGMENTS: max(0.0, middle),
        Measure.TIME: 1 + sources / (sources + ENOUGH[measure]) * (middle - 1),
    }[measure]
    if measure is Measure.FRAGMENTS or (measure is Measure.ALLOCATED and code_read(rows, classes)):
        return expected, today
    return expected, ordered(pool(measure, rows, classes, first=True).values())


def _between(expected: float, found: Ordered, ends: Ends) -> Range:
    tail, below, above = ends
    least, low, high = (quantile(found, share) for share in (0.0, tail, 1 - tail))
    low, high = max(least, expected + below * (low - expected)), expected + above * (high - expected)
    return Range(expected=expected, low=min(low, expected), high=max(high, expected))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A row, the range of all other sources, and whether that holds it."""

    row: Row
    range: Range

    @property
    def inside(self) -> bool:
        """Does it?"""
        return self.range.low - 1e-9 <= self.row.value <= self.range.high + 1e-9


def cross_validated(measure: Measure, rows: Sequence[Row], ends: Ends) -> list[Held]:
    """Every row against the range that all other sources give its class."""
    return _left_out(measure, rows, rows, lambda row: row.publisher)(ends)


def first_answers(measure: Measure, rows: Sequence[Row], ends: Ends, asked: Sequence[Row]) -> list[Held]:
    """First answers of the rows ``asked`` against the ranges that rows of all other rounds give their classes."""
    return _left_out(measure, rows, _first(asked), lambda row: row.round)(ends)


def _first(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, value=row.first) for row in rows if row.first is not None]


def _left_out(
    measure: Measure, rows: Sequence[Row], tested: Sequence[Row], group: Callable[[Row], str]
) -> Callable[[Ends], list[Held]]:
    """Rows against ranges, with any ends, of the rows of all other groups."""
    without = {name: [row for row in rows if group(row) != name] for name in {group(row) for row in tested}}
    keys = [(group(row), row.classes) for row in tested]
    spreads = {(name, classes): _spread(measure, without[name], classes) for name, classes in dict.fromkeys(keys)}

    def held(ends: Ends) -> list[Held]:
        ranges = {key: _between(*spread, ends) for key, spread in spreads.items()}
        return [Held(row=row, range=ranges[key]) for row, key in zip(tested, keys, strict=True)]

    return held


def of_round(row: Row) -> str:
    """The publisher in its round."""
    return f"{row.round}: {row.publisher}"


def share_by(held: Sequence[Held], group: Callable[[Row], str]) -> float:
    """Share of rows that ranges hold; each group counts once."""
    groups: defaultdict[str, list[bool]] = defaultdict(list)
    for one in held:
        groups[group(one.row)].append(one.inside)
    return fmean(fmean(inside) for inside in groups.values())


def shares(held: Sequence[Held]) -> tuple[float, float]:
    """Of rows, and of sources, each of which counts once, that ranges hold."""
    return fmean(one.inside for one in held), share_by(held, lambda row: row.publisher)


def of_measure(rows: Sequence[Row], measure: Measure) -> tuple[Row, ...]:
    """Rows that are held against one."""
    return tuple(row for row in rows if FIGURES.get(row.figure) is measure)


@cache
def ends_of(measure: Measure, rows: tuple[Row, ...]) -> tuple[Ends, list[Held]]:
    """Ends of ranges, and how these hold: see NOTE [ Ends ]."""
    by_source = _left_out(measure, rows, rows, lambda row: row.publisher)
    by_round = _left_out(measure, rows, _first(rows), lambda row: row.round)
    found = []
    for ends in ENDS[measure]:
        held = by_source(ends)
        today = min(min(shares(own)) for own in _by_figure(held))
        first = (share_by(own, of_round) for own in _by_figure(by_round(ends)))
        width = fmean(one.range.high - one.range.low for one in held)
        found.append((min([today, *first, CLAIMED]), -width, ends, held))
    return max(found, key=lambda each: each[:2])[2:]


def _by_figure(held: Sequence[Held]) -> list[list[Held]]:
    return [[one for one in held if one.row.figure == figure] for figure in {one.row.figure for one in held}]
