"""Plans on the stages of `torch.distributed.pipelining`.

A stage's module is planned like a model, by what one micro-batch looks like where it arrives:

    batch = received(x)                      # on the first stage, what the pipeline is given
    jettison.apply(stage.submod, "full", batch=batch, loss_fn=stand_in_loss, regions=blocks_of(stage.submod))

Micro-batches in flight, several chunks on a rank and backwards that are split in two need nothing else: every call of a
region owns what its own backward will want (NOTE [ Ownership ] in runtime/recipe.py).

Stages have plans of their own, so ranks of one pipeline need not agree; those of one stage's tensor parallelism do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from jettison.capture.blocks import find_blocks, only_blocks
from jettison.core.errors import UsageError
from jettison.runtime.callers import of_a_region
from jettison.runtime.planned import PlannedForward


def blocks_of(module: nn.Module) -> list[str]:
    """Names of a stage's blocks. One block alone does not repeat, and would not be taken for one elsewhere."""
    return find_blocks(module) or only_blocks(module)


def received(*example: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a stage after the first: tensors like these, which require gradients."""
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in example)


def stand_in_loss(output: Any) -> Tensor:
    """A scalar of a stage's output, in place of the loss. `UsageError` if nothing in it wants a gradient."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise UsageError("a stage returned nothing that wants a gradient; give it a batch made by received()")
    return sum((t.float().sum() for t in found[1:]), found[0].float().sum())


class InFlight:
    """Watches the stages of a rank while a schedule runs, and keeps the most that was between forward and backward.

    Args:
        stages: by chunk, what `jettison.apply` returned for it (its ``regions``).

    ``micro_batches`` counts micro-batch chunks, ``nbytes`` what their recipes keep; peaks of the rank, at one moment
    each. A chunk of a split backward counts until the second half is over.
    """

    def __init__(self, stages: Sequence[Sequence[PlannedForward]]) -> None:
        self.stages = [list(regions) for regions in stages]
        for region in chain.from_iterable(self.stages):
            region.counted = True
        self.micro_batches = 0
        self.nbytes = 0
        self._hooks: list[Any] = []

    def now(self) -> Iterator[tuple[int, int]]:
        """Micro-batches and bytes of every chunk at this moment."""
        for regions in self.stages:
            live = [region.live() for region in regions]
            yield max(one.calls for one in live), sum(one.nbytes for one in live)

    def __enter__(self) -> InFlight:
        for regions in self.stages:
            root: nn.Module = regions[-1].module
            self._hooks.append(root.register_forward_hook(self._look))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @of_a_region
    def _look(self, *_: Any) -> None:  # only forwards add anything
        counts, nbytes = zip(*self.now(), strict=True)
        self.micro_batches = max(self.micro_batches, sum(counts))
        self.nbytes = max(self.nbytes, sum(nbytes))
