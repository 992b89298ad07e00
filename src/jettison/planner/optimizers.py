"""Several optimizers as one: a step of all of them is dry-run, and each of them is known to what watches the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from jettison.core.errors import UsageError

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What ``optimizer=`` takes."""


class Together(torch.optim.Optimizer):
    """Of several (two networks', one for each kind of parameters), which step one after the other. It has nothing of
    its own.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Any:
        """Of all."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:
        """Of all."""
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    def step(self, closure: Any = None) -> None:
        """Of each."""
        for one in self.optimizers:
            one.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def __getstate__(self) -> Any:
        return self.optimizers

    def __setstate__(self, optimizers: Any) -> None:
        self.optimizers = optimizers


def as_one(optimizer: Optimizers) -> torch.optim.Optimizer | None:
    """What was given as ``optimizer=``, as one that steps.

    Raises:
        UsageError: something among several is no optimizer.
    """
    if not isinstance(optimizer, list | tuple):
        return _own(optimizer)  # what is none is refused later, in words
    for one in optimizer:
        if not isinstance(one, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer= has {one!r} among several; expected optimizers, as in optimizer=(first, second)"
            )
    if len(optimizer) < 2:
        return _own(optimizer[0]) if optimizer else None
    return Together([_own(one) for one in optimizer])


_WRAP = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Libraries whose ``prepare``, ``setup`` or ``optimizers()`` give a wrapper that has no state of its own. Its step may
wait for the last of several micro-batches (accelerate/optimizer.py), and no copy can be made of some (Lightning's
``__getattr__``, lightning/pytorch/core/optimizer.py).
"""


def _own(optimizer: Any) -> Any:
    """What such a wrapper steps."""
    wraps = any(cls.__module__.partition(".")[0] in _WRAP for cls in type(optimizer).__mro__)
    inner = getattr(optimizer, "optimizer", None) if wraps else None
    return _own(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def inside_of(optimizer: Any) -> list[Any]:
    """Those that step: wrappers (Accelerate's, torchtitan's, ours) have them inside."""
    several = getattr(optimizer, "optimizers", None)
    return list(several) if several else [getattr(optimizer, "optimizer", optimizer)]
