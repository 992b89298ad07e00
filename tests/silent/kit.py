"""What the cases are written with: small blocks, a stack of them, batches, and the register of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silent.harness import Program
from support.toys import Net

ROWS, WIDTH, BLOCKS = 64, 32, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program by name.

    Args:
        works: ordinary enough that a refusal would be a fault.
        slow: takes more than a fraction of a second.
        alone: may end the process, so it gets one of its own.
    """

    name: str
    make: Callable[[], Program]
    works: bool = False
    slow: bool = False
    alone: bool = False


CASES: dict[str, Case] = {}


def case(*, works: bool = False, slow: bool = False, alone: bool = False) -> Callable[[Any], Any]:
    """Register a function that builds a program."""

    def register(make: Callable[[], Program]) -> Callable[[], Program]:
        assert make.__name__ not in CASES, make.__name__
        CASES[make.__name__] = Case(name=make.__name__, make=make, works=works, slow=slow, alone=alone)
        return make

    return register


def block_class(run: Callable[..., Any], init: Callable[[Any, int], None] | None = None) -> type[nn.Module]:
    """A class of blocks with two projections, ``a`` and ``b``, that know their number ``i``."""

    class Block(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            if init is not None:
                init(self, i)

    Block.forward = run  # type: ignore[method-assign]
    return Block


def stack(run: Callable[..., Any], init: Callable[[Any, int], None] | None = None, blocks: int = BLOCKS) -> Net:
    """A `Net` of one class of blocks."""
    made = block_class(run, init)
    return Net([made(i) for i in range(blocks)])


def rows(i: int, n: int = ROWS, *, grad: bool = False) -> Tensor:
    """A batch of its own for every step."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1000 + i)).requires_grad_(grad)


def program(
    run: Callable[..., Any],
    init: Callable[[Any, int], None] | None = None,
    batch: Callable[[int], Any] | None = None,
    **more: Any,
) -> Program:
    """A program out of a block's forward."""
    return Program(model=stack(run, init), batch=batch or (lambda i: (rows(i),)), **more)


def attend(model: nn.Module, name: str, values: Callable[[int], Any]) -> Callable[[int], Any]:
    """A batch function that sets an attribute of every block before the step."""

    def batch(i: int) -> Any:
        for layer in model.layers:
            setattr(layer, name, values(i))
        return (rows(i),)

    return batch
