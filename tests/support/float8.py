"""A reference linear layer in 8 bits with delayed scaling, as of arXiv 2209.05433 and TransformerEngine's recipe.

Factors come from the largest magnitudes of earlier calls, which a forward reads and then adds its own to: a call that
runs a second time sees other factors, and counts itself twice. Inputs and weights are E4M3; incoming gradients E5M2,
whose history is written to in backward. Products are computed from the 8-bit values in the tensors' own precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTH = 4  # of a history
LEAST = 1e-12


def factor(history: Tensor, dtype: torch.dtype) -> Tensor:
    """Brings the largest magnitude that is remembered to the largest that the dtype has; 1 where nothing is."""
    largest = history.amax()
    return torch.where(largest > 0, torch.finfo(dtype).max / largest.clamp(min=LEAST), torch.ones_like(largest))


def moved(history: Tensor, by: Tensor, dtype: torch.dtype) -> None:
    """TransformerEngine's update: the latest magnitude stands in the first place, which is free again afterwards. Where
    there is nothing to go by, the factor is the one before.
    """
    with torch.no_grad():
        largest = history.amax()
        found = (torch.finfo(dtype).max / largest).clamp(max=torch.finfo(torch.float32).max)
        by.copy_(torch.where((largest > 0) & largest.isfinite(), found, by))
        rolled = torch.roll(history, -1)
        rolled[0] = 0
        history.copy_(torch.where(history[0] != 0, rolled, history))


def remember(history: Tensor, tensor: Tensor) -> None:
    """The newest first; the oldest is forgotten."""
    with torch.no_grad():
        history.copy_(torch.roll(history, 1))
        history[0] = tensor.detach().abs().amax()


def narrowed(tensor: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """In 8 bits; what is beyond the largest becomes it."""
    most = torch.finfo(dtype).max
    return (tensor * by).clamp(-most, most).to(dtype)


class _Product(torch.autograd.Function):
    """x [.., n] and w [m, n] to x w' [.., m]; saves both in 8 bits. ``scaled_by`` is the factor of what comes in."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, x_by: Tensor, w_by: Tensor, scaled_by: Callable[[Tensor], Tensor]
    ) -> Tensor:
        narrow_x, narrow_w = narrowed(x, x_by, E4M3), narrowed(w, w_by, E4M3)
        ctx.save_for_backward(narrow_x, narrow_w, x_by, w_by)
        ctx.scaled_by = scaled_by
        return (narrow_x.to(x.dtype) / x_by) @ (narrow_w.to(w.dtype) / w_by).t()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        narrow_x, narrow_w, x_by, w_by = ctx.saved_tensors
        by = ctx.scaled_by(incoming)
        gradient = narrowed(incoming, by, E5M2).to(incoming.dtype) / by
        x, w = narrow_x.to(incoming.dtype) / x_by, narrow_w.to(incoming.dtype) / w_by
        return gradient @ w, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None, None, None


class Float8Linear(nn.Linear):
    """See the module docstring. ``seen`` are the factors of each call's input, in order, where it is a list."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        for name in ("input_history", "weight_history", "gradient_history"):
            self.register_buffer(name, torch.zeros(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        x_by, w_by = factor(self.input_history, E4M3), factor(self.weight_history, E4M3)
        remember(self.input_history, x)
        remember(self.weight_history, self.weight)
        product: Tensor = _Product.apply(x, self.weight, x_by, w_by, self._of_gradients)
        return product + self.bias

    def _of_gradients(self, incoming: Tensor) -> Tensor:
        by = factor(self.gradient_history, E5M2)
        remember(self.gradient_history, incoming)
        return by


class ContextLinear(nn.Linear):
    """See the module docstring. What is narrow takes its factor along, as a tensor of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        for name in ("input", "weight", "gradient"):
            self.register_buffer(f"{name}_history", torch.zeros(LENGTH))
            self.register_buffer(f"{name}_by", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        with torch.no_grad():
            self.input_history[0] = x.detach().abs().amax()
            self.weight_history[0] = self.weight.detach().abs().amax()
        x_by, w_by = self.input_by.clone(), self.weight_by.clone()
        product: Tensor = _Product.apply(x, self.weight, x_by, w_by, self._of_gradients)
        return product + self.bias

    def _of_gradients(self, incoming: Tensor) -> Tensor:
        self.gradient_history[0] = incoming.abs().amax()
        return self.gradient_by.clone()

    def forward_ends(self) -> None:
        """The outermost context is left; backward has not begun."""
        moved(self.input_history, self.input_by, E4M3)
        moved(self.weight_history, self.weight_by, E4M3)

    def backward_ends(self) -> None:
        """Gradients are there."""
        moved(self.gradient_history, self.gradient_by, E5M2)
