"""Training with narrow products: which copies of weights and inputs a library makes of 8 or 4 bits, and what scales.

NOTE [ Copies in TransformerEngine ]
Of version 2.20, with Megatron-Core. A product of TransformerEngine's reads rows of both factors. Three products of a
linear layer read its input and its weight by rows and by columns, so that there is a copy of each for both, but for one
scale a tensor on Blackwell, whose products read either way (``utils.py``, ``is_non_tn_fp8_gemm_supported``).

- Sizes: ``csrc/quantizer.cpp``, ``create_tensor`` and ``get_scale_shape`` of each quantizer: a byte or half of one a
  number, beside scales whose counts are padded: `scale_shape`. Inputs and gradients in lines of 128 and weights in
  squares of 128 x 128 under ``blockwise`` (``Float8BlockScaling``: ``x_block_scaling_dim`` 1, ``w_block_scaling_dim``
  2); 32 numbers a scale under ``mxfp8``, 16 under ``nvfp4``, with an fp32 maximum a tensor.
- Weights: ``module/base.py``, ``quantize_weight``: made in a step's first micro-batch, updated in place later and kept
  for good beside the parameter (``cache``; Megatron says ``is_first_microbatch``, unless
  ``disable_parameter_transpose_cache``). Under ``fp8_param`` (``--fp8-param-gather``) they are the parameter.
- Inputs: ``module/linear.py``, ``_linear_forward_impl``: rows are let go of after the product, columns stay
  (``inputmat.update_usage(rowwise_usage=False, columnwise_usage=True)``). Under sequence parallelism a shard stays: its
  rows with one scale a tensor, since columns cannot be gathered (``supports_only_rowwise_all_gather``); behind a norm
  (``module/layernorm_linear.py``) both under ``nvfp4``, which the condition there does not name.
- Megatron keeps the 16-bit output of attention instead, which attention keeps anyway, and of shared experts the input,
  which the router keeps (``megatron/core/transformer/attention.py``, ``set_save_original_input``), not under
  ``delayed``. Of what experts' activation returns as well, where that is computed again (``moe/experts.py``), and not
  of shared experts that are.
- Experts: rows of each are padded to 16, under ``mxfp8`` to 32 and ``nvfp4`` to 128 (``megatron/core/fp8_utils.py``,
  ``get_fp8_align_size``; ``fp4_utils.py``), and quantised apart.
- ``delayed`` has a scale and a history of maxima for five tensors of a product (``quantization.py``,
  ``DelayedScalingRecipeState``; ``module/base.py``: 3 a product forward, 2 backward), in Megatron one long by default.

NOTE [ Copies in torchao ]
``torchao/float8/float8_linear.py``, ``matmul_with_hp_or_float8_args`` (0.18): autograd is given input and weight
as they are; copies are made for each product, in backward again, and let go of. ``float8_training_tensor.py``,
``_ToFloat8ConstrFunc``: through fp32, which is nine bytes a number at once. ``prototype/moe_training/mxfp8_linear.py``,
``mx_mm``, keeps the same two. With ``enable_fsdp_float8_all_gather`` weights travel as bytes, and stay so while a unit
runs (``fsdp_utils.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.kernels import kernels as kernel_set


class Library(StrEnum):
    """Whose products."""

    TE = "TransformerEngine"
    TORCHAO = "torchao"


class Scales(StrEnum):
    """How many numbers have one scale."""

    TENSOR = "tensor"  # all: one fp32
    ROW = "row"  # a row: fp32
    LINES = "lines of 128"  # fp32
    SQUARES = "squares of 128 x 128"  # fp32
    MX = "32"  # a byte that is an exponent
    NV = "16"  # a byte in e4m3, and an fp32 for the tensor


SCALE_DTYPE: Final = MappingProxyType(dict.fromkeys(Scales, "float32") | {Scales.MX: "uint8", Scales.NV: "uint8"})
NARROW: Final = "float8_e4m3fn"
NARROW_MX: Final = "float8_e4m3fn, 32 a scale"
NARROW_LINES: Final = "float8_e4m3fn, 128 a scale"
NARROW_4: Final = "float4_e2m1"
"""Of products, as they are priced: one scale a tensor or a row, scales of 32 or 128 numbers, and NVFP4."""
QUANTISED_THROUGH_BYTES: Final = 9
"""Of a number, while torchao quantises it: two fp32 copies and the result."""
_MAXIMUM_BYTES: Final = 4


def scale_shape(kind: Scales, rows: int, columns: int, *, columnwise: bool) -> tuple[int, ...]:
    """Of a matrix of rows x columns: ``get_scale_shape`` in ``csrc/quantizer.cpp``."""
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
    """How products are made narrow.

    Args:
        inputs, weights: their scales; of gradients those of inputs.
        keeps_original: where the 16-bit input of a product is kept by another op anyway, it is that which stays.
    """

    name: str
    library: Library = Library.TE
    bits: int = 8  # of a number
    inputs: Scales = Scales.TENSOR
    weights: Scales = Scales.TENSOR
    either_way: bool = False  # products read one copy by rows and by columns
    rows_are_gathered: bool = False  # a sharded input stays by rows
    multiple: int = 16  # what rows and columns of every factor have to be a multiple of
    expert_rows: int = 16  # what an expert's rows are padded to
    keeps_original: bool = True
    history: int = 0  # maxima that are remembered of each tensor
    parameters: bool = False  # weights are held, and gathered, as copies alone
    wide_weight_gradient: bool = False  # a weight's gradient is a product of 16-bit tensors

    @property
    def looks(self) -> int:
        """Reads of a tensor for a magnitude of all of it, or of a row, before the one that casts it."""
        return int(self.inputs in (Scales.TENSOR, Scales.ROW, Scales.NV) and not self.history)

    @property
    def product(self) -> str:
        """What products read, as they are priced."""
        if self.bits == 4:
            return NARROW_4
        by = {Scales.MX: NARROW_MX, Scales.LINES: NARROW_LINES}
        return by.get(self.inputs, NARROW) if self.library is Library.TE else NARROW

    def __str__(self) -> str:
        return f"{self.name} of {self.library}" + (", weights held so" if self.parameters else "")

    def copy_bytes(self, kind: Scales, rows: int, columns: int, *, columnwise: bool) -> int:
        """Of one copy, its scales among it; one scale a tensor is shared by both copies and is not."""
        data = rows * columns * self.bits // 8
        if kind is Scales.TENSOR:
            return data
        each = 1 if SCALE_DTYPE[kind] == "uint8" else 4
        extra = _MAXIMUM_BYTES if kind is Scales.NV else 0
        return data + each * prod(scale_shape(kind, rows, columns, columnwise=columnwise)) + extra

    def both_bytes(self, kind: Scales, rows: int, columns: int) -> int:
        """Of what products read of a matrix both ways."""
        shared = 4 if kind is Scales.TENSOR else 0
        copies = (False,) if self.either_way else (False, True)
        return shared + sum(self.copy_bytes(kind, rows, columns, columnwise=way) for way in copies)

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        """Of what is held of a matrix for good, beside its parameter or as it; ``shape`` is one rank's."""
        if self.library is Library.TORCHAO:
            return 0
        *several, rows, columns = shape
        history = 5 * 4 * (1 + self.history) if self.history else 0
        return prod(several) * (self.both_bytes(self.weights, rows, columns) + history)


