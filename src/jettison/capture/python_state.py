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
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import itertools
import os
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.c_state import CState, c_state, is_iterator_of_c, iterator_state, stand_in
from jettison.capture.function_state import function_reach, globals_of, is_foreign, names_read
from jettison.capture.imports import Globals, ignore_imports, imported_in_runs, note_imports
from jettison.capture.lent_arrays import is_lent, looks_at
from jettison.capture.lru_caches import CacheState
from jettison.capture.process_switches import put_switches_back, read_switches
from jettison.capture.snapshots import (
    MOST_BYTES,
    PLAIN,
    PLAIN_TENSORS,
    TENSOR_HOOKS,
    Place,
    Table,
    TensorState,
    attributes_of,
    copy_of,
    hooks_of,
    is_array,
    is_equal,
    is_large_array,
    is_number_array,
    is_unchanged,
    put_hooks_back,
    put_table_back,
)
from jettison.capture.streams import is_stream, set_stream_state, stream_state
from jettison.capture.undo import is_in_memory
from jettison.errors import UnsupportedModule
from jettison.identity import Same

MOST_VALUES = 100_000
"""Values looked at in one walk; a forward that reaches more is known in part, and its witnesses have the rest."""
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
        self.caches: list[CacheState] = []
        self.c_states: list[CState] = []
        self.stand_ins: dict[int, tuple[Any, Any]] = {}  # by id: what is set aside, and what a run finds instead
        self.arrays: list[Any] = []  # of numpy's, too large to be copied
        self.streams: list[tuple[Any, Any]] = []  # random generators of Python's and numpy's, and their state
        self.classes: list[tuple[type, dict[str, Any]]] = []
        self.iterators: list[tuple[Any, Any]] = []  # and how far they are
        self.imports: list[Globals] = []  # of modules that were imported since, or while an earlier forward was planned
        self.variables = list(contextvars.copy_context().items())
        self.environment = dict(os.environ)
        self.switches = read_switches()
        self._known: Known = {} if known is None else known
        self._large: Known = {}
        self._most = most
        self._seen: set[int] = set()
        self._held: list[Any] = []
        self._waiting: deque[tuple[Any, int]] = deque()  # what is near comes first, however much lies behind it
        self._names: set[str] = set()  # that code mentions
        self._unnamed: list[tuple[str, Any, int]] = []  # large containers: see NOTE [ What code cannot name ]
        classes: dict[type, None] = {}
        for module in modules:
            for sub in module.modules():
                self._module(sub)
                classes.update(dict.fromkeys(type(sub).__mro__))
        for cls in classes:
            self._class(cls)
        kept = (value for _, value in self.variables)  # hooks collect outputs in such variables
        for value in (*values, *kept, *_global_hooks()):
            if not isinstance(value, Tensor):
                self._later(value, 0)
        self._walk()
        for imported in imported_in_runs():
            self.imported(imported)
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
        """Whether an array was copied that is too large to be copied in each step."""
        return any(is_array(table) and getattr(table, "nbytes", 0) > MOST_BYTES for table in self.tables)

    def sees(self, tensor: Tensor) -> bool:
        """Whether an array that can be written to lies in the memory of a tensor."""
        return any(looks_at(table, tensor) for table in self.tables if is_number_array(table))

    def written_arrays(self) -> list[Any]:
        """Arrays in the memory of a tensor that were written to: no op has told of that."""
        pairs = zip(self.tables, self.before, strict=True)
        written = [t for t, before in pairs if is_number_array(t) and not is_unchanged(t, before)]
        return [t for t in written if is_lent(t) or any(looks_at(t, state.tensor) for state in self.tensors)]

    def imported(self, module: types.ModuleType) -> None:
        """Note the globals of a module of the user's, which has just been imported, and what they hold."""
        self.imports.append(Globals(module))
        for value in list(vars(module).values()):
            self._later(value, 0)
        self._walk()

    def restore(self) -> None:
        """Put everything back, and forget what caches have learnt since.

        Raises:
            UnsupportedModule: an iterator has gone on, which nothing puts back.
        """
        ignore_imports(self)
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
        for tensor, name, was in self.hooks:
            if hooks_of(tensor, name) != was:
                put_hooks_back(tensor, name, was)
        for names, name, value in self.named:
            names[name] = value
        for imported in self.imports:
            imported.put_back()
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
        if os.environ != self.environment:
            for name in os.environ.keys() - self.environment.keys():
                del os.environ[name]
            os.environ.update(self.environment)
        put_switches_back(self.switches)
        self.restore_streams()
        for held in [held for held in self.c_states if not held.is_unchanged()]:
            held.put_back()
        moved = self.moved()
        if moved:
            raise UnsupportedModule(
                f"the forward takes from a {type(moved[0]).__name__} that outlives it, or adds to it, and a run that "
                "plans or records the forward has made it go on. That cannot be put back: count in an attribute, or "
                "index a list, instead; and make this one again before you train"
            )

    def set_aside(self) -> None:
        """What could not be put back is out of a run's reach until `restore`, and modules that the run imports are
        noted. See NOTE [ Set aside ].
        """
        note_imports(self)
        for array in self.arrays:
            array.flags.writeable = False
        if not self.stand_ins:
            return
        for table, before in zip(self.tables, self.before, strict=True):
            if isinstance(before, dict):
                for key, value in before.items():
                    if (new := self._instead(value)) is not value:
                        dict.__setitem__(table, key, new)
            elif isinstance(before, tuple) and not isinstance(table, set):
                for index, value in enumerate(before):
                    if (new := self._instead(value)) is not value:
                        table[index] = new
        for place in self.places:
            if (new := self._instead(place.value)) is not place.value:
                place.put(new)
        for names, name, value in self.named:
            names[name] = self._instead(value)
        for cls, was in self.classes:
            for name, value in was.items():
                if (new := self._instead(value)) is not value:
                    setattr(cls, name, new)

    def _instead(self, value: Any) -> Any:
        if type(value) is tuple:  # the defaults of a function
            made = tuple(map(self._instead, value))
            return value if all(a is b for a, b in zip(made, value, strict=True)) else made
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            _, new = self.stand_ins.get(id(value.__self__), (None, None))
            return value if new is None else getattr(new, value.__name__)
        _, new = self.stand_ins.get(id(value), (None, None))
        return value if new is None else new

    def restore_streams(self) -> None:
        """Put random generators back."""
        for stream, state in self.streams:
            if stream_state(stream) != state:
                set_stream_state(stream, state)

    # walking ---------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        while self._waiting or self._unnamed:
            while self._waiting:
                self._visit(*self._waiting.popleft())
            named = [one for one in self._unnamed if one[0] in self._names or not self._names.isdisjoint(_BY_ANY_NAME)]
            self._unnamed = [one for one in self._unnamed if one not in named] if named else []
            self._waiting += [(value, depth) for _, value, depth in named]

    def _later(self, value: Any, depth: int) -> None:
        if not isinstance(value, PLAIN):
            self._waiting.append((value, depth))

    def _attributes_later(self, owner: Any, attributes: dict[str, Any], depth: int) -> None:
        for name, value in list(attributes.items()):
            if _has_many(value) and _is_own(type(owner)):
                self._unnamed.append((name, value, depth))
            else:
                self._later(value, depth)

    def _module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if id(attributes) in self._seen or isinstance(module, torch.jit.ScriptModule):  # C++ has what that one holds
            return
        self._seen.add(id(attributes))
        self._add(attributes)
        for name in _MODULE_TABLES:
            self._add(attributes[name])
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            if tensor is not None and id(tensor) not in self._seen:
                self._tensor(tensor)
        for name in HOOK_TABLES:
            if isinstance(hooks := attributes.get(name), dict):
                self._add(hooks)  # a model that puts hooks on notes in an attribute that it has: both go back
                for hook in list(hooks.values()):
                    self._later(hook, 0)
        others = {k: v for k, v in attributes.items() if k not in HOOK_TABLES and k not in _MODULE_TABLES}
        self._attributes_later(module, others, 0)

    def _class(self, cls: type, depth: int = 0) -> None:
        """What the methods of a class name, and what it holds itself: a count on the class is Python state as well."""
        if is_foreign(cls.__module__) or id(cls) in self._seen:
            return
        self._seen.add(id(cls))
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
        if tensor.is_leaf and not isinstance(tensor, FakeTensor):
            self.hooks += [(tensor, name, hooks_of(tensor, name)) for name in TENSOR_HOOKS]
        if type(tensor) in PLAIN_TENSORS and is_in_memory(tensor):
            self.tensors.append(TensorState(tensor))
            self._add(vars(tensor))  # a flag, or a count, that somebody put on it
        for value in list(vars(tensor).values()):
            if type(value) in (dict, list, set) or isinstance(tensor, nn.Parameter):
                self._later(value, 0)  # those of a fake copy are the model's own

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN, types.ModuleType)) or id(value) in self._seen:
            return  # of a module of Python's, what code names is looked at: see `globals_of`
        if isinstance(value, type):
            if len(self._seen) <= self._most and depth <= MOST_DEEP:
                for cls in value.__mro__:
                    self._class(cls, depth + 1)
            return
        if isinstance(value, Tensor):
            self._tensor(value)
            return
        if len(self._seen) > self._most or depth > MOST_DEEP or is_ours(value):
            return
        self._seen.add(id(value))
        self._held.append(value)  # so that no id comes back
        if type(value) in _PLAIN_CONTAINERS:
            self._container(value, depth)
            return
        if _is_simple(Same(type(value))) and not callable(value):
            self._object(value, depth)
            return
        if isinstance(value, nn.Module):
            for sub in value.modules():
                self._module(sub)
            return
        if is_stream(value):
            self.streams.append((value, stream_state(value)))
        self._c_state(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(CacheState(value))
            if not is_foreign(value.__module__):
                self._waiting += [(result, depth + 1) for result in worth_a_look(self.caches[-1].results())]
        if isinstance(value, dict | list | set | deque | bytearray) or is_array(value):
            self._add(value)
        if isinstance(value, types.FunctionType):
            self.named.extend(globals_of(value))
            if not is_foreign(value.__module__):
                self._names |= names_read(value.__code__)
                self.places += [Place("cell_contents", cell) for cell in value.__closure__ or ()]
                if value.__defaults__:
                    self.places.append(Place("__defaults__", value))
        for inside in _inside(value):
            self._later(inside, depth + 1)
        self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        """Attributes and slots of any object, and its classes."""
        for name in _slots_below(Same(type(value))):
            self.places.append(Place(name, value))
            self._later(self.places[-1].value, depth + 1)
        attributes = attributes_of(value)
        if isinstance(attributes, dict) and id(attributes) not in self._seen:
            self._seen.add(id(attributes))
            self._add(attributes)
            self._attributes_later(value, attributes, depth + 1)
        for cls in type(value).__mro__:
            if id(cls) not in self._seen:
                self._class(cls, depth + 1)

    def _container(self, value: Any, depth: int) -> None:
        if len(value) > MANY:
            self._large_container(value, depth)
            return
        self._add(value)
        self._waiting += [(inside, depth + 1) for inside in _inside(value)]

    def _large_container(self, value: Any, depth: int) -> None:
        """Look into one of many entries, or know from an earlier walk what that finds."""
        known = self._known.get(id(value))
        if known is None or known[0] is not value or not is_unchanged(value, known[1]):
            known = value, copy_of(value), list(_inside(value))
        self._large[id(value)] = known
        self.tables.append(value)
        self.before.append(known[1])
        self._waiting += [(inside, depth + 1) for inside in known[2]]

    def _c_state(self, value: Any) -> None:
        """State that lies in no table."""
        if is_iterator_of_c(value):
            self.iterators.append((value, iterator_state(value)))
        elif is_large_array(value):
            self.arrays.append(value)
        elif not (isinstance(value, bytearray) or is_array(value)) and (found := c_state(value)) is not None:
            self.c_states.append(found)
        if (new := stand_in(value)) is not None:
            self.stand_ins[id(value)] = value, new


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
    if not isinstance(value, _CONTAINERS):
        return False
    if len(value) > MANY:
        return True
    return any(isinstance(one, _CONTAINERS) and len(one) > MANY for one in _entries(value))


_PLAIN_CONTAINERS = (dict, list, set, deque)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _entries(container: Any) -> Iterable[Any]:
    return list(dict.values(container)) if isinstance(container, dict) else list(container)


def _is_own(cls: type) -> bool:
    """Whether all methods of a class are looked into by a walk, or known."""
    return all(c.__module__ in _KNOWN_BASES or not is_foreign(c.__module__) for c in cls.__mro__)


_ATOMS = frozenset((*PLAIN, range, types.ModuleType))


def worth_a_look(values: Iterable[Any]) -> list[Any]:
    """What may change, or lead to what may: all but plain values, with tuples opened."""
    found: list[Any] = []
    left = list(values)
    for level in itertools.count():
        kinds = set(map(type, left))
        if kinds <= _ATOMS:
            break
        if kinds.isdisjoint(_OPENED):
            found += [value for value in left if type(value) not in _ATOMS]
            break
        found += [value for value in left if type(value) not in _OPENED and type(value) not in _ATOMS]
        left = [value for value in left if type(value) in _OPENED]
        if level > 1:  # tuples may hold each other many times over
            left = list({id(value): value for value in left}.values())
        left = list(itertools.chain.from_iterable(left))
    return found


_OPENED = frozenset((tuple, frozenset))


def _inside(value: Any) -> Iterator[Any]:
    """What a value holds, refers to, or names."""
    if isinstance(value, dict):
        yield from worth_a_look(dict.keys(value))
        yield from worth_a_look(dict.values(value))
        yield value.default_factory if isinstance(value, defaultdict) else None
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from worth_a_look(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        yield value.__self__
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, _OPEN_TO_GC) or is_iterator_of_c(value):
        yield from worth_a_look(gc.get_referents(value))
    elif isinstance(value, memoryview):
        yield value.obj
    elif is_number_array(value):
        yield getattr(value, "base", None)
        yield from worth_a_look(value.ravel().tolist() if _has_objects(value) else ())
    elif _is_extension(Same(type(value))):
        yield from (v for v in worth_a_look(gc.get_referents(value)) if not isinstance(v, _NEVER_INSIDE))
    elif isinstance(value, property):
        yield from filter(None, (value.fget,))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, types.FunctionType):
        yield from function_reach(value)
    wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
    if wrapped is not None:
        yield wrapped


