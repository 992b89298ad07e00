"""State that a block reaches by a name in a string, and modules that it imports."""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from silent.harness import Program
from silent.kit import case, program
from silent.objects import _routed
from silent.outside import smooth

_NUMBERS = itertools.count()
TICKS = {
    "text_that_is_executed": "exec('HERE[0] += 1', globals())",
    "text_that_is_evaluated": "eval('HERE.append(1)')",
    "global_by_a_computed_name": "globals()['HE' + 'RE'].append(1)",
    "global_that_is_set_by_a_computed_name": "globals()['N' + 'UMBER'] = globals()['N' + 'UMBER'] + 1",
}
SOURCE = """
HERE, NUMBER = [0], 0
def tick():
    {tick}
def value():
    return float(HERE[0] + len(HERE) + NUMBER)
"""


def _module(name: str, **values: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(values)
    sys.modules[name] = made
    return made


def _counts(tick: str, block: Callable[[Any, Tensor], Tensor]) -> Callable[[], Program]:
    def made() -> Program:
        number = next(_NUMBERS)
        module = _module(f"counts_{number}")
        exec(SOURCE.format(tick=tick), vars(module))

        def run(s: Any, x: Tensor) -> Tensor:
            module.tick()
            return block(s, x) * (1 + module.value() / 100 + s.held[0] / 100)

        def init(s: Any, _i: int) -> None:
            s.held = [0]

        built = program(run, init, steps=3)
        built.also = lambda: [module.value(), *(float(s.held[0]) for s in built.model.layers)]
        return built

    return made


for _name, _tick in TICKS.items():
    for _block in (smooth, _routed):
        _made = _counts(_tick, _block)
        _made.__name__ = f"{_name}_{_block.__name__.strip('_')}"
        _made.__module__ = __name__
        case(works=True, slow=_block is _routed)(_made)


PLUGIN = """
import torch
from registry_{n} import ORDER, register
ORDER.append("imported")
@register("scale")
def scale(x):
    return x * 1.1
"""
REGISTRY = """
FOUND, ORDER = {}, []
def register(name):
    def keep(function):
        FOUND[name] = function
        return function
    return keep
"""


def _imports_a_plugin(plugin: str) -> Program:
    """Blocks import a module that writes to another one, and to torch. It stays, as the first step would have it."""
    number, folder = next(_NUMBERS), Path(tempfile.mkdtemp())
    registry = _module(f"registry_{number}")
    exec(REGISTRY, vars(registry))
    (folder / f"plugin_{number}.py").write_text(plugin.format(n=number))
    sys.path.append(str(folder))

    def run(s: Any, x: Tensor) -> Tensor:
        importlib.import_module(f"plugin_{number}")
        return smooth(s, registry.FOUND["scale"](x))

    return program(run, steps=3)


@case(works=True, slow=True)
def import_of_a_plugin() -> Program:
    return _imports_a_plugin(PLUGIN)


@case(works=True, slow=True)
def import_of_a_plugin_that_registers_an_operator() -> Program:
    operator = """
KEPT = torch.library.Library("plugin_{n}", "DEF")
KEPT.define("twice(Tensor x) -> Tensor")
"""
    return _imports_a_plugin(PLUGIN + operator)
