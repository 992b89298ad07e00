"""`report`: plans, proofs, training runs and memory snapshots that were written down, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jettison.errors import UsageError
from jettison.report.read_subject import read_subject
from jettison.report.report import Report
from jettison.report.snapshot import SnapshotReport
from jettison.verbs.snapshots import is_snapshot, refuse_old_pickle, snapshot_report


def report(files: Sequence[Path]) -> Report | SnapshotReport:
    """Report one document, or compare two of a kind.

    Args:
        files: a plan, a proof, the log of a training run (its file or folder), or a CUDA memory snapshot.

    Raises:
        UsageError: one is none of these, or beyond the limits of what is read; or they are of two kinds.
    """
    pickles = [file for file in files if is_snapshot(file)]
    if pickles:
        others = [file for file in files if file not in pickles]
        if others:
            raise UsageError(f"got the snapshot {pickles[0]} and {others[0]}, which is none; give two of a kind")
        return snapshot_report(files)
    for file in files:
        refuse_old_pickle(file)
    return Report(subjects=tuple(read_subject(file) for file in files))
