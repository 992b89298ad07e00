"""What fused attention reaches on a device, by dtype and by the width of a head: the section [attention] of a file.

    [attention]
    edge = 700                # columns of scores that starting and ending a row of tiles is worth
    bf16_128 = [0.74, 0.61]   # heads up to 128 wide: shares of the dtype's peak, forward and backward, without edges
    mxfp8_128 = [0.45, 0.29]  # of fp8's peak, where query, key and value are narrow

NOTE [ Edges of attention ]
A kernel works on a row of tiles of scores: it loads queries, goes over keys, and writes an output; backward goes over
queries for a tile of keys. The start and the end of that do not depend on how many columns lie between, nor does the
half of a tile that a mask cuts off. Against cuDNN's own timings (cudnn-frontend, benchmark/sdpa_benchmark_training;
tests/facts/cudnn_attention.csv) one such number and rates by width are off by less than 8 % in nineteen of twenty
cases, 2 % in the median; forwards of 2048 and of 16384 tokens differ by half as shares of the peak. A window of 128
columns is nearly all edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from jettison.core.errors import UsageError

WIDTHS: Final = (64, 128, 192)
DTYPES: Final = ("bf16", "mxfp8")
_KEYS: Final = tuple(f"{dtype}_{width}" for dtype in DTYPES for width in WIDTHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRates:
    """Of one device under one software.

    Args:
        edge: see NOTE [ Edges of attention ].
        shares: by dtype, the width of a head of queries up to which it holds, and the pass (0: forward, 1: backward).
    """

    edge: int
    shares: tuple[tuple[str, int, float, float], ...]

    def share(self, dtype: str, width: int, *, backward: bool) -> float | None:
        """Of the dtype's peak; None: not stated. Wider heads than any that is stated take the widest's."""
        known = [row for row in self.shares if row[0] == dtype]
        fitting = [row for row in known if width <= row[1]] or known[-1:]
        if not fitting:
            return None
        _, _, ahead, back = fitting[0]
        return back if backward else ahead


def attention_rates(who: str, section: object) -> AttentionRates | None:
    """The section of a file; None: it has none.

    Raises:
        UsageError: unknown keys, no edge, or shares that are none.
    """
    if section is None:
        return None
    where = f"{who}, section [attention]"
    if not isinstance(section, Mapping):
        raise UsageError(f"{who}: got attention = {section}; expected a section [attention]")
    for key in section:
        if key not in ("edge", *_KEYS):
            raise UsageError(f"{where}: got the key {key!r}; expected some of edge, {', '.join(_KEYS)}")
    edge = section.get("edge")
    if isinstance(edge, bool) or not isinstance(edge, int) or edge < 0:
        raise UsageError(f"{where}: got edge = {edge}; expected a whole number of columns, such as edge = 700")
    if "bf16_128" not in section:
        raise UsageError(f"{where}: got no bf16_128; expected at least that, such as bf16_128 = [0.74, 0.61]")
    return AttentionRates(edge=edge, shares=tuple(_row(where, key, section[key]) for key in _KEYS if key in section))


def _row(where: str, key: str, given: object) -> tuple[str, int, float, float]:
    values = given if isinstance(given, list) else []
    if len(values) != 2 or not all(_is_share(value) for value in values):
        raise UsageError(
            f"{where}: got {key} = {given}; expected shares of a forward and a backward, such as [0.74, 0.61]"
        )
    dtype, width = key.split("_")
    return dtype, int(width), float(values[0]), float(values[1])


def _is_share(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and 0 < value <= 1
