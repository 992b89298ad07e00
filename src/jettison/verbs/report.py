"""`report`: plans, proofs and training runs that were written down, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jettison.report.read_subject import read_subject
from jettison.report.report import Report


def report(files: Sequence[Path]) -> Report:
    """What one document says, or two of a kind side by side.

    Args:
        files: a plan, a proof, or the log of a training run (its file or folder).

    Raises:
        UsageError: one is none of these, or beyond the limits of what is read; or they are of two kinds.
    """
    return Report(subjects=tuple(read_subject(file) for file in files))
