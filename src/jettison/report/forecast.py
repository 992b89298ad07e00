"""A forecast in the form that ledgers of live models have as well."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jettison.explain.advice import advice, routing
from jettison.predict.allowance import allowance
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.limit import Limit
from jettison.predict.run_request import Resolved
from jettison.report.summary import LayerRow, LedgerReport, PhaseRow, StageBytes
from jettison.spec.precision import Gradients

if TYPE_CHECKING:
    from jettison.explain.figures import Explanation
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.predict.largest import FitAnswer


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
        warnings=(*advice(asked), *(routing(found) if choice is None else ())),
        rows=_rows(found, Counter(entry.layer for entry in ledger), _policies(found, choice)),
        mesh_sizes=found.run.layout.mesh_sizes,
        asked=asked,
        allowance=allowance(found.run, found.peak_bytes),
        host_states=found.host_states,
        limit=limit,
        choice=choice,
        fit=fit,
        explanation=explanation,
    )


def _policies(found: Forecast, choice: AutoForecast | None) -> dict[str, str]:
    """What happens to each region, in a word."""
    policies = {part.name: part.policy for part in found.parts}
    if choice is not None:
        from jettison.predict.auto_recompute import layer_policies

        policies |= dict(layer_policies(choice))
    return policies


def _stage(stage: Stage) -> StageBytes:
    return StageBytes(
        stage=stage.index,
        layers=tuple(part.name for chunk in stage.parts for part in chunk),
        in_flight=stage.in_flight,
        activation_bytes=stage.activation_bytes,
        parameter_bytes=stage.static.parameters,
        gradient_bytes=0 if stage.load.gradients is Gradients.IN_BACKWARD else stage.static.gradients,
        optimizer_bytes=stage.static.state,
        peak_bytes=stage.peak.nbytes,
        first_step_peak_bytes=stage.first_step_peak.nbytes,
        peak_phase=str(stage.peak.phase),
        peak_where=stage.peak.where,
    )


def _phases(stage: Stage) -> tuple[PhaseRow, ...]:
    """Its timeline from the second step on, and what the same moments hold in the first."""
    return tuple(
        PhaseRow(
            phase=str(later.phase),
            where=later.where,
            stage=stage.index,
            peak_bytes=later.nbytes,
            micro_batch=later.micro_batch if later.micro_batch >= 0 else None,
            first_step_peak_bytes=first.nbytes,
        )
        for later, first in zip(stage.timeline(), stage.timeline(first_step=True), strict=True)
    )


def _rows(found: Forecast, tensors: Counter[str], policies: dict[str, str]) -> tuple[LayerRow, ...]:
    place = {part.name: stage.index for stage in found.stages for chunk in stage.parts for part in chunk}
    return tuple(
        LayerRow(layer=name, bytes=nbytes, tensors=tensors[name], stage=place[name], policy=policies[name])
        for name, nbytes in found.layer_bytes()
    )
