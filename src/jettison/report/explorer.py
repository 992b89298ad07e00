"""`jettison explore`: one page of panels, each a question about activation memory, with its numbers and its command.

`PANELS` is the one place where a panel is registered: its script, and what its data come from. Data are made by Python
when the page is written; scripts draw them, and read the closed form where a control moves a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from jettison.progress import Progress, silent
from jettison.report.explorer_builders import Builder, asked, built
from jettison.report.explorer_closed_form import closed_form_data
from jettison.report.explorer_fit import fit_data
from jettison.report.explorer_front import front_data
from jettison.report.explorer_models import subjects
from jettison.report.explorer_offload import offload_data
from jettison.report.explorer_segments import segments_data
from jettison.report.explorer_step import step_data
from jettison.report.explorer_time import time_data
from jettison.report.page import page


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One figure. ``data`` is what its script asks `J.data` for; several panels may ask for the same."""

    name: str
    script: str
    data: Mapping[str, Builder] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # scripts that its own builds on


_CLOSED_FORM: Final[Mapping[str, Builder]] = {"closed-form": closed_form_data}
_LAYER: Final = ("kit/ledger.js", "panels/layer.js")

PANELS: Final[tuple[Panel, ...]] = (
    Panel(name="budget", script="panels/budget.js", data=_CLOSED_FORM, needs=_LAYER),
    Panel(name="floor", script="panels/floor.js", data=_CLOSED_FORM, needs=_LAYER),
    Panel(name="ranks", script="panels/ranks.js", data=_CLOSED_FORM, needs=_LAYER),
    Panel(name="trade", script="panels/trade.js", data=_CLOSED_FORM, needs=_LAYER),
    Panel(name="ladder", script="panels/ladder.js", data=_CLOSED_FORM, needs=_LAYER),
    Panel(name="time", script="panels/time.js", data={"time": partial(asked, time_data)}),
    Panel(name="step", script="panels/step.js", data={"step": partial(asked, step_data)}),
    Panel(name="front", script="panels/front.js", data={"front": partial(asked, front_data)}),
    Panel(name="segments", script="panels/segments.js", data={"segments": partial(asked, segments_data)}),
    Panel(name="offload", script="panels/offload.js", data={"offload": partial(asked, offload_data)}),
    Panel(name="fit", script="panels/fit.js", data={"fit": partial(asked, fit_data)}),
)
"""In the order of the page."""

INTRO: Final = """
What a training step keeps for its backward pass, and what it takes to keep less. Bytes on this page are the ledger's:
sums over the tensors that a layer saves, worked out where you see them from formulas that the same walk over the layer
wrote. Plans are the planner's, and seconds are predicted by the price model. Move a control, and the numbers, the table
and the command line that prints them follow.

A view is a link: the address keeps what is chosen.
"""
ALONE: Final = " The page asks for nothing and works offline."
SERVED: Final = " The page asks this machine alone, and works while `jettison explore --serve` runs."


def explorer_page(
    models: Sequence[str],
    *,
    panels: Sequence[Panel] = PANELS,
    served: bool = False,
    jobs: int = 1,
    progress: Progress = silent,
) -> str:
    """The page about these models and the published ones that it always has.

    Args:
        models: presets, config.json files or their folders; none: a choice of presets.
        jobs: processes that work its data out, at most.
        progress: is told what is worked out.

    Raises:
        UsageError: a model that is none of them.
    """
    scripts = list(dict.fromkeys(script for panel in panels for script in (*panel.needs, panel.script)))
    builders = {name: builder for panel in panels for name, builder in panel.data.items()}
    return page(
        "Activation memory, explored",
        intro=INTRO.rstrip() + (SERVED if served else ALONE) + _left_out(models),
        scripts=scripts,
        data=built(builders, models, jobs=jobs, progress=progress),
        served=served,
    )


def _left_out(models: Sequence[str]) -> str:
    """What models have that none of the figures has, a paragraph each."""
    return "".join(f"\n\n{one.label}: {text}." for one in subjects(models) for text in one.model.left_out)
