"""Another module, whose globals the blocks reach only through its functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ZERO, ONE = 0.0, 1.0
act: Any = F.gelu
_shift = 0.0


def set_shift(value: float) -> None:
    """Move the hidden global."""
    global _shift
    _shift = value


def activation(h: Tensor) -> Tensor:
    """Reads the hidden global two calls down."""
    return _shifted(h).tanh()


def _shifted(h: Tensor) -> Tensor:
    return h + torch.as_tensor(_shift)
