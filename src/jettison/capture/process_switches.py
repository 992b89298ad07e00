"""Switches of the whole process that a forward may move: torch's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch


def _determinism() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


_SMALLEST, _HALF = sys.float_info.min, 0.5


def _flushes_denormals() -> bool:
    return _SMALLEST * _HALF == 0.0  # torch has no way to ask; the flag is the thread's, Python's numbers included


KERNEL_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (_determinism, _set_determinism),
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes_denormals, torch.set_flush_denormal),
)
"""How to read and how to set what chooses kernels, their precision, or the order of their sums."""


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(wanted: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():  # no other thread can have moved them
        return
    for number, handler in wanted.items():
        if handler is not None and signal.getsignal(number) != handler:  # C has set what is None
            signal.signal(number, handler)


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return os.getcwd()
    return None


def _set_folder(wanted: str | None) -> None:
    if wanted is not None:
        os.chdir(wanted)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _printing() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _numpy() -> tuple[Any, Any] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else (numpy.geterr(), numpy.get_printoptions())


def _set_numpy(wanted: tuple[Any, Any] | None) -> None:
    if wanted is not None:
        sys.modules["numpy"].seterr(**wanted[0])
        sys.modules["numpy"].set_printoptions(**wanted[1])


def _search() -> tuple[int, list[str], Any, list[Any]]:
    return len(sys.modules), list(sys.path), warnings.filters, list(warnings.filters)


def _set_search(wanted: tuple[int, list[str], Any, list[Any]]) -> None:
    modules, path, filters, entries = wanted
    if len(sys.modules) != modules:  # a library sets its own path and filters when it is imported, and needs them
        return
    sys.path[:] = path
    if warnings.filters is not filters or list(filters) != entries:
        filters[:] = entries
        with warnings.catch_warnings():  # leaving makes Python look at the filters anew
            pass
        cast(Any, warnings).filters = filters


PROCESS_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    *KERNEL_SWITCHES,
    (_anomaly, lambda was: torch.set_anomaly_enabled(*was)),
    (_printing, lambda was: vars(torch._tensor_str.PRINT_OPTS).update(was)),
    (_numpy, _set_numpy),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.get_threshold, lambda was: gc.set_threshold(*was)),
    (_signal_handlers, _set_signal_handlers),
    (_folder, _set_folder),
    (_search, _set_search),
)
"""How to read each of them, and how to set it."""


def read_switches() -> list[Any]:
    """Where all of them stand."""
    return [read() for read, _ in PROCESS_SWITCHES]


def put_switches_back(before: list[Any]) -> None:
    """Set those that stand elsewhere by now."""
    for (read, put), was in zip(PROCESS_SWITCHES, before, strict=True):
        if read() != was:
            put(was)
