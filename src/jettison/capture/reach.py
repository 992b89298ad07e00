"""Python state that a forward can reach: what it may read, and what it may leave something in.

A forward reads more than its arguments: attributes of modules, configurations, containers, closures, globals that its
code names, the state of random generators. None of that passes a dispatcher. A `Reach` lists the tables (attribute
dicts, dicts, lists, sets) behind a module and some values, so that what a run leaves in them can be seen and undone: a
recording on fake tensors must leave nothing behind.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import functools
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.streams import is_stream, set_stream_state, stream_state

MOST_VALUES = 100_000
"""Values looked at in one walk; a forward that reaches more is known in part, and its witnesses have the rest."""
MOST_DEEP = 12
MOST_BYTES = 1 << 24  # of an array that is put back
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "jettison", "transformers", "_pytest", "pytest"}
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)

Table = Any
"""A dict, a list, a set, a deque, or an array of numbers."""


class Reach:
    """The tables behind some modules and values, as they were when this was made.

    Args:
        modules: every attribute of theirs and of their submodules, and what their methods name.
        values: anything else that a forward gets.
    """

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> None:
        self.tensors: list[tuple[Tensor, int]] = []
        self.hooks: list[tuple[Tensor, str, Any]] = []  # tables of hooks on tensors, copied
        self.tables: list[Table] = []
        self.before: list[Any] = []
        self.places: list[Place] = []  # cells of closures and slots of objects
        self.named: list[tuple[dict[str, Any], str, Any]] = []  # globals that code mentions
        self.caches: list[tuple[Any, Any]] = []  # functions with an lru_cache, and what it said of itself
        self.streams: list[tuple[Any, Any]] = []  # random generators of Python's and numpy's, and their state
        self.classes: list[tuple[type, dict[str, Any]]] = []
        self.iterators: list[tuple[Any, Any]] = []  # and how far they are
        self._seen: set[int] = set()
        self._held: list[Any] = []
        self._waiting: deque[tuple[Any, int]] = deque()  # what is near comes first, however much lies behind it
        classes: dict[type, None] = {}
        for module in modules:
            for sub in module.modules():
                self._module(sub)
                classes.update(dict.fromkeys(type(sub).__mro__))
        for cls in classes:
            self._class(cls)
        for value in (*values, *contextvars.copy_context().values()):  # hooks collect outputs in such variables
            if not isinstance(value, Tensor):
                self._later(value, 0)
        while self._waiting:
            self._visit(*self._waiting.popleft())

    # what was found --------------------------------------------------------------------------------------------------

    def changes(self) -> list[str]:
        """What is not as it was, in words; tables that hold the same objects in the same places count as unchanged."""
        found = [
            _describe(table, before)
            for table, before in zip(self.tables, self.before, strict=True)
            if not _unchanged(table, before)
        ]
        found += ["a tensor in Python's hands was written to"] if self.wrote() else []
        found += ["a hook was put on a tensor" for tensor, name, was in self.hooks if _hooks(tensor, name) != was]
        found += [f"{place.name} changed" for place in self.places if not place.unchanged()]
        found += [f"global {name!r} changed" for names, name, value in self.named if names.get(name) is not value]
        found += [f"{cls.__name__}.{name} changed" for cls, was in self.classes for name in _moved(cls, was)]
        found += [f"a {type(one).__name__} went on" for one in self.moved()]
        return found + [f"a {type(s).__name__} was drawn from" for s, state in self.streams if stream_state(s) != state]

    def wrote(self) -> bool:
        """Whether a tensor in Python's hands was written to."""
        return any(tensor._version != version for tensor, version in self.tensors)

    def moved(self) -> list[Any]:
        """Iterators that have gone on since: nothing puts them back."""
        return [iterator for iterator, state in self.iterators if iterator_state(iterator) != state]

    def restore(self) -> None:
        """Put everything back that can be, and forget what caches have learnt since; see `moved`."""
        for table, before in zip(self.tables, self.before, strict=True):
            if not _unchanged(table, before):
                _put_back(table, before)
        for place in self.places:
            if not place.unchanged():
                place.put_back()
        for tensor, name, was in self.hooks:
            if _hooks(tensor, name) != was:
                _put_hooks_back(tensor, name, was)
        for names, name, value in self.named:
            names[name] = value
        for cls, was in self.classes:
            for name in _moved(cls, was):
                if name in was:
                    setattr(cls, name, was[name])
                else:
                    delattr(cls, name)
        for function, info in self.caches:
            if function.cache_info().currsize != info.currsize:
                function.cache_clear()
        self.restore_streams()

    def restore_streams(self) -> None:
        """Put random generators back."""
        for stream, state in self.streams:
            if stream_state(stream) != state:
                set_stream_state(stream, state)

    # walking ---------------------------------------------------------------------------------------------------------

    def _later(self, value: Any, depth: int) -> None:
        if not isinstance(value, PLAIN):
            self._waiting.append((value, depth))

    def _module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if id(attributes) in self._seen:
            return
        self._seen.add(id(attributes))
        self._add(attributes)
        for name in _MODULE_TABLES:
            self._add(attributes[name])
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            self._hooks_of(tensor)
        for name, value in attributes.items():
            if name in HOOK_TABLES and isinstance(value, dict):
                self._add(value)  # a model that puts hooks on notes in an attribute that it has: both go back
                for hook in list(value.values()):
                    self._later(hook, 0)
            elif name not in _MODULE_TABLES:
                self._later(value, 0)

    def _class(self, cls: type, depth: int = 0) -> None:
        """What the methods of a class name, and what it holds itself: a count on the class is Python state as well."""
        if _is_foreign(cls.__module__) or id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self.classes.append((cls, dict(vars(cls))))
        for value in list(vars(cls).values()):
            self._later(value, depth)

    def _add(self, table: Table) -> None:
        self.tables.append(table)
        self.before.append(_copy(table))

    def _hooks_of(self, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.is_leaf and not isinstance(tensor, FakeTensor):
            self.hooks += [(tensor, name, _hooks(tensor, name)) for name in _TENSOR_HOOKS]

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN, types.ModuleType)) or id(value) in self._seen:
            return
        if isinstance(value, type):
            if len(self._seen) <= MOST_VALUES and depth <= MOST_DEEP:
                for cls in value.__mro__:
                    self._class(cls, depth + 1)
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            if not value.is_inference():
                self.tensors.append((value, value._version))
            self._hooks_of(value)
            return
        if len(self._seen) > MOST_VALUES or depth > MOST_DEEP or is_ours(value):
            return
        self._seen.add(id(value))
        self._held.append(value)  # so that no id comes back
        if isinstance(value, nn.Module):
            for sub in value.modules():
                self._module(sub)
            return
        if is_stream(value):
            self.streams.append((value, stream_state(value)))
            return
        if isinstance(value, Iterator):
            self.iterators.append((value, iterator_state(value)))
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append((value, value.cache_info()))
        if isinstance(value, dict | list | set | deque | bytearray) or is_array(value):
            self._add(value)
        if isinstance(value, types.FunctionType):
            self.named.extend(globals_of(value))
            if not _is_foreign(value.__module__):
                self.places += [Place("cell_contents", cell) for cell in value.__closure__ or () if not _is_empty(cell)]
        for name in (name for cls in type(value).__mro__ for name in _slots_of(cls)):
            self.places.append(Place(name, value))
        for inside in _inside(value):
            self._later(inside, depth + 1)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self._seen:
            self._seen.add(id(attributes))
            self._add(attributes)
            for inside in list(attributes.values()):
                self._later(inside, depth + 1)
            for cls in type(value).__mro__:
                self._class(cls, depth + 1)


