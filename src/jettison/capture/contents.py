"""Contents of a value: what it holds, refers to or names, and which of that may change."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import queue
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from jettison.capture.c_state import CSV_WRITER, is_iterator_of_c, waiting_in
from jettison.capture.function_state import function_reach, is_foreign
from jettison.capture.kinds_of_c import is_copied_whole
from jettison.capture.snapshots import CONTAINERS, PLAIN, attributes_of, is_a, is_number_array, items_of
from jettison.capture.streams import is_stream
from jettison.capture.wide_reach import NEVER_INSIDE
from jettison.core.objects import Same

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


def inside(value: Any) -> Iterator[Any]:
    """What a value holds, refers to, or names."""
    if is_a(value, dict):
        yield from worth_a_look(dict.keys(value))
        yield from worth_a_look(dict.values(value))
        yield vars(defaultdict)["default_factory"].__get__(value) if is_a(value, defaultdict) else None
    elif is_a(value, CONTAINERS):
        yield from worth_a_look(items_of(value))
    elif is_a(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif is_a(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
        yield value.__self__
    elif is_a(value, weakref.ref):
        yield weakref.ref.__call__(value)
    elif is_a(value, weakref.ProxyTypes):  # which hands on every name
        yield getattr(value.__init__, "__self__", None)
    elif is_a(value, _OPEN_TO_GC) or is_iterator_of_c(value):
        yield from worth_a_look(gc.get_referents(value))
    elif is_a(value, memoryview):
        yield value.obj
    elif is_a(value, queue.SimpleQueue):
        yield from worth_a_look(waiting_in(value))
    elif is_number_array(value):
        yield getattr(value, "base", None)
        yield from worth_a_look(value.ravel().tolist() if _has_objects(value) else ())
    elif is_extension(Same(type(value))):
        yield from (v for v in worth_a_look(gc.get_referents(value)) if not is_a(v, NEVER_INSIDE))
    elif is_a(value, property):
        yield from filter(None, (value.fget,))
    elif is_a(value, staticmethod | classmethod):
        yield value.__func__
    elif is_a(value, types.FunctionType):
        yield from function_reach(value)


_OPEN_TO_GC: tuple[type, ...] = (
    *(types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())),
    *(ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._Pointer, ctypes._SimpleCData, CSV_WRITER),
)
"""Kinds that hold something and have no other way to say what."""


@functools.lru_cache(maxsize=4096)
def slots_below(cls: Same[type]) -> tuple[str, ...]:
    """Slots of an object; its ``__dict__`` too, which C may exchange for another, as pydantic's validated assignments
    do.
    """
    whose = ((c, str(c.__module__).partition(".")[0]) for c in cls.it.__mro__)
    slots = [name for c, package in whose if package not in ("torch", "jettison") for name in slots_of(c)]
    if not cls.it.__dictoffset__ or is_foreign(cls.it.__module__) or issubclass(cls.it, nn.Module | threading.local):
        return tuple(slots)
    return (*slots, "__dict__")


@functools.lru_cache(maxsize=4096)
def is_simple(cls: Same[type]) -> bool:
    """Whether instances of a class have attributes or slots and nothing else: Python made it, and all of its bases."""
    if str(cls.it.__module__).startswith(("torch", "jettison")) or is_copied_whole(cls):
        return False
    return all("__dict__" in vars(c) or "__slots__" in vars(c) for c in cls.it.__mro__ if c is not object)


def _has_objects(array: Any) -> bool:
    return bool(getattr(getattr(array, "dtype", None), "hasobject", False))


@functools.lru_cache(maxsize=4096)
def is_extension(cls: Same[type]) -> bool:
    """Whether instances of a class may hold what neither attributes nor slots show: a base of it was made in C, by
    somebody else than Python, torch and the libraries that are known.
    """
    return any(
        not ("__dict__" in vars(c) or "__slots__" in vars(c) or str(c.__module__).partition(".")[0] in _KNOWN_IN_C)
        for c in cls.it.__mro__
    )


_KNOWN_IN_C = sys.stdlib_module_names | {"torch", "numpy", "jettison", "triton"}


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """The names by which instances have what a class has slots for."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if is_a(slots, str) else tuple(slots)
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
    kind: Any = type(value)
    if issubclass(kind, nn.Module) or is_stream(value):
        return False
    module = str(kind.__module__)  # some classes have a property there
    if module.startswith(_MODELS_OWN):
        return False
    if module.startswith(("torch.", "jettison.")):
        return True
    if issubclass(kind, types.FunctionType | types.MethodType | type):
        return str(value.__module__).startswith("jettison.")
    attributes = attributes_of(value)
    return is_a(attributes, dict) and str(attributes.get("__module__")).startswith("jettison.")
