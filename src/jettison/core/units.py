"""Quantities as people read them. Inside Jettison bytes and FLOPs are plain integers; only this file formats them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


class Bytes(int):
    """A whole number of bytes: an int whose type names its unit. Budgets in errors are of this type."""


def format_bytes(nbytes: int) -> str:
    """Bytes in binary units: ``"1.50 GiB"``. Below one KiB they are exact: ``"512 B"``. Differences keep their sign."""
    if abs(nbytes) < KIB:
        return f"{nbytes} B"
    return _scaled(float(nbytes), 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), decimals=2)


def format_gib(nbytes: int) -> str:
    """Bytes in GiB with one decimal, as device memory is usually quoted: ``"75.7 GiB"``.

    Below 0.1 GiB in the largest smaller unit: ``"30.0 MiB"``, ``"1.5 KiB"``, ``"12 B"``.
    """
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= (0.095 if scale == GIB else 1) * scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """A duration: ``"12.3 ms"``, ``"4.56 s"``, ``"2 min 05 s"``, ``"3 h 07 min"``."""
    magnitude = abs(seconds)
    if magnitude < 1e-3:
        return f"{_plain(seconds * 1e6, 1):.1f} µs"
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
        return f"{_plain(flops, 0):.0f} FLOP"
    return _scaled(float(flops), 1000.0, prefixes, decimals=2)


def format_count(count: int) -> str:
    """A number of things, such as parameters: ``"12,345"``, ``"8.03 billion"``."""
    if abs(count) < 1_000_000:
        return f"{count:,}"
    return _scaled(count / 1e6, 1000.0, ("million", "billion", "trillion", "quadrillion"), decimals=2)


def format_ratio(ratio: float) -> str:
    """A quotient of two like quantities: ``"1.23×"``."""
    return f"{_plain(ratio, 2):.2f}×"


def format_percent(fraction: float) -> str:
    """A fraction of a whole: 0.034 is ``"3.4 %"``."""
    return f"{_plain(fraction * 100, 1):.1f} %"


def format_change(fraction: float) -> str:
    """Format a change: 0.034 is ``"+3.4%"``. No change has a plus."""
    return f"{_plain(fraction * 100, 1):+.1f}%"


def _plain(value: float, decimals: int) -> float:
    """Round, without a negative zero."""
    return round(value, decimals) + 0.0


def _scaled(value: float, base: float, units: tuple[str, ...], *, decimals: int) -> str:
    """Choose the unit after rounding, so that 1023.999 KiB reads 1.00 MiB and not 1024.00 KiB."""
    index = 0
    while index < len(units) - 1 and round(abs(value), decimals) >= base:
        value /= base
        index += 1
    return f"{value:.{decimals}f} {units[index]}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are: ``"silu, mul and 3 more"``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
