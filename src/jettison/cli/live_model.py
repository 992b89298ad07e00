"""Ledgers and plans of live models: what `jettison ledger` and `jettison plan` ask torch for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jettison.capture.ledger_entries import ledger_of
from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import UsageError
from jettison.core.progress import Progress
from jettison.dryrun.counter import unique_bytes
from jettison.dryrun.op_costs import MEASURED_BELOW_BYTES
from jettison.dryrun.step import OneBatch, dry_run_batch, dry_run_events
from jettison.families.config import of_another_model
from jettison.families.family import model_code
from jettison.ledger.program import Program
from jettison.memory.timeline import MemoryTimeline
from jettison.models.live_model import Loaded, ModelRequest, load, optimizer_for
from jettison.planner import plan as plan_trace
from jettison.planner.apply import policies_of
from jettison.planner.planner import module_policy
from jettison.report.ledger import LedgerReport, PhaseRow, StageBytes
from jettison.report.plan import plan_table
from jettison.request.options import RunRequest
from jettison.request.resolve import is_live, model_spec
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll
from jettison.solve.plan import Plan
from jettison.spec.hardware import Hardware
from jettison.verify.side_by_side import allocation_timeline
from jettison.verify.timing import environment


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, and how its model was made."""

    plan: Plan
    request: ModelRequest
    step: MemoryTimeline | None = None  # predicted, if requested

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.plan/1`` with the keys ``made_by`` and ``environment``."""
        made_by = self.request.document()
        return self.plan.document() | {"made_by": made_by, "request": made_by, "environment": environment()}

    def table(self) -> RenderableType:
        """Return a table of the layers' decisions."""
        return plan_table(self.plan)


def model_request(model: str, request: RunRequest) -> ModelRequest:
    """Select the options of a run that concern a live model."""
    given = {name: getattr(request, name) for name in request.given() if name != "recompute"}
    return ModelRequest(model=model, **given)


def live_ledger(request: ModelRequest, *, recompute: str, progress: Progress) -> LedgerReport:
    """Make the ledger of a training forward, and the peak of a step, under a policy.

    Raises:
        UsageError: no such model, or no such policy.
        TraceError: the model cannot be recorded.
    """
    loaded, traced = _traced(request, progress)
    policies, segments = policies_of(recompute, list(dict.fromkeys(c.name for c in traced.calls)))
    root = KeepAll()
    optimizer = optimizer_for(request, traced.fake_model)
    progress("dry-running a step")
    step = dry_run_batch(traced, policies, root, segments, optimizer=optimizer)
    progress("reading the ledger")
    entries = ledger_of(traced, _kept(traced, policies, segments, root))
    parameters = list(traced.fake_model.parameters())
    state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)] if optimizer else []
    stage = StageBytes(
        stage=0,
        layers=entries.layers,
        in_flight=1,
        activation_bytes=entries.total_bytes(),
        parameter_bytes=unique_bytes(parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        optimizer_bytes=unique_bytes(state),
        peak_bytes=step.peak_bytes,
    )
    phases = (
        PhaseRow(phase="forward", peak_bytes=step.forward_peak_bytes),
        PhaseRow(phase="backward", peak_bytes=step.backward_peak_bytes),
        PhaseRow(phase="optimizer", peak_bytes=step.optimizer_peak_bytes),
    )
    return LedgerReport(
        model=request.model,
        recompute=recompute,
        parameters=sum(p.numel() for p in parameters),
        ledger=entries,
        stages=(stage,),
        phases=phases if optimizer else phases[:2],
        warnings=tuple(traced.warnings),
        request=request.document() | {"recompute": recompute},
        built=tuple(_built(request, loaded)),
    )


def _traced(request: ModelRequest, progress: Progress) -> tuple[Loaded, ModelTrace]:
    progress("building the model")
    loaded = load(request, fake=True)
    progress("tracing")
    return loaded, loaded.trace()


CLOSED_FORM = {torch.float32: "fp32", torch.bfloat16: "bf16-pure"}
"""Names of precisions in which nothing but the weights' type counts, as in a model that is built and traced."""


def _built(request: ModelRequest, loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield the header's lines on how a model is traced; with a closed form, the flags that give the same."""
    types = list(dict.fromkeys(p.dtype for p in loaded.model.parameters()))
    words = " and ".join(str(dtype).removeprefix("torch.") for dtype in types)
    attention = getattr(getattr(loaded.model, "config", None), "_attn_implementation", None)
    code = f"its own code with {attention} attention" if attention else "its own code"
    yield "as built", f"{words} weights, {code} on a CPU's kernels; one rank; its output is held"
    ids = loaded.batch.get("input_ids") if isinstance(loaded.batch, Mapping) else None
    if is_live(request.model) or ids is None or len(types) != 1 or types[0] not in CLOSED_FORM:
        return
    sequences, seq = ids.shape
    default = " (default)" if request.seq is None else ""
    yield "batch", f"{seq} tokens{default}, {sequences} {'sequence' if sequences == 1 else 'sequences'}"
    try:
        described = model_spec(request.model)
    except UsageError:
        return
    other = "; ".join(filter(of_another_model, described.left_out))
    flags = f"--precision {CLOSED_FORM[types[0]]} --kernels {model_code()} --attention {attention} --seq {seq}"
    what = f"of another model than {type(loaded.model).__name__}, since {other}" if other else "of the same"
    yield "closed form", f"{what}: {flags} --micro-batch {sequences}"


def live_plan(
    request: ModelRequest,
    *,
    budget_bytes: int,
    hardware: Hardware | None,
    offload: bool,
    host_budget_bytes: int | None,
    over_time: bool,
    progress: Progress,
) -> PlanReport:
    """The fastest plan under a budget.

    Ops of a model that this machine could hold are run once each, for their seconds and their workspace; those of a
    larger one are priced by their FLOPs and bytes on `hardware`, and the peak is without their kernels' workspace.

    Args:
        over_time: the planned step's allocations, too.

    Raises:
        Infeasible: no plan fits.
        UsageError: no such model.
        TraceError: the model cannot be recorded.
    """
    _, traced = _traced(request, progress)
    progress("planning")
    small = unique_bytes(traced.fake_model.parameters()) <= MEASURED_BELOW_BYTES
    optimizer = optimizer_for(request, traced.fake_model)
    found = plan_trace(
        traced,
        budget_bytes,
        optimizer=optimizer,
        measure=small,
        hardware=hardware,
        offload=offload,
        host_budget=host_budget_bytes,
    )
    step = None
    if over_time:
        progress("dry-running the planned step")
        events = dry_run_events(module_policy(traced, found), OneBatch(trace=traced, optimizer=optimizer))
        step = allocation_timeline(f"{request.model}, predicted under the plan", events)
    return PlanReport(plan=found, request=request, step=step)


def _kept(
    traced: ModelTrace, policies: dict[str, CheckpointPolicy], segments: list[list[str]], root: CheckpointPolicy
) -> Callable[[str, Program], frozenset[int]]:
    """Return the kept buffers of each region: within a segment, only the first block keeps its input."""
    inside = {name for run in segments for name in run[1:]}
    linked = {c.name: {position for position, _ in c.links} if c.name in inside else set() for c in traced.calls}
    inputs = {c.name: traced.classes[c.class_key].trace.inputs for c in traced.calls}

    def kept(name: str, program: Program) -> frozenset[int]:
        chosen = policies[name].kept(program) if name else root.kept(program)
        return chosen - {b for b, position in inputs.get(name, {}).items() if position in linked[name]}

    return kept
