"""Values that a planned region puts into autograd's graph in place of tensors, and boxes that recipes read."""

from __future__ import annotations

from operator import methodcaller
from typing import Any, Final, Self

from torch import Tensor

from jettison.capture.tensor_subclasses import version_of
from jettison.runtime.lossless_packing import Packed
from jettison.runtime.offload import Group, stale
from jettison.runtime.offloaded_ranges import Away, OffloadableBox
from jettison.runtime.recipe import Recipe


class Diverged(Exception):
    """The forward did not run as recorded. Raised inside a region, handled by its wrapper."""


class Held(tuple[Any, Tensor, int]):
    """A kept slot: its frame, which counts as live as long as this exists, the tensor, and its version when autograd
    saved it. A tuple, since there is one for each tensor that autograd saves; plain where a frame follows its recipe.
    """

    __slots__ = ()
    of_a_region = True  # for its use as a hook

    def __new__(cls, tensor: Tensor, owner: Any = None) -> Self:
        # detached: a node that saves its own result would own itself, and only be freed by its backward
        return tuple.__new__(cls, (owner, tensor if tensor.is_leaf else tensor.detach(), version_of(tensor)))

    def open(self) -> Tensor:
        """Return the tensor. Raises `StaleTensor` if it was written to."""
        _, tensor, version = self
        if version_of(tensor) != version:
            raise stale("a kept tensor", "a planned region", version, version_of(tensor))
        return tensor


HELD: Final = 3  # length of a `Held`, which tells plain ones from plain `Handle`s

opened: Any = methodcaller("open")
"""Unpack by the value's own method."""


class Box:
    """A value that recipes read; empty until the forward reaches it."""

    __slots__ = ("tensor", "version")

    tensor: Tensor | None

    def __init__(self) -> None:
        self.tensor = None
        self.version = 0

    @property
    def is_empty(self) -> bool:
        return self.tensor is None

    @property
    def on_device(self) -> Tensor | None:
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        """Keep the values without their graph: a box that owned its graph would own its own handle."""
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = version_of(tensor)


def box_for(recipe: Recipe, buffer: int, group: Group | None) -> Box | Away:
    if buffer in recipe.moved:
        return OffloadableBox(recipe.moved[buffer], group)
    return Packed(recipe.packed[buffer]) if buffer in recipe.packed else Box()


class Handle(tuple[Any, ...]):
    """A slot whose tensor is not kept: its frame, its action, the boxes that its recipe reads, its number (-1: an
    output), and its wrapper, if that differs from call to call. A tuple, as `Held` is, and as often plain.
    """

    __slots__ = ()
