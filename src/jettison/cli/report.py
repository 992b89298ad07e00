"""`report`: plans, proofs, training runs and memory snapshots that were written down, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from jettison.cli.app import Figures, Force, Format, asked, deliver, option, refuse_to_overwrite, verb
from jettison.cli.snapshots import refuse_old_pickle, snapshot_report
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.diagnose.snapshot import is_snapshot
from jettison.report.console import hint, progress
from jettison.report.page import require_browser, save_figures
from jettison.report.report import Report
from jettison.report.snapshot import SnapshotReport
from jettison.report.subject import read_subject


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
        written = save_figures(html, figures)
        hint(f"wrote {len(written)} files to {figures}")


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
