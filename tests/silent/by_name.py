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

import torch
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import case, program
from silent.objects import _routed
from silent.outside import smooth

_NUMBERS = itertools.count()
TICKS = {
    "import_of_a_computed_name": "importlib.import_module('held_' + str({n})).N += 1",
    "module_by_a_computed_name": "sys.modules['held_' + str({n})].L.append(1)",
    "table_of_a_module_by_a_computed_name": "sys.modules['held_' + str({n})].D[len(sys.modules['held_{n}'].D)] = 1",
    "object_in_a_module_by_a_computed_name": "importlib.import_module('held_' + str({n})).C.n += 1",
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
    "attribute_of_a_thread": "t = threading.current_thread(); t.n_{n} = getattr(t, 'n_{n}', 0) + 1",
    "attribute_of_a_logger": "t = logging.getLogger('x'); t.n_{n} = getattr(t, 'n_{n}', 0) + 1",
    "subclass_of_a_class": "Base.__subclasses__()[0].n += 1",
    "object_of_the_garbage_collector": "[setattr(o, 'n', o.n + 1) for o in gc.get_objects() if type(o) is Marked]",
    "method_of_a_caller": "sys._getframe(1).f_locals['s'].held[0] += 1",
}
SOURCE = """
import builtins, gc, importlib, logging, sys, threading, torch
from torch import nn
HERE, NUMBER = [0], 0
class Base: pass
class Leaf(Base): n = 0
class Marked: n = 0
MARKED = [Marked()]
held = sys.modules["held_{n}"]
def append_to(cls):
    if not hasattr(cls, "l_{n}"): cls.l_{n} = []
    cls.l_{n}.append(1)
def tick():
    {tick}
def value():
    logged, thread = logging.getLogger("x"), threading.current_thread()
    found = [HERE[0], len(HERE), NUMBER, Leaf.n, MARKED[0].n, held.N, len(held.L), len(held.D), held.C.n]
    for one in (torch, nn.Linear, nn.functional.relu, builtins, thread, logged):
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


WHOLE_PROCESS = {  # recordings look at all that is loaded, for seconds; the first of TICKS stays as their example
    "module_by_a_computed_name",
    "table_of_a_module_by_a_computed_name",
    "object_in_a_module_by_a_computed_name",
    "text_that_is_executed",
    "text_that_is_evaluated",
    "attribute_of_torch_by_a_text",
}

for _name, _tick in TICKS.items():
    for _block in (smooth, _routed):
        _made = _counts(_tick, _block)
        _made.__name__ = f"{_name}_{_block.__name__.strip('_')}"
        _made.__module__ = __name__
        case(works=True, slow=_block is _routed or _name in WHOLE_PROCESS)(_made)


def _meter() -> list[int]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and "METER" not in frame.f_locals:
        frame = frame.f_back
    return [] if frame is None else frame.f_locals["METER"]


@case(works=True)
def variable_of_the_loop_that_calls() -> Program:
    counted: list[int] = []

    def run(s: Any, x: Tensor) -> Tensor:
        _meter().append(1)
        return _routed(s, x)

    def step(model: nn.Module, batch: Any, _i: int) -> list[Tensor]:
        def forward() -> Tensor:
            METER = counted  # noqa: F841
            return model(*batch)

        loss = forward()
        loss.backward()
        return [loss]

    return program(run, step=step, also=lambda: torch.tensor(counted))


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


def _imports_a_plugin(plugin: str, registers: bool) -> Program:
    """Blocks import a module that writes to another one, and to torch."""
    number, folder = next(_NUMBERS), Path(tempfile.mkdtemp())
    registry = _module(f"registry_{number}")
    exec(REGISTRY, vars(registry))
    (folder / f"plugin_{number}.py").write_text(plugin.format(n=number))
    sys.path.append(str(folder))

    def run(s: Any, x: Tensor) -> Tensor:
        importlib.import_module(f"plugin_{number}")
        return smooth(s, registry.FOUND["scale"](x))

    def seen() -> list[float]:
        there = f"plugin_{number}" in sys.modules
        return [float(there), float(len(registry.ORDER)), float(getattr(torch, f"plugins_{number}", 0))]

    made = program(run, steps=3)
    if not registers:  # what is registered once in a process stays from planning on
        made.also = seen
    return made


@case(works=True, slow=True)
def import_of_a_plugin() -> Program:
    return _imports_a_plugin(PLUGIN, registers=False)


@case(works=True, slow=True)
def import_of_a_plugin_that_registers_an_operator() -> Program:
    operator = """
KEPT = torch.library.Library("plugin_{n}", "DEF")
KEPT.define("twice(Tensor x) -> Tensor")
"""
    return _imports_a_plugin(PLUGIN + operator, registers=True)
