"""`jettison explore`: one page of panels, each a question about activation memory, with its numbers and its command.

`PANELS` is the one place where a panel is registered: its script, and the functions that make its data. Data are made
by Python when the page is written; scripts draw them, and read the closed form where a control moves a size.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from jettison.core.process import deaf_to_interrupts, end_pool
from jettison.core.progress import Progress, silent
from jettison.report.explorer_closed_form import closed_form_data
from jettison.report.explorer_fit import will_it_fit_data
from jettison.report.explorer_models import page_models
from jettison.report.explorer_plans import fit_data, front_data, offload_data, segments_data
from jettison.report.explorer_steps import step_data, time_data
from jettison.report.page import page

Builder = Callable[[Sequence[str]], Any]
"""Makes a panel's data of the models that were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One figure. ``data`` is what its script asks `J.data` for; several panels may ask for the same."""

    name: str
    script: str
    data: Mapping[str, Builder] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # scripts that its own builds on


def _panel(name: str, data: Mapping[str, Builder], *needs: str) -> Panel:
    return Panel(name=name, script=f"panels/{name.replace('-', '_')}.js", data=data, needs=needs)


_OF_LAYERS: Final = ({"closed-form": closed_form_data}, "kit/ledger.js", "panels/layer.js")
PANELS: Final[tuple[Panel, ...]] = (
    _panel("will-it-fit", {"will-it-fit": will_it_fit_data}, "kit/ledger.js", "kit/step_bytes.js"),
    *(_panel(name, *_OF_LAYERS) for name in ("budget", "floor", "ranks", "trade", "ladder")),
    _panel("time", {"time": time_data}),
    _panel("step", {"step": step_data}),
    _panel("front", {"front": front_data}),
    _panel("segments", {"segments": segments_data}),
    _panel("offload", {"offload": offload_data}),
    Panel(name="fit", script="panels/models_by_gpus.js", data={"fit": fit_data}),
)
"""In the order of the page."""
MOST_PROCESSES: Final = 4
"""More would wait for the longest set."""
LONG: Final = ("front", "will-it-fit", "offload", "closed-form", "time")
"""Sets that take half a second and more; the others are made here, and the last of these, while processes start."""


def built(
    builders: Mapping[str, Builder], models: Sequence[str], *, jobs: int = 1, progress: Progress = silent
) -> dict[str, Any]:
    """Each builder's data, by its name. This process takes the sets from one end of a list, the others from its other.
    Raise `UsageError` for an unknown model.

    Args:
        models: what the page is about; see `page_models`.
        jobs: processes at most, this one included.
        progress: is told what is worked out.
    """
    asked = [one.argument for one in page_models(models) if one.asked]
    found: dict[str, Any] = {}

    def say(name: str) -> None:
        progress(f"working out {name}, {len(found) + 1} of {len(builders)} figures' data")

    sent = [name for name in LONG if name in builders]
    workers = min(jobs, len(sent), MOST_PROCESSES) - 1
    if workers < 1:
        for name, build in builders.items():
            say(name)
            found[name] = build(asked)
        return found
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    whole = False
    try:
        with deaf_to_interrupts():
            waiting = {name: pool.submit(builders[name], asked) for name in sent}
        here = [name for name in builders if name not in waiting]
        for name in [*reversed(sent), *here]:
            if name in here or waiting[name].cancel():  # no process has begun with it
                say(name)
                found[name] = builders[name](asked)
        for name in [name for name in sent if name not in found]:
            say(name)
            found[name] = waiting[name].result()
        whole = True
    finally:
        end_pool(pool, now=not whole)
    return {name: found[name] for name in builders}


INTRO: Final = """
Interactive figures of memory, plans and step time. Each has a table of its numbers and the command that prints them;
the address keeps your settings, so a view is a link.
"""
ALONE: Final = " The page works offline."
SERVED: Final = " It asks this machine only, while `jettison explore --serve` runs."


def explorer_page(
    models: Sequence[str],
    *,
    panels: Sequence[Panel] = PANELS,
    served: bool = False,
    jobs: int = 1,
    progress: Progress = silent,
) -> str:
    """The page about these models and the published ones that it always has. Raise `UsageError` for an unknown model.

    Args:
        models: presets, config.json files or their folders; none: a choice of presets.
        jobs: processes that work its data out, at most.
        progress: is told what is worked out.
    """
    scripts = list(dict.fromkeys(script for panel in panels for script in (*panel.needs, panel.script)))
    builders = {name: builder for panel in panels for name, builder in panel.data.items()}
    left_out = (f"\n\n{one.label}: {text}." for one in page_models(models) for text in one.model.left_out)
    return page(
        "Activation memory, explored",
        intro=INTRO.rstrip() + (SERVED if served else ALONE) + "".join(left_out),
        scripts=[*scripts, "kit/toc.js"],
        data=built(builders, models, jobs=jobs, progress=progress),
        served=served,
    )
