"""`train`: a recipe, with what was asked for beside it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from jettison.errors import JettisonError
from jettison.progress import Progress, silent
from jettison.train.export_run import ExportResult, export_run
from jettison.train.loop import train as run_recipe
from jettison.train.recipe import PlanSection, TrainRecipe
from jettison.train.recipe_file import read_recipe
from jettison.train.result import TrainResult
from jettison.verbs.report import report
from jettison.whole_files import write_whole


def train(
    recipe: TrainRecipe | str,
    *,
    steps: int | None = None,
    plan: PlanSection | None = None,
    gpu: str | None = None,
    must_resume: bool = False,
    progress: Progress = silent,
    warn: Progress = silent,
) -> TrainResult:
    """Train as a recipe says, on the ranks that torchrun started, or on this one.

    Args:
        recipe: one, or its TOML file, or ``module:name``.
        steps, plan, gpu: instead of what the recipe says.
        must_resume: fail where there is no checkpoint.

    Raises:
        UsageError: what was asked makes no sense on this machine or with these files.
        Infeasible: no plan fits the budget.
    """

    ran: list[TrainRecipe] = []

    def made() -> TrainRecipe:
        found = read_recipe(recipe) if isinstance(recipe, str) else recipe
        if steps is not None:
            found = replace(found, steps=steps)
        if plan is not None:
            found = replace(found, plan=plan)
        if gpu is not None:
            found = replace(found, log=replace(found.log, gpu=gpu, peak_tflops=None))
        ran.append(found)
        return found

    result = run_recipe(made, must_resume=must_resume, say=progress, warn=warn)
    if ran[-1].log.report and os.environ.get("RANK", "0") == "0":
        result = replace(result, report=_written(Path(result.log), warn))
    return result


def _written(folder: Path, warn: Progress) -> str | None:
    """The page about the run in this folder; where there can be none a warning: the run is done all the same."""
    path = folder / "report.html"
    try:
        write_whole(path, report([folder]).html())
    except (OSError, JettisonError) as error:
        warn(f"no report is written to {path}: {error}")
        return None
    return str(path)


def write_weights(
    recipe: TrainRecipe | str, folder: str, *, progress: Progress = silent, warn: Progress = silent
) -> ExportResult:
    """Write the weights of a run's newest checkpoint to a new folder that transformers loads; nothing is trained.

    Args:
        recipe: of the run, or its TOML file, or ``module:name``; what it says of the export but the folder counts.

    Raises:
        UsageError: there is no checkpoint, the folder is there, or transformers has no such model.
        ExportFailed: the weights could not be written.
    """

    def made() -> TrainRecipe:
        found = read_recipe(recipe) if isinstance(recipe, str) else recipe
        return replace(found, export=replace(found.export, folder=folder), plan=PlanSection())

    return export_run(made, say=progress, warn=warn)
