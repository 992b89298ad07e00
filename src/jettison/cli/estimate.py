"""`estimate`: how long a step of a described run takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jettison.cli import app
from jettison.cli.app import CompileFlags, Switch
from jettison.cli.from_file import NO_SOURCE, RunSourceFlags, in_keys_of, sourced, spec_of
from jettison.core.errors import UsageError
from jettison.cost.execution import execution_of
from jettison.predict.forecast import Forecast, forecast, limit_of
from jettison.predict.ranges import fit_budgets
from jettison.predict.time import estimate as estimate_run
from jettison.report.console import hint, progress
from jettison.report.estimate import EstimateReport, TrainingBudget
from jettison.request.options import NOTHING_ASKED, RunRequest
from jettison.request.resolve import is_live, resolve
from jettison.spec.device_allowance import Limit
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import Run, anchored, placed

if TYPE_CHECKING:
    from jettison.search.auto_recompute import AutoForecast


@dataclass(frozen=True, kw_only=True)
class EstimateFlags(CompileFlags):
    """Flags of `estimate` alone.

    Memory and GPU:
        gpu: GPU of the run, such as h100-80gb (`jettison list gpus`), or a hardware file.

    Output:
        explain: Break the time down, and compare recompute modes.
        timeline: File for the first two steps (ui.perfetto.dev).
        snapshot: File for their allocations, as a CUDA memory snapshot; device n is stage n.
    """

    gpu: str
    explain: Switch = False
    tokens: app.RunTokens = None
    price_per_gpu_hour: app.Price = None
    timeline: Path | None = field(default=None, metadata=app.LOCAL)
    snapshot: Path | None = field(default=None, metadata=app.LOCAL)


@app.verb("estimate")
def command(
    model: app.Described = None,
    /,
    *,
    flags: Annotated[EstimateFlags, app.Flattened],
    request: Annotated[RunRequest, app.Flattened] = NOTHING_ASKED,
    source: Annotated[RunSourceFlags, app.Flattened] = NO_SOURCE,
    form: app.Format = "human",
    out: app.Out = None,
    force: app.Force = False,
) -> None:
    """Estimate the time of a training step: seconds, tokens a second, MFU, and where the time goes."""
    app.refuse_to_overwrite(out, flags.timeline, flags.snapshot, force=force)
    model, request, source_file = sourced(model, request, source, verb="estimate")
    if source_file is not None and source_file.compile:
        flags = replace(flags, compile=True)
    with progress() as say, in_keys_of(source_file):
        say("estimating")
        report = estimate(model, request, flags)
    app.deliver(report.document, report.table, form=form, out=out, source=source_file, warnings=report.warnings)
    if flags.timeline is not None or flags.snapshot is not None:
        from jettison.report.timeline_files import write_step_files

        for line in write_step_files(report, timeline=flags.timeline, snapshot=flags.snapshot):
            hint(line)


def estimate(model: str, request: RunRequest, flags: EstimateFlags) -> EstimateReport:
    """Estimate a step of a described run on a GPU.

    Raises:
        UsageError: no such model or GPU, a run that makes no sense, or a figure that the GPU's file lacks.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    if is_live(model):
        raise UsageError(f"got the live model {model}; an estimate is of a preset or of a config.json")
    wanted = TrainingBudget(tokens=flags.tokens, price_per_gpu_hour=flags.price_per_gpu_hour)
    asked, device = resolve(spec_of(model, request), request), hardware(flags.gpu)
    run = placed(asked.run, device)
    if flags.explain and run.recompute.mode is Mode.AUTO:
        raise UsageError("--explain compares recompute modes; give another than auto")
    how = execution_of(run).compiled() if flags.compile else execution_of(run)
    planned = run.recompute.mode is Mode.AUTO
    limit = limit_of(budget=None, gpu=flags.gpu, run=run)
    assert limit is not None, "of a GPU"
    memory, choice = _memory(replace(run, compiled=flags.compile and planned), device, limit)
    run = memory.run
    found = estimate_run(run, device, execution=how, chosen=None if choice is None else choice.chosen)
    eager = ""
    if flags.compile and not planned:
        try:
            memory = forecast(replace(memory.run, compiled=True))
        except UsageError as error:  # none is described: what there is, and why
            eager = str(error)
    explained = None
    if flags.explain:
        from jettison.report.alternatives import alternatives_of

        explained = alternatives_of(found)
    return EstimateReport(
        model=model,
        asked=asked,
        found=found,
        memory=memory,
        available_bytes=limit.nbytes,
        fit_rule=None if choice is None else choice.fit_rule,
        alternatives=explained,
        wanted=wanted,
        eager_memory=eager,
    )


def _memory(run: Run, device: Hardware, limit: Limit) -> tuple[Forecast, AutoForecast | None]:
    if run.recompute.mode is not Mode.AUTO:
        if run.recompute.whole == MOST:
            from jettison.search.largest_fit import settled

            run = settled(run, fit_budgets(run, limit))
        return forecast(run), None
    from jettison.search.auto_recompute import choose_within  # the planner takes its time to load

    planned, reached = anchored(run, device)
    choice = choose_within(planned, limit, reached)
    return replace(choice.forecast, run=run), choice
