"""The optimizer: its groups, its state by name, and the norm of the gradient over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those that there are."""
    return [p.grad for p in parameters if p.grad is not None]


def total_norm(found: Sequence[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of the whole gradient, wherever its parts lie.

    Args:
        found: this rank's gradients; sharded ones are DTensors, which know where the rest is.
        stages: ranks that hold other parameters of the model: the stages of a pipeline.
    """
    norms = [torch.nn.utils.get_total_norm(group) for group in _alike(found)]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    total = torch.stack([n.double().square() for n in whole]).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip(found: Sequence[Tensor], norm: Tensor, largest: float) -> None:
    """Scale gradients so that their norm is at most ``largest``."""
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for group in _alike(found):
        local = [g.to_local() if isinstance(g, DTensor) else g for g in group]
        torch._foreach_mul_(local, scale.to(local[0].device, local[0].dtype))


def _alike(found: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in lists that one call can take: plain ones, and those sharded over one mesh in one way."""
    lists: dict[Any, list[Tensor]] = {}
    for gradient in found:
        kind = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        lists.setdefault((kind, gradient.dtype), []).append(gradient)
    yield from lists.values()
