"""`train`: a recipe, and the flags that override it."""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jettison.cli.app import ON, Format, asked, deliver, option, verb
from jettison.cli.report import report
from jettison.core.errors import JettisonError
from jettison.core.files import write_whole
from jettison.core.progress import Progress, silent
from jettison.report.console import hint, progress

if TYPE_CHECKING:
    from jettison.train.export_weights import ExportResult
    from jettison.train.recipe import PlanSection, TrainRecipe
    from jettison.train.run_folder import TrainResult


@verb("train")
def command(
    recipe: Annotated[str, option("Model", "Recipe: a TOML file, or module:name of a TrainRecipe.")],
    /,
    *,
    steps: Annotated[int | None, option("Batch and sequence", "Optimizer steps [default: the recipe's].")] = None,
    resume: Annotated[bool, option("Model", "Fail where there is no checkpoint to resume from.", **ON)] = False,
    budget: Annotated[
        str | None, option("Memory and GPU", "Limit of a step's peak bytes on one rank: 20GiB [default: the recipe's].")
    ] = None,
    plan: Annotated[
        Path | None, option("Recompute and offload", "plan.json, or a run's log folder [default: the recipe's].")
    ] = None,
    recompute: Annotated[
        str | None, option("Recompute and offload", "Policy: none, selective, full or every:K [default: the recipe's].")
    ] = None,
    gpu: Annotated[str | None, option("Memory and GPU", "GPU for MFU and HFU, such as h100-80gb.")] = None,
    export: Annotated[
        Path | None, option("Output", "Only write the newest checkpoint's weights here, for from_pretrained.")
    ] = None,
    form: Format = "human",
) -> None:
    """Train from a recipe, in this process or under torchrun; resumes from the newest checkpoint."""
    from jettison.train.recipe import PlanSection

    chosen = PlanSection(budget=budget, file=None if plan is None else str(plan), policy=recompute)
    leads = os.environ.get("RANK", "0") == "0"
    if not leads:
        warnings.simplefilter("ignore")  # what one rank says, all would
    with progress(elsewhere_seconds=30) as say:  # a log of hours shows that something happens
        say("loading torch")
        from jettison.train.ranks import said_by_leader

        def warn(text: str) -> None:
            hint(f"warning: {text}")

        try:
            result: TrainResult | ExportResult
            if export is not None:
                result = write_weights(recipe, str(export), progress=say, warn=warn)
            else:
                given = chosen if chosen.given else None
                result = train(recipe, steps=steps, plan=given, gpu=gpu, must_resume=resume, progress=say, warn=warn)
        except JettisonError as error:
            if leads or not said_by_leader(error):
                raise
            time.sleep(2)  # torchrun ends all ranks when the first one leaves: let the leading one speak
            sys.exit(error.exit_code)
    if leads:
        said = asked(
            recipe=recipe,
            steps=steps,
            resume=resume,
            budget=budget,
            plan=plan,
            recompute=recompute,
            gpu=gpu,
            export=export,
        )
        deliver(result.document, lambda: "\n".join(result.lines()), form=form, request=said)


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
    from jettison.train.loop import train as train_ranks
    from jettison.train.recipe import read_recipe

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

    result = train_ranks(made, must_resume=must_resume, say=progress, warn=warn)
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
    from jettison.train.export_weights import export_run
    from jettison.train.recipe import PlanSection, read_recipe

    def made() -> TrainRecipe:
        found = read_recipe(recipe) if isinstance(recipe, str) else recipe
        return replace(found, export=replace(found.export, folder=folder), plan=PlanSection())

    return export_run(made, say=progress, warn=warn)
