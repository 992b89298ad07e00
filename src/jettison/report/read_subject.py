"""A file becomes a `Subject`: plans, proofs, and logs of training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from jettison.core.errors import PlanMismatch, UsageError
from jettison.core.units import format_count, format_percent, format_seconds
from jettison.ledger.levels import StepLevels
from jettison.report.alternatives import Reason
from jettison.report.plan import DESCRIBED
from jettison.report.proof import SCHEMA as PROOF_SCHEMA
from jettison.report.proof import Proof
from jettison.report.subject import Amount, Fate, Grid, Kind, LayerBytes, PhaseBytes, Subject, TensorKind, TrainStep
from jettison.report.subject_live import amounts_of, phases_of, plan_grids, plan_subject, proof_subject
from jettison.report.untrusted import all_printable, parse_json, read_text
from jettison.solve.plan import SCHEMA as PLAN_SCHEMA
from jettison.solve.plan import Plan

# The log of a training run as the subject of a report -----------------------------------------------------------------


RUN_SCHEMA: Final = "jettison.train/1"
MOST_STEPS: Final = 1500
"""Points of a curve; of longer runs every so many steps are shown, the first and the last among them."""


@dataclass(frozen=True, kw_only=True)
class _Start:
    schema: str
    step: int = 0
    world: int = 1
    layout: dict[str, int] = field(default_factory=dict)
    accumulation: int = 1
    parameters: int | None = None
    plans: tuple[str, ...] = ()
    predicted_peak_bytes: int | None = None
    torch: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Step:
    step: int
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: dict[str, int] | None = None
    measured: bool = False


@dataclass(frozen=True, kw_only=True)
class _End:
    step: int = 0
    stopped: str | None = None
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    budget: str | None = None
    first_step_peak_bytes: dict[str, int] | None = None
    second_step_peak_bytes: dict[str, int] | None = None
    levels: StepLevels | None = None
    mfu: float | None = None
    eval_loss: float | None = None


def run_subject(text: str, name: str, *, plans: Sequence[Plan] = ()) -> Subject:
    """What the lines of a log say, and the plans that the run followed.

    Args:
        plans: found beside it; those count that the log names by their hashes.

    Raises:
        UsageError: it is no log of a run.
    """
    start, steps, end = _events(text, name)
    followed = [plan for digest in start.plans for plan in plans if plan.hash == digest]
    levels: dict[str, StepLevels | None] = {
        "predicted": max(
            (plan.levels for plan in followed if plan.levels), key=lambda found: found.peak_bytes, default=None
        ),
        "measured": end.levels,
    }
    measured = end.second_step_peak_bytes or end.first_step_peak_bytes or {}
    peaks = [max(step.peak_bytes.values()) for step in steps if step.peak_bytes]
    amounts = [
        ("budget", followed[0].budget_bytes if followed else None),
        ("predicted peak", end.predicted_peak_bytes or start.predicted_peak_bytes),
        ("measured peak", max([*measured.values(), *peaks], default=None)),
    ]
    return Subject(
        kind=Kind.RUN,
        name=name,
        holds=_within(amounts),
        sentences=(*_verdict(_within(amounts)), *_sentences(steps, end)),
        facts=tuple(_facts(start, steps, end)),
        amounts=tuple(Amount(what=what, nbytes=nbytes) for what, nbytes in amounts if nbytes is not None),
        phases=_phases(levels, measured),
        layers=tuple(_layers(followed)),
        grids=plan_grids(followed),
        levels={key: found for key, found in levels.items() if found is not None},
        steps=tuple(_thinned(steps)),
        environment=tuple((start.environment or {"torch": start.torch}).items()),
        command="jettison train RECIPE",
    )


def _events(text: str, name: str) -> tuple[_Start, list[_Step], _End]:
    """The last start, all steps, the last end; a line that was torn off at the end of a file is left out."""
    start, end, steps = None, _End(), {}
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        try:
            entry = parse_json(line, where)
        except UsageError:
            if number == len(lines):
                break
            raise
        kind = entry.get("event") if isinstance(entry, dict) else None
        try:
            if kind == "start":
                start = _adapter(_Start).validate_python(entry)
            elif kind == "step":
                steps[entry.get("step")] = _adapter(_Step).validate_python(entry)
            elif kind == "end":
                end = _adapter(_End).validate_python(entry)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            loc = ".".join(map(str, first["loc"]))
            raise UsageError(f"{where}: {loc}: {first['msg']}") from None
    if start is None or start.schema != RUN_SCHEMA:
        raise UsageError(f"{name}: no line starts a run of schema {RUN_SCHEMA}; give the log.jsonl of `jettison train`")
    return start, list(steps.values()), end


@cache
def _adapter(of: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(of)


def _within(amounts: Sequence[tuple[str, int | None]]) -> bool | None:
    found = dict(amounts)
    budget, peak = found["budget"], found["measured peak"]
    return None if budget is None or peak is None else peak <= budget


def _verdict(within: bool | None) -> tuple[str, ...]:
    if within is None:
        return ()
    return ("the measured peak is within the budget" if within else "the measured peak is above the budget",)


def _sentences(steps: Sequence[_Step], end: _End) -> tuple[str, ...]:
    if not steps:
        return ("no step was logged",)
    losses = [step.loss for step in steps if step.loss is not None]
    found = [f"{steps[-1].step} steps" + (f", stopped by {end.stopped}" if end.stopped else "")]
    if losses:
        found.append(f"loss from {losses[0]:.6f} to {losses[-1]:.6f}")
    return tuple(found)


def _facts(start: _Start, steps: Sequence[_Step], end: _End) -> Iterator[tuple[str, str]]:
    if start.parameters is not None:
        yield "parameters of a rank", format_count(start.parameters)
    yield "ranks", str(start.world)
    sizes = " ".join(f"{key} {value}" for key, value in start.layout.items() if value > 1)
    yield "layout", sizes or "one process"
    if start.accumulation > 1:
        yield "accumulation", f"{start.accumulation} micro-batches a step"
    seconds = [s.step_seconds for s in steps if s.step_seconds is not None and not s.measured]
    if seconds:
        yield "step", f"{format_seconds(median(seconds))} (median of {len(seconds)})"
    if end.eval_loss is not None:
        yield "evaluation loss", f"{end.eval_loss:.6f}"
    for digest in start.plans:
        yield "plan", digest


def _phases(levels: Mapping[str, StepLevels | None], measured: Mapping[str, int]) -> tuple[PhaseBytes, ...]:
    found = {row.phase: row for row in phases_of({**levels, "measured": None})}
    return tuple(
        PhaseBytes(
            phase=name,
            predicted_bytes=found[name].predicted_bytes if name in found else None,
            measured_bytes=measured.get(name),
        )
        for name in dict.fromkeys((*found, *measured))
    )


def _layers(plans: Sequence[Plan]) -> Iterator[LayerBytes]:
    for number, plan in enumerate(plans):
        for layer in plan_subject(plan, "", {}).layers:
            yield LayerBytes(
                layer=layer.layer,
                policy=layer.policy,
                predicted_bytes=layer.predicted_bytes,
                host_bytes=layer.host_bytes,
                recompute_flops=layer.recompute_flops,
                stage=number if len(plans) > 1 else None,
            )


def _thinned(steps: Sequence[_Step]) -> Iterator[TrainStep]:
    every = -(-len(steps) // MOST_STEPS)
    for index, step in enumerate(steps):
        if index % max(1, every) == 0 or index == len(steps) - 1:
            yield TrainStep(
                step=step.step,
                loss=step.loss,
                step_seconds=step.step_seconds,
                tokens_per_second=step.tokens_per_second,
                peak_bytes=max(step.peak_bytes.values()) if step.peak_bytes else None,
                measured=step.measured,
            )


# read subject --------------------------------------------------------------------------------------------------------


LOG: Final = "log.jsonl"
Read = TypeVar("Read")
_EXPECTED: Final = f"expected {PLAN_SCHEMA}, {PROOF_SCHEMA}, or {LOG} of a run ({RUN_SCHEMA})"


def read_subject(path: Path) -> Subject:
    """What a file, or the log folder of a run, says.

    Raises:
        UsageError: it is none of these documents, or does not keep to its schema or to the limits.
    """
    if path.is_dir():
        path = path / LOG
        if not path.is_file():
            raise UsageError(f"there is no {LOG} in {path.parent}; give a run's log folder, or a file")
    text, name = read_text(path), str(path)
    if path.suffix == ".jsonl":
        return _clean(replace(run_subject(text, name, plans=_plans_beside(path)), name=name))
    document = parse_json(text, name)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == PROOF_SCHEMA:
        return _clean(proof_subject(_read(lambda: Proof.from_json(text), name), name))
    if schema != PLAN_SCHEMA:
        raise UsageError(f"{name}: {f'schema {schema!r}' if schema else 'no schema'}; {_EXPECTED}")
    if document.get("feasible") is False:
        raise UsageError(f"{name} says that no plan fits its budget; there is nothing to report about")
    if document.get("made_from") == DESCRIBED:
        described = _read(lambda: described_plan().validate_json(text), name)
        return _clean(described_subject(described, name))
    plan = _read(lambda: Plan.from_json(text), name)
    about = _read(lambda: _about().validate_json(text), name)
    return _clean(plan_subject(plan, name, about.environment or {}))


def _read(read: Callable[[], Read], name: str) -> Read:
    try:
        return read()
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except PlanMismatch as error:
        raise UsageError(f"{name}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"{name}: {where}: {first['msg']} (one of {error.error_count()})") from None


def _clean(subject: Subject) -> Subject:
    """Whatever was in the file, nothing in it makes a terminal do something."""
    made: Subject = TypeAdapter(Subject).validate_python(all_printable(subject.data()))
    return made


def _plans_beside(log: Path) -> tuple[Plan, ...]:
    """Plans that the run left beside its log; none where there are none, or they cannot be read."""
    found = []
    for path in sorted(log.parent.glob("plan*.json"))[:64]:
        try:
            found.append(Plan.from_json(read_text(path)))
        except (UsageError, PlanMismatch):
            continue
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _About:
    """What a live plan's document says beside the plan."""

    environment: dict[str, str] | None = None


