"""Programs that attack the promise, and the judge that runs each of them with and without a plan.

The promise: a planned step leaves the very bits that a plain one leaves, or an error stops it before the optimizer.
"""

from silent import (
    aliasing,
    arguments,
    beneath,
    by_name,
    holders,
    later,
    objects,
    ordinary,
    outside,
    passes,
    recording,
    state,
    streams,
    structure,
    switches,
    tensors,
    transforms,
    values,
)
from silent.kit import CASES as ALL

POLICIES = ("full", "share:40", "share:75", "selective-op", "budget:100", "budget:130", "offload", "full-offload")

__all__ = [
    "ALL",
    "POLICIES",
    "aliasing",
    "arguments",
    "beneath",
    "by_name",
    "holders",
    "later",
    "objects",
    "ordinary",
    "outside",
    "passes",
    "recording",
    "state",
    "streams",
    "structure",
    "switches",
    "tensors",
    "transforms",
    "values",
]
