"""What Liger-Kernel's autograd functions save, on a CPU: put into a model of transformers as Liger puts its own there.

Their results are worked out by PyTorch, since Triton wants a GPU. What each saves is read from Liger-Kernel ead96b6,
``src/liger_kernel/ops``: ``rms_norm.py`` X, W and RSTD; ``rope.py`` cosine and sine; ``swiglu.py`` and ``geglu.py``
both halves; ``fused_moe.py`` tokens, weights, ``pre_act``, the weights of choices and its metadata of routing, and no
more. Backwards are left out: only a forward is looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu


class _Saving(torch.autograd.Function):
    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError


class _Norm(_Saving):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, root)
        return (x * root).to(x.dtype) * (weight + offset)


class _Rotary(_Saving):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return q.clone(), k.clone()


class _Gate(_Saving):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, smooth: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        return (gelu(a, approximate="tanh") if smooth else silu(a)) * b


class _Experts(_Saving):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        order = choice.flatten().argsort()
        origin = order // choice.shape[1]
        ends = choice.flatten().bincount(minlength=len(gate_up)).cumsum(0)
        joint = torch.cat([part @ w.T for part, w in zip(x[origin].tensor_split(ends[:-1]), gate_up, strict=True)])
        gate, up = joint.chunk(2, dim=-1)
        inner = silu(gate) * up
        out = torch.cat([part @ w.T for part, w in zip(inner.tensor_split(ends[:-1]), down, strict=True)])
        share = weights.flatten().contiguous()
        rows = [each.int() for each in (origin, order, order.argsort())]
        ctx.save_for_backward(x, gate_up, down, joint, share, *rows)
        return torch.zeros_like(x).index_add(0, origin, out * share[order, None])


def _normed(module: Any) -> None:
    kind = type(module).__name__
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
    module.forward = lambda x: _Norm.apply(x, module.weight, eps, float(kind.startswith("Gemma")))


def _gated(module: Any) -> None:
    smooth = type(module).__name__.startswith("Gemma")
    if hasattr(module, "gate_up_proj"):
        module.forward = lambda x: module.down_proj(_Gate.apply(*module.gate_up_proj(x).chunk(2, dim=-1), smooth))
    else:
        module.forward = lambda x: module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x), smooth))


def _mixed(module: Any) -> None:
    module.forward = lambda x, choice, weights: _Experts.apply(
        x, module.gate_up_proj, module.down_proj, choice, weights
    )


def patch(model: nn.Module, patches: Any) -> None:
    """Norms and feed-forward blocks of a model, and the rotation of its module.

    Args:
        patches: pytest's, which undoes the rotation's.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _normed(module)
        if type(module).__name__ in ("MixtralExperts", "Qwen3MoeExperts"):
            _mixed(module)
        if type(module).__name__.endswith("MLP") and not hasattr(module, "experts"):
            _gated(module)
    home = sys.modules[type(model).__module__]

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
        return _Rotary.apply(q, k, cos, sin)

    patches.setattr(home, "apply_rotary_pos_emb", rotated)
