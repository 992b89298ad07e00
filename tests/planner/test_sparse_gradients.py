"""Tables with sparse gradients, bags, and rows that are chosen by values: predicted peaks are the measured ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import Infeasible, UsageError
from jettison.dryrun.counter import measured_peak, static_tensors

WIDTH, PER_ROW = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OnTable(nn.Module):
    """A table, what is made of its rows, and two blocks."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.blocks = table, nn.ModuleList(Block() for _ in range(2))

    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids)
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


class OfBags(OnTable):
    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Weighted(OfBags):
    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=torch.full(ids.shape, 0.5))


class Offsets(OfBags):
    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids.flatten(), torch.arange(0, ids.numel(), PER_ROW))


class Twice(OnTable):
    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1) + self.table(ids[:, :3]).mean(1)


def embedding(rows: int, **how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(rows, WIDTH, **how)


def bag(rows: int, **how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(rows, WIDTH, **how)


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), 0.1)]


def adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), 0.1)]


def sparse_adam(model: OnTable) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam(model.table.parameters()), torch.optim.AdamW(model.blocks.parameters())]


@dataclass(frozen=True, kw_only=True)
class Case:
    """``slack``: the share by which a step may stay below what is predicted, where that depends on values."""

    table: Callable[[], nn.Module]
    model: type[OnTable] = OnTable
    optimizer: Callable[[Any], list[torch.optim.Optimizer]] = sgd
    step: bool = False
    micro_batches: int = 1
    slack: float = 0.0


CASES = {
    "sgd": Case(table=embedding(4000, sparse=True)),
    "sgd, a step": Case(table=embedding(4000, sparse=True), step=True),
    "micro-batches": Case(table=embedding(4000, sparse=True), step=True, micro_batches=3, slack=0.02),
    "twice": Case(table=embedding(50, sparse=True), model=Twice),
    "sparse adam": Case(table=embedding(1000, sparse=True), optimizer=sparse_adam, slack=0.25),
    "sparse adam, a step": Case(table=embedding(20, sparse=True), optimizer=sparse_adam, step=True),
    "adagrad": Case(table=embedding(20, sparse=True), optimizer=adagrad),
    "padding": Case(table=embedding(50, sparse=True, padding_idx=0), slack=0.02),
    "a longest row": Case(table=embedding(4000, max_norm=1.0)),
    "bag, max": Case(table=bag(4000, mode="max"), model=OfBags),
    "bag, max, offsets": Case(table=bag(50, mode="max"), model=Offsets),
    "bag, mean": Case(table=bag(4000, mode="mean"), model=OfBags),
    "bag, sum, sparse": Case(table=bag(50, mode="sum", sparse=True), model=OfBags),
    "bag, weights, sparse": Case(table=bag(50, mode="sum", sparse=True), model=Weighted),
    "bag, sparse adam": Case(table=bag(20, mode="sum", sparse=True), model=OfBags, optimizer=sparse_adam),
}
QUICK = {"sgd", "micro-batches", "sparse adam, a step", "bag, sparse adam"}


def static(model: nn.Module, ids: Tensor, optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    return [*static_tensors(model, (ids,)), *(value for value in states if isinstance(value, Tensor))]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_the_peak_is_the_predicted_one(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model(case.table())
    plain = copy.deepcopy(model)
    batches = [torch.randint(0, model.table.num_embeddings, (64 * case.micro_batches, PER_ROW)) for _ in range(3)]
    ours, theirs = case.optimizer(model), case.optimizer(plain)

    def passes(model: nn.Module, ids: Tensor) -> None:
        for part in ids.chunk(case.micro_batches):
            model(part).backward()

    def step(model: nn.Module, ids: Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
        passes(model, ids)
        for optimizer in optimizers:
            optimizer.step()

    more = {"step": passes} if case.step else {}
    batch = batches[0] if case.step else (batches[0],)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, batch, jettison.Bytes(1), optimizer=ours, **more)
    budget = refused.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, batch, budget, optimizer=ours, **more) as handle:
        predicted = handle.plan.predicted.peak_bytes
        peaks = []
        for ids in batches:
            step(plain, ids, theirs)
            before = static(model, ids, ours)
            peaks.append(measured_peak(lambda ids=ids: step(model, ids, ours), static_tensors=before).peak_bytes)
            del before
            for (path, expected), found in zip(plain.named_parameters(), model.named_parameters(), strict=True):
                assert torch.equal(expected, found[1]), path
                one, other = expected.grad, found[1].grad
                assert torch.equal(one.to_dense(), other.to_dense()) if one.is_sparse else torch.equal(one, other), path
            model.zero_grad()
            plain.zero_grad()
    assert max(peaks) <= budget
    assert max(peaks[1:]) >= predicted * (1 - case.slack) - 64


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_momentum_that_grows_without_end_is_refused() -> None:
    model = OnTable(nn.Embedding(50, WIDTH, sparse=True))
    ids = torch.randint(0, 50, (16, PER_ROW))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(UsageError, match="SparseAdam"):
        jettison.auto_checkpoint(model, (ids,), "1GiB", optimizer=optimizer)
