"""Ranks of which one has less memory, another batch, or nothing to plan with: what each is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import jettison
from jettison.core.errors import Infeasible, JettisonError
from jettison.core.units import Bytes
from jettison.planner.handle import Applied
from support.toys import Mlp
from support.wrapped_steps import LENGTH, ROWS, WIDTH, WORDS, once, peak, train, wrapped


def tokens(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """This rank's own."""
    numbers = torch.Generator().manual_seed(distributed.get_rank())
    return torch.randint(0, WORDS, (rows, length), generator=numbers)


def made(how: str) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapped(how)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def asking(plan: Callable[[Bytes], Applied], nbytes: int) -> dict[str, Any]:
    """As scripts do: with what they are told, the second time."""
    said = ""
    try:
        handle = plan(Bytes(nbytes))
    except Infeasible as error:
        said = str(error)
        handle = plan(error.minimum_budget_bytes)
    assert handle.plan is not None
    return {"said": said, "budget": handle.plan.budget_bytes, "hash": handle.plan.hash}


def too_small(how: str, poor: int) -> dict[str, Any]:
    """On one rank."""
    model, optimizer = made(how)
    ids = tokens()

    def plan(budget: Bytes) -> Applied:
        return jettison.auto_checkpoint(model, ids, budget, optimizer=optimizer, step=once)

    found = asking(plan, 100_000 if distributed.get_rank() == poor else 3_000_000)
    train(model, optimizer, once, ids)
    return found


def smaller(how: str) -> dict[str, Any]:
    """The second rank's budget is, and both are enough."""
    model, optimizer = made(how)
    ids, budget = tokens(), 2_900_000 - 500_000 * distributed.get_rank()
    handle = jettison.auto_checkpoint(model, ids, Bytes(budget), optimizer=optimizer, step=once)
    train(model, optimizer, once, ids)
    assert handle.plan is not None
    return {
        "budget": handle.plan.budget_bytes,
        "words": handle.budget,
        "hash": handle.plan.hash,
        "measured": peak(how, model, optimizer, once, ids),
    }


def other_batches() -> dict[str, Any]:
    """Replicas, of which the second has a longer batch."""
    ids = tokens(length=LENGTH + 8 * distributed.get_rank())
    expected = train(*made("ddp"), once, ids)
    model, optimizer = made("ddp")
    handle = jettison.auto_checkpoint(model, ids, Bytes(2_600_000), optimizer=optimizer, step=once)
    same = all(map(torch.equal, train(model, optimizer, once, ids), expected))
    assert handle.plan is not None
    return {
        "same": same,
        "predicted": handle.plan.predicted.peak_bytes,
        "measured": peak("ddp", model, optimizer, once, ids),
    }


class Stage(nn.Module):
    """Blocks; the first stage has an embedding before them, the last a head behind."""

    def __init__(self, number: int, count: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if number == 0 else None
        self.layers = nn.ModuleList(Mlp(WIDTH, 4 * WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS) if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def large_stage() -> dict[str, Any]:
    """The second stage is twice the first, and does not fit where that does."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(rank)
    module = Stage(rank, count, 3 + 3 * rank)
    stage = PipelineStage(module, rank, count, torch.device("cpu"))

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    schedule = Schedule1F1B(stage, 4, loss)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    ids = torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(pipeline: Any, ids: Tensor) -> None:
        given = [ids] if rank == 0 else []
        pipeline.step(*given, return_outputs=False, **({"target": ids} if rank == count - 1 else {}))

    def plan(budget: Bytes) -> Applied:
        return jettison.auto_checkpoint(schedule, ids, budget, optimizer=optimizer, step=step)

    found = asking(plan, 700_000)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(schedule, ids)
    assert not [one for one in told if "the plan for" in str(one.message)]
    return found | {"gradients": all(p.grad is not None for p in module.parameters())}


def before_planning() -> dict[str, Any]:
    """An optimizer of something else, on the second rank; then all as it should be."""
    model, optimizer = made("blocks")
    others = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    found = {}
    for name, wrong in (("wrong", others), ("right", optimizer)):
        given = wrong if distributed.get_rank() == 1 else optimizer
        try:
            jettison.auto_checkpoint(model, tokens(), "3MB", optimizer=given, step=once)
            found[name] = ""
        except JettisonError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def two_ranks(_: Any) -> dict[str, Any]:
    return {
        "sharded": too_small("blocks", 1),
        "sharded, the first": too_small("blocks", 0),
        "replicas": too_small("ddp", 1),
        "smaller, sharded": smaller("blocks"),
        "smaller, replicas": smaller("ddp"),
        "other batches": other_batches(),
        "a stage": large_stage(),
        "before planning": before_planning(),
    }
