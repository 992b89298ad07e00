"""Plans for a step that somebody wrote: its models, each traced as the step calls it, under one budget together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.fakes import fake_batch, fake_mode
from jettison.capture.model_trace import Loop, LossFn, ModelTrace, as_batch, call_model, loss_of
from jettison.capture.sharded import sharded_modules
from jettison.capture.signature import as_signed
from jettison.capture.tracer import trace_model
from jettison.capture.trees import tree_leaves
from jettison.dryrun.step import optimizer_over
from jettison.dryrun.user_step import ModelCall, ModelUse, Step, UserStep, observe
from jettison.errors import TraceError, UnsupportedModule, UsageError
from jettison.measure.device import elsewhere_bytes
from jettison.parallel.agree import Agreement, Group, groups_for, ranks_in
from jettison.parallel.imagined import gradients_stay, held_by_ddp, inside_of_ddp
from jettison.parallel.pipeline import stand_in_loss
from jettison.planner.apply import Applied, agreed, apply_from_another_rank, apply_plan, expect_loop, likeness
from jettison.planner.budget import Budget
from jettison.planner.parts import plan_parts
from jettison.planner.readiness import check_model, check_states
from jettison.progress import Progress
from jettison.runtime.witness import Check
from jettison.solve.plan import Plan

MOST_KINDS = 32
"""Calls of one model with other arguments that are recorded ahead; further ones are when they come."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A model of the step that runs with gradients."""

    number: int
    model: nn.Module
    use: ModelUse
    trace: ModelTrace


def is_wrapped(model: nn.Module) -> bool:
    """Whether what runs on this rank is more than the model: FSDP2 or DistributedDataParallel."""
    return isinstance(model, DistributedDataParallel) or bool(sharded_modules(model))


def checked_step(
    step: Step | None,
    models: Sequence[nn.Module],
    model: nn.Module,
    *,
    regions: Iterable[str] | None,
    loss_fn: LossFn | None,
    holds_output: bool,
) -> Step:
    """The step that was given, or a forward and a backward.

    Raises:
        UsageError: arguments that do not go together.
    """
    for number, one in enumerate(models):
        if not isinstance(one, nn.Module):
            raise UsageError(f"models= has a {type(one).__name__}; expected modules, as in models=(policy, reference)")
        inside = [other for other in models[:number] if set(one.modules()) & set(other.modules())]
        if inside:
            raise UsageError(
                f"models= has {type(one).__name__}, which shares modules with {type(inside[0]).__name__}; give the "
                "outermost module once"
            )
    if step is None and models:
        raise UsageError("got models= without step=; expected step(*models, batch) that runs forwards and backwards")
    if models and not any(one is model for one in models):
        raise UsageError("models= leaves out the model itself; expected all models of the step, in its order")
    if regions is not None and len(models) > 1:
        raise UsageError("got regions= with several models; mark blocks with jettison.checkpointable instead")
    if step is not None and loss_fn is not None:
        raise UsageError("got loss_fn= and step=; the step computes its loss itself: leave loss_fn= out")
    if step is not None and not callable(step):
        raise UsageError(f"step= is {step!r}; expected a function step(model, batch) that runs forwards and backwards")

    def whole(model: nn.Module, batch: Any) -> Any:
        output = call_model(model, batch)
        loss = loss_of(output, loss_fn)
        if not holds_output:
            output = None
        loss.backward()
        return output

    return step or whole


