"""Measured figures of arXiv 2205.05198 that pages show beside ours; tests hold them against tests/facts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

PAPER: Final = "arXiv 2205.05198"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One model of Tables 3 and 5, on A100s of 80 GB.

    Args:
        asked: its layout and batch, as flags.
        mfu, hfu: of selective recomputation with sequence parallelism, as fractions.
    """

    model: str
    asked: MappingProxyType[str, Any]
    full_seconds: float
    selective_seconds: float
    mfu: float
    hfu: float


def _row(
    model: str,
    pp: int,
    virtual: int,
    batch: int,
    micro_batch: int,
    full: float,
    selective: float,
    mfu: float,
    hfu: float,
) -> Iteration:
    asked: dict[str, Any] = {"tp": 8}
    asked |= {"pp": pp} if pp > 1 else {}
    asked |= {"virtual_stages": virtual} if virtual > 1 else {}
    asked |= {"micro_batch": micro_batch} if micro_batch > 1 else {}
    asked |= {"micro_batches": batch // micro_batch} if batch > micro_batch else {}
    return Iteration(
        model=model, asked=MappingProxyType(asked), full_seconds=full, selective_seconds=selective, mfu=mfu, hfu=hfu
    )


ITERATIONS: Final = MappingProxyType(
    {
        "22B": _row("gpt-22b", 1, 1, 4, 4, 1.42, 1.10, 0.415, 0.437),
        "175B": _row("gpt-175b", 8, 3, 64, 1, 18.13, 13.75, 0.514, 0.528),
        "530B": _row("gpt-530b", 35, 3, 280, 1, 49.05, 37.83, 0.560, 0.570),
        "1T": _row("gpt-1t", 64, 1, 512, 1, 94.42, 71.49, 0.563, 0.570),
    }
)
"""Tables 3 and 5."""
