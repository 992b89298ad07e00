"""`jettison explore`: one page of panels, each a question about activation memory, with its numbers and its command.

`PANELS` is the one place where a panel is registered: its script, and what its data come from. Data are made by Python
when the page is written; scripts draw them, and read the closed form where a control moves a size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jettison.report.explorer_closed_form import closed_form_data
from jettison.report.explorer_models import Subject, subjects
from jettison.report.page import page

Builder = Callable[[Sequence[Subject]], Any]


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
)
"""In the order of the page."""

INTRO: Final = """
What a training step keeps for its backward pass, and what it takes to keep less. Every number on this page is the
ledger's: sums over the tensors that a layer saves, worked out where you see them from formulas that the same walk over
the layer wrote. Move a control and the numbers, the table and the command line that prints them follow.

A view is a link: the address keeps what is chosen. The page asks for nothing and works offline.
"""


def explorer_page(models: Sequence[str], *, panels: Sequence[Panel] = PANELS, served: bool = False) -> str:
    """The page about these models and the published ones that it always has.

    Args:
        models: presets, config.json files or their folders; none: a choice of presets.

    Raises:
        UsageError: a model that is none of them.
    """
    about = subjects(models)
    scripts = list(dict.fromkeys(script for panel in panels for script in (*panel.needs, panel.script)))
    builders = {name: builder for panel in panels for name, builder in panel.data.items()}
    return page(
        "Activation memory, explored",
        intro=INTRO,
        scripts=scripts,
        data={name: builder(about) for name, builder in builders.items()},
        served=served,
    )
