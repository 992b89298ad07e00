"""`profile`: where the time and the memory of a step go, and what would mend it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

from rich.console import RenderableType

from jettison.cli.app import Force, Format, Out, asked, deliver, option, refuse_to_overwrite, verb
from jettison.cli.file_kinds import misplaced
from jettison.core.documents import part
from jettison.core.errors import UsageError
from jettison.core.process import uncollected
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes, format_flops, format_percent, format_seconds
from jettison.diagnose.finding import FindingKind
from jettison.diagnose.memory_facts import MemoryFacts
from jettison.diagnose.profile_file import ProfilerTrace, is_trace, read_profile
from jettison.diagnose.slow_steps import slow_findings, snapshot_findings
from jettison.diagnose.snapshot import Snapshot, facts_of_snapshot, is_snapshot, read_snapshot
from jettison.diagnose.step_profile import PHASES, StepProfile, profile_steps
from jettison.diagnose.trace_modules import ROLES, ModuleProfile, profile_modules
from jettison.report.console import progress
from jettison.report.findings import FindingsReport
from jettison.report.snapshot import peak_table
from jettison.report.tables import exact, grid
from jettison.spec.hardware import Hardware, hardware

SCHEMA: Final = "jettison.profile/1"
MOST_ROWS: Final = 12
UNNAMED: Final = "the trace names none, so that tables are by operator; record it with with_stack=True"
_PRECISIONS: Final = {"c10::BFloat16": "bf16", "c10::Half": "bf16", "float": "fp32"}


@verb("profile")
def command(
    targets: Annotated[
        list[str], option("Model", "Script or recipe to run; or a run's torch.profiler traces and memory snapshots.")
    ],
    /,
    *,
    steps: Annotated[int, option("Measurement", "Steps of a script or recipe to record, after two warm-up steps.")] = 3,
    gpu: Annotated[str | None, option("Memory and GPU", "GPU for MFU and HFU, such as h100-80gb.")] = None,
    trace: Annotated[
        Path | None, option("Output", "Keep the trace of a script or recipe here, for ui.perfetto.dev.")
    ] = None,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """Profile a step's time and memory: phases, MFU and HFU, recompute, and findings with a fix for each."""
    refuse_to_overwrite(out, trace, force=force)
    known = None if gpu is None else hardware(gpu)
    if len(targets) > 1 or is_recorded(Path(targets[0])):
        files = [Path(target) for target in targets]
        require_files(files)
        with progress() as say:
            said = profile_files(files, known, say)
    else:
        require_target(targets[0])
        if (advice := misplaced(Path(targets[0]), "profile")) is not None:  # it would be run
            raise UsageError(advice)
        with progress() as say:
            said = profile_run(targets[0], steps=steps, gpu=known, trace=trace, progress=say)
    request = asked(targets=targets, steps=steps, gpu=gpu, trace=trace)
    deliver(said.document, said.table, form=form, out=out, request=request)


def is_recorded(path: Path) -> bool:
    """A trace or a snapshot, not something to run."""
    return path.is_file() and (is_snapshot(path) or path.suffix in (".json", ".gz") or is_trace(path))


def require_target(target: str) -> None:
    """Before torch is loaded: something is there that could run, or a name of Python's. Raise `UsageError` if there is
    no such file, nothing in it, or it is of another kind.
    """
    file = Path(target)
    wrong = "" if ":" in target or file.exists() else f"there is no file {target}"
    if file.is_file() and not (file.stat().st_size and file.suffix in (".py", ".toml")):
        wrong = f"{target} is {'none of these' if file.stat().st_size else 'empty'}"
    if wrong:
        kinds = "a trace, a memory snapshot, a script (.py), or a recipe (a TOML file or module:name)"
        raise UsageError(f"{wrong}; give {kinds}")


def profile_run(
    target: str, *, steps: int, gpu: Hardware | None, trace: Path | None, progress: Progress
) -> FindingsReport:
    """Run a script or a recipe for some steps, and say what they show. Raise `UsageError` if there is no such file, or
    no optimizer of torch's made so many steps.

    Args:
        target: a Python file, or a recipe as `train` takes it.
        trace: where the trace is kept.
    """
    from jettison.cli.profile_run import record_run

    with tempfile.TemporaryDirectory(prefix="jettison-profile-") as folder:
        path = Path(folder) / "trace.json" if trace is None else trace
        seconds = record_run(target, path, steps=steps, progress=progress)
        report = profile_files([path], gpu, progress)
    first, usual = seconds[0], median(seconds[1:])  # the first step is not in the trace: it was timed
    rows = [*report.facts, ("first step", f"{format_seconds(first)}; {format_seconds(usual)} the others")]
    useful = tuple(finding for finding in report.findings if finding.kind is not FindingKind.FIRST_STEP)  # it warmed up
    return replace(report, facts=rows, more=report.more | {"step_seconds": seconds}, findings=useful)


