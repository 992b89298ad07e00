"""This process: its processors, workers of its own, interrupts, and Python's collector of reference cycles."""

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


SELDOM: Final = 100_000
"""Objects after which cycles are looked for. A look at all of torch's objects takes a fifth of a second: an eighth of a
search of layouts, a tenth of a small model's planning."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """In here cycles are looked for after `SELDOM` objects; afterwards as before, from a count of none."""
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
