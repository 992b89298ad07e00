"""`trace`, `plan`, `apply` and `auto_checkpoint`: what a user of the library calls."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from jettison.api.planner import Planner, Rehearsed, exactly, fingerprint
from jettison.api.readiness import check_model, check_optimizer
from jettison.api.readiness import traced as traced_forward
from jettison.errors import PlanMismatch, UnsupportedModule, UsageError
from jettison.measure.device import elsewhere_bytes
from jettison.measure.rehearse import twin_optimizer
from jettison.parallel.agree import Agreement, Group, groups_for, summary
from jettison.plan.artefact import Plan
from jettison.plan.treatment import KeepAll, Treatment, attention_core, treatment
from jettison.runtime.assumptions import Assumptions
from jettison.runtime.install import install
from jettison.runtime.region import PlannedForward
from jettison.runtime.report import Live, RegionReport
from jettison.runtime.witness import Check, check_of
from jettison.trace.model import LossFn, ModelTrace, as_call
from jettison.trace.sharded import sharded_modules
from jettison.units import parse_bytes

Policy = str | Treatment | Mapping[str, "str | Treatment"]


@dataclass(kw_only=True)
class Applied:
    """A plan at work on a model. `remove()` gives the model back as it was."""

    regions: list[PlannedForward]
    plan: Plan | None = None

    def remove(self) -> None:
        """Every module runs its own forward again."""
        for region in reversed(self.regions):
            region.remove()

    def report(self) -> list[RegionReport]:
        """What every region did so far: slots kept, dropped, recomputed ops, fallbacks."""
        return [region.report() for region in self.regions]

    def plan_text(self) -> str:
        """The plan as JSON; empty where a policy was applied."""
        return "" if self.plan is None else self.plan.to_json()

    def live(self) -> dict[str, Live]:
        """What is between its forward and its backward now, by region."""
        return {region.name: region.live() for region in self.regions}

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def trace(
    model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, regions: Iterable[str] | None = None
) -> ModelTrace:
    """Record one training forward of ``model`` on ``batch`` without allocating model memory.

    Args:
        model: with real weights, or on ``meta``.
        batch: ``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple. Real, fake or ``meta`` tensors.
        loss_fn: makes the scalar loss of the output, where the output is not it and has no ``.loss``.
        regions: names of the modules to plan one by one; by default the model's repeated blocks.

    Raises:
        TraceError: the forward cannot run on tensors without values, or there is no scalar loss.
        UsageError: weights have no size yet, or only some of them have values.
    """
    return traced_forward(model, batch, loss_fn=loss_fn, regions=regions)


def plan(
    traced: ModelTrace,
    memory_budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    measure: bool = True,
    gradients_held: bool = False,
) -> Plan:
    """The fastest plan that keeps a step of the traced model under ``memory_budget`` (peak of allocated bytes).

    Args:
        memory_budget: ``"8GiB"`` (a unit is required) or a number of bytes.
        optimizer: over the twin's parameters; its state and its step count towards the peak.
        measure: price ops by running them here; else by FLOPs and bytes, and what kernels allocate inside is not
            counted.
        gradients_held: as in `auto_checkpoint`.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` says what would.
        UsageError: the budget cannot be read.
    """
    budget_bytes = parse_bytes(memory_budget)
    traced.gradients_held = gradients_held
    if traced.real is not None:
        traced.elsewhere_bytes = elsewhere_bytes(traced.real, traced.batch, optimizer)
    planner = Planner(trace=traced, measure=measure, optimizer=optimizer)
    return planner.artefact(planner.plan(budget_bytes), budget_bytes)


def auto_checkpoint(
    model: nn.Module,
    batch: Any,
    memory_budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    holds_output: bool = True,
    check: str | Check = Check.ALWAYS,
    gradients_held: bool | None = None,
    group: Group | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Applied:
    """Make ``model`` train under ``memory_budget``: trace it, plan it, apply the plan.

    The budget is the peak of allocated bytes in a training step: parameters, gradients, activations, transients, and
    the
    optimizer's state where ``optimizer`` is given. The model trains as before, with bitwise the same gradients.
    Call it under the same autocast and train/eval state as training.

    Args:
        batch: one training batch, ``model(**batch)`` or ``model(*batch)``.
        memory_budget: ``"8GiB"`` (a unit is required) or a number of bytes.
        holds_output: the loop still holds the model's output (logits and all) while it runs backward and the
            optimizer, as ``out = model(**batch); out.loss.backward()`` does. False for
            ``model(**batch).loss.backward()``, which frees it.
        check: as in `apply`.
        gradients_held: parameters have their gradients already when a forward begins: several backwards add up before
            the optimizer's step, or the loop calls ``zero_grad(set_to_none=False)``. By default as it is now.
        group: as in `apply`. Its first rank plans for all: what ops cost is measured, and never twice the same.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` says what would.
        PlanMismatch: the ranks of the group do not have the same plan; see `apply`.
        TraceError: the model cannot be recorded, or there is no scalar loss.
        UnsupportedModule: the model is under FSDP2, compiled, scripted, planned already, or checkpoints by itself.
        UsageError: the budget cannot be read; the optimizer is not one that a step of can be rehearsed.
    """
    budget_bytes = parse_bytes(memory_budget)
    how = check_of(check)
    check_model(model)
    check_optimizer(optimizer, model)
    if sharded_modules(model):
        raise UnsupportedModule(
            "the model is under FSDP2, whose gathered parameters come and go in ways that no rehearsal counts yet; "
            "use apply() with a policy or a plan"
        )
    with Agreement(groups_for(model, group)) as agreement:
        progress("tracing")
        traced = traced_forward(model, batch, loss_fn=loss_fn, regions=regions)
        traced.holds_output = holds_output
        traced.how = how
        now = any(p.grad is not None for p in model.parameters())
        traced.gradients_held = now if gradients_held is None else gradients_held

        def make() -> Applied:
            mirrored = twin_optimizer(optimizer, model, traced) if optimizer is not None else None
            traced.elsewhere_bytes = elsewhere_bytes(model, batch, optimizer)
            planner = Planner(trace=traced, optimizer=mirrored, progress=progress)
            return apply_rehearsed(model, planner, planner.plan(budget_bytes), budget_bytes, how)

        applied = agreement.first(make, lambda made: json.dumps([made.plan_text(), likeness(traced)]))
        if isinstance(applied, str):
            plan_text, like = json.loads(applied)
            applied = apply_from_another_rank(model, traced, plan_text, like, how)
            assert applied.plan is not None
            _assume(applied.regions, traced, applied.plan)
        return _agreed(applied, agreement)


def likeness(traced: ModelTrace) -> str:
    """Equal for models that run the same ops on tensors of the same shapes. Constants among the arguments may differ,
    as the first row of a sharded vocabulary does from rank to rank.
    """
    programs = [traced.root.program, *(traced.program(call) for call in traced.calls)]
    return " ".join(replace(p, ops=tuple(replace(op, price_key="") for op in p.ops)).digest() for p in programs)


def apply_from_another_rank(
    model: nn.Module, traced: ModelTrace, plan_text: str, like: str, how: Check = Check.ALWAYS
) -> Applied:
    """The same decisions on this rank's programs, under the digests that they have here.

    Args:
        like: the `likeness` of what the plan was made for.

    Raises:
        PlanMismatch: this rank's model is another one.
    """
    plan = Plan.from_json(plan_text)
    if likeness(traced) != like:
        raise PlanMismatch("this rank's model runs other ops than that of the rank that made the plan")
    digests = {call.name: traced.program(call).digest() for call in traced.calls}
    layers = tuple(replace(entry, digest=digests[entry.layer]) for entry in plan.layers)
    own = replace(plan, layers=layers, root=replace(plan.root, digest=traced.root.program.digest()))
    return replace(_apply_plan(model, traced, own, how), plan=plan)


def apply_rehearsed(
    model: nn.Module, planner: Planner, found: Rehearsed, budget_bytes: int, how: Check = Check.ALWAYS
) -> Applied:
    for text in planner.trace.warnings:
        warnings.warn(text, stacklevel=3)
    regions = install(model, planner.trace, found.part.treatments, found.part.root, found.part.segments, how=how)
    made = planner.artefact(found, budget_bytes)
    _assume(regions, planner.trace, made)
    return Applied(regions=regions, plan=made)


def _assume(regions: list[PlannedForward], traced: ModelTrace, made: Plan) -> None:
    """The root is to notice where the loop is not the one that was planned for."""
    root = regions[-1]
    root.assumptions = Assumptions(
        root.module, as_call(traced.batch), traced.root_signature[0], budget_bytes=made.budget_bytes,
        gradients_held=made.gradients_held,
    )  # fmt: skip


def apply(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    plan: Plan | None = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    check: str | Check = Check.ALWAYS,
    group: Group | None = None,
) -> Applied:
    """Apply a plan, or a policy of your own.

    Where the model's parameters are distributed over ranks (DTensors: tensor parallel, FSDP2), all of those ranks must
    call this, and it returns only once they are known to compute the same things again.

    Args:
        policy: ``none``, ``selective`` (attention core), ``selective-op`` (matmul outputs kept), ``full``,
        ``every:K``, a
            `Treatment`, or a mapping from block name to one of these (blocks left out keep everything).
        plan: what `plan` made for this very model and batch.
        batch: one training batch; needed for ``plan``, and to record ahead of the first step.
        check: how closely every tensor that is computed again is held against what forward had: ``always`` (some
            elements of each), ``sampled`` (of one in eight, after the first steps), ``full`` (a digest of all),
            ``exact`` (as ``always``, and no rounding is let through on accelerators), ``off``.
        group: a process group or a mesh whose ranks must agree, where the parameters do not tell: those of a model
            that communicates by other means.

    Raises:
        PlanMismatch: the plan was made for another model or another batch; or some rank has another plan, failed, or
            did not come, which every rank is told.
        UsageError: neither or both of policy and plan; an unknown word; an unknown block.
    """
    if (policy is None) == (plan is None):
        raise UsageError("give either policy= or plan=, not both and not neither")
    how = check_of(check)
    check_model(model)
    if batch is None:
        raise UsageError("apply() needs batch=: one training batch, to record what the model saves")
    with Agreement(groups_for(model, group)) as agreement:
        traced = traced_forward(model, batch, loss_fn=loss_fn, regions=regions)
        if plan is not None:
            applied = _apply_plan(model, traced, plan, how)
            _assume(applied.regions, traced, plan)
            return _agreed(applied, agreement)
        assert policy is not None
        treatments, segments = treatments_of(policy, list(dict.fromkeys(c.name for c in traced.calls)))
        _warn_pointless(traced, treatments, policy)
        if any(chosen.word != "none" for chosen in treatments.values()):
            for text in traced.warnings:
                warnings.warn(text, stacklevel=2)
        return _agreed(Applied(regions=install(model, traced, treatments, KeepAll(), segments, how=how)), agreement)


def _apply_plan(model: nn.Module, traced: ModelTrace, plan: Plan, how: Check) -> Applied:
    names = list(dict.fromkeys(c.name for c in traced.calls))
    programs = {c.name: traced.program(c) for c in traced.calls}
    digests = {name: program.digest() for name, program in programs.items()}
    plan.require(model=fingerprint(traced), digests={"": traced.root.program.digest(), **digests})
    treatments = {entry.layer: exactly(programs[entry.layer], frozenset(entry.kept)) for entry in plan.layers}
    root = exactly(traced.root.program, frozenset(plan.root.kept))
    segments = [names[names.index(a) : names.index(b) + 1] for a, b in plan.segments]
    return Applied(regions=install(model, traced, treatments, root, segments, how=how), plan=plan)


def _agreed(applied: Applied, agreement: Agreement) -> Applied:
    try:
        agreement.check(summary(applied.regions, applied.plan))
    except PlanMismatch:
        applied.remove()
        raise
    return applied


def treatments_of(policy: Policy, names: list[str]) -> tuple[dict[str, Treatment], list[list[str]]]:
    """Treatments by block, and the runs of blocks that are one checkpoint segment each."""
    if isinstance(policy, Mapping):
        unknown = sorted(set(policy) - set(names))
        if unknown:
            raise UsageError(
                f"policy names {unknown[0]!r}, which is not a block; the blocks are {', '.join(names[:8])}"
            )
        return {name: _treatment(policy.get(name, "none")) for name in names}, []
    if isinstance(policy, str) and policy.startswith("every:"):
        step = _every(policy)
        return dict.fromkeys(names, treatment("full")), [names[i : i + step] for i in range(0, len(names), step)]
    return dict.fromkeys(names, _treatment(policy)), []


def _warn_pointless(traced: ModelTrace, treatments: Mapping[str, Treatment], word: object) -> None:
    """Policies are about blocks. Selective recomputation drops attention scores; fused attention never stored any."""
    if not treatments and word != "none":
        warnings.warn(
            f"policy {word!r} changes nothing here: {type(traced.twin).__name__} has no repeated blocks. "
            "Name what to treat as blocks with regions=[...], or use a memory budget",
            stacklevel=3,
        )
    chosen = [c for c in traced.calls if treatments[c.name].word == "selective"]
    if chosen and not any(attention_core(traced.program(c)) for c in chosen):
        warnings.warn(
            "policy 'selective' changes nothing here: no block stores attention scores (fused attention recomputes "
            "them inside its kernel). Use 'selective-op', 'full', or a memory budget",
            stacklevel=3,
        )


def _every(policy: str) -> int:
    text = policy.removeprefix("every:")
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"got {policy!r}; expected every:K with a whole number K of at least 1, such as every:2")
    return int(text)


def _treatment(word: str | Treatment) -> Treatment:
    return treatment(word) if isinstance(word, str) else word
