"""Folder of a run: log, result, and exclusive, durable writes.

log.jsonl has the objects {"event": "start" | "step" | "checkpoint" | "end", ...}; start events name the schema. A run
resumed at a step drops the lines of later steps, which it repeats: each step is logged once. plan.json, next to it, is
the plan that the run follows, if any.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError, install
from jettison.core.files import write_whole, writing
from jettison.core.progress import Progress
from jettison.core.units import format_bytes, format_percent, format_seconds
from jettison.ledger.step_levels import StepLevels
from jettison.solve.plan import Plan
from jettison.train.phase_memory import PhasePeaks
from jettison.train.recipe import ExportSection

SCHEMA: Final = "jettison.train/1"
RUN_SCHEMA: Final = "jettison.run/1"
_FILE: Final = "log.jsonl"


def plan_name(stage: int | None) -> str:
    """File name of the plan of a pipeline stage, or of a complete model."""
    return "plan.json" if stage is None else f"plan-{stage}.json"


class RunLog:
    """Log of one run; only the leading rank writes."""

    def __init__(self, folder: Path, *, tensorboard: bool, resumed_step: int, warn: Callable[[str], None]) -> None:
        """Open the log, and drop steps that will be repeated. Raise `UsageError` if the folder cannot be written to."""
        self.path = folder / _FILE
        self._warn = warn
        with writing(folder, "log.folder: "):
            folder.mkdir(parents=True, exist_ok=True)
            _cut(self.path, resumed_step)
            self._file = self.path.open("a", encoding="utf-8")
        self._failed = False
        self._board = _board(folder, resumed_step, warn) if tensorboard else None

    def keep_plans(self, plans: Sequence[Plan]) -> None:
        """Write the plans next to the log, one, or one per stage."""
        for number, plan in enumerate(plans):
            name = plan_name(None if len(plans) == 1 else number)
            self._attempt(partial((self.path.parent / name).write_text, plan.to_json(), encoding="utf-8"))

    def write(self, event: str, **values: Any) -> None:
        """Write one line. A full disk does not end a run: a warning is given once."""
        text = json.dumps({"event": event, **finite(values)}, allow_nan=False) + "\n"

        def append() -> None:
            self._file.write(text)
            self._file.flush()

        self._attempt(append)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failed:
                self._warn(
                    f"{self.path} cannot be written to: {error.strerror or error}; training continues without it"
                )
            self._failed = True

    def close(self) -> None:
        with suppress(OSError):  # a failed write was warned of
            self._file.close()
        if self._board is not None:
            self._board.close()


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN, which JSON does not have, by null."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in values.items()}


def _cut(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))


def _board(folder: Path, step: int, warn: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn(f"log.tensorboard: tensorboard is not installed ({install('tensorboard')}); log.jsonl has it all")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run. Peaks are the highest of all ranks; None if not measured.

    Args:
        steps: done in total.
        resumed_step: done before this process began.
        stopped: the signal that ended the run early.
        skipped_steps: steps of this process whose loss or gradient was not finite.
        step_seconds: median over steps whose memory was not measured by a profiler.
        first_step_peaks: of this process's first step, which allocates the optimizer's state (or has just read it).
        later_peaks: of its last step, if measured.
        export: the folder of the weights, if they were written.
        eval_loss, eval_perplexity: of the last evaluation in this process.
        eval_peak_bytes: of its first one.
        levels: bytes over the leading rank's second step, or its first without a second.
        report: the page about the run, if one was written.
    """

    steps: int
    resumed_step: int
    stopped: str | None
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    first_step_peaks: PhasePeaks | None
    second_step_peaks: PhasePeaks | None
    later_peaks: PhasePeaks | None
    predicted_peak_bytes: int | None
    budget: str | None
    log: str
    checkpoint: str | None
    skipped_steps: int = 0
    export: str | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_peak_bytes: int | None = None
    levels: StepLevels | None = None
    report: str | None = None

    def document(self) -> dict[str, Any]:
        """JSON document of schema ``jettison.run/1``."""
        out = asdict(self)
        for name in ("first_step_peaks", "second_step_peaks", "later_peaks"):
            found = out.pop(name)
            out[name.replace("peaks", "peak_bytes")] = None if found is None else found["phases"]
        return {"schema": RUN_SCHEMA, "step": self.steps, **out, "request": None}

    def lines(self) -> Iterator[str]:
        after = f", resumed at {self.resumed_step}" if self.resumed_step else ""
        how = f"stopped by {self.stopped} after" if self.stopped else "done:"
        if self.steps == self.resumed_step and self.stopped is None:
            yield f"nothing left to do: the checkpoint is of step {self.steps}, the last one"
            yield from self._exported()
            return
        yield f"{how} {self.steps} steps{after}"
        if self.skipped_steps:
            yield f"{self.skipped_steps} of them skipped: the loss or the gradient was not finite"
        if self.first_loss is not None and self.last_loss is not None:
            yield f"loss from {self.first_loss:.6f} to {self.last_loss:.6f}"
        if self.eval_loss is not None:
            yield f"evaluation: loss {self.eval_loss:.6f}, perplexity {self.eval_perplexity:.3f}"
        if self.step_seconds is not None:
            speed = f"{format_seconds(self.step_seconds)} a step, {self.tokens_per_second:,.0f} tokens/s"
            used = [
                f"{name} {format_percent(v)}" for name, v in (("MFU", self.mfu), ("HFU", self.hfu)) if v is not None
            ]
            yield ", ".join([speed, *(used or ["MFU and HFU n/a without --gpu"])])
        for name, peaks in (
            ("first", self.first_step_peaks),
            ("second", self.second_step_peaks),
            ("last", self.later_peaks),
        ):
            if peaks is not None:
                each = ", ".join(f"{phase} {format_bytes(n)}" for phase, n in peaks.phases.items())
                yield f"peak of the {name} step: {format_bytes(peaks.peak_bytes)} ({each})"
        if self.predicted_peak_bytes is not None:
            under = f", under a budget of {self.budget}" if self.budget else ""
            yield f"predicted peak: {format_bytes(self.predicted_peak_bytes)}{under}"
        yield f"log: {self.log}" + (f", checkpoints: {self.checkpoint}" if self.checkpoint else "")
        if self.stopped and self.checkpoint:
            yield "the same command resumes from there"
        if self.report:
            yield f"report: {self.report}"
        yield from self._exported()

    def _exported(self) -> Iterator[str]:
        if self.export:
            yield f"weights for from_pretrained: {self.export}"


