"""DistributedDataParallel around a planned model: its buckets are planned for, or said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import jettison
from jettison.units import Bytes
from support.toys import Mlp


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Net(nn.Module):
    """The output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(16, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_wrapper_that_comes_after_the_plan_is_said_once(alone: None) -> None:
    model, x = Net(), torch.randn(64, 16)
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
    model, x = Net(), torch.randn(64, 16)
    plain = jettison.auto_checkpoint(model, x, Bytes(1 << 30))
    plain.remove()
    wrapped = DistributedDataParallel(model)
    handle = jettison.auto_checkpoint(wrapped, x, Bytes(1 << 30))
    assert handle.plan is not None and plain.plan is not None
    assert handle.plan.predicted.peak_bytes - plain.plan.predicted.peak_bytes == 25_536
    with warnings.catch_warnings(action="error"):
        wrapped(x).backward()
    handle.remove()
