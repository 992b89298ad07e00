"""Kinds of files by their first bytes, and the command that reads each: for messages about a file given to another.

NOTE [ Timelines of torch ]
`torch.profiler.profile.export_memory_timeline` writes totals by category over time: a picture in HTML, two lists in
JSON, or events with a category each. None has a call site or an address, so that nothing here can say more about them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.diagnose.snapshot import is_snapshot

_LOOKED_AT_BYTES: Final = 1 << 16
_SCHEMA: Final = re.compile(r'"schema"\s*:\s*"(jettison\.[a-z_]+)/\d+"')
_RECORD: Final = "torch.cuda.memory._record_memory_history() and _dump_snapshot(FILE), which `jettison report` reads"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file.

    Args:
        name: with its article.
        verbs: that read it, the one to name first.
        command: that reads it, with ``{}`` for the file; empty where none does.
        instead: what to do where none does.
        fits: whether a file, and the text that it begins with, are of this kind.
    """

    name: str
    verbs: tuple[str, ...]
    command: str = ""
    instead: str = ""
    fits: Callable[[Path, str], bool]

    def advice(self, path: Path) -> str:
        """Return the message: what the file is, and what to type."""
        what = f"{path} is {self.name}"
        way = f"read it with: jettison {self.command.format(path)}" if self.command else self.instead
        return f"{what}; {way}"


def _schema(*names: str) -> Callable[[Path, str], bool]:
    def fits(_path: Path, text: str) -> bool:
        found = _SCHEMA.search(text)
        return found is not None and found[1].removeprefix("jettison.") in names

    return fits


def _timeline(_path: Path, text: str) -> bool:
    begin = re.sub(r"\s+", "", text[:400])
    lists = re.match(r"\[\[\d+(,|\],)", begin) is not None
    return "GPU Memory Timeline" in text or lists


def _toml(*sections: str) -> Callable[[Path, str], bool]:
    heads = re.compile(rf"^\s*\[({'|'.join(sections)})[\].]", re.MULTILINE)
    return lambda path, text: path.suffix == ".toml" and heads.search(text) is not None


def describes_run(path: Path) -> bool:
    """Is this a training framework's configuration of a run? False where it cannot be read."""
    from jettison.frameworks.run_file import is_run_file

    try:
        return is_run_file(str(path))
    except UsageError:
        return False


KINDS: Final = (
    FileKind(
        name="a memory snapshot",
        verbs=("report", "profile", "doctor"),
        command="report {}",
        fits=lambda path, _text: is_snapshot(path),
    ),
    FileKind(
        name="a timeline that torch's export_memory_timeline wrote: totals by category, without sites",
        verbs=(),
        instead=f"record a memory snapshot instead: {_RECORD}",
        fits=_timeline,
    ),
    FileKind(
        name="a trace of torch.profiler",
        verbs=("profile",),
        command="profile {}",
        fits=lambda _path, text: '"traceEvents"' in text or '"deviceProperties"' in text,
    ),
    FileKind(name="a plan", verbs=("report", "verify", "export", "train"), command="report {}", fits=_schema("plan")),
    FileKind(name="a proof", verbs=("report",), command="report {}", fits=_schema("proof")),
    FileKind(name="a ledger", verbs=("ledger",), command="ledger MODEL --compare {}", fits=_schema("ledger")),
    FileKind(name="what jettison.watch wrote", verbs=("doctor",), command="doctor --oom {}", fits=_schema("watch")),
    FileKind(
        name="a document that a command printed, which no command reads",
        verbs=(),
        instead="run the command that its key request names again for a table",
        fits=lambda path, text: path.suffix != ".jsonl" and _SCHEMA.search(text) is not None,
    ),
    FileKind(
        name="the log of a training run",
        verbs=("report",),
        command="report {}",
        fits=lambda path, _text: path.suffix == ".jsonl",
    ),
    FileKind(
        name="the configuration of a model",
        verbs=("ledger", "plan", "estimate", "search", "verify", "explore", "doctor", "export"),
        command="ledger {}",
        fits=lambda path, text: path.suffix == ".json" and '"model_type"' in text,
    ),
    FileKind(
        name="a training framework's configuration of a run",
        verbs=(),
        command="ledger --from {}",
        fits=lambda path, _text: describes_run(path),
    ),
    FileKind(
        name="a recipe of jettison train",
        verbs=("train", "profile"),
        command="train {}",
        fits=_toml("model", "batch", "optimizer", "data", "checkpoint", "plan"),
    ),
    FileKind(
        name="a hardware file",
        verbs=("ledger", "plan", "estimate", "search", "verify", "export", "profile", "train"),
        command="estimate llama3.1-8b --gpu {}",
        fits=_toml("teraflops", "gigabytes_per_second", "reached"),
    ),
    FileKind(
        name="a log of memory that ran out",
        verbs=("doctor",),
        command="doctor --oom {}",
        fits=lambda path, text: path.suffix not in (".py", ".toml", ".json") and "out of memory" in text,
    ),
)
"""The first that fits counts."""


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
    return next((kind for kind in KINDS if kind.fits(path, text)), None)


def misplaced(path: Path, verb: str) -> str | None:
    """Return the message about a file that another command reads; None where this verb reads it, or it is unknown."""
    kind = file_kind(path)
    return None if kind is None or verb in kind.verbs else kind.advice(path)
