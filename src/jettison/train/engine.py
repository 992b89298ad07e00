"""Forward and backward of a step's micro-batches, over one layout. The loop knows no more of a layout than this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jettison.errors import TraceError, UsageError
from jettison.trace.model import LossFn, call_model, loss_of
from jettison.train.places import Places
from jettison.train.tools import Built

Phase = Callable[[str], AbstractContextManager[None]]
"""Opens a named part of the step, for its peak of memory."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token rows [b, s + 1] on this rank's device, and the seed of every random number drawn on them."""

    rows: Tensor
    seed: int


class Engine(Protocol):
    """One layout's way through a step."""

    parts: Sequence[nn.Module]
    """This rank's share of the model, whose parameters are trained and saved."""

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor:
        """Leave the gradient of the mean loss over all ranks at the parameters; return this rank's mean, detached."""
        ...

    def settle(self) -> None:
        """What is put off until after the first step, and should not be measured with a later one."""
        ...


class WholeModel:
    """Every rank runs the model from end to end; gradients are averaged over data-parallel ranks at the last
    micro-batch.
    """

    def __init__(self, built: Built, places: Places, *, autocast: bool, device: torch.device) -> None:
        self.parts: Sequence[nn.Module] = (built.model,)
        self._places = places
        self._built = built
        self._run: nn.Module = built.model
        self._autocast = autocast
        self._device = device

    def over_replicas(self, group: torch.distributed.ProcessGroup) -> None:
        """Average gradients over these ranks, each of which has the whole model; call it after planning."""
        ids = [self._device.index] if self._device.type == "cuda" else None
        self._run = DistributedDataParallel(
            self.parts[0], device_ids=ids, process_group=group, gradient_as_bucket_view=True
        )

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor:
        """See `Engine`."""
        losses = []
        for number, batch in enumerate(batches):
            with self._synchronising(number == len(batches) - 1):
                self._places.seed(batch.seed)
                with phase("forward"), self.context():
                    loss = self._loss(batch) / len(batches)
                with phase("backward"):
                    loss.backward()
            losses.append(loss.detach())
        with phase("backward"):
            self._places.complete(list(self.parts[0].parameters()))
        return torch.stack(losses).sum()

    def settle(self) -> None:
        """Buckets are laid out anew, in the order in which gradients have come: the next forward would do it."""
        if isinstance(self._run, DistributedDataParallel):
            self._run.reducer._rebuild_buckets()

    def context(self) -> AbstractContextManager[object]:
        """What a forward runs in."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _loss(self, batch: MicroBatch) -> Tensor:
        return checked_loss(call_model(self._run, self._built.call(batch.rows)), self._built.loss_fn)

    def _synchronising(self, last: bool) -> AbstractContextManager[object]:
        if isinstance(self._run, DistributedDataParallel) and not last:
            return self._run.no_sync()
        return nullcontext()


def checked_loss(output: object, loss_fn: LossFn | None) -> Tensor:
    """The scalar to minimise.

    Raises:
        UsageError: the model gives none.
    """
    try:
        return loss_of(output, loss_fn)
    except TraceError as error:
        raise UsageError(f"model: called with input_ids and labels, it gave {error}") from error


def named_parameters(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, by its name in the whole model."""
    for part in parts:
        yield from part.named_parameters()
