"""A step on some batch, described so far that it can be planned and dry-run: the plainest one, or somebody's own."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.fakes import fake_batch, fake_mode
from jettison.capture.model_trace import Loop, ModelTrace, as_batch, as_call, loss_of
from jettison.capture.signature import as_signed
from jettison.capture.tracer import trace_model
from jettison.capture.trees import tree_leaves
from jettison.core.errors import TraceError
from jettison.core.progress import Progress
from jettison.dryrun.op_costs import Pricing, measure_ops
from jettison.dryrun.schedules import Scheduled, modules_of
from jettison.dryrun.step import ModulePolicy, OneBatch, fake_optimizer, optimizer_over
from jettison.dryrun.user_step import Copies, Counted, ModelCall, ModelUse, Seen, Step, UserStep, copies_of, observe
from jettison.parallel.agree import Agreement
from jettison.parallel.imagined import ImaginedReplica, gradients_stay, inside_of_ddp, may_be_used_elsewhere
from jettison.parallel.pipeline import stand_in_loss
from jettison.planner.compile_blocks import compiled_modules, survey_blocks
from jettison.planner.host import Host
from jettison.planner.options import step_of
from jettison.planner.parts import plan_parts
from jettison.planner.planner import Planner, make_planner
from jettison.runtime.batch_shape import BatchShape
from jettison.solve.plan import Plan
from jettison.spec.hardware import Hardware

MOST_KINDS = 32
"""Calls of one model with other arguments that are recorded ahead; further ones are when they come."""


class Described(Protocol):
    """A step on some batch, described so far that it can be planned and dry-run."""

    @property
    def traces(self) -> Sequence[ModelTrace]:
        """Of the models that are planned."""
        ...

    @property
    def calls(self) -> Sequence[Sequence[BatchShape]]:
        """What each of them is called with."""
        ...

    def plans(self, budget_bytes: int) -> list[Plan]:
        """One for each of them.

        Raises:
            Infeasible: none fit.
        """
        ...

    def peak_bytes(self, parts: Sequence[ModulePolicy]) -> int:
        """Of the step, treated so."""
        ...


@dataclass(frozen=True, kw_only=True)
class OneModel:
    """See `Described`: one forward and one backward of a model."""

    model: nn.Module
    traced: ModelTrace
    optimizer: torch.optim.Optimizer | None
    progress: Progress
    hardware: Hardware | None = None
    host: Host | None = None

    @property
    def traces(self) -> Sequence[ModelTrace]:
        """See `Described`."""
        return (self.traced,)

    @property
    def calls(self) -> Sequence[Sequence[BatchShape]]:
        """See `Described`."""
        return ((BatchShape.of(*as_call(self.traced.batch)),),)

    @functools.cached_property
    def mirrored(self) -> torch.optim.Optimizer | None:
        """The optimizer over the fake copy."""
        return fake_optimizer(self.optimizer, self.model, self.traced) if self.optimizer is not None else None

    @functools.cached_property
    def planner(self) -> Planner:
        """Made when it is first asked for: seconds."""
        return make_planner(
            self.traced, optimizer=self.mirrored, hardware=self.hardware, host=self.host, progress=self.progress
        )

    def plans(self, budget_bytes: int) -> list[Plan]:
        """See `Described`."""
        return [self.planner.as_plan(self.planner.plan(budget_bytes), budget_bytes)]

    def peak_bytes(self, parts: Sequence[ModulePolicy]) -> int:
        """See `Described`."""
        return step_of(parts, OneBatch(trace=self.traced, optimizer=self.mirrored), Pricing()).peak_bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model of the step that runs with gradients."""

    number: int
    model: nn.Module
    use: ModelUse
    trace: ModelTrace

    @property
    def blocks(self) -> list[str]:
        """Names of its blocks."""
        return list(dict.fromkeys(call.name for call in self.trace.calls))


