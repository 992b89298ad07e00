"""The log of a training run as the subject of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from jettison.errors import UsageError
from jettison.ledger.levels import StepLevels
from jettison.report.subject import Amount, Kind, LayerBytes, PhaseBytes, Subject, TrainStep
from jettison.report.subject_live import phases_of, plan_grids, plan_subject
from jettison.report.untrusted import parse_json
from jettison.solve.plan import Plan
from jettison.units import format_count, format_seconds

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
        sentences=_sentences(steps, end),
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
