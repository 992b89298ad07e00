"""`report`: plans, proofs, training runs and memory snapshots that were written down, to be looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from jettison.cli.app import Figures, Force, Format, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.diagnose.snapshot import is_snapshot, read_snapshot
from jettison.report.console import hint, progress
from jettison.report.page import require_browser, save_figures
from jettison.report.report import Report
from jettison.report.report_subject import read_subject
from jettison.report.snapshot import SnapshotReport

_JSON_BEGINS: Final = b'{["-0123456789tfn \t\r\n\xef'


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
    for file in files:
        _refuse_old_pickle(file)
    return Report(subjects=tuple(read_subject(file) for file in files))


def _refuse_old_pickle(path: Path) -> None:
    """Pickles of protocol 0 and 1 are text, and would be called JSON that is broken. Raise `UsageError` if the file is
    one: it ends as all pickles do, and does not begin as JSON does.
    """
    try:
        with path.open("rb") as file:
            first = file.read(1)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 1))
            last = file.read(1)
    except OSError:
        return  # its reader raises the error
    if last == b"." and first and first not in _JSON_BEGINS:
        raise UsageError(
            f"{path} looks like a pickle of protocol 0 or 1; a memory snapshot is one of protocol 2 to 5, as "
            "torch.cuda.memory._dump_snapshot writes it, and everything else that is read is JSON"
        )
