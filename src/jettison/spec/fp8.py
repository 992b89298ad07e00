"""FP8 and FP4 training: quantized copies of weights and inputs that a library makes, and their scales.

NOTE [ Copies in TransformerEngine ]
Version 2.20, with Megatron-Core. TransformerEngine's GEMMs read rows of both factors. The three GEMMs of a linear layer
read its input and its weight by rows and by columns, so that each has a row-wise and a column-wise copy; per-tensor
scaling on Blackwell needs one, since its GEMMs read either (``utils.py``, ``is_non_tn_fp8_gemm_supported``).

- Sizes: ``csrc/quantizer.cpp``, ``create_tensor`` and ``get_scale_shape`` of each quantizer: one byte or half a byte an
  element, and scales whose counts are padded: `scale_shape`. ``blockwise`` scales lines of 128 elements of inputs and
  gradients and squares of 128 x 128 of weights (``Float8BlockScaling``: ``x_block_scaling_dim`` 1,
  ``w_block_scaling_dim`` 2), ``mxfp8`` 32 elements, ``nvfp4`` 16 with an fp32 maximum a tensor.
- Weights: ``module/base.py``, ``quantize_weight``: quantized in a step's first micro-batch and kept in addition to the
  parameter across steps, updated in place (``cache``; Megatron passes ``is_first_microbatch``, unless
  ``disable_parameter_transpose_cache``). Under ``fp8_param`` (``--fp8-param-gather``) they are the parameter.
- Inputs: ``module/linear.py``, ``_linear_forward_impl``: the row-wise copy is freed after the GEMM, the column-wise one
  is saved (``inputmat.update_usage(rowwise_usage=False, columnwise_usage=True)``). Under sequence parallelism a shard
  is saved: by rows with per-tensor scaling, since columns cannot be gathered (``supports_only_rowwise_all_gather``);
  after a norm (``module/layernorm_linear.py``) both under ``nvfp4``, which the condition there omits.
- Megatron saves the 16-bit output of attention instead, which attention saves anyway, and the 16-bit input of shared
  experts, which the router saves (``megatron/core/transformer/attention.py``, ``set_save_original_input``), except
  under ``delayed``; and the output of the experts' activation where it is recomputed (``moe/experts.py``), except that
  of recomputed shared experts.
- Experts: rows of each are padded to 16, under ``mxfp8`` to 32 and ``nvfp4`` to 128 (``megatron/core/fp8_utils.py``,
  ``get_fp8_align_size``; ``fp4_utils.py``), and quantized separately.
- ``delayed`` has a scale and an amax history for five tensors of a GEMM (``quantization.py``,
  ``DelayedScalingRecipeState``; ``module/base.py``: 3 a GEMM forward, 2 backward), of length 1 in Megatron by default.

NOTE [ Copies in torchao ]
``torchao/float8/float8_linear.py``, ``matmul_with_hp_or_float8_args`` (0.18): autograd saves input and weight
unquantized; each GEMM, of the backward too, makes quantized copies and frees them. ``float8_training_tensor.py``,
``_ToFloat8ConstrFunc``, casts through fp32: nine bytes an element at once. ``prototype/moe_training/mxfp8_linear.py``,
``mx_mm``, saves the same two. With ``enable_fsdp_float8_all_gather`` weights are all-gathered in FP8, and stay so while
a unit runs (``fsdp_utils.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.kernels import typed


class Library(StrEnum):
    """Library of the quantized GEMMs."""

    TE = "TransformerEngine"
    TORCHAO = "torchao"


class Scales(StrEnum):
    """Granularity of scales: the elements that share one."""

    TENSOR = "tensor"  # fp32
    ROW = "row"  # fp32
    LINES = "lines of 128"  # fp32
    SQUARES = "squares of 128 x 128"  # fp32
    MX = "32"  # e8m0, one byte
    NV = "16"  # e4m3, one byte, and an fp32 for the tensor


SCALE_DTYPE: Final = MappingProxyType(dict.fromkeys(Scales, "float32") | {Scales.MX: "uint8", Scales.NV: "uint8"})
FP8: Final = "float8_e4m3fn"
MXFP8: Final = "float8_e4m3fn, 32 a scale"
FP8_1X128: Final = "float8_e4m3fn, 128 a scale"
FP4: Final = "float4_e2m1"
"""Dtypes of GEMM inputs in the cost model: a scale per tensor or row, per 32 or 128 elements, and NVFP4."""
QUANTISED_THROUGH_BYTES: Final = 9
"""Bytes of an element while torchao quantizes it: two fp32 copies and the result."""
_MAXIMUM_BYTES: Final = 4


def scale_shape(kind: Scales, rows: int, columns: int, *, columnwise: bool) -> tuple[int, ...]:
    """Shape of the scales of a matrix of rows x columns: ``get_scale_shape`` in ``csrc/quantizer.cpp``."""
    match kind:
        case Scales.TENSOR:
            return (1,)
        case Scales.ROW:
            return (columns if columnwise else rows,)
        case Scales.LINES:
            along, across = (rows, columns) if columnwise else (columns, rows)
            return _blocks(along, 128), _padded(across, 4)
        case Scales.SQUARES:
            first, second = (columns, rows) if columnwise else (rows, columns)
            return _blocks(first, 128), _padded(_blocks(second, 128), 4)
        case Scales.MX if columnwise:
            return _padded(_blocks(rows, 32), 4), _padded(columns, 128)
        case Scales.MX:
            return _padded(rows, 128), _padded(_blocks(columns, 32), 4)
        case Scales.NV:
            first, second = (columns, rows) if columnwise else (rows, columns)
            return _padded(first, 128), _padded(_blocks(second, 16), 4)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _padded(size: int, multiple: int) -> int:
    return _blocks(size, multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """Quantization of GEMM inputs and weights.

    Args:
        inputs, weights: their scales; gradients have those of inputs.
        keeps_original: a linear layer saves its 16-bit input where another op saves that anyway.
    """

    name: str
    library: Library = Library.TE
    bits: int = 8  # of an element
    inputs: Scales = Scales.TENSOR
    weights: Scales = Scales.TENSOR
    either_way: bool = False  # GEMMs read one copy by rows and by columns
    rows_are_gathered: bool = False  # a sharded input is saved by rows
    multiple: int = 16  # rows and columns of every factor are a multiple of it
    expert_rows: int = 16  # rows of an expert are padded to a multiple of it
    keeps_original: bool = True
    history: int = 0  # length of the amax history
    parameters: bool = False  # parameters are quantized, kept and all-gathered, without 16-bit weights
    high_precision_weight_gradient: bool = False  # the weight gradient is a 16-bit GEMM

    @property
    def looks(self) -> int:
        """Reads of a tensor for its amax, or that of its rows, before the read that casts it."""
        return int(self.inputs in (Scales.TENSOR, Scales.ROW, Scales.NV) and not self.history)

    @property
    def gemm_dtype(self) -> str:
        """Dtype of GEMM inputs, as the cost model prices it."""
        if self.bits == 4:
            return FP4
        by = {Scales.MX: MXFP8, Scales.LINES: FP8_1X128}
        return by.get(self.inputs, FP8) if self.library is Library.TE else FP8

    def __str__(self) -> str:
        return f"{self.name} of {self.library}" + (", quantized parameters" if self.parameters else "")

    def copy_bytes(self, kind: Scales, rows: int, columns: int, *, columnwise: bool) -> int:
        """Bytes of one quantized copy with its scales, except a per-tensor scale, which both copies share."""
        data = rows * columns * self.bits // 8
        if kind is Scales.TENSOR:
            return data
        each = 1 if SCALE_DTYPE[kind] == "uint8" else 4
        extra = _MAXIMUM_BYTES if kind is Scales.NV else 0
        return data + each * prod(scale_shape(kind, rows, columns, columnwise=columnwise)) + extra

    def both_bytes(self, kind: Scales, rows: int, columns: int) -> int:
        """Bytes of all that GEMMs read of a matrix by rows and by columns."""
        shared = 4 if kind is Scales.TENSOR else 0
        copies = (False,) if self.either_way else (False, True)
        return shared + sum(self.copy_bytes(kind, rows, columns, columnwise=way) for way in copies)

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the quantized copies of a weight that are kept across steps; ``shape`` is one rank's."""
        if self.library is Library.TORCHAO:
            return 0
        *several, rows, columns = shape
        history = 5 * 4 * (1 + self.history) if self.history else 0
        return prod(several) * (self.both_bytes(self.weights, rows, columns) + history)


