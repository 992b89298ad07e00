"""Tables for people. Each function takes a document and gives something that rich can print; nothing here computes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jettison.ledger.record import Ledger
from jettison.plan.artefact import LayerPlan, Plan
from jettison.report.proof import LayerProof, Proof
from jettison.report.summary import LedgerReport
from jettison.units import format_bytes, format_count, format_flops, format_percent, format_ratio, format_seconds

ROOT_NAME = "embedding, head and loss"
ABOUT = 0.02  # a prediction this close to what was measured is a good one


def ledger_table(report: LedgerReport) -> RenderableType:
    """Layers with what they save, the roles that take the bytes, and the peak of a step."""
    stage = report.stages[0]
    facts = _facts(
        [
            ("model", f"{report.model}, {format_count(report.parameters)} parameters, recompute {report.recompute}"),
            ("parameters", format_bytes(stage.parameter_bytes)),
            ("gradients", format_bytes(stage.gradient_bytes)),
            ("optimizer state", format_bytes(stage.optimizer_bytes)),
            ("saved for backward", format_bytes(stage.activation_bytes)),
            ("peak of a step", f"{format_bytes(report.peak_bytes)} ({_phases(report)})"),
        ]
    )
    return Group(facts, _layers_table(report.ledger), _roles_table(report.ledger))


def plan_table(plan: Plan) -> RenderableType:
    """What each layer does, and what the plan claims."""
    predicted = plan.predicted
    facts = [
        ("budget", _exact(plan.budget_bytes)),
        ("predicted peak", _exact(predicted.peak_bytes)),
        ("smallest budget", _exact(plan.minimum_budget_bytes)),
        ("recompute", f"{format_percent(predicted.overhead_fraction)} of a step's time"),
        ("solver", f"gap {format_percent(plan.solver.gap)}, {format_seconds(plan.solver.seconds)}"),
    ]
    if plan.segments:
        runs = ", ".join(f"{first} to {last}" for first, last in plan.segments)
        facts.append(("segments", f"only the first layer holds its input in {runs}"))
    table = Table(title="What each layer does", title_justify="left")
    for name in ("layer", "policy"):
        table.add_column(name, overflow="fold")
    for name in ("kept", "recomputed"):
        table.add_column(name, justify="right")
    for names, entry in _alike(plan):
        table.add_row(names, str(entry.policy), format_bytes(entry.kept_bytes), format_flops(entry.recompute_flops))
    return Group(_facts(facts), table)


def proof_table(proof: Proof) -> RenderableType:
    """Claims and what was seen, then predicted and observed bytes side by side."""
    facts = [
        ("gradients", _same(proof.gradients_identical, f"{proof.gradients_compared} tensors, {proof.steps} steps")),
        ("losses", _same(proof.losses_identical)),
        ("random number streams", _same(proof.random_state_identical)),
        ("buffers", _same(proof.buffers_identical)),
        ("parameters afterwards", _same(proof.parameters_identical)),
    ]
    if proof.budget_bytes is not None:
        facts.append(("budget", _exact(proof.budget_bytes)))
    if proof.predicted_peak_bytes is not None and proof.prediction_error is not None:
        facts.append(("predicted peak", f"{_exact(proof.predicted_peak_bytes)}, {proof.prediction_error:+.2%} off"))
    share = proof.measured_peak_bytes / proof.baseline_peak_bytes
    facts += [
        ("measured peak", f"{_exact(proof.measured_peak_bytes)}, {format_percent(share)} of plain autograd's"),
        ("plain autograd's peak", _exact(proof.baseline_peak_bytes)),
        (
            "step time",
            f"{format_ratio(proof.step_time_ratio)} plain autograd's {format_seconds(proof.baseline_step_seconds)} "
            f"(quartiles {proof.step_time_ratio_low:.2f} to {proof.step_time_ratio_high:.2f}, {proof.rounds} rounds)",
        ),
    ]
    table = Table(title="Bytes held between forward and backward", title_justify="left")
    for name in ("layer", "policy"):
        table.add_column(name, overflow="fold")
    for name in ("plain autograd", "predicted", "observed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for names, entry in _equal(proof.layers):
        agree = entry.predicted_bytes == entry.observed_bytes
        note = "not recorded" if not entry.counted else "" if agree else "differs"
        table.add_row(names, entry.policy, *map(format_bytes, _sides(entry)), note)
    total = [sum(column) for column in zip(*map(_sides, proof.layers), strict=True)] or [0, 0, 0]
    table.add_section()
    table.add_row("total", "", *map(format_bytes, total), "" if proof.saved_bytes_agree else "differs")
    verdict = "proven" if proof.passed else "NOT PROVEN: " + "; ".join(proof.failures())
    lines = [Text(f"  {line}") for line in proof.differences]
    return Group(_facts(facts), table, Text(verdict, style="bold green" if proof.passed else "bold red"), *lines)


def doctor_table(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """Versions and devices."""
    return _facts(list(facts))


def _facts(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes}B)"


def _same(holds: bool, more: str = "") -> str:
    return ("identical to the bit" if holds else "DIFFERENT") + (f" ({more})" if more else "")


def _phases(report: LedgerReport) -> str:
    return ", ".join(f"{phase.phase} {format_bytes(phase.peak_bytes)}" for phase in report.phases)


def _layers_table(ledger: Ledger) -> Table:
    table = Table(title="Saved for backward, by layer", title_justify="left")
    table.add_column("layer", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("tensors", justify="right")
    counts: dict[str, int] = dict.fromkeys(ledger.layers, 0)
    for entry in ledger:
        counts[entry.layer] += 1
    rows = [(layer, nbytes, counts[layer]) for layer, nbytes in ledger.by_layer().items()]
    for (nbytes, tensors), group in groupby(rows, key=lambda row: row[1:]):
        table.add_row(_span([row[0] for row in group]), format_bytes(nbytes), str(tensors))
    table.add_section()
    table.add_row("total", format_bytes(ledger.total_bytes()), str(len(ledger)))
    return table


def _roles_table(ledger: Ledger) -> Table:
    table = Table(title="By role", title_justify="left")
    for name, justify in (("role", "left"), ("bytes", "right"), ("storages", "right"), ("share", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    owners: dict[str, str] = {}
    for entry in ledger:
        owners.setdefault(entry.storage, entry.role)
    totals: dict[str, list[int]] = {}
    for storage, nbytes in ledger.storage_bytes().items():
        row = totals.setdefault(owners[storage], [0, 0])
        row[0] += nbytes
        row[1] += 1
    whole = ledger.total_bytes() or 1
    for role, (nbytes, storages) in sorted(totals.items(), key=lambda item: (-item[1][0], item[0])):
        table.add_row(role, format_bytes(nbytes), str(storages), format_percent(nbytes / whole))
    return table


def _alike(plan: Plan) -> Iterable[tuple[str, LayerPlan]]:
    """Neighbours that do the same are one row."""
    for _, group in groupby(plan.layers, key=lambda e: (e.policy, e.kept_bytes, e.recompute_flops)):
        entries = list(group)
        yield _span([entry.layer for entry in entries]), entries[0]
    yield ROOT_NAME, plan.root


def _equal(layers: tuple[LayerProof, ...]) -> Iterable[tuple[str, LayerProof]]:
    for _, group in groupby(layers, key=lambda e: (e.policy, *_sides(e), e.counted)):
        entries = list(group)
        yield _span([entry.layer for entry in entries]), entries[0]


def _sides(entry: LayerProof) -> tuple[int, int, int]:
    return entry.plain_bytes, entry.predicted_bytes, entry.observed_bytes


def _span(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    stem = names[0].rpartition(".")[0]
    last = names[-1].removeprefix(f"{stem}.") if stem else names[-1]
    return f"{names[0]} to {last} ({len(names)})"
