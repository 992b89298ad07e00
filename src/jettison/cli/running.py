"""Commands that run a model: `demo`, `verify`, `train`."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from jettison.cli.output import answered, asked, deliver, refuse_to_overwrite
from jettison.cli.parameters import Attention, Budget, Force, Format, MicroBatch, Out, Precision, Seq, app
from jettison.errors import JettisonError, ProofFailed
from jettison.report.console import hint, progress, show

if TYPE_CHECKING:
    from jettison.traces.timeline import MemoryTimeline
    from jettison.train.export_run import ExportResult
    from jettison.train.result import TrainResult


@app.command
def demo(*, out: Path = Path("out/demo"), steps: int = 20) -> None:
    """Train a small Llama on the standard library's source, plainly and under a budget, and compare.

    Args:
        out: Folder for plan.json, proof.json and report.html, which are replaced.
        steps: Training steps on each side.
    """
    from jettison.demo import run_demo

    with progress() as say:
        result = run_demo(out, steps=steps, progress=say)
    show(result.table())
    result.require()


@app.command
def verify(
    target: Annotated[str, Parameter(help="A plan.json that `jettison plan` wrote, or a MODEL as for `plan`.")],
    /,
    *,
    model: Annotated[str | None, Parameter(help="With a plan file: the model, if the plan does not say it.")] = None,
    budget: Budget = None,
    recompute: Annotated[str | None, Parameter(help="Verify a policy: none, selective, full or every:K.")] = None,
    given: Annotated[
        bool, Parameter(negative="", show_default=False, help="Verify what the model itself recomputes and offloads.")
    ] = False,
    step: Annotated[
        str | None, Parameter(help="With --given: module:function of (model, batch), a forward and backward.")
    ] = None,
    against: Annotated[str | None, Parameter(help="With --given: module:factory of the same model, plain.")] = None,
    values: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Compare every tensor of backward, in all bits, in a step."),
    ] = False,
    offload: Annotated[
        bool, Parameter(negative="", show_default=False, help="With --budget: tensors may also wait on the host.")
    ] = False,
    host_budget: Annotated[
        str | None, Parameter(help="Bytes of the host for what waits there: 128GiB; else what there is.")
    ] = None,
    gpu: Annotated[str | None, Parameter(help="With --offload: whose link to the host, where none is here.")] = None,
    seq: Seq = None,
    micro_batch: MicroBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    optimizer: Annotated[Literal["adamw", "sgd", "none"] | None, Parameter(help="As for `plan`.")] = None,
    rounds: Annotated[int, Parameter(help="Interleaved rounds in which steps are timed.")] = 8,
    timeline: Annotated[
        Path | None,
        Parameter(help="Write a step under the plan and a plain one there, for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    snapshot: Annotated[
        Path | None, Parameter(help="Write their allocations there as a CUDA memory snapshot: device 0 is planned.")
    ] = None,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """Does it hold? Gradients, predicted and measured peak, bytes held by each layer, step time: on the real model."""
    for path in (out, timeline, snapshot):
        refuse_to_overwrite(path, force=force)
    flags = {"seq": seq, "micro_batch": micro_batch, "precision": precision, "attention": attention}
    with progress() as say:
        from jettison.models.model_types import require_known_file

        require_known_file(target)
        say("loading torch")
        from jettison.verbs.side_by_side import Side, step_timeline
        from jettison.verbs.verify_request import Given, prove, request_for

        seen: list[MemoryTimeline] = []

        def look(plain: Side, planned: Side) -> None:
            seen.extend([step_timeline(planned, "under the plan"), step_timeline(plain, "plain")])

        request, made = request_for(target, model=model, optimizer=optimizer, **flags)
        as_given = Given(step=step, against=against) if given or step or against else None
        proof = prove(
            request,
            plan=made,
            budget=budget,
            recompute=recompute,
            given=as_given,
            offload=offload,
            host_budget=host_budget,
            gpu=gpu,
            values=values,
            rounds=rounds,
            look=None if timeline is None and snapshot is None else look,
            progress=say,
        )
    from jettison.report.tables import proof_table

    said = asked(
        target=target,
        model=model,
        budget=budget,
        recompute=recompute,
        given=given,
        step=step,
        against=against,
        values=values,
        offload=offload,
        host_budget=host_budget,
        gpu=gpu,
        optimizer=optimizer,
        rounds=rounds,
        **flags,
    )
    deliver(proof.document, lambda: proof_table(proof), form=form, out=out, request=said)
    if seen:
        from jettison.verbs.snapshots import write_timelines

        for line in write_timelines(target, seen, timeline=timeline, snapshot=snapshot):
            hint(line)
    if not proof.passed:
        with answered():
            raise ProofFailed("not proven: " + "; ".join(proof.failures()))


@app.command
def train(
    recipe: Annotated[str, Parameter(help="A TOML file, or module:name of a TrainRecipe.")],
    /,
    *,
    steps: Annotated[int | None, Parameter(help="Optimizer steps altogether, instead of the recipe's.")] = None,
    resume: Annotated[
        bool, Parameter(negative="", show_default=False, help="Fail where there is no checkpoint to go on from.")
    ] = False,
    budget: Annotated[str | None, Parameter(help="Peak bytes of a step on one rank, instead of [plan].")] = None,
    plan: Annotated[Path | None, Parameter(help="A plan.json or a run's log folder, instead of [plan].")] = None,
    recompute: Annotated[str | None, Parameter(help="A policy word, instead of [plan].")] = None,
    gpu: Annotated[str | None, Parameter(help="Its peak FLOP/s make MFU and HFU, such as h100-80gb.")] = None,
    export: Annotated[
        Path | None, Parameter(help="Only write the newest checkpoint's weights there, for from_pretrained.")
    ] = None,
    form: Format = "human",
) -> None:
    """Train as a recipe says, in this process or in each that torchrun starts; resumes where it stopped."""
    from jettison.train.recipe import PlanSection

    chosen = PlanSection(budget=budget, file=None if plan is None else str(plan), policy=recompute)
    leads = os.environ.get("RANK", "0") == "0"
    if not leads:
        warnings.simplefilter("ignore")  # what one rank says, all would
    with progress(elsewhere_seconds=30) as say:  # a log of hours shows that something happens
        say("loading torch")
        from jettison.train.ranks import said_by_leader
        from jettison.verbs.train import train as run_recipe
        from jettison.verbs.train import write_weights

        def warn(text: str) -> None:
            hint(f"warning: {text}")

        try:
            result: TrainResult | ExportResult
            if export is not None:
                result = write_weights(recipe, str(export), progress=say, warn=warn)
            else:
                given = chosen if chosen.given else None
                result = run_recipe(
                    recipe, steps=steps, plan=given, gpu=gpu, must_resume=resume, progress=say, warn=warn
                )
        except JettisonError as error:
            if leads or not said_by_leader(error):
                raise
            time.sleep(2)  # torchrun ends all ranks when the first one leaves: let the leading one speak
            sys.exit(error.exit_code)
    if leads:
        said = asked(
            recipe=recipe,
            steps=steps,
            resume=resume,
            budget=budget,
            plan=plan,
            recompute=recompute,
            gpu=gpu,
            export=export,
        )
        deliver(result.document, lambda: "\n".join(result.lines()), form=form, out=None, request=said)
