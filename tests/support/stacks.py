"""Small hand-made stacks of blocks for the correctness traps, and the comparison that all of those tests end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_model
from jettison.planner.apply import apply_candidate
from jettison.planner.planner import make_planner
from jettison.solve.checkpoint_policy import Full, KeepShare, Offload
from jettison.verify.differences import independent_copy
from support.toys import Mlp
from support.training import Trained, assert_same, sgd, train

ROWS, WIDTH = 16, 32
POLICIES = ("none", "selective-op", "full", "share", "offload", "full-offload")
MOVING = {"offload": Offload(smallest_bytes=1), "full-offload": Offload(keeps=Full(), smallest_bytes=1)}


class Block(Mlp):
    """What traps override the `inner` of."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Stack(nn.Module):
    """Blocks between an embedding and a scalar loss."""

    def __init__(self, make: Callable[[], nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        return self.leave(h).float().square().mean()


def stack(make: Callable[[], nn.Module] = Block, blocks: int = 3) -> Stack:
    """A stack from a fixed seed."""
    torch.manual_seed(0)
    return Stack(make, blocks)


def rows(seed: int = 1) -> tuple[Tensor]:
    """A batch."""
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def apply(model: nn.Module, policy: str, batch: Any, **more: Any) -> jettison.planner.Applied:
    """A plan by word; "share" keeps half of the bytes, "smallest" is the planner's for the smallest feasible budget.
    Where tensors move to the host, tiny ones do, too.
    """
    if policy == "smallest":
        planner = make_planner(trace_model(model, batch), measure=False)
        found = planner.smallest
        return apply_candidate(model, planner, found, found.step.peak_bytes)
    chosen = KeepShare(0.5) if policy == "share" else MOVING.get(policy, policy)
    return jettison.apply(model, chosen, batch=batch, **more)


def compare(
    model: nn.Module, batches: list[Any], policy: str, *, train_with: Callable[..., Trained] = train, **more: Any
) -> jettison.planner.Applied:
    """Train ``model`` under a policy and an independent copy without; everything must be the same, to the bit."""
    plain_model = independent_copy(model)
    plain = train_with(plain_model, batches, optimizer=sgd(plain_model.parameters()), **more)
    handle = apply(model, policy, batches[0])
    with handle:
        planned = train_with(model, batches, optimizer=sgd(model.parameters()), **more)
        reports = handle.report()
    assert_same(planned, plain)
    assert policy != "full" or any(report.slots_dropped for report in reports), (
        "nothing was dropped: nothing was tested"
    )
    return handle
