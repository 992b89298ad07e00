"""DistributedDataParallel around a planned model: its buckets are planned for, or said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from support.toys import Mlps


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_wrapper_that_comes_after_the_plan_is_said_once(alone: None) -> None:
    model, x = Mlps(), torch.randn(64, 16)
    handle = jettison.auto_checkpoint(model, x, Bytes(1 << 30))
    wrapped = DistributedDataParallel(model)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert nbytes == 25_536
    with pytest.warns(UserWarning, match=r"whose buckets \(24.94 KiB\) stay from step to step; .*: plan what the loop"):
        wrapped(x).backward()
    model.zero_grad()
    with warnings.catch_warnings(action="error"):
        wrapped(x).backward()
    handle.remove()


def test_a_plan_for_the_wrapper_knows_its_buckets(alone: None) -> None:
    model, x = Mlps(), torch.randn(64, 16)
    plain = jettison.auto_checkpoint(model, x, Bytes(1 << 30))
    plain.remove()
    wrapped = DistributedDataParallel(model)
    handle = jettison.auto_checkpoint(wrapped, x, Bytes(1 << 30))
    assert handle.plan is not None and plain.plan is not None
    assert handle.plan.predicted.peak_bytes - plain.plan.predicted.peak_bytes == 25_536
    with warnings.catch_warnings(action="error"):
        wrapped(x).backward()
    handle.remove()


class Returning(Mlps):
    """A loss, and one more output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x), "weight": 2 * next(self.parameters())}


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_a_loss_of_more_than_the_wrapped_model_s_own_is_noticed(alone: None, wrap: Callable[..., nn.Module]) -> None:
    wrapped, x = wrap(Returning()), torch.randn(64, 16)
    with jettison.auto_checkpoint(wrapped, x, Bytes(1 << 30)):
        with warnings.catch_warnings(action="error"):
            (0.5 * wrapped(x)["loss"]).backward()
        wrapped.zero_grad()
        with pytest.warns(UserWarning, match="at a loss made of more than the model's"):
            output = wrapped(x)
            (output["loss"] + output["weight"].sum()).backward()


class Branches(Mlps):
    """A layer that no step uses, unless it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(16, 64)

    def forward(self, x: Tensor, all_of_it: bool = False) -> Tensor:
        return super().forward(x) + (self.branch(x).square().mean() if all_of_it else 0.0)


@pytest.mark.parametrize(
    ("views", "all_of_it", "rows"), [(True, False, 4), (True, False, 128), (True, True, 4), (False, False, 128)]
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_what_no_rank_uses_has_buckets_and_no_state(
    alone: None, one_thread: None, views: bool, all_of_it: bool, rows: int
) -> None:
    """A small batch's peak is at the second forward, if buckets are made anew there, or at the optimizer's step."""
    made = Branches()
    nbytes = sum(p.nbytes for p in made.parameters())
    model = DistributedDataParallel(made, find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(2 * rows, 16)

    def step(model: nn.Module, x: Tensor) -> None:
        for half in x.chunk(2):
            model(half, all_of_it).backward()

    def whole() -> None:
        step(model, x)
        optimizer.step()
        optimizer.zero_grad()

    handle = jettison.auto_checkpoint(model, x, Bytes(1 << 30), step=step, optimizer=optimizer)
    assert handle.plan is not None
    for _ in range(2):
        whole()
    assert all(bool(optimizer.state.get(p)) is all_of_it for p in made.branch.parameters())
    measured = measured_peak(whole, static_tensors=static_tensors(nn.ModuleList([model]), x, optimizer)).peak_bytes
    assert measured + nbytes == handle.plan.predicted.peak_bytes  # buckets are there all along
    handle.remove()