def profile_files(files: Sequence[Path], gpu: Hardware | None, progress: Progress = silent) -> FindingsReport:
    """Diagnose traces and snapshots of one run. Raise `UsageError` if one of them is neither.

    Args:
        gpu: its peak FLOP/s make MFU and HFU.
    """
    with uncollected():  # a trace is millions of small objects
        parts = [
            _snapshot(read_snapshot(f)) if is_snapshot(f) else _trace(read_profile(f, progress), gpu, progress)
            for f in files
        ]
    if len(parts) == 1:
        return parts[0]
    return FindingsReport(
        schema=SCHEMA,
        facts=[row for one in parts for row in one.facts],
        findings=tuple(finding for one in parts for finding in one.findings),
        more={key: value for one in parts for key, value in one.more.items()},
        tables=tuple(table for one in parts for table in one.tables),
    )


def _snapshot(snapshot: Snapshot) -> FindingsReport:
    facts, device = facts_of_snapshot(snapshot), snapshot.telling
    rows = [("snapshot", snapshot.name), ("peak", exact(device.timeline.peak_bytes)), *_levels(facts)]
    peak = device.with_gradients.shares(device.timeline.peak_event, "module", "role")
    short = {
        "name": snapshot.name,
        "peak_bytes": device.timeline.peak_bytes,
        "steps": len(facts.steps),
        "peak": [{"module": m, "role": r, "bytes": nbytes} for (m, r), (nbytes, _) in peak.items()],
    }
    found, tables = snapshot_findings(facts, device), (peak_table(device.with_gradients),)
    return FindingsReport(schema=SCHEMA, facts=rows, findings=found, more={"snapshot": short}, tables=tables)


def _levels(facts: MemoryFacts) -> list[tuple[str, str]]:
    if len(facts.steps) < 2:
        return []
    last = facts.steps[-1].between_bytes
    return [("between steps", f"{exact(last)} after {len(facts.steps) - 1} steps")]


def _trace(trace: ProfilerTrace, gpu: Hardware | None, progress: Progress) -> FindingsReport:
    progress(f"{trace.name}: {len(trace.steps)} steps of {len(trace.ops):,} operators")
    found = profile_steps(trace)
    where = profile_modules(trace, found.window)
    used = _utilization(trace, found, gpu)
    return FindingsReport(
        schema=SCHEMA,
        facts=[*_rows(trace, found, used), *([] if where.named else [("modules", UNNAMED)])],
        findings=slow_findings(found),
        more={"trace": _document(trace, found, used, where)},
        tables=(_phases(found), *_by_module(found, where)),
    )


def _rows(trace: ProfilerTrace, found: StepProfile, used: dict[str, float]) -> list[tuple[str, str]]:
    each, what = format_seconds(found.seconds(found.ns)), "the device" if found.has_device else "the host's operators"
    rows = [
        ("trace", f"{trace.name}{''.join(f', {name}' for name in trace.devices[:1])}"),
        ("a step", f"{each}, of {found.steps} steady step{'s' * (found.steps != 1)}"),
        ("busy", f"{format_percent(found.busy_ns / found.ns)} of it: {what}"),
    ]
    if found.communication_ns:
        share = format_percent(found.exposed_ns / found.ns)
        talk = format_seconds(found.seconds(found.communication_ns))
        rows.append(("communication", f"{talk} a step; {share} of the step overlaps with no computation"))
    if found.flops:
        rows.append(("FLOPs", f"{format_flops(found.flops // found.steps)} a step in GEMMs and fused attention"))
        names = f"MFU {format_percent(used['mfu'])}, HFU {format_percent(used['hfu'])}" if used else "n/a without --gpu"
        rows.append(("utilization", names))
    if found.recompute_ns:
        share = format_percent(found.recompute_ns / found.ns)
        flops = f"; {format_percent(found.again_flops / found.flops)} of all FLOPs" if found.flops else ""
        rows.append(("recompute", f"{format_seconds(found.seconds(found.recompute_ns))} a step, {share} of it{flops}"))
    if found.kernels:
        middle = format_seconds(found.median_kernel_ns / 1e9)
        rows.append(("kernels", f"{found.kernels // found.steps:,} a step, {middle} in the median"))
    return rows


