"""Device memory in addition to allocated tensors, which plans leave free, and limits of allocated bytes.

A forecast counts tensors. A process needs memory outside the caching allocator as well. Each fixed part has a low, an
expected and a high value, from these sources, each about one machine:

- `CONTEXT`, the CUDA context and loaded kernels. A bare context takes 287 MB (pytorch#86509) to 426 MiB
  (unsloth-zoo#1053) with lazy loading of kernels. `EAGER_CONTEXT`, all of them, before CUDA 11.7: over 1 GB
  (pytorch#107667), 1,573 MiB on an A100 (bigscience, train/tr11-176B-ml/chronicles-prequel.md).
- `COMMUNICATOR`, one for each mesh axis with more than one rank. Over NVLink, 544 MB among two A100 and 688 MB among
  more (nccl#964); 0.65 GiB for each additional one of RCCL (LUMI-AI-Guide#111). Linear in channels, and nearly nothing
  for a split communicator that shares its parent's resources (nccl#986).
- `ALL_TO_ALL`, in addition for expert parallelism. Eight H100 went from 1.06 to 4.34 GB with their first all-to-all,
  since every peer gets 32 channels (nccl#1685).
- `WORKSPACE` of matmuls. cuBLAS takes 8,519,680 B a stream before Hopper and 32 MiB since (CUBLAS_WORKSPACE_CONFIG),
  cublasLt up to 32 MiB more (pytorch#120925); a step has one or a few streams.
- `FRAGMENTS`, a share of the peak: reserved minus allocated, with expandable segments (pytorch#96995). It is the need
  of a run, not what it reserves on a device with free memory: an allocator that runs out frees its cached blocks.
  `predict.ranges` has what published runs reserve; without expandable segments it can be far more: 127 GB reserved for
  61 GB allocated, and 97 GB with them, in a run whose work changes (cosmos-rl#388).

On CPU all of it is 0.

NOTE [ Cached segments ]
``c10/cuda/CUDACachingAllocator.cpp``: a tensor of 10 MiB and more that no free block can hold gets its own segment,
which stays. Logits do not fit into segments of a layer's forward, and later backwards take those of logits apart. So
steps that are replayed by its rules (`benchmarks.caching_allocator`) reserve, in addition to the peak, about what a
layer's forward allocates and frees, with weights that it gathers, and a fifth of the head's forward. No published run
has more than a quarter of its allocated bytes so: the longest sequences leave no room, and segments are freed. Of a
device that is named, what is left in addition to allocated bytes counts at most.
A longer micro-batch does not fit into segments of those before it. So where lengths differ, and segments are not
expandable, two more sets of what the head's passes allocate are there, not a fifth: the least, in whole sets, that
replays of 480 lengths leave (1.7 to 6, by the mean and deviation of three data sets).
Optimizer state is allocated after the first backward, in segments that it left, logits' among them. The next head then
needs segments of its own, and an update's temporaries do not give them back: what an update holds, and the head's
passes, are reserved together.
FSDP reduces gradients on one stream of its own and gathers on another, and no other stream takes their blocks:
gradients count although ``zero_grad`` freed them, unless a micro-batch before had them at the peak, and gathered
weights once more, as they are copied out (torch, ``distributed/fsdp/_fully_shard/_fsdp_collectives.py``).
DeepSpeed's ZeRO 1 and 2 step on flat gradients of a rank, in two dtypes, and ZeRO 1 reduces flat buckets
(``stage_1_and_2.py``, ``step``, ``allreduce_bucket``, 2151c78): no block that a pass frees holds one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from jettison.core.units import GIB, MIB, format_bytes
from jettison.spec.frameworks import named
from jettison.spec.kernels import Device
from jettison.spec.layout import Layout

if TYPE_CHECKING:
    from jettison.spec.hardware import Hardware


class Allowance(NamedTuple):
    """Bytes in addition to tensors: expected, with bounds."""

    low: int
    expected: int
    high: int


CONTEXT: Final = Allowance(low=4 * GIB // 10, expected=3 * GIB // 4, high=3 * GIB // 2)
EAGER_CONTEXT: Final = Allowance(low=GIB, expected=1573 * MIB, high=2 * GIB)
COMMUNICATOR: Final = Allowance(low=GIB // 10, expected=GIB // 2, high=GIB)
ALL_TO_ALL: Final = Allowance(low=0, expected=GIB, high=3 * GIB)
WORKSPACE: Final = Allowance(low=8 * MIB, expected=64 * MIB, high=256 * MIB)
FRAGMENTS: Final = (Fraction(1, 100), Fraction(3, 100), Fraction(8, 100))


def communicators(layout: Layout) -> int:
    """Number of communicators: one for each mesh axis with more than one rank; an engine's models have more.

    ``deepspeed/runtime/pipe/topology.py``, ``PipelineParallelGrid``, 2151c78: of a replica; a tensor-parallel model's
    own (``megatron/mpu/initialize.py``): of its axis, of all ranks. Those of one rank a node have few channels, whose
    buffers are in host memory without GPUDirect (NCCL 2.10, ``src/transport/net.cc``), and count nothing.
    """
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.ep, layout.pp, layout.dp))
    return axes + (layout.buckets is not None) * ((layout.pp > 1) + 2 * (layout.tp > 1))


@lru_cache(maxsize=1024)
def fixed_allowance(layout: Layout, device: Device, stack: str | None = None) -> Allowance:
    """Allowance that does not depend on the peak: all but fragments."""
    if device is Device.CPU:
        return Allowance(low=0, expected=0, high=0)
    context = EAGER_CONTEXT if named("stacks").get(stack or "", {}).get("loads_all_kernels") else CONTEXT
    parts = (context, WORKSPACE, *(COMMUNICATOR,) * communicators(layout), *(ALL_TO_ALL,) * (layout.ep > 1))
    return Allowance(*map(sum, zip(*parts, strict=True)))


@lru_cache(maxsize=1024)
def available_to(
    gpu: Hardware, layout: Layout, device: Device, margin: float = 0.0, *, context: int = 0, stack: str | None = None
) -> int:
    """Usable bytes for tensors of any run of a layout.

    Args:
        margin: 0 for the expected allowance to 1 for its upper bound, linear between.
        context: bytes of a process in addition to the allowance.
    """
    fixed, part = fixed_allowance(layout, device, stack), Fraction(margin)
    room = gpu.usable_bytes - context - fixed.expected - part * (fixed.high - fixed.expected)
    _, expected, high = (Fraction(0),) * 3 if device is Device.CPU else FRAGMENTS
    return max(0, int(room / (1 + expected + part * (high - expected))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Limit of allocated bytes on one rank: a budget or a device's.

    Args:
        gpu: name of the accelerator; empty for a budget.
        budget_bytes: the budget, if given. ``device_bytes``: usable memory of the GPU, if given.
    """

    nbytes: int
    gpu: str = ""
    budget_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def words(self) -> str:
        """Name of the limit, for messages."""
        if not self.gpu or self.device_bytes is None:
            return "the budget"
        if self.device_bytes == self.nbytes:
            return f"memory of {self.gpu}"
        usable = format_bytes(self.device_bytes)
        return f"usable memory of {self.gpu} ({usable} less contexts, communicators and fragments)"


