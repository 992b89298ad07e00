"""A stack of small blocks to be compiled, and what its steps give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.verify.differences import independent_copy
from support.toys import Headed, Mlp

WIDTH, ROWS, LENGTH = 32, 8, 64
INPUT_BYTES = ROWS * LENGTH * WIDTH * 4

QUIET = [
    # of torch's own, where Inductor is first loaded
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:The .grad attribute of a Tensor:UserWarning",  # which dynamo looks at
    )
]


def model_of(blocks: int = 4, rate: float = 0.2) -> Headed:
    """The same for the same arguments."""
    torch.manual_seed(0)
    return Headed([Mlp(WIDTH, 4 * WIDTH, rate) for _ in range(blocks)], WIDTH, 8)


def batch(rows: int = ROWS) -> tuple[Tensor]:
    """Its argument."""
    return (torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)),)


def compiled_copy(model: Headed) -> Headed:
    """The same model without a plan, block by block."""
    made = independent_copy(model)
    assert isinstance(made, Headed)
    for layer in made.layers:
        layer.compile(dynamic=False)
    return made


def loss_in(output: Any) -> Tensor:
    """What a model returned, or its loss by name."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def gradients(model: nn.Module, given: Any) -> list[Tensor | None]:
    """Of every parameter after one step, from one random stream."""
    torch.manual_seed(7)
    model.zero_grad()
    loss_in(model(*given)).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """To the bit, where there are any."""
    pairs = zip(ours, theirs, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def peak(model: nn.Module, given: Any) -> int:
    """Bytes of the third step, which holds what the model returned."""

    def step() -> Any:
        output = model(*given)
        loss_in(output).backward()
        return output

    for _ in range(2):
        step()
        model.zero_grad()
    found = measured_peak(step, static_tensors=static_tensors(model, given)).peak_bytes
    model.zero_grad()
    return found


def smallest(model: nn.Module, given: Any) -> int:
    """The smallest budget that a plan can keep."""
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, given, Bytes(1000), compile="blocks")
    return refused.value.minimum_budget_bytes