def auto_checkpoint_step(
    step: Step,
    models: Sequence[nn.Module],
    batches: Sequence[Any],
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None,
    regions: Iterable[str] | None,
    how: Check,
    gradients_held: bool | None,
    group: Group | None,
    progress: Progress,
) -> Applied:
    """`auto_checkpoint` with ``step``; see there.

    Raises:
        UsageError: a step that does not use what it is given.
    """
    for one in models:
        check_model(one)
        check_states(one)
        if any(p.is_meta for p in one.parameters()):
            raise UnsupportedModule(
                f"{type(one).__name__} is on meta, and a step is dry-run where its models are; move it to its device "
                "first (to_empty), or plan without step="
            )
    with Agreement(_groups(models, group)) as agreement:
        budget_bytes = agreement.least(budget.nbytes) if budget.words else budget.nbytes
        progress("running the step on fake tensors")
        mode = fake_mode(allow_non_fake_inputs=True)
        held = any(p.grad is not None for one in models for p in one.parameters())
        held = (held if gradients_held is None else gradients_held) or any(map(gradients_stay, models))
        batches = [_without_meta(batch, models, mode) for batch in batches]
        uses = observe(step, models, batches, mode)
        batches = sorted(batches, key=_nbytes)
        beside = elsewhere_bytes(nn.ModuleList(models), batches[-1], optimizer) + sum(map(held_by_ddp, models))
        progress("tracing")
        parts = [
            _part(number, inside_of_ddp(one), use, mode, regions, held=held, how=how, beside=beside)
            for number, (one, use) in enumerate(zip(models, uses, strict=True))
            if use.calls
        ]

        def make() -> list[Plan]:
            planned = [part.number for part in parts]
            dry_step = UserStep(step, models, planned, batches, mode, gradients_held=held)
            if optimizer is not None:
                dry_step.optimizer = optimizer_over(optimizer, models, dry_step.copies, mode)
            traces, in_flight = [part.trace for part in parts], [part.use.in_flight for part in parts]
            return plan_parts(traces, in_flight, dry_step, budget_bytes, progress=progress)

        def tell(plans: list[Plan]) -> str:
            likes = [likeness(part.trace) for part in parts]
            return json.dumps([[plan.to_json() for plan in plans], likes])

        made = agreement.first(make, tell)
        return agreed(replace(_applied(parts, made, how), budget=budget.words), agreement)


def _nbytes(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _without_meta(batch: Any, models: Sequence[nn.Module], mode: FakeTensorMode) -> Any:
    """A batch of tensors without values, as if they were where the models are; those that share memory still do."""
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(batch)):
        return batch
    device = next((p.device for model in models for p in model.parameters()), None)
    return fake_batch(batch, mode, device)


def _groups(models: Sequence[nn.Module], group: Group | None) -> list[tuple[int, ...]]:
    """Ranks that run this step together."""
    found = {ranks: None for one in models for ranks in groups_for(one, group)}
    for one in models:
        if isinstance(one, DistributedDataParallel) and group is None:
            found[ranks_in(one.process_group)] = None
    return [ranks for ranks in found if len(ranks) > 1 and not any(set(ranks) < set(other) for other in found)]


def _part(
    number: int,
    model: nn.Module,
    use: ModelUse,
    mode: FakeTensorMode,
    regions: Iterable[str] | None,
    *,
    held: bool,
    how: Check,
    beside: int,
) -> _Part:
    loop = Loop(gradients_held=held or use.adds_up, check=how, elsewhere_bytes=beside)

    def traced(call: ModelCall, regions: Iterable[str] | None) -> ModelTrace:
        with as_signed(call.switches):
            given = as_batch(call.args, call.kwargs)
            return trace_model(model, given, loss_fn=_some_loss, regions=regions, mode=mode, loop=loop)

    first, *others = use.kinds
    trace = traced(first, regions)
    names = list(dict.fromkeys(call.name for call in trace.calls))
    trace.more = [traced(call, names) for call in others[:MOST_KINDS]]
    return _Part(number=number, model=model, use=use, trace=trace)


def _some_loss(output: Any) -> Tensor:
    """The model's own loss, or a scalar of its output: the step's is computed elsewhere."""
    try:
        return loss_of(output)
    except TraceError:
        return stand_in_loss(output)


def _applied(parts: Sequence[_Part], made: list[Plan] | str, how: Check) -> Applied:
    """Every model under its plan; of another rank's plans, told as text, the decisions."""
    if isinstance(made, str):
        texts, likes = json.loads(made)
        plans = [Plan.from_json(text) for text in texts]
    else:
        plans, likes = made, [""] * len(made)
    regions = []
    try:
        for part, plan, like in zip(parts, plans, likes, strict=True):
            for text in part.trace.warnings:
                warnings.warn(text, stacklevel=4)
            found = (
                apply_from_another_rank(part.model, part.trace, plan, like, how)
                if like
                else apply_plan(part.model, part.trace, plan, how)
            )
            regions += found.regions
            batches = [(call.args, call.kwargs) for call in part.use.calls]
            expect_loop(found.regions, part.trace, plan, batches=batches, in_flight=part.use.in_flight)
    except BaseException:
        Applied(regions=regions).remove()
        raise
    return Applied(regions=regions, plan=plans[0], plans=tuple(plans))
