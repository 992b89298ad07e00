"""A ledger report: the whole step in bytes, of a live model's dry run or of a forecast; its document and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document, part
from jettison.core.errors import DoesNotFit, ProofFailed
from jettison.core.objects import grouped, with_former_names
from jettison.core.units import format_bytes, format_count, format_percent, format_seconds
from jettison.formula.region import parameter_count, trained_parameter_count
from jettison.ledger.compare import Difference, describe
from jettison.ledger.ledger import ENTRY_FIELDS, Ledger, SavedTensor, storage_roles
from jettison.predict.forecast import Forecast, Stage, forecast_sizes
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.optimizer_step import OffloadedOptimizer
from jettison.predict.ranges import RunFigures, figures, unlike_anchor
from jettison.report.tables import FittedTable, exact, facts, grid, span
from jettison.request.options import OF_FSDP, RunRequest
from jettison.request.resolve import Resolved, flag_of
from jettison.spec.device_allowance import FitRule, FitVerdict, Limit
from jettison.spec.kernels import AttentionKernel
from jettison.spec.layout import GradientSync, Layout
from jettison.spec.model import DropoutSites
from jettison.spec.precision import Accumulation, Gradients
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.report.explain import Explanation
    from jettison.search.auto_recompute import AutoForecast
    from jettison.search.largest_fit import Edge, FitAnswer, FittingChange


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """Saved tensors of one layer, in one micro-batch on one rank; ``policy`` is null if there is none."""

    layer: str
    bytes: int
    tensors: int
    stage: int = 0
    policy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Bytes of a pipeline stage on one rank; ``in_flight`` micro-batches are between forward and backward.

    ``peak_bytes`` is of a step that has its optimizer state, ``first_step_peak_bytes`` of the one before there is any.
    """

    stage: int
    layers: tuple[str, ...]
    in_flight: int
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    first_step_peak_bytes: int | None = None
    peak_phase: str | None = None
    peak_where: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """Peak of a phase of a step on the worst stage, or of one region in it."""

    phase: str
    peak_bytes: int
    where: str | None = None
    stage: int = 0
    micro_batch: int | None = None
    first_step_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedLedger:
    """Differences of the ledger in the file at ``path`` from this one."""

    path: str
    differences: tuple[Difference, ...]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        found = [part("EntryDifference", one, text=str(one)) for one in self.differences]
        return {"with": self.path, "equal": not found, "differences": found}


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """A ledger, and the step that it belongs to, dry-run or forecast.

    Args:
        rows: what each layer saves; empty: as the ledger's entries say.
        mesh_sizes: of the axes that shard the entries.
        asked: the run that a forecast is of.
        phases: of the worst stage.
        offloaded_optimizer: what the worst rank's host has for the optimizer.
        limit: what the peak is held against.
        choice: a planner's, where recompute was left to it.
        comparison: with another ledger's document.
        request: what was asked of a live model.
        built: how it is built, and the flags under which its closed form says the same.
        with_entries: the document has every saved tensor.
    """

    model: str
    recompute: str
    parameters: int
    ledger: Ledger
    stages: tuple[StageBytes, ...]
    phases: tuple[PhaseRow, ...]
    warnings: tuple[str, ...] = ()
    rows: tuple[LayerRow, ...] = ()
    mesh_sizes: Mapping[str, int] = field(default_factory=dict)
    asked: Resolved | None = None
    offloaded_optimizer: OffloadedOptimizer | None = None
    limit: Limit | None = None
    choice: AutoForecast | None = None
    fit: FitAnswer | None = None
    explanation: Explanation | None = None
    comparison: ComparedLedger | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    built: tuple[tuple[str, str], ...] = ()
    with_entries: bool = True

    @property
    def worst(self) -> StageBytes:
        """The stage that needs most; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes in a step."""
        return self.worst.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within its limit."""
        return self.limit is None or self.peak_bytes <= self.limit.nbytes

    @cached_property
    def figures(self) -> RunFigures | None:
        """Allocated, reserved and device bytes of a described run."""
        gpu = "" if self.limit is None else self.limit.gpu
        return None if self.asked is None else figures(self.asked.run, self.peak_bytes, hardware=gpu)

    @property
    def verdict(self) -> FitVerdict | None:
        """Whether it fits; of a traced model by its peak alone."""
        if self.limit is None:
            return None
        if self.figures is None:
            return FitVerdict.FITS if self.fits else FitVerdict.DOES_NOT_FIT
        return self.figures.verdict(usable_bytes=self.limit.device_bytes, budget_bytes=self.limit.budget_bytes)

    def require(self) -> None:
        """Nothing where the run may fit, and where another ledger that was given is this one.

        Raises:
            DoesNotFit: it does not.
            ProofFailed: the other ledger differs.
        """
        if self.comparison is not None and self.comparison.differences:
            count = len(self.comparison.differences)
            raise ProofFailed(f"{self.comparison.path} differs in {count} saved tensor{'s' if count > 1 else ''}")
        if self.limit is not None and self.verdict is FitVerdict.DOES_NOT_FIT:
            advice = "--explain says what lowers it, and --fit what would fit" if self.asked else ""
            raise DoesNotFit(
                peak_bytes=self.peak_bytes, limit_bytes=self.limit.nbytes, limit_name=self.limit.words, advice=advice
            )

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """Saved bytes of each layer, in order."""
        if self.rows:
            return self.rows
        tensors = Counter(entry.layer for entry in self.ledger)
        by_layer = self.ledger.by_layer()
        return tuple(LayerRow(layer=name, bytes=n, tensors=tensors[name]) for name, n in by_layer.items())

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.ledger/1``, with the keys about the step in front of the entries."""
        first = [nbytes for s in self.stages if (nbytes := s.first_step_peak_bytes) is not None]
        limit, found = self.limit, self.figures
        return document(
            "jettison.ledger/1",
            self,
            request=request_document(self.asked) if self.asked else dict(self.request),
            first_step_peak_bytes=max(first) if first else None,
            worst_stage=self.worst.stage if first else None,
            allowance=found
            and part(
                "AllowanceBytes",
                **{f"{name}_bytes": end - self.peak_bytes for name, end in found.device.whole().items()},
            ),
            budget_bytes=limit and limit.nbytes,
            fits=None if limit is None else self.fits,
            gpu=(limit and limit.gpu) or None,
            usable_bytes=limit.device_bytes if limit and limit.gpu else None,
            auto=self.choice and _auto(self.choice),
            fit=self.fit and part("LedgerFit", self.fit),
            explain=self.explanation,
            compare=self.comparison,
            entries=[self._entry(entry) for entry in self.ledger] if self.with_entries else None,
        )

    def table(self) -> RenderableType:
        """Everything about a run, or about a traced model, at a glance."""
        tables: list[RenderableType] = [facts(_facts(self)), _layers_table(self), _roles_table(self)]
        if len(self.stages) > 1:
            tables.append(_stages_table(self))
        tables.append(_phases_table(self))
        if self.explanation is not None:
            tables.append(explanation_table(self.explanation))
            if self.explanation.changes and self.fit is None:
                tables.append(changes_table(self.explanation.changes))
        if self.fit is not None:
            tables += fit_tables(self.fit)
        if self.comparison is not None:
            tables.append(_comparison_table(self.comparison))
        return Group(*(part for table in tables for part in ("", table)))

    def csv(self) -> str:
        """All entries as CSV with a header, the bytes on one rank in the last column."""
        header, *lines = self.ledger.to_csv().splitlines()
        local = [entry.local_bytes(self.mesh_sizes) for entry in self.ledger]
        rows = [f"{line},{nbytes}" for line, nbytes in zip(lines, local, strict=True)]
        return "\n".join([f"{header},local_bytes", *rows, ""])

    def _entry(self, entry: SavedTensor) -> dict[str, Any]:
        stated = {name: getattr(entry, name) for name in ENTRY_FIELDS}
        return stated | {
            "placement": dict(entry.placement),
            "local_bytes": entry.local_bytes(self.mesh_sizes),
            "local_storage_bytes": entry.local_storage_bytes(self.mesh_sizes),
        }


