"""One layer of the 22B model of the paper's Table 4 (h=6144, a=64, s=2048, b=4, t=1), attention spelled out in matmuls.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", Table 4 times one such layer on
tensor-parallel GPUs, t=8; here t=1, so that the absolute times are not the paper's and the ratios are its question.
Selective means the paper's: the attention core (softmax, its dropout, attention over values) is recomputed. One layer
alone has its whole peak in its own backward, so that its question is time; what a stack saves is in the Llamas'.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.cases import Log
from benchmarks.gpu.compare import COLUMNS, Comparison
from benchmarks.gpu.llama import KEPT
from benchmarks.gpu.setting import Setting
from benchmarks.jettison_rows import keep_all, under
from benchmarks.rivals import Rival, Undo, plain

DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """s, b, h and a of the layer."""

    s: int = 2048
    b: int = 4
    h: int = 6144
    a: int = 64


class Core(nn.Module):
    """Scores, causal softmax, dropout, values: what selective recomputation drops. Shapes: b a s d."""

    def forward(self, q_basd: Tensor, k_basd: Tensor, v_basd: Tensor) -> Tensor:
        """The attended values."""
        s, d = q_basd.shape[2:]
        scores_bass = q_basd @ k_basd.transpose(2, 3) / math.sqrt(d)
        future = torch.ones(s, s, dtype=torch.bool, device=scores_bass.device).triu(1)
        weights_bass = functional.softmax(scores_bass.masked_fill(future, float("-inf")), dim=-1)
        return functional.dropout(weights_bass, DROPOUT, self.training) @ v_basd


class Layer(nn.Module):
    """The paper's transformer layer: pre-norm, attention, GeLU MLP 4h wide, dropout after each half."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.h
        self.heads = sizes.a
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.core = Core()

    def forward(self, x_bsh: Tensor) -> Tensor:
        """One layer's output."""
        b, s, h = x_bsh.shape
        heads = self.qkv(self.norm1(x_bsh)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = self.core(*heads.unbind(0)).transpose(1, 2).reshape(b, s, h)
        x_bsh = x_bsh + functional.dropout(self.projection(attended), DROPOUT, self.training)
        mlp_bsh = self.down(functional.gelu(self.up(self.norm2(x_bsh))))
        return x_bsh + functional.dropout(mlp_bsh, DROPOUT, self.training)


class Step(nn.Module):
    """The layer and a scalar loss, so that one call is one training step's forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layer = Layer(sizes)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """The mean of the output, in float32."""
        return self.layer(x_bsh).float().mean()


def recompute(path: str) -> Rival:
    """`torch.utils.checkpoint` around one submodule: the layer (full) or its core (selective)."""

    def apply(model: nn.Module, _batch: Any) -> Undo:
        module = model.get_submodule(path)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        return Undo(functions=(lambda: delattr(module, "forward"),))

    return Rival(name="full recomputation" if path == "layer" else "selective recomputation (the core)", apply=apply)


def build(sizes: Sizes, device: torch.device) -> tuple[nn.Module, tuple[Tensor]]:
    """The step's model and its batch, the layer's input, which wants a gradient as it would inside a model."""
    torch.manual_seed(0)
    with device:
        model = Step(sizes).to(torch.bfloat16).train()
        return model, (torch.randn(sizes.b, sizes.s, sizes.h, dtype=torch.bfloat16, requires_grad=True),)


def loss_of(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The model's own scalar; the input's gradient of the step before is dropped."""
    batch[0].grad = None
    return model(*batch)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Peers, then Jettison's policies of the same names."""
    sizes = Sizes(s=64, b=2, h=64, a=4) if setting.tiny else Sizes()
    log.columns = COLUMNS
    log.text = [
        f"h={sizes.h}, a={sizes.a}, s={sizes.s}, b={sizes.b}, t=1, bf16, dropout {DROPOUT}; forward and backward. "
        "Table 4 of arXiv 2205.05198 (t=8, with communication): full recomputation 39 % more, selective 7 % more."
    ]
    compared = Comparison(
        setting, log, lambda: build(sizes, setting.device), loss_of, rounds=setting.rounds, subject="a layer of the 22B"
    )
    compared.row(Rival(name="none", apply=plain))
    for peer, policy in (("layer", "full"), ("layer.core", "selective")):
        theirs = compared.row(recompute(peer))
        if not quick:
            compared.row(under(policy), peer=theirs if theirs.figures else None)
    compared.row(keep_all(), asked=KEPT)
    compared.close()
