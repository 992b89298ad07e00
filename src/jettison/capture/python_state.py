"""Python state that a forward can reach: what it may read, and what it may leave something in.

A forward reads more than its arguments: attributes of modules, configurations, containers, closures, globals that its
code names, the state of random generators. None of that passes a dispatcher. A `Reach` lists the tables (attribute
dicts, dicts, lists, sets) behind a module and some values, so that what a run leaves in them can be seen and undone: a
recording on fake tensors must leave nothing behind.

NOTE [ What code cannot name ]
A model may hold a vocabulary of 100,000 entries that its forward never looks at. An attribute is reached by its name,
so one whose name no code reads that the walk has come by cannot be reached by that code. A container of more than
`MANY` entries in such an attribute is not looked into. That holds only where all code is known: where a class has
methods of a library's, whose names are not collected, or where some code makes names as it runs (`_BY_ANY_NAME`), every
container is looked into. One look costs a comparison of identities in C, and steps into what can change alone: plain
values and tuples of them cannot (`worth_a_look`).

NOTE [ Code of libraries ]
An object of `networkx` leads through the methods of its class to all of networkx, and from there to all of sympy. The
user's own state is looked into to its end; so is that of the packages that the model's modules come from. Code of any
other installed package is followed call by call, nearest first, and no further once `MOST_OF_LIBRARIES` values were
reached through it. What the user's state holds of a library's objects is the user's.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import logging
import queue
import sys
import threading
import types
from abc import ABCMeta
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.c_state import (
    CState,
    Subclasses,
    Untouchable,
    c_state,
    is_iterator_of_c,
    is_outside,
    is_used_elsewhere,
    iterator_state,
    stand_in,
)
from jettison.capture.contents import inside, is_extension, is_ours, is_simple, slots_below, worth_a_look
from jettison.capture.file_changes import allow_file_changes, refuse_file_changes
from jettison.capture.function_state import (
    function_reach,
    globals_of,
    is_foreign,
    is_installed,
    library_owners,
    package_of,
)
from jettison.capture.imports import Globals, forget_import, ignore_imports, imported_in_runs, note_imports
from jettison.capture.kinds_of_c import attributes_in_c, is_copied_whole
from jettison.capture.lent_arrays import is_lent, looks_at
from jettison.capture.lru_caches import CacheState
from jettison.capture.names_in_code import Names, Wide, names_in
from jettison.capture.process_switches import put_switches_back, read_switches
from jettison.capture.snapshots import (
    CONTAINERS,
    MISSING,
    MOST_BYTES,
    PLAIN,
    PLAIN_TENSORS,
    TENSOR_HOOKS,
    Place,
    Table,
    TensorState,
    attribute_of,
    attributes_of,
    copy_of,
    hooks_of,
    is_a,
    is_array,
    is_equal,
    is_large_array,
    is_number_array,
    is_unchanged,
    items_of,
    kind_of,
    put_hooks_back,
    put_table_back,
    size_of,
    with_changes,
)
from jettison.capture.streams import is_stream, set_stream_state, stream_state
from jettison.capture.undo import is_in_memory
from jettison.capture.wide_reach import NAMES_MODULES, WHEREVER, is_code, look_widely
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

MOST_VALUES = 100_000
"""Values looked at in one walk; a forward that reaches more is known in part, and its witnesses have the rest."""
MOST_OF_LIBRARIES = 2_000
"""Values reached through code of libraries after which no further call is followed. See NOTE [ Code of libraries ]."""
MOST_DEEP = 64
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)


Known = dict[int, tuple[Any, Any, list[Any]]]
"""By id: a large container, a copy of it, and what of its entries is worth a look."""


class Reach:
    """The tables behind some modules and values, as they were when this was made.

    Args:
        modules: every attribute of theirs and of their submodules, and what their methods name.
        values: anything else that a forward gets.
        known: large containers that an earlier walk has looked into; this one leaves its own there.
        most: values that are looked at one by one.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        values: Iterable[Any] = (),
        *,
        known: Known | None = None,
        most: int = MOST_VALUES,
    ) -> None:
        self.tensors: list[TensorState] = []
        self.hooks: list[tuple[Tensor, str, Any]] = []  # tables of hooks on tensors, copied
        self.tables: list[Table] = []
        self.before: list[Any] = []
        self.places: list[Place] = []  # cells of closures and slots of objects
        self.named: list[tuple[dict[str, Any], str, Any]] = []  # globals that code mentions
        self.assigned: list[tuple[Any, dict[str, Any]]] = []  # modules, classes and functions of libraries, and what
        # of what code assigns to they have
        self.caches = [CacheState(cache) for cache in _said_once()]
        self.c_states: list[CState] = []
        self.stand_ins: dict[int, tuple[Any, Any]] = {}  # by id: what is set aside, and what a run finds instead
        self.arrays: list[Any] = []  # of numpy's, too large to be copied
        self.streams: list[tuple[Any, Any]] = []  # random generators of Python's and numpy's, and their state
        self.classes: list[tuple[type, dict[str, Any]]] = []
        self.iterators: list[tuple[Any, Any]] = []  # and how far they are
        self.modules: list[Globals] = []  # of modules that runs imported, or that code reaches by any name
        self.variables = list(contextvars.copy_context().items())
        self._known: Known = {} if known is None else known
        self._large: Known = {}
        self._most = most
        self._seen: set[int] = set()
        self._held: list[Any] = []
        self._waiting: deque[tuple[Any, int]] = deque()  # what is near comes first, however much lies behind it
        self._libraries: list[tuple[Any, int]] = []  # functions and classes: see NOTE [ Code of libraries ]
        self._own_packages: set[str] = set()
        self._names: set[str] = set()  # that code mentions
        self._unnamed: list[tuple[str, Any, int]] = []  # large containers: see NOTE [ What code cannot name ]
        self._wide: dict[tuple[Wide, str], types.FunctionType] = {}  # see NOTE [ What code need not name ]
        self._wide_seen: set[tuple[Wide, str]] = set()
        self._tables: set[int] = set()  # dicts of modules, threads and loggers
        self._owners: dict[int, Any] = {}  # of libraries, named by code
        self._set_names: set[str] = set()  # attributes that code assigns to on other objects than a method's own
        self._noted_names: set[str] = set()  # those of them whose values on `_owners` are known
        self._held_classes: list[type] = []  # libraries' among them
        self._importing: dict[str, tuple[list[Any], ...]] = {}  # tables, places, globals before a module's code
        self._undone: list[types.ModuleType] = []  # imported since, and not to stay
        self._sets_everybodys = False
        self._loggers: frozenset[str] | None = None  # names of all, where code asks for loggers
        self._is_running = False
        self._prints_errors = logging.raiseExceptions
        self.refused: list[UnsupportedModule] = []  # by what a run asked for; its code may have gone on
        self._modules(modules)
        kept = (value for _, value in self.variables)  # hooks collect outputs in such variables
        for table in _global_hooks():
            self._add(table)
        for value in (*values, *kept, *(hook for table in _global_hooks() for hook in table.values())):
            if not is_a(value, Tensor):
                self._later(value, 0)
        self._walk()
        for module in imported_in_runs():
            self._kept(module)
        if "register" in self._names:
            abstract = {id(one): one for one in (*self._held_classes, *self._owners.values()) if is_a(one, ABCMeta)}
            self.c_states += map(Subclasses, abstract.values())
        self.switches = read_switches(self._names)
        self._known.clear()  # what is no longer there is let go of
        self._known.update(self._large)

    # what was found --------------------------------------------------------------------------------------------------

    @property
    def values(self) -> int:
        """Values that were looked at one by one."""
        return len(self._seen)

    def drawn(self) -> list[Any]:
        """Random generators that were drawn from."""
        return [stream for stream, state in self.streams if stream_state(stream) != state]

    def moved(self) -> list[Any]:
        """Iterators that have gone on since: nothing puts them back."""
        return [iterator for iterator, state in self.iterators if iterator_state(iterator) != state]

    @property
    def has_large_copies(self) -> bool:
        """Whether something was copied that is, or may be, too large to be copied in each step."""
        arrays = any(is_array(table) and getattr(table, "nbytes", 0) > MOST_BYTES for table in self.tables)
        return arrays or any(is_copied_whole(Same(type(value))) for value, _ in self.stand_ins.values())

    def sees(self, tensor: Tensor) -> bool:
        """Whether an array that can be written to lies in the memory of a tensor."""
        return any(looks_at(table, tensor) for table in self.tables if is_number_array(table))

    def written_arrays(self) -> list[Any]:
        """Arrays in the memory of a tensor that were written to: no op has told of that."""
        pairs = zip(self.tables, self.before, strict=True)
        written = [t for t, before in pairs if is_number_array(t) and not is_unchanged(t, before)]
        return [t for t in written if is_lent(t) or any(looks_at(t, state.tensor) for state in self.tensors)]

    def importing(self, module: types.ModuleType, code: types.CodeType | None) -> None:
        """Note what the code of a module names, which is about to be imported."""
        if code is not None:
            function = types.FunctionType(code, vars(module))
            self.named.extend(globals_of(function))
            self._names_of(function, names_in(code), 0)
            self._waiting += [(value, 0) for value in function_reach(function)]
            self._walk()
        self._importing[module.__name__] = list(map(copy_of, self.tables)), *self._single_values()

    def imported(self, module: types.ModuleType, *, stays: bool) -> None:
        """Note the globals of a module, which has just been imported, and what they hold. Where it stays, what its
        code wrote stays as well.
        """
        tables, places, named = self._importing.pop(module.__name__, ([], [], []))
        if stays:
            self._kept(module)
            for at, start in enumerate(tables):
                if not is_unchanged(self.tables[at], start):
                    self.before[at] = with_changes(self.before[at], start, copy_of(self.tables[at]))
            places_now, named_now = self._single_values()
            for place, start, now in zip(self.places, places, places_now, strict=False):
                if now is not start:
                    place.value = now
            for at, (start, now) in enumerate(zip(named, named_now, strict=False)):
                if now is not start:
                    self.named[at] = (*self.named[at][:2], now)
        else:
            self._undone.append(module)
            self._waiting += [(value, 0) for value in worth_a_look(vars(module).values())]
        self._walk()

    def _kept(self, module: types.ModuleType) -> None:
        """Globals of a library, and the containers among them: more than that has no limit."""
        self.modules.append(Globals(vars(module)))
        for value in list(vars(module).values()):
            self._only_put_back(value)

    def _single_values(self) -> tuple[list[Any], list[Any]]:
        """Values of places and named globals now."""
        places = [attribute_of(place.holder, place.name) for place in self.places]
        return places, [table.get(name, MISSING) for table, name, _ in self.named]

    def restore(self) -> None:
        """Put everything back, and forget what caches have learnt since.

        Raises:
            UnsupportedModule: an iterator has gone on, which nothing puts back.
        """
        ignore_imports(self)
        allow_file_changes(self.refused)
        logging.raiseExceptions = self._prints_errors
        for imported in self._undone:
            forget_import(imported)
        for table, before in zip(self.tables, self.before, strict=True):
            if not is_unchanged(table, before):
                put_table_back(table, before)
        for place in self.places:
            if not place.unchanged():
                place.put_back()
        with _disable_current_modes(), torch.no_grad():
            for tensor in self.tensors:
                tensor.put_back()
        for array in reversed(self.arrays):
            array.flags.writeable = True
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, name, was in self.hooks:
                if hooks_of(tensor, name) != was:
                    put_hooks_back(tensor, name, was)
        for names, name, value in self.named:
            if value is not MISSING:
                names[name] = value
        for owner, was in self.assigned:
            for name in (self._set_names & vars(owner).keys()) - was.keys():
                delattr(owner, name)
            for name, value in was.items():
                if vars(owner).get(name, MISSING) is not value:
                    setattr(owner, name, value)
        if self._sets_everybodys:
            for attributes in (one for one in _everybodys() if id(one) not in self._tables):  # made by the run
                for name in self._set_names & attributes.keys():
                    del attributes[name]
        if self._loggers is not None:
            known = logging.Logger.manager.loggerDict
            for name in [name for name in known if not (name in self._loggers or name in sys.modules)]:
                del known[name]  # not that of a module, which a library imported for good
        for module in self.modules:
            module.put_back()
        for cls, was in self.classes:
            for name in _moved(cls, was):
                if name in was:
                    setattr(cls, name, was[name])
                else:
                    delattr(cls, name)
        for cache in self.caches:
            cache.put_back()
        before = dict(self.variables)
        for variable, value in contextvars.copy_context().items():
            if variable not in before:
                with contextlib.suppress(LookupError):  # nothing takes a value away; the default is as good
                    variable.set(contextvars.Context().run(variable.get))
            elif before[variable] is not value:
                variable.set(before[variable])
        put_switches_back(self.switches)
        self.restore_streams()
        for held in [held for held in self.c_states if not held.is_unchanged()]:
            held.put_back()
        moved = self.moved()
        if moved:
            raise UnsupportedModule(
                f"the forward takes from a {type(moved[0]).__name__} that it is given or that outlives it. Planning "
                "and recording run the forward once more, and that cannot be put back: give it the item itself, count "
                "in an attribute, or index a list, instead"
            )

    def raise_refused(self) -> None:
        """Raise the first error that a run was given and went on without.

        Raises:
            UnsupportedModule: it asked for what nothing could have put back.
        """
        if self.refused:
            raise self.refused[0]

    def set_aside(self) -> None:
        """What could not be put back is out of a run's reach until `restore`, and modules that the run imports are
        noted. See NOTE [ Set aside ].
        """
        note_imports(self)
        refuse_file_changes(self.refused)
        logging.raiseExceptions = False  # a handler that is refused prints that, for each record
        self._is_running = True
        for array in self.arrays:
            array.flags.writeable = False
        if not self.stand_ins:
            return
        for table, before in zip(self.tables, self.before, strict=True):
            if is_a(before, dict):
                for key, value in before.items():
                    if (new := self._instead(value)) is not value:
                        dict.__setitem__(table, key, new)
            elif is_a(before, tuple):
                for index, value in enumerate(before):
                    if (new := self._instead(value)) is not value:
                        kind_of(table).__setitem__(table, index, new)
        for place in self.places:
            if (new := self._instead(place.value)) is not place.value:
                place.put(new)
        for names, name, value in self.named:
            names[name] = self._instead(value)
        for owner, was in self.assigned:
            for name, value in was.items():
                if (new := self._instead(value)) is not value:
                    setattr(owner, name, new)
        for module in self.modules:
            for name, value in module.before.items():
                if (new := self._instead(value)) is not value:
                    module.table[name] = new
        for cls, was in self.classes:
            for name, value in was.items():
                if (new := self._instead(value)) is not value:
                    setattr(cls, name, new)

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
            return value if new is None else new if type(new) is Untouchable else getattr(new, value.__name__)
        return value if new is None else new

    def restore_streams(self) -> None:
        """Put random generators back."""
        for stream, state in self.streams:
            if stream_state(stream) != state:
                set_stream_state(stream, state)

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
        sizes = (-1, -1)
        while sizes != (len(self._owners), len(self._set_names)):  # what is set on them may lead to more
            sizes = (len(self._owners), len(self._set_names))
            self._note_assigned()
            while self._waiting or self._unnamed or self._wide:
                while self._waiting:
                    self._visit(*self._waiting.popleft())
                while self._wide:
                    self._look_widely(*self._wide.popitem())
                named = [
                    one for one in self._unnamed if one[0] in self._names or not self._names.isdisjoint(_BY_ANY_NAME)
                ]
                self._unnamed = [one for one in self._unnamed if one not in named] if named else []
                self._waiting += [(value, depth) for _, value, depth in named]

    def _note_assigned(self) -> None:
        known = {id(owner): was for owner, was in self.assigned}
        for owner in self._owners.values():
            new = self._set_names if id(owner) not in known else self._set_names - self._noted_names
            found = {name: vars(owner)[name] for name in new & vars(owner).keys()}
            if id(owner) in known:
                known[id(owner)].update(found)
            else:
                self.assigned.append((owner, found))
            self._waiting += [(value, 1) for value in found.values()]
        self._noted_names |= self._set_names

    def _later(self, value: Any, depth: int) -> None:
        if not is_a(value, PLAIN):
            self._waiting.append((value, depth))

    def _attributes_later(self, owner: Any, attributes: dict[str, Any], depth: int) -> None:
        for name, value in list(attributes.items()):
            if _has_many(value) and _is_own(type(owner)):
                self._unnamed.append((name, value, depth))
            else:
                self._later(value, depth)

    def _look_widely(self, what: tuple[Wide, str], function: types.FunctionType) -> None:
        found = look_widely(what[0], function, [cls for cls, _ in self.classes])
        for table in found.tables:
            self._data_of(table)
        for value in found.values:
            self._later(value, 1)
        for container in found.containers:
            self._only_put_back(container)
        for cls in found.classes:
            self._class(cls, 1)

    def _only_put_back(self, container: Any) -> None:
        """Not looked into: what it holds has no limit."""
        if type(container) in _PLAIN_CONTAINERS and id(container) not in self._seen | self._tables:
            self._tables.add(id(container))
            self._add(container)

    def _data_of(self, table: dict[str, Any]) -> None:
        """Globals of a module, and what of them is no code."""
        if id(table) in self._tables:
            return
        self._tables.add(id(table))
        self.modules.append(Globals(table))
        for value in list(table.values()):
            if is_a(value, type):
                if not (is_foreign(str(value.__module__)) or id(value) in self._seen):
                    self.classes.append((value, dict(vars(value))))
                    self._waiting += [(one, 1) for one in worth_a_look(vars(value).values()) if not is_code(one)]
            elif not is_a(value, types.FunctionType):
                self._later(value, 1)

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
        if id(attributes) in self._seen or is_a(module, torch.jit.ScriptModule):  # C++ has what that one holds
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
                self._add(hooks)  # a model that puts hooks on notes in an attribute that it has: both go back
                for hook in list(hooks.values()):
                    self._later(hook, 0)
        others = {k: v for k, v in attributes.items() if k not in HOOK_TABLES and k not in _MODULE_TABLES}
        self._attributes_later(module, others, 0)

    def _is_of_a_library(self, value: Any) -> bool:
        """Whether a function or a class belongs to a package that is neither the user's nor the model's."""
        return package_of(value) not in self._own_packages and is_installed(value.__module__)

    def _class(self, cls: type, depth: int = 0) -> None:
        if is_foreign(cls.__module__) or id(cls) in self._seen:
            return
        if self._is_of_a_library(cls):
            self._libraries.append((cls, depth))
        else:
            self._own_class(cls, depth)

    def _own_class(self, cls: type, depth: int) -> None:
        """What the methods of a class name, and what it holds itself: a count on the class is Python state as well."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self._held_classes.append(cls)
        self.classes.append((cls, dict(vars(cls))))
        self._class(type(cls), depth)
        for value in list(vars(cls).values()):
            self._later(value, depth)

    def _add(self, table: Table) -> None:
        self.tables.append(table)
        self.before.append(copy_of(table))

    def _tensor(self, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        self._held.append(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.is_leaf and not is_a(tensor, FakeTensor):
                self.hooks += [(tensor, name, hooks_of(tensor, name)) for name in TENSOR_HOOKS]
        if type(tensor) in PLAIN_TENSORS and is_in_memory(tensor):
            self.tensors.append(TensorState(tensor))
            self._add(vars(tensor))  # a flag, or a count, that somebody put on it
        for value in list(vars(tensor).values()):
            if type(value) in (dict, list, set) or is_a(tensor, nn.Parameter):
                self._later(value, 0)  # those of a fake copy are the model's own

    def _visit(self, value: Any, depth: int) -> None:
        if is_a(value, (*PLAIN, types.ModuleType)) or id(value) in self._seen:
            return  # of a module of Python's, what code names is looked at: see `globals_of`
        if is_a(value, type):
            self._held_classes.append(value)
            if len(self._seen) <= self._most and depth <= MOST_DEEP:
                for cls in value.__mro__:
                    self._class(cls, depth + 1)
            return
        if is_a(value, Tensor):
            self._tensor(value)
            return
        if len(self._seen) > self._most or depth > MOST_DEEP:
            return
        if is_outside(value):
            self._c_state(value)
            return
        if is_ours(value):
            return
        if is_a(value, types.FunctionType) and self._is_of_a_library(value):
            self._libraries.append((value, depth))
            return
        self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        if value is sys.modules:
            self._wide_reach(Wide.MODULES, NAMES_MODULES)
        if value is sys.modules or value is vars(builtins) or type(value) is logging.Manager:  # which has all loggers
            return
        self._seen.add(id(value))
        self._held.append(value)  # so that no id comes back
        if is_a(value, logging.Logger):
            self._later(logging.getLogRecordFactory(), depth + 1)  # the process has one for all of them
        if type(value) in _PLAIN_CONTAINERS:
            self._container(value, depth)
            return
        if is_a(value, queue.Queue) and is_used_elsewhere(value):
            self._c_state(value)  # and what is in it is under way
            return
        if is_a(value, threading.Condition):
            self._seen.add(id(attribute_of(value, "_waiters")))  # threads that wait by now have entered themselves
        if is_simple(Same(type(value))) and not callable(value):
            self._object(value, depth)
            return
        if is_a(value, nn.Module):
            self._modules([value], depth + 1)
            return
        if is_stream(value):
            self.streams.append((value, stream_state(value)))
        self._c_state(value)
        if is_a(value, functools._lru_cache_wrapper):
            self.caches.append(CacheState(value))
            if not is_foreign(value.__module__):
                self._waiting += [(result, depth + 1) for result in worth_a_look(self.caches[-1].results())]
        if is_a(value, dict | list | set | deque | bytearray) or is_array(value):
            self._add(value)
        if is_a(value, types.FunctionType):
            self.named.extend(globals_of(value))
            if not is_foreign(value.__module__):
                self._names_of(value, names_in(value.__code__), depth)
                self.places += [Place("cell_contents", cell) for cell in value.__closure__ or ()]
                if value.__defaults__:
                    self.places.append(Place("__defaults__", value))
        for one in inside(value):
            self._later(one, depth + 1)
        self._object(value, depth)

    def _names_of(self, function: types.FunctionType, names: Names, depth: int) -> None:
        self._names |= names.read
        for wide in names.wide:
            self._wide_reach(wide, function)
        for owner in library_owners(function):
            self._owners[id(owner)] = owner
        self._set_names |= names.assigned
        asks_for_loggers = "getLogger" in names.read
        if asks_for_loggers and self._loggers is None:
            self._loggers = frozenset(logging.Logger.manager.loggerDict)
            for one in _all_loggers():
                self._waiting += [(held, depth + 1) for held in (*one.handlers, *one.filters)]
            self._later(logging.getLogRecordFactory(), depth + 1)
        if asks_for_loggers or (names.assigned and not names.read.isdisjoint(("current_thread", "main_thread"))):
            self._sets_everybodys = True
            for attributes in _everybodys():
                if id(attributes) not in self._tables:
                    self._tables.add(id(attributes))
                    self._add(attributes)
                    self._waiting += [(one, depth + 1) for one in worth_a_look(map(attributes.get, names.assigned))]

    def _wide_reach(self, wide: Wide, function: types.FunctionType) -> None:
        if self._is_of_a_library(function):
            if wide in WHEREVER:
                return
            wide = Wide.GLOBALS
        what = wide, "" if wide in WHEREVER else str(function.__module__)
        if what not in self._wide_seen:
            self._wide_seen.add(what)
            self._wide[what] = function

    def _object(self, value: Any, depth: int) -> None:
        """Attributes and slots of any object, and its classes."""
        in_c = attributes_in_c(value) if is_extension(Same(type(value))) else ()
        for name in (*slots_below(Same(type(value))), *in_c):
            self.places.append(Place(name, value))
            self._later(self.places[-1].value, depth + 1)
        attributes = attributes_of(value)
        if is_a(attributes, dict) and id(attributes) not in self._seen:
            self._seen.add(id(attributes))
            self._add(attributes)
            self._attributes_later(value, attributes, depth + 1)
        for cls in type(value).__mro__:
            if id(cls) not in self._seen:
                self._class(cls, depth + 1)

    def _container(self, value: Any, depth: int) -> None:
        if size_of(value) > MANY:
            self._large_container(value, depth)
            return
        self._add(value)
        self._waiting += [(one, depth + 1) for one in inside(value)]

    def _large_container(self, value: Any, depth: int) -> None:
        """Look into one of many entries, or know from an earlier walk what that finds."""
        known = self._known.get(id(value))
        if known is None or known[0] is not value or not is_unchanged(value, known[1]):
            known = value, copy_of(value), list(inside(value))
        self._large[id(value)] = known
        self.tables.append(value)
        self.before.append(known[1])
        self._waiting += [(one, depth + 1) for one in known[2]]

    def _c_state(self, value: Any) -> None:
        """State that lies in no table."""
        if is_iterator_of_c(value):
            self.iterators.append((value, iterator_state(value)))
        elif is_large_array(value):
            self.arrays.append(value)
        elif not (is_a(value, bytearray) or is_array(value)) and (found := c_state(value)) is not None:
            self.c_states.append(found)
        if (new := stand_in(value)) is not None:
            self.stand_ins[id(value)] = value, new
            self._held.append(value)
            if type(new) is Untouchable:
                new.tell(self.refused)


MANY = 256
_BY_ANY_NAME = frozenset(
    (
        *("getattr", "setattr", "delattr", "vars", "__dict__", "globals", "locals"),
        *("eval", "exec", "attrgetter", "inspect", "gc"),
    )
)
"""What code has to mention to reach an attribute by a name that it does not mention."""
_KNOWN_BASES = ("builtins", "abc", "typing", "torch.nn.modules.module", "torch.nn.modules.container")


def _has_many(value: Any) -> bool:
    """Whether it is a container of many entries, or of some that are."""
    if not is_a(value, CONTAINERS):
        return False
    if size_of(value) > MANY:
        return True
    return any(is_a(one, CONTAINERS) and size_of(one) > MANY for one in items_of(value))


_PLAIN_CONTAINERS = (dict, list, set, deque)


def _is_own(cls: type) -> bool:
    """Whether all methods of a class are looked into by a walk, or known."""
    return all(c.__module__ in _KNOWN_BASES or not is_foreign(c.__module__) for c in cls.__mro__)


def _everybodys() -> Iterator[dict[str, Any]]:
    """Attributes of threads and loggers: functions of Python's hand these to whoever asks."""
    yield from map(vars, threading.enumerate())
    yield from map(vars, _all_loggers())


def _all_loggers() -> list[logging.Logger]:
    named = list(logging.Logger.manager.loggerDict.values())
    return [one for one in (logging.root, *named) if isinstance(one, logging.Logger)]


def _said_once() -> list[Any]:
    """Methods that libraries have put on loggers and that log each message once (transformers' ``warning_once``)."""
    bases: tuple[Any, ...] = (logging.Logger, logging.LoggerAdapter)
    classes = [*bases, *(below for cls in bases for below in cls.__subclasses__())]
    return [found for cls in classes for found in vars(cls).values() if type(found) is functools._lru_cache_wrapper]


def _global_hooks() -> list[dict[int, Any]]:
    """Tables of the hooks that torch runs around every module."""
    tables = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    return [table for table in tables if isinstance(table, dict)]


def _moved(cls: type, was: dict[str, Any]) -> list[str]:
    """Attributes of a class that are not as they were; what Python keeps there for itself does not count."""
    now = vars(cls)
    names = [name for name in {**was, **now} if not (name.startswith("__") or name == "_abc_impl")]
    return [n for n in names if n not in was or n not in now or not (now[n] is was[n] or is_equal(now[n], was[n]))]
