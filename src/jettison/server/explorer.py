"""The explorer's page with one panel more: the one that asks."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.progress import Progress, silent
from jettison.report.explorer import PANELS, Panel, explorer_page
from jettison.server.limits import Limits
from jettison.server.offer import offer
from jettison.server.questions import Service


def served_explorer(
    models: Sequence[str], limits: Limits, service: Service, *, jobs: int = 1, progress: Progress = silent
) -> str:
    """The page that `jettison explore --serve` shows.

    Raises:
        UsageError: a model that is none.
    """
    ask = Panel(name="ask", script="panels/ask.js", data={"serve": lambda _about: offer(limits, service)})
    return explorer_page(models, panels=(ask, *PANELS), served=True, jobs=jobs, progress=progress)
