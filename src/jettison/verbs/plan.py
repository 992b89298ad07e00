"""`plan`: a live model's, which can be applied and verified; or a described run's, stage by stage."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from jettison.errors import UsageError
from jettison.predict.limit import Limit, limit_of
from jettison.predict.run_request import TRACED, RunRequest, is_live, model_spec, refuse_for_trace, resolve
from jettison.progress import Progress, silent
from jettison.report.plan import ForecastPlan, LayerChoice
from jettison.spec.hardware import hardware, usual_hardware
from jettison.spec.presets import PRESETS
from jettison.spec.run import Mode, Recompute, Run

if TYPE_CHECKING:
    from jettison.verbs.live_model import PlanReport


def plan(
    model: str, request: RunRequest, *, budget: str | None, gpu: str | None = None, progress: Progress = silent
) -> PlanReport | ForecastPlan:
    """What `jettison plan` answers.

    A live model or a config.json is traced; a preset, or any model with a parallel layout, is planned from its spec.

    Args:
        gpu: what leaves less than the budget, and prices what is not run; left out, see `usual_hardware`.

    Raises:
        Infeasible: no plan fits.
        UsageError: no such model or GPU, a request that makes no sense, or a recompute mode beside the budget.
        TraceError: a live model cannot be recorded.
    """
    beyond = [name for name in request.given() if name not in TRACED]
    if not is_live(model) and (model in PRESETS or beyond):
        return _described(model, request, budget, gpu)
    refuse_for_trace(model, request, asked=False)
    progress("loading torch")
    from jettison.verbs.live_model import live_plan, model_request

    limit = _limit(budget, gpu)
    device = None if gpu is None else hardware(gpu)
    return live_plan(model_request(model, request), budget_bytes=limit.nbytes, hardware=device, progress=progress)


def _limit(budget: str | None, gpu: str | None, run: Run | None = None) -> Limit:
    limit = limit_of(budget=budget, gpu=gpu, run=run)
    if limit is None:
        raise UsageError("plan needs to know what to fit into; give --budget or --gpu")
    return limit


def _described(model: str, request: RunRequest, budget: str | None, gpu: str | None) -> ForecastPlan:
    """Plan a preset or a config.json under its layout.

    Raises:
        Infeasible: some stage fits no choice.
        UsageError: no such model, a request that makes no sense, or a recompute mode beside the budget.
    """
    if request.recompute not in (None, "auto"):
        raise UsageError(f"got --recompute {request.recompute} and --budget: plan decides what is computed again")
    from jettison.predict.auto_recompute import choose, layer_policies
    from jettison.predict.timeline_units import passes_of

    run = resolve(model_spec(model), replace(request, recompute="none")).run
    run = replace(run, recompute=Recompute(mode=Mode.AUTO))
    limit = _limit(budget, gpu, run)
    device = usual_hardware(run.kernels.device) if gpu is None else hardware(gpu)
    begin = time.perf_counter()
    choice = choose(run, limit.nbytes, device)
    seconds = time.perf_counter() - begin
    policies = dict(layer_policies(choice))
    layers = tuple(
        LayerChoice(
            layer=part.name,
            stage=stage.index,
            policy=policies[part.name],
            offloaded_bytes=0,
            kept_bytes=part.region.program.kept_bytes(part.kept),
            recompute_flops=passes_of(part, run.precision.gradient).recompute_flops,
        )
        for stage in choice.forecast.stages
        for chunk in stage.parts
        for part in chunk
        if part.is_layer
    )
    ordered = tuple(sorted(layers, key=lambda entry: run.model.layer_names.index(entry.layer)))
    return ForecastPlan(model=model, choice=choice, layers=ordered, solver_seconds=seconds)
