"""Tables and bags: predicted peaks are the measured ones; budgets with sparse gradients are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import Infeasible, TraceError
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


def embedding(rows: int, **how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(rows, WIDTH, **how)


def bag(rows: int, **how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(rows, WIDTH, **how)


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), 0.1)]


def sparse_adam(model: OnTable) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam(model.table.parameters()), torch.optim.AdamW(model.blocks.parameters())]


CASES: dict[str, tuple[Callable[[], nn.Module], type[OnTable]]] = {
    "a longest row": (embedding(4000, max_norm=1.0), OnTable),
    "bag, max": (bag(4000, mode="max"), OfBags),
    "bag, max, offsets": (bag(50, mode="max"), Offsets),
    "bag, mean": (bag(4000, mode="mean"), OfBags),
    "bag, weights": (bag(50, mode="sum"), Weighted),
}
SPARSE: dict[str, tuple[Callable[[], nn.Module], type[OnTable]]] = {
    "table": (embedding(50, sparse=True), OnTable),
    "bag, mean": (bag(50, mode="mean", sparse=True), OfBags),
    "bag, weights": (bag(50, mode="sum", sparse=True), Weighted),
}


def static(model: nn.Module, ids: Tensor, optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    return [*static_tensors(model, (ids,)), *(value for value in states if isinstance(value, Tensor))]


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_the_predicted_one(name: str) -> None:
    table, kind = CASES[name]
    torch.manual_seed(0)
    model = kind(table())
    plain = copy.deepcopy(model)
    batches = [torch.randint(0, model.table.num_embeddings, (64, PER_ROW)) for _ in range(3)]
    ours, theirs = sgd(model), sgd(plain)

    def step(model: nn.Module, ids: Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()

    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (batches[0],), jettison.Bytes(1), optimizer=ours)
    budget = refused.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, (batches[0],), budget, optimizer=ours) as handle:
        predicted = handle.plan.predicted.peak_bytes
        peaks = []
        for ids in batches:
            step(plain, ids, theirs)
            before = static(model, ids, ours)
            peaks.append(measured_peak(lambda ids=ids: step(model, ids, ours), static_tensors=before).peak_bytes)
            del before
            for (path, expected), found in zip(plain.named_parameters(), model.named_parameters(), strict=True):
                assert torch.equal(expected, found[1]), path
                assert torch.equal(expected.grad, found[1].grad), path
            model.zero_grad()
            plain.zero_grad()
    assert max(peaks) <= budget
    assert max(peaks[1:]) >= predicted - 64


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_budgets_with_sparse_gradients_are_refused(name: str, step: bool) -> None:
    """How many rows they have depends on values."""
    table, kind = SPARSE[name]
    model, ids = kind(table()), torch.randint(0, 50, (64, PER_ROW))
    more = {"step": lambda model, ids: model(ids).backward()} if step else {}
    for optimizer in (None, sgd(model)):
        with pytest.raises(TraceError, match="train with sparse=False, or choose a policy"):
            jettison.auto_checkpoint(model, ids if step else (ids,), "1GiB", optimizer=optimizer, **more)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SPARSE)
def test_a_policy_takes_sparse_gradients(name: str) -> None:
    table, kind = SPARSE[name]
    model, ids = kind(table()), torch.randint(0, 50, (64, PER_ROW))
    plain = copy.deepcopy(model)
    optimizers = sparse_adam(model), sparse_adam(plain)
    with jettison.apply(model, "full", batch=(ids,)):
        for _ in range(3):
            for one, own in zip((model, plain), optimizers, strict=True):
                one(ids).backward()
                for optimizer in own:
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
