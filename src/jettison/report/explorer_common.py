"""What the explorer's builders share: requests as runs and as commands, layouts for models that nobody described."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jettison.core.errors import UsageError
from jettison.predict.allowance import available_bytes
from jettison.predict.auto_recompute import AutoForecast
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import model_spec, resolve
from jettison.predict.time import Estimate, estimate
from jettison.predict.whole_plan import choose_with_whole
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

SECONDS_DIGITS = 9
"""Of seconds in a page's data: nanoseconds."""


def run_of(model: str, **asked: Any) -> Run:
    """The run that a request stands for.

    Raises:
        UsageError: no such model, or a run that makes no sense.
    """
    return resolve(model_spec(model), RunRequest(**asked)).run


def line(verb: str, model: str, asked: dict[str, Any], *more: str) -> str:
    """The command that answers a request, as it is typed."""
    words = ["jettison", verb, shlex.quote(model)]
    for name, value in asked.items():
        flag = name.replace("_", "-")
        words.append(f"--no-{flag}" if value is False else f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join([*words, *more])


def answered(run: Run, hardware: Hardware) -> tuple[Forecast, Estimate]:
    """Memory and time of a run; where its recompute is left to the planner, on what the hardware leaves.

    Raises:
        Infeasible: no plan fits.
    """
    if run.recompute.mode is not Mode.AUTO:
        return forecast(run), estimate(run, hardware)
    return planned(choose_with_whole(run, available_bytes(hardware, run), hardware))


def planned(choice: AutoForecast) -> tuple[Forecast, Estimate]:
    """The same of a plan."""
    memory = choice.forecast
    chosen = [part.chosen for part in memory.parts if part.is_layer]
    return memory, estimate(memory.run, choice.hardware, chosen=chosen)


def usual_layout(model: str, hardware: Hardware) -> dict[str, Any]:
    """A layout for a model that nobody gave one: tensor parallelism within a node of 8 as far as the model divides, and
    the fewest replicas with everything sharded over them (ZeRO 3) under which it fits, with all that can be computed
    again; or the most of these.
    """
    tp = next(_allowed(model, [{"tp": size} for size in (8, 4, 2)]), {})
    found = tp
    for replicas in (1, 8, 64, 512):
        found = tp | ({"dp": replicas, "zero": 3} if replicas > 1 else {})
        run = run_of(model, recompute="full", **found)
        if forecast(run).peak_bytes <= available_bytes(hardware, run):
            break
    return found


def _allowed(model: str, layouts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    spec = model_spec(model)
    for asked in layouts:
        try:
            resolve(spec, RunRequest(**asked))
        except UsageError:
            continue
        yield asked


def rounded(seconds: float) -> float:
    """Seconds as a page has them."""
    return round(seconds, SECONDS_DIGITS)


def with_recompute(run: Run, words: str) -> Run:
    """The same run under another recompute mode."""
    from jettison.spec.recompute import Recompute

    return replace(run, recompute=Recompute.parse(words, layers=run.model.depth))