def _phases(found: StepProfile) -> RenderableType:
    table = grid("Phases of a step, on the host", ("phase",), ("time", "share", "peak"))
    for name in PHASES:
        ns = found.phase_ns.get(name, 0)
        peak = found.peak_bytes.get(name)
        shown = "n/a" if peak is None else format_bytes(peak)
        table.add_row(name, format_seconds(found.seconds(ns)), format_percent(ns / found.ns), shown)
    return table


def _by_module(found: StepProfile, where: ModuleProfile) -> Iterator[RenderableType]:
    """Tables of time and of bytes at the peak, the largest first."""
    roles = [role for role in ROLES if any(place.role == role for place in where.ns)]
    name, total = "module" if where.named else "operator", sum(where.ns.values())
    of = "the device's kernels" if found.has_device else "operators on the host"
    rows = list(where.modules.items())
    table = grid(f"Time of {of} in a step, by {name}", (name,), (*roles, "share"))
    for module, by_role in [*rows[:MOST_ROWS], *_others(rows[MOST_ROWS:])]:
        times = [format_seconds(found.seconds(by_role[r])) if r in by_role else "" for r in roles]
        table.add_row(module or "no operator", *times, format_percent(sum(by_role.values()) / max(1, total)))
    yield table
    if where.peak:
        most, peak = sum(where.peak.values()), list(where.peak.items())
        rest = sum(nbytes for _, nbytes in peak[MOST_ROWS:])
        shown = [(place.module, place.role, nbytes) for place, nbytes in peak[:MOST_ROWS]]
        shown += [(f"{len(peak) - MOST_ROWS} more", "", rest)] if rest else []
        cells = [(module, role, format_bytes(n), format_percent(n / most)) for module, role, n in shown]
        yield grid(f"At the peak, by {name} and role", (name, "role"), ("bytes", "share"), cells)


def _others(rows: list[tuple[str, dict[str, int]]]) -> Iterator[tuple[str, dict[str, int]]]:
    """One row for all that are not shown."""
    rest = Counter[str]()
    for _, by_role in rows:
        rest.update(by_role)
    if rows:
        yield f"{len(rows)} more", rest


def _utilization(trace: ProfilerTrace, found: StepProfile, gpu: Hardware | None) -> dict[str, float]:
    """MFU and HFU; empty where the device's peak is not known. Model FLOPs exclude recomputation."""
    if gpu is None or not found.flops:
        return {}
    peak = getattr(gpu.flops_per_second, _precision(trace)) or gpu.flops_per_second.fp32
    if peak is None:
        return {}
    could = peak * found.ns / 1e9
    return {"mfu": (found.flops - found.again_flops) / could, "hfu": found.flops / could}


def _precision(trace: ProfilerTrace) -> str:
    """Return the type of most matmuls."""
    kinds = [one.args.get("Input type") for one in trace.ops if one.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    found = [str(kind[-1 if len(kind) < 3 else 1]) for kind in kinds if isinstance(kind, list) and kind]
    return _PRECISIONS.get(max(set(found), key=found.count), "fp32") if found else "fp32"


def _document(trace: ProfilerTrace, found: StepProfile, used: dict[str, float], where: ModuleProfile) -> dict[str, Any]:
    """Seconds and bytes are by module, or by operator where the trace names none, and by role."""
    return part(
        "ProfiledTrace",
        found,
        name=trace.name,
        step_seconds=found.seconds(found.ns),
        busy_fraction=found.busy_ns / found.ns,
        phase_seconds={name: found.seconds(ns) for name, ns in found.phase_ns.items()},
        phase_peak_bytes=dict(found.peak_bytes),
        communication_seconds=found.seconds(found.communication_ns),
        exposed_communication_seconds=found.seconds(found.exposed_ns),
        recompute_seconds=found.seconds(found.recompute_ns),
        flops=found.flops // found.steps,
        recompute_flops=found.again_flops // found.steps,
        kernels=found.kernels // found.steps,
        names_modules=where.named,
        modules=[
            {"module": place.module, "role": place.role, "seconds": found.seconds(ns)}
            for place, ns in sorted(where.ns.items(), key=lambda item: -item[1])
        ],
        peak=[{"module": place.module, "role": place.role, "bytes": n} for place, n in where.peak.items()],
        **used,
    )


def require_files(files: Sequence[Path]) -> None:
    """All of them are traces or snapshots. Raise `UsageError` if one is not."""
    for file in files:
        if not is_recorded(file):
            raise UsageError(
                f"{file} is no trace of torch.profiler and no memory snapshot; only one script or recipe runs at a time"
            )