# the folder -----------------------------------------------------------------------------------------------------------
#
# NOTE [ One run in a folder ]
# The leading rank holds an flock on ``run.lock`` during the run. The kernel releases it when the process ends, in any
# way, so the file that stays, and names its owner, never blocks a run.


LOCK: Final = "run.lock"
PARTIAL: Final = ".partial"
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def claimed(folders: dict[str, Path], *, leads: bool, rank: int, warn: Progress) -> Iterator[None]:
    """Claim folders, by the recipe's keys, for this run; every rank can write to them. Empty ones are removed again.
    Raise `UsageError` if a folder cannot be written to, or another run is in it.
    """
    with ExitStack() as held:
        seen: set[Path] = set()
        for key, folder in folders.items():
            with writing(folder, f"{key}: "):
                held.enter_context(_made(folder))
                if leads and folder.resolve() not in seen:
                    held.enter_context(_locked(key, folder, warn))
                _try(folder, rank)
            seen.add(folder.resolve())
        yield


def write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that renames in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a complete folder, whose files are flushed to disk, to its final name."""
    sync_folder(partial)
    if final.exists():
        remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder is first renamed to an incomplete one."""
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
            with suppress(OSError):  # it is in use
                folder.rmdir()


def _try(folder: Path, rank: int) -> None:
    probe = folder / f"probe-{rank}{PARTIAL}"
    try:
        try:
            write_durably(probe, "can this be written?\n")
        except FileNotFoundError:  # the rank that made the folder cannot write to it, and removed it
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(probe, "can this be written?\n")
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _locked(key: str, folder: Path, warn: Progress) -> Iterator[None]:
    with (folder / LOCK).open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(4096).strip() or "unknown owner"
            raise UsageError(
                f"{key}: another run is in {folder} ({owner}); wait for its end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn(f"{key}: {folder} is on a file system without locks: run only one at a time in it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if [*folder.iterdir()] == [folder / LOCK]:  # nothing was written
                (folder / LOCK).unlink()


def require_place(section: ExportSection) -> None:
    """Raise `UsageError` if the folder exists already, or cannot be written; it is not left behind."""
    assert section.folder is not None
    folder = Path(section.folder)
    if folder.exists() and not section.overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"export.folder: {folder} is there already; name another, or set overwrite = true to replace it"
        )
    with writing(folder.parent, "export.folder: "):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_of(folder).mkdir(exist_ok=True)
        remove(partial_of(folder))


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL}")
