"""Plans for a step that somebody wrote: its models, each traced as the step calls it, under one budget together."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.model_trace import CompileSettings, Loop, LossFn, as_call, call_model, loss_of
from jettison.capture.sharded import sharded_modules
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.progress import Progress
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.schedules import Scheduled, is_schedule, modules_of
from jettison.dryrun.user_step import Step
from jettison.parallel.imagined import held_by_ddp, inside_of_ddp
from jettison.planner.apply import agreed, apply_from_another_rank, apply_plan, expect_loop, likeness
from jettison.planner.batches import BatchPlans
from jettison.planner.budget import Budget
from jettison.planner.described import OwnStep, Part, describe_step, nbytes_of
from jettison.planner.handle import Applied, follow_loop, note_losses
from jettison.planner.host import Host
from jettison.planner.kept_plans import Keeping
from jettison.planner.plan_facts import bytes_of_state
from jettison.planner.readiness import check_model, check_states
from jettison.planner.together import Together
from jettison.runtime.assumptions import PARTIAL
from jettison.runtime.batch_shape import BatchShape
from jettison.runtime.chunked_loss import Hold
from jettison.runtime.planned import PlannedForward
from jettison.runtime.witness import Check
from jettison.solve.plan import Plan
from jettison.spec.hardware import Hardware


def is_wrapped(model: nn.Module) -> bool:
    """Whether what runs on this rank is more than the model: FSDP2 or DistributedDataParallel."""
    return isinstance(model, DistributedDataParallel) or bool(sharded_modules(model))


def checked_step(
    step: Step | None,
    models: Sequence[nn.Module | Scheduled],
    model: nn.Module | Scheduled,
    *,
    regions: Iterable[str] | None,
    loss_fn: LossFn | None,
    holds_output: bool,
) -> Step:
    """The step that was given, or a forward and a backward.

    Raises:
        UsageError: arguments that do not go together.
    """
    for one in models:
        if not (isinstance(one, nn.Module) or is_schedule(one)):
            raise UsageError(f"models= has a {type(one).__name__}; expected modules, as in models=(policy, reference)")
    modules = modules_of(models)
    for number, one in enumerate(modules):
        inside = [other for other in modules[:number] if set(one.modules()) & set(other.modules())]
        if inside:
            raise UsageError(
                f"models= has {type(one).__name__}, which shares modules with {type(inside[0]).__name__}; give the "
                "outermost module once"
            )
    if isinstance(model, str):
        raise UsageError(
            f"got the model {model!r} as a string; expected a torch.nn.Module, such as transformers' "
            "AutoModelForCausalLM.from_pretrained returns (a name is for jettison.run_of, which describes a run)"
        )
    if step is None and not isinstance(model, nn.Module):
        raise UsageError(
            f"got a {type(model).__name__} without step=; expected step(schedule, batch) that calls schedule.step(...) "
            "as this rank's loop does"
        )
    if step is None and models:
        raise UsageError("got models= without step=; expected step(*models, batch) that runs forwards and backwards")
    if models and not any(one is model for one in models):
        raise UsageError("models= leaves out the model itself; expected all models of the step, in its order")
    if regions is not None and len(modules) > 1:
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
    models: Sequence[nn.Module | Scheduled],
    batches: Sequence[Any],
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None,
    regions: Iterable[str] | None,
    how: Check,
    gradients_held: bool | None,
    compiling: CompileSettings | None,
    ranks: Together,
    hardware: Hardware | None,
    host: Host | None,
    losses: Hold | None,
    progress: Progress,
    plain: bool,
    keeping: Keeping | None,
) -> Applied:
    """`auto_checkpoint` with ``step``; see there.

    Args:
        compiling: how blocks are compiled, if they are.
        host: where tensors may wait, if anywhere.
        losses: that losses go over chunks, if they do.
        ranks: that plan together with this one.
        plain: the step is one forward and one backward of the only model, whose arguments are the batch.

    Raises:
        Infeasible: no plan fits, on this rank or on another.
        UsageError: a step that does not use what it is given.
    """
    modules = modules_of(models)
    for one in modules:
        check_model(one)
        check_states(one)
        if any(p.is_meta for p in one.parameters()):
            raise UnsupportedModule(
                f"{type(one).__name__} is on meta, and a step is dry-run where its models are; move it to its device "
                "first (to_empty), or plan without step="
            )
    pipelined = any(not isinstance(one, nn.Module) for one in models)
    if pipelined and len(batches) > 1:
        raise UsageError("got shapes= with a pipeline; its stages exchange tensors of one shape: give one batch")
    began = time.perf_counter()
    budget = budget.with_least(ranks.least(budget.nbytes))
    held = any(p.grad is not None for one in modules for p in one.parameters())
    held = held if gradients_held is None else gradients_held
    beside = elsewhere_bytes(nn.ModuleList(modules), max(batches, key=nbytes_of), optimizer)
    beside += sum(map(held_by_ddp, modules))
    loop = Loop(gradients_held=held, check=how, elsewhere_bytes=beside, compile=compiling)
    one = describe_step(step, models, batches, optimizer, {}, regions, loop, progress, ranks.stages)
    reached = ranks.reached(one.reached)
    one = replace(one.with_reached(reached), hardware=hardware, host=host)
    note_losses(one.traces, losses)
    budget = budget.with_least(ranks.with_traced(one.traces, budget.nbytes))

    kept = None
    if keeping is not None:
        functions, more = [] if plain else [step], {"reached": " ".join(sorted(reached))}
        levels = one.counted.levels
        kept = keeping.opened(budget, one.traces, modules, batches, optimizer, functions, progress, levels, more)
    follows = ranks.follow(kept)

    def planned() -> list[Plan]:
        if kept is not None and follows and kept.plans:
            return kept.followed()
        made = one.plans(budget.nbytes)
        if kept is not None:
            state_bytes = bytes_of_state(one.dry_step.optimizer)
            kept.write(made, state_bytes=state_bytes, planning_seconds=time.perf_counter() - began)
        return made

    def make() -> Applied:
        made = ranks.plans(planned, [likeness(trace) for trace in one.traces])
        replicas = [inside_of_ddp(one) for one in modules if isinstance(one, DistributedDataParallel)]
        applied = _applied(one.parts, made, how, host, replicas=replicas, probed=pipelined)
        return agreed(replace(applied, budget=budget.words), ranks.sharing)

    applied = ranks.settled(make)
    plans = None
    if not (pipelined or ranks.sharing.rounds):
        blocks = {part.number: part.blocks for part in one.parts}

        def describe(batch: Any) -> OwnStep:
            found = describe_step(step, models, [batch], optimizer, blocks, None, loop, progress)
            note_losses(found.traces, losses)
            return replace(found.with_reached(reached), hardware=hardware, host=host)

        plans = BatchPlans(
            regions=_by_model(applied.regions),
            describe=describe,
            shape_of=_call_shape if plain else _shape,
            budget_bytes=budget.nbytes,
            planning_seconds=kept.planning_seconds if kept is not None and follows else time.perf_counter() - began,
            progress=progress,
            host_budget_bytes=None if host is None else host.shared(len(one.parts)).budget_bytes,
        )
        plans.begin(map(plans.shape_of, batches), one.traces, applied.plans)
    by_itself = plain and not any(map(sharded_modules, modules)) and plans is not None
    follow_loop(
        applied, budget, optimizer, plans=plans, by_itself=by_itself, elsewhere_bytes=beside, together=plans is None
    )
    return applied


def _by_model(regions: Sequence[PlannedForward]) -> list[list[PlannedForward]]:
    """Regions of each model, its own the last."""
    found: list[list[PlannedForward]] = [[]]
    for region in regions:
        found[-1].append(region)
        if region.is_root:
            found.append([])
    return found[:-1]


def _shape(batch: Any) -> BatchShape:
    """Of what is given to a step of somebody's own."""
    return BatchShape.of((batch,))


