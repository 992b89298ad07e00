"""One layer of the 22B model of the paper's Table 4 (h=6144, a=64, s=2048, b=4, t=1), attention spelled out in matmuls.

python -m benchmarks.gpu.layer_22b

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", Table 4 times one such layer on
tensor-parallel GPUs, t=8; here t=1, so that the absolute times are not the paper's and the ratios are its question.
Selective means the paper's: the attention core (softmax, its dropout, attention over values) is recomputed. One layer
alone has its whole peak in its own backward, so that its question is time; what a stack saves is in `llama_1b`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.common import parse, run_cases, write
from benchmarks.jettison_rows import keep_all, under
from benchmarks.rivals import Rival, Undo, plain

S, B, H, A = 2048, 4, 6144, 64
DROPOUT = 0.1
DESCRIPTION = f"The paper's 22B layer, h={H}, a={A}, s={S}, b={B}, t=1, bf16, dropout {DROPOUT}; forward and backward"


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

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.projection = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.core = Core()

    def forward(self, x_bsh: Tensor) -> Tensor:
        """One layer's output."""
        heads = self.qkv(self.norm1(x_bsh)).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4)
        attended = self.core(*heads.unbind(0)).transpose(1, 2).reshape(B, S, H)
        x_bsh = x_bsh + functional.dropout(self.projection(attended), DROPOUT, self.training)
        mlp_bsh = self.down(functional.gelu(self.up(self.norm2(x_bsh))))
        return x_bsh + functional.dropout(mlp_bsh, DROPOUT, self.training)


class Step(nn.Module):
    """The layer and a scalar loss, so that one call is one training step's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

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


def build() -> tuple[nn.Module, tuple[Tensor]]:
    """The step's model and its batch, the layer's input, which wants a gradient as it would inside a model."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Step().to(torch.bfloat16).train()
        return model, (torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True),)


def loss_of(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The model's own scalar; the input's gradient of the step before is dropped."""
    batch[0].grad = None
    return model(*batch)


def main() -> None:
    """Measure and write."""
    options = parse("layer_22b", DESCRIPTION)
    peers = [Rival(name="none", apply=plain), recompute("layer"), recompute("layer.core")]
    rows = run_cases([(rival, None) for rival in peers], build, loss_of, options.rounds)
    torch.cuda.empty_cache()
    if not options.no_jettison:
        rows += run_cases(
            [(r, None) for r in (keep_all(), under("full"), under("selective"))], build, loss_of, options.rounds
        )
    write(options, DESCRIPTION, rows)


if __name__ == "__main__":
    main()
