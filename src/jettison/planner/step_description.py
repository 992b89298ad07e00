"""A step on a batch, described for planning and dry runs: the default forward and backward, or a custom step."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.fake_copies import fake_batch, fake_mode
from jettison.capture.model_trace import Loop, ModelTrace, as_batch, as_call, loss_of
from jettison.capture.pytrees import tree_leaves
from jettison.capture.signature import as_signed
from jettison.capture.tracer import trace_model
from jettison.core.errors import TraceError
from jettison.core.progress import Progress
from jettison.dryrun.op_costs import Pricing, measure_ops
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, fake_optimizer, optimizer_over, step_of
from jettison.dryrun.user_step import (
    Copies,
    Counted,
    ModelCall,
    ModelUse,
    ObservedStep,
    Scheduled,
    Step,
    UserStep,
    modules_of,
    observe,
)
from jettison.parallel.fake_ranks import FakeDDP, gradients_stay, inside_of_ddp, may_leave_out, sharded_fake_copy
from jettison.parallel.pipeline import stand_in_loss
from jettison.parallel.recompute_agreement import Agreement
from jettison.planner.cpu_offload import Host
from jettison.planner.planner import Planner, StagesPlanner, planner_of
from jettison.planner.readiness import compiled_modules, survey_blocks
from jettison.runtime.loop_assumptions import BatchShape
from jettison.spec.hardware import Hardware

MOST_KINDS = 32
"""Calls of one model with different arguments that are recorded ahead; others are recorded when they occur."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model of the step that runs with gradients; ``use``: its calls in a custom step."""

    number: int = 0
    model: nn.Module
    trace: ModelTrace
    use: ModelUse | None = None

    @property
    def blocks(self) -> list[str]:
        return list(dict.fromkeys(call.name for call in self.trace.calls))

    @property
    def shapes(self) -> list[BatchShape]:
        """Shapes of the arguments of each of its calls in a step."""
        return (
            [BatchShape.of(*as_call(self.trace.batch))]
            if self.use is None
            else [BatchShape.of(c.args, c.kwargs) for c in self.use.calls]
        )


@dataclass(frozen=True, kw_only=True)
class Described:
    """One forward and backward on a batch. ``parts`` are planned; ``counted``: ops and levels, for a custom step."""

    parts: Sequence[Part]
    optimizer: torch.optim.Optimizer | None
    progress: Progress
    hardware: Hardware | None = None
    host: Host | None = None
    counted: Counted | None = None

    @property
    def traces(self) -> list[ModelTrace]:
        return [part.trace for part in self.parts]

    @functools.cached_property
    def dry_step(self) -> DryStep:
        (part,) = self.parts
        mirrored = self.optimizer and fake_optimizer(self.optimizer, part.model, part.trace)
        return OneBatch(trace=part.trace, optimizer=mirrored)

    @functools.cached_property
    def planner(self) -> Planner | StagesPlanner:
        """The planner, made on first use, which takes seconds."""
        if self.counted is not None:  # all ops have prices, so no dry run is repeated
            measure_ops(self.counted.ops.values(), timed=False)
        in_flight = [1 if part.use is None else part.use.in_flight for part in self.parts]
        return planner_of(
            self.traces, in_flight, self.dry_step, hardware=self.hardware, host=self.host, progress=self.progress
        )

    def peak_bytes(self, parts: Sequence[ModulePolicy]) -> int:
        return step_of(parts, self.dry_step, Pricing()).peak_bytes


@dataclass(frozen=True, kw_only=True)
class OwnStep(Described):
    step: Step
    modules: Sequence[nn.Module]
    copies: Copies
    batches: Sequence[Any]
    seen: ObservedStep
    gradients: Mapping[nn.Parameter, Tensor]
    mode: FakeTensorMode
    loop: Loop
    reached_anywhere: frozenset[str] = frozenset()  # `reached`, by all ranks' parts of the step together

    @functools.cached_property
    def dry_step(self) -> DryStep:
        return UserStep(
            self.step,
            self.copies,
            [part.number for part in self.parts],
            self.batches,
            self.mode,
            gradients=self.gradients,
            gradients_preallocated=self.loop.gradients_preallocated,
            optimizer=self.optimizer,
            copied=_copied(self.optimizer, self.modules, self.copies, self.mode),
            seen=self.seen,
            real=self.modules,
        )

    @property
    def reached(self) -> set[str]:
        """Parameters that got gradients, for models whose parameters a rank may not use."""
        return {
            f"{number}.{name}"
            for number, (model, copied) in enumerate(zip(self.modules, modules_of(self.copies), strict=True))
            if may_leave_out(model)
            for name, parameter in copied.named_parameters()
            if parameter in self.gradients
        }

    def with_reached(self, names: Collection[str]) -> OwnStep:
        """Return the step with parameters that other ranks' parts of it reach (see `reached`)."""
        gradients = dict(self.gradients)
        for number, copied in enumerate(modules_of(self.copies)):
            if isinstance(copied, FakeDDP):
                found = [p for name, p in copied.named_parameters() if f"{number}.{name}" in names]
                new = [p for p in found if p not in gradients and p.requires_grad]
                if new:
                    copied.used_elsewhere(new)
                with self.mode:
                    gradients |= {p: torch.empty_like(p) for p in new}
        return replace(self, gradients=gradients, reached_anywhere=frozenset(names))


