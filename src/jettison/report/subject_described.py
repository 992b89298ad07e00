"""Plans of runs that only a spec describes, as subjects of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import TypeAdapter

from jettison.explain.layer_reasons import Reason
from jettison.report.subject import Fate, Grid, Kind, LayerBytes, PhaseBytes, Subject, TensorKind
from jettison.report.subject_live import amounts_of
from jettison.units import format_count, format_percent, format_seconds


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