def _auto(choice: AutoForecast) -> dict[str, Any]:
    unused = () if choice.forecast.run.recompute.offload else ("stalled_seconds", "host_bytes")
    return part("PlannerChoice", choice, recompute_seconds=choice.seconds, **dict.fromkeys(unused))


def request_document(asked: Resolved) -> dict[str, Any]:
    """A run as it was understood; ``assumed`` names defaults."""
    run, recompute = asked.run, asked.run.recompute
    layout = {**asdict(run.layout), "schedule": str(run.layout.schedule), "world": run.layout.world}
    settings = part(
        "RunSettings",
        run,
        run.kernels,
        asked,
        model=run.model.name,
        family=run.model.family,
        layout=with_former_names(RunRequest, layout),
        precision=run.precision.name,
        fp8_recipe=run.precision.recipe and str(run.precision.recipe),
        kernels=run.kernels.name,
        recompute=str(recompute),
        offload=recompute.offload,
        offload_modules=recompute.sent,
        micro_batches_without_recompute=recompute.whole,
        offload_optimizer=str(run.optimizer_offload),
        workspaces=run.workspaces.name,
        packed=run.packed or None,
        trained=run.tuning and str(run.tuning),
        frozen_models=[
            part(
                "FrozenSettings",
                one.frozen,
                model=one.frozen.model and one.frozen.model.name,
                parameter_bytes=one.parameters,
                forward_bytes=one.forward,
            )
            for one in frozen_bytes(run)
        ],
        assumed=sorted(asked.assumed),
    )
    return with_former_names(RunRequest, settings)