def describe_step(
    step: Step,
    models: Sequence[nn.Module | Scheduled],
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer | None,
    blocks: Mapping[int, Sequence[str]],
    regions: Iterable[str] | None,
    loop: Loop,
    progress: Progress,
    stages: Agreement | None,
) -> OwnStep:
    """Run the step on fake tensors, and trace the models in its calls. ``blocks``: of each model, if known; else
    ``regions``, or repeated blocks. ``stages``: agreement with ranks that run other stages of the step's pipelines.
    """
    progress("running the step on fake tensors")
    mode, modules = fake_mode(allow_non_fake_inputs=True), modules_of(models)
    device = next((p.device for model in modules for p in model.parameters()), None)
    batches = [_with_values(batch, device, mode) for batch in batches]
    copies = copies_of(models, mode, stages)
    counted = Counted()
    seen = observe(step, copies, batches, mode, optimizer, _copied(optimizer, modules, copies, mode), counted, modules)
    for copied, use in zip(modules_of(copies), seen.uses, strict=True):
        if isinstance(copied, FakeDDP):
            copied.gradients_wait, copied.freed = (
                loop.gradients_preallocated or use.adds_up,
                not loop.gradients_preallocated,
            )
    stay = any(map(gradients_stay, modules)) or bool(seen.inside and seen.left)
    loop = replace(loop, gradients_preallocated=loop.gradients_preallocated or stay)
    progress("tracing")
    return OwnStep(
        step=step,
        modules=modules,
        copies=copies,
        batches=sorted(batches, key=nbytes_of),
        parts=[
            _part(number, inside_of_ddp(one), use, mode, blocks.get(number, regions), loop)
            for number, (one, use) in enumerate(zip(modules, seen.uses, strict=True))
            if use.calls
        ],
        seen=seen,
        counted=counted,
        gradients={parameter: gradient for use in seen.uses for parameter, gradient in use.gradients.items()},
        optimizer=optimizer,
        mode=mode,
        loop=loop,
        progress=progress,
    )


def copies_of(models: Sequence[nn.Module | Scheduled], mode: FakeTensorMode, stages: Agreement | None = None) -> Copies:
    """Return fake copies of a step's models and pipeline schedules. Ranks that share parameters or a pipeline call this
    together; ``stages``: agreement with ranks that run other stages.
    """

    def copied(number: int, one: nn.Module | Scheduled) -> Any:
        if isinstance(one, nn.Module):
            return sharded_fake_copy(one, mode)
        from jettison.dryrun.fake_pipeline import FakeSchedule

        return FakeSchedule(one, mode, stages, number=number)

    with torch.random.fork_rng(devices=[]):
        return [copied(number, one) for number, one in enumerate(models)]


def _copied(
    optimizer: torch.optim.Optimizer | None, modules: Sequence[nn.Module], copies: Copies, mode: FakeTensorMode
) -> torch.optim.Optimizer | None:
    return None if optimizer is None else optimizer_over(optimizer, modules, modules_of(copies), mode)


def nbytes_of(batch: Any) -> int:
    return BatchShape.of((batch,)).nbytes


def _with_values(batch: Any, device: torch.device | None, mode: FakeTensorMode) -> Any:
    """A fake batch, as if on the models' device; tensors that share memory still do."""
    described = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(batch))
    return fake_batch(batch, mode, device) if described else batch


def _part(
    number: int, model: nn.Module, use: ModelUse, mode: FakeTensorMode, regions: Iterable[str] | None, loop: Loop
) -> Part:
    loop = replace(loop, gradients_preallocated=loop.gradients_preallocated or use.adds_up)

    def traced(call: ModelCall, regions: Iterable[str] | None) -> ModelTrace:
        with as_signed(call.switches):
            given = as_batch(call.args, call.kwargs)
            try:
                return trace_model(model, given, loss_fn=_some_loss, regions=regions, mode=mode, loop=loop)
            except AttributeError as error:  # step assigned it on copies, where its assignments were undone
                raise TraceError(
                    f"got {error}; expected a forward that runs apart from step: set it before planning"
                ) from error

    first, *others = use.kinds
    if regions is None and loop.compile is not None:
        regions = list(compiled_modules(model)) or None
    part = Part(number=number, model=model, use=use, trace=traced(first, regions))
    part.trace.more = [traced(call, part.blocks) for call in others[:MOST_KINDS]]
    survey_blocks(part.trace, model)
    return part


def _some_loss(output: Any) -> Tensor:
    """The model's own loss, or a scalar of its output: a custom step computes its loss elsewhere."""
    try:
        return loss_of(output)
    except TraceError:
        return stand_in_loss(output)
