"""Programs whose blocks compute with Python state that no tensor shows."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from silent import elsewhere
from silent.harness import Program
from silent.kit import Net, attend, block_class, case, program, rows, stack


class Mode(enum.Enum):
    """Two ways, with a number each."""

    SOFT = 0.25
    HARD = 1.75


@dataclasses.dataclass
class Settings:
    """A plain configuration."""

    shift: float = 0.0
    inner: Any = None


class Slotted:
    """A configuration without ``__dict__``."""

    __slots__ = ("shift",)

    def __init__(self, shift: float) -> None:
        self.shift = shift


Pair = collections.namedtuple("Pair", "shift other")
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=0.0)
LOCAL = threading.local()
TABLE = {"shift": 0.0}
RECENT: list[float] = [0.0]


def shifted(read: Callable[[Any], Any], initial: Any, values: Callable[[int], Any]) -> Program:
    """Blocks with an attribute ``setting`` out of which ``read`` makes a number, set anew before each step."""
    model = stack(
        lambda s, x: x + s.b(torch.tanh(s.a(x) + read(s.setting))), lambda s, i: setattr(s, "setting", initial)
    )
    batch = attend(model, "setting", lambda i: initial if i == 0 else values(i))
    return Program(model=model, batch=batch)


# attributes -----------------------------------------------------------------------------------------------------------


@case()
def tuple_attribute() -> Program:
    return shifted(lambda v: v[1], (1.0, 0.0), lambda i: (1.0, i / 2))


@case()
def dict_attribute_changed_in_place() -> Program:
    program_ = shifted(lambda v: v["shift"], {"shift": 0.0}, lambda i: {"shift": 0.0})
    tables = [{"shift": 0.0} for _ in program_.model.layers]
    for layer, table in zip(program_.model.layers, tables, strict=True):
        layer.setting = table

    def batch(i: int) -> Any:
        for layer in program_.model.layers:
            layer.setting["shift"] = i / 2
        return (rows(i),)

    program_.batch = batch
    return program_


@case()
def enum_attribute() -> Program:
    return shifted(lambda v: 1.0 if v is Mode.HARD else -1.0, Mode.SOFT, lambda i: Mode.HARD if i > 1 else Mode.SOFT)


@case()
def numpy_attribute() -> Program:
    return shifted(lambda v: float(v), np.float64(0), lambda i: np.float64(i))


@case()
def numpy_array_attribute_changed_in_place() -> Program:
    shared = np.zeros(1)
    program_ = shifted(lambda v: float(v[0]), shared, lambda i: shared)
    before = program_.batch

    def batch(i: int) -> Any:
        shared[0] = i
        return before(i)

    program_.batch = batch
    return program_


@case()
def configuration_in_a_configuration() -> Program:
    return shifted(
        lambda v: v.inner.inner.shift,
        Settings(inner=Settings(inner=Settings())),
        lambda i: Settings(inner=Settings(inner=Settings(shift=i / 2))),
    )


@case()
def private_configuration() -> Program:
    model = stack(lambda s, x: x + s.b(torch.tanh(s.a(x) + s._cfg.shift)), lambda s, i: setattr(s, "_cfg", Settings()))

    def batch(i: int) -> Any:
        for layer in model.layers:
            layer._cfg.shift = i / 2
        return (rows(i),)

    return Program(model=model, batch=batch)


@case()
def partial_attribute() -> Program:
    return shifted(lambda f: f(), functools.partial(float, 0), lambda i: functools.partial(float, i))


@case()
def bound_method_attribute() -> Program:
    return shifted(lambda f: f(), (0.0).__abs__, lambda i: (-i / 2).__abs__)


@case()
def namedtuple_and_string_attribute() -> Program:
    return shifted(lambda v: v.shift + len(v.other), Pair(0.0, ""), lambda i: Pair(0.0, "x" * i))


@case()
def counter_that_matters_later() -> Program:
    def init(s: Any, i: int) -> None:
        s.calls = 0

    def run(s: Any, x: Tensor) -> Tensor:
        s.calls += 1
        return x + s.b(torch.tanh(s.a(x) + (0.5 if s.calls > 2 else 0.0)))

    return program(run, init, steps=5)


@case()
def counter_in_a_list() -> Program:
    def init(s: Any, i: int) -> None:
        s.history = []

    def run(s: Any, x: Tensor) -> Tensor:
        s.history.append(1)
        return x + s.b(torch.tanh(s.a(x) + len(s.history) / 4))

    return program(run, init)


@case()
def counter_of_the_model() -> Program:
    class Counting(Net):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            for layer in self.layers:
                layer.owner["step"] = self.step
            return super().forward(x)

    made = block_class(
        lambda s, x: x + s.b(torch.tanh(s.a(x) + min(1.0, s.owner["step"] / 4))), lambda s, i: setattr(s, "owner", {})
    )
    return Program(model=Counting([made(i) for i in range(3)]), batch=lambda i: (rows(i),))


@case()
def closure() -> Program:
    shift = 0.0

    def batch(i: int) -> Any:
        nonlocal shift
        shift = i / 2
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + shift)), batch=batch)


@case()
def class_attribute() -> Program:
    made = block_class(lambda s, x: x + s.b(torch.tanh(s.a(x) + s.shift)))

    def batch(i: int) -> Any:
        made.shift = i / 2
        return (rows(i),)

    made.shift = 0.0
    return Program(model=Net([made(i) for i in range(3)]), batch=batch)


@case()
def class_attribute_in_a_list() -> Program:
    made = block_class(lambda s, x: x + s.b(torch.tanh(s.a(x) + s.shifts[-1])))
    made.shifts = [0.0]

    def batch(i: int) -> Any:
        made.shifts.append(i / 2)
        return (rows(i),)

    return Program(model=Net([made(i) for i in range(3)]), batch=batch)


@case()
def property_of_the_block() -> Program:
    made = block_class(lambda s, x: x + s.b(torch.tanh(s.a(x) + s.shift)))
    made.shift = property(lambda s: RECENT[-1])

    def batch(i: int) -> Any:
        RECENT[:] = [i / 2]
        return (rows(i),)

    return Program(model=Net([made(i) for i in range(3)]), batch=batch)


@case()
def global_of_another_module() -> Program:
    def batch(i: int) -> Any:
        elsewhere.set_shift(i / 2)
        return (rows(i),)

    return program(lambda s, x: x + s.b(elsewhere.activation(s.a(x))), batch=batch)


@case()
def global_table() -> Program:
    def batch(i: int) -> Any:
        TABLE["shift"] = i / 2
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + TABLE["shift"])), batch=batch)


@case()
def clock() -> Program:
    now = [0.0]

    def batch(i: int) -> Any:
        now[0] = i * 0.37
        return (rows(i),)

    def tick() -> float:
        now[0] += 0.01
        return now[0]

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + tick())), batch=batch, world=types.SimpleNamespace(now=now))


@case()
def context_variable() -> Program:
    def batch(i: int) -> Any:
        CONTEXT.set(i / 2)
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + CONTEXT.get())), batch=batch)


@case()
def thread_local() -> Program:
    def batch(i: int) -> Any:
        LOCAL.shift = i / 2
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + LOCAL.shift)), batch=batch)


@case()
def environment_variable() -> Program:
    def batch(i: int) -> Any:
        os.environ["SILENT_SHIFT"] = str(i / 2)
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) + float(os.environ["SILENT_SHIFT"]))), batch=batch)


@case()
def iterator_on_the_block() -> Program:
    return program(
        lambda s, x: x + s.b(torch.tanh(s.a(x) + next(s.values))),
        lambda s, i: setattr(s, "values", itertools.cycle([0.0, 0.5, 1.0, -1.0, 2.0])),
        recovers=False,
    )


@case()
def default_argument_that_grows() -> Program:
    world = types.SimpleNamespace(seen=[])

    def run(s: Any, x: Tensor, seen: list[int] = world.seen) -> Tensor:
        seen.append(len(seen))
        return x + s.b(torch.tanh(s.a(x) + seen[-1] / 8))

    return program(run, world=world)


@case()
def attribute_of_a_function() -> Program:
    def activation(h: Tensor) -> Tensor:
        return torch.tanh(h + activation.shift)

    activation.shift = 0.0

    def batch(i: int) -> Any:
        activation.shift = i / 2
        return (rows(i),)

    return program(lambda s, x: x + s.b(activation(s.a(x))), batch=batch)


@case()
def callable_object_with_state() -> Program:
    class Schedule:
        def __init__(self) -> None:
            self.table = {"now": 0.0}

        def __call__(self, h: Tensor) -> Tensor:
            return torch.tanh(h + self.table["now"])

    schedule = Schedule()

    def batch(i: int) -> Any:
        schedule.table["now"] = i / 2
        return (rows(i),)

    return program(lambda s, x: x + s.b(s.act(s.a(x))), lambda s, i: setattr(s, "act", schedule), batch)


@case()
def setting_found_by_name() -> Program:
    return shifted(lambda v: getattr(elsewhere, v), "ZERO", lambda i: ("ZERO", "ONE")[i % 2])


@case()
def function_of_torch_replaced() -> Program:
    plain = F.gelu

    def batch(i: int) -> Any:
        elsewhere.act = plain if i < 2 else F.silu
        return (rows(i),)

    return program(lambda s, x: x + s.b(elsewhere.act(s.a(x))), batch=batch)


@case()
def order_of_a_set_of_names() -> Program:
    def batch(i: int) -> Any:
        TABLE["order"] = ["a", "b"] if i % 2 == 0 else ["b", "a"]
        return (rows(i),)

    def run(s: Any, x: Tensor) -> Tensor:
        h = x
        for name in TABLE["order"]:
            h = torch.tanh(getattr(s, name)(h))
        return x + h.exp()

    return program(run, batch=batch)


# instances of one class -----------------------------------------------------------------------------------------------


@case()
def lambda_of_each_block() -> Program:
    def init(s: Any, i: int) -> None:
        s.mix = (lambda u, v: u - 2 * v) if i % 2 else (lambda u, v: v - 2 * u)

    return program(lambda s, x: x + torch.exp(s.mix(s.a(x), s.b(x)).tanh()), init)


@case()
def forward_of_each_instance() -> Program:
    def even(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x)).exp() - x)

    def odd(s: Any, x: Tensor) -> Tensor:
        return x + s.b(x - torch.tanh(s.a(x)).exp())

    def init(s: Any, i: int) -> None:
        s.forward = types.MethodType(odd if i % 2 else even, s)

    return program(even, init)


@case()
def number_of_the_block_in_a_tuple() -> Program:
    return program(
        lambda s, x: x + s.b(torch.tanh(s.a(x) * s.where[0])), lambda s, i: setattr(s, "where", (1.0 + i, "of 3"))
    )


@case()
def first_block_is_another() -> Program:
    first: list[Any] = []

    def init(s: Any, i: int) -> None:
        if not first:
            first.append(id(s))

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return x + s.b(torch.exp(h.tanh() - h.sigmoid()) if id(s) in first else torch.exp(h.sigmoid() - h.tanh()))

    return program(run, init)


@case()
def windows_that_alternate() -> Program:
    def init(s: Any, i: int) -> None:
        s.window = {"size": 4 if i % 2 else 16}

    def run(s: Any, x: Tensor) -> Tensor:
        n = len(x)
        q = s.a(x)
        near = (torch.arange(n)[:, None] - torch.arange(n)).abs() < s.window["size"]
        return x + s.b(torch.softmax((q @ q.T).masked_fill(~near, -1e9), -1) @ q)

    return program(run, init)
