"""Normalisations: LayerNorm and RMSNorm, as one kernel or written out op by op."""

from __future__ import annotations

from jettison.formula.ops import cast, multiply, power, weigh
from jettison.formula.tape import Places, Saved, Value, Weight, Writer
from jettison.spec.kernels import Device
from jettison.spec.model import Norm, NormKind

REFERENCE = "arXiv 2205.05198 §4.1, layer norm: the input, 2sbh"
STATISTICS = "left out of the equations: one number a row"


def norm(w: Writer, x: Value, spec: Norm, name: str, *, split: bool = False, apiece: bool = False) -> Value:
    """Normalise the last dim of x.

    Args:
        split: the weight is sharded over tp like its input.
        apiece: one weight for each head; x is b × heads × s × d.
    """
    size = x.shape[-1]
    with w.tape.scope(name):
        if not spec.weight:
            if spec.kind is NormKind.RMS and not w.kernels.fused_norm:
                return cast(w, root_mean_square(w, x), x.dtype)
            return cast(w, _fused(w, cast(w, x, "float32") if w.kernels.fp32_norm_scale else x, spec, []), x.dtype)
        shape = (x.shape[1], size) if apiece else (size,)
        weight = w.parameter("weight", *shape, split=0 if split or apiece else None)
        weights = [weight] + ([w.parameter("bias", size)] if spec.bias else [])
        if spec.kind is NormKind.LAYER and w.kernels.eager_layer_norm:
            return _written_layer(w, x, weight)
        if spec.kind is NormKind.LAYER and spec.offset:
            return _fused(w, x, spec, weights, shifted=_shifted(w, weight, w.held(frozen=weight.frozen)))
        if spec.kind is NormKind.LAYER or w.kernels.fused_norm:
            return _fused(w, x, spec, weights, apiece=apiece)
        normal = root_mean_square(w, x)
        if spec.offset:  # (x / rms(x) * (1 + weight)).to(dtype), all in fp32: transformers' GemmaRMSNorm
            shifted = _shifted(w, weight, "float32")
            return cast(w, multiply(w, normal, shifted, ("normalised input", "norm weight")), x.dtype)
        if w.kernels.fp32_norm_scale:  # (weight * x / rms(x)).to(dtype), all in fp32: transformers' Olmo2RMSNorm
            return cast(w, _weighed_wide(w, normal, weight), x.dtype)
        # weight * (x / rms(x)).to(dtype): transformers' LlamaRMSNorm. The normalised value is saved for the weight
        return weigh(w, cast(w, normal, x.dtype), weight, "normalised input")


def statistics_dtype(w: Writer, x: Value) -> str:
    """Dtype of a fused norm's statistics: fp32 on CUDA, the weight's on the CPU, which is fp32 under autocast."""
    return x.dtype if w.kernels.device is Device.CPU and not w.run.precision.casts else "float32"


def _fused(
    w: Writer, x: Value, spec: Norm, weights: list[Weight], shifted: Value | None = None, *, apiece: bool = False
) -> Value:
    """One kernel: input and statistics are saved.

    Args:
        shifted: 1 + weight, which is saved as well.
        apiece: one kernel for each head.
    """
    if w.listed:
        x = cast(w, x, "float32")
    dtype = statistics_dtype(w, x)
    out = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad or any(not weight.frozen for weight in weights))
    layer = spec.kind is NormKind.LAYER
    rows, places = _row_numbers(x)
    count = 2 if layer else 1
    if apiece:
        count, rows = count * x.local_shape[1], (rows[0], 1, *rows[2:])
        places = tuple(p for p in places if p[1] != 1)
    statistics = [w.tape.empty(rows, dtype, places) for _ in range(count)]
    w.tape.record(
        "aten.native_layer_norm.default" if layer else "aten._fused_rms_norm.default",
        [x],
        [out, *statistics],
        saves=[
            Saved(x, "norm input", REFERENCE),
            *(Saved(v, "norm statistics", STATISTICS) for v in statistics),
            *([Saved(shifted, "norm input")] if shifted is not None else []),
        ],
        weights=weights,
    )
    return out


def _row_numbers(x: Value) -> tuple[tuple[int, ...], Places]:
    """Shape and placement of one number for each row of x."""
    return (*x.shape[:-1], 1), tuple(p for p in x.places if p[1] != len(x.shape) - 1)


def root_mean_square(w: Writer, x: Value) -> Value:
    """x / rms(x) in fp32, op by op: the fp32 copy and the reciprocal root are saved."""
    wide, (rows, places) = cast(w, x, "float32"), _row_numbers(x)
    square = power(w, wide, "norm input", REFERENCE)
    mean = w.tape.op("aten.mean.dim", [square], rows, places=places)
    root = _reciprocal_root(w, mean)
    return multiply(
        w, x if w.kernels.fp32_norm_statistics else wide, root, ("norm input", "norm statistics"), "float32"
    )


def _reciprocal_root(w: Writer, mean: Value) -> Value:
    shifted = w.tape.op("aten.add.Tensor", [mean], passes=True)
    return w.tape.op("aten.rsqrt.default", [shifted], keeps="norm statistics", reference=STATISTICS)


def _weighed_wide(w: Writer, normal: Value, weight: Weight) -> Value:
    """Multiply by the weight in fp32; a weight cast for that is saved for the gradient of the normalised input."""
    if not w.kernels.cast_weights or w.held(frozen=weight.frozen) == "float32":
        return weigh(w, normal, weight, "normalised input")
    wide = w.tape.op("aten._to_copy.default", [w.read(weight)], dtype="float32", weights=[weight])
    return multiply(w, normal, wide, ("normalised input", "normalised input"))


def _written_layer(w: Writer, x: Value, weight: Weight) -> Value:
    """weight * (x - mean) / sqrt(variance), all in fp32: transformers' CohereLayerNorm, which subtracts twice."""
    wide, (rows, places) = cast(w, x, "float32"), _row_numbers(x)
    mean = w.tape.op("aten.mean.dim", [wide], rows, places=places)
    square = power(w, w.tape.op("aten.sub.Tensor", [wide, mean]), "norm input", REFERENCE)
    variance = w.tape.op("aten.mean.dim", [square], rows, places=places)
    root = _reciprocal_root(w, variance)
    centred = w.tape.op("aten.sub.Tensor", [wide, mean])
    normal = multiply(w, centred, root, ("normalised input", "norm statistics"))
    return cast(w, _weighed_wide(w, normal, weight), x.dtype)


def _shifted(w: Writer, weight: Weight, dtype: str) -> Value:
    """1 + weight, computed in each call."""
    return w.tape.op("aten.add.Tensor", [cast(w, w.read(weight), dtype)], passes=True, weights=[weight])
