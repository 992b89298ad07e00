"""What a step's peak is held against: a budget, or what a GPU leaves for tensors."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Bytes of allocations on one rank.

    Args:
        gpu: the accelerator whose they are; empty for a budget.
        usable_bytes: what a process can allocate there altogether; None for a budget.
    """

    nbytes: int
    gpu: str = ""
    usable_bytes: int | None = None

    @property
    def words(self) -> str:
        """Whose bytes they are."""
        if self.usable_bytes is None:
            return "the budget"
        if self.usable_bytes == self.nbytes:
            return f"what {self.gpu} offers"
        usable = format_bytes(self.usable_bytes)
        return f"what {self.gpu} leaves for tensors ({usable} less contexts, communicators and fragments)"


def limit_of(*, budget: str | None, gpu: str | None, run: Run | None = None) -> Limit | None:
    """The smaller of a budget and of what a GPU leaves; None without either.

    Args:
        run: what the GPU's allowance is for; without it, nothing is set aside.

    Raises:
        UsageError: the budget has no unit, or there is no such GPU.
    """
    limits = [] if budget is None else [Limit(nbytes=parse_bytes(budget))]
    if gpu is not None:
        limits.append(_device_limit(gpu, run))
    return min(limits, key=lambda limit: limit.nbytes, default=None)


def _device_limit(gpu: str, run: Run | None) -> Limit:
    from jettison.predict.allowance import available_bytes  # most ledgers are of no GPU
    from jettison.spec.hardware import hardware

    device = hardware(gpu)
    left = device.usable_bytes if run is None else available_bytes(device, run)
    return Limit(nbytes=left, gpu=device.name, usable_bytes=device.usable_bytes)
