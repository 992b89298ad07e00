"""`export`: a plan in the words of other people's trainers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jettison.cli.output import asked
from jettison.cli.parameters import Format, app
from jettison.report.console import hint, progress, show
from jettison.report.json_text import json_text


@app.command
def export(
    plan: Annotated[Path, Parameter(help="What jettison plan ... --out FILE wrote.")],
    /,
    *,
    to: Annotated[
        str,
        Parameter(
            help="torch, torch_remat, transformers, accelerate, deepspeed, lightning, megatron, megatron-bridge, "
            "torchtitan or brief."
        ),
    ],
    gpu: Annotated[str | None, Parameter(help="Whose prices seconds are stated at, for a live model's plan.")] = None,
    model: Annotated[
        str | None, Parameter(help="What a live model's plan was made for, if it does not say or it has moved.")
    ] = None,
    form: Format = "human",
    out: Annotated[Path | None, Parameter(help="Write there: a file, or a folder where there are several.")] = None,
    force: Annotated[bool, Parameter(negative="", show_default=False, help="Replace the files of --out.")] = False,
) -> None:
    """A plan as settings of another trainer: what is exported, what of it is lost, and what that costs beside the plan.

    Of what the target can say the fastest that fits the plan's budget is chosen; exit code 3 where nothing does.
    Without --out the files' text is printed.
    """
    from jettison.report.export import export_table
    from jettison.verbs.export import check_free, write_files
    from jettison.verbs.export import export_plan as answer

    check_free(out, force=force)
    with progress() as say:
        found = answer(plan, to=to, gpu=gpu, model=model, progress=say)
    written = () if out is None else write_files(found, out, force=force)
    if form == "json":
        print(json_text(found.document() | {"request": asked(plan=plan, to=to, gpu=gpu, model=model)}), end="")
    elif out is None:
        for left_out in found.subject.left_out:
            hint(f"note: {left_out}")
        for lost in found.lost:
            hint(f"lost: {lost}")
        for note in found.notes:
            hint(f"note: {note}")
        sys.stdout.write("\n".join(found.files.values()))
        sys.stdout.flush()
    else:
        show(export_table(found))
    for path in written:
        hint(f"wrote {path}")
