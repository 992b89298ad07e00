"""FLOPs of the operators in a trace, from the shapes that the profiler wrote down. A multiply-add is 2."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

_FORWARD: Final = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
_BACKWARD: Final = tuple(f"{name}_backward" for name in _FORWARD)


def op_flops(name: str, args: Mapping[str, Any]) -> int:
    """Return FLOPs of matmuls and fused attention, causal or not; 0 for all else, and without shapes."""
    dims = args.get("Input Dims")
    if not isinstance(dims, list):
        return 0
    shapes = [one for one in dims if _is_shape(one)]
    if name in ("aten::mm", "aten::bmm") and len(shapes) >= 2:
        return _product(shapes[0], shapes[1])
    if name in ("aten::addmm", "aten::baddbmm") and len(shapes) >= 3:
        return _product(shapes[1], shapes[2])
    if name in _FORWARD and len(shapes) >= 3:
        return _scores(shapes[0], shapes[1]) + _values(shapes[0], shapes[1], shapes[2])
    if name in _BACKWARD and len(shapes) >= 4:  # the scores again and two more of their size; two of the values'
        q, k, v = shapes[1:4]
        return 3 * _scores(q, k) + 2 * _values(q, k, v)
    return 0


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def _product(a: list[int], b: list[int]) -> int:
    return 2 * prod(a) * b[-1] if a[-1] == b[-2 if len(b) > 1 else 0] else 0


def _scores(q: list[int], k: list[int]) -> int:
    return 2 * prod(q) * k[-2] if len(k) > 1 else 0


def _values(q: list[int], k: list[int], v: list[int]) -> int:
    return 2 * prod(q[:-1]) * k[-2] * v[-1] if len(k) > 1 else 0
