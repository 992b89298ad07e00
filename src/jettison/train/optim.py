"""The optimizer: groups, learning rate, state by name, and the totals of a step that all ranks share before the update.

NOTE [ One sum a step ]
The square of the gradient's norm is all-reduced before weights change. The same message carries the loss, whether a
rank got a signal to stop, and whether one failed to save. So all ranks stop after the same step, although a signal
reaches them at different moments, or only one of them; a later signal is in the next sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import cos, isfinite, pi, prod

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from jettison.train.recipe import OptimizerSection


def make_optimizer(section: OptimizerSection, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer, with weight decay for weights with two dims or more, not for norms and biases."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then cosine decay to ``min_lr``.

    Step 0 of a warm-up of w has lr / (w + 1), so that no step has a rate of 0; the last has nearly ``min_lr``.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    end = section.decay_steps or steps
    if step >= end:
        return section.min_lr
    done = (step - section.warmup_steps) / (end - section.warmup_steps)
    return section.min_lr + (section.lr - section.min_lr) * (1 + cos(pi * done)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that a first step would allocate, without changing parameters."""
    rates = [group["lr"] for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def saved_tensors(
    named: Iterable[tuple[str, nn.Parameter]], parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name: parameters, persistent buffers, optimizer state."""
    out: dict[str, Tensor] = {}
    for name, parameter in named:
        out[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                out[f"optimizer.{name}.{key}"] = value
    for part in parts:
        buffers = dict(part.named_buffers())
        out |= {f"model.{name}": buffers[name] for name in part.state_dict() if name in buffers}
    return out


def squared_norm(
    parameters: Iterable[nn.Parameter], *, stages: int = 1, copies: Collection[nn.Parameter] = ()
) -> Tensor:
    """This rank's share of the square of the full gradient's 2-norm, in float64, to be summed over all ranks: the sum
    of squares of its local gradients, each divided by the number of ranks with the same values. ``stages`` of a
    pipeline have different parameters; ``copies``: parameters that two stages have.
    """
    ranks = dist.get_world_size() // stages if dist.is_initialized() else 1
    held: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike = ranks / _shards(parameter.grad) * (2 if parameter in copies else 1)
            held.setdefault(alike, []).append(local_of(parameter.grad))
    norms = [torch.nn.utils.get_total_norm(group).double().square() / alike for alike, group in held.items()]
    return torch.stack(norms).sum()


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTotals:
    """Totals of a step, equal on every rank: the norm of the full gradient, on the device and as a float; the mean loss
    of ranks that compute one; and the numbers of ranks with a signal to stop, and that could not write a checkpoint.
    """

    norm: Tensor
    size: float
    loss: float
    asked: int
    failed: int

    @property
    def finite(self) -> bool:
        """Whether the gradient and every loss are finite. A single one makes the mean infinite or NaN."""
        return isfinite(self.size) and isfinite(self.loss)


def step_totals(squares: Tensor, loss: Tensor | None, *, asked: bool, failed: bool) -> StepTotals:
    """Sum the totals over ranks: NOTE [ One sum a step ]. All ranks call it once a step, with their share of the square
    of the gradient's norm, in float64, and their loss, if they compute one.
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


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale gradients so that their norm is at most ``largest``."""
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault(parameter.grad.dtype, []).append(local_of(parameter.grad))
    for dtype, group in by_kind.items():
        torch._foreach_mul_(group, scale.to(dtype))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(tensor: Tensor) -> int:
    """Number of ranks over which a tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    # a dim that FSDP2 shards after tensor parallelism has a placement for which is_shard() is false
    return prod(size for placement, size in sizes if not placement.is_replicate())
