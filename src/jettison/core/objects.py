"""Short reprs, renamed fields, keys by identity, tables, temporary attributes and entries, and objects by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from jettison.core.errors import UsageError


def summary(it: object, text: str) -> str:
    """Return ``<Plan: text>``; the text fits on a line of a terminal."""
    return f"<{type(it).__name__}: {' '.join(text.split())}>"


def non_defaults(it: Any) -> str:
    """Return a dataclass as it would be written, without default fields: ``Layout(dp=8, zero=3)``."""
    said = []
    for field in fields(it):
        value = getattr(it, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and (default is MISSING or value != default):
            said.append(f"{field.name}={value!r}")
    return f"{type(it).__qualname__}({', '.join(said)})"


def former_names(kind: type[Any]) -> dict[str, str]:
    """Former name of each renamed field of a dataclass (metadata ``former``), by its name."""
    return {field.name: field.metadata["former"] for field in fields(kind) if "former" in field.metadata}


def with_former_names(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field, each renamed one under its former name, too."""
    former = former_names(kind)
    return {**values, **{former[name]: value for name, value in values.items() if name in former}}


def renamed(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field; they may have former names, or both."""
    now = {former: name for name, former in former_names(kind).items()}
    return {now[name]: value for name, value in values.items() if name in now} | {
        name: value for name, value in values.items() if name not in now
    }


def each_renamed(kind: type[Any], values: Any) -> Any:
    """Return a list of JSON objects with their fields' names, see `renamed`; anything else as it is."""
    if not isinstance(values, list):
        return values
    return [renamed(kind, one) if isinstance(one, dict) else one for one in values]


T = TypeVar("T")
K = TypeVar("K")


class Same(Generic[T]):
    """Key that compares by identity. It holds a reference, so that no later object reuses the id."""

    __slots__ = ("it",)

    def __init__(self, it: T) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


class OnDemand(dict[K, T]):
    """Values by key, each made by a function when it is first read."""

    def __init__(self, make: Callable[[K], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> T:
        value = self[key] = self._make(key)
        return value


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, in order."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def module_of(target: str, expected: str, what: str = "") -> tuple[ModuleType, str]:
    """The module of ``module:name``, and the name. Modules are looked for in the working directory as well. ``what``:
    the target, for messages. Raise `UsageError` if it has another form, or there is no such module.
    """
    module, colon, name = target.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"got {what}{target!r}; {expected}")
    if module.endswith(".py"):
        raise UsageError(f"got {what}{target!r}; give the module, without .py: {module[:-3]}:{name}")
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module), name
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        where = f"in {os.getcwd()} or among installed ones"
        raise UsageError(f"{what}{target!r}: there is no module {error.name!r} {where}; {expected}") from error
    finally:
        sys.path.remove(os.getcwd())


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object, a module or a class these attributes within the context. Its own are restored afterwards; where
    it had none, or its class's, the attribute is deleted.
    """
    before = {name: _own(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    if name in vars(owner):
        return vars(owner)[name]
    return ABSENT if hasattr(type(owner), name) else getattr(owner, name, ABSENT)


@contextmanager
def set_to(value: T, read: Callable[[], T], put: Callable[[T], object]) -> Iterator[None]:
    """Set a switch of the process within the context, and restore it afterwards."""
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


ABSENT: Final = object()
Entry = tuple[MutableMapping[Any, Any], Any, Any]
"""A table, a key, and the value there; `ABSENT`: none."""


@contextmanager
def swapped_entries(entries: Iterable[Entry]) -> Iterator[None]:
    """Give tables these entries within the context, and restore their own afterwards."""
    wanted = list(entries)
    before = [(table, key, table.get(key, ABSENT)) for table, key, _ in wanted]
    try:
        _put(wanted)
        yield
    finally:
        _put(before)


def _put(entries: Iterable[Entry]) -> None:
    for table, key, value in entries:
        if value is ABSENT:
            table.pop(key, None)
        else:
            table[key] = value
