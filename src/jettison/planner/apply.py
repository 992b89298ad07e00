"""`apply`: a plan or a policy on a live model, agreed on by all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn

from jettison.capture.model_trace import Loop, LossFn, ModelTrace, as_call
from jettison.core.errors import PlanMismatch, UsageError, warn
from jettison.core.files import read_text
from jettison.core.parse_units import parse_bytes
from jettison.core.progress import on_terminal
from jettison.dryrun.step import OneBatch, dry_run
from jettison.dryrun.user_step import ModelUse
from jettison.parallel.recompute_agreement import Agreement, Group, groups_for, summary, talking_groups
from jettison.planner.handle import Applied, keep_losses
from jettison.planner.planner import DryRunChoice, Planner, digests_of, fingerprint, module_policy
from jettison.planner.readiness import check_model, compile_settings
from jettison.planner.readiness import traced as traced_forward
from jettison.runtime.chunked_loss import holding
from jettison.runtime.install import install
from jettison.runtime.loop_assumptions import PARTIAL, Assumptions
from jettison.runtime.planned_forward import PlannedForward
from jettison.runtime.witness import Check, check_of
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll, attention_core, policy_named
from jettison.solve.plan import Plan

Policy = str | CheckpointPolicy | Mapping[str, "str | CheckpointPolicy"] | Sequence["str | CheckpointPolicy"]


def likeness(traced: ModelTrace) -> str:
    """Digest that is equal for models with the same ops on tensors of the same shapes. Constant arguments may differ,
    such as the first row of a sharded vocabulary on each rank.
    """
    programs = [traced.root.program, *(traced.program(call) for call in traced.calls)]
    return " ".join(replace(p, ops=tuple(replace(op, price_key="") for op in p.ops)).digest() for p in programs)


def apply_from_another_rank(
    model: nn.Module,
    traced: ModelTrace,
    plan: Plan,
    like: str,
    how: Check = Check.ALWAYS,
    host_budget_bytes: int | None = None,
) -> Applied:
    """Apply another rank's decisions to this rank's programs, under this rank's digests. Raise `PlanMismatch` if this
    rank's model differs; ``like``: the `likeness` of the model that the plan was made for.
    """
    if likeness(traced) != like:
        raise PlanMismatch(
            "this rank's model runs other ops than that of the rank that made the plan, or on tensors of other shapes. "
            "Ranks that share parameters follow one plan: call auto_checkpoint with the same model on all of them, "
            "and batches that all have padding, or none; other values and non-tensor arguments may select ops, too"
        )
    digests = {call.name: traced.program(call).digest() for call in traced.calls}
    layers = tuple(replace(entry, digest=digests[entry.layer]) for entry in plan.layers)
    own = replace(plan, layers=layers, root=replace(plan.root, digest=traced.root.program.digest()))
    return replace(apply_plan(model, traced, own, how, host_budget_bytes), plan=plan)


def apply_candidate(model: nn.Module, planner: Planner, found: DryRunChoice, budget_bytes: int) -> Applied:
    """Apply a planner's choice to the model that it was traced from."""
    for text in planner.trace.warnings:
        warn(text)
    made = planner.as_plan(found, budget_bytes)
    room = None if planner.host is None else planner.host.budget_bytes
    applied = apply_plan(model, planner.trace, made, Check.ALWAYS, room)
    expect_loop(applied.regions, planner.trace, made, returns_loss=planner.trace.loss_fn is None)
    return applied


def expect_loop(
    regions: list[PlannedForward],
    traced: ModelTrace,
    made: Plan,
    use: ModelUse | None = None,
    *,
    returns_loss: bool,
    probed: bool = False,
    replicated: bool = False,
) -> None:
    """Let the root check that the training loop is the one that was planned for. ``use``: calls of the model in a
    custom step; by default one call with the trace's batch. ``probed``: it is a pipeline stage, which torch runs once
    before the first step. ``returns_loss``, ``replicated``: see `Assumptions`.
    """
    root = regions[-1]
    root.assumptions = Assumptions(
        root.module,
        [as_call(traced.batch)] if use is None else [(call.args, call.kwargs) for call in use.calls],
        traced.root_signature[0],
        budget_bytes=made.budget_bytes,
        gradients_preallocated=made.gradients_preallocated,
        in_flight=1 if use is None else use.in_flight + probed,
        backwards=(set() if use is None else use.backwards) | ({PARTIAL} if probed else set()),
        returns_loss=returns_loss,
        room_bytes=None if traced.loop.keep_output else made.budget_bytes - made.predicted.peak_bytes,
        replicated=replicated,
    )


