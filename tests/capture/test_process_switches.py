"""Switches of the process that a forward moves are where they were when planning ends."""

from __future__ import annotations

import faulthandler
import gc
import linecache
import locale
import logging
import os
import readline
import resource
import signal
import socket
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from jettison.capture.isolation import leaving_nothing
from jettison.capture.side_effects import NAMED_SWITCHES, put_switches_back, read_switches

MOVES: dict[str, Callable[[], object]] = {
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch._C._set_deterministic_algorithms(True, warn_only=False),
    "onednn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "print options": lambda: torch.set_printoptions(precision=7),
    "numpy errors": lambda: np.seterr(over="raise"),
    "numpy print options": lambda: np.set_printoptions(precision=3),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "garbage collection": lambda: gc.set_threshold(gc.get_threshold()[0] + 1),
    "signal handler": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "folder": lambda: os.chdir("/"),
    "search path": lambda: sys.path.append("/nowhere"),
    "filters": lambda: warnings.filterwarnings("ignore", message="nobody says this"),
    "order of the search path": lambda: sys.path.append(sys.path.pop(0)),
    "environment": lambda: os.environ.update(JETTISON_TEST="1"),
    "environment of child processes": lambda: os.putenv("JETTISON_TEST", "1"),
    "umask": lambda: os.umask(0o077),
    "warnings of torch": lambda: torch.set_warn_always(not torch.is_warn_always_enabled()),
    "threads of autograd": lambda: torch._C._set_multithreading_enabled(False),
    "fast path of attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "checks of sparse tensors": lambda: torch.sparse.check_sparse_tensor_invariants.enable(),
    "memory that is filled": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "no garbage collection": lambda: gc.disable(),
    "digits of integers": lambda: sys.set_int_max_str_digits(5000),
    "stacks of threads": lambda: threading.stack_size(1 << 20),
    "timeout of sockets": lambda: socket.setdefaulttimeout(9),
    "logging": lambda: logging.disable(logging.INFO),
    "memory of Python": lambda: tracemalloc.start(),
    "limit of the process": lambda: resource.setrlimit(
        resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1])
    ),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "faulthandler": lambda: faulthandler.disable() if faulthandler.is_enabled() else faulthandler.enable(),
    "trace": lambda: sys.settrace(lambda *_: None),
    "profile": lambda: sys.setprofile(lambda *_: None),
    "callbacks of the garbage collector": lambda: gc.callbacks.append(lambda *_: None),
    "lines of a terminal": lambda: readline.add_history("a line"),
    "time zone": lambda: (os.environ.update(TZ="Asia/Tokyo"), time.tzset()),
    "where coroutines begin": lambda: sys.set_coroutine_origin_tracking_depth(3),
    "signals that wait": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,)),
    "how modules are converted": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "source lines": lambda: linecache.cache.update(nowhere=(0, None, [], "nowhere")),
}


@pytest.mark.parametrize("name", MOVES)
def test_put_back(name: str) -> None:
    before, stood = read_switches(NAMED_SWITCHES.keys()), _standing()
    try:
        with leaving_nothing([nn.Linear(2, 2)], [MOVES[name]]):
            MOVES[name]()
            assert _standing() != stood
        assert _standing() == stood
    finally:
        put_switches_back(before)


def _standing() -> list[object]:
    return [value for _, _, value in read_switches(NAMED_SWITCHES.keys())]
