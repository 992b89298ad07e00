"""Proofs and plans of live models as subjects of a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jettison.core.units import format_percent, format_seconds
from jettison.ledger.levels import StepLevels
from jettison.report.proof import Proof
from jettison.report.subject import Amount, Decided, Grid, Kind, LayerBytes, PhaseBytes, Ratio, Subject, grid_of
from jettison.report.tables import ROOT_NAME
from jettison.solve.plan import LayerPlan, Plan, PlanTensor


def proof_subject(proof: Proof, name: str) -> Subject:
    """A proof, as `verify` made it."""
    amounts = [
        ("budget", proof.budget_bytes),
        ("predicted peak", proof.predicted_peak_bytes),
        ("measured peak", proof.measured_peak_bytes),
        ("peak of plain autograd", proof.baseline_peak_bytes),
    ]
    levels = {"predicted": proof.predicted_levels, "measured": proof.measured_levels, "plain": proof.baseline_levels}
    return Subject(
        kind=Kind.PROOF,
        name=name,
        holds=proof.passed,
        sentences=("proven",) if proof.passed else (*proof.failures(), *proof.departures, *proof.differences),
        facts=tuple(_proof_facts(proof)),
        amounts=amounts_of(amounts),
        phases=phases_of(levels),
        layers=tuple(
            LayerBytes(
                layer=one.layer,
                policy=one.policy if one.counted else "not recorded",
                predicted_bytes=one.predicted_bytes if one.counted else None,
                measured_bytes=one.observed_bytes if one.counted else None,
                plain_bytes=one.plain_bytes if one.counted else None,
            )
            for one in proof.layers
        ),
        grids=_grids(
            [
                Decided(
                    layer=one.layer,
                    digest=one.digest,
                    kept=frozenset(one.kept),
                    offloaded=frozenset(one.offloaded),
                    packed=frozenset(one.packed),
                )
                for one in proof.layers
                if one.digest
            ],
            proof.tensors,
        ),
        levels={key: found for key, found in levels.items() if found is not None},
        ratio=Ratio(
            median=proof.step_time_ratio,
            low=proof.step_time_ratio_low,
            high=proof.step_time_ratio_high,
            plain_seconds=proof.baseline_step_seconds,
            rounds=proof.rounds,
        ),
        environment=tuple((proof.environment or {"torch": proof.torch_version}).items()),
        command="jettison verify plan.json --out proof.json",
    )


def _proof_facts(proof: Proof) -> Iterator[tuple[str, str]]:
    same = f"{proof.gradients_compared} gradients compared to the bit in {proof.steps} steps"
    yield "gradients", f"{'identical' if proof.gradients_identical else 'DIFFERENT'}: {same}"
    if proof.prediction_error is not None:
        yield "predicted peak", f"{proof.prediction_error:+.2%} off the measured one"
    yield "measured peak", f"{format_percent(_share(proof))} of plain autograd's"
    if proof.left_out is not None:
        yield "plain copy", proof.left_out
    yield "device", proof.device
    yield "plan", proof.plan_hash or "none: a policy was applied"


def plan_subject(plan: Plan, name: str, environment: dict[str, str]) -> Subject:
    """A plan of a live model."""
    predicted = plan.predicted
    facts = [
        ("recompute", f"{format_percent(predicted.overhead_fraction)} of a step's time, predicted"),
        ("solver", f"gap {format_percent(plan.solver.gap)}, {format_seconds(plan.solver.seconds)}"),
        ("hash", plan.hash),
    ]
    if plan.segments:
        facts.append(("segments", ", ".join(f"{a} to {b}" for a, b in plan.segments)))
    levels = {"predicted": plan.levels}
    entries = (*plan.layers, plan.root)
    return Subject(
        kind=Kind.PLAN,
        name=name,
        facts=tuple(facts),
        amounts=amounts_of(
            [
                ("budget", plan.budget_bytes),
                ("smallest budget", plan.minimum_budget_bytes),
                ("predicted peak", predicted.peak_bytes),
            ]
        ),
        phases=phases_of(levels),
        layers=tuple(_planned(entry) for entry in entries),
        grids=_grids([_decided(entry) for entry in entries], plan.tensors),
        levels={key: found for key, found in levels.items() if found is not None},
        environment=tuple((environment or {"torch": plan.torch_version}).items()),
        command=f"jettison plan MODEL --budget {plan.budget_bytes}B --out plan.json",
    )


def _planned(entry: LayerPlan) -> LayerBytes:
    return LayerBytes(
        layer=entry.layer or ROOT_NAME,
        policy=str(entry.policy),
        predicted_bytes=entry.kept_bytes,
        host_bytes=entry.offloaded_bytes,
        recompute_flops=entry.recompute_flops,
    )


def _decided(entry: LayerPlan) -> Decided:
    kept, offloaded, packed = map(frozenset, (entry.kept, entry.offloaded, entry.packed))
    return Decided(layer=entry.layer or ROOT_NAME, digest=entry.digest, kept=kept, offloaded=offloaded, packed=packed)


def plan_grids(plans: Iterable[Plan]) -> tuple[Grid, ...]:
    """Of all layers of several plans, one a stage."""
    found = tuple(plans)
    tensors = tuple(dict.fromkeys(tensor for plan in found for tensor in plan.tensors))
    return _grids([_decided(entry) for plan in found for entry in (*plan.layers, plan.root)], tensors)


def _grids(decided: Sequence[Decided], tensors: Sequence[PlanTensor]) -> tuple[Grid, ...]:
    """The layers, and apart from them what is around: it has other tensors."""
    parts = (
        ("layers", [one for one in decided if one.layer != ROOT_NAME]),
        (ROOT_NAME, [one for one in decided if one.layer == ROOT_NAME]),
    )
    grids = (grid_of(title, part, tensors) for title, part in parts)
    return tuple(grid for grid in grids if grid is not None)


def phases_of(levels: dict[str, StepLevels | None]) -> tuple[PhaseBytes, ...]:
    """Peaks by phase, of whatever is known."""
    names = dict.fromkeys(phase.phase for found in levels.values() if found for phase in found.phases)

    def peak(which: str, phase: str) -> int | None:
        found = levels.get(which)
        return None if found is None else found.peak_of(phase)

    return tuple(
        PhaseBytes(
            phase=name,
            predicted_bytes=peak("predicted", name),
            measured_bytes=peak("measured", name),
            plain_bytes=peak("plain", name),
        )
        for name in names
    )


def amounts_of(found: Sequence[tuple[str, int | None]]) -> tuple[Amount, ...]:
    return tuple(Amount(what=what, nbytes=nbytes) for what, nbytes in found if nbytes is not None)


def _share(proof: Proof) -> float:
    return proof.measured_peak_bytes / max(1, proof.baseline_peak_bytes)
