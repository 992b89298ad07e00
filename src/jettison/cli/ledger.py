"""`ledger`: what a run needs, of a description in closed form, of a live model from a trace; and whether two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jettison.cli import app
from jettison.cli.app import CompileFlags, Switch
from jettison.cli.from_file import NO_SOURCE, RunSourceFlags, in_keys_of, sourced, spec_of
from jettison.core.errors import Infeasible, UsageError
from jettison.core.files import read_text
from jettison.core.progress import Progress, silent
from jettison.families.presets import PRESETS
from jettison.ledger.compare import compare, in_step
from jettison.ledger.ledger import Ledger
from jettison.models.model_types import require_known_file
from jettison.predict.forecast import forecast, limit_of
from jettison.predict.ranges import fit_budgets
from jettison.report.console import hint, progress
from jettison.report.ledger import ComparedLedger, LedgerReport, forecast_report
from jettison.request.options import NOTHING_ASKED, RunRequest
from jettison.request.resolve import TRACED, Resolved, is_live, refuse_for_trace, resolve
from jettison.spec.device_allowance import FitBudget, Limit
from jettison.spec.hardware import Hardware, hardware, usual_hardware
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import anchored, placed

if TYPE_CHECKING:
    from jettison.search.auto_recompute import AutoForecast
    from jettison.search.largest_fit import FitAnswer, FittingChange


@dataclass(frozen=True, kw_only=True)
class LedgerFlags(CompileFlags):
    """Flags of `ledger` alone.

    Memory and GPU:
        gpu: GPU to fit, such as h100-80gb (`jettison list gpus`), or a hardware file.
        fit: Find the largest batch and sequence, and the smallest layout, that fit.

    Output:
        explain: Break the peak down, and state what each change would save.

    Traces:
        trace: Build the config.json's model and trace it (needs torch).
        compare: Compare with this ledger's JSON; exit code 4 where saved tensors differ.
    """

    gpu: str | None = None
    budget: app.Budget = None
    fit: Switch = False
    explain: Switch = False
    trace: Switch = field(default=False, metadata=app.LOCAL)
    compare: Path | None = field(default=None, metadata=app.LOCAL)


UNASKED = LedgerFlags()


@app.verb("ledger")
def command(
    model: app.Model = None,
    /,
    *,
    flags: Annotated[LedgerFlags, app.Flattened] = UNASKED,
    request: Annotated[RunRequest, app.Flattened] = NOTHING_ASKED,
    source: Annotated[RunSourceFlags, app.Flattened] = NO_SOURCE,
    form: Annotated[
        Literal["human", "json", "csv"],
        app.option(
            "Output", "human, json (--json for short), or csv of saved tensors.", name="--format", show_choices=False
        ),
    ] = "human",
    entries: Annotated[bool, app.option("Output", "Put saved tensors in JSON.", negative="--no-entries")] = True,
    out: app.Out = None,
    force: app.Force = False,
) -> None:
    """Show the memory of a training step, stage by stage: peak, states, and every tensor saved for backward.

    A preset or config.json is computed in closed form, without torch; a live model is traced. Exit code 3: the peak
    does not fit --gpu or --budget.
    """
    app.refuse_to_overwrite(out, force=force)
    model, request, source_file = sourced(model, request, source, verb="ledger")
    if source_file is not None and source_file.compile:
        flags = replace(flags, compile=True)
    with progress() as say, in_keys_of(source_file):
        report = ledger(model, request, flags, progress=say)
    report = replace(report, with_entries=entries)
    for warning in report.warnings:
        hint(f"note: {warning}")
    app.deliver(report.document, report.table, form=form, out=out, csv=report.csv, source=source_file)
    with app.answered():
        report.require()


def ledger(
    model: str, request: RunRequest, flags: LedgerFlags = UNASKED, *, progress: Progress = silent
) -> LedgerReport:
    """Make the ledger of a preset, of a config.json or of a live model.

    Raises:
        UsageError: no such model, or a request that makes no sense for it.
        TraceError: a live model cannot be recorded.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    compared = flags.compare
    other = None if compared is None else Ledger.from_json(read_text(compared, f"--compare: {compared}"))
    beyond = flags.fit or flags.explain or flags.compile or any(name not in TRACED for name in request.given())
    if is_live(model) or (flags.trace and (model in PRESETS or not beyond)):
        also = tuple(f"--{name}" for name in ("fit", "explain", "compile") if getattr(flags, name))
        refuse_for_trace(model, request, asked=flags.trace, also=also)
        limit = limit_of(budget=flags.budget, gpu=flags.gpu)
        report = replace(_live(model, request, progress), limit=limit)
    else:
        report = _described(model, request, flags)
    if other is None:
        return report
    own = report.ledger.on_rank(report.mesh_sizes)
    differences = tuple(compare(*in_step(own, other)))
    return replace(report, comparison=ComparedLedger(path=str(flags.compare), differences=differences))


