"""Quantities as people write them. Inside Jettison bytes and FLOPs are plain integers; only this file formats them.

GiB = 2^30 and GB = 10^9 are different words, so a quantity in a string always carries its unit.
"""

from __future__ import annotations

import re
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from jettison.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_DECIMAL_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
BYTE_UNITS: Final = MappingProxyType(
    _DECIMAL_UNITS | _BINARY_UNITS | {unit.lower(): size for unit, size in (_DECIMAL_UNITS | _BINARY_UNITS).items()}
)
"""Bytes in one of each accepted unit. "Gb" is not among them: it means a gigabit."""

_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_SECONDS: Final = MappingProxyType({"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0})
_EXPECTED = 'expected a positive number and a unit, such as "8GiB" (2^30 bytes each) or "20 GB" (10^9 bytes each)'


def parse_bytes(quantity: str | int) -> int:
    """Read a number of bytes: an integer, or a string such as ``"8GiB"``, ``"20 GB"`` or ``"123456B"``.

    A fraction of a byte is dropped, so that a budget never grows by being read.

    Raises:
        UsageError: the unit is missing or unknown, or the quantity is not at least one byte.
    """
    if isinstance(quantity, int) and not isinstance(quantity, bool):
        nbytes = quantity
    elif isinstance(quantity, str):
        nbytes = _parse_text(quantity)
    else:
        raise UsageError(
            f"got {quantity!r} ({type(quantity).__name__}) as a number of bytes; {_EXPECTED}, or an int of bytes"
        )
    if nbytes < 1:
        raise UsageError(f"got {quantity!r}, which is not at least one byte; {_EXPECTED}")
    return nbytes


def parse_seconds(quantity: str) -> float:
    """Read a duration: ``"120s"``, ``"1.5 min"``, ``"2h"``, ``"500ms"``.

    Raises:
        UsageError: the unit is missing or unknown.
    """
    match = _QUANTITY.fullmatch(quantity.strip())
    if match is None or match["unit"] not in _SECONDS:
        known = ", ".join(_SECONDS)
        raise UsageError(f'got {quantity!r} as a duration; expected a number and one of {known}, such as "120s"')
    return float(match["number"]) * _SECONDS[match["unit"]]


def _parse_text(text: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"got {text!r} as a number of bytes; {_EXPECTED}")
    number, unit = match["number"], match["unit"]
    if not unit:
        raise UsageError(f'got {text!r} without a unit; write "{number}GiB", "{number}GB" or "{number}B" to say which')
    if unit not in BYTE_UNITS:
        known = ", ".join(("B", "kB", "MB", "GB", "TB", "PB", *_BINARY_UNITS))
        raise UsageError(f"got the unit {unit!r} in {text!r}; expected one of {known}")
    return int(Fraction(number) * BYTE_UNITS[unit])


def format_bytes(nbytes: int) -> str:
    """Bytes in binary units: ``"1.50 GiB"``. Below one KiB they are exact: ``"512 B"``. Differences keep their sign."""
    if abs(nbytes) < KIB:
        return f"{nbytes} B"
    return _scaled(float(nbytes), 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), decimals=2)


def format_seconds(seconds: float) -> str:
    """A duration: ``"12.3 ms"``, ``"4.56 s"``, ``"2 min 05 s"``, ``"3 h 07 min"``."""
    magnitude = abs(seconds)
    if magnitude < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if magnitude < 1:
        return f"{seconds * 1e3:.1f} ms"
    if magnitude < 60:
        return f"{seconds:.2f} s"
    sign = "-" if seconds < 0 else ""
    whole_minutes, rest = divmod(round(magnitude), 60)
    if whole_minutes < 60:
        return f"{sign}{whole_minutes} min {rest:02d} s"
    return f"{sign}{whole_minutes // 60} h {whole_minutes % 60:02d} min"


def format_flops(flops: int | float) -> str:
    """An amount of work, not a rate: ``"3.21 TFLOP"``."""
    prefixes = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP")
    if abs(flops) < 1000:
        return f"{flops:.0f} FLOP"
    return _scaled(float(flops), 1000.0, prefixes, decimals=2)


def format_count(count: int) -> str:
    """A number of things, such as parameters: ``"12,345"``, ``"8.03 billion"``."""
    if abs(count) < 1_000_000:
        return f"{count:,}"
    return _scaled(count / 1e6, 1000.0, ("million", "billion", "trillion", "quadrillion"), decimals=2)


def format_ratio(ratio: float) -> str:
    """A quotient of two like quantities: ``"1.23×"``."""
    return f"{ratio:.2f}×"


def format_percent(fraction: float) -> str:
    """A fraction of a whole: 0.034 is ``"3.4 %"``."""
    return f"{fraction * 100:.1f} %"


def _scaled(value: float, base: float, units: tuple[str, ...], *, decimals: int) -> str:
    """Choose the unit after rounding, so that 1023.999 KiB reads 1.00 MiB and not 1024.00 KiB."""
    index = 0
    while index < len(units) - 1 and round(abs(value), decimals) >= base:
        value /= base
        index += 1
    return f"{value:.{decimals}f} {units[index]}"
