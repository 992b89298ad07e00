"""A ledger report for people: the facts, what each layer saves, what takes the bytes, the stages, and the worst one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.objects import grouped
from jettison.core.units import format_bytes, format_count, format_percent, format_seconds
from jettison.formula.region import parameter_count, trained_parameter_count
from jettison.ledger.compare import describe
from jettison.ledger.ledger import storage_roles
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.optimizer_step import OffloadedOptimizer
from jettison.report.ledger import ComparedLedger, LedgerReport
from jettison.report.tables import FittedTable, exact, facts, grid, span
from jettison.request.resolve import Resolved
from jettison.spec.device_allowance import FitRule
from jettison.spec.layout import GradientSync, Layout
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.report.explain import Explanation
    from jettison.search.largest_fit import Edge, FitAnswer, FittingChange

MOST_STAGES = 20
MOST_DIFFERENCES = 20
"""Rows of a table of stages; of more, those in the middle are left out."""
PLACES = {
    "before forward": "before the forward",
    "loss": "in the loss",
    "frozen model": "in a frozen model's forward",
    "optimizer": "in the optimizer step",
    "after the step": "after the step",
}
"""Phases that need no region to say where they are."""


def ledger_table(report: LedgerReport) -> RenderableType:
    """Everything about a run, or about a traced model, at a glance."""
    tables: list[RenderableType] = [facts(_facts(report)), _layers_table(report), _roles_table(report)]
    if len(report.stages) > 1:
        tables.append(_stages_table(report))
    tables.append(_phases_table(report))
    if report.explanation is not None:
        tables.append(explanation_table(report.explanation))
        if report.explanation.changes and report.fit is None:
            tables.append(changes_table(report.explanation.changes))
    if report.fit is not None:
        tables += fit_tables(report.fit)
    if report.comparison is not None:
        tables.append(_comparison_table(report.comparison))
    return Group(*(part for table in tables for part in ("", table)))


def _comparison_table(found: ComparedLedger) -> RenderableType:
    """Differences of two ledgers; of many, the first ones."""
    if not found.differences:
        return f"{found.path} has the same saved tensors in every layer, to the byte"
    table = grid(f"Compared with {found.path}", ("layer", "expected", "found"), ("bytes",))
    for one in found.differences[:MOST_DIFFERENCES]:
        table.add_row(one.layer, describe(one.expected), describe(one.found), f"{one.delta_bytes:+,d}")
    if len(found.differences) > MOST_DIFFERENCES:
        table.add_row(f"and {len(found.differences) - MOST_DIFFERENCES} more")
    return table


def peak_sentence(report: LedgerReport) -> str:
    """The peak, its place, and the peak of step 0."""
    worst = report.worst
    stage = f" on stage {worst.stage}" if len(report.stages) > 1 else ""
    if worst.peak_phase:
        at = f"in {worst.peak_phase}" + (f" of {worst.peak_where}" if worst.peak_where else "")
        stage += f", {PLACES.get(worst.peak_phase) or at}"
    first = max((s.first_step_peak_bytes or 0 for s in report.stages), default=0)
    if first and first != report.peak_bytes:
        stage += f", from step 1 on; step 0: {format_bytes(first)}"
    return f"{exact(report.peak_bytes)}{stage}"


def _facts(report: LedgerReport) -> Iterator[tuple[str, str]]:
    asked, worst = report.asked, report.worst
    counted = f"{report.model}, {format_count(report.parameters)} parameters"
    if asked is None:
        yield "model", f"{counted}, recompute {report.recompute}"
        yield from report.built
    else:
        model = asked.run.model
        yield "model", f"{counted}, {model.depth} layers, h {model.hidden}, V {model.vocab}"
        yield from run_facts(asked, report.offloaded_optimizer, training=True)
        if asked.like:
            yield "framework preset", asked.like
        yield "recompute", _recompute(report, asked)
    if len(report.stages) == 1:
        yield "parameters", format_bytes(worst.parameter_bytes)
        yield "gradients", format_bytes(worst.gradient_bytes)
        yield "optimizer state", format_bytes(worst.optimizer_bytes)
        yield "saved for backward" if asked is None else "held for backward", format_bytes(worst.activation_bytes)
    yield "peak of a step", peak_sentence(report)
    if report.figures is not None:
        yield from report.figures.rows()
    if report.limit is not None and report.verdict is not None:
        verdict = report.verdict.said
        share = format_percent(report.peak_bytes / report.limit.nbytes)
        of = f"{format_bytes(report.limit.nbytes)}, {report.limit.words}"
        yield "verdict", f"{verdict}: the peak is {share} of {of}"


def run_facts(asked: Resolved, host: OffloadedOptimizer | None, *, training: bool = False) -> Iterator[tuple[str, str]]:
    """Layout and batch of a described run, what is trained of it, and other models that it runs.

    Args:
        training: say the precision, optimizer and kernels, too.
    """
    run = asked.run
    yield "layout", layout_text(run.layout)
    yield "batch", _batch_text(asked)
    if training:
        yield "training", _training(run)
    if run.tuning is not None:
        yield "trained", _tuning_text(run)
    for found in frozen_bytes(run):
        words = str(found.frozen).partition(": ")[2]
        taken = f"{format_bytes(found.parameters)} of weights, a forward of {format_bytes(found.forward)}"
        yield str(found.frozen.role), f"{words}: {taken}"
    if host is not None:
        sent, fetched = format_bytes(host.to_host_bytes), format_bytes(host.to_device_bytes)
        there = f"{format_bytes(host.host_bytes)} a rank, as {run.optimizer_offload} has it"
        unknown = "" if run.optimizer_offload.steps_on_cpu else ", if all pages move"
        yield "CPU memory", f"{there}; a step copies {sent} to CPU and {fetched} back{unknown}"


def _recompute(report: LedgerReport, asked: Resolved) -> str:
    recompute = asked.run.recompute
    text = report.recompute + (", layers compiled" if asked.run.compiled else "")
    text += ", kept tensors offloaded" if recompute.offload else ""
    text += f", offloading {', '.join(recompute.sent)}" if recompute.sent else ""
    text += f", not in {recompute.whole} micro-batches of each window" if recompute.whole else ""
    if report.choice is None:
        return text
    text += f", {report.choice.fit_rule.words}" if report.fits else ""
    seconds, gap = format_seconds(report.choice.seconds), format_percent(report.choice.gap)
    smallest = format_bytes(report.choice.minimum_budget_bytes)
    return f"{text}: about {seconds} a micro-batch on the slowest stage, gap {gap}; smallest budget {smallest}"


def layout_text(layout: Layout) -> str:
    """Layout of the ranks, in a line."""
    parts = [f"tp {layout.tp}{' with sp' if layout.sp else ''}" if layout.tp > 1 else ""]
    parts += [f"{axis} {size}" if size > 1 else "" for axis, size in (("cp", layout.cp), ("pp", layout.pp))]
    parts.append(f"dp {layout.dp}" if layout.dp > 1 else "")
    text = " x ".join(part for part in parts if part)
    text = f"{text} = {layout.world} GPUs" if text else "one GPU"
    if layout.pp > 1:
        virtual = f", {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
        virtual += f", {layout.micro_batch_group} micro-batches in turn" if layout.micro_batch_group else ""
        text += f", schedule {layout.schedule}{virtual}"
    text += f", ep {layout.ep}" if layout.ep > 1 else ""
    text += f", expert tp {layout.expert_tp}" if layout.splits_tp else ""
    groups = f" in {layout.zero_replicas} groups" if layout.zero_replicas > 1 else ""
    wrapped = f", reshard after forward: {layout.reshard_after_forward}" if layout.resharding_differs else ""
    wrapped += ", FSDP groups of layers only" if layout.fsdp_wrap_layers_only else ""
    wrapped += ", gradients reduced in the last micro-batch" if layout.gradient_sync is GradientSync.LAST else ""
    return text + (f", ZeRO {layout.zero}{groups}{wrapped}" if layout.zero else "")


def _batch_text(asked: Resolved) -> str:
    """The batch in a line, which names defaults."""
    run = asked.run
    total = run.micro_batch * run.micro_batches * run.layout.dp

    def stated(name: str, text: str) -> str:
        return f"{text} (default)" if name in asked.assumed else text

    read = "samples of sound" if run.model.audio else "of an image" if run.model.pair else "of the encoder"
    parts = (
        stated(
            "seq",
            f"{run.seq} tokens{' at most' * run.pad_to_longest}" + f" in documents of {run.packed}" * bool(run.packed),
        ),
        *([stated("source_seq", f"{run.source_seq} {read}")] if run.source_seq else []),
        stated("micro_batch", f"{run.micro_batch} a micro-batch"),
        stated("micro_batches", f"{run.micro_batches} of these a step"),
    )
    return f"{', '.join(parts)}: {total} {'sequence' if total == 1 else 'sequences'} on all ranks"


def _training(run: Run) -> str:
    kernels = f"{run.kernels.name} kernels, {run.kernels.attention} attention, {run.kernels.loss} loss"
    if run.model.recorder is not None:
        kernels = f"recorded kernels, {run.kernels.attention} attention"
    return f"{run.precision.words}, {run.optimizer}, {kernels}, dropout {run.dropout:g}, gradients {run.gradients}"


def _tuning_text(run: Run) -> str:
    """Adapters, and their share of the model."""
    tuning = run.tuning
    assert tuning is not None
    trained = trained_parameter_count(run.model, tuning, run.kernels)
    share = 100 * trained / parameter_count(run.model)
    experts = "; experts have none" if any(layer.experts for layer in run.model.layers) else ""
    return f"{tuning}: {trained:,} parameters, {share:.2g} % of the model's{experts}"


def _layers_table(report: LedgerReport) -> FittedTable:
    policies = len({row.policy for row in report.layers}) > 1
    left = ("layer", "recompute") if policies else ("layer",)
    table = grid("Saved for backward by one micro-batch on one rank", left, ("bytes", "tensors", "share"))
    groups = grouped(((row.policy or "", row.bytes, row.tensors), row) for row in report.layers)
    total = sum(row.bytes for row in report.layers)
    for (policy, nbytes, tensors), rows in groups.items():
        each = format_bytes(nbytes) + (" each" if len(rows) > 1 else "")
        share = format_percent(nbytes * len(rows) / (total or 1))
        first = (span([row.layer for row in rows]) or "(root)", policy)[: len(left)]
        table.add_row(*first, each, str(tensors), share)
    table.add_section()
    tensors = sum(row.tensors for row in report.layers)
    table.add_row("total", *[""] * (len(left) - 1), format_bytes(total), str(tensors), "")
    return table


def _roles_table(report: LedgerReport) -> FittedTable:
    of_role = grouped(storage_roles(report.ledger, report.mesh_sizes))
    whole = sum(map(sum, of_role.values())) or 1
    table = grid("By role, all layers together", ("role",), ("bytes", "storages", "share"))
    for role, sizes in sorted(of_role.items(), key=lambda item: (-sum(item[1]), item[0])):
        table.add_row(role, format_bytes(sum(sizes)), str(len(sizes)), format_percent(sum(sizes) / whole))
    return table


def _stages_table(report: LedgerReport) -> FittedTable:
    right = ("in flight", "activations", "parameters", "gradients", "optimizer", "step 0", "peak")
    table = grid("Pipeline stages, on each rank", ("stage", "layers"), right, last=("peak is in",))
    # all but a stage's number, the names of its layers, and where the peak is
    groups = [list(group) for _, group in groupby(report.stages, key=lambda s: (*astuple(s)[2:-1], len(s.layers)))]
    half = MOST_STAGES // 2
    shown = -1
    for index, group in enumerate(groups):
        worst = report.worst in group
        if not (worst or index < half or index >= len(groups) - half):
            continue
        if index > shown + 1:
            table.add_row("...", f"{index - shown - 1} more rows")
        first, alone = group[0], len(group) == 1
        number = str(first.stage) if alone else f"{first.stage} to {group[-1].stage}"
        layers = span(first.layers, brief=True) if alone else f"{len(first.layers)} each"
        held = (first.activation_bytes, first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes)
        figures = map(format_bytes, (*held, first.first_step_peak_bytes or 0, first.peak_bytes))
        cells = (number, layers, str(first.in_flight), *figures, first.peak_phase or "")
        table.add_row(*cells, style="bold" if worst else "")
        shown = index
    return table


def _phases_table(report: LedgerReport) -> FittedTable:
    """Each phase at its worst."""
    of = f" of stage {report.worst.stage}" if len(report.stages) > 1 else ""
    known = any(phase.first_step_peak_bytes is not None for phase in report.phases)
    right = ("step 0", "from step 1 on") if known else ("peak",)
    groups = grouped((phase.phase, phase) for phase in report.phases)
    table = grid(f"Peak of each phase{of}", ("phase", "worst at"), right)
    for name, phases in groups.items():
        worst = max(phases, key=lambda phase: phase.peak_bytes)
        first = [max(phase.first_step_peak_bytes or 0 for phase in phases)] if known else []
        table.add_row(name, worst.where or "", *map(format_bytes, (*first, worst.peak_bytes)))
    return table


# What would fit, and where the peak comes from ------------------------------------------------------------------------


def fit_tables(answer: FitAnswer) -> Iterator[FittedTable]:
    """One size changed at a time: the last value that fits, the next that does not; settings with which it fits."""
    edges = {
        "largest micro-batch": answer.micro_batch,
        f"longest sequence, in steps of {answer.seq_step}": answer.seq,
        "smallest --tp": answer.tp,
        "smallest --zero": answer.zero,
    }
    on_device = any(edge.rule is not FitRule.BUDGET for edge in edges.values())
    more, last = (("may fit", "its peak"), ("how surely",)) if on_device else ((), ())
    yield grid(
        f"What fits {format_bytes(answer.budget_bytes)}, one thing changed at a time",
        ("change",),
        ("fits", "peak", "next" if on_device else "does not fit", "its peak", *more),
        [(name, *_edge(edge, on_device=on_device)) for name, edge in edges.items()],
        last=last,
    )
    if answer.changes:
        yield changes_table(answer.changes)


def changes_table(changes: Sequence[FittingChange]) -> FittedTable:
    """Settings with which a run fits, and what they cost."""
    title = "Settings with which it fits, the fastest first"
    table = grid(title, ("change",), ("peak", "a step", "of a step"), last=("how surely",))
    for one in changes:
        took = "" if one.step_seconds is None else format_seconds(one.step_seconds)
        added = "" if one.added_fraction is None else f"{100 * one.added_fraction:+.1f} %"
        table.add_row(one.flags, format_bytes(one.peak_bytes), took, added, one.rule.words)
    return table


def _edge(edge: Edge, *, on_device: bool) -> Iterator[str]:
    ends = [(edge.value, edge.peak_bytes), (edge.next_value, edge.next_peak_bytes)]
    possible = (edge.possible_value, edge.possible_peak_bytes)
    ends += [ends[0] if edge.possible_value is None else possible] if on_device else []
    for value, nbytes in ends:
        yield "none" if value is None else str(value)
        yield "" if nbytes is None else format_bytes(nbytes)
    if on_device:
        yield "" if edge.value is None else edge.rule.words


def explanation_table(found: Explanation) -> RenderableType:
    """The sum that the peak is, the run with one thing changed, and what that means in words."""
    parts = grid(
        f"What the peak of stage {found.stage} is made of",
        ("part",),
        ("bytes", "share"),
        [(part.name, format_bytes(part.nbytes), format_percent(part.fraction)) for part in found.parts],
    )
    right = ("peak", "activations", "a layer", "recomputed")
    variants = grid("The run with one thing changed", ("change",), right)
    for one in (*found.recompute, *found.sequence_parallelism, *found.sharding):
        change, style = (f"{one.change} (as it is)", "bold") if one.current else (one.change, "")
        held = map(format_bytes, (one.peak_bytes, one.activation_bytes, one.layer_bytes))
        variants.add_row(change, *held, f"{format_percent(one.forward_fraction)} of a forward", style=style)
    lines, core = list(found.sentences), found.core
    if core.saved_bytes:
        share = f"{format_percent(core.saved_bytes / core.layer_bytes)} of a layer's bytes"
        flops = f"{format_percent(core.flops / core.layer_flops)} of its FLOPs"
        more = f"; it outweighs the rest from sequences of {core.crossover} on" if core.crossover else ""
        lines.append(f"The attention core is {share} and {flops}{more}.")
    lines += (remark.text[:1].upper() + remark.text[1:] for remark in found.remarks)
    return Group(parts, "", variants, "", *(Text(line) for line in lines))
