"""Kinds of objects that are made in C, and what of their state Python can get at.

A run that must leave nothing behind finds a copy in the place of an object whose state C keeps (`c_state.stand_in`). A
kind of Python's or NumPy's that refuses to be copied, and that moves as it is used, is refused by name instead:
a `csv.reader` has gone on, a `pickle.Pickler` knows what it has written, a compressor what it was given.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import gc
import inspect
import sys
import types
from typing import Any

from jettison.capture.snapshots import PLAIN_KINDS
from jettison.core.objects import Same

_STAYS_THE_SAME = frozenset(
    (
        *("_abc", "_asyncio", "_contextvars", "_ctypes", "_io", "_json", "_multiprocessing", "_queue", "_random"),
        *("_socket", "_ssl", "_struct", "_thread", "_weakref", "builtins", "itertools", "mmap", "posix", "select"),
        *("types", "unicodedata", "nt"),
    )
)
"""Modules of C's whose kinds that refuse a copy synchronise, describe, never move, or are known to `c_state`."""
_OF_NUMPY = ("flatiter",)


@functools.lru_cache(maxsize=4096)
def refuses_a_copy(kind: Same[type]) -> bool:
    """Whether instances of a kind made in C move as they are used, and can be neither copied nor put back."""
    made_by = str(kind.it.__module__)
    if (made_by == "numpy" and kind.it.__name__ in _OF_NUMPY) or _is_stream_of_an_extension(kind.it):
        return True
    if made_by in _STAYS_THE_SAME or made_by not in sys.stdlib_module_names or _is_written_in_python(made_by):
        return False
    ways = (
        *(getattr(kind.it, name, None) for name in ("__copy__", "__deepcopy__")),
        copyreg.dispatch_table.get(kind.it),
    )
    tables: tuple[Any, ...] = (copy._deepcopy_dispatch, copy._copy_dispatch)  # type: ignore[attr-defined]
    if any(way is not None for way in ways) or any(kind.it in table for table in tables):
        return False
    return all(getattr(kind.it, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


def _is_stream_of_an_extension(cls: type) -> bool:
    """Whether it is written to and knows how far it is, in C: the streams of Arrow."""
    found = (inspect.getattr_static(cls, name, None) for name in ("write", "tell"))
    if any(one is None or isinstance(one, types.FunctionType) for one in found):
        return False
    return str(cls.__module__).partition(".")[0] not in (*sys.stdlib_module_names, *_KNOWN)


@functools.lru_cache(maxsize=4096)
def adds_up(kind: Same[type]) -> bool:
    """Whether instances of a kind made in C add up what they are given, and say a copy: digests, whoever made them, and
    compressors of `zlib`.
    """
    names = ("copy",) if kind.it.__module__ == "zlib" else ("copy", "update", "digest")
    return all(type(getattr(kind.it, name, None)) is types.MethodDescriptorType for name in names)


def copied_whole(value: Any) -> Any:
    """A deep copy of an object whose state C hides; None where it hides none, or refuses."""
    kind = Same(type(value))
    if not is_copied_whole(kind) or (_is_looked_into(kind) and attributes_in_c(value)):
        return None
    try:
        return copy.copy(value) if _is_looked_into(kind) else copy.deepcopy(value)
    except Exception:  # whatever a library's own code raises
        return None


@functools.lru_cache(maxsize=4096)
def is_copied_whole(kind: Same[type]) -> bool:
    """Whether instances of a kind made in C change without a sign: it sets items or a state, and is no value that
    others hash by.
    """
    hashes: Any = kind.it.__hash__
    if not (hashes is None or hashes is object.__hash__) or issubclass(kind.it, BaseException):
        return False
    if "__reduce_cython__" in dir(kind.it):  # its attributes are looked into
        return False
    return any(_is_of_an_extension(kind.it, name) for name in ("__setstate__", "__setitem__"))


def _is_of_an_extension(cls: type, name: str) -> bool:
    """Whether a method is C's, and of no library whose kinds are known."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    if owner is None or type(vars(owner)[name]).__name__ not in _METHODS_OF_C:
        return False
    made_by = str(owner.__module__).partition(".")[0]
    return owner.__name__ in _OF_XML if made_by in sys.stdlib_module_names else made_by not in _KNOWN


_METHODS_OF_C = ("wrapper_descriptor", "method_descriptor", "instancemethod")
"""Names of their kinds; the last one's are pybind11's."""
_KNOWN = ("torch", "numpy", "jettison", "triton")
_OF_XML = ("Element",)


def _is_looked_into(kind: Same[type]) -> bool:
    """Whether the collector knows what instances hold: a copy of a container may have the same values."""
    return bool(kind.it.__flags__ & _TRACKED) and kind.it.__name__ not in _OF_XML


_TRACKED = 1 << 14
"""Of a class in C: the collector looks into its instances."""


def _is_written_in_python(module: str) -> bool:
    return str(getattr(sys.modules.get(module), "__file__", "")).endswith(".py")


def is_of_c(file: Any) -> bool:
    """Whether the methods of a file are C's: asking one made in Python for its number may change it."""
    return not isinstance(getattr(type(file), "fileno", None), types.FunctionType)


def attributes_in_c(value: Any) -> list[str]:
    """Names of attributes that an extension's object holds in C, apart from its ``__dict__``: ``cdef public`` ones.

    Nothing else tells which of the getters of its class only read what it holds: such a value is one that the
    collector finds there, or a plain one.
    """
    names = _getters(Same(type(value)))
    known = set(map(id, gc.get_referents(value))) if names else set()
    if len(known) < 2:  # its class, at the most
        return []
    found = []
    for name in names:
        try:
            one = object.__getattribute__(value, name)
        except Exception:  # whatever a library's getter raises
            continue
        if id(one) in known or type(one) in PLAIN_KINDS:
            found.append(name)
    return found


@functools.lru_cache(maxsize=1024)
def _getters(kind: Same[type]) -> tuple[str, ...]:
    found: dict[str, Any] = {}
    for cls in kind.it.__mro__:
        is_pythons = str(cls.__module__).partition(".")[0] in sys.stdlib_module_names
        for name, one in vars(cls).items():
            found.setdefault(name, None if is_pythons else one)  # what a pointer of `ctypes` points to may be gone
    return tuple(
        name
        for name, one in found.items()
        if isinstance(one, types.GetSetDescriptorType | types.MemberDescriptorType) and not name.startswith("__")
    )
