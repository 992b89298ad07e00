"""Side effects of a run: modules that it imports, files that it changes, processes that it starts."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.machinery
import io
import os
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.code_names import is_foreign, is_of_the_program
from jettison.capture.process_switches import noting_entries
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

# imports --------------------------------------------------------------------------------------------------------------
#
# NOTE [ Imports in a forward ]
# A module that a forward imports (``from anneal import beta`` inside of it) does not exist when a `Reach` walks.
# Planning imports it, and restores what its code changed in other modules (an entry of a registry): had the module
# stayed, the first step would find it, but none of its import's changes. So an import is undone completely: the module
# leaves `sys.modules`, and the first step imports it. Names in its code are walked before that code runs, so that all
# it writes to is restored.
#
# Modules of libraries stay, with all changes by their import: C extensions and operators are registered once in a
# process. So does a module of the user's that registers operators or pytree nodes with torch. Later runs note their
# globals from the start, since a module imported by a computed name is no global that code names.
#
# Code of imported modules runs without dispatch modes: a tensor among their globals is a real one.


class Notes(Protocol):
    """Listener to imports: before code runs (None for that of a library, which will stay), and after it did."""

    def importing(self, module: types.ModuleType, code: types.CodeType | None) -> None: ...
    def imported(self, module: types.ModuleType, *, stays: bool) -> None: ...


_LOOKING: list[Notes] = []
_KEPT: list[types.ModuleType] = []
_STAYING: list[types.ModuleType] = []  # being imported for good, the outermost first
_INSIDE: list[types.ModuleType] = []  # large libraries that are being imported, and their imports
_LOADER: Any = importlib.machinery.SourceFileLoader


def imported_in_runs() -> list[types.ModuleType]:
    """Modules that such runs have imported, and that are still loaded."""
    _KEPT[:] = [module for module in _KEPT if sys.modules.get(module.__name__) is module]
    return list(_KEPT)


def note_imports(notes: Notes) -> None:
    """Report every module whose code runs until `ignore_imports`, except those of large libraries."""
    if not _LOOKING:
        _LOADER.exec_module = _noting(_LOADER.exec_module)
    _LOOKING.append(notes)


def ignore_imports(notes: Notes) -> None:
    """Stop reporting."""
    if notes in _LOOKING:
        _LOOKING.remove(notes)
        if not _LOOKING:
            del _LOADER.exec_module  # inherited from a base class


def forget_import(module: types.ModuleType) -> None:
    """Unload a module, so that its next import runs its code again."""
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
            with noting_entries(), contextlib.ExitStack() as stack:
                _INSIDE.append(module)
                stack.callback(_INSIDE.pop)
                execute(loader, module)
            return
        stays, code = bool(_STAYING) or not is_of_the_program(module.__name__), None
        with contextlib.suppress(ImportError, SyntaxError, OSError, ValueError):  # its import will raise it
            code = None if stays else loader.get_code(module.__name__)
        if not _STAYING:
            for notes in list(_LOOKING):
                notes.importing(module, code)
        registered = _registered()
        with _disable_current_modes(), torch.enable_grad(), contextlib.ExitStack() as stack:
            if stays:
                _STAYING.append(module)
                stack.callback(_STAYING.remove, module)
                stack.enter_context(noting_entries())
            execute(loader, module)
        stays = stays or registered != _registered()
        if stays:
            _KEPT.append(module)
        for notes in list(_LOOKING):
            notes.imported(module, stays=stays)

    return noting


def _registered() -> tuple[int, ...]:
    """Numbers of registered operators and pytree nodes: none can be registered twice."""
    return len(torch.library._defs), len(torch.library._impls), len(torch.utils._pytree.SUPPORTED_NODES)


# file changes ---------------------------------------------------------------------------------------------------------
#
# They are refused by name before they change anything: contents of files cannot be restored, and a checkpoint saved by
# a dry run has no values. So functions that open a file for writing, rename it or delete it are replaced during such a
# run: an audit hook would see them all, but it can never be removed and is called at every `id()`. `kinds` covers files
# that were open before. The function that starts a process of `multiprocessing` is replaced, too: workers of a
# `DataLoader` would get tensors without memory.
#
# Temporary files may be made, and files that Python and compilers write while they import and compile may stay.

_ALLOWED = (
    *("importlib.", "tempfile.", "torch._dynamo.", "torch._inductor.", "torch._functorch.", "triton.", "linecache."),
)
"""Packages whose own files are the same whenever they are written, or are deleted by themselves."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_REFUSING: dict[int, list[list[UnsupportedModule]]] = {}
"""By thread: lists of refused changes of its runs, the outermost first."""
_LOCK = threading.Lock()


