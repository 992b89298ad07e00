"""Side effects of a run: switches of torch, Python and numpy; imports, changed files, started processes."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib.machinery
import io
import itertools
import linecache
import locale
import logging
import os
import signal
import stat
import sys
import threading
import time
import tracemalloc
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.code_names import is_foreign, is_of_the_program
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

_handler: Callable[[int], Any] = sys.modules["_signal"].getsignal  # `signal` makes an enum of each
_SIGNALS = tuple(map(int, signal.valid_signals()))


def _set_signal_handlers(wanted: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():  # no other thread can have changed them
        return
    for number, handler in wanted.items():
        if handler is not None and _handler(number) != handler:  # C has set what is None
            signal.signal(number, handler)


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return os.getcwd()
    return None


def _numpy() -> tuple[Any, Any] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else (numpy.geterr(), numpy.get_printoptions())


def _set_numpy(wanted: tuple[Any, Any] | None) -> None:
    if wanted is not None:
        sys.modules["numpy"].seterr(**wanted[0])
        sys.modules["numpy"].set_printoptions(**wanted[1])


Environment = tuple[dict[Any, Any], dict[bytes, bytes]]


def _set_environment(wanted: Environment) -> None:
    of_python, of_c = wanted
    now = _of_c()
    _of_python().clear()
    _of_python().update(of_python)
    for name in now.keys() - of_c.keys():
        os.unsetenv(name)
    for name in (name for name, value in of_c.items() if now.get(name) != value):
        os.putenv(name, of_c[name])


def _of_python() -> dict[Any, Any]:
    return cast(Any, os.environ)._data


def _of_c() -> dict[bytes, bytes]:
    """The environment of child processes, which `os.putenv` changes without `os.environ`."""
    try:
        entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    except (ValueError, TypeError, OSError):  # the system has another name for it
        return dict(_of_python())
    found = itertools.takewhile(bool, (entries[at] for at in itertools.count()))
    return {name: value for name, _, value in (one.partition(b"=") for one in found)}


def _set_search(wanted: tuple[list[str], Any, list[Any]]) -> None:
    path, filters, entries = wanted
    sys.path[:] = _with_imported(path, sys.path, _paths_since)
    entries = _with_imported(entries, warnings.filters, _filters_since)
    if warnings.filters is not filters or list(filters) != entries:
        filters[:] = entries
        with warnings.catch_warnings():  # leaving it makes Python read the filters again
            pass
        cast(Any, warnings).filters = filters


def _with_imported(before: list[Any], now: Iterable[Any], added: list[Any]) -> list[Any]:
    """The old entries, with those that an imported library added at their present positions."""
    new = [one for one in now if one in added and one not in before]
    together = [one for one in now if one in before or one in new]
    if new and [one for one in together if one not in new] == before:
        return together
    return [*new, *before]


_paths_since: list[str] = []
_filters_since: list[Any] = []
"""Search-path and warnings-filter entries of libraries imported in runs that restore all else: they need them."""


@contextlib.contextmanager
def noting_entries() -> Iterator[None]:
    """Keep the entries of the search path and of the warnings' filters that an import within this context adds."""
    paths, filters = list(sys.path), list(warnings.filters)
    try:
        yield
    finally:
        _paths_since.extend(one for one in sys.path if one not in paths)
        _filters_since.extend(one for one in warnings.filters if one not in filters)


def _umask() -> int:
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status", errors="ignore") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)  # outside of Linux it can only be read by setting it
    os.umask(mask)
    return mask


