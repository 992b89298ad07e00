"""What blocks are weighed by when their ways are chosen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from jettison.capture.tracer import trace_model
from jettison.dryrun import op_costs
from jettison.planner.planner import make_planner
from support.toys import Headed


class Block(nn.Module):
    """A product, and an activation of it that is slow here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def test_blocks_are_weighed_by_what_their_ops_were_measured_to_take(monkeypatch):
    """Also those of the first class, whose ops no dry run has met by then."""
    measure = op_costs.measure_ops

    def slow_silu(requests, **more):
        found = measure(requests, **more)
        return {k: replace(p, seconds=1.0) if k.startswith("aten.silu.") else p for k, p in found.items()}

    stack = Headed((Block() for _ in range(4)), 16, 16)
    monkeypatch.setattr(op_costs, "measure_ops", slow_silu)
    planner = make_planner(trace_model(stack, (torch.randn(8, 16),)))
    (points,) = planner.options.points.values()
    taken = sorted(point.seconds for point in points.values())
    assert taken[0] == 0.0
    assert max(taken) > 1.0, "what keeps the least computes it again"
    assert planner.options.problem.plain_seconds > 4 * 1.0