def refuse_file_changes(refused: list[UnsupportedModule]) -> None:
    """Refuse, in this thread, to open a file for writing, to rename or delete one, and to start a process. ``refused``
    gets each error that is raised, since the surrounding code may catch it.
    """
    with _LOCK:
        if not _REFUSING:
            for holder, name, own in _PLACES:
                setattr(holder, name, _ASKING[Same(own)])
        _REFUSING.setdefault(threading.get_ident(), []).append(refused)


def allow_file_changes(refused: list[UnsupportedModule]) -> None:
    """End `refuse_file_changes`, if it is active."""
    with _LOCK:
        for thread, runs in list(_REFUSING.items()):
            _REFUSING[thread] = [run for run in runs if run is not refused]
            if not _REFUSING[thread]:
                del _REFUSING[thread]
        if not _REFUSING:
            for holder, name, own in _PLACES:
                setattr(holder, name, own)


def asking(function: Any) -> Any:
    """Return the stand-in for a function that changes files, wherever Python holds it; None for every other."""
    return _ASKING.get(Same(function)) if isinstance(function, _KINDS) else None


Refuses = Callable[..., UnsupportedModule | None]
"""Error for a call with such arguments, or None if it may run."""
Changes = Callable[..., str]
"""Verb for the change that a call with such arguments makes to its first argument, a file; or an empty string."""


def _opens(_file: Any = None, mode: Any = "r", *_: Any, **__: Any) -> str:
    return "opens for writing" if isinstance(mode, str) and not {*"wax+"}.isdisjoint(mode) else ""


def _opens_by_flags(_path: Any = None, flags: Any = 0, *_: Any, **__: Any) -> str:
    return "opens for writing" if isinstance(flags, int) and flags & _WRITE_FLAGS else ""


def _verb(verb: str) -> Changes:
    return lambda *_, **__: verb


def _functions() -> Iterator[tuple[Any, str, Refuses]]:
    for holder in (builtins, io, sys.modules["_io"]):
        yield holder, "open", _of_files(_opens)
    yield os, "open", _of_files(_opens_by_flags)
    for name, verb in (("rename", "renames"), ("replace", "renames"), ("truncate", "cuts off")):
        yield os, name, _of_files(_verb(verb))
    for name in ("remove", "unlink", "rmdir"):
        yield os, name, _of_files(_verb("deletes"))
    yield torch.serialization, "_open_zipfile_writer", _of_files(_verb("saves"))  # in C++
    yield BaseProcess, "start", _starts


def _of_files(changes: Changes) -> Refuses:
    def refuses(*args: Any, **kwargs: Any) -> UnsupportedModule | None:
        if not (verb := changes(*args, **kwargs)):
            return None
        path: Any = args[0] if args else next(iter(kwargs.values()), None)
        if not _is_of_the_run(path):
            return None
        return UnsupportedModule(
            f"the forward or the step {verb} the file {os.fspath(path)!r}. Planning and recording run it once more, "
            "and nothing puts a file back, so it has not been touched: do this outside of it, after the step for "
            "example, or write to a file that is open before"
        )

    return refuses


def _starts(process: BaseProcess) -> UnsupportedModule:
    what, instead = f"the process {process.name}", "start it outside of the step"
    if getattr(getattr(process, "_target", None), "__module__", "") == "torch.utils.data._utils.worker":
        what = "a worker of a DataLoader"
        instead = "take batches from it outside of the step and give the step one, or make it with num_workers=0"
    return UnsupportedModule(
        f"the forward or the step starts {what}. Planning and recording run it once more, on tensors without values "
        f"that no other process can read, so it has not been started: {instead}"
    )


def _asking(function: Any, refuses: Refuses) -> Any:
    @functools.wraps(function)
    def instead(*args: Any, **kwargs: Any) -> Any:
        runs = _REFUSING.get(threading.get_ident())
        if runs and (error := refuses(*args, **kwargs)) is not None and not _is_allowed(sys._getframe(1)):
            for refused in runs:
                refused.append(error)
            raise error
        return function(*args, **kwargs)

    return instead


def _is_of_the_run(path: Any) -> bool:
    """Whether it is a file's name, not the number of an open one, a buffer, a terminal or a pipe."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode) or stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):  # does not exist yet
        return True


def _is_allowed(frame: types.FrameType | None) -> bool:
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}."
        if name.startswith(("jettison.", *_ALLOWED)):
            return not name.startswith("jettison.")
        frame = frame.f_back
    return False


_FUNCTIONS = [(holder, name, getattr(holder, name), refuses) for holder, name, refuses in _functions()]
_PLACES = [place for *place, _ in _FUNCTIONS]
_ASKING = {Same(own): _asking(own, refuses) for _, _, own, refuses in _FUNCTIONS}
_KINDS = (types.BuiltinFunctionType, types.FunctionType)
