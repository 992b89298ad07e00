"""Counts bytes that are alive and work that is done, while it happens.

Bytes are not computed by a formula: an array is counted from when an op has made it until Python lets go of it. What
NumPy takes inside one op, and gives back before it returns, is not seen: an op stands for a kernel without workspace.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VALUES, GRADIENTS, PARAMETERS = "values", "gradients of values", "parameters and their gradients"


class Ghost:
    """An array of which there is only the shape: a dry run costs no memory and no time."""

    __slots__ = ("__weakref__", "dtype", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize


Array = np.ndarray | Ghost


@dataclass
class Meter:
    """Live bytes by kind, the most there were, and FLOPs by phase."""

    live: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    live_bytes: int = 0
    peak_bytes: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    _alive: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def made(self, array: Array, kind: str) -> Array:
        """Counts an array until it is gone; one that is counted already stays what it is."""
        key = id(array)
        if key not in self._alive:
            size_bytes = array.nbytes
            self.live[kind] += size_bytes
            self.live_bytes += size_bytes
            self.peak[kind] = max(self.peak[kind], self.live[kind])
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._alive[key] = weakref.ref(array, self._gone(key, kind, size_bytes))
        return array

    def _gone(self, key: int, kind: str, size_bytes: int) -> Any:
        def gone(_: Any) -> None:
            del self._alive[key]
            self.live[kind] -= size_bytes
            self.live_bytes -= size_bytes

        return gone
