"""`jettison explore`: one page of panels, each a question about activation memory, with its numbers and its command.

`PANELS` is the one place where a panel is registered: its script, and what its data come from. Data are made by Python
when the page is written; scripts draw them, and read the closed form where a control moves a size.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from jettison.core.errors import Infeasible, UsageError
from jettison.core.process import deaf_to_interrupts, end_pool
from jettison.core.progress import Progress, silent
from jettison.predict.allowance import available_bytes
from jettison.predict.auto_recompute import choose
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.time import estimate
from jettison.report.alternatives import LINKS, trades
from jettison.report.explorer_closed_form import closed_form_data
from jettison.report.explorer_common import line, planned, rounded, run_of, usual_layout
from jettison.report.explorer_front import front_data
from jettison.report.explorer_models import Subject, subjects
from jettison.report.explorer_segments import segments_data
from jettison.report.explorer_step import step_data
from jettison.report.explorer_time import time_data
from jettison.report.page import page
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Recompute

# explorer builders ----------------------------------------------------------------------------------------------------
#
# The explorer's data, made by several processes: planning and tracing are Python's work, and people wait for a page
# This process takes the sets of data from one end of a list, the others from its other end.


Builder = Callable[[Sequence[Subject]], Any]
MOST_PROCESSES: Final = 4
"""More would wait for the longest set."""
LONG: Final = ("front", "offload", "closed-form", "time")
"""Sets that take half a second and more; the others are made here, and the last of these, while processes start."""


def asked(build: Callable[[list[str]], Any], about: Sequence[Subject]) -> Any:
    """What a builder makes of the models that were asked for by name."""
    return build([subject.argument for subject in about if subject.asked])


def built(
    builders: Mapping[str, Builder], models: Sequence[str], *, jobs: int = 1, progress: Progress = silent
) -> dict[str, Any]:
    """Each builder's data, by its name.

    Args:
        models: what the page is about; see `subjects`.
        jobs: processes at most, this one included.
        progress: is told what is worked out.

    Raises:
        UsageError: a model that is none.
    """
    about = subjects(models)
    found: dict[str, Any] = {}
    sent = [name for name in LONG if name in builders]

    def say(name: str) -> None:
        progress(f"working out {name}")

    if min(jobs, len(sent)) < 2:
        for name, build in builders.items():
            say(name)
            found[name] = build(about)
        return found
    workers = min(jobs, len(sent), MOST_PROCESSES) - 1
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    whole = False
    try:
        with deaf_to_interrupts():
            waiting = {name: pool.submit(_build, builders[name], tuple(models)) for name in sent}
        here = [name for name in builders if name not in waiting]
        for name in [*reversed(sent), *here]:
            if name in here or waiting[name].cancel():  # nobody has begun with it
                say(name)
                found[name] = builders[name](about)
        for name, future in waiting.items():
            if name not in found:
                say(name)
                found[name] = future.result()
        whole = True
    finally:
        end_pool(pool, now=not whole)
    return {name: found[name] for name in builders}


def _build(builder: Builder, models: tuple[str, ...]) -> Any:
    return builder(subjects(models))


# The explorer's matrix: which model fits which GPU under which layout, and by how much --------------------------------


MODELS: Final = ("llama3-8b", "mixtral-8x7b", "llama3-70b", "gpt-175b", "llama3-405b", "deepseek-v3")
GPUS: Final = ("rtx4090-24gb", "l40s-48gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "gb200-192gb")
LAYOUTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("8 GPUs: FSDP", {"dp": 8, "zero": 3}),
    ("8 GPUs: tensor parallel", {"tp": 8}),
    ("64 GPUs: FSDP", {"dp": 64, "zero": 3}),
    ("64 GPUs: 8-way tensor parallel, FSDP over 8", {"tp": 8, "dp": 8, "zero": 3}),
    ("512 GPUs: 8-way tensor parallel, FSDP over 64", {"tp": 8, "dp": 64, "zero": 3}),
)
MODES: Final = ("none", "selective-op", "full")


def fit_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By layout, mode and model the peak, and by layout and GPU what there is for it."""
    names = [*models, *(name for name in MODELS if name not in models)]
    devices = [hardware(name) for name in GPUS]
    return {
        "models": names,
        "gpus": [{"name": device.name, "usable": device.usable_bytes} for device in devices],
        "modes": list(MODES),
        "layouts": [
            {
                "name": name,
                "flags": flags,
                "available": _available(flags),
                "peaks": {mode: [_peak(model, flags, mode) for model in names] for mode in MODES},
                "commands": [line("ledger", model, flags) for model in names],
            }
            for name, flags in LAYOUTS
        ],
    }


def _available(flags: dict[str, Any]) -> list[int]:
    """What each GPU leaves for tensors, beside what it holds for this layout."""
    run = run_of(MODELS[0], **flags)
    return [available_bytes(hardware(name), run) for name in GPUS]


