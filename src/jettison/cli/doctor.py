"""`doctor`: versions and devices; why memory ran out; ways of a model to be silently wrong; a hardware file."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from jettison.cli.app import ON, Force, Format, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.documents import document, keys_of
from jettison.core.errors import UsageError, install
from jettison.core.files import read_table, write_whole
from jettison.core.process import cores, package_version
from jettison.core.units import format_bytes, format_gib
from jettison.diagnose.finding import Finding
from jettison.diagnose.log import read_oom_log, read_watch_record
from jettison.diagnose.memory_facts import MemoryFacts, StepPhase
from jettison.diagnose.out_of_memory import diagnose_memory
from jettison.diagnose.snapshot import facts_of_snapshot, is_snapshot, read_snapshot
from jettison.models.model_types import require_known_file
from jettison.report.console import hint, progress
from jettison.report.findings import FindingsReport
from jettison.report.tables import facts as facts_table

if TYPE_CHECKING:
    from jettison.diagnose.machine_calibration import Calibration


@verb("doctor")
def command(
    *,
    oom: Annotated[
        Path | None,
        option("Diagnosis", "Explain an out-of-memory error: a log (- is stdin), snapshot or jettison.watch file."),
    ] = None,
    model: Annotated[
        str | None, option("Diagnosis", "Check a config.json or module:factory for recompute hazards.")
    ] = None,
    calibrate: Annotated[
        bool, option("Measurement", "Measure this machine's FLOP/s and bandwidths (needs torch).", **ON)
    ] = False,
    quick: Annotated[bool, option("Measurement", "With --calibrate: fewer shapes, some 15 seconds.", **ON)] = False,
    device: Annotated[
        str | None, option("Measurement", "With --calibrate: cpu or cuda:N [default: the first GPU].")
    ] = None,
    ranks: Annotated[
        int, option("Measurement", "With --calibrate: time collectives of so many ranks.", show_default=False)
    ] = 0,
    form: Format = "human",
    out: Annotated[Path | None, option("Output", "With --calibrate: hardware file for --gpu, .toml.")] = None,
    force: Force = False,
) -> None:
    """Explain an out-of-memory error, check a model for recompute hazards, or measure this machine.

    Without flags: versions and devices.
    """
    if (oom is not None) + (model is not None) + calibrate > 1:
        raise UsageError("got more than one of --oom, --model and --calibrate; give one of them")
    if not calibrate:
        for name, value in {"quick": quick, "device": device, "ranks": ranks, "out": out, "force": force}.items():
            if value not in (None, False, 0):
                raise UsageError(f"got --{name} without --calibrate; give both, or neither")
    if oom is not None or model is not None:
        said = _said(oom, model)
        deliver(said.document, said.table, form=form, request=asked(oom=oom, model=model))
        return
    if calibrate:
        _calibrate(device=device, quick=quick, ranks=ranks, form=form, out=out, force=force)
        return
    found = facts()
    by_name = dict(found)
    known = {name: by_name[name] for name in keys_of("jettison.doctor/1") if name in by_name}
    stated = document("jettison.doctor/1", **known, facts=by_name)
    deliver(lambda: stated, lambda: facts_table(found), form=form, request=asked())


def _calibrate(*, device: str | None, quick: bool, ranks: int, form: str, out: Path | None, force: bool) -> None:
    """Measure this machine, and print its hardware file or write it."""
    if out is not None and out.suffix != ".toml":
        raise UsageError(f"got --out {out}; expected a name that ends in .toml, so that --gpu takes it as a file")
    refuse_to_overwrite(out, force=force)
    if (note := busy()) is not None:
        hint(note)
    with progress() as say:
        measured = calibrated(device=device, quick=quick, ranks=ranks, say=say)
    from jettison.diagnose.machine_calibration import calibration_document, doubtful, figures, hardware_toml

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
    deliver(lambda: calibration_document(measured), lambda: facts_table(table), form=form, request=request)


def _said(oom: Path | None, model: str | None) -> FindingsReport:
    with progress() as say:
        if oom is not None:
            say(f"reading {oom}")
            return diagnose_oom(oom)
        require_known_file(str(model))
        say("loading torch")
        from jettison.cli.doctor_model import diagnose_model
        from jettison.models.live_model import ModelRequest

        return diagnose_model(ModelRequest(model=str(model)), progress=say)


# versions and devices ------------------------------------------------------------------------------------------------

PACKAGES = ("jettison", "torch", "transformers", "numpy", "pydantic", "cyclopts", "rich", "highspy")


def facts() -> list[tuple[str, str]]:
    """(name, value) pairs in the order in which to show them."""
    found = [("python", platform.python_version()), ("platform", platform.platform())]
    found += [(name, package_version(name) or "not installed") for name in PACKAGES]
    found.append(("cpu cores", str(cores())))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(("memory", format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))))
    return found + _accelerators() + environment_notes(os.environ, cores())


def _accelerators() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError:
        return [("accelerators", f"unknown without torch: {install('torch')}")]
    if not torch.cuda.is_available():
        return [("accelerators", "none")]
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(f"cuda:{at}", f"{one.name}, {format_bytes(one.total_memory)}") for at, one in enumerate(found)]


_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_KNOWN: Final = read_table(Path(__file__).with_suffix(".toml"))


def environment_notes(environment: Mapping[str, str], cores: int) -> list[tuple[str, str]]:
    """(variable, what it does) of those that are worth a line."""
    notes = [
        (name, f"{environment[name]}: {what}")
        for name, what in _KNOWN["debugging"].items()
        if environment.get(name, "") not in (("", "1") if name == "PYTORCH_JIT" else ("", "0"))
    ]
    for name in _ALLOCATORS:
        options = [part.partition(":")[0].strip() for part in environment.get(name, "").split(",") if ":" in part]
        unknown = [option for option in options if option.isidentifier() and option not in _KNOWN["allocator_options"]]
        if unknown:
            notes.append((name, f"{', '.join(unknown)}: no option that is known here"))
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        notes.append(("OMP_NUM_THREADS", f"{threads}: there are {cores} cores"))
    return notes


# why memory ran out --------------------------------------------------------------------------------------------------

OOM_SCHEMA = "jettison.oom/1"


def diagnose_oom(path: Path) -> FindingsReport:
    """Diagnose a run whose memory ran out, from a snapshot, a record of `jettison.watch`, or a log. Raise `UsageError`
    if it says nothing about it.
    """
    if is_snapshot(path):
        facts = facts_of_snapshot(read_snapshot(path))
    else:
        facts = read_watch_record(path) or read_oom_log(path)
    found = diagnose_memory(facts)
    holders = [{"holder": name, "bytes": nbytes} for name, nbytes in facts.holders]
    more = {"cause": found.kind, "holders": holders}
    return FindingsReport(schema=OOM_SCHEMA, facts=_rows(facts, found), findings=(found,), of=facts, more=more)


def _rows(facts: MemoryFacts, found: Finding) -> list[tuple[str, str]]:
    rows = [("read", facts.source), ("it was", str(found.kind))]
    if facts.phase is not StepPhase.UNKNOWN:
        rows.append(("phase", str(facts.phase)))
    sizes = (
        ("requested", facts.requested_bytes),
        ("allocated", facts.allocated_bytes),
        ("unallocated", facts.unused_bytes),
        ("free", facts.free_bytes),
        ("of", facts.total_bytes),
    )
    return rows + [(name, format_gib(nbytes)) for name, nbytes in sizes if nbytes is not None]


# a hardware file -----------------------------------------------------------------------------------------------------


def calibrated(*, device: str | None, quick: bool, ranks: int, say: Callable[[str], None]) -> Calibration:
    """Measure this machine. Raise `UsageError` if torch is not installed, or there is no such device."""
    say("loading torch")
    try:
        from jettison.diagnose.machine_calibration import calibrate
    except ImportError as error:
        raise UsageError(f"--calibrate needs torch ({error}): {install('torch')}") from None
    return calibrate(device, short=quick, ranks=ranks, say=say)


def busy() -> str | None:
    """Return a warning where other processes use the machine, which lowers measured rates."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= 0.5 * cores():
        return None
    return f"note: {load:.1f} processes were running on {cores()} cores; figures will be of a busy machine"
