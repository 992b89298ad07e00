"""Process-wide switches that a forward may change: torch's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import linecache
import locale
import logging
import os
import signal
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, cast

import numpy
import torch

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
"""Entries of the search path and of the warnings' filters that imported libraries added in runs that otherwise restore
all state: the libraries need them.
"""


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
    (numpy.geterr, lambda was: numpy.seterr(**was)),
    (numpy.get_printoptions, lambda was: numpy.set_printoptions(**was)),
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
