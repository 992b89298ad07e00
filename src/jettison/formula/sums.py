"""Whole-number sums of monomials in named sizes: ``2·b·s·h + 5·a·b·s·s``, with divisions rounded up or down.

A `Sum` has one form: like terms are added, factors are sorted. Two sums that are equal as polynomials are equal
objects, so a published equation can be compared with a sum of tensors for all sizes at once, not point by point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Final, NamedTuple, NoReturn, Self


class Expression:
    """A formula that its canonical text identifies."""

    @cached_property
    def text(self) -> str:
        """Canonical text, for documents as well."""
        return self._written()

    def _written(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True, eq=False)
class Quotient(Expression):
    """A division of whole numbers with a remainder, rounded."""

    above: Sum
    below: Sum
    up: bool  # rounded up; otherwise down

    def _written(self) -> str:
        return f"{'ceil' if self.up else 'floor'}(({self.above}) / ({self.below}))"

    def value(self, sizes: Mapping[str, int]) -> int:
        """Value at these sizes."""
        above, below = self.above.value(sizes), self.below.value(sizes)
        return -(-above // below) if self.up else above // below


@dataclass(frozen=True, eq=False)
class Positive(Expression):
    """A sum where it is above zero, else 0."""

    of: Sum

    def _written(self) -> str:
        return f"max(0, {self.of})"

    def value(self, sizes: Mapping[str, int]) -> int:
        """Value at these sizes."""
        return max(0, self.of.value(sizes))


CACHED_RESULTS: Final = 1 << 14
"""Cached results of each arithmetic function: a page of six models needs about eight thousand."""
Factor = str | Quotient | Positive
Monomial = tuple[Factor, ...]
"""Factors in the order of their names; a power is a repetition."""


@dataclass(frozen=True, eq=False)
class Sum(Expression):
    """Whole-number multiples of monomials, sorted. Make them with `constant`, `symbol` and arithmetic.

    Two sums that are equal as polynomials are equal.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def _written(self) -> str:
        return " + ".join("*".join([str(n), *map(str, factors)]) for factors, n in self.terms) or "0"

    @property
    def number(self) -> int | None:
        """The value of a sum without symbols; None with symbols."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def __add__(self, other: Sum) -> Sum:
        """Return the sum of both."""
        if not self.terms or not other.terms:
            return self if self.terms else other
        return _added(self, other)

    def __neg__(self) -> Sum:
        return _negated(self)

    def __sub__(self, other: Sum) -> Sum:
        """Return the difference."""
        return self + -other

    def __mul__(self, other: Sum) -> Sum:
        """Return the product, multiplied out."""
        return _multiplied(self, other)

    def divided(self, by: Sum, *, up: bool) -> Sum:
        """Return a division rounded up or down; multiplied out if it is even for all sizes."""
        return _divided(self, by, up)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Value at these sizes."""
        return sum(n * prod(_value(f, sizes) for f in factors) for factors, n in self.terms)

    @cached_property
    def least(self) -> int | None:
        """A lower bound for all sizes of 1 or more; None: not known."""
        total = 0
        for factors, n in self.terms:
            if n < 0 and factors:
                return None
            lows = [_least(f) for f in factors]
            total += n * prod(lows)
        return total


# arithmetic, cached: walks over a layer repeat the same few thousand operations


@lru_cache(maxsize=CACHED_RESULTS)
def _added(one: Sum, other: Sum) -> Sum:
    return collected([*one.terms, *other.terms])


@lru_cache(maxsize=CACHED_RESULTS)
def _negated(one: Sum) -> Sum:
    return Sum(tuple((factors, -n) for factors, n in one.terms))


@lru_cache(maxsize=CACHED_RESULTS)
def _multiplied(one: Sum, other: Sum) -> Sum:
    if len(one.terms) == len(other.terms) == 1:
        ((p, m),), ((q, n),) = one.terms, other.terms
        return Sum(((_sorted((*p, *q)) if p and q else p or q, m * n),))
    return collected([(_sorted((*p, *q)), m * n) for p, m in one.terms for q, n in other.terms])


@lru_cache(maxsize=CACHED_RESULTS)
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
    return collected(found)


@lru_cache(maxsize=CACHED_RESULTS)
def constant(number: int) -> Sum:
    """Return a plain number as a sum."""
    return Sum((((), int(number)),)) if number else ZERO


@lru_cache(maxsize=CACHED_RESULTS)
def symbol(name: str) -> Sum:
    """Return a named size of 1 or more as a sum."""
    return Sum((((name,), 1),))


def collected(terms: Iterable[tuple[Monomial, int]]) -> Sum:
    """Return the sum of these terms."""
    found: dict[Monomial, int] = {}
    for factors, n in terms:
        found[factors] = found.get(factors, 0) + n
    kept = [(factors, n) for factors, n in found.items() if n]
    return Sum(tuple(sorted(kept, key=lambda term: (-len(term[0]), [str(f) for f in term[0]]))))


def _sorted(factors: Iterable[Factor]) -> Monomial:
    return tuple(sorted(factors, key=str))


def _value(factor: Factor, sizes: Mapping[str, int]) -> int:
    return sizes[factor] if isinstance(factor, str) else factor.value(sizes)


def _least(factor: Factor) -> int:
    """Lower bound of a factor. Rounded up, a factor of at least 1 stays so: divisors are 1 or more."""
    if isinstance(factor, str):
        return 1
    return int(isinstance(factor, Quotient) and factor.up and (factor.above.least or 0) >= 1)


ZERO: Final = Sum(())


