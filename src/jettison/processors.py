"""Processors that this process may use, and processes of its own that work on them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


def cores() -> int:
    """Those that the system lets it use, where the system says; otherwise all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_pool(pool: ProcessPoolExecutor, *, now: bool) -> None:
    """Let a pool's processes go.

    Args:
        now: nobody waits for what they are at.
    """
    if now:
        for worker in list((pool._processes or {}).values()):
            worker.kill()
    # not waited for, the pool's thread closes a pipe that the interpreter writes to when it exits
    pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started within do not hear Ctrl-C, from their first instant: they inherit that. A terminal sends it to
    all of a command's processes, and one that still imports its modules would answer with a traceback. The process
    that started them hears it, and ends them; one that comes within is lost. Signals are set in a main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
