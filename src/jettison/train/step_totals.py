"""What all ranks know of a step: one sum over them, in which everything travels that each has a share of.

NOTE [ One sum a step ]
The norm of the gradient has to be summed over all ranks before weights may change. Whether some rank was asked to stop,
or could not save, and the loss, are numbers beside it in the same message. So ranks stop after the same step, though a
signal reaches them at different moments, or only one of them: whatever a rank knew when it sent its share, all know
when they have the sum, and a signal that comes later is in the next one. No message is sent for it, and nobody polls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTotals:
    """The same on every rank.

    Args:
        norm: of the whole gradient, a number on the device.
        size: the same, read.
        loss: the mean of those that ranks know.
        asked: ranks that were asked to stop.
        failed: ranks that could not write a checkpoint.
    """

    norm: Tensor
    size: float
    loss: float
    asked: int
    failed: int

    @property
    def finite(self) -> bool:
        """The gradient and every loss; one that is not makes the mean so."""
        return isfinite(self.size) and isfinite(self.loss)


def step_totals(squares: Tensor, loss: Tensor | None, *, asked: bool, failed: bool) -> StepTotals:
    """See NOTE [ One sum a step ]. All ranks call it once a step.

    Args:
        squares: this rank's share of the square of the gradient's norm, of float64.
        loss: this rank's, if it knows one.
    """
    known = torch.zeros_like(squares) if loss is None else loss.to(squares)
    flags = torch.tensor([loss is not None, asked, failed], dtype=squares.dtype).to(squares.device, non_blocking=True)
    sums = torch.cat([torch.stack([squares, known]), flags])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    norm = sums[0].sqrt()
    square, total, knowing, ranks_asked, ranks_failed = sums.tolist()
    return StepTotals(
        norm=norm, size=square**0.5, loss=total / knowing, asked=int(ranks_asked), failed=int(ranks_failed)
    )
