"""What a run writes down: one JSON object a line, and TensorBoard's files where that is installed.

log.jsonl has the objects {"event": "start" | "step" | "checkpoint" | "end", ...}; those that start a run name the
schema. A run that is resumed at a step drops the lines of later steps, which it does again: each step stands there
once. Beside it, plan.json is the plan that the run follows, if any.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

from jettison.errors import UsageError
from jettison.extras import install
from jettison.solve.plan import Plan

SCHEMA: Final = "jettison.train/1"
_FILE: Final = "log.jsonl"


def plan_name(stage: int | None) -> str:
    """What the plan of a stage of a pipeline is called, or of a whole model."""
    return "plan.json" if stage is None else f"plan-{stage}.json"


class RunLog:
    """The log of one run; only the leading rank has one that writes."""

    def __init__(self, folder: Path, *, tensorboard: bool, resumed_step: int, warn: Callable[[str], None]) -> None:
        """Open it, and drop what is to be done again.

        Raises:
            UsageError: the folder cannot be written to.
        """
        self.path = folder / _FILE
        self._warn = warn
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut(self.path, resumed_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"log.folder: cannot write to {folder}: {error.strerror or error}") from error
        self._failed = False
        self._board = _board(folder, resumed_step, warn) if tensorboard else None

    def keep_plans(self, plans: Sequence[Plan]) -> None:
        """Leave them beside the log, for the next run and for whoever wants to know: one, or one for each stage."""
        for number, plan in enumerate(plans):
            name = plan_name(None if len(plans) == 1 else number)
            self._attempt(partial((self.path.parent / name).write_text, plan.to_json(), encoding="utf-8"))

    def write(self, event: str, **values: Any) -> None:
        """One line. A disk that is full does not end a run: it is said once."""
        text = json.dumps({"event": event, **finite(values)}, allow_nan=False) + "\n"

        def append() -> None:
            self._file.write(text)
            self._file.flush()

        self._attempt(append)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Curves for TensorBoard."""
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failed:
                self._warn(f"{self.path} cannot be written to: {error.strerror or error}; training goes on without it")
            self._failed = True

    def close(self) -> None:
        """Everything is on its way to the disk."""
        with contextlib.suppress(OSError):  # said when it was written
            self._file.close()
        if self._board is not None:
            self._board.close()


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN: they are null."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in values.items()}


def _cut(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, and a last line that was torn off."""
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
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)


def _board(folder: Path, step: int, warn: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn(f"log.tensorboard: tensorboard is not installed ({install('tensorboard')}); log.jsonl has it all")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
