"""Side effects of a run: switches of torch, Python and numpy; imports, changed files, started processes."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib.machinery
import io
import logging
import os
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.bytecode_names import is_foreign
from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

# switches that choose kernels, and those of the process ---------------------------------------------------------------


Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that reads a switch, and one that sets it."""
_SMALLEST, _HALF = sys.float_info.min, 0.5

KERNEL_SWITCHES: tuple[Switch, ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        lambda was: torch._C._set_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch.get_num_threads, torch.set_num_threads),
    # torch has no way to ask whether denormals are flushed; the flag is the thread's, Python's numbers included
    (lambda: _SMALLEST * _HALF == 0.0, torch.set_flush_denormal),
)
"""Switches that choose kernels, their precision, or the order of their sums."""


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return os.getcwd()
    return None


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


PROCESS_SWITCHES: tuple[Switch, ...] = (
    *KERNEL_SWITCHES,
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda was: torch.set_anomaly_enabled(*was),
    ),
    (
        lambda: numpy.geterr() if (numpy := sys.modules.get("numpy")) else {},
        lambda was: sys.modules["numpy"].seterr(**was),
    ),
    (_folder, lambda was: None if was is None else os.chdir(was)),
    (lambda: dict(os.environ), _set_environment),
    (torch.autograd.is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch.sparse.check_sparse_tensor_invariants.is_enabled, torch._C._set_check_sparse_tensor_invariants),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch._C._get_deterministic_fill_uninitialized_memory, torch._C._set_deterministic_fill_uninitialized_memory),
    (gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    (lambda: logging.root.manager.disable, logging.disable),
)
"""Also those that decide what a forward computes, raises or logs. Planning leaves no other switch of the process
as it was: they do not change what a step computes, and its first step would set them alike.
"""


def read_switches() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """All switches: (how to read, how to set, value)."""
    return [(read, put, read()) for read, put in PROCESS_SWITCHES]


def put_switches_back(before: Iterable[tuple[Callable[[], Any], Callable[[Any], Any], Any]]) -> None:
    """Set those that have changed."""
    for read, put, was in before:
        if read() != was:
            put(was)


# imports --------------------------------------------------------------------------------------------------------------
#
# NOTE [ Imports in a forward ]
# A module that a forward imports (``from anneal import beta`` inside of it) does not exist when a `Reach` walks. It
# stays, with all that its code changed elsewhere (an entry of a registry): the first step would have imported it. Later
# runs note its globals from the start, since a module imported by a computed name is no global that code names.
#
# Code of imported modules runs without dispatch modes: a tensor among their globals is a real one.


class Notes(Protocol):
    """Listener to imports: before a module's code runs, and after it did."""

    def importing(self, module: types.ModuleType) -> None: ...
    def imported(self, module: types.ModuleType) -> None: ...


_LOOKING: list[Notes] = []
_KEPT: list[types.ModuleType] = []
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
    if notes in _LOOKING:
        _LOOKING.remove(notes)
        if not _LOOKING:
            del _LOADER.exec_module  # inherited from a base class


def _noting(execute: Any) -> Any:
    @functools.wraps(execute)
    def noting(loader: Any, module: types.ModuleType) -> None:
        if _INSIDE or is_foreign(module.__name__):
            with contextlib.ExitStack() as stack:
                _INSIDE.append(module)
                stack.callback(_INSIDE.pop)
                execute(loader, module)
            return
        for notes in list(_LOOKING):
            notes.importing(module)
        with _disable_current_modes(), torch.enable_grad():
            execute(loader, module)
        _KEPT.append(module)
        for notes in list(_LOOKING):
            notes.imported(module)

    return noting


# file changes ---------------------------------------------------------------------------------------------------------
#
# They are refused by name before they change anything: contents of files cannot be restored, and a checkpoint saved by
# a dry run has no values. So functions that open a file for writing, rename it or delete it are replaced during such a
# run: an audit hook would see them all, but it can never be removed and is called at every `id()`. `state_kinds` covers
# files that were open before. The function that starts a process of `multiprocessing` is replaced, too: workers of a
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
