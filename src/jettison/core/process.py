"""The current process: environment variables, CPU cores, process pools, interrupts, and the garbage collector.

NOTE [ What Ctrl-C waits for ]
Python raises KeyboardInterrupt between two bytecodes of the main thread. A solver, an operator or an import in C
delays that, a pool waits for its processes, and a callback of the interpreter's (a finalizer) swallows it. So a thread
is woken by the signal itself, gives the main thread a moment to clean up, and ends the process. A handler of somebody
else's (a training run, which ends after its step; the server) is left alone.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jettison.core.objects import set_to, swapped_entries

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


def by_default(name: str, value: str) -> AbstractContextManager[None]:
    """Set an environment variable within the context, unless it is set."""
    return swapped_entries(() if name in os.environ else ((os.environ, name, value),))


def cores() -> int:
    """Number of cores this process may use, where the system tells; otherwise of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def told_by_linux(name: str) -> list[tuple[str, str]]:
    """Names and values of a file of /proc; none where it is missing."""
    try:
        lines = Path("/proc", name).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def cpu_name() -> str:
    """Return the CPU's model name in Linux, or the architecture's name."""
    named = (value for name, value in told_by_linux("cpuinfo") if name == "model name")
    return next(named, platform.processor() or platform.machine())


def package_version(name: str) -> str | None:
    """Version of an installed package; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version  # on use: the start stays fast

    try:
        return version(name)
    except PackageNotFoundError:
        return None


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


def uncollected() -> AbstractContextManager[None]:
    """Collect no reference cycles within the context."""
    return set_to(False, gc.isenabled, lambda wanted: gc.enable() if wanted else gc.disable())


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
        if not gc.get_freeze_count():  # else objects frozen by other code would be unfrozen
            gc.freeze()  # it sets the counts to 0: the next object would have all others looked at
            gc.unfreeze()
        gc.set_threshold(*before)


EXIT_INTERRUPTED: Final = 130
MOMENT_SECONDS: Final = 0.5
"""For cleaning up."""
_SHOW_CURSOR: Final = "\x1b[?25h\r\x1b[K"

_came = threading.Event()
_said = threading.Event()


def end_at_once_on_interrupt() -> None:
    """Make Ctrl-C end this process within a moment, from now until it ends. For a program's main thread."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(read_end,), daemon=True, name="jettison-interrupts").start()
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (interrupted() or issubclass(unraisable.exc_type, KeyboardInterrupt)):
            before(unraisable)

    sys.unraisablehook = hook


def interrupted() -> bool:
    """Whether Ctrl-C was pressed. Failures after it are its consequences."""
    return _came.is_set()


def say_interrupted() -> None:
    """The line on stderr, once."""
    if not _said.is_set():
        _said.set()
        with suppress(OSError, ValueError):
            print("jettison: interrupted", file=sys.stderr, flush=True)


def _wait(read_end: int) -> None:
    while signals := os.read(read_end, 64):
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _came.set()
            time.sleep(MOMENT_SECONDS)
            end_now()


def end_now() -> NoReturn:
    """Leave with `EXIT_INTERRUPTED`, without the interpreter's own end, which takes long where much is loaded."""
    _end_processes()
    whole_files = sys.modules.get("jettison.core.files")
    for partial in list(whole_files.under_way) if whole_files is not None else ():
        with suppress(OSError):
            partial.unlink()
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    say_interrupted()
    os._exit(EXIT_INTERRUPTED)


def _end_processes() -> None:
    """Those that this one has started: most do not hear Ctrl-C themselves."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            process.kill()
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text(encoding="ascii").split():
                os.kill(int(child), signal.SIGKILL)
