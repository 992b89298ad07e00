"""Plans on the stages of `torch.distributed.pipelining`.

A stage's module is planned like a model, for one micro-batch as the stage receives it:

    batch = received(x)                      # on the first stage, what the pipeline is given
    jettison.apply(stage.submod, "full", batch=batch, loss_fn=stand_in_loss, regions=blocks_of(stage.submod))

Micro-batches in flight, several chunks on a rank and split backwards need nothing else: every call of a region owns the
values that its backward needs (NOTE [ Ownership ] in runtime/recipe.py).

Each stage has its own plan. Only the tensor-parallel ranks of one stage must have equal plans.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from jettison.capture.blocks import find_blocks, only_blocks
from jettison.core.errors import UsageError


def blocks_of(module: nn.Module) -> list[str]:
    """Names of a stage's blocks. A single block does not repeat, so that `find_blocks` would not recognise it."""
    return find_blocks(module) or only_blocks(module)


def received(*example: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a stage after the first: tensors like these, which require gradients."""
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in example)


def stand_in_loss(output: Any) -> Tensor:
    """A scalar from a stage's output, as its loss. `UsageError` if no output requires a gradient."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise UsageError("a stage returned nothing that wants a gradient; give it a batch made by received()")
    return sum((t.float().sum() for t in found[1:]), found[0].float().sum())
