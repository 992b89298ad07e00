"""Programs whose state is held where a walk through attributes and globals does not come by."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import io
import itertools
import os
import queue
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silent import elsewhere
from silent.harness import Program
from silent.kit import WIDTH, case, program, rows
from silent.outside import core, smooth, through, under
from silent.tensors import ending


class Thing:
    """An object that is known by what it holds."""

    n: int = 0
    next: Thing | None = None


def counting(count: Callable[[], Any], read: Callable[[Any], Any], **more: Any) -> Program:
    """Blocks that count somewhere, under a root that reads the count."""

    def run(s: Any, x: Tensor) -> Tensor:
        count()
        return smooth(s, x)

    return ending(read, run, **more)


def numbering(draw: Callable[[], Any]) -> Program:
    """Blocks that keep what they drew, under a root that adds it up."""

    def run(s: Any, x: Tensor) -> Tensor:
        s.last = draw()
        return smooth(s, x)

    return ending(lambda net: sum(layer.last for layer in net.layers), run, lambda s, i: setattr(s, "last", 0))


# bound methods --------------------------------------------------------------------------------------------------------


@case()
def next_of_an_iterator() -> Program:
    return numbering(itertools.count(1).__next__)


@case()
def vocabulary_that_numbers_its_keys() -> Program:
    numbers: dict[int, int] = collections.defaultdict(itertools.count().__next__)
    return numbering(lambda: numbers[len(numbers)])


@case(works=True)
def bound_draw_of_a_generator() -> Program:
    draw = random.Random(0).random
    return program(lambda s, x: core(s, x) * (1 + draw()))


@case(works=True)
def bound_draw_of_the_root() -> Program:
    draw = random.Random(0).random
    return ending(lambda net: draw(), smooth)


@case(works=True)
def bound_append() -> Program:
    log: list[float] = []
    add, size = log.append, log.__len__
    return counting(lambda: add(1.0), lambda net: size())


@case(works=True)
def numpys_bits() -> Program:
    bits = np.random.PCG64(3)
    return ending(lambda net: bits.random_raw() % 7, smooth)


@case(works=True)
def generator_of_a_class_that_counts() -> Program:
    class Counted(random.Random):
        drawn = 0

        def random(self) -> float:
            self.drawn += 1
            return super().random()

    stream = Counted(3)
    return ending(lambda net: stream.random() + stream.drawn, smooth)


@case()
def what_the_system_draws() -> Program:
    system = random.SystemRandom()
    return ending(lambda net: 0 * system.random(), smooth)


# modules of Python ----------------------------------------------------------------------------------------------------


def file_of_ones_own() -> Any:
    module: Any = types.ModuleType("counted_elsewhere")
    module.table, module.n, module.inner = {"n": 0}, 0, types.ModuleType("counted_elsewhere.inner")
    module.inner.n = 0
    sys.modules[module.__name__], sys.modules[module.inner.__name__] = module, module.inner
    return module


@case(works=True)
def imported_by_the_forward() -> Program:
    file_of_ones_own()

    def batch(i: int) -> Any:
        table()["n"] = i
        return (rows(i),)

    def table() -> dict[str, int]:
        import counted_elsewhere  # type: ignore[import-not-found]

        return counted_elsewhere.table  # type: ignore[no-any-return]

    def count() -> None:
        table()["n"] += 1

    return counting(count, lambda net: table()["n"], batch=batch)


@case(works=True)
def attribute_of_a_file_in_a_file() -> Program:
    held: Any = file_of_ones_own()

    def count() -> None:
        elsewhere.held.inner.n += 1  # type: ignore[attr-defined]

    def batch(i: int) -> Any:
        held.inner.n = i
        elsewhere.held = held  # type: ignore[attr-defined]
        return (rows(i),)

    return counting(count, lambda net: elsewhere.held.inner.n, batch=batch)  # type: ignore[attr-defined]


@case(works=True)
def file_of_a_closure() -> Program:
    held = file_of_ones_own()

    def count() -> None:
        held.n += 1

    return counting(count, lambda net: held.n)


@case(works=True)
def by_the_name_of_a_global() -> Program:
    def count() -> None:
        globals()["COUNTED"] += 1

    def batch(i: int) -> Any:
        globals()["COUNTED"] = i
        return (rows(i),)

    return counting(count, lambda net: globals()["COUNTED"], batch=batch)


# references -----------------------------------------------------------------------------------------------------------


@case(works=True)
def parent_known_weakly() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.parent().counted += 1
        return smooth(s, x)

    made = ending(lambda net: net.counted, run)
    made.model.counted = 0  # type: ignore[assignment]
    for layer in made.model.layers:
        object.__setattr__(layer, "parent", weakref.ref(made.model))
    return made


def counted_thing(holding: Callable[[Thing], Callable[[], Thing]]) -> Program:
    thing = Thing()
    find = holding(thing)

    def count() -> None:
        find().n += 1

    made = counting(count, lambda net: find().n)
    made.world.kept = [thing]
    return made


@case(works=True)
def object_in_a_weak_set() -> Program:
    def holding(thing: Thing) -> Callable[[], Thing]:
        held = weakref.WeakSet([thing])
        return lambda: next(iter(held))

    return counted_thing(holding)


@case(works=True)
def object_that_is_a_key() -> Program:
    def holding(thing: Thing) -> Callable[[], Thing]:
        held = {thing: 1}
        return lambda: next(iter(held))

    return counted_thing(holding)


@case(works=True)
def object_in_a_mapping_proxy() -> Program:
    def holding(thing: Thing) -> Callable[[], Thing]:
        held = types.MappingProxyType({"a": thing})
        return lambda: held["a"]

    return counted_thing(holding)


@case(works=True)
def object_at_the_end_of_a_chain() -> Program:
    def holding(thing: Thing) -> Callable[[], Thing]:
        head = thing
        for _ in range(30):
            before = Thing()
            before.next, head = head, before

        def last() -> Thing:
            at = head
            while at.next is not None:
                at = at.next
            return at

        return last

    return counted_thing(holding)


@case(works=True)
def class_without_a_dict() -> Program:
    class Meter:
        __slots__ = ()
        total = 0

        def add(self) -> None:
            type(self).total += 1

    meter = Meter()
    return counting(meter.add, lambda net: meter.total)


@case(works=True)
def field_set_past_the_freeze() -> Program:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        n: int = 0

    held = Frozen()
    return counting(lambda: object.__setattr__(held, "n", held.n + 1), lambda net: held.n)


# of the process -------------------------------------------------------------------------------------------------------


@case(works=True)
def variable_of_the_context() -> Program:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(0)
    return counting(lambda: variable.set(variable.get() + 1), lambda net: variable.get())


@case(works=True)
def variable_of_the_environment() -> Program:
    name = "COUNTED_BY_A_FORWARD"

    def batch(i: int) -> Any:
        os.environ[name] = str(i)
        return (rows(i),)

    def count() -> None:
        os.environ[name] = str(int(os.environ[name]) + 1)

    return counting(count, lambda net: int(os.environ[name]), batch=batch)


@case()
def queue_that_fills() -> Program:
    held: queue.SimpleQueue[int] = queue.SimpleQueue()
    return counting(lambda: held.put(1), lambda net: held.qsize(), recovers=False)


@case()
def text_that_grows() -> Program:
    held = io.StringIO()
    return counting(lambda: held.write("x"), lambda net: len(held.getvalue()))


# of torch -------------------------------------------------------------------------------------------------------------


@case(works=True)
def sobol_points() -> Program:
    return program(
        lambda s, x: core(s, x) + s.engine.draw(1),
        lambda s, i: setattr(s, "engine", torch.quasirandom.SobolEngine(WIDTH)),
    )


@case(works=True)
def sobol_points_of_the_root() -> Program:
    engine = torch.quasirandom.SobolEngine(WIDTH)
    return ending(lambda net: engine.draw(1).mean(), smooth)


@case(works=True)
def optimizer_inside() -> Program:
    held = torch.zeros(WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([held], lr=0.1, momentum=0.9)

    def run(s: Any, x: Tensor) -> Tensor:
        held.grad = x.detach().mean(0)
        optimizer.step()
        return core(s, x)

    return ending(lambda net: held.detach().sum(), run)


# caches and hooks -----------------------------------------------------------------------------------------------------


@case(works=True)
def drawn_table_in_an_lru_cache() -> Program:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.randn(n)

    table(WIDTH)
    return ending(lambda net: table(7).mean(), lambda s, x: smooth(s, x) + table(WIDTH))


@case(works=True)
def hook_on_every_module() -> Program:
    log: list[int] = []

    def root(net: Any, x: Tensor) -> Tensor:
        hook = nn.modules.module.register_module_forward_hook(lambda *_: log.append(1))
        try:
            return through(net, x) * (1 + len(log))
        finally:
            hook.remove()

    return under(root, core)


# containers of the user's own -----------------------------------------------------------------------------------------


@case(works=True)
def dict_that_doubles() -> Program:
    class Doubling(dict[str, float]):
        def __setitem__(self, key: str, value: float) -> None:
            super().__setitem__(key, value * 2)

        def update(self, other: Any) -> None:  # type: ignore[override]
            for key, value in other.items():
                self[key] = value

    held = Doubling()
    held["a"] = 1.0
    return counting(lambda: held.__setitem__("n", 1.0), lambda net: held["a"])


@case(works=True)
def dict_that_cannot_be_cleared() -> Program:
    class Kept(dict[str, float]):
        def clear(self) -> None:
            raise TypeError("no clearing")

    held = Kept(a=1.0)
    return counting(lambda: held.__setitem__("a", held["a"] + 1), lambda net: held["a"])


@case(works=True)
def zero_with_a_sign() -> Program:
    held = types.SimpleNamespace(zero=0.0)

    def count() -> None:
        held.zero = -held.zero

    return counting(count, lambda net: 0.5 if str(held.zero).startswith("-") else 0.1)


@case(works=True)
def class_that_logs_what_is_set() -> Program:
    log: list[str] = []

    class Logged:
        __slots__ = ("n",)

        def __init__(self) -> None:
            object.__setattr__(self, "n", 0)

        def __setattr__(self, key: str, value: Any) -> None:
            log.append(key)
            object.__setattr__(self, key, value)

    held = Logged()

    def count() -> None:
        held.n = held.n + 1

    return counting(count, lambda net: held.n + len(log))


@case(works=True)
def object_of_the_batch_that_counts() -> Program:
    held = Thing()

    def root(net: Any, x: Tensor, given: Thing) -> Tensor:
        given.n += 1
        return through(net, x) * (1 + given.n)

    return under(root, smooth, batch=lambda i: (rows(i), held), also=lambda: (held.n,))
