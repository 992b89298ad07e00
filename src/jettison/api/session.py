"""What the command line asks of the library: one function a verb, from a `ModelRequest` to a document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from jettison.api.proof import verify
from jettison.api.request import ModelRequest, load, optimizer_for
from jettison.api.verbs import apply, treatments_of
from jettison.api.verbs import plan as plan_trace
from jettison.errors import UsageError
from jettison.ledger.program import Program
from jettison.measure.memory import unique_bytes
from jettison.measure.rehearse import rehearse_step
from jettison.plan.artefact import SCHEMA as PLAN_SCHEMA
from jettison.plan.artefact import Plan
from jettison.plan.treatment import KeepAll, Treatment
from jettison.report.plan import DESCRIBED
from jettison.report.proof import Proof
from jettison.report.summary import LedgerReport, Phase, StageBytes
from jettison.report.tables import plan_table
from jettison.trace.ledger import ledger_of
from jettison.trace.model import ModelTrace
from jettison.units import parse_bytes

Progress = Callable[[str], None]

MEASURED_BELOW_BYTES = 2**30  # of parameters: such a model's ops can be tried here


def silent(_text: str) -> None:
    """Progress for nobody."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, and how its model was made."""

    plan: Plan
    request: ModelRequest

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.plan/1`` with the key ``made_by``."""
        return self.plan.document() | {"made_by": self.request.document()}

    def table(self) -> RenderableType:
        """What each layer does, for people."""
        return plan_table(self.plan)


def ledger(request: ModelRequest, *, recompute: str = "none", progress: Progress = silent) -> LedgerReport:
    """What a training forward saves, and the peak of a step, under a policy.

    Raises:
        UsageError: no such model, or no such policy.
        TraceError: the model cannot be recorded.
    """
    progress("building the model")
    loaded = load(request, fake=True)
    progress("tracing")
    traced = loaded.trace()
    treatments, segments = treatments_of(recompute, list(dict.fromkeys(c.name for c in traced.calls)))
    root = KeepAll()
    optimizer = optimizer_for(request, traced.twin)
    progress("rehearsing a step")
    step = rehearse_step(traced, treatments, root, segments, optimizer=optimizer)
    progress("reading the ledger")
    entries = ledger_of(traced, _kept(traced, treatments, segments, root))
    parameters = list(traced.twin.parameters())
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
        Phase(phase="forward", peak_bytes=step.forward_peak_bytes),
        Phase(phase="backward", peak_bytes=step.backward_peak_bytes),
        Phase(phase="optimizer", peak_bytes=step.optimizer_peak_bytes),
    )
    return LedgerReport(
        model=request.model, recompute=recompute, parameters=_count(traced.twin), ledger=entries, stages=(stage,),
        phases=phases if optimizer else phases[:2], warnings=tuple(traced.warnings),
    )  # fmt: skip


def plan(request: ModelRequest, *, budget: str, progress: Progress = silent) -> PlanReport:
    """The fastest plan under a budget.

    Ops of a model that this machine could hold are run once each, for their seconds and their workspace; those of a
    larger one are priced by their FLOPs and bytes, and their kernels' workspace is not in the predicted peak.

    Raises:
        Infeasible: no plan fits.
        UsageError: no such model, or the budget cannot be read.
        TraceError: the model cannot be recorded.
    """
    parse_bytes(budget)
    progress("building the model")
    loaded = load(request, fake=True)
    progress("tracing")
    traced = loaded.trace()
    progress("planning")
    small = unique_bytes(traced.twin.parameters()) <= MEASURED_BELOW_BYTES
    found = plan_trace(traced, budget, optimizer=optimizer_for(request, traced.twin), measure=small)
    return PlanReport(plan=found, request=request)


def prove(
    request: ModelRequest,
    *,
    plan: Plan | None = None,
    budget: str | None = None,
    recompute: str | None = None,
    rounds: int = 8,
    progress: Progress = silent,
) -> Proof:
    """Build the real model and verify a plan, a budget or a policy on it; exactly one of the three is given.

    Raises:
        UsageError: not exactly one of the three, or no such model.
        Infeasible: no plan fits the budget.
        PlanMismatch: the plan was made for another model.
    """
    if sum(given is not None for given in (plan, budget, recompute)) != 1:
        raise UsageError("verify needs exactly one of a plan file, --budget and --recompute")
    if budget is not None:
        parse_bytes(budget)
    progress("building the model")
    loaded = load(request, fake=False)
    optimizer = optimizer_for(request, loaded.model)
    more: dict[str, Any] = {"loss_fn": loaded.loss_fn, "optimizer": optimizer, "rounds": rounds, "progress": progress}
    if recompute is None:
        return verify(loaded.model, loaded.batch, plan=plan, budget=budget, **more)
    with apply(loaded.model, recompute, batch=loaded.batch, loss_fn=loaded.loss_fn) as handle:
        return verify(loaded.model, loaded.batch, handle=handle, **more)


def read_plan(path: Path) -> tuple[Plan, Any] | None:
    """A plan file, and what it says under ``made_by``; None where the file is no plan document at all.

    Raises:
        UsageError: it is a plan document, but not a feasible plan, or not of a module.
        PlanMismatch: it was edited.
    """
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        return None
    if document.get("made_from") == DESCRIBED:
        raise UsageError(
            f"{path} plans a described run: it says how much each layer keeps, not which tensors of a module. "
            "Plan a config.json without a layout, or module:factory, to get a plan that can be verified"
        )
    return Plan.from_json(text), document.get("made_by")


def request_for(
    target: str, *, model: str | None = None, optimizer: str | None = None, **flags: Any
) -> tuple[ModelRequest, Plan | None]:
    """What `jettison verify` was given: a plan file with the model that it was made for, or a model.

    Raises:
        UsageError: a flag contradicts what the plan was made for.
    """
    found = read_plan(Path(target))
    given = {name: value for name, value in flags.items() if value is not None}
    if optimizer is not None:
        given["optimizer"] = optimizer
    if found is None:
        if model is not None:
            raise UsageError(f"--model goes with a plan file, and {target!r} is none")
        return ModelRequest(model=target, **given), None
    made, document = found
    if model is None:
        stated = ModelRequest.from_document(document)
    else:
        known = document if isinstance(document, dict) else {}
        stated = ModelRequest.from_document({**known, "model": model})
    for name, value in given.items():
        if isinstance(document, dict) and getattr(stated, name) != value:
            flag = f"--{name.replace('_', '-')} {value}"
            raise UsageError(f"{flag} is not what the plan was made for: {getattr(stated, name) or 'not given'}")
    return replace(stated, **given), made


def _kept(
    traced: ModelTrace, treatments: dict[str, Treatment], segments: list[list[str]], root: Treatment
) -> Callable[[str, Program], frozenset[int]]:
    """What each region holds: within a segment, only the first block holds its input."""
    inside = {name for run in segments for name in run[1:]}
    linked = {c.name: {position for position, _ in c.links} if c.name in inside else set() for c in traced.calls}
    inputs = {c.name: traced.classes[c.class_key].trace.inputs for c in traced.calls}

    def kept(name: str, program: Program) -> frozenset[int]:
        chosen = treatments[name].kept(program) if name else root.kept(program)
        return chosen - {b for b, position in inputs.get(name, {}).items() if position in linked[name]}

    return kept


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
