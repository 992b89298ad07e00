"""Tables for people. Each function takes a document and gives something that rich can print; nothing here computes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.units import format_bytes, format_flops, format_percent, format_ratio, format_seconds
from jettison.report.parts import exact, facts_table, span, titled

if TYPE_CHECKING:  # reading plans and proofs takes libraries that most commands can do without
    from jettison.report.proof import LayerProof, Proof
    from jettison.solve.plan import LayerPlan, Plan

ROOT_NAME = "embedding, head and loss"


def plan_table(plan: Plan) -> RenderableType:
    """What each layer does, and what the plan claims."""
    predicted = plan.predicted
    moves = any(entry.offloaded for entry in plan.layers)
    waits = ", copies" if moves else ""
    facts = [
        ("budget", exact(plan.budget_bytes)),
        ("predicted peak", exact(predicted.peak_bytes)),
        ("smallest budget", exact(plan.minimum_budget_bytes)),
        ("recompute" + waits, f"{format_percent(predicted.overhead_fraction)} of a step's time"),
        ("solver", f"gap {format_percent(plan.solver.gap)}, {format_seconds(plan.solver.seconds)}"),
    ]
    if plan.segments:
        runs = ", ".join(f"{first} to {last}" for first, last in plan.segments)
        facts.append(("segments", f"only the first layer holds its input in {runs}"))
    if moves:
        facts.append(("on the host", exact(predicted.host_bytes)))
    columns = ("kept", "on the host", "recomputed") if moves else ("kept", "recomputed")
    table = titled("What each layer does", ("layer", "policy"), columns)
    for names, entry in _alike(plan):
        moved = [format_bytes(entry.offloaded_bytes)] if moves else []
        flops = format_flops(entry.recompute_flops)
        table.add_row(names, str(entry.policy), format_bytes(entry.kept_bytes), *moved, flops)
    return Group(facts_table(facts), table)


def proof_table(proof: Proof) -> RenderableType:
    """Claims and what was seen, then predicted and observed bytes side by side."""
    facts = [
        ("gradients", _same(proof.gradients_identical, f"{proof.gradients_compared} tensors, {proof.steps} steps")),
        ("losses", _same(proof.losses_identical)),
        ("random number streams", _same(proof.random_state_identical)),
        ("buffers", _same(proof.buffers_identical)),
        ("parameters afterwards", _same(proof.parameters_identical)),
    ]
    if proof.left_out is not None:
        facts.insert(0, ("plain copy", proof.left_out))
    if proof.values_compared:
        said = f"{proof.values_compared:,} tensors came back in backward, {format_bytes(proof.values_bytes)}"
        facts.append(("every value", _same(not proof.departures, said)))
    if proof.repeats:
        facts.append(("repeated", _same(proof.repeats_identical, f"{proof.repeats} times from one state")))
    if proof.budget_bytes is not None:
        facts.append(("budget", exact(proof.budget_bytes)))
    if proof.predicted_peak_bytes is not None and proof.prediction_error is not None:
        facts.append(("predicted peak", f"{exact(proof.predicted_peak_bytes)}, {proof.prediction_error:+.2%} off"))
    share = proof.measured_peak_bytes / proof.baseline_peak_bytes
    facts += [
        ("measured peak", f"{exact(proof.measured_peak_bytes)}, {format_percent(share)} of plain autograd's"),
        ("plain autograd's peak", exact(proof.baseline_peak_bytes)),
        (
            "step time",
            f"{format_ratio(proof.step_time_ratio)} plain autograd's {format_seconds(proof.baseline_step_seconds)} "
            f"(quartiles {proof.step_time_ratio_low:.2f} to {proof.step_time_ratio_high:.2f}, {proof.rounds} rounds)",
        ),
    ]
    verdict = "proven" if proof.passed else "NOT PROVEN: " + "; ".join(proof.failures())
    lines = [Text(f"  {line}") for line in (*proof.departures, *proof.differences)]
    judged = (Text(verdict, style="bold green" if proof.passed else "bold red"), *lines)
    if not proof.layers:
        return Group(facts_table(facts), *judged)
    title = "Bytes held between forward and backward"
    table = titled(title, ("layer", "policy"), ("plain autograd", "predicted", "observed"))
    table.add_column("")
    for names, entry in _equal(proof.layers):
        agree = entry.predicted_bytes == entry.observed_bytes
        note = "not recorded" if not entry.counted else "" if agree else "differs"
        table.add_row(names, entry.policy, *map(format_bytes, _sides(entry)), note)
    total = [sum(column) for column in zip(*map(_sides, proof.layers), strict=True)] or [0, 0, 0]
    table.add_section()
    table.add_row("total", "", *map(format_bytes, total), "" if proof.saved_bytes_agree else "differs")
    return Group(facts_table(facts), table, *judged)


def doctor_table(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """Versions and devices."""
    return facts_table(list(facts))


def _same(holds: bool, more: str = "") -> str:
    return ("identical to the bit" if holds else "DIFFERENT") + (f" ({more})" if more else "")


def _alike(plan: Plan) -> Iterable[tuple[str, LayerPlan]]:
    """Neighbours that do the same are one row."""
    for _, group in groupby(plan.layers, key=lambda e: (e.policy, e.kept_bytes, e.offloaded_bytes, e.recompute_flops)):
        entries = list(group)
        yield span([entry.layer for entry in entries]), entries[0]
    yield ROOT_NAME, plan.root


def _equal(layers: tuple[LayerProof, ...]) -> Iterable[tuple[str, LayerProof]]:
    for _, group in groupby(layers, key=lambda e: (e.policy, *_sides(e), e.counted)):
        entries = list(group)
        yield span([entry.layer for entry in entries]), entries[0]


def _sides(entry: LayerProof) -> tuple[int, int, int]:
    return entry.plain_bytes, entry.predicted_bytes, entry.observed_bytes