_MISSING = object()


class Place:
    """An attribute that lies in no table: what a cell of a closure holds, or a slot of an object."""

    __slots__ = ("holder", "name", "value")

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        self.value = getattr(holder, name, _MISSING)

    def unchanged(self) -> bool:
        """Whether it holds what it held."""
        now = getattr(self.holder, self.name, _MISSING)
        return now is self.value or _equal(now, self.value)

    def put_back(self) -> None:
        """Hold that again."""
        with contextlib.suppress(AttributeError, TypeError):  # a slot may refuse to be set
            if self.value is _MISSING:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, self.value)


def _is_empty(cell: Any) -> bool:
    """Whether nothing was assigned to it yet."""
    return cell == types.CellType()


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks(tensor: Tensor, name: str) -> Any:
    found = getattr(tensor, name, None)
    return dict(found) if found else None


def _put_hooks_back(tensor: Tensor, name: str, was: Any) -> None:
    table = getattr(tensor, name)
    if was is None and name == "_backward_hooks":
        tensor._backward_hooks = None
        return
    table.clear()
    table.update(was or {})


def iterator_state(iterator: Any) -> Any:
    """How far an iterator is; equal for as long as nobody has asked it for more."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, _frozen(tuple(frame.f_locals.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that itertools will not be pickled one day
        try:
            return _frozen(iterator.__reduce__())
        except TypeError:
            return None


def _frozen(value: Any) -> Any:
    """Something that is equal as long as a value is the same: plain values by themselves, objects by which they are."""
    if isinstance(value, (*PLAIN, range)):
        return repr(value)
    if isinstance(value, tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, Iterator):
        return type(value), iterator_state(value)
    return tuple(map(id, value)) if isinstance(value, list) else id(value)


def is_array(value: Any) -> bool:
    """Whether it is numbers that can be written to, of numpy or of Python, and few enough to be copied."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return bool(value.flags.writeable) and value.nbytes <= MOST_BYTES and not isinstance(value, numpy.memmap)
    return isinstance(value, array.array)


