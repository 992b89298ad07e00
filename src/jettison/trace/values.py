"""Fake tensors for everything large, real values for everything that a forward may look at.

A model may read its inputs ("is any token masked?") and take another path. Fake tensors have no values to read, so a
purely fake trace can take a path that training never takes. `RealUntilFake` keeps ops whose arguments are all real on
real tensors (ids, masks, position tables), and lets everything that meets a fake tensor (weights, hidden states) be
fake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from jettison.trace.wrapped import desugars


class RealUntilFake(TorchDispatchMode):
    """Runs an op on real tensors where every tensor argument is real; stands above a `FakeTensorMode`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        has_real = False
        for leaf in arg_tree_leaves(*args, **kwargs):
            if isinstance(leaf, FakeTensor):
                return func(*args, **kwargs)
            if isinstance(leaf, torch.Tensor):
                has_real = True
        # random or not yet written: no forward decides anything by such values, and they may be as large as activations
        if not has_real and (torch.Tag.nondeterministic_seeded in func.tags or _is_empty_float(func, kwargs)):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_empty_float(func: Any, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return func._schema.name in ("aten::empty", "aten::empty_strided") and dtype.is_floating_point


@contextlib.contextmanager
def tracing(mode: FakeTensorMode, *, values_known: bool) -> Iterator[None]:
    """Everything inside allocates no model memory and leaves every random generator as it was.

    Args:
        values_known: the batch is real, so that what depends on it alone is computed for real.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices()))
        stack.enter_context(mode)
        if values_known:
            stack.enter_context(RealUntilFake())
        yield


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
