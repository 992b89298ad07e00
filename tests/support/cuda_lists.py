"""Ops that torch.autocast runs in fp32 on CUDA and not on a CPU, given to the CPU for a while.

``ATen/autocast_mode.h`` of torch 2.13, ``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE``: those of them that
models of transformers call. What is eligible there is any tensor of floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_ATEN = torch.ops.aten
_CAST: tuple[OpOverload, ...] = (
    _ATEN.exp.default,
    _ATEN.log.default,
    _ATEN.log1p.default,
    _ATEN.rsqrt.default,
    _ATEN.reciprocal.default,
    _ATEN.pow.Tensor_Scalar,
    _ATEN.pow.Tensor_Tensor,
    _ATEN.pow.Scalar,
    _ATEN.softplus.default,
    _ATEN.layer_norm.default,
    _ATEN.native_layer_norm.default,
    _ATEN.rms_norm.default,
    _ATEN.group_norm.default,
)
_ASKED: tuple[OpOverload, ...] = (
    _ATEN.softmax.int,
    _ATEN.log_softmax.int,
    _ATEN.cumsum.default,
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
)
"""These take the dtype of their result."""
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.to(torch.float32) if narrow else value


def _casting(op: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE):
            return op(*map(_widened, args), **kwargs)

    return run


def _asking(op: OpOverload) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given["self"].is_floating_point() and given.get("dtype") is None:
            given["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE):
            return op(given.pop("self"), **given)

    return run


@contextmanager
def cuda_lists() -> Iterator[None]:
    """Within it ``torch.autocast("cpu")`` casts for these ops as ``torch.autocast("cuda")`` does."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        for ops, kernel in ((_CAST, _casting), (_ASKED, _asking)):
            for op in ops:
                library.impl(op, kernel(op))
        yield
    finally:
        library._destroy()
