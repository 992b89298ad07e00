"""`export`: a plan's document as settings of another trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from jettison.cli.app import Budget, Flattened, Force, Format, asked, option, refuse_to_overwrite, verb
from jettison.cli.from_file import NO_SOURCE, RunSourceFlags, sourced
from jettison.core.errors import PlanMismatch, UsageError
from jettison.core.files import write_whole
from jettison.core.progress import Progress, on_terminal, shown
from jettison.frameworks.export import Exported, Exporter, exporter
from jettison.frameworks.nearest_policy import DescribedPricer, subject_of
from jettison.report.console import hint, json_text, show
from jettison.report.console import progress as on_screen
from jettison.report.plan import DESCRIBED, SCHEMA, export_table
from jettison.report.untrusted_json import parse_json, read_text
from jettison.request.options import DECIDED, NOTHING_ASKED
from jettison.solve.plan import Plan
from jettison.spec.frameworks import named
from jettison.spec.precision import Gradients
from jettison.spec.run import Run


@verb("export")
def command(
    plan: Annotated[Path | None, option("Model", "Plan that `jettison plan ... --out FILE` wrote.")] = None,
    /,
    *,
    to: Annotated[str, option("Output", f"Target: {' or '.join(', '.join(named('targets')).rsplit(', ', 1))}.")],
    gpu: Annotated[
        str | None, option("Memory and GPU", "GPU to plan --from for, or that a live model's plan is timed on.")
    ] = None,
    budget: Budget = None,
    source: Annotated[RunSourceFlags, Flattened] = NO_SOURCE,
    model: Annotated[
        str | None, option("Model", "Model of a live model's plan, if the plan lacks it or it has moved.")
    ] = None,
    form: Format = "human",
    out: Annotated[Path | None, option("Output", "File to write, or folder for several [default: print them].")] = None,
    force: Force = False,
) -> None:
    """Export a plan as another trainer's settings, with what is lost and what that costs.

    The fastest of the target's settings that fits the plan's budget is chosen. --from FILE with --gpu or --budget plans
    that run first. Exit code 3: no setting fits.
    """
    # a folder that is there takes files
    refuse_to_overwrite(None if out is None or out.is_dir() else out, force=force)
    with on_screen() as say:
        if source.from_file:
            from jettison.cli.plan import PlanFlags
            from jettison.cli.plan import plan as plan_of

            if plan is not None:
                raise UsageError(f"got the plan {plan} and --from {source.from_file[0]}; give one of them")
            name, request, read = sourced(model, NOTHING_ASKED, source, verb="plan", decides=DECIDED)
            flags = PlanFlags(gpu=gpu, budget=budget, compile=read is not None and read.compile)
            found = export_plan(plan_of(name, request, flags, progress=say).document(), to=to, progress=say)
        elif plan is None or budget is not None:
            got = "no plan" if plan is None else f"--budget {budget}, which the plan has already"
            raise UsageError(f"got {got}; expected a file of jettison plan --out, or --from FILE of a trainer")
        else:
            found = export_plan(plan, to=to, gpu=gpu, model=model, progress=say)
    written = () if out is None else write_files(found, out, force=force)
    if form == "json":
        print(json_text(found.document() | {"request": asked(plan=plan, to=to, gpu=gpu, model=model)}), end="")
    elif out is None:
        sys.stdout.write("\n".join(text for text in found.files.values() if text != "{}\n"))  # settings of a field each
        sys.stdout.flush()
        for left_out in found.subject.left_out:
            hint(f"note: {left_out}")
        show(export_table(found), sys.stderr)  # stdout is the files' alone
    else:
        show(export_table(found))
    for path in written:
        hint(f"wrote {path}")


@on_terminal
def export_plan(
    plan: Any, *, to: str, gpu: str | None = None, model: str | None = None, progress: Progress = shown
) -> Exported:
    """Export a plan.

    Args:
        plan: a plan's file, its document, or the plan itself where ``model`` says what it was made for.
        to: a target, such as ``torch`` or ``megatron``.
        gpu: whose prices seconds are stated at; left out, a described plan's own, or this machine's usual ones.
        model: what a live plan was made for, where its document does not say: ``module:factory`` or a config.json.

    Raises:
        UsageError: no such plan or target, or the target has no words for it (`CannotSay`).
        PlanMismatch: the plan was edited, or what it was made for has changed.
        DoesNotFit: the nearest that the target can say is above the plan's budget.
    """
    write = exporter(to)
    document, text, name = _document(plan)
    if document.get("feasible") is False:
        raise UsageError(f"{name} says that no plan fits its budget; there is nothing to export")
    if document.get("made_from") == DESCRIBED:
        if gpu is not None:
            raise UsageError(f"got --gpu {gpu}: the plan of a described run has prices of its own")
        return _described(document, name, model, write)
    made = Plan.from_json(text)
    progress("loading torch")
    from jettison.frameworks.live_export import live_export

    return live_export(made, document, write=write, gpu=gpu, model=model, progress=progress)


def _document(plan: Any) -> tuple[Mapping[str, Any], str, str]:
    """A plan's document, its text, and how it is called in messages."""
    if isinstance(plan, str | Path):
        path = Path(plan)
        if not path.is_file():
            raise UsageError(f"there is no file {path}; expected what jettison plan ... --out FILE wrote")
        text, name = read_text(path), str(path)
        found = parse_json(text, name)
    else:
        found = plan if isinstance(plan, dict) else plan.document()
        text, name = json.dumps(found), "the plan"
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise UsageError(f"{name}: schema {schema!r}; expected {SCHEMA}, as jettison plan ... --out FILE writes it")
    return found, text, name


