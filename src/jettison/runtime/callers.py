"""Callers of a planned forward: its module, a shallow copy of it, a compiler, a transform; and foreign hooks."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

Pack = TypeVar("Pack", bound=Callable[..., Any])

_FILE = nn.Module._call_impl.__code__.co_filename
_NAMES = frozenset(("_call_impl", "inner", "_slow_forward"))  # functions of nn.Module that call ``self.forward``
_FAR = 8  # most frames between a compiled module's call and its planned forward


def whose_copy(planned: Any, *, compiled: bool = False) -> nn.Module | None:
    """Return the shallow copy of a planned module whose ``__call__`` is running, if any; a compiler's frames may be in
    between. A shallow copy has the attributes of the original, and so its planned forward, which only knows the
    original; the calling frame tells them apart. A direct ``.forward(...)`` counts as the original's.
    """
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_FAR if compiled else 1):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in _NAMES and code.co_filename == _FILE:  # reading other frames' locals would extend their life
            found = frame.f_locals.get("self")
            is_copy = isinstance(found, nn.Module) and found is not planned.module
            return found if is_copy and vars(found).get("forward") is planned else None
        frame = frame.f_back
    return None


def is_compiled_training() -> bool:
    """Whether `torch.compile` is compiling, with gradients: an exporter takes the plain forward."""
    # torch.compiler.is_exporting() is always true while torch 2.11 compiles
    exporting = torch.compiler._is_exporting_flag
    return torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling() and not exporting


def is_transforming() -> bool:
    """Whether `torch.func` transforms or forward-mode differentiation run, which save no tensors, or others."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


FOREIGN_HOOKS: Final = (
    "under saved-tensor hooks of somebody else's (torch.autograd.graph: save_on_cpu, allow_mutation_on_saved_tensors; "
    "torch.utils.checkpoint), or where torch allows none (disable_saved_tensors_hooks)"
)


def are_hooks_foreign() -> bool:
    """Whether saved tensors pass hooks as `FOREIGN_HOOKS` describes. Our own have a mark: ``of_a_region``."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return True
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not getattr(top[0], "of_a_region", False)


def switches_hooks_off(error: BaseException) -> bool:
    """Whether an error comes from `torch.autograd.graph.disable_saved_tensors_hooks`."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return found is not None and found.tb_frame.f_code.co_name == "disable_saved_tensors_hooks"


def of_a_region(pack: Pack) -> Pack:
    """Mark a hook as ours."""
    pack.of_a_region = True  # type: ignore[attr-defined]
    return pack
