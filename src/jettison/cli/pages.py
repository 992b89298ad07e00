"""Commands that write pages: `explore`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jettison.cli.output import refuse_to_overwrite
from jettison.cli.parameters import Force, app
from jettison.report.console import hint
from jettison.units import format_bytes


@app.command
def explore(
    models: Annotated[
        tuple[str, ...], Parameter(help="Presets such as llama3-8b, config.json files or their folders.")
    ] = (),
    /,
    *,
    out: Annotated[Path, Parameter(help="The page's file.")] = Path("explore.html"),
    force: Force = False,
    open_page: Annotated[
        bool, Parameter(name="--open", negative="", show_default=False, help="Show it in the browser.")
    ] = False,
) -> None:
    """Write one page of figures that can be moved: what a layer keeps, what layouts and recompute make of it.

    The page works offline, from a disk. Without MODEL it is about the published GPTs of 22B to 1T and Llama 3.
    """
    refuse_to_overwrite(out, force=force)
    from jettison.verbs.explore import explore as write

    written = write(models, out)
    hint(f"wrote {out} ({format_bytes(written)})")
    if open_page:
        webbrowser.open(out.resolve().as_uri())