def _live(model: str, request: RunRequest, progress: Progress) -> LedgerReport:
    require_known_file(model)
    progress("loading torch")
    from jettison.cli.live_model import live_ledger, model_request

    return live_ledger(model_request(model, request), recompute=request.recompute or "none", progress=progress)


def _described(model: str, request: RunRequest, flags: LedgerFlags) -> LedgerReport:
    """Make the ledger of a preset or of a config.json.

    Raises:
        UsageError: no such model, or a request that makes no sense for it.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    fit, gpu = flags.fit, flags.gpu
    asked = resolve(spec_of(model, request, live=True, trace=flags.trace), request)
    asked = replace(asked, run=replace(asked.run, compiled=True)) if flags.compile else asked
    asked = asked if gpu is None else replace(asked, run=placed(asked.run, hardware(gpu)))
    limit = limit_of(budget=flags.budget, gpu=gpu, run=asked.run)
    auto = asked.run.recompute.mode is Mode.AUTO
    device = usual_hardware(asked.run.kernels.device) if gpu is None else hardware(gpu)
    if limit is None and (fit or auto):
        flag = "--fit" if fit else "--recompute auto"
        raise UsageError(f"{flag} needs to know what to fit into; give --budget or --gpu")
    choice = _choose(asked, limit, device, anyway=fit) if limit is not None and auto else None
    budgets = () if limit is None else fit_budgets(asked.run, limit)
    run = asked.run
    if choice is None and run.recompute.whole == MOST:
        from jettison.search.largest_fit import settled

        run = settled(run, budgets)
    found = forecast(run) if choice is None else choice.forecast
    asked = replace(asked, run=found.run)
    explanation = None
    if flags.explain:
        from jettison.report.explain import explain

        explanation = explain(found, budgets=budgets, hardware=device)
    changes = None if explanation is None else explanation.changes
    answer = _fit(asked, budgets, choice, device, changes) if fit else None
    return replace(forecast_report(model, asked, found, choice), limit=limit, fit=answer, explanation=explanation)


def _choose(asked: Resolved, limit: Limit, device: Hardware, *, anyway: bool) -> AutoForecast:
    """Args: anyway: where nothing fits, what needs least, for who asks what would fit."""
    from jettison.search.auto_recompute import choose_with_whole, choose_within  # the planner takes its time to load

    run, device = anchored(asked.run, device)
    try:
        return choose_within(run, limit, device)
    except Infeasible as error:
        if not anyway:
            raise
        return choose_with_whole(run, error.minimum_budget_bytes, device)


def _fit(
    asked: Resolved,
    budgets: Sequence[FitBudget],
    choice: AutoForecast | None,
    device: Hardware,
    changes: tuple[FittingChange, ...] | None,
) -> FitAnswer:
    from jettison.search.largest_fit import fit, fitting_changes

    *surer, last = budgets
    if choice is None:
        found = fit(asked.run, budget_bytes=last.nbytes, surer=surer)
        if changes is None and found.peak_bytes > budgets[0].nbytes:
            changes = fitting_changes(asked.run, budgets, device)
        return replace(found, changes=changes or ())
    from jettison.search.auto_recompute import smallest_budget

    return fit(
        asked.run, budget_bytes=last.nbytes, surer=surer, peak=partial(smallest_budget, hardware=choice.hardware)
    )
