"""Rotary positions of queries and keys, and the tables that they read."""

from __future__ import annotations

from jettison.formula.basic import add, cast, multiply
from jettison.formula.tape import Value
from jettison.formula.writer import Writer


def rotate(w: Writer, x: Value, dim: int, whose: str = "") -> Value:
    """Rotary positions (arXiv 2104.09864) on the first ``dim`` of each head; backward needs the tables only."""
    casts = w.run.precision.casts is not None
    wide = w.kernels.wide_rotary or (casts and not w.kernels.rotary_apiece)  # those tables take the dtype of keys
    dtype = "float32" if wide else x.dtype
    back = w.kernels.complex_rotary or (w.kernels.wide_rotary and not w.kernels.wide_scores)
    narrow = dtype if casts and not back else x.dtype  # what comes out
    cosine, sine = (_table(w, f"rotary {name}", dim, dtype, whose) for name in ("cosine", "sine"))
    if w.kernels.fused_rotary:
        return w.tape.op("rotary", [x, cosine, sine])
    part = x if dim == x.shape[-1] else w.tape.view(x, (*x.shape[:-1], dim))
    if w.kernels.narrow_tables:
        part, dtype = cast(w, part, "float32"), "float32"
    straight = multiply(w, part, cosine, ("", "rotary table"), dtype)
    half = w.tape.op("aten.neg.default", [part], (*part.shape[:-1], dim // 2), workspace=_still_joined(w, part) // 2)
    turned = w.tape.op("aten.cat.default", [half, part], part.shape)
    out = cast(w, add(w, straight, multiply(w, turned, sine, ("", "rotary table"), dtype)), narrow)
    if dim == x.shape[-1] and not w.kernels.joined_rotary:
        return out
    return w.tape.op("aten.cat.default", [out, x], x.shape)


def _still_joined(w: Writer, x: Value) -> int:
    """Bytes of the turned halves' joint gradient, of which the half that was not negated is a view to the end.

    ``transformers/models/llama/modeling_llama.py``, ``rotate_half``: backward goes through ``-x2`` and its slice before
    that of ``x1``, whose gradient is a piece of what ``torch.cat`` was given. Other forms have no such pair.
    """
    return 0 if w.kernels.complex_rotary or w.kernels.paired_rotary or not w.kernels.of_transformers else x.nbytes


def _table(w: Writer, name: str, dim: int, dtype: str, whose: str) -> Value:
    """Cosines or sines: what all layers read, or a block's own, which it makes once, or once for what it rotates."""
    if w.kernels.looked_up_rotary and w.run.packed:
        return _looked_up(w, name, dim, whose)
    if not w.kernels.spread_rotary or w.kernels.fused_rotary:
        return w.table(name, (w.run.seq, dim), dtype)
    key = f"{whose} {name}" if w.kernels.rotary_apiece else name
    if key not in w.spread:
        narrow = w.table(name, (w.run.seq, dim // 2), dtype)
        w.spread[key] = w.tape.op("aten.repeat_interleave.self_int", [narrow], (w.run.seq, dim))
    return w.spread[key]


def _looked_up(w: Writer, name: str, dim: int, whose: str) -> Value:
    """Half of the rows that positions name, b × s × d in all: a view, since cosines and sines lie side by side."""
    shape = (w.run.micro_batch, w.run.seq, dim)
    if whose not in w.spread:
        rows = w.table("rotary table", (w.run.model.max_positions, dim), "float32")
        w.spread[whose] = w.tape.op("aten.index.Tensor", [rows], shape, "float32")
    return w.tape.view(w.spread[whose], (*shape[:-1], dim // 2))
