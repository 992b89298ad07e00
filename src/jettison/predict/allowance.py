"""Device memory in addition to the allocator's tensors: the least that a run is planned with; and limits.

A forecast counts tensors. A process needs more, which nobody asks the allocator for and no formula knows. Each fixed
part is given as low, expected and high, between what these sources report of one machine:

- `CONTEXT`, the CUDA context and loaded kernels. A bare context takes 287 MB (pytorch#86509) to 426 MiB
  (unsloth-zoo#1053) with kernels loaded as they are used, and over 1 GB with all of them (pytorch#107667).
- `COMMUNICATOR`, one for each mesh axis with more than one rank. Over NVLink, 544 MB among two A100 and 688 MB among
  more (nccl#964); 0.65 GiB for each further one of RCCL (LUMI-AI-Guide#111). Linear in channels, and nearly nothing
  where a split communicator shares what its parent has (nccl#986).
- `ALL_TO_ALL`, on top for the one that spreads experts. Eight H100 went from 1.06 to 4.34 GB with their first
  all-to-all, since every peer gets 32 channels (nccl#1685).
- `WORKSPACE` of matrix products. cuBLAS takes 8,519,680 B a stream before Hopper and 32 MiB since (what
  CUBLAS_WORKSPACE_CONFIG sets), cublasLt up to 32 MiB more (pytorch#120925); a step has a stream or a few.
- `FRAGMENTS`, a share of the peak that plans leave: reserved beyond allocated, with expandable segments
  (pytorch#96995). It is what a run needs, not what it reserves where there is room: an allocator that runs short gives
  back blocks that it has cached. What published runs reserve is in `ranges`; without expandable segments it can be far
  more: 127 GB reserved for 61 GB allocated, and 97 GB with them, in a run that changes what it does (cosmos-rl#388).

On the CPU there is none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from jettison.core.parse_units import parse_bytes
from jettison.core.units import GIB, MIB, format_bytes
from jettison.spec.kernels import Device
from jettison.spec.layout import Layout
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.spec.hardware import Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """Bytes beside the tensors, as bounds and as what to plan with."""

    low: int
    expected: int
    high: int

    def __add__(self, other: Allowance) -> Allowance:
        """Both together."""
        return Allowance(low=self.low + other.low, expected=self.expected + other.expected, high=self.high + other.high)

    def __mul__(self, times: int) -> Allowance:
        """Several of the same."""
        return Allowance(low=self.low * times, expected=self.expected * times, high=self.high * times)


CONTEXT: Final = Allowance(low=4 * GIB // 10, expected=3 * GIB // 4, high=3 * GIB // 2)
COMMUNICATOR: Final = Allowance(low=GIB // 10, expected=GIB // 2, high=GIB)
ALL_TO_ALL: Final = Allowance(low=0, expected=GIB, high=3 * GIB)
WORKSPACE: Final = Allowance(low=8 * MIB, expected=64 * MIB, high=256 * MIB)
FRAGMENTS: Final = (Fraction(1, 100), Fraction(3, 100), Fraction(8, 100))


def communicators(layout: Layout) -> int:
    """Groups of ranks that talk: one for each mesh axis with more than one rank, pipeline stages among them."""
    return sum(size > 1 for size in (layout.tp, layout.cp, layout.ep, layout.pp, layout.dp))


def fixed_allowance(layout: Layout, device: Device) -> Allowance:
    """What does not depend on the peak: everything but fragments."""
    return _fixed(communicators(layout), layout.ep > 1, device)


@lru_cache(maxsize=64)
def _fixed(talking: int, experts: bool, device: Device) -> Allowance:
    if device is Device.CPU:
        return Allowance(low=0, expected=0, high=0)
    return CONTEXT + WORKSPACE + COMMUNICATOR * talking + ALL_TO_ALL * experts


def available_bytes(hardware: Hardware, run: Run) -> int:
    """What a device has for tensors: the largest peak that fits beside its own expected allowance; 0 if none does."""
    if run.anchor is None:
        return available_to(hardware, run.layout, run.kernels.device)
    from jettison.predict.extra_buffers import extra_bytes

    usable, layout = hardware.usable_bytes - max(0, run.anchor.context or 0), run.layout
    left = _fitting(usable, communicators(layout), layout.ep > 1, run.kernels.device, Fraction(0))
    return max(0, left - extra_bytes(run.anchor, run))


def available_to(hardware: Hardware, layout: Layout, device: Device, margin: float = 0.0) -> int:
    """The same for any run of a layout.

    Args:
        margin: how much of the way from the expected allowance to its upper bound is set aside, too: from 0 to 1.
    """
    return _fitting(hardware.usable_bytes, communicators(layout), layout.ep > 1, device, Fraction(margin))


@lru_cache(maxsize=1024)
def _fitting(usable_bytes: int, talking: int, experts: bool, device: Device, margin: Fraction) -> int:
    fixed = _fixed(talking, experts, device)
    room = usable_bytes - fixed.expected - margin * (fixed.high - fixed.expected)
    _, expected, high = (Fraction(0),) * 3 if device is Device.CPU else FRAGMENTS
    return max(0, int(room / (1 + expected + margin * (high - expected))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Bytes of allocations on one rank.

    Args:
        gpu: the accelerator whose they are; empty for a budget.
        usable_bytes: what a process can allocate there altogether; None for a budget.
        budget_bytes: that was given for tensors. ``device_bytes``: of the GPU that was given, whichever is smaller.
    """

    nbytes: int
    gpu: str = ""
    usable_bytes: int | None = None
    budget_bytes: int | None = None
    device_bytes: int | None = None

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
    given = None if budget is None else limits[0].nbytes
    there = None
    if gpu is not None:
        from jettison.spec.hardware import hardware  # most ledgers are of no GPU

        device = hardware(gpu)
        left = device.usable_bytes if run is None else available_bytes(device, run)
        there = device.usable_bytes
        limits.append(Limit(nbytes=left, gpu=device.name, usable_bytes=there))
    least = min(limits, key=lambda limit: limit.nbytes, default=None)
    return least and replace(least, budget_bytes=given, device_bytes=there)
