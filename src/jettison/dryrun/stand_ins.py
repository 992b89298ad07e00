"""Memory for made-up arguments, handed from one kernel's trial to the next.

To fill an embedding's 150 MB with random numbers takes longer than most kernels that are tried on it. So numbers are
drawn once, and copied; and what a kernel has only read the next one of the same size is given as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DRAWN = 1 << 16
"""Numbers that a longer tensor repeats. Twice as many are drawn, and each tensor starts elsewhere among them."""
STRIDE = 7919
WORTH_KEEPING_BYTES = 1 << 18
MOST_KEPT_BYTES = 1 << 29


class StandInMemory:
    """Flat tensors on the CPU: floats between 0.1 and 1, everything else zeros."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._kept_bytes = 0
        self._drawn: dict[torch.dtype, Tensor] = {}
        self._start = 0

    def take(self, dtype: torch.dtype, elements: int) -> Tensor:
        """A flat tensor of so many elements, on a storage of just its size."""
        free = self._free.get((dtype, elements))
        if free:
            flat = free.pop()
            self._kept_bytes -= flat.nbytes
            return flat
        if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
            return torch.zeros(elements, dtype=dtype)
        flat = torch.empty(elements, dtype=dtype)
        self._fill(torch.view_as_real(flat).view(-1) if dtype.is_complex else flat)
        return flat

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Arguments that nothing was written to."""
        for tensor in tensors:
            storage_bytes = tensor.untyped_storage().nbytes()
            floats = tensor.is_floating_point() and tensor.itemsize >= 2
            if not floats or not WORTH_KEEPING_BYTES <= storage_bytes <= MOST_KEPT_BYTES - self._kept_bytes:
                continue
            elements = storage_bytes // tensor.itemsize
            self._free.setdefault((tensor.dtype, elements), []).append(tensor.as_strided((elements,), (1,), 0))
            self._kept_bytes += storage_bytes

    def _fill(self, flat: Tensor) -> None:
        if flat.dtype not in self._drawn:
            self._drawn[flat.dtype] = torch.empty(2 * DRAWN).uniform_(0.1, 1.0).to(flat.dtype)
        self._start = (self._start + STRIDE) % DRAWN
        drawn = self._drawn[flat.dtype][self._start : self._start + DRAWN]
        whole, rest = divmod(flat.numel(), DRAWN)
        if whole:
            flat[: whole * DRAWN].view(whole, DRAWN).copy_(drawn)
        flat[whole * DRAWN :].copy_(drawn[:rest])