_BLACKWELL: Final = "-blackwell"
_DELAYED: Final = Fp8Recipe(name="delayed", rows_are_gathered=True, keeps_original=False, history=1)
_TENSORWISE: Final = Fp8Recipe(name="tensorwise", rows_are_gathered=True)
RECIPES: Final = MappingProxyType(
    {
        (r.library, r.name): r
        for r in (
            _DELAYED,
            replace(_DELAYED, name=_DELAYED.name + _BLACKWELL, either_way=True),
            _TENSORWISE,
            replace(_TENSORWISE, name=_TENSORWISE.name + _BLACKWELL, either_way=True),
            Fp8Recipe(name="blockwise", inputs=Scales.LINES, weights=Scales.SQUARES),
            Fp8Recipe(name="mxfp8", inputs=Scales.MX, weights=Scales.MX, multiple=32, expert_rows=32),
            Fp8Recipe(name="nvfp4", bits=4, inputs=Scales.NV, weights=Scales.NV, expert_rows=128),
            Fp8Recipe(name="tensorwise", library=Library.TORCHAO),
            Fp8Recipe(name="rowwise", library=Library.TORCHAO, inputs=Scales.ROW, weights=Scales.ROW),
            Fp8Recipe(
                name="rowwise_with_gw_hp",
                library=Library.TORCHAO,
                inputs=Scales.ROW,
                weights=Scales.ROW,
                wide_weight_gradient=True,
            ),
            Fp8Recipe(name="mxfp8", library=Library.TORCHAO, inputs=Scales.MX, weights=Scales.MX),
        )
    }
)
"""By library and by its own word; but for ``nvfp4``, which Megatron calls --fp4-recipe, and what ends in -blackwell."""


def fp8_recipe(text: str, kernels: str, *, parameters: bool = False) -> Fp8Recipe:
    """Read ``mxfp8``, or ``delayed:1024`` with so many maxima.

    Args:
        kernels: whose code runs: Megatron's has TransformerEngine's products, all others torchao's.
        parameters: weights are held, or gathered, as bytes.

    Raises:
        UsageError: the library has no such recipe.
    """
    library = Library.TE if kernel_set(kernels).te_products else Library.TORCHAO
    name, colon, number = text.partition(":")
    found = RECIPES.get((library, name))
    if found is None or (colon and not (found.history and number.isdecimal() and int(number))):
        known = ", ".join(n for at, n in RECIPES if at is library)
        more = ", and delayed:1024 for longer histories" if library is Library.TE else ""
        raise UsageError(f"got --fp8-recipe {text!r} with --kernels {kernels}; {library} has {known}{more}")
    if parameters and library is Library.TORCHAO and name != "tensorwise":
        raise UsageError(f"got --fp8-param-gather with --fp8-recipe {name}; torchao gathers bytes for tensorwise alone")
    return replace(found, parameters=parameters, history=int(number) if colon else found.history)


Rule = tuple[str, Fp8Recipe]
"""A glob, and what products that it fits are done by: NOTE [ Other products ] in `model_variants`."""
WIDE: Final = Fp8Recipe(name="bf16", bits=16)
"""Of a product that stays in 16 bits."""


def rule_for(rules: tuple[Rule, ...], path: str) -> Fp8Recipe | None:
    """The recipe of the first glob that a product's path fits; None: the run's."""
    return next((recipe for glob, recipe in rules if fnmatchcase(path, glob) or fnmatchcase(path, f"*.{glob}")), None)
