"""Files: those that users name, read with a clear error; and atomic writes: complete or absent, whatever happens."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import format_bytes

MOST_FILE_BYTES: Final = 2 << 30
"""Most bytes of a snapshot, a log or a pipe that are read."""
under_way: Final[set[Path]] = set()
"""Temporary files of this process; an exit without unwinding removes them (cli/main.py)."""


def read_bytes(path: Path, name: str = "", *, most: int | None = None) -> bytes:
    """Return a file's content. Messages call it ``name``, or by its path. Raise `UsageError` if it cannot be read, or
    has more than ``most`` bytes.
    """
    try:
        with path.open("rb") as file:
            known = os.fstat(file.fileno()).st_size  # 0 of a pipe
            content = b"" if most is not None and known > most else file.read(-1 if most is None else most + 1)
    except OSError as error:
        raise UsageError(f"{name or path} cannot be read: {error.strerror or error}") from None
    if most is not None and max(known, len(content)) > most:
        raise UsageError(f"{name or path} is too large; at most {format_bytes(most)} are read")
    return content


def read_text(path: Path, name: str = "", *, most: int | None = None) -> str:
    """Return a file's text; see `read_bytes`. Raise `UsageError` if it is not UTF-8, too."""
    try:
        return read_bytes(path, name, most=most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name or path} is not UTF-8 text") from None


def read_table(file: Path) -> dict[str, Any]:
    """Return a TOML file of this package."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def parse_toml(text: str, name: str, **options: Any) -> dict[str, Any]:
    """Return a table of TOML. Raise `UsageError`, which calls it ``name``, where the text is none."""
    try:
        return tomllib.loads(text, **options)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {str(error).splitlines()[0]}") from None


@contextmanager
def writing(place: Path, name: str = "") -> Iterator[None]:
    """Raise `UsageError`, in front of which is ``name``, where the block cannot write to a file or folder."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{name}cannot write to {place}: {error.strerror or error}; make it writable, or name another"
        ) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file in one step. Raise `UsageError` if that fails; the former file is unchanged then."""
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
        with writing(path):
            yield partial
            if target.exists():
                with suppress(OSError):
                    partial.chmod(target.stat().st_mode & 0o7777)
            partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()
        under_way.discard(partial)
