"""The optimizer: its groups, its state by name, and what all ranks know of a step before it takes one.

NOTE [ One sum a step ]
The norm of the gradient is summed over all ranks before weights may change. The loss, whether some rank was asked to
stop, and whether one could not save, are numbers beside it in the same message. So ranks stop after the same step,
though a signal reaches them at different moments, or only one of them; a signal that comes later is in the next sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from jettison.train.recipe import OptimizerSection


def make_optimizer(section: OptimizerSection, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights with two dimensions or more decay, norms and biases do not."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that a first step would make, and change nothing else."""
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
    """All tensors of a checkpoint by name: parameters, buffers that belong to the state, the optimizer's state."""
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
    """This rank's share of the square of the full gradient's 2-norm, of float64: a sum over all ranks makes it whole.

    A rank's share are the squares of what it holds, divided by how many ranks hold the same.

    Args:
        stages: of a pipeline; ranks of different stages have different parameters.
        copies: parameters that two stages have.
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
    """The same on every rank.

    Args:
        norm: of the full gradient, a number on the device.
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
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(tensor: Tensor) -> int:
    """Over how many ranks a tensor is spread."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    # a dimension that FSDP2 shards after tensor parallelism has a placement that is_shard() does not know
    return prod(size for placement, size in sizes if not placement.is_replicate())
