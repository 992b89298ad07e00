"""MFU and HFU: FLOPs that the model needs, or that the hardware runs, over what it could do in the same time.

One definition for everything; what differs from author to author is how model FLOPs are counted: `flops.Counting`.
"""

from __future__ import annotations


def utilisation(flops: float, *, seconds: float, devices: int, peak_flops_per_second: float) -> float:
    """A share of the peak: MFU for model FLOPs, HFU for hardware FLOPs, of all devices together."""
    return flops / (seconds * devices * peak_flops_per_second)


def seconds_of(utilised: float, *, flops: float, devices: int, peak_flops_per_second: float) -> float:
    """The step time that a published utilisation stands for."""
    return flops / (utilised * devices * peak_flops_per_second)