@on_terminal
def apply(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    check: str | Check = Check.ALWAYS,
    compile: str | None = None,
    group: Group | None = None,
    host_budget: str | SupportsIndex | None = None,
) -> Applied:
    """Apply a plan, or a policy, to a live model.

    If the model's parameters are distributed over ranks (DTensors: tensor parallel, FSDP2), all of these ranks must
    call this; it returns after all of them have agreed on what they recompute.

    Args:
        policy: ``none``, ``selective`` (attention core), ``selective-op`` (matmul outputs kept), ``full``,
            ``every:K``, ``offload`` (saved tensors are offloaded to CPU), ``full-offload`` (so are the inputs that
            ``full`` keeps), ``pack`` (masks are stored as bits, indices in fewer bytes), a `CheckpointPolicy`; a list
            of these, one for each block in order; or a mapping from block name to one (other blocks keep everything).
        plan: a plan that `plan` made for this model and batch, or a file with one.
        batch: one training batch; needed for ``plan``, and to record before the first step.
        check: how every recomputed tensor is compared with the forward's: ``always`` (some elements of each),
            ``sampled`` (one tensor in eight, after the first steps), ``full`` (a digest of all elements),
            ``exact`` (like ``always``, and no rounding differences are accepted on accelerators), ``off``.
        compile: as in `auto_checkpoint`; needed again for a plan that was made with it.
        group: a process group or a mesh whose ranks must agree, if the parameters do not show it: for models that
            communicate by other means.
        host_budget: limit of pinned host memory, rounded up as it is allocated; by default what the host has.

    Raises:
        PlanMismatch: the plan was made for another model or another batch; or some rank has another plan, failed, or
            did not arrive. Every rank raises it.
        UsageError: neither or both of policy and plan; an unknown policy; an unknown block; tensors on a device that
            does not support offloading.
        HostBudgetExceeded: offloading needs more host memory than it may have, or than there is.
    """
    with Agreement(groups_for(model, group) if isinstance(model, nn.Module) else ()) as agreement:
        if (policy is None) == (plan is None):
            raise UsageError("give either policy= or plan=, exactly one of them")
        how = check_of(check)
        host_bytes = None if host_budget is None else parse_bytes(host_budget)
        check_model(model)
        if isinstance(plan, str | os.PathLike):
            plan = Plan.from_json(read_text(Path(plan), f"plan={os.fspath(plan)!r}"))
        if batch is None:
            raise UsageError("apply() needs batch=: one training batch, to record what the model saves")
        loop = Loop(compile=compile_settings(compile, [model]))
        with holding(plan is not None and plan.chunked_loss) as losses:
            traced = traced_forward(model, batch, loss_fn=loss_fn, regions=regions, loop=loop)
            agreement.also(talking_groups([traced]))
            if plan is not None:
                applied = apply_plan(model, traced, plan, how, host_bytes, confirms=True)
                expect_loop(applied.regions, traced, plan, returns_loss=traced.loss_fn is None)
                applied = agreed(applied, agreement)
                if losses is not None:
                    keep_losses(applied, losses)
                return applied
        assert policy is not None
        if loop.compile is not None:
            _refuse_op_words(policy)
        if getattr(policy, "word", policy) != "none":
            for text in traced.warnings:
                warn(text)
        policies, segments = policies_of(policy, list(dict.fromkeys(c.name for c in traced.calls)))
        _warn_pointless(traced, policies, policy)
        installed = install(model, traced, policies, KeepAll(), segments, how=how, host_budget_bytes=host_bytes)
        return agreed(Applied(regions=installed), agreement)


