"""CUDA memory snapshots: read, held against each other, and written of a described step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.diagnose.snapshot import read_snapshot
from jettison.diagnose.snapshot_file import write_snapshot
from jettison.memory.timeline import MemoryTimeline
from jettison.report.chrome_trace import chrome_json, step_trace, timelines_json
from jettison.report.estimate import EstimateReport
from jettison.report.snapshot import SnapshotReport

_JSON_BEGINS: Final = b'{["-0123456789tfn \t\r\n\xef'


def refuse_old_pickle(path: Path) -> None:
    """Pickles of protocol 0 and 1 are text, and would be called JSON that is broken.

    Raises:
        UsageError: the file is one: it ends as all pickles do, and does not begin as JSON does.
    """
    try:
        with path.open("rb") as file:
            first = file.read(1)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 1))
            last = file.read(1)
    except OSError:
        return  # whoever reads it says what is wrong
    if last == b"." and first and first not in _JSON_BEGINS:
        raise UsageError(
            f"{path} looks like a pickle of protocol 0 or 1; a memory snapshot is one of protocol 2 to 5, as "
            "torch.cuda.memory._dump_snapshot writes it, and everything else that is read is JSON"
        )


def snapshot_report(files: Sequence[Path]) -> SnapshotReport:
    """Report a snapshot, or the difference of two.

    Raises:
        UsageError: more than two files, or one that is no snapshot.
    """
    if not 1 <= len(files) <= 2:
        raise UsageError(f"got {len(files)} snapshots; expected one, or two to compare")
    read = [read_snapshot(path) for path in files]
    return SnapshotReport(snapshot=read[0], other=read[1] if len(read) == 2 else None)


def write_timelines(
    title: str, timelines: Sequence[MemoryTimeline], *, timeline: Path | None, snapshot: Path | None
) -> Iterator[str]:
    """Write steps of a live model, allocation by allocation, and say what was written; as for `write_step_files`.

    Args:
        timelines: a process of the trace, and a device of the snapshot, for each.
    """
    return _write(timeline, lambda: timelines_json(title, timelines), snapshot, lambda: timelines)


def write_step_files(report: EstimateReport, *, timeline: Path | None, snapshot: Path | None) -> Iterator[str]:
    """Write an estimated run's first two steps, and say what was written.

    Args:
        timeline: for a Chrome trace.
        snapshot: for a CUDA memory snapshot; device n is pipeline stage n.

    Raises:
        UsageError: so many micro-batches that nobody could look at them.
    """
    played = partial(step_trace, report.model, report.memory, report.found)
    return _write(timeline, lambda: chrome_json(played()), snapshot, lambda: played(by_tensor=True).memory)


def _write(
    timeline: Path | None,
    trace: Callable[[], str],
    snapshot: Path | None,
    memory: Callable[[], Sequence[MemoryTimeline]],
) -> Iterator[str]:
    if timeline is not None:
        write_whole(timeline, trace())
        yield f"wrote {timeline}: open it at ui.perfetto.dev or chrome://tracing"
    if snapshot is not None:
        write_snapshot(snapshot, list(memory()))
        yield f"wrote {snapshot}: jettison report {snapshot} reads it, and pytorch's memory_viz"
