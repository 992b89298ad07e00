"""The current process: environment variables, CPU cores, process pools, interrupts, and the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


@contextmanager
def by_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context, unless it is set."""
    ours = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


def cores() -> int:
    """Number of cores this process may use, where the system tells; otherwise of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_pool(pool: ProcessPoolExecutor, *, now: bool) -> None:
    """Shut down a process pool; ``now``: do not wait for running tasks."""
    if now:
        for worker in list((pool._processes or {}).values()):
            worker.kill()
    # not waited for, the pool's thread closes a pipe that the interpreter writes to when it exits
    pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C: they inherit it from their first instant. A terminal sends Ctrl-C to all
    of a command's processes, and one that still imports its modules would answer with a traceback. The parent handles
    it and ends them. An interrupt that arrives within the context is lost. Signals are set in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no reference cycles within the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


SELDOM: Final = 100_000
"""Objects allocated between garbage collections. One takes 0.2 s: an eighth of a layout search."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect reference cycles only after `SELDOM` allocations within the context."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, before[1], SELDOM)
    try:
        yield
    finally:
        gc.collect(1)
        if not gc.get_freeze_count():  # or somebody's frozen objects would thaw
            gc.freeze()  # it sets the counts to 0: the next object would have all others looked at
            gc.unfreeze()
        gc.set_threshold(*before)
