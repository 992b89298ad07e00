"""The one table of element sizes. Dtypes are named as PyTorch names them, without the ``torch.`` prefix."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError

DTYPE_BYTES: Final = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
        "int16": 2,
        "uint32": 4,
        "int32": 4,
        "uint64": 8,
        "int64": 8,
        "float4_e2m1fn_x2": 1,  # one element holds two 4-bit numbers
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Bytes of one element of each dtype."""


def dtype_name(dtype: object) -> str:
    """Name a dtype: ``"bfloat16"`` for ``"bfloat16"``, ``"torch.bfloat16"`` and for the torch object itself. Raise
    `UsageError` if it is not in the table.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UsageError(f"got the dtype {name!r}; expected one of {', '.join(DTYPE_BYTES)}")
    return name


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element of ``dtype``."""
    return DTYPE_BYTES[dtype_name(dtype)]


def tensor_bytes(shape: Sequence[int], dtype: object) -> int:
    """Bytes of a dense tensor of this shape."""
    return prod(shape) * dtype_bytes(dtype)