def _call_shape(batch: Any) -> BatchShape:
    """Of what is given to the model itself."""
    return BatchShape.of(*as_call(batch))


def _applied(
    parts: Sequence[Part],
    made: list[Plan] | str,
    how: Check,
    host: Host | None,
    *,
    replicas: Sequence[nn.Module],
    probed: bool,
) -> Applied:
    """Every model under its plan; of another rank's plans, told as text, the decisions.

    Args:
        replicas: models that DistributedDataParallel replicates.
        probed: models are stages of a pipeline. Before their first step torch runs one forward through each, and asks
            for the gradients of its inputs alone (``_backward_metadata_inference`` in
            torch/distributed/pipelining/stage.py). That is less than one micro-batch takes, and nothing to be told of.
    """
    if isinstance(made, str):
        texts, likes = json.loads(made)
        plans = [Plan.from_json(text) for text in texts]
    else:
        plans, likes = made, [""] * len(made)
    regions = []
    room = None if host is None else host.shared(len(parts)).budget_bytes
    try:
        for part, plan, like in zip(parts, plans, likes, strict=True):
            for text in part.trace.warnings:
                warnings.warn(text, stacklevel=4)
            found = (
                apply_from_another_rank(part.model, part.trace, plan, like, how, room)
                if like
                else apply_plan(part.model, part.trace, plan, how, room)
            )
            regions += found.regions
            batches = [(call.args, call.kwargs) for call in part.use.calls]
            expect_loop(
                found.regions,
                part.trace,
                plan,
                batches=batches,
                in_flight=part.use.in_flight + probed,
                backwards=part.use.backwards | ({PARTIAL} if probed else set()),
                replicated=any(part.model is one for one in replicas),
            )
    except BaseException:
        Applied(regions=regions).remove()
        raise
    return Applied(regions=regions, plan=plans[0], plans=tuple(plans))
