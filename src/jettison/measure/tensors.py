"""Which tensors are alive before a step, and how many bytes lie under them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from jettison.capture.tensor_subclasses import parts_of


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`."""
    sizes = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def static_tensors(
    model: nn.Module, batch: Any = (), optimizer: torch.optim.Optimizer | None = None
) -> tuple[Tensor, ...]:
    """What is alive before a step: parameters, their gradients, buffers, the optimizer's state, the batch."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = tree_leaves(list(optimizer.state.values())) if optimizer is not None else []
    others = [leaf for leaf in [*state, *tree_leaves(batch)] if isinstance(leaf, Tensor)]
    return (*parameters, *gradients, *model.buffers(), *others)