_OPEN_TO_GC: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
"""Kinds that hold something and have no other way to say what."""


@functools.lru_cache(maxsize=4096)
def _slots_below(cls: Same[type]) -> tuple[str, ...]:
    return tuple(name for c in cls.it.__mro__ if not is_foreign(c.__module__) for name in slots_of(c))


@functools.lru_cache(maxsize=4096)
def _is_simple(cls: Same[type]) -> bool:
    """Whether instances of a class have attributes or slots and nothing else: Python made it, and all of its bases."""
    if str(cls.it.__module__).startswith(("torch", "jettison")):
        return False
    return all("__dict__" in vars(c) or "__slots__" in vars(c) for c in cls.it.__mro__ if c is not object)


def _has_objects(array: Any) -> bool:
    return bool(getattr(getattr(array, "dtype", None), "hasobject", False))


@functools.lru_cache(maxsize=4096)
def _is_extension(cls: Same[type]) -> bool:
    """Whether instances of a class may hold what neither attributes nor slots show: a base of it was made in C, by
    somebody else than Python, torch and the libraries that are known.
    """
    return any(
        not ("__dict__" in vars(c) or "__slots__" in vars(c) or str(c.__module__).partition(".")[0] in _KNOWN_IN_C)
        for c in cls.it.__mro__
    )


