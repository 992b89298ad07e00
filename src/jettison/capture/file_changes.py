"""Files that a run changes and processes that it starts, where it must leave nothing behind: refused by name before.

Nothing puts back what was in a file, and a checkpoint that a dry run of a step saves has no values. So functions that
open a file for writing, rename it or delete it are replaced while such a run goes on: an audit hook would see them all,
but it stays for good and is asked at every `id()`. Files that were open before are `c_state`'s. So is the function that
starts a process of `multiprocessing`: workers of a `DataLoader` would be handed tensors that have no memory.

Temporary files may be made, and what Python and compilers write while they import and compile may stay.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from jettison.core.errors import UnsupportedModule
from jettison.core.objects import Same

_ALLOWED = ("importlib", "tempfile", "torch._dynamo", "torch._inductor", "torch._functorch", "triton", "linecache")
"""Packages whose own files are the same whenever they are written, or go away by themselves."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_LOOKING: dict[int, list[list[UnsupportedModule]]] = {}
"""By thread: where the runs in it, the outermost first, have what they refused."""
_LOCK = threading.Lock()


def refuse_file_changes(refused: list[UnsupportedModule]) -> None:
    """From now on this thread opens no file for writing, renames and deletes none, and starts no process.

    Args:
        refused: gets each error that is raised, since the code around may go on without a word.
    """
    with _LOCK:
        if not _LOOKING:
            for holder, name, own in _PLACES:
                setattr(holder, name, _ASKING[Same(own)])
        _LOOKING.setdefault(threading.get_ident(), []).append(refused)


def allow_file_changes(refused: list[UnsupportedModule]) -> None:
    """The end of `refuse_file_changes`, or nothing."""
    with _LOCK:
        for thread, runs in list(_LOOKING.items()):
            _LOOKING[thread] = [run for run in runs if run is not refused]
            if not _LOOKING[thread]:
                del _LOOKING[thread]
        if not _LOOKING:
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
        runs = _LOOKING.get(threading.get_ident())
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
