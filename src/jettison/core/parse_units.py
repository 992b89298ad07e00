"""Quantities as people write them. GiB = 2^30 and GB = 10^9 are different words: a quantity always carries its unit."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, SupportsIndex

from jettison.core.errors import UsageError

_DECIMAL_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
BYTE_UNITS: Final = MappingProxyType(
    _DECIMAL_UNITS | _BINARY_UNITS | {unit.lower(): size for unit, size in (_DECIMAL_UNITS | _BINARY_UNITS).items()}
)
"""Bytes in one of each accepted unit. "Gb" is not among them: it means a gigabit."""

_COUNT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kKM]?)")
_TIMES: Final = MappingProxyType({"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20})
_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_SECONDS: Final = MappingProxyType({"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0})
LONGEST_SHOWN: Final = 80
"""Most characters of a user's input that a message repeats."""
_EXPECTED = 'expected a positive number and a unit, such as "8GiB" (2^30 bytes each) or "20 GB" (10^9 bytes each)'


def parse_length(text: str) -> int:
    """Read tokens: ``"8192"``, ``"8k"`` (8 x 1024), ``"1M"``. Raise `UsageError` if it is no whole number of them."""
    match = _COUNT.fullmatch(text.strip())
    count = None if match is None else Fraction(match["number"]) * _TIMES[match["unit"]]
    if count is None or count.denominator != 1:
        raise UsageError(f'got {text!r} as a number of tokens; expected one such as "8192", "8k" (8192) or "1M" (2^20)')
    return int(count)


class Length(int):
    """A number of tokens as it is typed, see `parse_length`: the command line makes one of each such argument."""

    def __new__(cls, text: str | int) -> Length:
        return super().__new__(cls, parse_length(text) if isinstance(text, str) else text)


if TYPE_CHECKING:
    Tokens = int | Length
else:
    Tokens = Length  # in a union with int, pydantic would try int first, which takes "1.3" for 1


def parse_bytes(quantity: str | SupportsIndex) -> int:
    """Read a number of bytes: a string such as ``"8GiB"``, ``"20 GB"`` or ``"123456B"``, or a whole number. Raise
    `UsageError` if the unit is missing or unknown, the number is a float or a bool, or less than one byte.

    Whole numbers are Python's ints and whatever else is an index (`operator.index`): numpy's and torch's integers of
    one element. A fraction of a byte is dropped, so that a budget never grows by being read.
    """
    nbytes = _parse_text(quantity) if isinstance(quantity, str) else _whole(quantity)
    if nbytes < 1:
        raise UsageError(f"got {quantity!r}, which is not at least one byte; {_EXPECTED}")
    return nbytes


def parse_seconds(quantity: str) -> float:
    """Read a duration: ``"120s"``, ``"1.5 min"``, ``"2h"``, ``"500ms"``. Raise `UsageError` without a known unit."""
    match = _QUANTITY.fullmatch(quantity.strip())
    if match is None or match["unit"] not in _SECONDS:
        known = ", ".join(_SECONDS)
        raise UsageError(f'got {quantity!r} as a duration; expected a number and one of {known}, such as "120s"')
    return float(match["number"]) * _SECONDS[match["unit"]]


def _whole(number: object) -> int:
    """Check a number that is not a string. Raise `UsageError` if it is not a whole number, by its type."""
    if isinstance(number, float):
        raise UsageError(f"got {number!r}, a float, as a number of bytes; expected {_instead_of(number)}")
    try:
        found = operator.index(number)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of many elements
        found = None
    shown = f"{number!r} ({type(number).__name__})"
    if len(shown) > LONGEST_SHOWN or "\n" in shown:
        shown = f"a {type(number).__name__}"
    if found is None or "bool" in str(getattr(number, "dtype", type(number))):
        raise UsageError(f"got {shown} as a number of bytes; {_EXPECTED}, or an int of bytes")
    return found


def _instead_of(number: float) -> str:
    """Suggest accepted forms of a budget that was given as a float."""
    meant = []
    if 2**-30 <= number < 1e5:
        meant.append(f'"{Decimal(repr(float(number))):f}GiB"')
    if 1 <= number < float("inf"):
        meant.append(f"{int(number)} (an int is a number of bytes)")
    return ", or ".join(meant) or 'a string with a unit, such as "8GiB", or an int of bytes, such as 8 * 2**30'


def _parse_text(text: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"got {text!r} as a number of bytes; {_EXPECTED}")
    number, unit = match["number"], match["unit"]
    if not unit:
        meant = [f'"{number}{unit}"' for unit in ("GiB", "GB", "B") if Fraction(number) * BYTE_UNITS[unit] >= 1]
        if not meant:
            raise UsageError(f"got {text!r} as a number of bytes; {_EXPECTED}")
        raise UsageError(f"got {text!r} without a unit; write {' or '.join(meant)} to say which")
    if unit not in BYTE_UNITS:
        known = ", ".join(("B", "kB", "MB", "GB", "TB", "PB", *_BINARY_UNITS))
        raise UsageError(f"got the unit {unit!r} in {text!r}; expected one of {known}")
    return int(Fraction(number) * BYTE_UNITS[unit])