# traced ---------------------------------------------------------------------------------------------------------------
#
# NOTE [ A formula is what the walk did ]
# Traced sizes remember how they were computed, so that a walk over numbers also yields its formulas.
# The walk over a layer (NOTE [ One walk, every figure ]) multiplies, adds and divides whole numbers. Given `Traced`
# ones it does the same, and each number of bytes and FLOPs carries its `Sum`, so no formula is written down
# a second time. Each decision by a size (more than one rank? heads that share keys?) compares the numbers, and is noted
# in `SizeGuards` as a guard: the formulas hold at all sizes at which every guard has the same outcome. Guards with one
# possible outcome (a size of 1 or more is above 0) are left out.
#
# A traced number equals a plain one, and hashes like it: never use one as a cache key.


class SizeGuard(NamedTuple):
    """A decision of a walk: whether ``difference`` is above 0 (or 0, with ``zero``). The outcome was ``held``."""

    difference: Sum
    zero: bool
    held: bool

    def same(self, sizes: Mapping[str, int]) -> bool:
        """Whether it has the same outcome at these sizes."""
        value = self.difference.value(sizes)
        return (value == 0 if self.zero else value > 0) is self.held

    def __str__(self) -> str:
        """Text for documents."""
        words = {(False, True): "> 0", (False, False): "<= 0", (True, True): "== 0", (True, False): "!= 0"}
        return f"{self.difference} {words[self.zero, self.held]}"


@dataclass(slots=True)
class SizeGuards:
    """Decisions of one walk by sizes, in order, each once."""

    guards: dict[SizeGuard, None] = field(default_factory=dict)

    def size(self, name: str, value: int) -> Traced:
        """Return a named size for this walk."""
        return Traced(value, symbol(name), self)

    def decide(self, difference: Sum, held: bool, *, zero: bool) -> bool:
        """Note a decision, unless it is the same for all sizes of 1 or more; return its outcome."""
        least, most = difference.least, (-difference).least
        always = difference.number is not None or (least is not None and least > 0)
        never = most is not None and (most > 0 or (most == 0 and not zero))
        if not always and not never:
            if zero and difference.terms[0][1] < 0:
                difference = -difference
            self.guards[SizeGuard(difference, zero, held)] = None
        return held


class Traced(int):
    """A whole number with its formula. Unsupported arithmetic raises, so that no formula is lost."""

    sum: Sum
    guards: SizeGuards

    def __new__(cls, value: int, made: Sum, guards: SizeGuards) -> Self:
        """Return a number with its formula."""
        self = super().__new__(cls, value)
        self.sum, self.guards = made, guards
        return self

    def _new(self, value: int, made: Sum) -> Traced:
        found = int.__new__(Traced, value)  # some hundred thousand for a page: without the detour through __new__
        found.sum, found.guards = made, self.guards
        return found

    def __add__(self, other: int) -> Traced:
        return self._new(int.__add__(self, other), self.sum + sum_of(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> Traced:
        return self._new(int.__sub__(self, other), self.sum - sum_of(other))

    def __rsub__(self, other: int) -> Traced:
        return self._new(int(other) - int(self), sum_of(other) - self.sum)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self._new(int.__mul__(self, other), self.sum * sum_of(other))

    __rmul__ = __mul__

    def __neg__(self) -> Traced:
        return self._new(-int(self), -self.sum)

    def __floordiv__(self, other: int) -> Traced:
        return self._new(int(self) // int(other), self.sum.divided(sum_of(other), up=False))

    def __rfloordiv__(self, other: int) -> Traced:
        return self._new(int(other) // int(self), sum_of(other).divided(self.sum, up=False))

    def __mod__(self, other: int) -> Traced:
        below = sum_of(other)
        return self._new(int(self) % int(other), self.sum - below * self.sum.divided(below, up=False))

    def __rmod__(self, other: int) -> Traced:
        above = sum_of(other)
        return self._new(int(other) % int(self), above - self.sum * above.divided(self.sum, up=False))

    def __bool__(self) -> bool:
        return not self.guards.decide(self.sum, int(self) == 0, zero=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return False
        return self.guards.decide(self.sum - sum_of(other), int(self) == int(other), zero=True)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return self.guards.decide(self.sum - sum_of(other), int(self) > int(other), zero=False)

    def __lt__(self, other: int) -> bool:
        return self.guards.decide(sum_of(other) - self.sum, int(self) < int(other), zero=False)

    def __le__(self, other: int) -> bool:
        return not self > other

    def __ge__(self, other: int) -> bool:
        return not self < other

    __hash__ = int.__hash__


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Traced, *_: object) -> NoReturn:
        raise TypeError(f"{name} of a traced size ({self.sum}): a closed form has sums, products and divisions only")

    return refuse


LOSING: Final = (
    *("pow", "rpow", "truediv", "rtruediv", "divmod", "rdivmod", "lshift", "rshift", "and", "or", "xor"),
    *("invert", "abs", "round"),
)
"""Operations of `int` that a `Sum` cannot express."""
for _name in LOSING:
    setattr(Traced, f"__{_name}__", _refused(_name))


def positive(number: int) -> int:
    """Return the number, or 0 if it is negative. A traced number gets no guard."""
    if not isinstance(number, Traced):
        return max(0, number)
    made = number.sum
    least, most = made.least, (-made).least
    if least is None or least < 0:
        made = ZERO if most is not None and most >= 0 else Sum((((Positive(made),), 1),))
    return Traced(max(0, int(number)), made, number.guards)


def sum_of(number: int) -> Sum:
    """Formula of a number; a plain number is a constant."""
    return number.sum if isinstance(number, Traced) else constant(number)
