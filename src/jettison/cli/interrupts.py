"""Ctrl-C ends a command at once: it unwinds, and where that takes too long the process ends as it is.

NOTE [ What Ctrl-C waits for ]
Python raises KeyboardInterrupt between two bytecodes of the main thread. A solver, an operator or an import in C
delays that, a pool waits for its processes, and a callback of the interpreter's (a finalizer) swallows it. So a thread
is woken by the signal itself, gives the main thread a moment to clean up, and ends the process. A handler of somebody
else's (a training run, which ends after its step; the server) is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

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
    """Has Ctrl-C come? What fails after it fails because of it."""
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
