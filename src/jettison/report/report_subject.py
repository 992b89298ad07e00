"""Subjects of reports: plans, proofs and training runs in one form, whatever they were read from.

Figures, tables and the JSON of a report are all made from a `ReportSubject`, and nothing is worked out twice. Each kind
of document has an adapter below, and `read_subject` chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from jettison.core.errors import PlanMismatch, UsageError, first_problem
from jettison.core.objects import each_renamed
from jettison.core.units import format_count, format_percent, format_seconds
from jettison.ledger.step_levels import StepLevels
from jettison.report.alternatives import Flip, Reason, flips_text
from jettison.report.plan import DESCRIBED, ROOT_NAME, LayerChoice
from jettison.report.proof import SCHEMA as PROOF_SCHEMA
from jettison.report.proof import LayerProof, Proof
from jettison.report.untrusted_json import all_printable, parse_json, read_text
from jettison.solve.plan import SCHEMA as PLAN_SCHEMA
from jettison.solve.plan import LayerPlan, Plan, PlanTensor
from jettison.spec.device_allowance import Range

LOG: Final = "log.jsonl"
RUN_SCHEMA: Final = "jettison.train/1"
MOST_STEPS: Final = 1500
"""Points of a curve; of longer runs every so many steps are shown, the first and the last among them."""
_EXPECTED: Final = f"expected {PLAN_SCHEMA}, {PROOF_SCHEMA}, or {LOG} of a run ({RUN_SCHEMA})"


class SubjectKind(StrEnum):
    """Kinds of documents."""

    PLAN = "plan"
    PROOF = "proof"
    RUN = "training run"


class TensorPolicy(StrEnum):
    """Policy of a saved tensor between forward and backward."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    OFFLOAD = "offloaded"
    PACK = "packed"
    SHARED = "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """One number of bytes of a step. ``what``: budget, smallest budget, predicted, measured or plain."""

    what: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBytes:
    """The peak in a phase of the step; None where it is not known."""

    phase: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    baseline_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectLayer:
    """Bytes of a layer between forward and backward; None where they are not known."""

    layer: str
    policy: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    baseline_bytes: int | None = None
    host_bytes: int | None = None
    recompute_flops: int | None = None
    why: str = ""
    stage: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """A saved tensor as it occurs in several layers."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Tensors by layers: ``policies[i][j]`` is that of tensor i in layer j, None where the layer has none such."""

    title: str
    layers: tuple[str, ...]
    tensors: tuple[TensorKind, ...]
    policies: tuple[tuple[TensorPolicy | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Step time ÷ that of plain autograd: the median over interleaved rounds and its quartiles."""

    median: float
    low: float
    high: float
    baseline_seconds: float
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """One line of a run's log."""

    step: int
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    measured: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NextGiBRow:
    """Changes under a larger budget, and seconds of a step that it saves."""

    budget_bytes: int
    changes: str
    saved_seconds: float


@dataclass(frozen=True, kw_only=True)
class ReportSubject:
    """One document.

    Args:
        name: what it was read from.
        holds: whether it shows what it is to show; None where nothing was run.
        sentences: what was shown or not, first ones first.
        facts: what else there is to say, as names and values.
        levels: bytes over the step: predicted, measured, baseline.
        command: what makes such a document.
        peak_roles: bytes of the peak by role; together they are the peak.
        next_gib: what each next GiB would change; None if not requested.
    """

    kind: SubjectKind
    name: str
    holds: bool | None = None
    sentences: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    amounts: tuple[Amount, ...] = ()
    phases: tuple[PhaseBytes, ...] = ()
    layers: tuple[SubjectLayer, ...] = ()
    grids: tuple[Grid, ...] = ()
    levels: dict[str, StepLevels] = field(default_factory=dict)
    ratio: Ratio | None = None
    steps: tuple[TrainStep, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    command: str = ""
    peak_roles: tuple[Amount, ...] = ()
    next_gib: tuple[NextGiBRow, ...] | None = None


# What is known of any of them: amounts, phases, grids -----------------------------------------------------------------


def _amounts(**found: int | None) -> tuple[Amount, ...]:
    """By name, with underscores for spaces; those that are known."""
    known = ((name.replace("_", " "), nbytes) for name, nbytes in found.items())
    return tuple(Amount(what=name, nbytes=nbytes) for name, nbytes in known if nbytes is not None)


def _known(**levels: StepLevels | None) -> dict[str, StepLevels]:
    return {key: found for key, found in levels.items() if found is not None}


def _phases(levels: Mapping[str, StepLevels]) -> tuple[PhaseBytes, ...]:
    """Peaks by phase, of whatever is known."""
    names = dict.fromkeys(phase.phase for found in levels.values() for phase in found.phases)
    return tuple(
        PhaseBytes(phase=name, **{f"{key}_bytes": found.peak_of(name) for key, found in levels.items()})
        for name in names
    )


def _grids(layers: Sequence[LayerPlan | LayerProof], tensors: Sequence[PlanTensor]) -> tuple[Grid, ...]:
    """The layers, and apart from them the root. Tensors that mean the same in several layers are one row."""
    found = []
    for title in ("layers", ROOT_NAME):
        part = [one for one in layers if (one.layer in ("", ROOT_NAME)) is (title == ROOT_NAME)]
        columns = [dict(_named(layer, tensors)) for layer in part]
        kinds = list(dict.fromkeys(kind for column in columns for kind in column))
        grid = Grid(
            title=title,
            layers=tuple(layer.layer or ROOT_NAME for layer in part),
            tensors=tuple(kind for kind, _ in kinds),
            policies=tuple(tuple(column.get(kind) for column in columns) for kind in kinds),
        )
        found += [grid] if kinds else []
    return tuple(found)


def _named(
    layer: LayerPlan | LayerProof, tensors: Sequence[PlanTensor]
) -> Iterator[tuple[tuple[TensorKind, int], TensorPolicy]]:
    """A layer's tensors, those that look alike told apart by their order, and what happens to each."""
    policies = {
        **dict.fromkeys(layer.kept, TensorPolicy.KEEP),
        **dict.fromkeys(layer.offloaded, TensorPolicy.OFFLOAD),
        **dict.fromkeys(layer.packed, TensorPolicy.PACK),
    }
    seen: dict[TensorKind, int] = {}
    for one in (one for one in tensors if one.digest == layer.digest):
        kind = TensorKind(name=one.role or one.op, path=one.path, shape=one.shape, dtype=one.dtype, nbytes=one.nbytes)
        seen[kind] = seen.get(kind, 0) + 1
        yield (kind, seen[kind]), policies.get(one.buffer, TensorPolicy.SHARED if one.free else TensorPolicy.RECOMPUTE)


# Proofs and plans of live models --------------------------------------------------------------------------------------


def proof_subject(proof: Proof, name: str) -> ReportSubject:
    """A proof, as `verify` made it."""
    levels = _known(predicted=proof.predicted_levels, measured=proof.measured_levels, baseline=proof.baseline_levels)
    return ReportSubject(
        kind=SubjectKind.PROOF,
        name=name,
        holds=proof.passed,
        sentences=("proven",) if proof.passed else (*proof.failures(), *proof.departures, *proof.differences),
        facts=tuple(_proof_facts(proof)),
        amounts=_amounts(
            budget=proof.budget_bytes,
            predicted_peak=proof.predicted_peak_bytes,
            measured_peak=proof.measured_peak_bytes,
            peak_of_plain_autograd=proof.baseline_peak_bytes,
        ),
        phases=_phases(levels),
        layers=tuple(
            SubjectLayer(
                layer=one.layer,
                policy=one.policy,
                predicted_bytes=one.predicted_bytes,
                measured_bytes=one.observed_bytes,
                baseline_bytes=one.baseline_bytes,
            )
            if one.counted
            else SubjectLayer(layer=one.layer, policy="not recorded")
            for one in proof.layers
        ),
        grids=_grids([one for one in proof.layers if one.digest], proof.tensors),
        levels=levels,
        ratio=Ratio(
            median=proof.step_time_ratio,
            low=proof.step_time_ratio_low,
            high=proof.step_time_ratio_high,
            baseline_seconds=proof.baseline_step_seconds,
            rounds=proof.rounds,
        ),
        environment=tuple((proof.environment or {"torch": proof.torch_version}).items()),
        command="jettison verify plan.json --out proof.json",
    )


def _proof_facts(proof: Proof) -> Iterator[tuple[str, str]]:
    same = f"{proof.gradients_compared} gradients compared bitwise in {proof.steps} steps"
    yield "gradients", f"{'identical' if proof.gradients_identical else 'DIFFERENT'}: {same}"
    if proof.prediction_error is not None:
        yield "predicted peak", f"{proof.prediction_error:+.2%} off the measured one"
    share = proof.measured_peak_bytes / max(1, proof.baseline_peak_bytes)
    yield "measured peak", f"{format_percent(share)} of plain autograd's"
    if proof.left_out is not None:
        yield "plain copy", proof.left_out
    yield "device", proof.device
    yield "plan", proof.plan_hash or "none: a policy was applied"


def plan_subject(plan: Plan, name: str, environment: dict[str, str]) -> ReportSubject:
    """A plan of a live model."""
    predicted, levels = plan.predicted, _known(predicted=plan.levels)
    facts = [
        ("recompute", f"{format_percent(predicted.overhead_fraction)} of a step's time, predicted"),
        ("solver", f"gap {format_percent(plan.solver.gap)}, {format_seconds(plan.solver.seconds)}"),
        ("hash", plan.hash),
    ]
    if plan.segments:
        facts.append(("segments", ", ".join(f"{a} to {b}" for a, b in plan.segments)))
    return ReportSubject(
        kind=SubjectKind.PLAN,
        name=name,
        facts=tuple(facts),
        amounts=_amounts(
            budget=plan.budget_bytes, smallest_budget=plan.minimum_budget_bytes, predicted_peak=predicted.peak_bytes
        ),
        phases=_phases(levels),
        layers=tuple(_planned(entry) for entry in (*plan.layers, plan.root)),
        grids=_plan_grids([plan]),
        levels=levels,
        environment=tuple((environment or {"torch": plan.torch_version}).items()),
        command=f"jettison plan MODEL --budget {plan.budget_bytes}B --out plan.json",
    )


def _planned(entry: LayerPlan | LayerChoice, *, stage: int | None = None, why: str = "") -> SubjectLayer:
    return SubjectLayer(
        layer=entry.layer or ROOT_NAME,
        policy=str(entry.policy),
        predicted_bytes=entry.kept_bytes,
        host_bytes=entry.offloaded_bytes,
        recompute_flops=entry.recompute_flops,
        why=why,
        stage=stage,
    )


def _plan_grids(plans: Sequence[Plan]) -> tuple[Grid, ...]:
    """Grids of all layers of several plans, one a stage."""
    tensors = tuple(dict.fromkeys(tensor for plan in plans for tensor in plan.tensors))
    return _grids([entry for plan in plans for entry in (*plan.layers, plan.root)], tensors)


# The log of a training run --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Start:
    schema: str
    world: int = 1
    layout: dict[str, int] = field(default_factory=dict)
    accumulation: int = 1
    parameters: int | None = None
    plans: tuple[str, ...] = ()
    predicted_peak_bytes: int | None = None
    torch: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _LogStep:
    step: int
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: dict[str, int] | None = None
    measured: bool = False


@dataclass(frozen=True, kw_only=True)
class _End:
    stopped: str | None = None
    predicted_peak_bytes: int | None = None
    first_step_peak_bytes: dict[str, int] | None = None
    second_step_peak_bytes: dict[str, int] | None = None
    levels: StepLevels | None = None
    eval_loss: float | None = None


def run_subject(text: str, name: str, *, plans: Sequence[Plan]) -> ReportSubject:
    """A training run: its log, and the plans that it followed. Raise `UsageError` if it is no log of a run.

    Args:
        plans: found in its folder; those count that the log names by their hashes.
    """
    start, steps, end = _events(text, name)
    followed = [plan for digest in start.plans for plan in plans if plan.hash == digest]
    predicted = max((p.levels for p in followed if p.levels), key=lambda found: found.peak_bytes, default=None)
    measured = end.second_step_peak_bytes or end.first_step_peak_bytes or {}
    peaks = [max(step.peak_bytes.values()) for step in steps if step.peak_bytes]
    budget = followed[0].budget_bytes if followed else None
    peak = max([*measured.values(), *peaks], default=None)
    within = None if budget is None or peak is None else peak <= budget
    every = max(1, -(-len(steps) // MOST_STEPS))
    phases = {row.phase: row for row in _phases(_known(predicted=predicted))}
    for phase, nbytes in measured.items():
        phases[phase] = replace(phases.get(phase, PhaseBytes(phase=phase)), measured_bytes=nbytes)
    return ReportSubject(
        kind=SubjectKind.RUN,
        name=name,
        holds=within,
        sentences=tuple(_sentences(steps, end, within)),
        facts=tuple(_run_facts(start, steps, end)),
        amounts=_amounts(
            budget=budget, predicted_peak=end.predicted_peak_bytes or start.predicted_peak_bytes, measured_peak=peak
        ),
        phases=tuple(phases.values()),
        layers=tuple(
            _planned(entry, stage=number if len(followed) > 1 else None)
            for number, plan in enumerate(followed)
            for entry in (*plan.layers, plan.root)
        ),
        grids=_plan_grids(followed),
        levels=_known(predicted=predicted, measured=end.levels),
        steps=tuple(
            TrainStep(**asdict(step) | {"peak_bytes": max((step.peak_bytes or {}).values(), default=None)})
            for index, step in enumerate(steps)
            if index % every == 0 or index == len(steps) - 1
        ),
        environment=tuple((start.environment or {"torch": start.torch}).items()),
        command="jettison train RECIPE",
    )


def _events(text: str, name: str) -> tuple[_Start, list[_LogStep], _End]:
    """The last start, all steps, the last end; a line that was torn off at the end of a file is left out."""
    kinds = {kind: TypeAdapter[Any](of) for kind, of in (("start", _Start), ("step", _LogStep), ("end", _End))}
    found: dict[str, Any] = {"start": None, "end": _End()}
    steps: dict[Any, _LogStep] = {}
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
        if not isinstance(kind, str) or kind not in kinds:
            continue
        try:
            said = kinds[kind].validate_python(entry)
        except ValidationError as error:
            raise UsageError(f"{where}: {first_problem(error)}") from None
        if kind == "step":
            steps[said.step] = said
        else:
            found[kind] = said
    start = found["start"]
    if start is None or start.schema != RUN_SCHEMA:
        raise UsageError(f"{name}: no line starts a run of schema {RUN_SCHEMA}; give the log.jsonl of `jettison train`")
    return start, list(steps.values()), found["end"]


def _sentences(steps: Sequence[_LogStep], end: _End, within: bool | None) -> Iterator[str]:
    if within is not None:
        yield f"the measured peak is {'within' if within else 'above'} the budget"
    stopped = f", stopped by {end.stopped}" if end.stopped else ""
    yield f"{steps[-1].step} steps{stopped}" if steps else "no step was logged"
    losses = [step.loss for step in steps if step.loss is not None]
    if losses:
        yield f"loss from {losses[0]:.6f} to {losses[-1]:.6f}"


def _run_facts(start: _Start, steps: Sequence[_LogStep], end: _End) -> Iterator[tuple[str, str]]:
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


# Plans of runs that only a spec describes -----------------------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True)
class _DescribedNext:
    budget_bytes: int
    saved_seconds: float
    flips: tuple[Flip, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _DescribedFigures:
    step_seconds: Range | None = None


@dataclass(frozen=True, kw_only=True)
class _DescribedPlan:
    model: str
    budget_bytes: int
    minimum_budget_bytes: int
    predicted: _DescribedPredicted
    layers: tuple[LayerChoice, ...]
    stages: tuple[_DescribedStage, ...] = ()
    hardware: str = ""
    hash: str = ""
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()
    peak_roles: dict[str, int] = field(default_factory=dict)
    figures: _DescribedFigures = _DescribedFigures()
    what_if: tuple[_DescribedNext, ...] | None = None


def _described_subject(plan: _DescribedPlan, name: str) -> ReportSubject:
    """Bytes are of one micro-batch on one rank. Such a plan names the tensors alone that some layer does not keep."""
    reasons = {reason.layer: reason for reason in plan.reasons}
    named = [layer.layer for layer in plan.layers if layer.layer in reasons]
    tensors = dict.fromkeys(name for layer in named for name in (*reasons[layer].recomputed, *reasons[layer].offloaded))

    def policy(reason: Reason, name: str) -> TensorPolicy:
        if name in reason.recomputed:
            return TensorPolicy.RECOMPUTE
        return TensorPolicy.OFFLOAD if name in reason.offloaded else TensorPolicy.KEEP

    grid = Grid(
        title="layers",
        layers=tuple(named),
        tensors=tuple(TensorKind(name=each, path="", shape=(), dtype="", nbytes=0) for each in tensors),
        policies=tuple(tuple(policy(reasons[layer], each) for layer in named) for each in tensors),
    )
    expected = plan.figures.step_seconds  # older documents have only the modelled time
    modelled = format_seconds(plan.predicted.step_seconds)
    facts = [
        ("model", plan.model),
        *(("left out", text) for text in plan.warnings),
        ("hardware", plan.hardware),
        ("recompute", f"{format_percent(plan.predicted.overhead_fraction)} of a step's time, predicted"),
        ("step", modelled if expected is None else expected.words(format_seconds)),
        (
            "layers",
            f"{format_count(len(plan.layers))} on {len(plan.stages)} pipeline stage{'s' * (len(plan.stages) != 1)}",
        ),
        ("hash", plan.hash),
    ]
    return ReportSubject(
        kind=SubjectKind.PLAN,
        name=name,
        facts=tuple((key, value) for key, value in facts if value),
        amounts=_amounts(
            budget=plan.budget_bytes,
            smallest_budget=plan.minimum_budget_bytes,
            predicted_peak=plan.predicted.peak_bytes,
            offloaded=plan.predicted.host_bytes or None,
        ),
        phases=tuple(PhaseBytes(phase=f"stage {s.stage}", predicted_bytes=s.peak_bytes) for s in plan.stages),
        layers=tuple(_planned(one, stage=one.stage, why=str(reasons.get(one.layer, ""))) for one in plan.layers),
        grids=(grid,) if tensors else (),
        command=f"jettison plan {plan.model} --budget {plan.budget_bytes}B --format json",
        peak_roles=tuple(Amount(what=role, nbytes=nbytes) for role, nbytes in plan.peak_roles.items()),
        next_gib=None
        if plan.what_if is None
        else tuple(
            NextGiBRow(budget_bytes=row.budget_bytes, changes=flips_text(row.flips), saved_seconds=row.saved_seconds)
            for row in plan.what_if
        ),
    )


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _About:
    """Keys of a live plan's document that the plan does not have."""

    environment: dict[str, str] | None = None


def read_subject(path: Path) -> ReportSubject:
    """Read a file, or a run's log folder. Raise `UsageError` if it is no such document, or beyond the limits."""
    if path.is_dir():
        path = path / LOG
        if not path.is_file():
            raise UsageError(f"there is no {LOG} in {path.parent}; give a run's log folder, or a file")
    # whatever was in the file, nothing in it makes a terminal do something
    return TypeAdapter(ReportSubject).validate_python(all_printable(asdict(_subject(path))))


def _subject(path: Path) -> ReportSubject:
    text, name = read_text(path), str(path)
    if path.suffix == ".jsonl":
        plans = []  # those in the log's folder that can be read
        for file in sorted(path.parent.glob("plan*.json"))[:64]:
            with suppress(UsageError, PlanMismatch):
                plans.append(Plan.from_json(read_text(file)))
        return run_subject(text, name, plans=plans)
    document = parse_json(text, name)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in (PROOF_SCHEMA, PLAN_SCHEMA):
        raise UsageError(f"{name}: {f'schema {schema!r}' if schema else 'no schema'}; {_EXPECTED}")
    if schema == PLAN_SCHEMA and document.get("feasible") is False:
        raise UsageError(f"{name} says that no plan fits its budget; there is nothing to report about")
    try:
        if schema == PROOF_SCHEMA:
            return proof_subject(Proof.from_json(text), name)
        if document.get("made_from") == DESCRIBED:
            if "reasons" in document:
                document["reasons"] = each_renamed(Reason, document["reasons"])
            return _described_subject(TypeAdapter(_DescribedPlan).validate_python(document), name)
        plan, about = Plan.from_json(text), TypeAdapter(_About).validate_json(text)
        return plan_subject(plan, name, about.environment or {})
    except ValidationError as error:
        raise UsageError(f"{name}: {first_problem(error)}") from None
    except (UsageError, PlanMismatch) as error:
        raise UsageError(f"{name}: {error}") from None