RECIPES: Final = MappingProxyType(
    {
        (Library(library), name): Fp8Recipe(name=name, library=Library(library), **typed(Fp8Recipe, fields))
        for library, recipes in read_table(Path(__file__).with_suffix(".toml")).items()
        for name, fields in recipes.items()
    }
)
"""Recipes by library and its name."""


def fp8_recipe(text: str, kernels: str, *, parameters: bool = False) -> Fp8Recipe:
    """Read a recipe such as ``mxfp8``, or ``delayed:1024`` with an amax history of that length. Raise `UsageError` if
    the library has no such recipe.

    Args:
        kernels: the kernel set: Megatron's has TransformerEngine's GEMMs, all others torchao's.
        parameters: parameters are kept, or all-gathered, in FP8.
    """
    library = Library.TE if kernel_set(kernels).te_gemms else Library.TORCHAO
    name, colon, number = text.partition(":")
    found = RECIPES.get((library, name))
    if found is None or (colon and not (found.history and number.isdecimal() and int(number))):
        known = ", ".join(n for at, n in RECIPES if at is library)
        more = ", and delayed:1024 for longer histories" if library is Library.TE else ""
        raise UsageError(f"got --fp8-recipe {text!r} with --kernels {kernels}; {library} has {known}{more}")
    if parameters and library is Library.TORCHAO and name != "tensorwise":
        raise UsageError(f"got --fp8-param-gather with --fp8-recipe {name}; torchao gathers FP8 for tensorwise only")
    return replace(found, parameters=parameters, history=int(number) if colon else found.history)


Rule = tuple[str, Fp8Recipe]
"""A glob and the recipe of GEMMs that match it: NOTE [ Recipes of single GEMMs ] in `model_variants`."""
BF16_GEMMS: Final = Fp8Recipe(name="bf16", bits=16)
"""Recipe of a GEMM that stays in 16 bits."""


def rule_for(rules: tuple[Rule, ...], path: str) -> Fp8Recipe | None:
    """Return the recipe of the first glob that matches a GEMM's path; None: the run's."""
    return next((recipe for glob, recipe in rules if fnmatchcase(path, glob) or fnmatchcase(path, f"*.{glob}")), None)
