"""A run's folders: tried before anything is computed, held by one run at a time, and written so that it lasts.

NOTE [ One run in a folder ]
The leading rank holds an flock on ``run.lock`` for as long as the run goes. The kernel lets go of it when the process
ends, however it ends, so a lock that is left over is never in the way; the file says whose it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.progress import Progress
from jettison.train.recipe import ExportSection

LOCK: Final = "run.lock"
PARTIAL: Final = ".partial"
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def claimed(folders: dict[str, Path], *, leads: bool, rank: int, warn: Progress) -> Iterator[None]:
    """Folders by the key that names them, for this run alone; every rank can write to them. Empty ones go again.

    Raises:
        UsageError: one cannot be written to, or another run is in it.
    """
    with ExitStack() as held:
        seen: set[Path] = set()
        for key, folder in folders.items():
            try:
                held.enter_context(_made(folder))
                if leads and folder.resolve() not in seen:
                    held.enter_context(_locked(key, folder, warn))
                _try(folder, rank)
            except OSError as error:
                raise UsageError(
                    f"{key}: cannot write to {folder}: {error.strerror or error}; make it writable, or name another"
                ) from error
            seen.add(folder.resolve())
        yield


def write_durably(path: Path, text: str) -> None:
    """On the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """What was renamed in it stays so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file or a folder; a folder is incomplete from the first moment on."""
    if path.suffix != PARTIAL:
        path = path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    ours = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if ours:
            with contextlib.suppress(OSError):  # it is in use
                folder.rmdir()


def _try(folder: Path, rank: int) -> None:
    probe = folder / f"probe-{rank}{PARTIAL}"
    try:
        try:
            write_durably(probe, "can this be written?\n")
        except FileNotFoundError:  # the rank that made the folder cannot write to it, and took it away again
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(probe, "can this be written?\n")
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _locked(key: str, folder: Path, warn: Progress) -> Iterator[None]:
    """See NOTE [ One run in a folder ]."""
    path = folder / LOCK
    descriptor = _taken(key, path, warn)
    try:
        before = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        if before:
            warn(f"{key}: {folder} was left by a run that did not end in order ({_whose(before)}); its lock is taken")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n").encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):  # before it is let go of: whoever waits makes a new one
            path.unlink()
        os.close(descriptor)


def _taken(key: str, path: Path, warn: Progress) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            same = False
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"{key}: another run is in {path.parent} ({_whose(holder)}); wait for its end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            warn(f"{key}: {path.parent} is on a file system without locks: take care that one run at a time is in it")
            same = True
        if same:
            return descriptor
        os.close(descriptor)  # its run has just ended, and removed the file


def _whose(text: str) -> str:
    try:
        values = json.loads(text)
        return f"process {values['pid']} on {values['host']}"
    except (ValueError, LookupError, TypeError):
        return "it does not say whose"


def require_place(section: ExportSection) -> None:
    """Can a folder be made there? Nothing is left of the attempt.

    Raises:
        UsageError: something is there already, or it cannot be written to.
    """
    assert section.folder is not None
    folder = Path(section.folder)
    if folder.exists() and not section.overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"export.folder: {folder} is there already; name another, or set overwrite = true to have it replaced"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_of(folder).mkdir(exist_ok=True)
        remove(partial_of(folder))
    except OSError as error:
        raise UsageError(f"export.folder: cannot write to {folder.parent}: {error.strerror or error}") from error


def partial_of(folder: Path) -> Path:
    """Where what will be a folder is written first."""
    return folder.with_name(f"{folder.name}{PARTIAL}")
