"""Seconds of an op from its FLOPs and its bytes: the larger of the two times, plus what a call costs at all.

Assumes that an op reaches the stated rates whatever its shape, and that ops do not overlap. Off by a factor of two
or more
for small or oddly shaped matrix products; good enough to rank what is worth recomputing where nothing can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.ledger.program import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a device reaches: FLOP/s, bytes/s, and seconds for a call that does nothing."""

    flops_per_second: float
    bytes_per_second: float
    call_seconds: float


# One server core pair with AVX-512/AMX: an order of magnitude, not a datasheet. Only ratios matter for ranking.
CPU = Rates(flops_per_second=1.5e11, bytes_per_second=1.5e10, call_seconds=5e-6)
# H100 SXM: 989 TFLOP/s dense bf16 and 3.35 TB/s (NVIDIA H100 datasheet), at the 60 % and 80 % that large kernels reach.
CUDA = Rates(flops_per_second=6e14, bytes_per_second=2.7e12, call_seconds=4e-6)


def op_seconds(op: Op, rates: Rates) -> float:
    """Estimated seconds of one call."""
    return max(op.flops / rates.flops_per_second, op.bytes_moved / rates.bytes_per_second) + rates.call_seconds