@cache
def _about() -> TypeAdapter[_About]:
    return TypeAdapter(_About)


# Plans of runs that only a spec describes, as subjects of a report ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _DescribedLayer:
    layer: str
    stage: int
    policy: str
    kept_bytes: int
    offloaded_bytes: int = 0
    recompute_flops: int = 0


@dataclass(frozen=True, kw_only=True)
class _DescribedPredicted:
    peak_bytes: int
    step_seconds: float = 0.0
    overhead_fraction: float = 0.0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _DescribedStage:
    stage: int
    peak_bytes: int
    in_flight: int = 1


@dataclass(frozen=True, kw_only=True)
class _DescribedReason(Reason):
    layer: str


@dataclass(frozen=True, kw_only=True)
class DescribedPlan:
    """A plan document as its file has it."""

    model: str
    budget_bytes: int
    minimum_budget_bytes: int
    predicted: _DescribedPredicted
    layers: tuple[_DescribedLayer, ...]
    stages: tuple[_DescribedStage, ...] = ()
    hardware: str = ""
    hash: str = ""
    reasons: tuple[_DescribedReason, ...] = ()
    warnings: tuple[str, ...] = ()


@cache
def described_plan() -> TypeAdapter[DescribedPlan]:
    """Reads one."""
    return TypeAdapter(DescribedPlan)


