"""Programs that change something which is no argument and no buffer: when they are planned, recorded, or run again."""

from __future__ import annotations

import array
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import BLOCKS, ROWS, WIDTH, Net, block_class, case, program, rows


def core(s: Any, x: Tensor) -> Tensor:
    """A shape depends on values: no recording."""
    h = torch.tanh(s.a(x))
    chosen = (x[:, 0] > 0).nonzero().squeeze(1)
    return x + s.b(h.index_add(0, chosen, h[chosen].exp()))


def smooth(s: Any, x: Tensor) -> Tensor:
    return x + s.b(torch.tanh(s.a(x)).exp())


def under(
    root: Callable[[Net, Tensor], Tensor],
    run: Callable[..., Any],
    init: Callable[[Any, int], None] | None = None,
    batch: Callable[[int], Any] | None = None,
    **more: Any,
) -> Program:
    """Blocks of one class under a forward of one's own."""
    made = block_class(run, init)

    class Root(Net):
        def forward(self, x: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
            return root(self, x, *args)

    return Program(model=Root([made(i) for i in range(BLOCKS)]), batch=batch or (lambda i: (rows(i),)), **more)


def through(net: Net, x: Tensor, *args: Any) -> Tensor:
    for layer in net.layers:
        x = layer(x, *args)
    return x.square().mean()


# memory that is real while a recording is made ------------------------------------------------------------------------


@case(works=True)
def ones_of_a_block_halved_by_the_root() -> Program:
    def run(s: Any, x: Tensor, left: dict[str, Tensor]) -> Tensor:
        left["b"] = torch.ones(len(x), WIDTH)
        return x + s.b(s.a(x) * left["b"])

    def root(net: Net, x: Tensor) -> Tensor:
        left: dict[str, Tensor] = {}
        for layer in net.layers:
            x = layer(x, left)
            left["b"].data.mul_(0.5)
        return x.square().mean()

    return under(root, run)


@case(works=True)
def state_that_blocks_write_for_the_next() -> Program:
    def run(s: Any, x: Tensor, memory: Tensor) -> Tensor:
        h = torch.tanh(s.a(x) + memory[s.i])
        if s.i:
            memory[s.i - 1].copy_(h.detach() * 0.1)
        return x + s.b(h.exp())

    def root(net: Net, x: Tensor) -> Tensor:
        memory = torch.zeros(BLOCKS, len(x), WIDTH)
        return through(net, x, memory) + memory.sum()

    def init(s: Any, i: int) -> None:
        s.i = i

    return under(root, run, init)


@case(works=True)
def batch_written_in_place() -> Program:
    made: dict[int, Tensor] = {}
    return under(lambda net, x: through(net, x.mul_(0.5)), smooth, batch=lambda i: (made.setdefault(i, rows(i)),))


@case(works=True)
def mask_of_the_batch_toggled() -> Program:
    mask = torch.arange(ROWS) % 3 == 0

    def root(net: Net, x: Tensor, given: Tensor) -> Tensor:
        given.logical_not_()
        return through(net, x * given[:, None])

    return under(root, smooth, batch=lambda i: (rows(i), mask))


@case(works=True)
def count_in_a_closures_tensor() -> Program:
    calls = torch.zeros((), dtype=torch.long)

    def run(s: Any, x: Tensor) -> Tensor:
        calls.add_(1)
        return smooth(s, x) / (1 + calls)

    return program(run)


@case(works=True)
def sum_in_a_closures_tensor_of_the_root() -> Program:
    total = torch.zeros(3)

    def root(net: Net, x: Tensor) -> Tensor:
        total.add_(0.5)
        return through(net, x + total.sum())

    return under(root, smooth)


# blocks without a recording -------------------------------------------------------------------------------------------


@case(works=True)
def statistics_in_a_plain_attribute() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        y = core(s, x)
        with torch.no_grad():
            s.stat.mul_(0.9).add_(y.mean())
        return y

    def init(s: Any, _i: int) -> None:
        s.stat = torch.zeros(())

    return under(lambda net, x: through(net, x) * (1 + sum(layer.stat for layer in net.layers)), run, init)


@case(works=True)
def statistics_of_a_hook() -> Program:
    total = torch.zeros(WIDTH)

    def hook(_module: Any, _args: Any, out: Tensor) -> None:
        total.add_(out.detach().mean(0))

    made = under(lambda net, x: through(net, x) * (1 + total.mean()), core)
    for layer in made.model.layers:
        layer.a.register_forward_hook(hook)
    return made


def _written_from_the_second_step_on(s: Any, x: Tensor, step: Tensor) -> Tensor:
    y = core(s, x)
    if step.item() > 1:
        with torch.no_grad():
            s.stat.add_(y.mean())
    return y


@case()
def buffer_written_only_later() -> Program:
    def init(s: Any, _i: int) -> None:
        s.register_buffer("stat", torch.zeros(()))

    return program(_written_from_the_second_step_on, init, lambda i: (rows(i), torch.tensor(float(i))))


@case()
def attribute_written_only_later() -> Program:
    def init(s: Any, _i: int) -> None:
        s.stat = torch.zeros(())

    return program(_written_from_the_second_step_on, init, lambda i: (rows(i), torch.tensor(float(i))))


@case(works=True)
def weight_that_a_forward_decays() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            s.a.weight.mul_(0.9)
        return core(s, x)

    return program(run)


@case(works=True)
def embedding_that_renormalises() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return core(s, x) + s.e((x[:, 1].abs() * 10).long())

    def init(s: Any, _i: int) -> None:
        s.e = nn.Embedding(50, WIDTH, max_norm=0.7)

    return program(run, init)


@case(works=True)
def batch_norm_in_a_list() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return core(s, s.hidden[0](x)) * (1 + s.hidden[0].running_mean.mean())

    def init(s: Any, _i: int) -> None:
        s.hidden = [nn.BatchNorm1d(WIDTH)]

    return under(lambda net, x: through(net, net.layers[0].a(x)), run, init)


@case(works=True)
def hook_put_on_a_weight_in_forward() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        handle = s.a.weight.register_hook(lambda g: g * 0.5)
        s.hooks.append(handle)
        while len(s.hooks) > 1:
            s.hooks.pop(0).remove()
        return core(s, x)

    def init(s: Any, _i: int) -> None:
        s.hooks = []

    return program(run, init)


@case(works=True)
def hook_put_on_an_activation() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        return x + s.b(h.index_add(0, chosen, h[chosen].exp()))

    return under(lambda net, x: through(net, net.layers[0].a(x)), run)


# Python's state -------------------------------------------------------------------------------------------------------


class Slots:
    """A count in a slot."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Callable_:
    """A count in what is called."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> None:
        self.n += 1


def _cell() -> tuple[Callable[[], None], Callable[[], int]]:
    n = 0

    def more() -> None:
        nonlocal n
        n += 1

    return more, lambda: n


def _ticking(tick: Callable[[], Any], value: Callable[[], float]) -> Program:
    """Every block ticks, and the loss depends on the count."""

    def run(s: Any, x: Tensor) -> Tensor:
        tick()
        return smooth(s, x)

    return under(lambda net, x: through(net, x) * (1 + value()), run)


@case()
def count_in_a_cell() -> Program:
    return _ticking(*_cell())


@case()
def count_in_a_slot() -> Program:
    held = Slots()

    def tick() -> None:
        held.n += 1

    return _ticking(tick, lambda: held.n)


@case()
def count_in_what_is_called() -> Program:
    held = Callable_()
    return _ticking(held, lambda: held.n)


@case()
def count_on_a_function() -> Program:
    def tick() -> None:
        tick.n += 1  # type: ignore[attr-defined]

    tick.n = 0  # type: ignore[attr-defined]
    return _ticking(tick, lambda: tick.n)  # type: ignore[attr-defined]


@case()
def count_in_arrays() -> Program:
    numbers, bits, more = np.zeros(1), bytearray(1), array.array("d", [0.0])

    def tick() -> None:
        numbers[0] += 1
        bits[0] += 1
        more[0] += 1

    return _ticking(tick, lambda: float(numbers[0]) + bits[0] + more[0])


@case()
def count_behind_a_long_list() -> Program:
    held = [[(i, str(i)) for i in range(30_000)], Slots()]

    def tick() -> None:
        held[1].n += 1  # type: ignore[attr-defined]

    return _ticking(tick, lambda: held[1].n)  # type: ignore[attr-defined]


@case()
def takes_from_a_generator() -> Program:
    def numbers() -> Iterator[float]:
        yield from (1 / n for n in range(1, 1000))

    given = numbers()
    return program(lambda s, x: smooth(s, x) * next(given))


@case()
def takes_from_a_cycle() -> Program:
    given = cycle([0.1, 0.5, 0.9, 1.3, 1.7])
    return program(lambda s, x: smooth(s, x) * next(given))


@case()
def takes_from_a_count_in_the_root() -> Program:
    given = count(1)
    return under(lambda net, x: through(net, x) / next(given), smooth)


@case(works=True)
def holds_what_cannot_be_copied() -> Program:
    def init(s: Any, _i: int) -> None:
        s.lock, s.module, s.unused = threading.Lock(), np, (i for i in range(3))

    return program(smooth, init)


@case()
def chooses_by_the_type_of_a_tensor() -> Program:
    table = {torch.Tensor: torch.tanh, nn.Parameter: torch.sin}
    return program(lambda s, x: x + s.b(table[type(x)](s.a(x))))


# runs that leave their recording --------------------------------------------------------------------------------------


class Stop(Exception):
    """Leaves a forward early."""


@case()
def another_way_with_counts_on_it() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = x @ s.a.weight
        u = torch.tanh(h * 2)
        if os.environ.get("SILENT_OTHER_WAY"):
            s.stat.add_(1.0)
            s.count += 1
            u = (u[:, :, None] * u[:, None, :]).sum(-1)
        return x + (h.sin() * u) @ s.b.weight

    def init(s: Any, _i: int) -> None:
        s.stat, s.count = torch.zeros(()), 0

    def root(net: Net, x: Tensor) -> Tensor:
        return through(net, x) * (1 + sum(s.stat for s in net.layers)) + sum(s.count for s in net.layers)

    def batch(i: int) -> Any:
        os.environ.pop("SILENT_OTHER_WAY", None)
        if i >= 2:
            os.environ["SILENT_OTHER_WAY"] = "1"
        return (rows(i),)

    return under(root, run, init, batch)


@case()
def left_by_an_exception_that_the_root_catches() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        u = torch.tanh(h * 2)
        s.part = u.exp() * u
        if os.environ.get("SILENT_STOP"):
            raise Stop
        return x + s.b(h.sin() * s.part)

    def root(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            try:
                x = layer(x)
            except Stop:
                x = layer.part
            layer.part = None
        return x.square().mean()

    def init(s: Any, _i: int) -> None:
        s.part = None

    def batch(i: int) -> Any:
        os.environ.pop("SILENT_STOP", None)
        if i >= 2:
            os.environ["SILENT_STOP"] = "1"
        return (rows(i),)

    return under(root, run, init, batch)