def _described(document: Mapping[str, Any], name: str, model: str | None, write: Exporter) -> Exported:
    from jettison.cli.plan import remade

    if model is not None:
        raise UsageError(f"got model {model}: the plan of a described run says what it was made for")
    made_by = document.get("made_by")
    again = remade(made_by if isinstance(made_by, dict) else {})
    if again.document()["hash"] != document.get("hash"):
        raise PlanMismatch(
            f"{name} has hash {document.get('hash')}, and what it says under made_by gives another plan, "
            f"{again.document()['hash']}: it was edited, its model's file was, or another version made it. Plan again"
        )
    subject = subject_of(again.choice, dict(document), again.model)
    found = write(subject, DescribedPricer(again.choice))
    return replace(found, lost=(*found.lost, *_of_the_loop(again.choice.forecast.run)))


def _of_the_loop(run: Run) -> Iterator[str]:
    """Name the parts of a run that settings of recomputation do not set up."""
    if run.tuning is not None:
        yield f"adapters on frozen weights ({run.tuning}): set them up where the model is built"
    if run.optimizer_offload.moves:
        yield f"optimizer states in CPU memory, as {run.optimizer_offload} has them: set them up with the optimizer"
    if run.precision.recipe is not None:
        yield f"low-precision GEMMs ({run.precision.recipe}): set them up with the model"
    for frozen in run.frozen:
        yield f"a frozen model ({frozen}): give it to the trainer"
    if run.gradients is Gradients.IN_BACKWARD:
        yield "an optimizer that steps within backward: hook it to the parameters yourself"


def write_files(found: Exported, out: Path, *, force: bool) -> tuple[Path, ...]:
    """One file as ``out``, several into the folder ``out``; all of them, or none. Raise `UsageError` if something is
    there already, ``out`` is a file where there are several, or names another format.
    """
    if len(found.files) > 1 and out.is_file():
        raise UsageError(f"{found.target} is {len(found.files)} files, and {out} is one; give a folder")
    if len(found.files) == 1 and not out.is_dir():
        ((name, text),) = found.files.items()
        if out.suffix in (".toml", ".yaml", ".yml", ".json", ".py") and out.suffix != Path(name).suffix:
            raise UsageError(f"got --out {out}: {found.target} writes {name}; give a name of that kind, or a folder")
        targets = {out: text}
    else:
        targets = {out / name: text for name, text in found.files.items()}
    with suppress(OSError):  # said below
        next(iter(targets)).parent.mkdir(exist_ok=True)
    refuse_to_overwrite(*targets, force=force)
    for path, text in targets.items():
        write_whole(path, text)
    return tuple(targets)