_KNOWN_IN_C = sys.stdlib_module_names | {"torch", "numpy", "jettison", "triton"}


_NEVER_INSIDE = (type, types.FrameType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """The names by which instances have what a class has slots for."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


_MODELS_OWN = (
    "torch.optim",
    "torch.amp.grad_scaler",
    "torch.utils.data",
    "torch.quasirandom",
    "torch._library.custom_ops",
)


def is_ours(value: Any) -> bool:
    """A tracer's or a runtime's own objects stand in the place of forwards and hooks; what they note must stay. So
    must what torch notes in objects of its own; modules and random generators, torch's as well, are the model's.
    """
    if isinstance(value, nn.Module) or is_stream(value):
        return False
    kind: Any = type(value)
    module = str(kind.__module__)  # some classes have a property there
    if module.startswith(_MODELS_OWN):
        return False
    return module.startswith(("torch.", "jettison.")) or str(getattr(value, "__module__", "")).startswith("jettison.")


def _global_hooks() -> list[Any]:
    tables = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    return [hook for table in tables if isinstance(table, dict) for hook in table.values()]


def _moved(cls: type, was: dict[str, Any]) -> list[str]:
    """Attributes of a class that are not as they were; what Python keeps there for itself does not count."""
    now = vars(cls)
    names = [name for name in {**was, **now} if not (name.startswith("__") or name == "_abc_impl")]
    return [n for n in names if n not in was or n not in now or not (now[n] is was[n] or is_equal(now[n], was[n]))]
