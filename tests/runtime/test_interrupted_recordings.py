"""An exception that leaves a region while it is recorded: streams stand where a run without a plan leaves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jettison


class Stop(Exception):
    """The user's own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.a(F.dropout(x, 0.1))), 0.1)


class Routed(Block):
    """Without a recording: what is left is a trial."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(1) > 0).nonzero()[:, 0]
        return x.index_add(0, chosen, F.dropout(self.a(F.dropout(x[chosen], 0.1)), 0.1))


@pytest.mark.parametrize("block", [Block, Routed])
@pytest.mark.parametrize("exception", [Stop, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.filterwarnings("ignore")
def test_it_leaves_what_a_plain_run_leaves(exception: type[BaseException], block: type[nn.Module]) -> None:
    plain = nn.Sequential(*[block() for _ in range(4)])
    planned: Any = copy.deepcopy(plain)
    x, fails = torch.ones(4, 8), [False]

    def boom(*_: Any) -> None:
        if fails[0]:
            raise exception

    jettison.apply(planned, "full", batch=(x,), loss_fn=lambda y: y.square().mean())
    seen: list[list[Any]] = []
    for model in (plain, planned):
        torch.manual_seed(1)
        model(x).sum().backward()
        hook = model[2].a.register_forward_hook(boom)  # type: ignore[union-attr, operator]
        fails[0] = True
        with pytest.raises(exception):
            model(x)
        fails[0] = False
        hook.remove()
        after = torch.rand(()).item()
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        seen.append([after, loss.item(), *(p.grad.sum().item() for p in model.parameters())])
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore")
def test_it_may_leave_planning_for_a_new_shape() -> None:
    """Counts of blocks that had ended stay, as without a plan."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.calls, self.fails = nn.Linear(8, 8), 0, False

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.fails:
                raise KeyboardInterrupt
            return x + torch.tanh(self.a(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Counting() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    counts = []
    for plans in (False, True):
        model: Any = Net()
        if plans:
            jettison.auto_checkpoint(model, (torch.ones(4, 8),), "1GiB")
        model(torch.ones(4, 8)).backward()
        model.layers[1].fails = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(6, 8))
        counts.append([layer.calls for layer in model.layers])
    assert counts[0] == counts[1] == [2, 2, 1]