def apply_plan(
    model: nn.Module,
    traced: ModelTrace,
    plan: Plan,
    how: Check,
    host_budget_bytes: int | None,
    *,
    confirms: bool = False,
) -> Applied:
    """Apply a plan that was made for this trace. ``confirms``: for a plan whose peak was composed of dry runs of its
    parts, run its own dry run now, without an optimizer and without workspaces of kernels. Raise `PlanMismatch` if it
    was made for another model or batch, or its dry run exceeds the plan's peak.
    """
    digests = {"": traced.root.program.digest(), **digests_of(traced, plan)}
    plan.require(model=fingerprint(traced), digests=digests)
    part = module_policy(traced, plan)
    if confirms and plan.predicted.composed:
        trace = replace(traced, loop=replace(traced.loop, gradients_preallocated=plan.gradients_preallocated))
        found = dry_run([replace(part, trace=trace)], OneBatch(trace=trace)).peak_bytes
        if found > plan.predicted.peak_bytes:
            raise PlanMismatch(
                f"the plan states a peak of {plan.predicted.peak_bytes} bytes, composed of dry runs of its "
                f"parts; a dry run of its own takes {found}. Make the plan by itself: jettison.plan(traced, budget)"
            )
    regions = install(
        model, traced, part.policies, part.root, part.segments, how=how, host_budget_bytes=host_budget_bytes
    )
    return Applied(regions=regions, plan=plan)


def agreed(applied: Applied, agreement: Agreement) -> Applied:
    try:
        agreement.check(summary(applied.regions, applied.plan))
    except BaseException:
        applied.remove()
        raise
    return applied


def policies_of(policy: Policy, names: list[str]) -> tuple[dict[str, CheckpointPolicy], list[list[str]]]:
    """Policies by block, and runs of blocks that form one checkpoint segment each."""
    if isinstance(policy, Mapping):
        unknown = sorted(set(policy) - set(names))
        if unknown:
            raise UsageError(
                f"policy names {unknown[0]!r}, which is not a block; the blocks are {', '.join(names[:8]) or 'none'}"
            )
        return {name: _policy_of(policy.get(name, "none")) for name in names}, []
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        if len(policy) != len(names):
            raise UsageError(
                f"got a list of {len(policy)} policies; expected one for each of the {len(names)} blocks, "
                f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            )
        return {name: _policy_of(word) for name, word in zip(names, policy, strict=True)}, []
    if isinstance(policy, str) and policy.startswith("every:"):
        text = policy.removeprefix("every:")
        if not text.isdigit() or int(text) < 1:
            raise UsageError(f"got {policy!r}; expected every:K with a whole number K of at least 1, such as every:2")
        step = int(text)
        return dict.fromkeys(names, policy_named("full")), [names[i : i + step] for i in range(0, len(names), step)]
    return dict.fromkeys(names, _policy_of(policy)), []


def _refuse_op_words(policy: Policy) -> None:
    """Refuse policies by op or by runs of blocks for blocks compiled by Inductor, to which they do not apply."""
    words: Any = policy.values() if isinstance(policy, Mapping) else policy
    for word in words if isinstance(words, Iterable) and not isinstance(words, str) else [words]:
        if isinstance(word, str) and (word == "selective" or word.startswith("every:")):
            raise UsageError(f"got {word!r} for compiled blocks; expected none, selective-op, full, or a memory budget")


def _warn_pointless(traced: ModelTrace, policies: Mapping[str, CheckpointPolicy], word: object) -> None:
    """Warn of a policy without effect: no blocks, or selective recomputation with fused attention (no scores)."""
    if not policies and word != "none":
        warn(
            f"policy {word!r} changes nothing here: {type(traced.fake_model).__name__} has no repeated blocks that it "
            "could apply to. Name what to treat as blocks with regions=[...], or use a memory budget"
        )
    chosen = [c for c in traced.calls if policies[c.name].word == "selective"]
    if chosen and not any(attention_core(traced.program(c)) for c in chosen):
        warn(
            "policy 'selective' changes nothing here: no block stores attention scores (fused attention recomputes "
            "them inside its kernel). Use 'selective-op', 'full', or a memory budget"
        )


def _policy_of(word: str | CheckpointPolicy) -> CheckpointPolicy:
    if isinstance(word, str):
        return policy_named(word)
    if not hasattr(word, "kept"):
        raise UsageError(f"got {word!r} as a block's policy; expected a word such as 'full', or a CheckpointPolicy")
    return word
