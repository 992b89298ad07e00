"""`ledger`: what a run needs, of a description in closed form, of a live model from a trace; and whether two agree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jettison.errors import Infeasible, UsageError
from jettison.ledger.compare import compare, in_step
from jettison.ledger.ledger import Ledger
from jettison.models.described import described_model
from jettison.models.model_types import require_known_file
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.limit import limit_of
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import TRACED, Resolved, is_live, refuse_for_trace, resolve
from jettison.predict.whole_micro_batches import settled
from jettison.progress import Progress, silent
from jettison.report.forecast import forecast_report
from jettison.report.summary import Comparison, LedgerReport
from jettison.spec.presets import PRESETS
from jettison.spec.recompute import Mode

if TYPE_CHECKING:
    from jettison.explain.figures import Explanation
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.predict.largest import FitAnswer


def ledger(
    model: str,
    request: RunRequest,
    *,
    trace: bool = False,
    budget: str | None = None,
    gpu: str | None = None,
    fit: bool = False,
    explain: bool = False,
    compiled: bool = False,
    against: Path | None = None,
    progress: Progress = silent,
) -> LedgerReport:
    """Make the ledger of a preset, of a config.json or of a live model.

    Args:
        trace: build a config's model and trace it: one rank of it as it is built, or its blocks under a layout.
        budget, gpu: hold the peak against these.
        fit: answer, too, what would fit them.
        explain: answer, too, where the peak comes from.
        compiled: each layer is compiled by itself.
        against: another ledger's document, to be compared with this one.

    Raises:
        UsageError: no such model, or a request that makes no sense for it.
        TraceError: a live model cannot be recorded.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    other = None if against is None else _read(against)
    beyond = fit or explain or compiled or any(name not in TRACED for name in request.given())
    if is_live(model) or (trace and (model in PRESETS or not beyond)):
        also = tuple(flag for flag, given in (("--fit", fit), ("--explain", explain), ("--compile", compiled)) if given)
        refuse_for_trace(model, request, asked=trace, also=also)
        limit = limit_of(budget=budget, gpu=gpu)
        report = replace(_live(model, request, progress), limit=limit)
    else:
        report = _described(
            model, request, budget=budget, gpu=gpu, fit=fit, explain=explain, compiled=compiled, trace=trace
        )
    if other is None:
        return report
    own = report.ledger.on_rank(report.mesh_sizes)
    return replace(report, comparison=Comparison(path=str(against), differences=tuple(compare(*in_step(own, other)))))


def _live(model: str, request: RunRequest, progress: Progress) -> LedgerReport:
    require_known_file(model)
    progress("loading torch")
    from jettison.verbs.live_model import live_ledger, model_request

    return live_ledger(model_request(model, request), recompute=request.recompute or "none", progress=progress)


def _described(
    model: str,
    request: RunRequest,
    *,
    budget: str | None,
    gpu: str | None,
    fit: bool,
    explain: bool,
    compiled: bool,
    trace: bool,
) -> LedgerReport:
    """Make the ledger of a preset or of a config.json.

    Args:
        budget, gpu: hold the peak against these.
        fit: answer, too, what would fit them.
        explain: answer, too, where the peak comes from.
        compiled: each layer is compiled by itself.
        trace: its blocks are recorded even if it has a closed form.

    Raises:
        UsageError: no such model, or a request that makes no sense for it.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    asked = resolve(described_model(model, request, live=True, trace=trace), request)
    asked = replace(asked, run=replace(asked.run, compiled=True)) if compiled else asked
    limit = limit_of(budget=budget, gpu=gpu, run=asked.run)
    budget_bytes = None if limit is None else limit.nbytes
    auto = asked.run.recompute.mode is Mode.AUTO
    if budget_bytes is None and (fit or auto):
        flag = "--fit" if fit else "--recompute auto"
        raise UsageError(f"{flag} needs to know what to fit into; give --budget or --gpu")
    choice = _choose(asked, budget_bytes, gpu, anyway=fit) if budget_bytes is not None and auto else None
    found = forecast(settled(asked.run, budget_bytes)) if choice is None else choice.forecast
    asked = replace(asked, run=found.run)
    return forecast_report(
        model,
        asked,
        found,
        limit=limit,
        choice=choice,
        fit=_fit(asked, budget_bytes, choice) if fit and budget_bytes is not None else None,
        explanation=_explain(found, budget_bytes) if explain else None,
    )


def _choose(asked: Resolved, budget_bytes: int, gpu: str | None, *, anyway: bool) -> AutoForecast:
    """Args: anyway: where nothing fits, what needs least, for who asks what would fit."""
    from jettison.predict.whole_plan import choose_with_whole  # the planner takes its time to load
    from jettison.spec.hardware import hardware, usual_hardware

    device = usual_hardware(asked.run.kernels.device) if gpu is None else hardware(gpu)
    try:
        return choose_with_whole(asked.run, budget_bytes, device)
    except Infeasible as error:
        if not anyway:
            raise
        return choose_with_whole(asked.run, error.minimum_budget_bytes, device)


def _fit(asked: Resolved, budget_bytes: int, choice: AutoForecast | None) -> FitAnswer:
    from jettison.predict.largest import fit

    if choice is None:
        return fit(asked.run, budget_bytes=budget_bytes)
    from jettison.predict.auto_recompute import smallest_budget

    return fit(asked.run, budget_bytes=budget_bytes, peak=partial(smallest_budget, hardware=choice.hardware))


def _explain(found: Forecast, budget_bytes: int | None) -> Explanation:
    from jettison.explain.peak import explain

    return explain(found, budget_bytes=budget_bytes)


def _read(path: Path) -> Ledger:
    """Read one rank's ledger from a document of `jettison ledger --format json`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--compare: {path} cannot be read: {error}") from None
    return Ledger.from_json(text)
