"""Commands that look for what is wrong: `doctor`, `profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from jettison.cli.output import asked, deliver, refuse_to_overwrite
from jettison.cli.parameters import Force, Format, app
from jettison.errors import UsageError
from jettison.report.console import hint, progress
from jettison.whole_files import write_whole

if TYPE_CHECKING:
    from jettison.report.findings import FindingsReport


@app.command
def doctor(
    *,
    oom: Annotated[
        Path | None, Parameter(help="Say why memory ran out: a memory snapshot, a log, or what jettison.watch wrote.")
    ] = None,
    model: Annotated[
        str | None, Parameter(help="Look for ways to be silently wrong under recompute: a MODEL as for `plan`.")
    ] = None,
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
    """Versions and devices; why memory ran out; ways of a model to be silently wrong; a hardware file."""
    from jettison.cli import doctor as report
    from jettison.report.schemas import keys_of, shaped
    from jettison.report.tables import doctor_table

    if oom is not None or model is not None:
        if calibrate or (oom is not None and model is not None):
            raise UsageError("got more than one of --oom, --model and --calibrate; give one of them")
        report.refuse_without_calibrate(quick=quick, device=device, ranks=ranks, out=out, force=force)
        said = _said(oom, model)
        deliver(said.document, said.table, form=form, out=None, request=asked(oom=oom, model=model))
        return
    if not calibrate:
        report.refuse_without_calibrate(quick=quick, device=device, ranks=ranks, out=out, force=force)
        found = report.facts()
        facts = dict(found)
        keys = keys_of("jettison.doctor/1")
        known = {name: value for name, value in facts.items() if name in keys}
        document = shaped({"schema": "jettison.doctor/1", **known, "facts": facts})
        deliver(lambda: document, lambda: doctor_table(found), form=form, out=None, request=asked())
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
        write_whole(out, hardware_toml(measured))
        hint(f"wrote {out}")
    if form == "human" and out is None:
        sys.stdout.write(hardware_toml(measured))
        return
    table = figures(measured)
    request = asked(calibrate=True, quick=quick, device=device, ranks=ranks)
    deliver(lambda: calibration_document(measured), lambda: doctor_table(table), form=form, out=None, request=request)


def _said(oom: Path | None, model: str | None) -> FindingsReport:
    if oom is not None:
        from jettison.verbs.doctor import diagnose_oom

        with progress() as say:
            say(f"reading {oom}")
            return diagnose_oom(oom)
    with progress() as say:
        from jettison.models.model_types import require_known_file

        require_known_file(str(model))
        say("loading torch")
        from jettison.models.request import ModelRequest
        from jettison.verbs.doctor_model import diagnose_model

        return diagnose_model(ModelRequest(model=str(model)), progress=say)


@app.command
def profile(
    targets: Annotated[
        list[str],
        Parameter(
            help="Traces of torch.profiler and memory snapshots of one run; or a script, or a recipe as for `train`."
        ),
    ],
    /,
    *,
    steps: Annotated[int, Parameter(help="Of a script or a recipe: steps to record, after two that warm up.")] = 3,
    gpu: Annotated[str | None, Parameter(help="Its peak FLOP/s make MFU and HFU, such as h100-80gb.")] = None,
    trace: Annotated[
        Path | None, Parameter(help="Of a script or a recipe: keep the trace there, for ui.perfetto.dev.")
    ] = None,
    form: Format = "human",
    out: Annotated[Path | None, Parameter(help="Write the JSON document to this file as well.")] = None,
    force: Force = False,
) -> None:
    """Where time and memory of a step go: phases, MFU and HFU, recompute, and findings with what would mend each."""
    refuse_to_overwrite(out, force=force)
    refuse_to_overwrite(trace, force=force)
    from jettison.spec.hardware import hardware
    from jettison.verbs.file_kinds import misplaced
    from jettison.verbs.profile import is_recorded, profile_files, require_files, require_target

    known = None if gpu is None else hardware(gpu)
    if len(targets) > 1 or is_recorded(Path(targets[0])):
        files = [Path(target) for target in targets]
        require_files(files)
        with progress() as say:
            say("reading " + ", ".join(targets))
            said = profile_files(files, known)
    else:
        require_target(targets[0])
        if (advice := misplaced(Path(targets[0]), "profile")) is not None:  # it would be run
            raise UsageError(advice)
        from jettison.verbs.profile_run import profile_run

        with progress() as say:
            said = profile_run(targets[0], steps=steps, gpu=known, trace=trace, progress=say)
    request = asked(targets=targets, steps=steps, gpu=gpu, trace=trace)
    deliver(said.document, said.table, form=form, out=out, request=request)