class FitVerdict(StrEnum):
    """Whether a run fits, from the range of its bytes."""

    FITS = "fits"
    CLOSE = "too close to call"
    DOES_NOT_FIT = "does not fit"

    @property
    def said(self) -> str:
        """Text for tables, in capitals unless it fits."""
        return str(self) if self is FitVerdict.FITS else self.upper()


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Expected value and 80 % range of a figure."""

    expected: float
    low: float
    high: float

    def within(self, limit: float) -> FitVerdict:
        """Verdict against a limit."""
        if self.high <= limit:
            return FitVerdict.FITS
        return FitVerdict.CLOSE if self.low <= limit else FitVerdict.DOES_NOT_FIT

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high end."""
        return self.low, self.high

    def words(self, form: Callable[[float], str]) -> str:
        """Text of the range; ``form`` formats one value."""
        return f"{form(self.expected)} ({form(self.low)} to {form(self.high)})"

    def whole(self) -> dict[str, int]:
        """Rounded bytes, for JSON."""
        return {name: round(value) for name, value in asdict(self).items()}


class FitRule(StrEnum):
    """End of the range of device bytes that has to fit."""

    SURELY = "surely"
    EXPECTED = "expected"
    MAY = "may"
    BUDGET = "budget"  # a budget for tensors, without a range

    @property
    def words(self) -> str:
        """Verb phrase for messages."""
        words = {FitRule.SURELY: "surely fits", FitRule.EXPECTED: "is expected to fit", FitRule.MAY: "may fit"}
        return words.get(self, "fits")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitBudget:
    """Budget of allocated bytes, and its rule."""

    rule: FitRule
    nbytes: int
