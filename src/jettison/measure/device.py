"""What an accelerator's allocator holds beside the tensors of a step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import static_tensors


def elsewhere_bytes(model: nn.Module, batch: Any = (), optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes on the model's CUDA device that are neither its own nor the batch's nor the optimizer's.

    Other models, the workspaces that cuBLAS keeps for each of its handles, and what blocks of the caching allocator are
    larger than their tensors. All of it counts in ``max_memory_allocated``. 0 on the CPU.
    """
    tensors = static_tensors(model, batch, optimizer)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) != 1:
        return 0
    device = devices.pop()
    have_workspaces(device)
    gc.collect()
    torch.cuda.synchronize(device)
    known = AllocationCounter(tensors, device="cuda").live_bytes
    return max(0, torch.cuda.memory_allocated(device) - known)


def have_workspaces(device: torch.device) -> None:
    """Products on this thread and on autograd's, which has handles of its own: what cuBLAS and cuBLASLt keep for each
    is there from now on. Products that run again in backward are autograd's thread's.
    """
    if device.type == "cuda":
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            _Products.apply(torch.ones(16, 16, device=device, requires_grad=True)).sum().backward()


class _Products(torch.autograd.Function):
    """A product with a bias, and one without, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return torch.addmm(a[0], a, a @ a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        return torch.addmm(grad[0], grad, grad @ grad)
