"""Commands that show what others have written: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jettison.cli.output import asked, deliver, refuse_to_overwrite
from jettison.cli.parameters import Force, Format, app
from jettison.report.console import hint, progress
from jettison.whole_files import write_whole


@app.command
def report(
    files: Annotated[
        list[Path],
        Parameter(help="A plan.json, a proof.json, a run's log.jsonl or folder, or a memory snapshot; two to compare."),
    ],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The page; by default report.html.")] = None,
    figures: Annotated[
        Path | None, Parameter(help="Folder for each figure as SVG and PNG (needs Chrome, Chromium or Edge).")
    ] = None,
    form: Format = "human",
    force: Force = False,
) -> None:
    """What a plan, a proof, a training run or a memory snapshot says: one HTML page, and the same as tables or JSON."""
    target = out or Path("report.html")
    refuse_to_overwrite(target, force=force)
    from jettison.report.headless import require_browser, save_figures
    from jettison.verbs.report import report as answer

    if figures is not None:
        require_browser()
    with progress() as say:
        say("reading " + ", ".join(map(str, files)))
        made = answer(files)
        say("writing the page")
        html = made.html()
    deliver(made.document, made.table, form=form, out=None, request=asked(files=files))
    write_whole(target, html)
    hint(f"wrote {target}")
    if figures is not None:
        written = save_figures(html, figures)
        hint(f"wrote {len(written)} files to {figures}")
