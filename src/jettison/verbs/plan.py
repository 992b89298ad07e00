"""`plan`: a live model's, which can be applied and verified; or a described run's, stage by stage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jettison.errors import UsageError
from jettison.models.described import described_model
from jettison.models.model_types import require_known_file
from jettison.parse_units import parse_bytes
from jettison.predict.limit import Limit, limit_of
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import TRACED, flag_of, is_live, refuse_for_trace, resolve
from jettison.progress import Progress, silent
from jettison.report.plan import ForecastPlan, LayerChoice
from jettison.spec.hardware import Hardware, hardware, usual_hardware
from jettison.spec.presets import PRESETS
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run
from jettison.units import format_bytes

if TYPE_CHECKING:
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.verbs.live_model import PlanReport


def plan(
    model: str,
    request: RunRequest,
    *,
    budget: str | None,
    gpu: str | None = None,
    host_budget: str | None = None,
    what_if: bool = False,
    over_time: bool = False,
    progress: Progress = silent,
) -> PlanReport | ForecastPlan:
    """Plan a model.

    A live model or a config.json is traced; a preset, any model with a parallel layout, and a config.json for a GPU
    without a budget are planned from their spec.

    Args:
        gpu: what leaves less than the budget, and prices what is not run; left out, see `usual_hardware`.
        host_budget: of one rank, for what is offloaded; left out, the GPU's share of its host's memory.
        what_if: what each next GiB would change, too.
        over_time: of a live model, the predicted step's allocations, too.

    Raises:
        Infeasible: no plan fits.
        UsageError: no such model or GPU, a request that makes no sense, or a recompute mode beside the budget.
        TraceError: a live model cannot be recorded.
    """
    beyond = [name for name in request.given() if name not in TRACED]
    also = [flag for flag, given in (("--host-budget", host_budget), ("--what-if", what_if)) if given]
    for_gpu = gpu is not None and budget is None
    if not is_live(model) and (model in PRESETS or beyond or also or for_gpu):
        if over_time:
            raise UsageError(
                "got --timeline or --snapshot for a plan from a spec; `jettison estimate` writes them of such a step"
            )
        return _described(model, request, budget, gpu, host_budget, what_if)
    offload = bool(request.offload)
    device = None if gpu is None else hardware(gpu)
    if device is None and (offload or host_budget):
        raise UsageError("offloading needs a link to the host; give --gpu, a name or a file that states one")
    host = None if device is None else _host_budget(host_budget, offload, device)
    refuse_for_trace(model, replace(request, offload=None), asked=False, also=("--what-if",) if what_if else ())
    require_known_file(model)
    progress("loading torch")
    from jettison.verbs.live_model import live_plan, model_request

    limit = _limit(budget, gpu)
    return live_plan(
        model_request(model, replace(request, offload=None)),
        budget_bytes=limit.nbytes,
        hardware=device,
        offload=offload,
        host_budget_bytes=host,
        over_time=over_time,
        progress=progress,
    )


def _limit(budget: str | None, gpu: str | None, run: Run | None = None) -> Limit:
    limit = limit_of(budget=budget, gpu=gpu, run=run)
    if limit is None:
        raise UsageError("plan needs to know what to fit into; give --budget or --gpu")
    return limit


def _described(
    model: str, request: RunRequest, budget: str | None, gpu: str | None, host_budget: str | None, what_if: bool
) -> ForecastPlan:
    """Plan a preset or a config.json under its layout.

    Raises:
        Infeasible: some stage fits no choice.
        UsageError: no such model, a request that makes no sense, or a recompute mode beside the budget.
    """
    if request.recompute not in (None, "auto"):
        raise UsageError(f"got --recompute {request.recompute}: plan decides what is computed again; leave it away")
    for name in ("recompute_modules", "offload_modules"):
        if getattr(request, name) is not None:
            raise UsageError(
                f"got {flag_of(name)}: plan decides what is computed again and what goes to the host. `jettison export "
                "--to megatron` says a plan in such lists; `jettison ledger` and `estimate` say what a list takes"
            )
    from jettison.explain.layer_reasons import layer_reasons
    from jettison.explain.what_if import what_if as next_gib
    from jettison.predict.whole_plan import choose_with_whole

    run = resolve(
        described_model(model, request, live=True), replace(request, recompute="auto", offload=bool(request.offload))
    ).run
    whole = run.recompute.whole
    device = usual_hardware(run.kernels.device) if gpu is None else hardware(gpu)
    offload = request.offload
    if offload is None:  # a link is known where a GPU is named
        offload = gpu is not None and device.host_bytes_per_second is not None and not whole
    run = replace(run, recompute=Recompute(mode=Mode.AUTO, offload=offload, whole=whole))
    limit = _limit(budget, gpu, run)
    host = _host_budget(host_budget, offload, device)
    begin = time.perf_counter()
    choice = choose_with_whole(run, limit.nbytes, device, host_budget_bytes=host)
    seconds = time.perf_counter() - begin
    return ForecastPlan(
        model=model,
        choice=choice,
        layers=_layers(choice),
        reasons=layer_reasons(choice),
        solver_seconds=seconds,
        made_by=_made_by(model, request, budget, gpu, host_budget),
        what_if=tuple(next_gib(choice)) if what_if else None,
    )


def _made_by(
    model: str, request: RunRequest, budget: str | None, gpu: str | None, host_budget: str | None
) -> dict[str, Any]:
    """Return the request by field; files by their full paths."""
    asked = {name: getattr(request, name) for name in request.given()}
    named = {"model": model, "gpu": gpu}
    whole = {k: str(Path(v).resolve()) if v is not None and Path(v).exists() else v for k, v in named.items()}
    more = {"gpu": whole["gpu"], "budget": budget, "host_budget": host_budget}
    return {"model": whole["model"], **asked, **{name: value for name, value in more.items() if value is not None}}


def remade(made_by: Mapping[str, Any]) -> ForecastPlan:
    """The plan that a document says under ``made_by``.

    Raises:
        UsageError: it does not say enough, or something that is not known.
        Infeasible: it fits no longer.
    """
    fields = {f.name for f in dataclasses.fields(RunRequest)}
    known = fields | {"model", "budget", "gpu", "host_budget"}
    unknown = sorted(set(made_by) - known)
    if not isinstance(made_by.get("model"), str) or unknown:
        raise UsageError(
            f"the plan does not say how it was made (key made_by{f': {unknown[0]!r}' if unknown else ''}); make it "
            "again with jettison plan"
        )
    try:
        request = RunRequest(**{name: value for name, value in made_by.items() if name in fields})
        model, budget, gpu = made_by["model"], made_by.get("budget"), made_by.get("gpu")
        return _described(model, request, budget, gpu, made_by.get("host_budget"), what_if=False)
    except (TypeError, AttributeError) as error:
        raise UsageError(f"the plan's made_by cannot be read: {error}") from error


def _host_budget(text: str | None, offload: bool, device: Hardware) -> int | None:
    """Return the host budget in bytes.

    Raises:
        UsageError: nothing is offloaded, or the host has less.
    """
    if text is None:
        return None
    nbytes = parse_bytes(text)
    if not offload:
        raise UsageError(f"got --host-budget {text}, and nothing goes to the host; give --offload, or leave it away")
    there = device.host_memory_bytes
    if there is not None and nbytes > there:
        raise UsageError(
            f"got --host-budget {text}; the host of {device.name} has {format_bytes(there)} for each device. Give at "
            "most that, or another host_memory in the hardware's file"
        )
    return nbytes


def _layers(choice: AutoForecast) -> tuple[LayerChoice, ...]:
    """Return the layers' decisions, in the order of the model."""
    from jettison.predict.auto_recompute import layer_policies
    from jettison.predict.passes import passes_of

    run, policies = choice.forecast.run, dict(layer_policies(choice))
    found = {}
    for stage in choice.forecast.stages:
        for part in (part for chunk in stage.parts for part in chunk if part.is_layer):
            moved = frozenset[int]() if part.chosen is None else part.chosen.moved
            again = part.region.flops if part.inner else passes_of(part, run.gradient_rule).recompute_flops
            found[part.name] = LayerChoice(
                layer=part.name,
                stage=stage.index,
                policy=policies[part.name],
                kept_bytes=part.region.program.kept_bytes(part.kept - moved) if part.first else 0,
                offloaded_bytes=part.region.program.kept_bytes(moved),
                recompute_flops=again,
            )
    return tuple(found[name] for name in run.model.layer_names)
