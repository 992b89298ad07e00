"""A forecast in the form that ledgers of live models have as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jettison.core.units import format_bytes
from jettison.predict.allowance import allowance
from jettison.predict.forecast import Forecast, Stage, forecast_sizes
from jettison.predict.limit import Limit
from jettison.predict.run_request import Resolved, flag_of
from jettison.report.summary import LayerRow, LedgerReport, PhaseRow, StageBytes
from jettison.spec.kernels import AttentionKernel
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.predict.largest import FitAnswer
    from jettison.report.explain import Explanation


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


# warnings -------------------------------------------------------------------------------------------------------------


def advice(asked: Resolved) -> tuple[str, ...]:
    """Remarks about a run, the weightiest first; empty where there are none."""
    run = asked.run
    found = [*run.model.left_out, *_recompute(run), *_tensor_parallel(run)]
    layout, model = run.layout, run.model
    if run.seq > model.max_positions:
        found.append(f"--seq {run.seq} is more than the {model.max_positions} positions that {model.name} is made for")
    if layout.zero and layout.shards == 1 and not run.gathers_parameters:
        found.append(f"--zero {layout.zero} shards nothing: there is one data-parallel rank; give --dp")
    return (*found, *_idle(asked))


_ALONE: Final = {
    "without a pipeline; give --pp": ("schedule", "keep_stage_outputs", "keep_received", "stage_buffers"),
    "where nothing is sharded; give --zero": ("zero_replicas",),
    "without context parallelism; give --cp": ("context_exchange",),
}
"""Flags that need another one, by what is said."""
_OF_EXPERTS: Final = (
    "capacity_factor",
    "dispatcher",
    "expert_tp",
    "sequential_experts",
    "deterministic",
    "ep_comm_overlap",
)


def _idle(asked: Resolved) -> Iterator[str]:
    """What was typed and has no effect on this model or layout."""
    run, layout = asked.run, asked.run.layout
    lacking = dict(zip(_ALONE, (layout.pp == 1, layout.zero == 0, layout.cp == 1), strict=True))
    for why, names in _ALONE.items():
        yield from (f"{flag_of(name)} does nothing {why}" for name in _typed(asked, names) if lacking[why])
    if not any(layer.experts for layer in run.model.kinds):
        idle = _typed(asked, _OF_EXPERTS)
        yield from (f"{flag_of(name)} does nothing: {run.model.name} has no experts" for name in idle)


def _typed(asked: Resolved, names: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if name not in asked.assumed)


UNEVEN: Final = 1.25
"""Times an even share: what is said beside the even figure. A choice, to show how much depends on it; not measured."""


def routing(found: Forecast) -> Iterator[str]:
    """What ranks that share experts hold is a range: how tokens are spread over them is not known beforehand."""
    run = found.run
    ranks = run.layout.ep
    if ranks == 1 or run.imbalance > 1 or run.capacity_factor is not None:
        return
    uneven = min(UNEVEN, float(ranks))
    peak = forecast_sizes(replace(run, imbalance=uneven)).peak_bytes
    yield (
        f"tokens are taken to be spread evenly over the ranks of --ep; one that is sent {uneven:g} times its share "
        f"peaks at {format_bytes(peak)}, not {format_bytes(found.peak_bytes)} (--expert-imbalance {uneven:g})"
    )


def _recompute(run: Run) -> Iterator[str]:
    if run.recompute.mode is Mode.SELECTIVE and run.kernels.attention is AttentionKernel.FLASH:
        yield (
            "selective recomputation drops attention scores, which flash attention never stores: it saves nothing "
            "here. Use --recompute selective-op, every:K or full"
        )


def _tensor_parallel(run: Run) -> Iterator[str]:
    layout = run.layout
    if layout.tp > 1 and not layout.sp and run.model.words:
        yield (
            f"without sequence parallelism all {layout.tp} tensor-parallel ranks hold what stands between the "
            "products whole (norms, dropouts, residuals); --sp shards it"
        )
    if layout.tp == 1 and layout.sp:
        yield "--sp does nothing without tensor parallelism; give --tp"
    if layout.tp == 1 and run.tp_comm_overlap:
        yield "--tp-comm-overlap does nothing without tensor parallelism; give --tp"
    if layout.gathered_inputs and layout.tp > 1 and layout.sp:
        yield (
            f"--gathered-inputs: each rank holds the whole input of its column-parallel products, {layout.tp} times "
            "the shard that Megatron keeps and gathers again"
        )
    elif layout.gathered_inputs:
        yield "--gathered-inputs does nothing without sequence parallelism"
