"""Kernels with their FLOPs and bytes, and their seconds: a roofline whose ceiling depends on the shape.

NOTE [ Tiles ]
A GEMM's result is cut into tiles, which multiprocessors compute in waves. Filling the pipeline and writing the result
lengthen a wave as if its tiles were `EDGE` deeper, and a partial wave takes as long as a full one. Large tiles read
fewer bytes per FLOP and reach the full rate; small ones suit small results. As a library does, this takes the fastest
of several. With fewer tiles than multiprocessors the sum may be split (split-K). Without tensor cores (fp32) arithmetic
is the limit, and small tiles reach the full rate (cuBLAS's ``ampere_sgemm_128x32``). Left out: cache hits, clocks.

NOTE [ Aligned rows ]
Tiles are loaded 16 bytes at a time if rows begin at multiples of 16 bytes, and in smaller pieces otherwise: with an
alignment of two elements a [16384, 4096] x [4096, 10922] reaches 273 TFLOP/s on an H100, where multiples of 32 from
10848 to 11008 reach 395 to 398 (stas00/ml-engineering, training/performance, "swiglu-maf-bench.py"); other alignments
follow the same power law. Before Hopper, which copies tiles by TMA, 16-bit rows reach the full rate if they are
multiples of 128 bytes (NVIDIA's "Matrix Multiplication Background User's Guide", Tensor Core requirements on A100),
others `Reached.unaligned` of it. Batches of rows that do not begin at multiples of 16 bytes ran without tensor cores in
cuBLAS 11: heads of 108 numbers for 216 cost Megatron-DeepSpeed 46 ms a layer, 464 GFLOP at 10 TFLOP/s of an A100's
19.5 in fp32 (bigscience 9e64ede, train/tr11-176B-ml/chronicles-prequel.md, "NHEADs comparison").

NOTE [ Grouped GEMMs ]
GEMMs of experts run one after another, each with weights that are not in cache and with too few waves to prefetch the
next ones: their memory time adds to their arithmetic, instead of overlapping with it. In 96 GEMMs of 20 to 256 experts
with 128 to 1232 rows each, TransformerEngine's grouped GEMM reached 0.08 to 0.51 of a B200's peak
(MooreThreads/SimuMax, configs/system; tests/facts/simumax_grouped.csv). The sum is off by 14 % in the median there, and
the larger of both by 26 %.

NOTE [ Vectorized kernels ]
PyTorch's elementwise kernels load 16 bytes at a time if all operands are contiguous and have one dtype, or fp32 is cast
to lower precision (``gpu_kernel_impl`` in aten/src/ATen/native/cuda/CUDALoops.cuh, ``direct_copy_kernel_cuda`` in
Copy.cu). With another cast, a broadcast or a slice, threads compute addresses and load element by element: instructions
are the limit, not memory. With 1.8e9 elements a multiprocessor and second, Liger-Kernel's timings of transformers'
RMSNorm and rotary embedding on A100, H100 and B200 are off by 6 % in the median, without by 36 %
(tests/facts/eager_kernels.csv). Compiled code and kernels written for one purpose are vectorized.

NOTE [ Unpacked matrices ]
bitsandbytes' kernel finds each 4-bit number by branches (``dDequantizeNF4``, to 0.47), so that instructions are its
limit, too: the matrices of three MLPs take a T4 4.57 ms, 1.3e9 numbers a multiprocessor and second, at 0.4 of its
bandwidth (byi8220/unsloth-puzzles 5b4fb6a, Problem1). torchao's takes twice as long (pytorch/ao, issue 1686).

NOTE [ Edges ]
`Edges` of a hardware file, such as a calibrated CPU's, replace tiles: a CPU's tiles are so small that their rounding
does not show, and small sizes cost the packing of operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import log2
from typing import Final

from jettison.core.errors import UsageError
from jettison.ledger.program import Op
from jettison.spec.fp8 import FP8_1X128, MXFP8
from jettison.spec.hardware import Hardware


class Half(StrEnum):
    """Gradients that a backward kernel computes; a zero-bubble schedule separates them."""

    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` GEMMs of m × k and k × n, in the dtype of their inputs.

    ``grouped``: see NOTE [ Grouped GEMMs ]; ``aligned``: NOTE [ Aligned rows ].
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
    singly: int = 0  # elements computed one by one: NOTE [ Vectorized kernels ]


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
GENERAL = POINTWISE - {*_GATED, "quantise.fp8"}
"""Those that PyTorch's general elementwise kernels compute: NOTE [ Vectorized kernels ]."""
UNPACKED, UNPACKED_ELEMENTS = "dequantise.nf4", 1.8 / 1.3
"""An op, and elements computed one by one in the time of one of its numbers: NOTE [ Unpacked matrices ]."""
CAST, MEAN = "aten._to_copy.default", "aten.mean.dim"
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


TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Rows, columns, and share of the full rate, by bytes read per FLOP."""
TILES_OF_FP32: Final = ((128, 128, 1.0), (128, 32, 1.0), (32, 128, 1.0))  # without tensor cores: NOTE [ Tiles ]
EDGE: Final = 128
"""Depth (of k) that takes as long as starting and ending a tile: an A100 writes a tile of 256 × 128 in 3.5 µs at its
share of the memory bandwidth, in which it computes a depth of 134."""
SMALL_HEAD: Final = 64
"""Largest head dim that takes the rates of 64: a score costs as many exponentials as with 128, for half the FLOPs."""
PIECE_EDGE, PIECE_KEYS = 425, 4096
"""Columns of scores that take as long as starting and ending a row of tiles, and keys of the calls that the hardware
file's shares describe; shorter pieces take longer. FlashAttention-2 on an A100, for files without `AttentionRates`."""
CAUSAL: Final = 0.5
"""Share of scores that a causal mask leaves."""
WHOLE_LINE, WHOLE_LOAD, TWO_ELEMENTS = 64, 8, 273 / 397
"""16-bit numbers in a cache line and in a load, and the share of the rate at an alignment of two."""
SPLIT: Final = 1024
"""Smallest depth of a part of a split sum."""


def rate(hardware: Hardware, dtype: str) -> int:
    """Peak FLOP/s of GEMMs in a dtype, or in the next wider one. `UsageError` if the hardware file states none."""
    peaks = hardware.flops_per_second
    low_precision = (peaks.fp4 if "float4" in dtype else None), (peaks.fp8 if _is_low_precision(dtype) else None)
    half = peaks.fp16 if dtype == "float16" else None
    wider = half, (peaks.bf16 if dtype != "float32" else None), peaks.fp32
    found = next((peak for peak in (*low_precision, *wider, peaks.bf16) if peak is not None), None)
    if found is None:
        raise UsageError(f"hardware {hardware.name} does not state its teraflops; an estimate needs bf16 or fp32")
    return found


def _is_low_precision(dtype: str) -> bool:
    return dtype.startswith(("float8", "float4"))


def _share(hardware: Hardware, dtype: str) -> float:
    """Share of the peak in `rate` that the largest GEMMs of a dtype reach."""
    reached, peaks = hardware.reached, hardware.flops_per_second
    if "float4" in dtype and peaks.fp4 is not None:
        return reached.matmul_fp4 or reached.matmul_fp8
    if not _is_low_precision(dtype) or peaks.fp8 is None:
        return reached.matmul
    by = {MXFP8: reached.matmul_mxfp8, FP8_1X128: reached.matmul_lines}
    return by.get(dtype) or reached.matmul_fp8


