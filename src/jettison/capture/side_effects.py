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
from typing import Any, Protocol, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.code_names import is_foreign, is_of_the_program
from jettison.capture.process_switches import imported_since
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

# imports --------------------------------------------------------------------------------------------------------------
#
# NOTE [ Imports in a forward ]
# A module that a forward imports (``from anneal import beta`` inside of it) is not there when a `Reach` walks. Planning
# imports it, and puts back what its code left in other modules (an entry of a registry): had the module stayed, the
# first step would find it, and nothing of what its import does. So an import goes back as a whole: the module leaves
# `sys.modules`, and the first step imports it. What its code names is looked at before that code runs, so that all it
# writes to is put back.
#
# Modules of libraries stay, with what their import wrote: C extensions and operators are registered once in a process.
# So does a module of the user's that registers operators or kinds of trees with torch. Later runs note the globals of
# those from the start, since a module that is imported by a computed name is not among the globals that code names.
#
# Code of imported modules runs without dispatch modes: a tensor among their globals is a real one.


class Notes(Protocol):
    """What is told of imports."""

    def importing(self, module: types.ModuleType, code: types.CodeType | None) -> None:
        """Its code is about to run; None for that of a library, which will stay."""

    def imported(self, module: types.ModuleType, *, stays: bool) -> None:
        """Its code has run; what it wrote goes back, or ``stays``."""


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


# file changes ---------------------------------------------------------------------------------------------------------
#
# They are refused by name before they change anything: nothing puts back what was in a file, and a checkpoint that a
# dry run of a step saves has no values. So functions that open a file for writing, rename it or delete it are replaced
# while such a run goes on: an audit hook would see them all, but it stays for good and is asked at every `id()`. Files
# that were open before are in `kinds`. So is the function that starts a process of `multiprocessing`: workers of a
# `DataLoader` would be handed tensors that have no memory.
#
# Temporary files may be made, and what Python and compilers write while they import and compile may stay.


_ALLOWED = ("importlib", "tempfile", "torch._dynamo", "torch._inductor", "torch._functorch", "triton", "linecache")
"""Packages whose own files are the same whenever they are written, or go away by themselves."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_REFUSING: dict[int, list[list[UnsupportedModule]]] = {}
"""By thread: where the runs in it, the outermost first, have what they refused."""
_LOCK = threading.Lock()


def refuse_file_changes(refused: list[UnsupportedModule]) -> None:
    """From now on this thread opens no file for writing, renames and deletes none, and starts no process.

    Args:
        refused: gets each error that is raised, since the code around may go on without a word.
    """
    with _LOCK:
        if not _REFUSING:
            for holder, name, own in _PLACES:
                setattr(holder, name, _ASKING[Same(own)])
        _REFUSING.setdefault(threading.get_ident(), []).append(refused)


def allow_file_changes(refused: list[UnsupportedModule]) -> None:
    """The end of `refuse_file_changes`, or nothing."""
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
"""Error for a call with such arguments, or None where it may run."""
Changes = Callable[..., str]
"""Verb for what a call with such arguments does to the file that it is given first, or an empty text."""


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
    """Whether it is a file's name, and not a number of one that is open, a buffer, a terminal or a pipe."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode) or stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):  # not there yet
        return True


def _is_allowed(frame: types.FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("jettison."):
            return False
        if any(name == one or name.startswith(f"{one}.") for one in _ALLOWED):
            return True
        frame = frame.f_back
    return False


_PLACES = [(holder, name, getattr(holder, name)) for holder, name, _ in _functions()]
_ASKING = {
    Same(getattr(holder, name)): _asking(getattr(holder, name), refuses) for holder, name, refuses in _functions()
}
_KINDS = (types.BuiltinFunctionType, types.FunctionType)
