"""`main`: reads the command line, calls one verb, turns errors into exit codes."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from jettison import __version__
from jettison.cli.output import deliver, json_text, refuse_to_overwrite
from jettison.errors import Infeasible, JettisonError, ProofFailed
from jettison.predict.run_request import RunRequest
from jettison.report.console import hint, progress, show
from jettison.report.summary import LedgerReport
from jettison.search.request import SearchRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jettison.train.export_run import ExportResult
    from jettison.train.result import TrainResult


EXIT_INTERNAL, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Form = Literal["human", "json"]
Model = Annotated[str, Parameter(help="module:factory, or a Hugging Face config.json or its folder.")]
Budget = Annotated[str | None, Parameter(help="Peak bytes of a training step, with a unit: 20GiB, 500MB, 123456B.")]
Seq = Annotated[int | None, Parameter(help="Tokens in a sequence, for a config: 2048 or as many as it has positions.")]
MicroBatch = Annotated[int | None, Parameter(help="Sequences or images in a micro-batch, for a config: 1.")]
Precision = Annotated[Literal["fp32", "bf16"] | None, Parameter(help="Of weights and activations, for a config.")]
Attention = Annotated[Literal["eager", "sdpa", "flash"] | None, Parameter(help="Attention kernels, for a config.")]
Optimizer = Annotated[Literal["adamw", "sgd", "none"], Parameter(help="Its state and its step count too.")]
Out = Annotated[Path | None, Parameter(help="Write the JSON document to this file as well.")]
Force = Annotated[bool, Parameter(negative="", show_default=False, help="Replace the file of --out.")]
Format = Annotated[Form, Parameter(name="--format", help="A table for people, or one JSON document.")]

app = App(
    name="jettison",
    version=__version__,
    help="Train under a byte budget: decide tensor by tensor what to keep or recompute, and prove it.",
    suppress_keyboard_interrupt=False,
)


NOTHING_ASKED = RunRequest()
NOTHING_FIXED = SearchRequest()


@app.command
def demo(*, out: Path = Path("out/demo"), steps: int = 20) -> None:
    """Train a small Llama on the standard library's source, plainly and under a budget, and compare.

    Args:
        out: Folder for plan.json and proof.json, which are replaced.
        steps: Training steps on each side.
    """
    from jettison.demo import run_demo

    with progress() as say:
        result = run_demo(out, steps=steps, progress=say)
    show(result.table())
    result.require()


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
    trace: Annotated[
        bool, Parameter(negative="", show_default=False, help="Build a config's model and trace it (needs torch).")
    ] = False,
    compare: Annotated[Path | None, Parameter(help="Another ledger's JSON: exit code 4 where it differs.")] = None,
    form: Annotated[Literal["human", "json", "csv"], Parameter(name="--format", help="CSV has the entries.")] = "human",
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
            model, request, trace=trace, budget=budget, gpu=gpu, fit=fit, explain=explain, against=compare, progress=say
        )
    for warning in report.warnings:
        hint(f"note: {warning}")
    deliver(report.document, lambda: _ledger_table(report), form=form, out=out, csv=report.csv)
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
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """What a training step takes: seconds, tokens a second, MFU, and what the time goes into."""
    refuse_to_overwrite(out, force=force)
    from jettison.verbs.estimate import estimate as answer

    report = answer(model, request, gpu=gpu, compiled=compiled, explain=explain)
    for warning in report.warnings:
        hint(f"note: {warning}")
    deliver(report.document, report.table, form=form, out=out)


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
    refuse_to_overwrite(out, force=force)
    from jettison.verbs.plan import plan as answer

    try:
        with progress() as say:
            report = answer(
                model, request, budget=budget, gpu=gpu, host_budget=host_budget, what_if=what_if, progress=say
            )
    except Infeasible as error:
        if form == "json":
            print(json_text(_infeasible(error)), end="")
        raise
    deliver(report.document, report.table, form=form, out=out)


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

    with progress() as say:
        try:
            report = answer(
                model,
                request,
                gpus=gpus,
                gpu=gpu,
                global_batch=global_batch,
                budget=budget,
                top=top,
                state=state,
                jobs=len(os.sched_getaffinity(0)) if jobs is None else jobs,
                progress=say,
            )
        except NothingFits as error:
            if form == "json":
                print(json_text(nothing_document(model, gpus, gpu, error)), end="")
            raise
        except KeyboardInterrupt:
            if state is not None:
                hint(f"what was worked out is in {state}: the same command goes on from there")
            raise
    deliver(report.document, report.table, form=form, out=out)


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
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """Does it hold? Gradients, predicted and measured peak, bytes held by each layer, step time: on the real model."""
    refuse_to_overwrite(out, force=force)
    flags = {"seq": seq, "micro_batch": micro_batch, "precision": precision, "attention": attention}
    with progress() as say:
        say("loading torch")
        from jettison.verbs.verify_request import Given, prove, request_for

        request, made = request_for(target, model=model, optimizer=optimizer, **flags)
        as_given = Given(step=step, against=against) if given or step or against else None
        try:
            proof = prove(
                request,
                plan=made,
                budget=budget,
                recompute=recompute,
                given=as_given,
                offload=offload,
                host_budget=host_budget,
                gpu=gpu,
                rounds=rounds,
                progress=say,
            )
        except Infeasible as error:
            if form == "json":
                print(json_text(_infeasible(error)), end="")
            raise
    from jettison.report.tables import proof_table

    deliver(proof.document, lambda: proof_table(proof), form=form, out=out)
    if not proof.passed:
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
        deliver(result.document, lambda: "\n".join(result.lines()), form=form, out=None)


@app.command
def doctor(
    *,
    calibrate: Annotated[
        bool, Parameter(negative="", show_default=False, help="Measure what this machine reaches (needs torch).")
    ] = False,
    quick: Annotated[
        bool, Parameter(negative="", show_default=False, help="With --calibrate: fewer shapes, some 15 seconds.")
    ] = False,
    device: Annotated[str | None, Parameter(help="With --calibrate: cpu or cuda:N instead of the first GPU.")] = None,
    ranks: Annotated[int, Parameter(show_default=False, help="With --calibrate: time collectives of N ranks.")] = 0,
    form: Format = "human",
    out: Annotated[Path | None, Parameter(help="With --calibrate: a .toml file, which --gpu takes.")] = None,
    force: Force = False,
) -> None:
    """Versions and devices; with --calibrate, a hardware file for this machine, on stdout or in --out."""
    from jettison.cli import doctor as report
    from jettison.report.tables import doctor_table

    if not calibrate:
        report.refuse_without_calibrate(quick=quick, device=device, ranks=ranks, out=out, force=force)
        found = report.facts()
        document = {"schema": "jettison.doctor/1", **dict(found)}
        deliver(lambda: document, lambda: doctor_table(found), form=form, out=None)
        return
    report.refuse_name(out)
    refuse_to_overwrite(out, force=force)
    if (note := report.busy()) is not None:
        hint(note)
    with progress() as say:
        measured = report.calibrated(device=device, quick=quick, ranks=ranks, say=say)
    from jettison.calibrate import hardware_toml
    from jettison.calibrate.figures import calibration_document, doubtful, figures

    if (note := doubtful(measured)) is not None:
        hint(note)
    if out is not None:
        out.write_text(hardware_toml(measured), encoding="utf-8")
        hint(f"wrote {out}")
    if form == "human" and out is None:
        sys.stdout.write(hardware_toml(measured))
        return
    table = figures(measured)
    deliver(lambda: calibration_document(measured), lambda: doctor_table(table), form=form, out=None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 fits or proven, 2 usage, 3 infeasible, 4 proof failed."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_rest, **_more: hint(f"note: {message}")
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_none")
    except CycloptsError as error:
        verb = " ".join(["jettison", *(error.command_chain or ())])
        hint(f"jettison: {' '.join(str(error).split())} (see {verb} --help)")
        return EXIT_USAGE
    except JettisonError as error:
        hint(f"jettison: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        hint("jettison: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERNAL
    except Exception:  # a bug of ours, or of the factory that was called: show where
        hint(traceback.format_exc())
        hint("jettison: internal error (above)")
        return EXIT_INTERNAL
    return 0


def _ledger_table(report: LedgerReport) -> RenderableType:
    from jettison.report.ledger_table import ledger_table

    return ledger_table(report)


def _infeasible(error: Infeasible) -> dict[str, object]:
    return {
        "schema": "jettison.plan/1",
        "feasible": False,
        "budget_bytes": error.budget_bytes,
        "minimum_budget_bytes": error.minimum_budget_bytes,
        "reason": error.reason,
    }