@lru_cache(maxsize=65536)
def gemm_seconds(gemm: Gemm, hardware: Hardware) -> float:
    """Seconds of a GEMM's arithmetic alone: see NOTE [ Tiles ] and NOTE [ Edges ]."""
    full, units = rate(hardware, gemm.dtype) * _share(hardware, gemm.dtype), hardware.units
    edges = hardware.edges.fp32 if gemm.dtype == "float32" else hardware.edges.bf16
    if edges is not None:
        return gemm.flops / full * (1 + edges.rows / gemm.m + edges.columns / gemm.n + edges.depth / gemm.k)
    per_unit = full / units * _aligned_share(gemm.aligned, hardware)
    best, wide = float("inf"), gemm.dtype == "float32"  # results twice as wide take as long to write at any rate
    edge = 2 * EDGE * rate(hardware, gemm.dtype) / rate(hardware, "float16") if wide else EDGE
    for rows, columns, of_full in TILES_OF_FP32 if wide else TILES:
        tiles = gemm.batch * -(-gemm.m // rows) * -(-gemm.n // columns)
        depth = max(SPLIT, gemm.k / (units // tiles)) if tiles < units and gemm.k > SPLIT else gemm.k
        best = min(best, -(-tiles // units) * 2 * rows * columns * (depth + edge) / (per_unit * of_full))
    return best


def _aligned_share(elements: int, hardware: Hardware) -> float:
    """Share of the rate that GEMMs reach by the alignment of their rows, in 16-bit numbers: NOTE [ Aligned rows ]."""
    if elements >= WHOLE_LINE:
        return 1.0
    return hardware.reached.unaligned * TWO_ELEMENTS ** (log2(max(1.0, WHOLE_LOAD / elements)) / 2)


def memory_seconds(nbytes: float, hardware: Hardware, *, share: float | None = None) -> float:
    """Seconds of device memory traffic at ``share`` of its bandwidth; else the usual. `UsageError` without one."""
    if hardware.memory_bytes_per_second is None:
        raise UsageError(f"hardware {hardware.name} does not state its memory bandwidth, which an estimate needs")
    return nbytes / (hardware.memory_bytes_per_second * (share or hardware.reached.memory))


def kernel_seconds(kernel: Kernel, hardware: Hardware, *, visible: float, dtype: str, attention: float = 1.0) -> float:
    """Seconds of one kernel on the device, the gap before the next one included.

    Args:
        visible: share of attention's scores that are not masked; a fused kernel skips the rest.
        dtype: of fused attention's inputs.
        attention: speed of fused attention, as a multiple of the hardware file's.
    """
    reached = hardware.reached
    streams = reached.operands if kernel.gemm is not None else reached.gather if kernel.rows else None
    seconds = memory_seconds(kernel.nbytes, hardware, share=streams)
    if kernel.gemm is not None:
        arithmetic = gemm_seconds(kernel.gemm, hardware)
        seconds = seconds + arithmetic if kernel.gemm.grouped else max(seconds, arithmetic)
    elif kernel.attention_flops:
        seconds = max(seconds, _attention_seconds(kernel, hardware, visible, dtype) / attention)
    elif kernel.scan_flops and reached.scan is not None:
        seconds = max(seconds, kernel.scan_flops / (rate(hardware, dtype) * reached.scan))
    elif kernel.singly and hardware.units > 1:  # else unknown, or a CPU
        seconds = max(seconds, kernel.singly / (hardware.units * hardware.unit_elements))
    return seconds + kernel.launches * hardware.delays.kernel


def _attention_seconds(kernel: Kernel, hardware: Hardware, visible: float, dtype: str) -> float:
    """Seconds of fused attention's arithmetic: NOTE [ Edges of attention ] in `spec.hardware`, if the file has rates.

    cuDNN's FP8 backward skips scores after a query, but none that a window masks (9.22: a window of 128 takes as long
    as none; tests/facts/cudnn_attention.csv).
    """
    reached, backward = hardware.reached, kernel.half is not None
    rates = None if dtype == "float32" else hardware.attention
    low_precision = rates.share("mxfp8", kernel.head_dim, backward=backward) if rates and kernel.fp8_attention else None
    share = low_precision or (rates.share("bf16", kernel.head_dim, backward=backward) if rates else None)
    if rates is None or share is None:
        share = reached.attention_backward if backward else reached.attention
        if kernel.head_dim <= SMALL_HEAD and reached.attention_64 is not None:
            share *= reached.attention_64 / reached.attention
        short = max(0.0, 1 / kernel.keys - 1 / PIECE_KEYS) if kernel.pieces > 1 else 0.0
        return kernel.attention_flops * (visible + PIECE_EDGE * short) / (rate(hardware, dtype) * share)
    if low_precision and backward:
        visible = max(visible, CAUSAL)
    peak = rate(hardware, MXFP8 if low_precision else dtype)
    return kernel.attention_flops * (visible + rates.edge / kernel.keys) / (peak * share)


def op_seconds(op: Op, hardware: Hardware) -> float:
    """Roofline of a recorded op that could not be measured: the larger of its FLOPs' and its bytes' time, and a launch.

    Good enough to rank what is worth recomputing: small or oddly shaped matmuls are off by a factor of two or more.
    fp32 on a CPU, else 16 bits. `UsageError` if the file has no rate or bandwidth.
    """
    dtype = "float32" if hardware.synchronous else "float16"
    arithmetic = op.flops / (rate(hardware, dtype) * hardware.reached.matmul)
    return max(arithmetic, memory_seconds(op.bytes_moved, hardware)) + hardware.delays.kernel