def _peak(model: str, flags: dict[str, Any], mode: str) -> list[Any] | str:
    """The peak and its phase; or the reason why there is none."""
    try:
        found = forecast(run_of(model, recompute=mode, **flags))
    except UsageError as error:
        return str(error)
    return [found.peak_bytes, *_why(found)]


def _why(found: Forecast) -> Iterator[Any]:
    """What stays whatever is computed again: parameters, gradients and optimizer state; and what else there is."""
    load = found.worst.load
    always = load.fixed + load.state + load.gradient_bytes
    yield min(always, found.peak_bytes)
    yield str(found.worst.peak.phase)


# explorer offload -----------------------------------------------------------------------------------------------------
#
# The explorer's links: computing again, sending away, or both, by the bandwidth between device and host


GPU: Final = "h100-80gb"
MODEL: Final = "llama3-8b"
ASKED: Final[dict[str, Any]] = {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 4}
GIGABYTES: Final = (8, 16, 32, 64, 128, 225, 450)
"""A second, in one direction: the links of `LINKS`, and some between and below them."""


def offload_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and bandwidth, seconds of a step when tensors are computed again, all sent away, or either; of `MODEL`
    where none is asked for."""
    asked = [(model, usual_layout(model, hardware(GPU))) for model in models] or [(MODEL, ASKED)]
    links = [{"name": link.name, "gigabytes": link.bytes_per_second / 1e9} for link in LINKS]
    return {"links": links, "models": [_model(model, flags) for model, flags in asked]}


def _model(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    device = hardware(GPU)
    plain = run_of(model, **asked)
    return {
        "name": model,
        "gpu": GPU,
        "own": (device.host_bytes_per_second or 0) / 1e9,
        "host_bytes": device.host_memory_bytes,
        "budget": available_bytes(device, plain),
        "layout": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asked.items()) or "one device",
        "none_seconds": rounded(estimate(plain, device).step_seconds),
        "none_peak": forecast(plain).peak_bytes,
        "again": _planned(model, asked, device, offload=False),
        "rows": [_row(model, asked, replace(device, host_bytes_per_second=gb * 10**9), gb) for gb in GIGABYTES],
        "tensors": list(_tensors(model, asked, device)),
    }


def _row(model: str, asked: dict[str, Any], device: Hardware, gigabytes: int) -> dict[str, Any]:
    everything = replace(run_of(model, **asked), recompute=Recompute(offload=True))
    return {
        "gigabytes": gigabytes,
        "reached": round(gigabytes * device.reached.host, 3),
        "all_seconds": rounded(estimate(everything, device).step_seconds),
        "all_peak": forecast(everything).peak_bytes,
        "mix": _planned(model, asked, device, offload=True),
    }


def _planned(model: str, asked: dict[str, Any], device: Hardware, *, offload: bool) -> dict[str, Any]:
    """A plan on what the device leaves; its seconds are those that ``plan`` states, and a whole step's."""
    run = run_of(model, recompute="auto", offload=offload, **asked)
    command = (
        _command(model, asked, device) if offload else line("plan", model, {"gpu": GPU} | asked | {"offload": False})
    )
    try:
        choice = choose(run, available_bytes(device, run), device)
    except Infeasible as error:
        return {"seconds": None, "minimum_bytes": error.minimum_budget_bytes, "command": command}
    memory, time = planned(choice)
    program = next(part for part in memory.parts if part.is_layer)
    return {
        "seconds": rounded(time.step_seconds),
        "planned_seconds": rounded(choice.step_seconds),
        "peak": memory.peak_bytes,
        "host": choice.host_bytes,
        "again": rounded(choice.seconds - choice.stalled_seconds),
        "stalled": rounded(choice.stalled_seconds),
        "layer": program.name,
        "command": command,
    }


def _command(model: str, asked: dict[str, Any], device: Hardware) -> str:
    """A hardware file with another link, and the plan on it."""
    rate = (device.host_bytes_per_second or 0) // 10**9
    files = "\"$(python -c 'import jettison.spec as s; print(*s.__path__)')\""
    edit = f"sed 's/^host = .*/host = {rate}/' {files}/hardware_data/{GPU}.toml > link.toml"
    return f"{edit} && {line('plan', model, {'gpu': 'link.toml'} | asked)}"


def _tensors(model: str, asked: dict[str, Any], device: Hardware) -> Iterator[list[Any]]:
    for trade in trades(run_of(model, **asked), device):
        limit = trade.break_even_bytes_per_second
        again = None if trade.again_seconds is None else rounded(trade.again_seconds)
        yield [trade.role, trade.nbytes, again, None if limit is None else round(limit / 1e9, 3)]


# explorer ------------------------------------------------------------------------------------------------------------


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
