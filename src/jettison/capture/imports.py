"""Modules that a forward imports while it runs.

NOTE [ Imports in a forward ]
A module that a forward imports (``from anneal import beta`` inside of it) is not there when a `Reach` walks. Planning
imports it, and puts back what its code left in other modules (an entry of a registry): had the module stayed, the first
step would find it, and nothing of what its import does. So an import goes back as a whole: the module leaves
`sys.modules`, and the first step imports it. What its code names is looked at before that code runs, so that all it
writes to is put back.

Modules of libraries stay, with what their import wrote: C extensions and operators are registered once in a process. So
does a module of the user's that registers operators or kinds of trees with torch. Later runs note the globals of those
from the start, since a module that is imported by a computed name is not among the globals that code names.

Code of imported modules runs without dispatch modes: a tensor among their globals is a real one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from typing import Any, Protocol, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.function_state import is_foreign, is_of_the_program
from jettison.capture.process_switches import imported_since


class Notes(Protocol):
    """What is told of imports."""

    def importing(self, module: types.ModuleType, code: types.CodeType | None) -> None:
        """Its code is about to run; None for that of a library, which will stay."""

    def imported(self, module: types.ModuleType, *, stays: bool) -> None:
        """Its code has run; what it wrote goes back, or ``stays``."""


class Globals:
    """Globals of a module, as they were. Submodules that were imported since stay."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table, self.before = table, dict(table)

    def put_back(self) -> None:
        """Make them so again."""
        for name in self.table.keys() - self.before.keys():
            if not isinstance(self.table[name], types.ModuleType):
                del self.table[name]
        for name, value in self.before.items():
            if name not in self.table or self.table[name] is not value:
                self.table[name] = value


_LOOKING: list[Notes] = []
_KEPT: list[types.ModuleType] = []
_STAYING: list[types.ModuleType] = []  # that are being imported, the outermost first
_INSIDE: list[types.ModuleType] = []  # large libraries that are being imported, and what they import
_LOADER: Any = importlib.machinery.SourceFileLoader
_EXECUTE = "exec_module"


def imported_in_runs() -> list[types.ModuleType]:
    """Modules that such runs have imported, and that are still there."""
    _KEPT[:] = [module for module in _KEPT if sys.modules.get(module.__name__) is module]
    return list(_KEPT)


def note_imports(notes: Notes) -> None:
    """Tell of every module whose code runs until `ignore_imports`, but for those of large libraries."""
    if not _LOOKING:
        setattr(_LOADER, _EXECUTE, _noting(getattr(_LOADER, _EXECUTE)))
    _LOOKING.append(notes)


def ignore_imports(notes: Notes) -> None:
    """Tell of no more."""
    if notes in _LOOKING:
        _LOOKING.remove(notes)
        if not _LOOKING:
            delattr(_LOADER, _EXECUTE)  # a base class has it


def forget_import(module: types.ModuleType) -> None:
    """The next import of it runs its code again."""
    name = module.__name__
    if sys.modules.get(name) is module:
        del sys.modules[name]
    package, _, last = name.rpartition(".")
    if package in sys.modules and vars(sys.modules[package]).get(last) is module:
        delattr(sys.modules[package], last)


def _noting(execute: Any) -> Any:
    @functools.wraps(execute)
    def noting(loader: Any, module: types.ModuleType) -> None:
        if _INSIDE or is_foreign(module.__name__):
            _INSIDE.append(module)
            try:
                with imported_since.noted():
                    execute(loader, module)
            finally:
                _INSIDE.pop()
            return
        stays = bool(_STAYING) or not is_of_the_program(module.__name__)
        if not _STAYING:
            for notes in list(_LOOKING):
                notes.importing(module, None if stays else _code_of(loader, module))
        registered = _registered()
        if stays:
            _STAYING.append(module)
        paths = imported_since.noted() if stays else contextlib.nullcontext()
        try:
            with _disable_current_modes(), torch.enable_grad(), paths:
                execute(loader, module)
        finally:
            if stays:
                _STAYING.remove(module)
        stays = stays or registered != _registered()
        if stays:
            _KEPT.append(module)
        for notes in list(_LOOKING):
            notes.imported(module, stays=stays)

    return noting


def _code_of(loader: Any, module: types.ModuleType) -> types.CodeType | None:
    with contextlib.suppress(ImportError, SyntaxError, OSError, ValueError):  # which its import will say
        return cast(types.CodeType | None, loader.get_code(module.__name__))
    return None


def _registered() -> tuple[int, ...]:
    """Numbers of registered operators and pytree kinds: none can be registered twice."""
    return len(torch.library._defs), len(torch.library._impls), len(torch.utils._pytree.SUPPORTED_NODES)