PROCESS_SWITCHES: tuple[Switch, ...] = (
    *KERNEL_SWITCHES,
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda was: torch.set_anomaly_enabled(*was),
    ),
    (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), lambda was: vars(torch._tensor_str.PRINT_OPTS).update(was)),
    (_numpy, _set_numpy),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.get_threshold, lambda was: gc.set_threshold(*was)),
    (lambda: {number: _handler(number) for number in _SIGNALS}, _set_signal_handlers),
    (_folder, lambda was: None if was is None else os.chdir(was)),
    (lambda: (dict(_of_python()), _of_c()), _set_environment),
    (_umask, os.umask),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.autograd.is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch.sparse.check_sparse_tensor_invariants.is_enabled, torch._C._set_check_sparse_tensor_invariants),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch._C._get_deterministic_fill_uninitialized_memory, torch._C._set_deterministic_fill_uninitialized_memory),
    (gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    (threading.stack_size, threading.stack_size),
    (
        lambda: sys.modules["socket"].getdefaulttimeout() if "socket" in sys.modules else None,
        lambda was: sys.modules["socket"].setdefaulttimeout(was),
    ),
    (lambda: logging.root.manager.disable, logging.disable),
    (lambda: (list(sys.path), warnings.filters, list(warnings.filters)), _set_search),
)


def _limits() -> dict[int, tuple[int, int]]:
    resource: Any = sys.modules.get("resource")
    if resource is None:
        return {}
    return {which: resource.getrlimit(which) for name, which in vars(resource).items() if name.startswith("RLIMIT_")}


def _set_limits(wanted: dict[int, tuple[int, int]]) -> None:
    for which, limits in wanted.items():
        with contextlib.suppress(ValueError, OSError):  # a hard limit cannot be raised again
            sys.modules["resource"].setrlimit(which, limits)


def _set_lines(wanted: dict[Any, Any]) -> None:
    linecache.cache.clear()
    linecache.cache.update(wanted)


def _typed() -> list[str]:
    lines: Any = sys.modules.get("readline")
    return [] if lines is None else [lines.get_history_item(at + 1) for at in range(lines.get_current_history_length())]


def _set_typed(wanted: list[str]) -> None:
    sys.modules["readline"].clear_history()
    for line in wanted:
        sys.modules["readline"].add_history(line)


NAMED_SWITCHES: dict[str, Switch] = {
    **dict.fromkeys(("add_history", "clear_history"), (_typed, _set_typed)),
    "tzset": (lambda: time.tzname, lambda _: time.tzset()),  # the environment was restored before
    "set_coroutine_origin_tracking_depth": (
        sys.get_coroutine_origin_tracking_depth,
        sys.set_coroutine_origin_tracking_depth,
    ),
    "pthread_sigmask": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda was: signal.pthread_sigmask(signal.SIG_SETMASK, was),
    ),
    "__future__": (
        lambda: {name: value for name, value in vars(torch.__future__).items() if isinstance(value, bool)},
        lambda was: vars(torch.__future__).update(was),
    ),
    "setlocale": (lambda: locale.setlocale(locale.LC_ALL), lambda was: locale.setlocale(locale.LC_ALL, was)),
    "faulthandler": (faulthandler.is_enabled, lambda was: faulthandler.enable() if was else faulthandler.disable()),
    "tracemalloc": (tracemalloc.is_tracing, lambda was: tracemalloc.start() if was else tracemalloc.stop()),
    "setrlimit": (_limits, _set_limits),
    "settrace": (sys.gettrace, sys.settrace),
    "setprofile": (sys.getprofile, sys.setprofile),
    "callbacks": (lambda: list(gc.callbacks), lambda was: gc.callbacks.__setitem__(slice(None), was)),
    "linecache": (lambda: dict(linecache.cache), _set_lines),
}
"""Switches that are only read if the code mentions the name."""
if hasattr(os, "sched_setaffinity"):
    NAMED_SWITCHES["sched_setaffinity"] = (lambda: os.sched_getaffinity(0), lambda was: os.sched_setaffinity(0, was))


def read_switches(names: Set[str] = frozenset()) -> list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """All switches, and those that the code to be run names: (how to read, how to set, value)."""
    named = [switch for name, switch in NAMED_SWITCHES.items() if name in names]
    return [(read, put, read()) for read, put in (*PROCESS_SWITCHES, *named)]


def put_switches_back(before: Iterable[tuple[Callable[[], Any], Callable[[Any], Any], Any]]) -> None:
    """Set those that have changed."""
    for read, put, was in before:
        if read() != was:
            put(was)


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
