"""Kernels, with their FLOPs and the bytes that they move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Half(StrEnum):
    """Gradients that a backward kernel computes; a zero-bubble schedule separates them."""

    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` GEMMs of m × k and k × n, in the dtype of their inputs.

    ``grouped``: see NOTE [ Grouped GEMMs ] in `matmul`; ``aligned``: NOTE [ Aligned rows ] there.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    grouped: bool = False
    aligned: int = 64

    @property
    def flops(self) -> int:
        """FLOPs of the GEMM; a multiply-add is two."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Kernel of one or more steps of a tape."""

    steps: tuple[int, ...]  # whose forward or backward it computes
    nbytes: int  # read and written
    gemm: Gemm | None = None
    attention_flops: float = 0.0  # of fused attention, masked scores included
    scan_flops: int = 0  # of a fused scan
    half: Half | None = None
    launches: int = 1  # number of launches
    rows: bool = False  # it gathers or scatters rows
    head_dim: int = 0  # of fused attention's queries
    keys: int = 0  # in one call of fused attention
    pieces: int = 1  # calls of fused attention: one per piece of a sequence split over ranks
    fp8_attention: bool = False  # query, key and value are in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """Kernels of a region's forward and backward."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


# ops by their memory access, which decides how they fuse and what they read and write ---------------------------------


_ARITHMETIC = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default")
_FUNCTIONS = ("aten.pow.Tensor_Scalar", "aten.rsqrt.default", "aten.tanh.default", "aten.sigmoid.default")
_ACTIVATIONS = ("aten.gelu.default", "aten.silu.default", "aten.relu.default", "aten.clamp.default")
_GATED = ("gated_activation", "gated_activation.clamped", "rotary")
_DRAWS = ("aten.native_dropout.default", "aten.bernoulli.p", "aten.where.ScalarOther", "aten.masked_fill.Scalar")
_COPIES = ("aten.cat.default", "aten._to_copy.default", "quantise.fp8")
POINTWISE = frozenset((*_ARITHMETIC, *_FUNCTIONS, *_ACTIVATIONS, *_GATED, *_DRAWS, *_COPIES))
"""Elementwise ops, or nearly so."""
_NORMS = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default")
REDUCTIONS = frozenset((*_NORMS, *_SOFTMAX, "aten.mean.dim", "aten.sum.dim_IntList", "aten.max.dim"))
"""Reductions over rows."""
PAD = "pad.rows"
LOOKUPS = frozenset(("aten.embedding.default", "aten.index.Tensor", "aten.gather.default", PAD))
"""Ops that read as much of their first input as they write."""
SCATTERS = frozenset(("aten.index_put.default", "aten.scatter_add.default"))
"""Ops that write rows at the positions of an index."""
GEMMS = frozenset(("aten.mm.default", "aten.addmm.default", "aten.convolution.default"))
SCAN = "fused_scan"
BATCHED, GROUPED = "aten.bmm.default", "aten._grouped_mm.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
PICKED = "aten.nll_loss_forward.default"
"""Reads one number of each row."""
IN_ROWS = "rows_cross_entropy"
ROWS_PASSES = 2, 6
"""Passes over the logits in forward (read, log-softmax written) and in backward: log-softmax recomputed, ``nll_loss``'s
gradient written, both read and the gradient written. NOTE [ Cross entropy in chunks ] in `runtime.chunked_loss`."""
CHUNKED, LISTED, FUSED = "chunked_cross_entropy", "chunked_output_cross_entropy", "fused_linear_cross_entropy"
TILED = "tiled_log_probabilities"
LOSSES = frozenset((CHUNKED, LISTED, FUSED, TILED))
ALL_TO_ALL = "c10d.all_to_all"
TRANSFER, HOLD, QUANTISE = "c10d.", "hold", "quantise.fp8"
IN_ORDER = "aten.cat.default"
"""Reorders all-gathered rows: NOTE [ Rows of all ranks ] in `formula.tape`."""