def forecast_report(name: str, asked: Resolved, found: Forecast, choice: AutoForecast | None) -> LedgerReport:
    """A forecast in the form that ledgers of live models have as well.

    Args:
        name: of the model, as it was given.
        choice: the planner's that the forecast follows.
    """
    ledger = found.ledger()
    tensors = Counter(entry.layer for entry in ledger)
    stage_of = {one.name: stage.index for stage in found.stages for chunk in stage.parts for one in chunk}
    policies = {one.name: one.policy for one in found.parts}
    if choice is not None:
        from jettison.search.auto_recompute import layer_policies

        policies |= dict(layer_policies(choice))
    return LedgerReport(
        model=name,
        recompute=str(found.run.recompute),
        parameters=found.parameters,
        ledger=ledger,
        stages=tuple(map(_stage, found.stages)),
        phases=tuple(_phases(found.worst)),
        warnings=(*advice(asked), *unlike_anchor(found.run, ""), *(routing(found) if choice is None else ())),
        rows=tuple(
            LayerRow(layer=one, bytes=n, tensors=tensors[one], stage=stage_of[one], policy=policies[one] or None)
            for one, n in found.layer_bytes()
        ),
        mesh_sizes=found.run.layout.mesh_sizes,
        asked=asked,
        offloaded_optimizer=found.offloaded_optimizer,
        choice=choice,
    )


def _stage(stage: Stage) -> StageBytes:
    return StageBytes(
        stage=stage.index,
        layers=tuple(one.name for chunk in stage.parts for one in chunk),
        in_flight=stage.in_flight,
        activation_bytes=stage.activation_bytes,
        parameter_bytes=stage.static.parameters,
        gradient_bytes=0 if stage.load.gradients is Gradients.IN_BACKWARD else stage.static.gradients,
        optimizer_bytes=stage.static.state,
        peak_bytes=stage.peak.nbytes,
        first_step_peak_bytes=stage.first_step_peak.nbytes,
        peak_phase=str(stage.peak.phase),
        peak_where=stage.peak.where or None,
    )


def _phases(stage: Stage) -> Iterator[PhaseRow]:
    """Moments from the second step on, and what the same ones hold in the first."""
    for later, first in zip(stage.timeline(), stage.timeline(first_step=True), strict=True):
        yield PhaseRow(
            phase=str(later.phase),
            where=later.where or None,
            stage=stage.index,
            peak_bytes=later.nbytes,
            micro_batch=later.micro_batch if later.micro_batch >= 0 else None,
            first_step_peak_bytes=first.nbytes,
        )


def advice(asked: Resolved) -> tuple[str, ...]:
    """Remarks about a run, the weightiest first; empty where there are none."""
    run = asked.run
    found = [*run.model.left_out]
    if run.recompute.mode is Mode.SELECTIVE and run.kernels.attention is not AttentionKernel.EAGER:
        found.append(
            "selective recomputation drops attention scores, which flash attention never stores: it saves nothing "
            "here. Use --recompute selective-op, every:K or full"
        )
    found += _tensor_parallel(run)
    layout, model = run.layout, run.model
    if run.seq > model.max_positions:
        found.append(f"--seq {run.seq} is more than the {model.max_positions} positions that {model.name} is made for")
    if layout.zero and layout.shards == 1 and not run.gathers_parameters:
        found.append(f"--zero {layout.zero} shards nothing: there is one data-parallel rank; give --dp")
    return (*found, *idle(asked))


