"""Plans of one rank, from a budget, a plan file or a policy, and applying them to the rank's modules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from jettison.capture.model_trace import Loop, LossFn, ModelTrace
from jettison.core.errors import PlanMismatch, UsageError
from jettison.core.files import read_text
from jettison.core.parse_units import parse_bytes
from jettison.core.progress import Progress
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.step import DryStep
from jettison.parallel.recompute_agreement import Agreement, groups_for
from jettison.planner.apply import agreed, apply, apply_from_another_rank, likeness
from jettison.planner.budget import Budget
from jettison.planner.cpu_offload import hardware_of, host_of
from jettison.planner.handle import Applied, note_losses
from jettison.planner.kept_plans import Keeping, bytes_of_state
from jettison.planner.planner import fingerprint, planner_of
from jettison.planner.readiness import compile_settings, traced
from jettison.runtime.chunked_loss import holding
from jettison.runtime.offload import place_of
from jettison.solve.plan import Plan
from jettison.train.recipe import PlanSection
from jettison.train.run_folder import plan_name


@dataclass(frozen=True, kw_only=True)
class RankModule:
    """Input of planning: one module of a rank, with the inputs of a micro-batch.

    Args:
        regions: names of its blocks; by default the repeated ones.
        mode: of the module's fake copy in a dry run.
        in_flight: most micro-batches between their forward and backward.
        number: of the pipeline stage; None for the full model.
        compile: "blocks" if its blocks run compiled.
        agreeing: ranks that must recompute the same ops, if that does not follow from its parameters.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    regions: Sequence[str] | None = None
    mode: FakeTensorMode | None = None
    in_flight: int = 1
    number: int | None = None
    compile: str | None = None
    agreeing: DeviceMesh | None = None


@dataclass(frozen=True, kw_only=True)
class RankDecision:
    """Decision for a rank: a policy, or a plan for each part and the digests that a rank's parts must match."""

    plans: tuple[Plan, ...] = ()
    likenesses: tuple[str, ...] = ()
    policy: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankPlans:
    """Applied decision of a rank: plans of its parts, on rank 0 of every part of the model, in order; none for a
    policy. ``recomputed_flops``: of one micro-batch, on this rank. ``predicted_peak_bytes``: highest of all ranks.
    """

    recomputed_flops: int
    plans: tuple[Plan, ...] = ()
    predicted_peak_bytes: int | None = None


def decide(
    parts: Sequence[RankModule],
    section: PlanSection,
    dry_step: DryStep | None,
    progress: Progress,
    keeping: Keeping | None = None,
) -> RankDecision:
    """Decide for this rank, without changing its modules. ``dry_step``: the step over fake copies of the parts, if
    there is a budget. Raise `Infeasible` if no plan fits it; `UsageError` or `PlanMismatch` if plan files cannot be
    read, or are of another model, batch or layout.
    """
    if section.file is not None:
        return _from_files(Path(section.file), parts)
    if section.policy is not None:
        return RankDecision(policy=section.policy)
    assert section.budget is not None and dry_step is not None
    began, budget_bytes, kept = time.perf_counter(), parse_bytes(section.budget), None
    models, batches = [part.model for part in parts], [part.batch for part in parts]
    with holding(True) as losses:
        elsewhere = elsewhere_bytes(nn.ModuleList(models), batches)
        traces = [_trace(part, elsewhere) for part in parts]
        note_losses(traces, losses)
        if keeping is not None:
            functions = [part.loss_fn for part in parts]
            kept = keeping.opened(Budget(nbytes=budget_bytes), traces, models, batches, None, functions, progress)
        if kept is not None and kept.plans:
            made = kept.followed()
        else:
            progress("planning")
            counts, device = [part.in_flight for part in parts], hardware_of(section.gpu)
            host = host_of(section.offload, section.host_budget, device, place_of(models[0]))
            planner = planner_of(traces, counts, dry_step, hardware=device, host=host, progress=progress)
            made = planner.plans(budget_bytes)
            if kept is not None:
                seconds = time.perf_counter() - began
                kept.write(made, state_bytes=bytes_of_state(dry_step.optimizer), planning_seconds=seconds)
    assert losses is not None
    losses.release()  # the plans tell `carry_out` whether to keep references
    return RankDecision(plans=tuple(made), likenesses=tuple(map(likeness, traces)))


def carry_out(parts: Sequence[RankModule], decision: RankDecision, host_budget: str | None) -> int:
    """Apply the decision to this rank's modules; return the FLOPs of recomputation per micro-batch. Raise
    `HostBudgetExceeded` if all modules together need more pinned memory than ``host_budget``, or the host has less.
    """
    room = None if host_budget is None else parse_bytes(host_budget) // len(parts)
    if decision.policy is not None:
        applied = [
            apply(
                part.model,
                decision.policy,
                batch=part.batch,
                loss_fn=part.loss_fn,
                regions=part.regions,
                compile=part.compile,
                group=part.agreeing,
                host_budget=room,
            )
            for part in parts
        ]
    else:
        with holding(any(plan.chunked_loss for plan in decision.plans)) as losses:
            if losses is not None:
                losses.until_gone(parts[0].model)
            planned = zip(parts, decision.plans, decision.likenesses, strict=True)
            applied = [_apply(part, plan, like, room) for part, plan, like in planned]
    return sum(map(_recomputed_flops, applied))


def _from_files(path: Path, parts: Sequence[RankModule]) -> RankDecision:
    if parts[0].number is not None and path.is_file():
        raise UsageError(
            f"plan.file: got the file {path}, and every stage of a pipeline has a plan of its own; expected the folder "
            f"that holds {plan_name(0)} and those that follow, such as the log folder of a run under a budget"
        )
    found = [_from_file(path / plan_name(part.number) if path.is_dir() else path, part) for part in parts]
    return RankDecision(plans=tuple(plan for plan, _ in found), likenesses=tuple(like for _, like in found))


def _from_file(path: Path, part: RankModule) -> tuple[Plan, str]:
    plan = Plan.from_json(read_text(path, f"plan.file: {path}"))
    with holding(plan.chunked_loss) as losses:
        found = _trace(part)
    if losses is not None:
        losses.release()
    digests = {call.name: found.program(call).digest() for call in found.calls}
    try:
        plan.require(model=fingerprint(found), digests={"": found.root.program.digest()} | digests)
    except PlanMismatch as error:
        raise PlanMismatch(f"plan.file: {path} is of another model, batch or layout: {error}") from None
    return plan, likeness(found)


def _apply(part: RankModule, plan: Plan, like: str, room: int | None) -> Applied:
    """Apply the planning rank's plan to this rank's programs."""
    with Agreement(groups_for(part.model, part.agreeing)) as agreement:
        applied = apply_from_another_rank(part.model, _trace(part), plan, like, host_budget_bytes=room)
        return agreed(applied, agreement)


def _trace(part: RankModule, elsewhere: int = 0) -> ModelTrace:
    loop = Loop(keep_output=False, compile=compile_settings(part.compile, [part.model]), elsewhere_bytes=elsewhere)
    return traced(part.model, part.batch, loss_fn=part.loss_fn, regions=part.regions, loop=loop, mode=part.mode)


def _recomputed_flops(applied: Applied) -> int:
    """FLOPs that a backward of one micro-batch spends on recomputation. Regions without a program count nothing."""
    each = ([one.recipe for one in region.recordings.prepared.values() if one.recipe] for region in applied.regions)
    firsts = [recipes[0] for recipes in each if recipes]
    return sum(recipe.trace.program.ops[i].flops for recipe in firsts for i in recipe.recomputed_ops)
