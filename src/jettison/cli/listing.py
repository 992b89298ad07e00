"""Commands that say what there is: `list`."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from jettison.cli.output import asked, deliver, refuse_to_overwrite
from jettison.cli.parameters import Force, Format, Out, app


@app.command(name="list")
def list_names(
    what: Annotated[
        Literal["models", "gpus", "precisions", "policies", "optimizers", "targets"] | None,
        Parameter(help="One kind of names; all of them without it."),
    ] = None,
    /,
    *,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """The names that other commands take: models, GPUs, precisions, policies, optimizers, targets of exports."""
    refuse_to_overwrite(out, force=force)
    from jettison.verbs.list_names import list_names as answer

    report = answer(what)
    deliver(report.document, report.table, form=form, out=out, request=asked(what=what))