_OF_PIPELINES: Final = ("schedule", "keep_stage_outputs", "keep_received", "stage_buffers")
_OF_EXPERTS: Final = (
    *("capacity_factor", "dispatcher", "expert_tp", "sequential_experts"),
    *("deterministic", "ep_comm_overlap"),
)


def idle(asked: Resolved) -> Iterator[str]:
    """Flags that were typed and have no effect on this model or layout."""
    run, layout, model = asked.run, asked.run.layout, asked.run.model
    outside = any(getattr(model.dropout_sites, site.name) for site in fields(DropoutSites) if site.name != "attention")
    drops = outside or model.two_stacks or run.kernels.attention is AttentionKernel.EAGER
    unbucketed = layout.buckets is not None and not layout.by_module
    cast = run.accumulation is Accumulation.CAST and run.precision.gradient == run.precision.compute
    for lacking, names, why in (
        (layout.pp == 1, _OF_PIPELINES, " without a pipeline; give --pp"),
        (layout.zero == 0, ("zero_replicas",), " where nothing is sharded; give --zero"),
        (unbucketed, ("zero_buckets",), " without ZeRO, in pipelines and with --ep; give --zero 1, 2 or 3"),
        (layout.zero != 3, OF_FSDP, " without FSDP; give --zero 3"),
        (layout.zero == 3 and run.micro_batches == 1, ("gradient_sync",), " with one micro-batch a step"),
        (layout.cp == 1, ("cp_comm_type",), " without context parallelism; give --cp"),
        (not any(layer.experts for layer in model.kinds), _OF_EXPERTS, f": {model.name} has no experts"),
        (not model.mtp_num_layers, ("mtp_use_repeated_layer",), " without --mtp-num-layers"),
        (run.recompute.mode is Mode.NONE, ("reentrant",), " without checkpoints; give --recompute full"),
        (not drops, ("dropout",), f": {model.name} has none outside of fused attention, which draws masks again"),
        (cast, ("accumulation",), f" where gradients are {run.precision.gradient}; give --precision bf16-main32"),
    ):
        typed = (name for name in names if lacking and name not in asked.assumed)
        yield from (f"{flag_of(name)} does nothing{why}" for name in typed)


UNEVEN: Final = 1.25
"""Times an even share, reported beyond the even figure: a choice that shows how much depends on it, unmeasured."""


def routing(found: Forecast) -> Iterator[str]:
    """Say what uneven routing would cost: how tokens are spread over ranks of experts is not known beforehand."""
    run = found.run
    ranks = run.layout.ep
    if ranks == 1 or run.imbalance > 1 or run.capacity_factor is not None:
        return
    uneven = min(UNEVEN, float(ranks))
    peak = forecast_sizes(replace(run, imbalance=uneven)).peak_bytes
    yield (
        f"tokens are taken to be spread evenly over the ranks of --ep; one that is sent {uneven:g} times its share "
        f"peaks at {format_bytes(peak)}, not {format_bytes(found.peak_bytes)} (--expert-imbalance {uneven:g})"
    )


def _tensor_parallel(run: Run) -> Iterator[str]:
    layout = run.layout
    if layout.tp > 1 and not layout.sp and run.model.words:
        yield (
            f"without sequence parallelism all {layout.tp} tensor-parallel ranks hold unsharded activations "
            "of norms, dropouts and residuals; --sp shards them"
        )
    if layout.tp == 1 and layout.sp:
        yield "--sp does nothing without tensor parallelism; give --tp"
    if layout.tp == 1 and run.tp_comm_overlap:
        yield "--tp-comm-overlap does nothing without tensor parallelism; give --tp"
    if layout.gathered_inputs and layout.tp > 1 and layout.sp:
        yield (
            f"--gathered-inputs: each rank saves the all-gathered input of its column-parallel layers, {layout.tp} "
            "times the shard that would be saved, and all-gathered again, without it"
        )
    elif layout.gathered_inputs:
        yield "--gathered-inputs does nothing without sequence parallelism"


# for people -----------------------------------------------------------------------------------------------------------

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
    wrapped += ", one FSDP unit" if layout.fsdp_one_unit else ""
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
