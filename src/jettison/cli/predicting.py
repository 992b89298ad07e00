"""Commands that answer before anything runs: `ledger`, `estimate`, `plan`, `search`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from jettison.cli.output import Answered, answered, asked, deliver, refuse_to_overwrite
from jettison.cli.parameters import Budget, Force, Format, Out, app
from jettison.errors import Infeasible
from jettison.predict.run_fields import RunRequest
from jettison.processors import cores
from jettison.report.console import hint, progress
from jettison.report.json_text import json_text
from jettison.report.summary import LedgerReport
from jettison.search.request import MARGIN, SearchRequest

if TYPE_CHECKING:
    from rich.console import RenderableType


Tokens = Annotated[float | None, Parameter(help="Tokens to train on, such as 1e12: says how many days.")]
Price = Annotated[float | None, Parameter(help="With --tokens: of one GPU, to say what they cost.")]
NOTHING_ASKED = RunRequest()
NOTHING_FIXED = SearchRequest()


@app.command
def ledger(
    model: Annotated[
        str, Parameter(help="A preset such as llama3-8b, a config.json or its folder, or module:factory.")
    ],
    /,
    *,
    request: Annotated[RunRequest, Parameter(name="*")] = NOTHING_ASKED,
    gpu: Annotated[str | None, Parameter(help="Hold the peak against this GPU, such as h100-80gb.")] = None,
    budget: Budget = None,
    fit: Annotated[
        bool, Parameter(negative="", show_default=False, help="Say what would fit --gpu or --budget.")
    ] = False,
    explain: Annotated[bool, Parameter(negative="", show_default=False, help="Say what the peak is made of.")] = False,
    compiled: Annotated[
        bool, Parameter(name="--compile", negative="", show_default=False, help="Each layer is compiled by torch.")
    ] = False,
    trace: Annotated[
        bool, Parameter(negative="", show_default=False, help="Build a config's model and trace it (needs torch).")
    ] = False,
    compare: Annotated[Path | None, Parameter(help="Another ledger's JSON: exit code 4 where it differs.")] = None,
    form: Annotated[Literal["human", "json", "csv"], Parameter(name="--format", help="CSV has the entries.")] = "human",
    entries: Annotated[bool, Parameter(negative="--no-entries", help="Every saved tensor in JSON.")] = True,
    out: Out = None,
    force: Force = False,
) -> None:
    """What a training run needs: bytes of each stage over a step, and the tensors that it saves for backward.

    Of a preset or a config.json this is worked out, without torch; a live model is traced. With --gpu or --budget the
    exit code is 3 where the peak does not fit.
    """
    refuse_to_overwrite(out, force=force)
    from jettison.verbs.ledger import ledger as read

    with progress() as say:
        report = read(
            model,
            request,
            trace=trace,
            budget=budget,
            gpu=gpu,
            fit=fit,
            explain=explain,
            compiled=compiled,
            against=compare,
            progress=say,
        )
    report = replace(report, with_entries=entries)
    for warning in report.warnings:
        hint(f"note: {warning}")
    deliver(report.document, lambda: _ledger_table(report), form=form, out=out, csv=report.csv)
    with answered():
        report.require()


@app.command
def estimate(
    model: Annotated[str, Parameter(help="A preset such as llama3-8b, or a config.json or its folder.")],
    /,
    *,
    gpu: Annotated[str, Parameter(help="The accelerator, such as h100-80gb, or a TOML file.")],
    request: Annotated[RunRequest, Parameter(name="*")] = NOTHING_ASKED,
    compiled: Annotated[
        bool, Parameter(name="--compile", negative="", show_default=False, help="Kernels fused as torch.compile does.")
    ] = False,
    explain: Annotated[
        bool, Parameter(negative="", show_default=False, help="Where the time goes, and what else could be chosen.")
    ] = False,
    tokens: Tokens = None,
    price_per_gpu_hour: Price = None,
    timeline: Annotated[
        Path | None, Parameter(help="Write the first two steps there, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    snapshot: Annotated[
        Path | None, Parameter(help="Write their allocations there as a CUDA memory snapshot: device n is stage n.")
    ] = None,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """What a training step takes: seconds, tokens a second, MFU, and what the time goes into."""
    for path in (out, timeline, snapshot):
        refuse_to_overwrite(path, force=force)
    from jettison.verbs.estimate import estimate as answer

    with progress() as say:
        say("estimating")
        report = answer(
            model,
            request,
            gpu=gpu,
            compiled=compiled,
            explain=explain,
            tokens=tokens,
            price_per_gpu_hour=price_per_gpu_hour,
        )
    for warning in report.warnings:
        hint(f"note: {warning}")
    deliver(report.document, report.table, form=form, out=out)
    if timeline is not None or snapshot is not None:
        from jettison.verbs.snapshots import write_step_files

        for line in write_step_files(report, timeline=timeline, snapshot=snapshot):
            hint(line)


@app.command
def plan(
    model: Annotated[
        str, Parameter(help="A preset such as llama3-8b, a config.json or its folder, or module:factory.")
    ],
    /,
    *,
    budget: Annotated[
        str | None, Parameter(help="Peak bytes of a training step, with a unit: 20GiB, 500MB, 123456B.")
    ] = None,
    gpu: Annotated[str | None, Parameter(help="What this GPU leaves, such as h100-80gb, and its speed.")] = None,
    host_budget: Annotated[
        str | None, Parameter(help="Bytes of the host for what one rank offloads: 128GiB; else what there is.")
    ] = None,
    what_if: Annotated[
        bool, Parameter(negative="", show_default=False, help="What each next GiB would change, of a preset or config.")
    ] = False,
    timeline: Annotated[
        Path | None, Parameter(help="Write a live model's planned step there, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    snapshot: Annotated[Path | None, Parameter(help="Write its allocations there as a CUDA memory snapshot.")] = None,
    request: Annotated[RunRequest, Parameter(name="*")] = NOTHING_ASKED,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """What to do with each saved tensor so that a training step stays below a budget.

    A live model or a config.json is traced, and the plan can be applied to it and verified. A preset, any model with a
    parallel layout, and a config.json with --gpu alone are planned from their spec, for each pipeline stage, without
    torch: with --gpu layers may also offload, unless --no-offload says otherwise. A live model's layers may with
    --offload; --gpu says over which link.
    """
    for path in (out, timeline, snapshot):
        refuse_to_overwrite(path, force=force)
    from jettison.verbs.plan import plan as answer

    said = asked(model=model, budget=budget, gpu=gpu, host_budget=host_budget, what_if=what_if, request=request)
    try:
        with progress() as say:
            report = answer(
                model,
                request,
                budget=budget,
                gpu=gpu,
                host_budget=host_budget,
                what_if=what_if,
                over_time=timeline is not None or snapshot is not None,
                progress=say,
            )
    except Infeasible as error:
        if form == "json":
            from jettison.report.plan import infeasible_document

            print(json_text(infeasible_document(error, said)), end="")
            raise Answered(error) from None
        raise
    for warning in getattr(report, "warnings", ()):
        hint(f"note: {warning}")
    deliver(report.document, report.table, form=form, out=out)
    step = getattr(report, "step", None)
    if step is not None:
        from jettison.verbs.snapshots import write_timelines

        for line in write_timelines(model, [step], timeline=timeline, snapshot=snapshot):
            hint(line)


@app.command
def search(
    model: Annotated[str, Parameter(help="A preset such as llama3-70b, a config.json or its folder.")],
    /,
    *,
    gpus: Annotated[int, Parameter(help="Devices to train on.")],
    gpu: Annotated[str, Parameter(help="Which they are, such as h100-80gb, or a hardware file.")],
    global_batch: Annotated[int, Parameter(help="Sequences in a step, on all devices.")],
    request: Annotated[SearchRequest, Parameter(name="*")] = NOTHING_FIXED,
    budget: Annotated[str | None, Parameter(help="Peak bytes of a device, if less than it has: 60GiB.")] = None,
    margin: Annotated[
        float, Parameter(help="Kept free: of the way from the expected allowance to its upper bound, 0 to 1.")
    ] = MARGIN,
    tokens: Tokens = None,
    price_per_gpu_hour: Price = None,
    top: Annotated[int, Parameter(help="Layouts to list.")] = 10,
    jobs: Annotated[int | None, Parameter(help="Processes: as many as there are cores.")] = None,
    state: Annotated[Path | None, Parameter(help="Go on from this file, and write what is worked out to it.")] = None,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """The fastest layout, batch and recompute plan together, why it wins, and what more memory or devices would buy.

    All combinations of the axes that are not fixed are candidates; nothing that fits and is faster is missed. Exit code
    3 where nothing fits.
    """
    refuse_to_overwrite(out, force=force)
    from jettison.report.search import nothing_document
    from jettison.search.search import NothingFits
    from jettison.verbs.search import search as answer

    said = asked(
        model=model,
        gpus=gpus,
        gpu=gpu,
        global_batch=global_batch,
        budget=budget,
        margin=margin,
        top=top,
        request=request,
    )
    with progress() as say:
        try:
            report = answer(
                model,
                request,
                gpus=gpus,
                gpu=gpu,
                global_batch=global_batch,
                budget=budget,
                margin=margin,
                tokens=tokens,
                price_per_gpu_hour=price_per_gpu_hour,
                top=top,
                state=state,
                jobs=cores() if jobs is None else jobs,
                progress=say,
            )
        except NothingFits as error:
            if form == "json":
                print(json_text(nothing_document(model, gpus, gpu, error, said)), end="")
                raise Answered(error) from None
            raise
        except KeyboardInterrupt:
            if state is not None:
                hint(f"what was worked out is in {state}: the same command goes on from there")
            raise
    for warning in report.warnings:
        hint(f"note: {warning}")
    deliver(report.document, report.table, form=form, out=out)


def _ledger_table(report: LedgerReport) -> RenderableType:
    from jettison.report.ledger_table import ledger_table

    return ledger_table(report)
