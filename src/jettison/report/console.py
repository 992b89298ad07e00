"""Output: data to stdout, hints and progress to stderr, progress on a terminal only; documents as text."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType

PLAIN_WIDTH = 140  # of a table in a file or a pipe, where COLUMNS does not say otherwise
LEAST_WIDTH = 40  # below it nothing can be read


class _Piped(Console):
    """Leaves it to the command line what happens when a reader has gone; rich itself would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(document: RenderableType, file: TextIO | None = None) -> None:
    """Print a table, or a line, on stdout or another file."""
    _Piped(file=sys.stdout if file is None else file, width=shown_width(), highlight=False, markup=False).print(
        document
    )


def shown_width() -> int:
    """Characters of a line on stdout: what COLUMNS says, else what the terminal has."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return max(int(said), LEAST_WIDTH)
    if sys.stdout.isatty():
        return max(shutil.get_terminal_size((80, 25)).columns, LEAST_WIDTH)
    return PLAIN_WIDTH


def hint(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(*, elsewhere_seconds: float = float("inf")) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done now: a spinner on a terminal.

    Args:
        elsewhere_seconds: where there is none, at most one line in so many seconds; by default there are none.
    """
    started = said = time.perf_counter()

    def line(text: str) -> None:
        nonlocal said
        if time.perf_counter() - said >= elsewhere_seconds:
            said = time.perf_counter()
            hint(f"{text} ({said - started:.0f} s)")

    if not sys.stderr.isatty():
        yield line
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # on use: the start stays fast

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON, a line for each key and for each item of a list: quick to write, and easy to grep."""
    lines = ",\n".join(f" {_json(key)}: {_value(value)}" for key, value in document.items())
    return f"{{\n{lines}\n}}\n"


def _value(value: object) -> str:
    if not isinstance(value, list) or not value:
        return _json(value)
    return "[\n" + ",\n".join(f"  {_json(item)}" for item in value) + "\n ]"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