def described_subject(plan: DescribedPlan, name: str) -> Subject:
    """A plan of a run that only its spec describes: bytes are of one micro-batch on one rank."""
    reasons = {reason.layer: reason for reason in plan.reasons}
    named = [layer for layer in plan.layers if layer.layer in reasons]
    facts = [
        ("model", plan.model),
        *(("left out", text) for text in plan.warnings),
        ("hardware", plan.hardware),
        ("recompute", f"{format_percent(plan.predicted.overhead_fraction)} of a step's time, predicted"),
        ("step", format_seconds(plan.predicted.step_seconds)),
        ("layers", f"{format_count(len(plan.layers))} on {len(plan.stages)} pipeline stages"),
        ("hash", plan.hash),
    ]
    return Subject(
        kind=Kind.PLAN,
        name=name,
        facts=tuple((key, value) for key, value in facts if value),
        amounts=amounts_of(
            [
                ("budget", plan.budget_bytes),
                ("smallest budget", plan.minimum_budget_bytes),
                ("predicted peak", plan.predicted.peak_bytes),
                ("on the host", plan.predicted.host_bytes or None),
            ]
        ),
        phases=tuple(PhaseBytes(phase=f"stage {s.stage}", predicted_bytes=s.peak_bytes) for s in plan.stages),
        layers=tuple(
            LayerBytes(
                layer=layer.layer,
                policy=layer.policy,
                predicted_bytes=layer.kept_bytes,
                host_bytes=layer.offloaded_bytes,
                recompute_flops=layer.recompute_flops,
                why=str(reasons.get(layer.layer, "")),
                stage=layer.stage,
            )
            for layer in plan.layers
        ),
        grids=_named_grid([(layer.layer, reasons[layer.layer]) for layer in named]),
        command=f"jettison plan {plan.model} --budget {plan.budget_bytes}B --format json",
    )


def _named_grid(layers: Sequence[tuple[str, Reason]]) -> tuple[Grid, ...]:
    """Of the tensors that some layer does not keep; such a plan names no others."""
    names = dict.fromkeys(name for _, reason in layers for name in (*reason.again, *reason.moved))
    if not names:
        return ()

    def fate(reason: Reason, name: str) -> Fate:
        return Fate.AGAIN if name in reason.again else Fate.HOST if name in reason.moved else Fate.KEEP

    return (
        Grid(
            title="layers",
            layers=tuple(layer for layer, _ in layers),
            tensors=tuple(TensorKind(name=name, path="", shape=(), dtype="", nbytes=0) for name in names),
            fates=tuple(tuple(fate(reason, name) for _, reason in layers) for name in names),
        ),
    )
