"""The state file of a search: a line of JSON for each candidate that has been worked out, written as they come.

Whatever stops the program, all whole lines hold; a last line that was cut off is dropped. Lines of other questions
(another model, other hardware, another version) may stand in the same file: their keys are other ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from jettison.core.errors import UsageError
from jettison.search.figures import Figures, figures_of

SCHEMA: Final = "jettison.search-state/1"
_HEADER: Final = json.dumps({"schema": SCHEMA})


class Journal:
    """What is known, and the open file to which more is written.

    Raises:
        UsageError: the file is none of a search's, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known, whole = _read(path)
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(whole)
        except OSError as error:
            raise UsageError(
                f"--state {path}: {error.strerror or error}; expected a file that can be written"
            ) from None
        if not whole:
            self._file.write(f"{_HEADER}\n")
            self._file.flush()

    def write(self, found: Mapping[str, Figures]) -> None:
        """Add what has been worked out."""
        if found:
            self._file.writelines(
                json.dumps({"key": key, **figures.document()}) + "\n" for key, figures in found.items()
            )
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _read(path: Path) -> tuple[dict[str, Figures], int]:
    """What whole lines say, and how many bytes they are."""
    if not path.exists():
        return {}, 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    if (lines and lines[0].decode(errors="replace") != _HEADER) or (
        not lines and not _HEADER.encode().startswith(content)
    ):
        raise UsageError(
            f"--state {path} is not the state of a search; give another file, or one that is not there yet"
        )
    known = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            document = json.loads(line)
            known[str(document["key"])] = figures_of(document)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(
                f"--state {path}: line {number} is not what a search writes; remove it, or give another file"
            ) from None
    return known, whole
