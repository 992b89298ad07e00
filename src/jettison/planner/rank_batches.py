"""One list of batch shapes for ranks that share parameters, whose first batches may differ.

Such ranks follow one plan, and are compared op by op. Each reads its own shard of the data, so its first batch may be
longer or shorter than another rank's. They exchange their shapes and plan for those that no other shape covers. A rank
without a batch of such a shape pads its own by repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jettison.core.errors import PlanMismatch
from jettison.parallel.agree import Agreement
from jettison.runtime.batch_shape import BatchShape, map_tensors

MOST_SHAPES = 4
"""Shapes that are planned one by one; instead of more, one shape that covers them all."""


def alike(batches: Sequence[Any], sharing: Agreement) -> list[Any]:
    """Return batches of the same shapes on all ranks, in one order.

    Raises:
        PlanMismatch: batches do not have the same tensors on all ranks.
    """
    if not sharing.rounds:
        return list(batches)
    own = {BatchShape.of((batch,)): batch for batch in reversed(batches)}
    wanted = _outermost(sharing.union(own))
    if len(wanted) > MOST_SHAPES:
        wanted = [_around(wanted)]
    return [own[shape] if shape in own else _stretched(own, shape) for shape in wanted]


def stretched(batch: Any, shape: BatchShape) -> Any:
    """A batch in another shape, with values that this one has.

    Raises:
        PlanMismatch: it has other tensors.
    """
    return _stretched({BatchShape.of((batch,)): batch}, shape)


def _outermost(shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """Select the shapes that no other one covers; the largest last."""
    found = [one for one in shapes if not any(other is not one and other.covers(one) for other in shapes)]
    return sorted(found, key=lambda shape: (shape.nbytes, str(shape)))


def _around(shapes: Sequence[BatchShape]) -> BatchShape:
    """Return the smallest shape that covers all of them."""
    first, *others = shapes
    for other in others:
        first = first.around(other)
    return first


def _stretched(own: dict[BatchShape, Any], shape: BatchShape) -> Any:
    """Pad a batch of this rank to another shape by repeating its last rows and columns, so that values stay valid."""
    names = [where for where, _ in shape.sizes]
    base = next((one for one in own if one.can_become(shape)), None)
    if base is None:
        raise PlanMismatch(
            f"ranks that share parameters have batches of other tensors: one has {shape}, this one has "
            f"{'; '.join(map(str, own))}. They follow one plan: give all of them a batch with the same tensors "
            f"({', '.join(names)}), of the same types and numbers of dims"
        )
    dims = {where: size.dims for where, size in shape.sizes}
    return map_tensors(lambda where, tensor: _grown(tensor, dims[where]), own[base], "0")


def _grown(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    for dim, size in enumerate(dims):
        if tensor.shape[dim] != size:
            index = torch.arange(size, device=tensor.device).clamp(max=max(0, tensor.shape[dim] - 1))
            tensor = tensor.index_select(dim, index)
    return tensor
