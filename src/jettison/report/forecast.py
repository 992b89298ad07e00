"""From a model and a request to the report that traced ledgers have as well."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jettison.errors import UsageError
from jettison.forecast.advice import advice
from jettison.forecast.allowance import allowance
from jettison.forecast.limit import Limit, limit_of
from jettison.forecast.request import Resolved, RunRequest, model_spec, resolve
from jettison.forecast.run import Forecast, Stage, forecast
from jettison.report.summary import LayerBytes, LedgerReport, Phase, StageBytes
from jettison.spec.run import Mode

if TYPE_CHECKING:
    from jettison.forecast.auto import AutoForecast
    from jettison.forecast.explanation import Explanation
    from jettison.forecast.fit import FitAnswer


def ledger_report(
    model: str,
    request: RunRequest,
    *,
    budget: str | None = None,
    gpu: str | None = None,
    fit: bool = False,
    explain: bool = False,
) -> LedgerReport:
    """What `jettison ledger` says of a preset or of a config.json.

    Args:
        budget, gpu: hold the peak against these.
        fit: answer, too, what would fit them.
        explain: answer, too, where the peak comes from.

    Raises:
        UsageError: no such model, or a request that makes no sense for it.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    asked = resolve(model_spec(model), request)
    limit = limit_of(budget=budget, gpu=gpu, run=asked.run)
    budget_bytes = None if limit is None else limit.nbytes
    auto = asked.run.recompute.mode is Mode.AUTO
    if budget_bytes is None and (fit or auto):
        flag = "--fit" if fit else "--recompute auto"
        raise UsageError(f"{flag} needs to know what to fit into; give --budget or --gpu")
    if fit and auto:
        raise UsageError("--fit looks for runs of one recompute mode; give another than auto")
    choice = _choose(asked, budget_bytes) if budget_bytes is not None and auto else None
    found = forecast(asked.run) if choice is None else choice.forecast
    return forecast_report(
        model, asked, found, limit=limit, choice=choice,
        fit=_fit(asked, budget_bytes) if fit and budget_bytes is not None else None,
        explanation=_explain(found, budget_bytes) if explain else None,
    )  # fmt: skip


def _choose(asked: Resolved, budget_bytes: int) -> AutoForecast:
    from jettison.forecast.auto import choose  # the planner takes its time to load

    return choose(asked.run, budget_bytes)


def _fit(asked: Resolved, budget_bytes: int) -> FitAnswer:
    from jettison.forecast.fit import fit

    return fit(asked.run, budget_bytes=budget_bytes)


def _explain(found: Forecast, budget_bytes: int | None) -> Explanation:
    from jettison.forecast.explain import explain

    return explain(found, budget_bytes=budget_bytes)


def forecast_report(
    name: str,
    asked: Resolved,
    found: Forecast,
    *,
    limit: Limit | None = None,
    choice: AutoForecast | None = None,
    fit: FitAnswer | None = None,
    explanation: Explanation | None = None,
) -> LedgerReport:
    """All that a forecast says.

    Args:
        name: of the model, as it was given.
        choice: the planner's that the forecast follows.
    """
    ledger = found.ledger()
    return LedgerReport(
        model=name,
        recompute=str(found.run.recompute),
        parameters=found.parameters,
        ledger=ledger,
        stages=tuple(_stage(stage) for stage in found.stages),
        phases=_phases(found.worst),
        warnings=advice(asked),
        rows=_rows(found, Counter(entry.layer for entry in ledger), _policies(found, choice)),
        mesh_sizes=found.run.layout.mesh_sizes,
        asked=asked,
        allowance=allowance(found.run, found.peak_bytes),
        limit=limit,
        choice=choice,
        fit=fit,
        explanation=explanation,
    )


def _policies(found: Forecast, choice: AutoForecast | None) -> dict[str, str]:
    """What happens to each region, in a word."""
    policies = {part.name: part.policy for part in found.parts}
    if choice is not None:
        from jettison.forecast.auto import layer_policies

        policies |= dict(layer_policies(choice))
    return policies


def _stage(stage: Stage) -> StageBytes:
    return StageBytes(
        stage=stage.index,
        layers=tuple(part.name for chunk in stage.parts for part in chunk),
        in_flight=stage.in_flight,
        activation_bytes=stage.activation_bytes,
        parameter_bytes=stage.static.parameters,
        gradient_bytes=stage.static.gradients,
        optimizer_bytes=stage.static.state,
        peak_bytes=stage.peak.nbytes,
        first_step_peak_bytes=stage.first_step_peak.nbytes,
        peak_phase=str(stage.peak.phase),
        peak_where=stage.peak.where,
    )


def _phases(stage: Stage) -> tuple[Phase, ...]:
    """Its timeline from the second step on, and what the same moments hold in the first."""
    return tuple(
        Phase(
            phase=str(later.phase), where=later.where, stage=stage.index, peak_bytes=later.nbytes,
            micro_batch=later.micro_batch if later.micro_batch >= 0 else None, first_step_peak_bytes=first.nbytes,
        )
        for later, first in zip(stage.timeline(), stage.timeline(first_step=True), strict=True)
    )  # fmt: skip


def _rows(found: Forecast, tensors: Counter[str], policies: dict[str, str]) -> tuple[LayerBytes, ...]:
    place = {part.name: stage.index for stage in found.stages for chunk in stage.parts for part in chunk}
    return tuple(
        LayerBytes(layer=name, bytes=nbytes, tensors=tensors[name], stage=place[name], policy=policies[name])
        for name, nbytes in found.layer_bytes()
    )
