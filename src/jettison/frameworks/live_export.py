"""Export of a live model's plan: a dry run of the written code on fake tensors gives its cost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jettison.capture.model_trace import ModelTrace
from jettison.core.progress import Progress
from jettison.cost.kernel import op_seconds
from jettison.dryrun.counter import unique_bytes
from jettison.dryrun.op_costs import MEASURED_BELOW_BYTES, Pricing
from jettison.dryrun.step import dry_run_given
from jettison.frameworks.export import Exported, Exporter
from jettison.frameworks.layer_policies import Cost, Decision, LayerPolicy, Subject
from jettison.models.live_model import ModelRequest, load, optimizer_for
from jettison.planner.planner import fingerprint
from jettison.solve.plan import LayerPlan, Plan
from jettison.spec.hardware import Hardware, hardware, usual_hardware
from jettison.spec.kernels import Device


def live_export(
    plan: Plan, document: Mapping[str, Any], *, write: Exporter, gpu: str | None, model: str | None, progress: Progress
) -> Exported:
    """See `jettison.cli.export.export_plan`."""
    made_by = document.get("made_by")
    stated = made_by if isinstance(made_by, dict) else {}
    request = ModelRequest.from_document(stated if model is None else {**stated, "model": model})
    progress("building the model")
    loaded = load(request, fake=True)
    progress("tracing")
    traced = loaded.trace()
    programs = {call.name: traced.program(call) for call in traced.calls}
    digests = {layer: program.digest() for layer, program in programs.items()}
    plan.require(model=fingerprint(traced), digests={"": traced.root.program.digest(), **digests})
    prices = usual_hardware(Device.CPU) if gpu is None else hardware(gpu)
    subject = _subject(plan, traced, request, prices)
    progress("dry-running what is written")
    return write(subject, LivePricer(plan, subject, traced, optimizer_for(request, traced.fake_model)))


def _subject(plan: Plan, traced: ModelTrace, request: ModelRequest, prices: Hardware) -> Subject:
    programs = {call.name: traced.program(call) for call in traced.calls}
    root = traced.root.program
    order = [entry.layer for entry in plan.layers]
    inside = {name for a, b in plan.segments for name in order[order.index(a) + 1 : order.index(b) + 1]}
    asked = {key: value for key, value in request.document().items() if value is not None}
    return Subject(
        model=request.model,
        plan_hash=plan.hash,
        budget_bytes=plan.budget_bytes,
        minimum_budget_bytes=plan.minimum_budget_bytes,
        decisions=tuple(
            _decision(entry, programs[entry.layer], traced.fake_model, inside=entry.layer in inside)
            for entry in plan.layers
        ),
        hardware=prices,
        segments=plan.segments,
        root_freed_bytes=max(0, root.kept_bytes(root.saved_buffers()) - root.kept_bytes(frozenset(plan.root.kept))),
        overhead_fraction=plan.predicted.overhead_fraction,
        asked=asked,
    )


def _decision(entry: LayerPlan, program: Any, model: Any, *, inside: bool) -> Decision:
    """Args: inside: the layer is in a segment, after its first one."""
    module = type(model.get_submodule(entry.layer))
    spared = max(0, program.kept_bytes(frozenset(entry.kept) - frozenset(entry.offloaded)) - entry.kept_bytes)
    return Decision(
        layer=entry.layer,
        policy=str(entry.policy),
        program=program,
        kept=frozenset(entry.kept),
        offloaded=frozenset(entry.offloaded),
        packed=frozenset(entry.packed),
        shared_bytes=spared if inside else 0,
        packed_bytes=0 if inside else spared,
        module=_called(module),
        bases=tuple(_called(base) for base in module.__mro__),
    )


def _called(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class LivePricer:
    """Dry-runs the written code on fake tensors; see `jettison.frameworks.layer_policies.Pricer`."""

    def __init__(self, plan: Plan, subject: Subject, traced: ModelTrace, optimizer: Any) -> None:
        self._plan, self._subject, self._traced, self._optimizer = plan, subject, traced, optimizer
        small = unique_bytes(traced.fake_model.parameters()) <= MEASURED_BELOW_BYTES
        self._pricing = Pricing(run=small)

    def plan(self) -> Cost:
        """Cost in the plan's document."""
        again = [(d.program, o) for d in self._subject.decisions for o in d.again]
        return Cost(
            layer_bytes=sum(decision.kept_bytes for decision in self._subject.decisions),
            peak_bytes=self._plan.predicted.peak_bytes,
            recompute_flops=sum(program.ops[o].flops for program, o in again),
            recompute_seconds=sum(op_seconds(program.ops[o], self._subject.hardware) for program, o in again),
            host_bytes=self._plan.predicted.host_bytes,
        )

    def cost(self, policies: Sequence[LayerPolicy], code: str = "") -> Cost:
        """Cost of one policy per layer, applied by ``code``."""
        defined: dict[str, Any] = {"__name__": "exported"}
        exec(compile(code, "<exported>", "exec"), defined)  # generated here, with names as literals
        with warnings.catch_warnings():
            # torch_remat compares addresses of tensors, to find those without bytes
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor", category=UserWarning)
            step = self._pricing.known(
                lambda workspace: dry_run_given(
                    self._traced, defined["apply"], optimizer=self._optimizer, workspace=workspace
                )
            )
        again = [policy.program.ops[o] for policy in policies for o in policy.again]
        return Cost(
            layer_bytes=sum(policy.kept_bytes for policy in policies),
            activation_bytes=step.held_bytes,
            peak_bytes=step.peak_bytes,
            recompute_flops=sum(op.flops for op in again),
            recompute_seconds=sum(op_seconds(op, self._subject.hardware) for op in again),
            host_bytes=sum(policy.program.kept_bytes(policy.offloaded) for policy in policies),
        )
