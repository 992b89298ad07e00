"""The one table of element sizes. Dtypes are named as PyTorch names them, without the ``torch.`` prefix."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import MappingProxyType
from typing import Final

from jettison.core.errors import known

_BY_BYTES: Final = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
DTYPE_BYTES: Final = MappingProxyType({name: size for size, names in _BY_BYTES.items() for name in names.split()})
"""Bytes of one element of each dtype; that of ``float4_e2m1fn_x2`` holds two 4-bit numbers."""


def dtype_name(dtype: object) -> str:
    """Name a dtype: ``"bfloat16"``, ``"torch.bfloat16"`` or torch's object. Raise `UsageError` for an unknown one."""
    return known(str(dtype).removeprefix("torch."), DTYPE_BYTES, "the dtype")


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element of ``dtype``."""
    return DTYPE_BYTES[dtype_name(dtype)]


def tensor_bytes(shape: Sequence[int], dtype: object) -> int:
    """Bytes of a dense tensor of this shape."""
    return prod(shape) * dtype_bytes(dtype)
