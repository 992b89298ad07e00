"""Python state that a forward can reach, and so read or change.

A forward reads more than its arguments: attributes of modules, configurations, containers, closures, globals that its
code names, the state of random generators. None of that passes a dispatcher. A `Reach` walks to the state that a module
and some values refer to (its kinds: `state_kinds.KINDS`), so that changes by a run can be seen and undone: a recording
on fake tensors must leave no trace.

NOTE [ What code cannot name ]
A model may hold a vocabulary of 100,000 entries that its forward never reads. A container of more than `MANY` entries
is not walked if no code on the walk reads the name of its attribute, unless a class has a library's methods, whose
names are not collected, or some code computes names (`_BY_ANY_NAME`). A walk compares identities in C, and enters only
values that can change: not plain values, nor tuples of them (`worth_a_look`).

NOTE [ Code of libraries ]
An object of `networkx` leads through the methods of its class to all of networkx, and from there to all of sympy. The
state of the user's code, and of the packages of the model's modules, is walked completely. Code of other installed
packages is followed call by call, nearest first, until `MOST_OF_LIBRARIES` values were reached through it.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture import bytecode_names, side_effects, state_kinds
from jettison.capture.bytecode_names import is_foreign, names_in, package_of
from jettison.capture.side_effects import put_switches_back, read_switches
from jettison.capture.state_kinds import PLAIN, AttributeState, KeptState, TableState, is_a, worth_a_look
from jettison.capture.tensor_subclasses import memory_key
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

MOST_VALUES = 100_000
"""Most values of one walk; a forward that reaches more is known in part, and witnesses cover the rest."""
MOST_OF_LIBRARIES = 2_000
"""Values reached through code of libraries after which no further call is followed. See NOTE [ Code of libraries ]."""
MOST_DEEP = 64
MANY = 256
_BY_ANY_NAME = frozenset(
    (
        *("getattr", "setattr", "delattr", "vars", "__dict__", "globals", "locals"),
        *("eval", "exec", "attrgetter", "inspect", "gc"),
    )
)
"""Names that code has to mention to reach an attribute by a computed name."""
_KNOWN_BASES = ("builtins", "abc", "typing", "torch.nn.modules.module", "torch.nn.modules.container")
_PLAIN_CONTAINERS = (dict, list, set, deque)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)

Known = dict[int, tuple[Any, Any, list[Any]]]
"""By id: a large container, a copy of it, and those of its entries that are walked."""
S = TypeVar("S", bound=KeptState)


class Reach:
    """The state reached from some modules and values, as it was when this was built.

    Args:
        modules: every attribute of them and of their submodules, and everything that their methods name.
        values: other arguments of a forward.
        known: large containers that an earlier walk has read; this one adds its own.
        most: most values to walk.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        values: Iterable[Any] = (),
        *,
        known: Known | None = None,
        most: int = MOST_VALUES,
    ) -> None:
        self.states: list[KeptState] = [*map(state_kinds.CacheState, _said_once()), _Variables(None)]
        self.stand_ins: dict[int, tuple[Any, Any]] = {}  # by id: objects that are set aside, and their stand-ins
        self.refused: list[UnsupportedModule] = []  # errors for objects that a run used; its code may have caught them
        self._known: Known = {} if known is None else known
        self._large: Known = {}
        self._most = most
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no id is reused
        self._waiting: deque[tuple[Any, int]] = deque()  # breadth-first: near values come first
        self._libraries: list[tuple[Any, int]] = []  # functions and classes: see NOTE [ Code of libraries ]
        self._own_packages: set[str] = set()
        self._names: set[str] = set()  # that code mentions
        self._named: set[tuple[int, str]] = set()  # globals: (id of the table, name)
        self._unnamed: list[tuple[str, Any, int]] = []  # large containers: see NOTE [ What code cannot name ]
        self._tables: set[int] = set()  # dicts of modules, threads and loggers
        self._importing: dict[str, list[tuple[KeptState, Any]]] = {}  # state before a module's code ran
        self._prints_errors = logging.raiseExceptions
        self._modules(modules)
        variables = (value for _, value in contextvars.copy_context().items())  # hooks collect outputs in some
        for table in _global_hooks():
            self._add(table)
        for value in (*values, *variables, *(hook for table in _global_hooks() for hook in table.values())):
            if not is_a(value, Tensor):
                self._later(value, 0)
        self._walk()
        for module in side_effects.imported_in_runs():
            self._kept(module)
        self.switches = read_switches()
        self._known.clear()  # drops what no longer exists
        self._known.update(self._large)

    # results ---------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> int:
        """Number of walked values."""
        return len(self._seen)

    def of(self, kind: type[S]) -> list[S]:
        return [state for state in self.states if isinstance(state, kind)]

    def moved(self) -> list[Any]:
        """Iterators that have advanced since: they cannot be restored."""
        return [state.holder for state in self.of(state_kinds.Progress) if not state.is_unchanged()]

    def arrays(self) -> list[TableState]:
        """States of arrays that are copied."""
        return [one for one in self.of(TableState) if state_kinds.is_number_array(one.holder)]

    @property
    def has_large_copies(self) -> bool:
        """Whether a copy is, or may be, too large to be made in each step."""
        if any(getattr(one.holder, "nbytes", 0) > state_kinds.MOST_BYTES for one in self.arrays()):
            return True
        return any(state_kinds.is_copied_whole(Same(type(value))) for value, _ in self.stand_ins.values())

    def sees(self, tensor: Tensor) -> bool:
        """Whether a writable array lies in the memory of a tensor."""
        return any(state_kinds.looks_at(one.holder, tensor) for one in self.arrays())

    # imports of a run ------------------------------------------------------------------------------------------------

    def importing(self, module: types.ModuleType) -> None:
        kept = (state for state in self.states if isinstance(state, TableState | AttributeState))
        self._importing[module.__name__] = [(state, state.read()) for state in kept]

    def imported(self, module: types.ModuleType) -> None:
        """Keep what the code of a module has changed that was just imported, and note its globals."""
        self._kept(module)
        for state, start in self._importing.pop(module.__name__, ()):
            state.keep_changes(start)
        self._walk()

    def _kept(self, module: types.ModuleType) -> None:
        """Globals of a library, and the containers among them: walking further has no limit."""
        self.states.append(state_kinds.Globals(vars(module)))
        for value in list(vars(module).values()):
            self._only_put_back(value)

    # restoring and setting aside -------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore everything, and drop newer entries of caches. `UnsupportedModule` if something cannot be restored."""
        side_effects.ignore_imports(self)
        side_effects.allow_file_changes(self.refused)
        logging.raiseExceptions = self._prints_errors
        refused: list[UnsupportedModule] = []
        with _disable_current_modes(), torch.no_grad():
            for state in sorted(self.states, key=attrgetter("rank")):
                if not state.is_unchanged():
                    try:
                        state.put_back()
                    except UnsupportedModule as error:
                        refused.append(error)
        put_switches_back(self.switches)
        if refused:
            raise refused[0]

    def set_aside(self) -> None:
        """Hide what cannot be restored until `restore`, and note imports. See NOTE [ Set aside ] in state_kinds.py."""
        side_effects.note_imports(self)
        side_effects.refuse_file_changes(self.refused)
        logging.raiseExceptions = False  # a handler that is refused would print that for each record
        for state in self.states if self.stand_ins else self.of(state_kinds.ReadOnly):
            state.set_aside(self._instead)

    def replace(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Let a run find the second of each pair wherever the first is held, from `set_aside` to `restore`."""
        self.stand_ins.update((id(real), (real, new)) for real, new in pairs)

    def _instead(self, value: Any) -> Any:
        if type(value) is tuple:  # the defaults of a function
            made = tuple(map(self._instead, value))
            return value if all(a is b for a, b in zip(made, value, strict=True)) else made
        _, new = self.stand_ins.get(id(value), (None, None))
        if new is None and is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
            _, new = self.stand_ins.get(id(value.__self__), (None, None))
            if new is not None and type(new) is not state_kinds.Untouchable:
                new = getattr(new, value.__name__)
        return value if new is None else new

    # walking ---------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self._walk_near()
        start = self.values
        while self._libraries and self.values - start < MOST_OF_LIBRARIES:
            code, self._libraries = self._libraries, []
            for value, depth in code:
                if is_a(value, type):
                    self._own_class(value, depth)
                elif id(value) not in self._seen:
                    self._look_into(value, depth)
            self._walk_near()
        self._libraries.clear()

    def _walk_near(self) -> None:
        while self._waiting or self._unnamed:
            while self._waiting:
                self._visit(*self._waiting.popleft())
            by_any = not self._names.isdisjoint(_BY_ANY_NAME)
            named = [one for one in self._unnamed if by_any or one[0] in self._names]
            self._unnamed = [one for one in self._unnamed if one not in named] if named else []
            self._waiting += [(value, depth) for _, value, depth in named]

    def _later(self, value: Any, depth: int) -> None:
        if not is_a(value, PLAIN):
            self._waiting.append((value, depth))

    def _attributes_later(self, owner: Any, attributes: dict[str, Any], depth: int) -> None:
        bases = type(owner).__mro__  # whose methods are walked, or known
        for name, value in list(attributes.items()):
            if _has_many(value) and all(c.__module__ in _KNOWN_BASES or not is_foreign(c.__module__) for c in bases):
                self._unnamed.append((name, value, depth))
            else:
                self._later(value, depth)

    def _only_put_back(self, container: Any) -> None:
        """Restore without walking: its contents have no limit."""
        if type(container) in _PLAIN_CONTAINERS and id(container) not in self._seen | self._tables:
            self._tables.add(id(container))
            self._add(container)

    def _modules(self, modules: Iterable[nn.Module], depth: int = 0) -> None:
        classes: dict[type, None] = {}
        for module in modules:
            for sub in module.modules():
                self._module(sub)
                classes.update(dict.fromkeys(type(sub).__mro__))
        self._own_packages.update(map(package_of, classes))
        for cls in classes:
            self._class(cls, depth)

    def _module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if id(attributes) in self._seen or is_a(module, torch.jit.ScriptModule):  # C++ has that one's attributes
            return
        self._seen.add(id(attributes))
        self._add(attributes)
        for name in _MODULE_TABLES:
            self._add(attributes[name])
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            if tensor is not None and id(tensor) not in self._seen:
                self._tensor(tensor)
        for name in HOOK_TABLES:
            if is_a(hooks := attributes.get(name), dict):
                self._add(hooks)  # a model that adds hooks notes that in an attribute: both are restored
                for hook in list(hooks.values()):
                    self._later(hook, 0)
        others = {k: v for k, v in attributes.items() if k not in HOOK_TABLES and k not in _MODULE_TABLES}
        self._attributes_later(module, others, 0)

    def _is_of_a_library(self, value: Any) -> bool:
        """Whether a function or a class belongs to a package that is neither the user's nor the model's."""
        return package_of(value) not in self._own_packages and bytecode_names.is_installed(value.__module__)

    def _class(self, cls: type, depth: int = 0) -> None:
        if is_foreign(cls.__module__) or id(cls) in self._seen:
            return
        if self._is_of_a_library(cls):
            self._libraries.append((cls, depth))
        else:
            self._own_class(cls, depth)

    def _own_class(self, cls: type, depth: int) -> None:
        """Walk names in the methods of a class, and its attributes: a counter there is Python state as well."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self.states.append(state_kinds.ClassState(cls))
        self._class(type(cls), depth)
        for value in list(vars(cls).values()):
            self._later(value, depth)

    def _add(self, table: Any) -> None:
        self.states.append(TableState(table))

    def _tensor(self, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        self._held.append(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.is_leaf and not is_a(tensor, FakeTensor):
                self.states.append(state_kinds.HookState(tensor))
        if type(tensor) in state_kinds.PLAIN_TENSORS and memory_key(tensor) is not None:
            self.states.append(state_kinds.TensorState(tensor))
            self._add(vars(tensor))  # attributes set by code, such as a flag or a counter
        for value in list(vars(tensor).values()):
            if type(value) in (dict, list, set) or is_a(tensor, nn.Parameter):
                self._later(value, 0)  # those of a fake copy are the model's own

    def _visit(self, value: Any, depth: int) -> None:
        if is_a(value, (*PLAIN, types.ModuleType)) or id(value) in self._seen:
            return  # of a Python module only values that code names are walked: see `globals_of`
        is_too_far = len(self._seen) > self._most or depth > MOST_DEEP
        if is_a(value, type):
            for cls in () if is_too_far else value.__mro__:
                self._class(cls, depth + 1)
        elif is_a(value, Tensor):
            self._tensor(value)
        elif is_too_far:
            return
        elif state_kinds.is_outside(Same(type(value))):
            self._state(value, depth)
        elif state_kinds.is_ours(value):
            return
        elif is_a(value, types.FunctionType) and self._is_of_a_library(value):
            self._libraries.append((value, depth))
        else:
            self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        if value is sys.modules or value is vars(builtins) or type(value) is logging.Manager:  # which has all loggers
            return
        self._seen.add(id(value))
        self._held.append(value)
        if is_a(value, threading.Condition):  # threads that wait by now have entered themselves
            self._seen.add(id(state_kinds.attribute_of(value, "_waiters")))
        if type(value) in _PLAIN_CONTAINERS:
            self._container(value, depth)
        elif state_kinds.is_simple(Same(type(value))) and not callable(value):
            self._object(value, depth)
        elif is_a(value, nn.Module):
            self._modules([value], depth + 1)
        else:
            self._any_kind(value, depth)

    def _any_kind(self, value: Any, depth: int) -> None:
        self._state(value, depth)
        if is_a(value, types.FunctionType):
            self._globals_of(value)
            if not is_foreign(value.__module__):
                self._names |= names_in(value.__code__)
                self.states += [AttributeState(cell, "cell_contents") for cell in value.__closure__ or ()]
                self.states += [AttributeState(value, name) for name in ("__defaults__", "__kwdefaults__")]
        for one in state_kinds.inside(value):
            self._later(one, depth + 1)
        self._object(value, depth)

    def _state(self, value: Any, depth: int) -> None:
        """Add state outside of attributes, and the stand-in of an object that cannot be restored."""
        if (state := state_kinds.state_of(value)) is not None:
            self.states.append(state)
        if type(state) is state_kinds.CacheState and not is_foreign(value.__module__):
            self._waiting += [(one, depth + 1) for one in worth_a_look(result for _, result in state.entries())]
        if (new := state_kinds.stand_in(value)) is not None:
            self.stand_ins[id(value)] = value, new
            self._held.append(value)
            if type(new) is state_kinds.Untouchable:
                new.tell(self.refused)

    def _globals_of(self, function: types.FunctionType) -> None:
        for table, name, _ in bytecode_names.globals_of(function):
            if (id(table), name) not in self._named:
                self._named.add((id(table), name))
                self.states.append(state_kinds.GlobalState(table, name))

    def _object(self, value: Any, depth: int) -> None:
        """Walk attributes and slots of any object, and its classes."""
        for name in state_kinds.slots_below(Same(type(value))):
            slot = AttributeState(value, name)
            self.states.append(slot)
            self._later(slot.was, depth + 1)
        attributes = state_kinds.attributes_of(value)
        if is_a(attributes, dict) and id(attributes) not in self._seen:
            self._seen.add(id(attributes))
            self._add(attributes)
            self._attributes_later(value, attributes, depth + 1)
        for cls in type(value).__mro__:
            if id(cls) not in self._seen:
                self._class(cls, depth + 1)

    def _container(self, value: Any, depth: int) -> None:
        """Walk the contents of a container; of a large one, perhaps as an earlier walk found them."""
        if state_kinds.size_of(value) <= MANY:
            self._add(value)
            self._waiting += [(one, depth + 1) for one in state_kinds.inside(value)]
            return
        known = self._known.get(id(value))
        if known is None or known[0] is not value or not state_kinds.is_unchanged(value, known[1]):
            known = value, state_kinds.copy_of(value), list(state_kinds.inside(value))
        self._large[id(value)] = known
        self.states.append(TableState(value, known[1]))
        self._waiting += [(one, depth + 1) for one in known[2]]


# state of the whole process -------------------------------------------------------------------------------------------


class _Variables(KeptState):
    def read(self) -> Any:
        return dict(contextvars.copy_context().items())

    def is_unchanged(self) -> bool:
        now = self.read()
        return len(now) == len(self.was) and all(now.get(one, self) is value for one, value in self.was.items())

    def put_back(self) -> None:
        for variable, value in self.read().items():
            if variable not in self.was:
                with contextlib.suppress(LookupError):  # a value cannot be removed; the default is as good
                    variable.set(contextvars.Context().run(variable.get))
            elif self.was[variable] is not value:
                variable.set(self.was[variable])


def _said_once() -> list[Any]:
    """Methods that libraries have put on loggers and that log each message once (transformers' ``warning_once``)."""
    bases: tuple[Any, ...] = (logging.Logger, logging.LoggerAdapter)
    classes = [*bases, *(below for cls in bases for below in cls.__subclasses__())]
    return [found for cls in classes for found in vars(cls).values() if type(found) is functools._lru_cache_wrapper]


def _global_hooks() -> list[dict[int, Any]]:
    """Tables of the hooks that torch runs around every module."""
    tables = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    return [table for table in tables if isinstance(table, dict)]


def _has_many(value: Any) -> bool:
    """Whether it is a large container, or contains one."""
    if not is_a(value, state_kinds.CONTAINERS):
        return False
    if state_kinds.size_of(value) > MANY:
        return True
    return any(
        is_a(one, state_kinds.CONTAINERS) and state_kinds.size_of(one) > MANY for one in state_kinds.items_of(value)
    )
