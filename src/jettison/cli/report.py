"""`report`: plans, proofs, training runs and memory snapshots that were written down, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from jettison.cli.app import Figures, Force, Format, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.diagnose.snapshot import is_snapshot, read_snapshot
from jettison.report.console import hint, progress
from jettison.report.page import require_browser, save_figures
from jettison.report.report import Report
from jettison.report.report_subject import read_subject
from jettison.report.snapshot import SnapshotReport


@verb("report")
def command(
    files: Annotated[
        list[Path],
        option("Model", "plan.json, proof.json, a run's folder or log.jsonl, or a memory snapshot; two to compare."),
    ],
    /,
    *,
    out: Annotated[Path | None, option("Output", "File of the page [default: report.html].")] = None,
    figures: Figures = None,
    form: Format = "human",
    force: Force = False,
) -> None:
    """Report a plan, proof, training run or memory snapshot as one HTML page, and as tables or JSON."""
    target = out or Path("report.html")
    if figures is not None:
        require_browser()
    with progress() as say:
        say("reading " + ", ".join(map(str, files)))
        made = report(files)
        refuse_to_overwrite(target, force=force)  # a file that is no input is the first thing to mend
        say("writing the page")
        html = made.html()
    deliver(made.document, made.table, form=form, request=asked(files=files))
    write_whole(target, html)
    hint(f"wrote {target}")
    if figures is not None:
        hint(f"wrote {len(save_figures(html, figures))} files to {figures}")


def report(files: Sequence[Path]) -> Report | SnapshotReport:
    """Report one document, or compare two of a kind. Raise `UsageError` if one is none of these, or beyond the limits
    of what is read; or if they are of two kinds, or more than two snapshots.

    Args:
        files: a plan, a proof, the log of a training run (its file or folder), or a CUDA memory snapshot.
    """
    pickles = [file for file in files if is_snapshot(file)]
    if pickles:
        others = [file for file in files if file not in pickles]
        if others:
            raise UsageError(f"got the snapshot {pickles[0]} and {others[0]}, which is none; give two of a kind")
        if len(files) > 2:
            raise UsageError(f"got {len(files)} snapshots; expected one, or two to compare")
        read = [read_snapshot(path) for path in files]
        return SnapshotReport(snapshot=read[0], other=read[1] if len(read) == 2 else None)
    return Report(subjects=tuple(read_subject(file) for file in files))
