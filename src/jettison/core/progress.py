"""Progress of long work, in a logger and on a terminal.

NOTE [ Who sees progress ]
Long work logs two lines, one before it and one after it, to the logger ``jettison`` at level INFO. Where logging is set
up for that, nothing else prints them. Where it is not, a terminal shows them; inside trainers a log file has them, too.
``logging.getLogger("jettison").setLevel(logging.WARNING)`` silences them. Between the two a terminal shows one line
that is rewritten every second: the current work, and for how long. Of several ranks the first logs.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, ParamSpec, TextIO, TypeVar

Progress = Callable[[str], None]
_P = ParamSpec("_P")
_R = TypeVar("_R")

LOGGER: Final = logging.getLogger("jettison")
FIRST_SECONDS: Final = 0.3
TICK_SECONDS: Final = 1.0
"""Seconds between two updates of the line that shows the current work."""
LONG_SECONDS: Final = 2.0
"""Work that took at least this long leaves a line of its own on the terminal."""
_CLEAR: Final = "\r\x1b[2K"


def silent(_text: str) -> None:
    """Discard progress."""


class Shown:
    """Progress for a person: NOTE [ Who sees progress ]. ``everywhere``: also off terminals and for short work."""

    def __init__(self, *, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self._status: _Status | None = None

    def __call__(self, text: str) -> None:
        """Name the current work."""
        if self._status is not None:
            self._status.text = text

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if not _leads():
            return
        if _logged():
            LOGGER.info(text)
        elif _is_terminal(sys.stderr):
            _write(sys.stderr, f"{_CLEAR}jettison: {text}\n")
        elif self.everywhere:
            _write(sys.stderr, f"jettison: {text}\n")

    @contextmanager
    def running(self, text: str) -> Iterator[None]:
        """Show a line that is rewritten while the work lasts; nested work shows the outer line."""
        if self._status is not None or not _is_terminal(sys.stderr) or not _leads():
            yield
            return
        self._status = _Status(text, sys.stderr)
        try:
            with self._status:
                yield
        finally:
            self._status = None


shown: Final = Shown()
"""Progress of functions that users call themselves."""
in_a_trainer: Final = Shown(everywhere=True)
"""Progress of work that a trainer starts some time after the user's request."""


@contextmanager
def reported(progress: Progress, before: str) -> Iterator[Callable[[str], None]]:
    """Report long work: log ``before``, and afterwards the line given to the yielded function."""
    tell = progress.line if isinstance(progress, Shown) else progress
    at_once = not isinstance(progress, Shown) or progress.everywhere or _logged()
    results: list[str] = []
    began = time.perf_counter()
    if at_once:
        tell(before)
    with progress.running(before) if isinstance(progress, Shown) else nullcontext():
        yield results.append
    seconds = time.perf_counter() - began
    if at_once or seconds >= LONG_SECONDS:
        for text in results:
            tell(f"{text} (took {seconds:.1f} s)")


def on_terminal(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show a function's work on a terminal while it runs, and its steps where it takes ``progress=shown``."""

    @functools.wraps(function)
    def running(*args: _P.args, **options: _P.kwargs) -> _R:
        progress = options.get("progress", shown)
        with progress.running(function.__name__) if isinstance(progress, Shown) else nullcontext():
            return function(*args, **options)

    return running


class _Status:
    """A line on a terminal that a thread rewrites."""

    def __init__(self, text: str, stream: TextIO) -> None:
        self.text, self._stream = text, stream
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._written = False
        self._thread = threading.Thread(target=self._rewrite, name="jettison-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._written:
            _write(self._stream, _CLEAR)

    def _rewrite(self) -> None:
        while not self._ended.wait(TICK_SECONDS if self._written else FIRST_SECONDS):
            self._written = True
            columns = shutil.get_terminal_size((80, 25)).columns
            seconds = f" ({time.perf_counter() - self._began:.0f} s)"
            text = f"jettison: {self.text}"[: max(0, columns - len(seconds) - 1)]
            _write(self._stream, f"{_CLEAR}{text}{seconds}")


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal: a process without a console has no stream, or a closed one."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _write(stream: TextIO | None, text: str) -> None:
    """Write; a closed terminal must not end training."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass


def _logged() -> bool:
    """Whether logging is configured for these lines: the logger has a level, or handlers that take INFO."""
    return LOGGER.level != logging.NOTSET or (LOGGER.hasHandlers() and LOGGER.isEnabledFor(logging.INFO))


def _leads() -> bool:
    """Whether this process is the first rank, or the only one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
