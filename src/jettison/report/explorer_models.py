"""Models and runs of the explorer: those asked for, the published ones, and commands that answer the same."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.families.presets import PRESETS
from jettison.predict.forecast import Forecast, available_bytes, forecast
from jettison.predict.time import Estimate, estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import choose_within
from jettison.spec.device_allowance import Limit
from jettison.spec.hardware import Hardware
from jettison.spec.model import ModelSpec
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

PUBLISHED: Final = ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t")
"""arXiv 2205.05198 Table 3."""
USUAL: Final = ("llama3-8b", "llama3-70b")
"""Models added to them where nothing is asked for."""
PUBLISHED_MICRO_BATCH: Final = {"gpt-22b": 4}
"""Table 3 again; the others train on one sequence at a time."""
GPU: Final = "h100-80gb"
MODEL: Final = "llama3-8b"
"""Model of panels about plans and steps, where none is asked for."""
MOST: Final = 8
"""Models that a page may be asked about: it stays below 1 MB, and is worked out within a minute or two."""
SECONDS_DIGITS: Final = 9
"""Digits of seconds in a page's data: nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class PageModel:
    """A model of the page. ``argument`` names it on a command line."""

    argument: str
    label: str
    model: ModelSpec
    asked: bool  # by the user, not by the page

    @cached_property
    def run(self) -> Run:
        """As `jettison ledger` would take it without another word."""
        return resolve(self.model, RunRequest()).run

    @property
    def micro_batch(self) -> int:
        """Micro-batch of its published training."""
        return PUBLISHED_MICRO_BATCH.get(self.argument, 1)


def explorer_table(name: str) -> dict[str, Any]:
    """A section of ``explorer.toml``."""
    found: dict[str, Any] = read_table(Path(__file__).with_name("explorer.toml"))[name]
    return found


def page_models(models: Sequence[str]) -> tuple[PageModel, ...]:
    """Those asked for first, then the published ones, each once. `UsageError` for unknown ones, or over `MOST`."""
    wanted = list(dict.fromkeys(models))
    if len(wanted) > MOST:
        raise UsageError(f"got {len(wanted)} models; a page holds at most {MOST}: write several pages")
    more = [name for name in (*PUBLISHED, *(() if wanted else USUAL)) if name not in wanted]
    found = []
    for name in (*wanted, *more):
        model, path = model_spec(name), Path(name)
        file = (path.parent.name if path.suffix == ".json" else path.name) or model.name
        label = name if name in PRESETS else file
        found.append(PageModel(argument=name, label=label, model=model, asked=name in wanted))
    return tuple(found)


def run_of(model: str, **asked: Any) -> Run:
    """The run that a request stands for. Raise `UsageError` for an unknown model, or an invalid run."""
    return resolve(model_spec(model), RunRequest(**asked)).run


def line(verb: str, model: str, asked: dict[str, Any], *more: str) -> str:
    """The command that answers a request, as it is typed."""
    words = ["jettison", verb, shlex.quote(model)]
    for name, value in asked.items():
        flag = name.replace("_", "-")
        words.append(f"--no-{flag}" if value is False else f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join([*words, *more])


def flags_text(asked: dict[str, Any]) -> str:
    """A layout and batch for people."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asked.items()) or "one device"


def answered(run: Run, hardware: Hardware) -> tuple[Forecast, Estimate]:
    """Memory and time of a run; where its recompute is left to the planner, on what the hardware leaves. Raise
    `Infeasible` if no plan fits.
    """
    if run.recompute.mode is not Mode.AUTO:
        return forecast(run), estimate(run, hardware)
    limit = Limit(nbytes=available_bytes(hardware, run), device_bytes=hardware.usable_bytes)
    choice = choose_within(run, limit, hardware)
    return choice.forecast, choice.estimate


def usual_layout(model: str, hardware: Hardware) -> dict[str, Any]:
    """Default layout of a model: tensor parallelism within a node of 8 as far as the model divides, and
    the fewest replicas with everything sharded over them (ZeRO 3) under which it fits, with all that can be computed
    again; or the most of these.
    """

    def divides(size: int) -> bool:
        try:
            return bool(run_of(model, tp=size))
        except UsageError:
            return False

    found = tp = next(({"tp": size} for size in (8, 4, 2) if divides(size)), {})
    for replicas in (1, 8, 64, 512):
        found = tp | ({"dp": replicas, "zero": 3} if replicas > 1 else {})
        run = run_of(model, recompute="full", **found)
        if forecast(run).peak_bytes <= available_bytes(hardware, run):
            break
    return found


def rounded(seconds: float) -> float:
    """Seconds as a page has them."""
    return round(seconds, SECONDS_DIGITS)
