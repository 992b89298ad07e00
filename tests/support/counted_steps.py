"""A step of a small model on this process, every byte counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.spec.kernels import Loss
from jettison.spec.run import Run
from support.pipeline_peaks import loss_of


def language_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, *, autocast: bool = False
) -> Callable[[], None]:
    """Forward and a loss of its own, perhaps under bf16 autocast, backward, update."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(input_ids=ids).logits, ids)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_own_loss(run: Run) -> Run:
    """The same with the loss that `language_step` works out of what the model returned."""
    return replace(run, kernels=replace(run.kernels, loss=Loss.IN_LOOP))


def second_step_bytes(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> int:
    """The highest of a step whose optimizer has its state already, without the batch and the optimizer's counters."""
    step()
    state = [t for found in optimizer.state.values() for t in found.values()]
    with AllocationCounter([*static_tensors(model, batch), *state]) as counter:
        step()
    return counter.peak_bytes - batch.nbytes - sum(found["step"].nbytes for found in optimizer.state.values())
