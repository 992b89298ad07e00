"""Atomic writes: a file is complete or absent, whatever ends the program meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

under_way: Final[set[Path]] = set()
"""Temporary files of this process; an exit without unwinding removes them (cli/main.py)."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, or replace one, in one step. Raise `OSError` if it cannot be written; the file from before is
    unchanged.
    """
    with whole_file(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file in the folder of ``path``, which replaces it where no exception is raised.

    Pipes and devices (``/dev/stdout``) are written to as they are.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()  # a link stays one
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    under_way.add(partial)
    try:
        yield partial
        if target.exists():
            with suppress(OSError):
                partial.chmod(target.stat().st_mode & 0o7777)
        partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()
        under_way.discard(partial)
