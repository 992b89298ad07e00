"""Modules that a forward imports while it runs.

NOTE [ Imports in a forward ]
A module that a forward imports (``from anneal import beta`` inside of it) is not there when a `Reach` walks. Planning
would import it, run it, and leave its globals moved: the first step would begin with the counts of planning. So while a
run must leave nothing behind, modules of the user's are noted as soon as their code has run, and put back at the end.
They stay imported, so that classes and functions that were taken out of them stay the same. Their code runs without
dispatch modes: a tensor among their globals is a real one. Later runs note those modules from the start, since a module
that is imported by a computed name is not among the globals that code names.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.function_state import is_foreign
from jettison.capture.process_switches import imported_since


class Notes(Protocol):
    """What is told of imports."""

    def imported(self, module: types.ModuleType) -> None:
        """Its code has run."""


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
_IMPORTED: list[types.ModuleType] = []
_LOADER: Any = importlib.machinery.SourceFileLoader
_EXECUTE = "exec_module"


def imported_in_runs() -> list[types.ModuleType]:
    """Modules of the user's that such runs have imported, and that are still there."""
    _IMPORTED[:] = [module for module in _IMPORTED if sys.modules.get(module.__name__) is module]
    return list(_IMPORTED)


def note_imports(notes: Notes) -> None:
    """Tell of every module of the user's whose code runs until `ignore_imports`."""
    if not _LOOKING:
        setattr(_LOADER, _EXECUTE, _noting(getattr(_LOADER, _EXECUTE)))
    _LOOKING.append(notes)


def ignore_imports(notes: Notes) -> None:
    """Tell of no more."""
    if notes in _LOOKING:
        _LOOKING.remove(notes)
        if not _LOOKING:
            delattr(_LOADER, _EXECUTE)  # a base class has it


def _noting(execute: Any) -> Any:
    @functools.wraps(execute)
    def noting(loader: Any, module: types.ModuleType) -> None:
        if is_foreign(module.__name__):
            with imported_since.noted():
                execute(loader, module)
            return
        with _disable_current_modes(), torch.enable_grad(), imported_since.noted():
            execute(loader, module)
            _IMPORTED.append(module)
            for notes in list(_LOOKING):
                notes.imported(module)

    return noting
