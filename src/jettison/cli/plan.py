"""`plan`: a live model's, which can be applied and verified; or a described run's, stage by stage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jettison.cli import app
from jettison.cli.app import CompileFlags, Switch
from jettison.cli.from_file import NO_SOURCE, RunSourceFlags, in_keys_of, sourced, spec_of
from jettison.core.errors import Infeasible, UsageError
from jettison.core.files import write_whole
from jettison.core.objects import renamed, with_former_names
from jettison.core.parse_units import parse_bytes
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes
from jettison.families.presets import PRESETS
from jettison.models.model_types import require_known_file
from jettison.predict.forecast import limit_of
from jettison.report.console import hint, json_text, progress
from jettison.report.plan import ForecastPlan, LayerChoice, infeasible_document
from jettison.request.options import DECIDED, NOTHING_ASKED, RunRequest
from jettison.request.resolve import TRACED, flag_of, is_live, refuse_for_trace, resolve
from jettison.spec.device_allowance import Limit
from jettison.spec.hardware import Hardware, hardware, usual_hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run, anchored

if TYPE_CHECKING:
    from jettison.cli.live_model import PlanReport
    from jettison.search.auto_recompute import AutoForecast


@dataclass(frozen=True, kw_only=True)
class PlanFlags(CompileFlags):
    """Flags of `plan` alone.

    Memory and GPU:
        gpu: GPU to fit, such as h100-80gb (`jettison list gpus`), or a hardware file.

    Recompute and offload:
        host_budget: Limit of CPU memory a rank: 128GiB [default: the machine's].

    Output:
        what_if: State what each additional GiB would change.
        timeline: File for the planned step (ui.perfetto.dev), of a live model.
        snapshot: File for its allocations, as a CUDA memory snapshot.
    """

    budget: app.Budget = None
    gpu: str | None = None
    host_budget: str | None = None
    what_if: Switch = False
    timeline: Path | None = field(default=None, metadata=app.LOCAL)
    snapshot: Path | None = field(default=None, metadata=app.LOCAL)


UNASKED = PlanFlags()


@app.verb("plan")
def command(
    model: app.Model = None,
    /,
    *,
    flags: Annotated[PlanFlags, app.Flattened] = UNASKED,
    request: Annotated[RunRequest, app.Flattened] = NOTHING_ASKED,
    source: Annotated[RunSourceFlags, app.Flattened] = NO_SOURCE,
    write: Annotated[
        bool, app.option("Output", "Write a copy of the --from file with the nearest recompute settings.", **app.ON)
    ] = False,
    form: app.Format = "human",
    out: app.Out = None,
    force: app.Force = False,
) -> None:
    """Plan which saved tensors to keep, recompute or offload, so that a training step fits a budget.

    A preset, a parallel layout or --gpu alone is planned in closed form, without torch. Otherwise a live model or
    config.json is traced; that plan can be applied and verified. Exit code 3: nothing fits.
    """
    app.refuse_to_overwrite(out, flags.timeline, flags.snapshot, force=force)
    back = _written_name(source, write, force=force)
    model, request, source_file = sourced(model, request, source, verb="plan", decides=DECIDED)
    if source_file is not None and source_file.compile:
        flags = replace(flags, compile=True)
    try:
        with progress() as say, in_keys_of(source_file):
            report = plan(model, request, flags, progress=say)
    except Infeasible as error:
        if form == "json":
            print(json_text(infeasible_document(error, said(model, request, flags))), end="")
            raise app.Answered(error) from None
        raise
    warnings = getattr(report, "warnings", ())
    app.deliver(report.document, report.table, form=form, out=out, source=source_file, warnings=warnings)
    if back is not None and source_file is not None:
        from jettison.frameworks.write_back import write_back

        if not isinstance(report, ForecastPlan):
            raise UsageError(
                f"got --write for the plan of a live model; {back.name} can be written for a described run"
            )
        made = write_back(source_file, report.choice, limit=report.limit, others=tuple(source.from_file or ())[1:])
        write_whole(back, made.text)
        for line in (*made.lines(), f"wrote {back}"):
            hint(line)
    step = getattr(report, "step", None)
    if step is not None:
        from jettison.report.timeline_files import write_timelines

        for line in write_timelines(model, [step], timeline=flags.timeline, snapshot=flags.snapshot):
            hint(line)


def _written_name(source: RunSourceFlags, write: bool, *, force: bool) -> Path | None:
    """The new file, which is free to be written; None where none was asked for."""
    if not write:
        return None
    if not source.from_file:
        raise UsageError("got --write without --from, whose file it writes again; omit it")
    from jettison.frameworks.config_file import split_name

    path, _ = split_name(source.from_file[0])
    back = path.with_name(f"{path.stem}.planned{path.suffix}")
    if back.exists() and not force:
        raise UsageError(f"{back} is there already; give --force to replace it")
    return back


def said(model: str, request: RunRequest, flags: PlanFlags) -> dict[str, Any]:
    """The request, as documents have it."""
    return app.asked(model=model, flags=replace(flags, timeline=None, snapshot=None), request=request)


def plan(
    model: str, request: RunRequest, flags: PlanFlags = UNASKED, *, progress: Progress = silent
) -> PlanReport | ForecastPlan:
    """Plan a model.

    A live model or a config.json is traced; a preset, any model with a parallel layout, and a config.json for a GPU
    without a budget are planned from their spec.

    Raises:
        Infeasible: no plan fits.
        UsageError: no such model or GPU, an invalid request, or a recompute mode with a budget.
        TraceError: a live model cannot be recorded.
    """
    gpu, what_if = flags.gpu, flags.what_if
    over_time = flags.timeline is not None or flags.snapshot is not None
    beyond = [name for name in request.given() if name not in TRACED]
    also = flags.host_budget or what_if or flags.compile
    for_gpu = gpu is not None and flags.budget is None
    if not is_live(model) and (model in PRESETS or beyond or also or for_gpu):
        if over_time:
            raise UsageError(
                "got --timeline or --snapshot for a plan from a spec; `jettison estimate` writes them of such a step"
            )
        return _described(model, request, flags)
    offload = bool(request.offload)
    device = None if gpu is None else hardware(gpu)
    if device is None and (offload or flags.host_budget):
        raise UsageError("offloading needs a link to the host; give --gpu, a name or a file that states one")
    host = None if device is None else _host_budget(flags.host_budget, offload, device)
    over = tuple(flag_of(name) for name in ("what_if", "compile") if getattr(flags, name))
    refuse_for_trace(model, replace(request, offload=None), asked=False, also=over)
    require_known_file(model)
    progress("loading torch")
    from jettison.cli.live_model import live_plan, model_request

    limit = _limit(flags)
    return live_plan(
        model_request(model, replace(request, offload=None)),
        budget_bytes=limit.nbytes,
        hardware=device,
        offload=offload,
        host_budget_bytes=host,
        over_time=over_time,
        progress=progress,
    )


def _limit(flags: PlanFlags, run: Run | None = None) -> Limit:
    limit = limit_of(budget=flags.budget, gpu=flags.gpu, run=run)
    if limit is None:
        raise UsageError("plan needs to know what to fit into; give --budget or --gpu")
    return limit


def _described(model: str, request: RunRequest, flags: PlanFlags) -> ForecastPlan:
    """Plan a preset or a config.json under its layout.

    Raises:
        Infeasible: some stage fits no choice.
        UsageError: no such model, an invalid request, or a recompute mode with a budget.
    """
    if request.recompute not in (None, "auto"):
        raise UsageError(f"got --recompute {request.recompute}: plan decides what is recomputed; drop it")
    for name in ("recompute_modules", "offload_modules"):
        if getattr(request, name) is not None:
            raise UsageError(
                f"got {flag_of(name)}: plan decides what is recomputed and what is offloaded. `jettison export` "
                "says a plan in such lists; `jettison ledger` and `estimate` say what a list takes"
            )
    from jettison.report.alternatives import MOST_STEPS, layer_reasons
    from jettison.report.alternatives import what_if as next_gib
    from jettison.report.ledger import idle
    from jettison.search.auto_recompute import choose_within

    given = replace(request, recompute="auto", offload=bool(request.offload))
    resolved = resolve(spec_of(model, request, live=True), given)
    run, whole = resolved.run, resolved.run.recompute.whole
    device = usual_hardware(run.kernels.device) if flags.gpu is None else hardware(flags.gpu)
    offload = request.offload
    if offload is None:  # a link is known where a GPU is named
        offload = flags.gpu is not None and device.host_bytes_per_second is not None and not whole
    recompute = Recompute(mode=Mode.AUTO, offload=offload, whole=whole)
    run = replace(run, recompute=recompute, compiled=flags.compile)
    run, device = anchored(run, device)
    limit = _limit(flags, run)
    host = _host_budget(flags.host_budget, offload, device)
    begin = time.perf_counter()
    choice = choose_within(run, limit, device, host_budget_bytes=host)
    seconds = time.perf_counter() - begin
    return ForecastPlan(
        model=model,
        choice=choice,
        layers=_layers(choice),
        reasons=layer_reasons(choice),
        solver_seconds=seconds,
        made_by=_made_by(model, request, flags),
        what_if=tuple(next_gib(choice, steps=MOST_STEPS if flags.what_if else 1)),
        all_next=flags.what_if,
        limit=limit,
        idle=tuple(idle(resolved)),
    )


def _made_by(model: str, request: RunRequest, flags: PlanFlags) -> dict[str, Any]:
    """Return the request by field; files by their full paths."""
    given = with_former_names(RunRequest, {name: getattr(request, name) for name in request.given()})
    named = {"model": model, "gpu": flags.gpu, "anchor": request.anchor}
    whole = {k: str(Path(v).resolve()) if v is not None and Path(v).exists() else v for k, v in named.items()}
    more: dict[str, Any] = {"gpu": whole["gpu"], "budget": flags.budget, "host_budget": flags.host_budget}
    more["compile"] = flags.compile or None
    more["anchor"] = whole["anchor"]
    return {"model": whole["model"], **given, **{name: value for name, value in more.items() if value is not None}}


def remade(made_by: Mapping[str, Any]) -> ForecastPlan:
    """The plan that a document says under ``made_by``.

    Raises:
        UsageError: it does not say enough, or something that is not known.
        Infeasible: it fits no longer.
    """
    fields = {f.name for f in dataclasses.fields(RunRequest)}
    made_by = renamed(RunRequest, made_by)
    known = fields | {"model", "budget", "gpu", "host_budget", "compile"}
    unknown = sorted(set(made_by) - known)
    if not isinstance(made_by.get("model"), str) or unknown:
        raise UsageError(
            f"the plan does not say how it was made (key made_by{f': {unknown[0]!r}' if unknown else ''}); make it "
            "again with jettison plan"
        )
    try:
        request = RunRequest(**{name: value for name, value in made_by.items() if name in fields})
        budget, gpu, host_budget = map(made_by.get, ("budget", "gpu", "host_budget"))
        flags = PlanFlags(budget=budget, gpu=gpu, host_budget=host_budget, compile=bool(made_by.get("compile")))
        return _described(made_by["model"], request, flags)
    except (TypeError, AttributeError) as error:
        raise UsageError(f"the plan's made_by cannot be read: {error}") from error


def _host_budget(text: str | None, offload: bool, device: Hardware) -> int | None:
    """Return the host budget in bytes. Raise `UsageError` if nothing is offloaded, or the host has less."""
    if text is None:
        return None
    nbytes = parse_bytes(text)
    if not offload:
        raise UsageError(f"got --host-budget {text}, and nothing is offloaded; give --offload, or drop --host-budget")
    there = device.host_memory_bytes
    if there is not None and nbytes > there:
        raise UsageError(
            f"got --host-budget {text}; {device.name} has {format_bytes(there)} of CPU memory a device. Give at "
            "most that, or another host_memory in the hardware's file"
        )
    return nbytes


def _layers(choice: AutoForecast) -> tuple[LayerChoice, ...]:
    """Return the layers' decisions, in the order of the model."""
    from jettison.predict.stages import passes_of
    from jettison.search.auto_recompute import layer_policies

    run, policies = choice.forecast.run, dict(layer_policies(choice))
    found = {}
    for stage in choice.forecast.stages:
        for part in (part for chunk in stage.parts for part in chunk if part.is_layer):
            moved = frozenset[int]() if part.chosen is None else part.chosen.offloaded
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
