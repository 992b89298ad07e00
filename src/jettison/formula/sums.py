"""Whole numbers as sums of products over named sizes: ``2·b·s·h + 5·a·b·s·s``, with divisions rounded up or down.

A `Sum` has one form: like terms are added, factors are sorted. Two that are equal as polynomials are equal objects, so
that a published equation can be compared with a sum of tensors for all sizes at once, and not point by point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Final


@dataclass(frozen=True, eq=False)
class Quotient:
    """A division of whole numbers that does not come out even by itself."""

    above: Sum
    below: Sum
    up: bool  # rounded up; otherwise down

    @cached_property
    def text(self) -> str:
        """What identifies it."""
        return f"{'ceil' if self.up else 'floor'}(({self.above}) / ({self.below}))"

    def __str__(self) -> str:
        """As documents print it."""
        return self.text

    def __eq__(self, other: object) -> bool:
        """The same division."""
        return self is other or (isinstance(other, Quotient) and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def value(self, sizes: Mapping[str, int]) -> int:
        """At these sizes."""
        above, below = self.above.value(sizes), self.below.value(sizes)
        return -(-above // below) if self.up else above // below


REMEMBERED: Final = 1 << 14
"""Results of each kind of arithmetic that are kept: a page of six models asks for some eight thousand."""
Factor = str | Quotient
Product = tuple[Factor, ...]
"""Factors in the order of their names; a power is a repetition."""


@dataclass(frozen=True, eq=False)
class Sum:
    """Whole-number multiples of products, in one order. Make them with `constant`, `symbol` and arithmetic."""

    terms: tuple[tuple[Product, int], ...]

    @cached_property
    def text(self) -> str:
        """What identifies it."""
        if not self.terms:
            return "0"
        return " + ".join("*".join([str(n), *map(str, factors)]) for factors, n in self.terms)

    def __str__(self) -> str:
        """As documents print it."""
        return self.text

    def __eq__(self, other: object) -> bool:
        """Equal as polynomials."""
        return isinstance(other, Sum) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def number(self) -> int | None:
        """Its value where it has no symbols."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def __add__(self, other: Sum) -> Sum:
        """Both."""
        if not self.terms or not other.terms:
            return self if self.terms else other
        return _added(self, other)

    def __neg__(self) -> Sum:
        return _negated(self)

    def __sub__(self, other: Sum) -> Sum:
        """The difference."""
        return self + -other

    def __mul__(self, other: Sum) -> Sum:
        """The product, multiplied out."""
        return _multiplied(self, other)

    def divided(self, by: Sum, *, up: bool) -> Sum:
        """A division rounded up or down; multiplied out where it is even whatever the sizes."""
        return _divided(self, by, up)

    def value(self, sizes: Mapping[str, int]) -> int:
        """At these sizes."""
        return sum(n * prod(_value(f, sizes) for f in factors) for factors, n in self.terms)

    @cached_property
    def least(self) -> int | None:
        """No value is below this, whatever sizes of 1 or more; None: not known."""
        total = 0
        for factors, n in self.terms:
            if n < 0 and factors:
                return None
            lows = [_least(f) for f in factors]
            total += n * prod(lows)
        return total


# arithmetic: walks over a layer do the same few thousand operations again and again


@lru_cache(maxsize=REMEMBERED)
def _added(one: Sum, other: Sum) -> Sum:
    return _collected([*one.terms, *other.terms])


@lru_cache(maxsize=REMEMBERED)
def _negated(one: Sum) -> Sum:
    return Sum(tuple((factors, -n) for factors, n in one.terms))


@lru_cache(maxsize=REMEMBERED)
def _multiplied(one: Sum, other: Sum) -> Sum:
    if len(one.terms) == len(other.terms) == 1:
        ((p, m),), ((q, n),) = one.terms, other.terms
        return Sum(((_sorted((*p, *q)) if p and q else p or q, m * n),))
    return _collected([(_sorted((*p, *q)), m * n) for p, m in one.terms for q, n in other.terms])


@lru_cache(maxsize=REMEMBERED)
def _divided(above: Sum, below: Sum, up: bool) -> Sum:
    if (even := _even(above, below)) is not None:
        return even
    if all(n < 0 for _, n in above.terms):  # -(-x // y), which is how rounding up is written, is ceil(x / y)
        return -(-above).divided(below, up=not up)
    return Sum((((Quotient(above, below, up),), 1),))


def _even(above: Sum, below: Sum) -> Sum | None:
    if len(below.terms) != 1:
        return None
    ((divisors, divisor),) = below.terms
    wanted, found = Counter(divisors), []
    for factors, n in above.terms:
        have = Counter(factors)
        if n % divisor or wanted - have:
            return None
        found.append((_sorted((have - wanted).elements()), n // divisor))
    return _collected(found)


@lru_cache(maxsize=REMEMBERED)
def constant(number: int) -> Sum:
    """A plain number."""
    return Sum((((), int(number)),)) if number else ZERO


@lru_cache(maxsize=REMEMBERED)
def symbol(name: str) -> Sum:
    """A named size of 1 or more."""
    return Sum((((name,), 1),))


def _collected(terms: Iterable[tuple[Product, int]]) -> Sum:
    found: dict[Product, int] = {}
    for factors, n in terms:
        found[factors] = found.get(factors, 0) + n
    kept = [(factors, n) for factors, n in found.items() if n]
    return Sum(tuple(sorted(kept, key=lambda term: (-len(term[0]), [str(f) for f in term[0]]))))


def _sorted(factors: Iterable[Factor]) -> Product:
    return tuple(sorted(factors, key=str))


def _value(factor: Factor, sizes: Mapping[str, int]) -> int:
    return sizes[factor] if isinstance(factor, str) else factor.value(sizes)


def _least(factor: Factor) -> int:
    """Rounded up, what is at least 1 stays so, since nothing is divided by less than 1."""
    if isinstance(factor, str):
        return 1
    return 1 if factor.up and (factor.above.least or 0) >= 1 else 0


ZERO: Final = Sum(())
