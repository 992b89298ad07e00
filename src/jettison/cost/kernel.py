"""A kernel: what is launched once, with its FLOPs and the bytes that it moves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Half(StrEnum):
    """Which gradients a backward kernel makes; a zero-bubble schedule runs them apart."""

    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of m × k and k × n, in the dtype of their inputs.

    ``grouped``: see NOTE [ Grouped products ] in `matmul`.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    grouped: bool = False

    @property
    def flops(self) -> int:
        """A multiply-add is two."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch.

    Args:
        steps: of the tape, whose forward or backward it is.
        nbytes: read and written.
        attention_flops: of a fused attention, masked ones included.
        scan_flops: of a fused scan.
        launches: kernels that it stands for.
        rows: it looks rows up, or scatters them.
        head_dim: of a fused attention's queries.
        keys: that one call of a fused attention sees.
        narrow: it takes query, key and value in fp8.
    """

    steps: tuple[int, ...]
    nbytes: int
    product: Product | None = None
    attention_flops: float = 0.0
    scan_flops: int = 0
    half: Half | None = None
    launches: int = 1
    rows: bool = False
    head_dim: int = 0
    keys: int = 0
    narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """Both passes of a region."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
