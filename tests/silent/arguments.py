"""Programs whose blocks are given Python values that no tensor shows."""

from __future__ import annotations

import fractions
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from silent.harness import Program
from silent.kit import WIDTH, case, program, rows
from silent.state import Mode, Settings, Slotted


def argued(read: Callable[[Any], Any], values: Callable[[int], Any]) -> Program:
    """Blocks with a second argument out of which ``read`` makes a number."""
    return program(lambda s, x, given: x + s.b(torch.tanh(s.a(x) + read(given))), batch=lambda i: (rows(i), values(i)))


@case()
def numpy_scalar_argument() -> Program:
    return argued(lambda v: v, lambda i: np.float32(i / 2))


@case()
def numpy_integer_argument() -> Program:
    return argued(lambda v: int(v), lambda i: np.int64(i))


@case()
def numpy_array_argument() -> Program:
    return argued(lambda v: torch.from_numpy(v), lambda i: np.full(WIDTH, i, dtype=np.float32))


@case()
def slice_argument() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("table", torch.randn(200, WIDTH))

    return program(
        lambda s, x, where: x + s.b(torch.tanh(s.a(x) + s.table[where])),
        init,
        lambda i: (rows(i), slice(3 * i, 3 * i + 64)),
    )


@case()
def enum_argument() -> Program:
    return argued(lambda v: v.value, lambda i: Mode.HARD if i % 2 else Mode.SOFT)


@case()
def dataclass_argument() -> Program:
    return argued(lambda v: v.shift, lambda i: Settings(shift=i / 3))


@case()
def slotted_argument() -> Program:
    return argued(lambda v: v.shift, lambda i: Slotted(i / 3))


@case()
def namespace_argument() -> Program:
    return argued(lambda v: v.a.b, lambda i: types.SimpleNamespace(a=types.SimpleNamespace(b=i / 3)))


@case()
def function_argument() -> Program:
    return argued(lambda f: f(0.0), lambda i: lambda v: v + i)


@case()
def partial_argument() -> Program:
    return argued(lambda f: f(2.0), lambda i: functools.partial(pow, i))


@case()
def range_and_set_arguments() -> Program:
    return argued(lambda v: len(v[0]) + sum(v[1]), lambda i: (range(i), frozenset({i, 7})))


@case(works=True)
def nested_dict_argument() -> Program:
    return argued(lambda v: v["a"][1]["b"], lambda i: {"a": [0, {"b": i / 2}]})


@case()
def bytes_argument() -> Program:
    return argued(lambda v: v[0] / 100, lambda i: bytes([40 + i]))


@case()
def fraction_argument() -> Program:
    return argued(float, lambda i: fractions.Fraction(i, 3))


@case()
def complex_argument() -> Program:
    return argued(lambda v: v.imag, lambda i: complex(1, i))
