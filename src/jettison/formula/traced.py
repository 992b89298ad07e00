"""Sizes that remember how they were worked out, so that a walk over numbers leaves its formulas behind.

NOTE [ A formula is what the walk did ]
The walk over a layer (NOTE [ One walk, every figure ]) multiplies, adds and divides whole numbers. Given `Traced` ones
it does the same, and each byte and FLOP that comes out carries the `Sum` that led to it. So a formula is never written
down a second time. Where the walk decides something by a size (more than one rank? heads that share keys?), the
comparison acts on the number, and is written into a `Book` as a guard: the formulas hold wherever all guards of their
walk come out as they did. What a guard cannot change (a size of 1 or more is above 0) is left out.

A traced number equals a plain one, and hashes like it: hand none to anything that caches by equality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Self

from jettison.formula.sums import Sum, constant, symbol


@dataclass(frozen=True, slots=True)
class Guard:
    """A decision of a walk: is ``difference`` above 0, or with ``zero`` equal to 0? It was ``held``."""

    difference: Sum
    zero: bool
    held: bool

    def same(self, sizes: Mapping[str, int]) -> bool:
        """Does it come out so at these sizes?"""
        value = self.difference.value(sizes)
        return (value == 0 if self.zero else value > 0) is self.held

    def __str__(self) -> str:
        """As documents print it."""
        words = {(False, True): "> 0", (False, False): "<= 0", (True, True): "== 0", (True, False): "!= 0"}
        return f"{self.difference} {words[self.zero, self.held]}"


@dataclass(slots=True)
class Book:
    """What one walk decided by sizes, in order, each once."""

    guards: dict[Guard, None] = field(default_factory=dict)

    def size(self, name: str, value: int) -> Traced:
        """A named size of this walk."""
        return Traced(value, symbol(name), self)

    def decide(self, difference: Sum, held: bool, *, zero: bool) -> bool:
        """Note a decision, unless no size of 1 or more could change it; the decision."""
        least, most = difference.least, (-difference).least
        always = difference.number is not None or (least is not None and least > 0)
        never = most is not None and (most > 0 or (most == 0 and not zero))
        if not always and not never:
            if zero and difference.terms[0][1] < 0:
                difference = -difference
            self.guards[Guard(difference, zero, held)] = None
        return held


class Traced(int):
    """A whole number with the sum that it came from. What it cannot do, it refuses: nothing is lost on the way."""

    sum: Sum
    book: Book

    def __new__(cls, value: int, made: Sum, book: Book) -> Self:
        """A number and how it was worked out."""
        self = super().__new__(cls, value)
        self.sum, self.book = made, book
        return self

    def _new(self, value: int, made: Sum) -> Traced:
        return Traced(value, made, self.book)

    def __add__(self, other: int) -> Traced:
        return self._new(int(self) + int(other), self.sum + sum_of(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> Traced:
        return self._new(int(self) - int(other), self.sum - sum_of(other))

    def __rsub__(self, other: int) -> Traced:
        return self._new(int(other) - int(self), sum_of(other) - self.sum)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self._new(int(self) * int(other), self.sum * sum_of(other))

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
        return not self.book.decide(self.sum, int(self) == 0, zero=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return False
        return self.book.decide(self.sum - sum_of(other), int(self) == int(other), zero=True)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return self.book.decide(self.sum - sum_of(other), int(self) > int(other), zero=False)

    def __lt__(self, other: int) -> bool:
        return self.book.decide(sum_of(other) - self.sum, int(self) < int(other), zero=False)

    def __le__(self, other: int) -> bool:
        return not self > other

    def __ge__(self, other: int) -> bool:
        return not self < other

    __hash__ = int.__hash__


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Traced, *_: object) -> NoReturn:
        raise TypeError(f"{name} of a traced size ({self.sum}): a closed form has sums, products and divisions only")

    return refuse


LOSING: Final = [
    "pow",
    "rpow",
    "truediv",
    "rtruediv",
    "divmod",
    "rdivmod",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "invert",
    "abs",
    "round",
]
"""What `int` can do and a `Sum` cannot say."""
for _name in LOSING:
    setattr(Traced, f"__{_name}__", _refused(_name))


def sum_of(number: int) -> Sum:
    """How a number was worked out: a plain one is itself."""
    return number.sum if isinstance(number, Traced) else constant(number)
