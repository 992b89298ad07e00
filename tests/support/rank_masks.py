"""Dropout masks that a whole model and its parts share: drawn for the whole from a seed of site and batch.

What ranks draw without this is another matter, and other tests.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from jettison.models.reference import Dropout
from jettison.parallel.tp_collectives import Axis

ALONE = Axis("", 1, 0)


class Batch:
    """The number of the batch that a model, or a stage of one, is run on next. Each call takes the one after."""

    def __init__(self, module: nn.Module) -> None:
        self.number = 0
        self.next = 0
        module.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self.number, self.next = self.next, self.next + 1


class FixedDropout:
    """In the place of a Dropout's forward: this rank's part of the whole model's mask."""

    def __init__(self, name: str, p: float, heads: int, axis: Axis, *, sp: bool, batch: Batch) -> None:
        self.name, self.p, self.heads = name, p, heads
        self.axis, self.sp, self.batch = axis, sp, batch

    def __call__(self, x: Tensor) -> Tensor:
        t = self.axis.size
        if self.name.endswith("attention.dropout"):  # (b heads/t) × s × s: the heads of a sequence are neighbours
            rows = x.shape[0] * t // self.heads
            kept = self._mask((rows, self.heads, *x.shape[1:])).chunk(t, 1)[self.axis.rank].reshape(x.shape)
        elif self.sp:
            kept = self._mask((x.shape[0] * t, *x.shape[1:])).chunk(t, 0)[self.axis.rank]
        else:
            kept = self._mask(tuple(x.shape))
        return x * kept.to(x.dtype) / (1 - self.p)

    def _mask(self, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {self.batch.number}".encode()))
        return torch.rand(shape, generator=generator) >= self.p


def fix_masks(model: nn.Module, heads: int, axis: Axis = ALONE, *, sp: bool = False) -> Batch:
    """Give every dropout of a reference GPT, or of a stage of one, masks that depend on its name alone."""
    batch = Batch(model)
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and module.p:
            module.forward = FixedDropout(name, module.p, heads, axis, sp=sp, batch=batch)  # type: ignore[method-assign]
    return batch
