"""State that a block reaches by a name that it makes up as it runs, or that it keeps on a library's own objects."""

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
    "attribute_of_torch": "torch.n_{n} = getattr(torch, 'n_{n}', 0) + 1",
    "attribute_of_torch_by_a_text": "exec('torch.n_{n} = getattr(torch, \\'n_{n}\\', 0) + 1')",
    "attribute_of_torch_by_setattr": "setattr(torch, 'n_{n}', getattr(torch, 'n_{n}', 0) + 1)",
    "list_on_a_module_of_torchs": "nn.functional.l_{n} = getattr(nn.functional, 'l_{n}', []) + [1]",
    "list_that_grows_on_a_class_of_torchs": "append_to(nn.Linear)",
    "attribute_of_a_class_of_torchs": "nn.Linear.n_{n} = getattr(nn.Linear, 'n_{n}', 0) + 1",
    "attribute_of_a_function_of_torchs": "nn.functional.relu.n_{n} = getattr(nn.functional.relu, 'n_{n}', 0) + 1",
    "attribute_of_builtins": "builtins.n_{n} = getattr(builtins, 'n_{n}', 0) + 1",
}
SOURCE = """
import builtins, importlib, sys, torch
from torch import nn
HERE, NUMBER = [0], 0
held = sys.modules["held_{n}"]
def append_to(cls):
    if not hasattr(cls, "l_{n}"): cls.l_{n} = []
    cls.l_{n}.append(1)
def tick():
    {tick}
def value():
    found = [HERE[0], len(HERE), NUMBER, held.N, len(held.L), len(held.D), held.C.n]
    for one in (torch, nn.Linear, nn.functional.relu, builtins):
        found.append(getattr(one, "n_{n}", 0))
    for one in (nn.functional, nn.Linear):
        found.append(len(getattr(one, "l_{n}", [])))
    return float(sum(found))
"""


def _module(name: str, **values: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(values)
    sys.modules[name] = made
    return made


def _counts(tick: str, block: Callable[[Any, Tensor], Tensor]) -> Callable[[], Program]:
    def made() -> Program:
        number = next(_NUMBERS)
        _module(f"held_{number}", N=0, L=[], D={}, C=types.SimpleNamespace(n=0))
        module = _module(f"counts_{number}")
        exec(SOURCE.format(n=number, tick=tick.format(n=number)), vars(module))

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
torch.plugins_{n} = getattr(torch, "plugins_{n}", 0) + 1
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
