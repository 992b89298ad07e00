"""Saved copies and workspace of FP8/FP4 matmuls: NOTE [ Copies in TransformerEngine ] in `spec.fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from jettison.formula.tape import Saved, Value, Weight, Writer
from jettison.spec.fp8 import QUANTISED_THROUGH_BYTES, SCALE_DTYPE, Fp8Recipe, Library, Scales, scale_shape

QUANTISE, PAD = "quantise.fp8", "pad.rows"
SCALE_ROLE = "scales of linear input"
SCALED_BYTES: Final = 12
"""Bytes for each element of a result while it is scaled: the matrix of scales, and the result in fp32 twice."""
_WIDE: Final = 2
"""Bytes of an element of a gradient that a backward returns."""
_NORMED = frozenset({"qkv", "query", "key", "value", "gate", "up", "gate_up", "key_value"})
"""Linear layers that TransformerEngine fuses with the norm before them, if Megatron builds a dense layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedMatmul:
    """Tensors that one matmul saves, and bytes that live only during its backward."""

    saves: tuple[Saved, ...]
    workspace: int


def quantized_matmul(
    w: Writer, x: Value, kept: Value, features: int, name: str, role: str, *, original: bool
) -> QuantizedMatmul:
    """A linear layer's matmul under the run's recipe.

    Args:
        x: its input; ``kept``: the part saved for backward, a shard if backward all-gathers it again.
        features: of its result on one rank.
        original: another op also saves ``kept`` unquantized.
    """
    recipe = w.recipe
    assert recipe is not None
    rows, columns = prod(x.local_shape[:-1]), x.local_shape[-1]
    if recipe.library is Library.TORCHAO:
        return QuantizedMatmul(saves=(Saved(kept, role),), workspace=torchao_bytes(recipe, rows, columns, features))
    gathered = kept.index != x.index
    gradient = recipe.both_bytes(recipe.inputs, rows, features)
    again = recipe.both_bytes(recipe.inputs, rows, columns) if gathered else 0
    if original and recipe.keeps_original:
        again = recipe.both_bytes(recipe.inputs, rows, columns)
        return QuantizedMatmul(saves=(Saved(kept, role),), workspace=gradient + again)
    both = gathered and name in _NORMED and recipe.inputs is Scales.NV
    columnwise = not recipe.either_way and not (gathered and recipe.rows_are_gathered)
    return QuantizedMatmul(
        saves=_copies(w, recipe, kept, role, columnwise=columnwise, both=both), workspace=gradient + again
    )


def quantized_rows(w: Writer, x: Value, weight: Weight, experts: int, role: str, *, original: bool) -> QuantizedMatmul:
    """The grouped matmul of rows with their experts' matrices: each expert's rows are quantized separately, by columns.

    Args:
        original: save the rows unquantized; backward quantizes them again.
    """
    recipe = w.recipe
    assert recipe is not None
    rows, columns = x.local_shape
    features = weight.numel // (experts * columns)
    each = rows // experts
    gradient = experts * recipe.both_bytes(recipe.inputs, each, features)
    if original:
        again = experts * recipe.both_bytes(recipe.inputs, each, columns)
        return QuantizedMatmul(saves=(Saved(x, role),), workspace=gradient + again)
    saves = _copies(w, recipe, x, role, columnwise=not recipe.either_way, both=False, experts=experts)
    return QuantizedMatmul(saves=saves, workspace=gradient)


def _copies(
    w: Writer, recipe: Fp8Recipe, x: Value, role: str, *, columnwise: bool, both: bool, experts: int = 1
) -> tuple[Saved, ...]:
    """Quantized copies by rows and by columns; one of them is saved, or both."""
    rows, columns = prod(x.local_shape[:-1]) // experts, x.local_shape[-1]
    made: list[Value] = []
    kept: list[Saved] = []
    for way in (columnwise,) if recipe.either_way else (columnwise, not columnwise):
        data, scales = _data(w, recipe, x), _scales(w, recipe, rows, columns, columnwise=way, experts=experts)
        made += [data, *scales]
        if way is columnwise or both:
            kept += [Saved(data, role), *(Saved(each, SCALE_ROLE) for each in scales)]
    w.tape.record(QUANTISE, [x], made)
    return tuple(kept)


def _data(w: Writer, recipe: Fp8Recipe, x: Value) -> Value:
    """Quantized data; at 4 bits two numbers share a byte."""
    if recipe.bits == 8:
        return w.tape.empty(x.shape, "float8_e4m3fn", x.places)
    return w.tape.empty((*x.shape[:-1], x.shape[-1] // 2), "uint8", x.places)


def _scales(
    w: Writer, recipe: Fp8Recipe, rows: int, columns: int, *, columnwise: bool, experts: int
) -> tuple[Value, ...]:
    """Scales of one rank; their padding depends on its shard."""
    shape = scale_shape(recipe.inputs, rows, columns, columnwise=columnwise)
    shape = shape if experts == 1 else (experts, *shape)
    found = w.tape.empty(shape, SCALE_DTYPE[recipe.inputs])
    if recipe.inputs is not Scales.NV:
        return (found,)
    return found, w.tape.empty((experts,), "float32")


def torchao_bytes(recipe: Fp8Recipe, rows: int, columns: int, features: int) -> int:
    """Workspace of a backward in addition to both gradients: NOTE [ Copies in torchao ] in `spec.fp8`.

    Copies of gradient, weight and input are held until the end. `float8_ops.py`, ``preprocess_addmm``, copies
    column-major operands again; ``addmm_float8_unwrapped`` scales a row-wise result by a matrix of scales.
    MX tensors have not been read: they count as if they had one scale.
    """
    g, weight, x = rows * features, features * columns, rows * columns
    through, scaled = QUANTISED_THROUGH_BYTES, SCALED_BYTES if recipe.inputs is Scales.ROW else 0
    returned, made = _WIDE * x, _WIDE * weight
    moments = [through * g, g + through * weight, g + 2 * weight + returned + scaled * x]
    if recipe.high_precision_weight_gradient:
        moments += [g + weight + returned + made]
    else:
        moments += [
            g + weight + returned + through * g,
            2 * g + weight + returned + through * x,
            3 * g + weight + 2 * x + returned + made + scaled * weight,
        ]
    return max(0, max(moments) - returned - made)


def padded(w: Writer, x: Value, experts: int) -> Value:
    """Rows of each expert padded to the recipe's multiple: Megatron's ``Fp8Padding``. Even shares."""
    recipe = w.recipe
    if recipe is None or recipe.library is not Library.TE:
        return x
    each = -(-x.local_shape[0] // experts)
    local = experts * (-(-each // recipe.expert_rows) * recipe.expert_rows)
    if local == x.local_shape[0]:
        return x
    ranks = prod(w.tape.mesh.get(axis, 1) for axis, dim in x.places if dim == 0)
    return w.tape.op(PAD, [x], (local * ranks, *x.shape[1:]))


def unpadded(w: Writer, x: Value, rows: int) -> Value:
    """Undo `padded`; ``rows`` counts all ranks."""
    return x if x.shape[0] == rows else w.tape.op(PAD, [x], (rows, *x.shape[1:]))