@dataclass(frozen=True, kw_only=True)
class OwnStep:
    """See `Described`."""

    step: Step
    modules: Sequence[nn.Module]
    copies: Copies
    batches: Sequence[Any]
    parts: Sequence[Part]
    seen: Seen
    counted: Counted
    gradients: Mapping[nn.Parameter, Tensor]
    optimizer: torch.optim.Optimizer | None
    mode: FakeTensorMode
    loop: Loop
    progress: Progress
    hardware: Hardware | None = None
    host: Host | None = None

    @property
    def traces(self) -> Sequence[ModelTrace]:
        """See `Described`."""
        return [part.trace for part in self.parts]

    @property
    def calls(self) -> Sequence[Sequence[BatchShape]]:
        """See `Described`."""
        return [[BatchShape.of(call.args, call.kwargs) for call in part.use.calls] for part in self.parts]

    @functools.cached_property
    def dry_step(self) -> UserStep:
        """Over copies of the models."""
        planned = [part.number for part in self.parts]
        held = self.loop.gradients_held
        return UserStep(
            self.step,
            self.copies,
            planned,
            self.batches,
            self.mode,
            gradients=self.gradients,
            gradients_held=held,
            optimizer=self.optimizer,
            copied=_copied(self.optimizer, self.modules, self.copies, self.mode),
            seen=self.seen,
            real=self.modules,
        )

    @property
    def reached(self) -> set[str]:
        """Parameters that got gradients, of models of which a rank may leave some out."""
        return {
            f"{number}.{name}"
            for number, (model, copied) in enumerate(zip(self.modules, modules_of(self.copies), strict=True))
            if may_be_used_elsewhere(model)
            for name, parameter in copied.named_parameters()
            if parameter in self.gradients
        }

    def with_reached(self, names: Collection[str]) -> OwnStep:
        """The same, where other ranks' parts of the step reach these parameters, too (see `reached`)."""
        gradients = dict(self.gradients)
        for number, copied in enumerate(modules_of(self.copies)):
            if isinstance(copied, ImaginedReplica):
                found = [p for name, p in copied.named_parameters() if f"{number}.{name}" in names]
                new = [p for p in found if p not in gradients and p.requires_grad]
                if new:
                    copied.used_elsewhere(new)
                with self.mode:
                    gradients |= {p: torch.empty_like(p) for p in new}
        return replace(self, gradients=gradients)

    def plans(self, budget_bytes: int) -> list[Plan]:
        """See `Described`."""
        measure_ops(self.counted.ops.values(), timed=False)  # no dry run meets an op without a price, and is repeated
        in_flight = [part.use.in_flight for part in self.parts]
        return plan_parts(
            self.traces,
            in_flight,
            self.dry_step,
            budget_bytes,
            hardware=self.hardware,
            host=self.host,
            progress=self.progress,
        )

    def peak_bytes(self, parts: Sequence[ModulePolicy]) -> int:
        """See `Described`."""
        return step_of(parts, self.dry_step, Pricing()).peak_bytes


def describe_step(
    step: Step,
    models: Sequence[nn.Module | Scheduled],
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer | None,
    blocks: Mapping[int, Sequence[str]],
    regions: Iterable[str] | None,
    loop: Loop,
    progress: Progress,
    stages: Agreement | None = None,
) -> OwnStep:
    """Run the step on fake tensors, and trace the models as it calls them.

    Args:
        blocks: of each model, where they are known; else ``regions``, or what repeats.
        stages: with ranks that run other stages of the step's pipelines.
    """
    progress("running the step on fake tensors")
    mode = fake_mode(allow_non_fake_inputs=True)
    batches = [_without_meta(batch, models, mode) for batch in batches]
    copies = copies_of(models, mode, stages)
    its_copy = _copied(optimizer, modules_of(models), copies, mode)
    counted = Counted()
    seen = observe(step, copies, batches, mode, optimizer, its_copy, counted, modules_of(models))
    uses = seen.uses
    for copied, use in zip(modules_of(copies), uses, strict=True):
        if isinstance(copied, ImaginedReplica):
            copied.gradients_wait, copied.freed = loop.gradients_held or use.adds_up, not loop.gradients_held
    stay = any(map(gradients_stay, modules_of(models))) or bool(seen.inside and seen.left)
    loop = replace(loop, gradients_held=loop.gradients_held or stay)
    progress("tracing")
    parts = [
        _part(number, inside_of_ddp(one), use, mode, blocks.get(number, regions), loop)
        for number, (one, use) in enumerate(zip(modules_of(models), uses, strict=True))
        if use.calls
    ]
    return OwnStep(
        step=step,
        modules=modules_of(models),
        copies=copies,
        batches=sorted(batches, key=nbytes_of),
        parts=parts,
        seen=seen,
        counted=counted,
        gradients={parameter: gradient for use in uses for parameter, gradient in use.gradients.items()},
        optimizer=optimizer,
        mode=mode,
        loop=loop,
        progress=progress,
    )


def _copied(
    optimizer: torch.optim.Optimizer | None, modules: Sequence[nn.Module], copies: Copies, mode: FakeTensorMode
) -> torch.optim.Optimizer | None:
    return None if optimizer is None else optimizer_over(optimizer, modules, modules_of(copies), mode)


def nbytes_of(batch: Any) -> int:
    return BatchShape.of((batch,)).nbytes


def _without_meta(batch: Any, models: Sequence[nn.Module | Scheduled], mode: FakeTensorMode) -> Any:
    """A batch of tensors without values, as if they were where the models are; those that share memory still do."""
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(batch)):
        return batch
    device = next((p.device for model in modules_of(models) for p in model.parameters()), None)
    return fake_batch(batch, mode, device)


def _part(
    number: int, model: nn.Module, use: ModelUse, mode: FakeTensorMode, regions: Iterable[str] | None, loop: Loop
) -> Part:
    loop = replace(loop, gradients_held=loop.gradients_held or use.adds_up)

    def traced(call: ModelCall, regions: Iterable[str] | None) -> ModelTrace:
        with as_signed(call.switches):
            given = as_batch(call.args, call.kwargs)
            return trace_model(model, given, loss_fn=_some_loss, regions=regions, mode=mode, loop=loop)

    first, *others = use.kinds
    if regions is None and loop.compile is not None:
        regions = list(compiled_modules(model)) or None
    trace = traced(first, regions)
    part = Part(number=number, model=model, use=use, trace=trace)
    trace.more = [traced(call, part.blocks) for call in others[:MOST_KINDS]]
    survey_blocks(trace, model)
    return part


def _some_loss(output: Any) -> Tensor:
    """The model's own loss, or a scalar of its output: the step's is computed elsewhere."""
    try:
        return loss_of(output)
    except TraceError:
        return stand_in_loss(output)
