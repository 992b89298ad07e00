"""Experts over ranks for `support.layout_steps`: rows by all-to-all to the ranks that have their experts, and back.

What stands around the exchange is transformers' grouped experts, or torchtitan's way to weight and add up outputs
(``torchtitan/distributed/expert_parallel.py``, ``ExpertParallel``; ``models/moe/moe.py``). Routing is even: token by
token the next experts in turn, whatever the router scored, so that every rank is given as many rows as it sends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers.integrations.moe import _grouped_linear


class ExpertsOverRanks(nn.Module):
    """A rank's experts of a block of transformers.

    Args:
        added: outputs are added up by token in fp32; otherwise sorted back and summed, as transformers does.
    """

    def __init__(self, whole: Any, group: Any, *, added: bool) -> None:
        super().__init__()
        ranks, place = distributed.get_world_size(group), distributed.get_rank(group)
        self.group, self.ranks, self.added, self.act_fn = group, ranks, added, whole.act_fn
        self.all, self.own = whole.num_experts, whole.num_experts // ranks
        some = slice(place * self.own, (place + 1) * self.own)
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach()[some].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach()[some].clone())

    def forward(self, tokens: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """T × h, the weighted sum of each token's experts."""
        experts, order = torch.sort(choice.reshape(-1))
        counts = torch.bincount(experts, minlength=self.all)
        del experts
        scores = weights.reshape(-1)[order]
        origin = order // choice.shape[1]
        out = self._sent(tokens[origin], counts)
        if self.added:
            out = (out.float() * scores.unsqueeze(-1)).to(tokens.dtype)
            index = origin.unsqueeze(-1).expand(-1, tokens.shape[1])
            return torch.zeros_like(tokens).scatter_add(0, index, out)
        out = out * scores.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        out = out[inverse]
        return out.view(tokens.shape[0], choice.shape[1], tokens.shape[1]).sum(dim=1).to(tokens.dtype)

    def _sent(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows to their experts' ranks, through the experts, and back."""
        if self.ranks == 1:
            return self._products(rows, counts.cumsum(0, dtype=torch.int32))
        arriving = torch.empty_like(counts)
        distributed.all_to_all_single(arriving, counts, group=self.group)
        there, back = (c.view(self.ranks, self.own).sum(1).tolist() for c in (counts, arriving))
        rows = all_to_all_single_autograd(rows, back, there, self.group)
        ends = arriving.view(self.ranks, self.own).sum(0).cumsum(0, dtype=torch.int32)
        if self.own == 1:
            return all_to_all_single_autograd(self._products(rows, ends), there, back, self.group)
        whose = torch.arange(self.own).repeat(self.ranks).repeat_interleave(arriving)
        local = torch.argsort(whose, stable=True)
        del whose, arriving
        out = self._products(rows[local], ends)
        rows = torch.empty_like(out)
        rows[local] = out
        return all_to_all_single_autograd(rows, there, back, self.group)

    def _products(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = _grouped_linear(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
        return _grouped_linear(self.act_fn(gate) * up, self.down_proj, ends)


class Even:
    """A router's hook: the next experts in turn, written over what it chose."""

    def __init__(self, tokens: int, choices: int, experts: int) -> None:
        self.choice = torch.arange(tokens * choices).remainder(experts).view(tokens, choices)

    def __call__(self, router: nn.Module, inputs: Any, outputs: Any) -> None:
        outputs[2].data.copy_(self.choice)  # past autograd, which has kept this very tensor for the backward


def spread_experts(model: nn.Module, group: Any, tokens: int, *, added: bool) -> list[Tensor]:
    """Give a rank its share of every block's experts.

    Args:
        tokens: that a rank routes in a micro-batch.

    Returns:
        What routers are given, which no model has.
    """
    known: dict[tuple[int, int], Even] = {}
    for block in [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]:
        even = known.setdefault(
            (block.gate.top_k, block.gate.num_experts), Even(tokens, block.gate.top_k, block.gate.num_experts)
        )
        block.gate.register_forward_hook(even)
        block.experts = ExpertsOverRanks(block.experts, group, added=added)
    return [even.choice for even in known.values()]


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Of this rank's experts, which other ranks have others of."""
    found = [one for one in module.modules() if isinstance(one, ExpertsOverRanks)]
    return [parameter for one in found for parameter in one.parameters()]
