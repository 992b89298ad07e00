"""Kinds of files by their first bytes, and the command that reads each: for messages about a file given to another.

NOTE [ Timelines of torch ]
`torch.profiler.profile.export_memory_timeline` writes totals by category over time: a picture in HTML, two lists in
JSON, or events with a category each. None has a call site or an address, so that nothing here can say more about them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.diagnose.snapshot import is_snapshot

_LOOKED_AT_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file: a row of ``file_kinds.toml``, which says what its fields mean."""

    name: str
    verbs: Sequence[str] = ()
    command: str = ""
    instead: str = ""
    schema: str = ""
    sections: str = ""
    suffixes: Sequence[str] = ()
    without: Sequence[str] = ()
    words: Sequence[str] = ("",)
    test: str = ""

    def fits(self, path: Path, text: str) -> bool:
        """Whether a file, with the text that it begins with, is of this kind."""
        if path.suffix in self.without or (self.suffixes and path.suffix not in self.suffixes):
            return False
        if self.sections:
            heads = re.compile(rf"^\s*\[({self.sections})[\].]", re.MULTILINE)
            return path.suffix == ".toml" and heads.search(text) is not None
        if self.test:
            return _TESTS[self.test](path, text)
        schema = rf'"schema"\s*:\s*"jettison\.{self.schema}/\d+"' if self.schema else ""
        return any(word in text for word in self.words) and re.search(schema, text) is not None

    def advice(self, path: Path) -> str:
        """Return the message: what the file is, and what to type."""
        way = f"read it with: jettison {self.command.format(path)}" if self.command else self.instead
        return f"{path} is {self.name}; {way}"


def _timeline(_path: Path, text: str) -> bool:
    begin = re.sub(r"\s+", "", text[:400])
    return "GPU Memory Timeline" in text or re.match(r"\[\[\d+(,|\],)", begin) is not None


def describes_run(path: Path) -> bool:
    """Whether this is a training framework's configuration of a run; False if it cannot be read."""
    from jettison.frameworks.run_file import is_run_file

    try:
        return is_run_file(str(path))
    except UsageError:
        return False


_TESTS: Final[Mapping[str, Callable[[Path, str], bool]]] = {
    "is_snapshot": lambda path, _text: is_snapshot(path),
    "describes_run": lambda path, _text: describes_run(path),
    "timeline": _timeline,
    "old_pickle": lambda _path, text: text[:2] in ("(d", "(l", "}q", "]q"),  # of a dictionary or a list
}


def kinds() -> Iterator[FileKind]:
    """Yield the rows of ``file_kinds.toml``."""
    table = read_table(Path(__file__).with_suffix(".toml"))
    yield from (FileKind(**row) for row in table["kind"])


def file_kind(path: Path) -> FileKind | None:
    """Return the kind of a file; None where it is unknown, or no file."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError):
        return None
    if begin[:2] == b"\x1f\x8b":  # gzipped, and maybe cut off
        with suppress(zlib.error):
            begin = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(begin, _LOOKED_AT_BYTES)
    text = begin.decode("utf-8", errors="replace")
    return next((kind for kind in kinds() if kind.fits(path, text)), None)


def misplaced(path: Path, verb: str) -> str | None:
    """Return the message about a file that another command reads; None where this verb reads it, or it is unknown."""
    kind = file_kind(path)
    return None if kind is None or verb in kind.verbs else kind.advice(path)