def _inside(value: Any) -> Iterator[Any]:
    """What a value holds, refers to, or names."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, property):
        yield from filter(None, (value.fget,))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, types.FunctionType):
        yield from function_reach(value)
    wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
    if wrapped is not None:
        yield wrapped
    if not isinstance(value, dict | list | tuple | set | frozenset):
        for cls in type(value).__mro__:
            for name in _slots_of(cls):
                inside = getattr(value, name, None)
                if inside is not None:
                    yield inside


@functools.cache
def _slots_of(cls: type) -> tuple[str, ...]:
    if _is_foreign(cls.__module__):
        return ()
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def function_reach(function: types.FunctionType) -> Iterator[Any]:
    """What a function's code can read without being given it: its closure, its defaults, the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for _, _, value in globals_of(function):
        yield value


def globals_of(function: types.FunctionType, *, everywhere: bool = False) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(table, name, value) of every global that a function's code mentions, in its file or as an attribute of another
    file that it imports.

    Args:
        everywhere: also for functions of torch and of other large libraries.
    """
    if _is_foreign(function.__module__) and not everywhere:
        return
    names = names_in(function.__code__)
    table = function.__globals__
    for name in names:
        if name not in table:
            continue
        value = table[name]
        yield table, name, value
        if isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
            yield from ((vars(value), inner, vars(value)[inner]) for inner in names if inner in vars(value))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Global and attribute names that a code object mentions, functions inside it included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for c in inner for name in names_in(c)))))


def is_ours(value: Any) -> bool:
    """A tracer's or a runtime's own objects stand in the place of forwards and hooks; what they note must stay. So
    must what torch notes in objects of its own; modules and random generators, torch's as well, are the model's.
    """
    if isinstance(value, nn.Module) or is_stream(value):
        return False
    kind: Any = type(value)
    return kind.__module__.startswith(("torch.", "jettison.")) or str(getattr(value, "__module__", "")).startswith(
        "jettison."
    )


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


# tables ---------------------------------------------------------------------------------------------------------------


def _moved(cls: type, was: dict[str, Any]) -> list[str]:
    """Attributes of a class that are not as they were; what Python keeps there for itself does not count."""
    now = vars(cls)
    names = [name for name in {**was, **now} if not (name.startswith("__") or name == "_abc_impl")]
    return [n for n in names if n not in was or n not in now or not (now[n] is was[n] or _equal(now[n], was[n]))]


def _copy(table: Table) -> Any:
    if is_array(table):
        return copy.copy(table)
    return dict(table) if isinstance(table, dict) else tuple(table)


def _unchanged(table: Table, before: Any) -> bool:
    if is_array(table):
        return bool(table.tobytes() == before.tobytes())
    if len(table) != len(before):
        return False
    if isinstance(table, dict):
        return all(
            a is c and (b is d or _equal(b, d)) for (a, b), (c, d) in zip(table.items(), before.items(), strict=True)
        )
    if isinstance(table, set):
        return table == set(before)
    return all(a is b or _equal(a, b) for a, b in zip(table, before, strict=True))


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b)


def _put_back(table: Table, before: Any) -> None:
    if is_array(table):
        table[:] = before
        return
    table.clear()
    if isinstance(table, dict | set):
        table.update(before)
    else:
        table.extend(before)


def _describe(table: Table, before: Any) -> str:
    if isinstance(table, dict):
        keys = [k for k in {**before, **table} if k not in before or k not in table or table[k] is not before[k]]
        return f"{', '.join(map(repr, keys[:3]))} changed"
    return f"a {type(table).__name__} of {len(before)} changed"
