"""Models under a plan that moves, on a recorder: run under an order of copies, next to an independent copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import WrongValue
from jettison.planner.handle import Applied
from jettison.runtime.offload import OffloadEngine
from jettison.solve.checkpoint_policy import CheckpointPolicy, Full, Offload
from jettison.verify.differences import compare_gradients, independent_copy
from support.recorder import Order, Recorder, recorder_of
from support.transfers import Direction, transfers_of

ALL = Offload(smallest_bytes=1)
INPUTS = Offload(keeps=Full(), smallest_bytes=1)
WIDTH, ROWS = 8, 4
TENSOR_BYTES = ROWS * WIDTH * 4


class Scale(nn.Module):
    """Saves one tensor, its argument."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Line(nn.Module):
    """An embedding, blocks, a loss: what the blocks save is their own."""

    def __init__(self, blocks: list[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def line_of(block: Callable[[int], nn.Module], count: int, width: int) -> Line:
    """Alike blocks, from a fixed seed."""
    torch.manual_seed(0)
    return Line([block(width) for _ in range(count)], width)


class Shuffled:
    """Copies run, or wait, by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def choose(self, runnable: list[str]) -> int:
        """See `Order`."""
        return self.chance.randrange(-1, len(runnable))


@dataclass
class Chosen:
    """Choices made before, and the first one after they have run out; ``options`` is how many there were each time."""

    choices: list[int]
    options: list[int] = field(default_factory=list)

    def choose(self, runnable: list[str]) -> int:
        """See `Order`."""
        at = len(self.options)
        self.options.append(len(runnable) + 1)
        return (self.choices[at] if at < len(self.choices) else 0) - 1


def all_orders() -> Iterator[Chosen]:
    """Every sequence of choices that a run comes by: run under each before the next is asked for."""
    choices: list[int] = []
    while True:
        order = Chosen(choices)
        yield order
        choices = [*choices, *[0] * (len(order.options) - len(choices))]
        while choices and choices[-1] + 1 == order.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


@dataclass
class Pair:
    """A model under a policy, and its copy without."""

    model: nn.Module
    batch: Any
    policy: CheckpointPolicy = ALL
    options: dict[str, Any] = field(default_factory=dict)
    handle: Applied = field(init=False)
    plain: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.plain = independent_copy(self.model)
        self.handle = jettison.apply(self.model, self.policy, batch=self.batch, **self.options)

    @property
    def engine(self) -> OffloadEngine:
        """Of the plan."""
        engine = self.handle.offload
        assert engine is not None, "nothing moves: nothing is tested"
        return engine

    @property
    def recorder(self) -> Recorder:
        """Its device."""
        return recorder_of(self.engine)

    def step(self, order: Order | None = None) -> list[str]:
        """One forward and backward of each from no gradients; what is wrong with it, if anything."""
        if order is not None:
            self.recorder.order = order
        known = len(self.recorder.races)
        for each in (self.model, self.plain):
            each.zero_grad(set_to_none=True)
        run(self.plain, self.batch)
        try:
            with self.recorder.watching():
                run(self.model, self.batch)
        except WrongValue:
            return [*self.wrong(known), "a witness does not agree"]
        return self.wrong(known)

    def wrong(self, known: int = 0) -> list[str]:
        """Races from number ``known`` on, and gradients that differ."""
        found = [str(race) for race in self.recorder.races[known:]]
        same = compare_gradients(self.model, self.plain)
        return found if same.identical else [*found, "gradients differ"]


def run(model: nn.Module, batch: Any) -> None:
    """A forward and its backward."""
    model(*batch).backward() if isinstance(batch, tuple) else model(batch).backward()


def seeded(*shape: int, seed: int = 1) -> Tensor:
    """A batch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def line(*blocks: nn.Module) -> nn.Module:
    """Blocks with weights that differ."""
    torch.manual_seed(0)
    for block in blocks:
        for p in block.parameters():
            nn.init.normal_(p)
    return Line(list(blocks), WIDTH)


def scales(count: int = 4, policy: Any = ALL, **options: Any) -> Pair:
    """Each block saves its input and nothing else: the output of the one before."""
    options["regions"] = [f"layers.{i}" for i in range(count)]
    return Pair(line(*(Scale(WIDTH) for _ in range(count))), seeded(ROWS, WIDTH), policy, options)


def pair(*blocks: nn.Module, policy: Any = ALL, batch: Any = None, **options: Any) -> Pair:
    """These blocks, each a region."""
    options.setdefault("regions", [f"layers.{i}" for i in range(len(blocks))])
    return Pair(line(*blocks), seeded(ROWS, WIDTH) if batch is None else batch, policy, options)


def directions(found: Pair) -> str:
    """Of all copies so far, in order: o for out, b for back."""
    return "".join("o" if t.direction is Direction.OUT else "b" for t in transfers_of(found.engine))
