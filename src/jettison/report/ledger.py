"""A ledger report: the whole step in bytes, of a live model's dry run or of a forecast, and its document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from jettison.core.documents import document, part
from jettison.core.errors import DoesNotFit, ProofFailed
from jettison.core.objects import with_former_names
from jettison.core.units import format_bytes
from jettison.ledger.compare import Difference
from jettison.ledger.ledger import ENTRY_FIELDS, Ledger, SavedTensor
from jettison.predict.forecast import Forecast, Stage, forecast_sizes
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.optimizer_step import OffloadedOptimizer
from jettison.predict.ranges import RunFigures, figures, unlike_anchor
from jettison.request.options import RunRequest
from jettison.request.resolve import Resolved, flag_of
from jettison.spec.device_allowance import FitVerdict, Limit
from jettison.spec.kernels import AttentionKernel
from jettison.spec.model import DropoutSites
from jettison.spec.precision import Accumulation, Gradients
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.report.explain import Explanation
    from jettison.search.auto_recompute import AutoForecast
    from jettison.search.largest_fit import FitAnswer


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
    "capacity_factor",
    "dispatcher",
    "expert_tp",
    "sequential_experts",
    "deterministic",
    "ep_comm_overlap",
)

_OF_FSDP: Final = ("fsdp_version", "fsdp_wrap_layers_only", "reshard_after_forward", "gradient_sync", "reduce_dtype")


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
        (layout.zero != 3, _OF_FSDP, " without FSDP; give --zero 3"),
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
