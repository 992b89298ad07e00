"""Seconds of an op from its FLOPs and its bytes: the larger of the two times, plus what a call costs at all.

For ops that are known by these alone: recorded ones that could not be run. Assumes that an op reaches the device's
rates whatever its shape. Off by a factor of two or more for small or oddly shaped matrix products; good enough to rank
what is worth recomputing where nothing can be measured.
"""

from __future__ import annotations

from jettison.cost.matmul import memory_seconds, rate
from jettison.ledger.program import Op
from jettison.spec.hardware import Hardware


def op_seconds(op: Op, hardware: Hardware) -> float:
    """Estimated seconds of one call, in the type that training has there.

    Raises:
        UsageError: the hardware's file states no rate or no bandwidth.
    """
    dtype = "float32" if hardware.synchronous else "bfloat16"
    arithmetic = op.flops / (rate(hardware, dtype) * hardware.reached.matmul)
    return max(arithmetic, memory_seconds(op.bytes_moved, hardware)) + hardware.delays.kernel
