"""`trace`, `plan` and `auto_checkpoint`: from a live model and a budget to an applied plan."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import torch
from torch import nn

from jettison.capture.model_trace import Loop, LossFn, ModelTrace, as_call, expect_module, expect_trace
from jettison.core.errors import Infeasible, StaleTensor, TraceError, UsageError
from jettison.core.parse_units import parse_bytes
from jettison.core.process import seldom_collected
from jettison.core.progress import Progress, on_terminal, reported, shown
from jettison.core.units import format_bytes
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.schedules import Scheduled, is_schedule, modules_of
from jettison.dryrun.user_step import Step
from jettison.parallel.agree import Agreement, Group
from jettison.planner.apply import agreed, apply_candidate, apply_from_another_rank, apply_plan, expect_loop, likeness
from jettison.planner.batches import BatchPlans
from jettison.planner.budget import AskedBudget, Budget, budget_of, of_reserved
from jettison.planner.compile_blocks import compile_settings
from jettison.planner.described import OneModel
from jettison.planner.handle import Applied, figures, follow_loop, note_losses, with_losses
from jettison.planner.host import Host, hardware_of, host_of
from jettison.planner.kept_plans import Keeping
from jettison.planner.optimizers import Optimizers, as_one
from jettison.planner.own_step import auto_checkpoint_step, checked_step, is_wrapped
from jettison.planner.plan_facts import bytes_of_state
from jettison.planner.planner import make_planner
from jettison.planner.rank_batches import alike, stretched
from jettison.planner.readiness import check_model, check_optimizer
from jettison.planner.readiness import traced as traced_forward
from jettison.planner.together import Together, together
from jettison.runtime.batch_shape import BatchShape
from jettison.runtime.chunked_loss import Hold
from jettison.runtime.offload import place_of
from jettison.runtime.witness import Check, check_of
from jettison.solve.plan import Plan
from jettison.spec.hardware import Hardware


@on_terminal
def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    compile: str | None = None,
) -> ModelTrace:
    """Record one training forward of ``model`` on ``batch`` without allocating model memory.

    Args:
        model: with real weights, or on ``meta``.
        batch: ``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple. Real, fake or ``meta`` tensors.
        loss_fn: makes the scalar loss of the output, where the output is not it and has no ``.loss``.
        regions: names of the modules to plan one by one; by default the model's repeated blocks.
        compile: as in `auto_checkpoint`.

    Raises:
        TraceError: the forward cannot run on tensors without values, or there is no scalar loss.
        UnsupportedModule: blocks are to be compiled, and Inductor cannot work here.
        UsageError: weights have no size yet, or only some of them have values.
    """
    expect_module(model)
    loop = Loop(compile=compile_settings(compile, [model]))
    return traced_forward(model, batch, loss_fn=loss_fn, regions=regions, loop=loop)


@on_terminal
def plan(
    traced: ModelTrace,
    memory_budget: str | SupportsIndex,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    measure: bool = True,
    hardware: Hardware | str | None = None,
    gradients_held: bool = False,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    progress: Progress = shown,
) -> Plan:
    """The fastest plan that keeps a step of the traced model under ``memory_budget`` (peak of allocated bytes).

    Args:
        memory_budget: ``"8GiB"`` (text needs a unit), or a whole number of bytes.
        optimizer: over the fake copy's parameters; its state and its step count towards the peak.
        measure: price ops by running them here; else by FLOPs and bytes, and what kernels allocate inside is not
            counted.
        hardware: whose rates price what is not run, and its link to the host; left out, `usual_hardware`'s.
        gradients_held, offload, host_budget, progress: as in `auto_checkpoint`.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` says what would.
        UsageError: a budget cannot be read, or nobody states the link to the host.
    """
    (found,) = sweep(
        traced,
        [memory_budget],
        optimizer=optimizer,
        measure=measure,
        hardware=hardware,
        gradients_held=gradients_held,
        offload=offload,
        host_budget=host_budget,
        progress=progress,
    )
    if isinstance(found, Infeasible):
        raise found
    return found


@on_terminal
def sweep(
    traced: ModelTrace,
    memory_budgets: Iterable[str | SupportsIndex],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    measure: bool = True,
    hardware: Hardware | str | None = None,
    gradients_held: bool = False,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    progress: Progress = shown,
) -> list[Plan | Infeasible]:
    """A plan for each of several budgets, in their order: what a step costs in seconds by what it may take in bytes.

    What plans are chosen from is made once, and every choice is dry-run once. A budget that none fits is answered by
    the error that `plan` would raise. Arguments are those of `plan`.

    Raises:
        UsageError: a budget cannot be read, or there is none.
    """
    expect_trace(traced)
    if isinstance(memory_budgets, str):
        raise UsageError(
            f"got the text {memory_budgets!r} as memory budgets; expected a list, as in [{memory_budgets!r}]"
        )
    budgets = [parse_bytes(budget) for budget in memory_budgets]
    if not budgets:
        raise UsageError("got no memory budgets; expected at least one, as in sweep(traced, ['8GiB', '6GiB'])")
    beside = elsewhere_bytes(traced.real, traced.batch, optimizer) if traced.real is not None else 0
    loop = replace(traced.loop, gradients_held=gradients_held, elsewhere_bytes=beside)
    device = hardware_of(hardware)
    planner = make_planner(
        replace(traced, loop=loop),
        measure=measure,
        optimizer=optimizer,
        hardware=device,
        composes=len(budgets) > 1,
        host=host_of(offload, host_budget, device, place_of(traced.real or traced.fake_model), elsewhere=True),
        progress=progress,
    )
    found: list[Plan | Infeasible] = []
    for number, budget_bytes in enumerate(budgets, 1):
        progress(f"budget {number} of {len(budgets)}")
        try:
            found.append(planner.as_plan(planner.plan(budget_bytes), budget_bytes))
        except Infeasible as error:
            found.append(error)
    return found


plan.sweep = sweep  # type: ignore[attr-defined]


def auto_checkpoint(
    model: nn.Module | Scheduled,
    batch: Any,
    memory_budget: str | SupportsIndex,
    *,
    optimizer: Optimizers = None,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    holds_output: bool = True,
    check: str | Check = Check.ALWAYS,
    gradients_held: bool | None = None,
    step: Step | None = None,
    models: Sequence[nn.Module] = (),
    shapes: Sequence[Any] = (),
    reserved: bool = False,
    compile: str | None = None,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    hardware: Hardware | str | None = None,
    group: Group | None = None,
    chunked_loss: bool = True,
    plan: str | os.PathLike[str] | None = None,
    progress: Progress = shown,
) -> Applied:
    """Make ``model`` train under ``memory_budget``: trace it, plan it, apply the plan.

    The budget is the peak of allocated bytes in a training step: parameters, gradients, activations, transients, and
    the
    optimizer's state where ``optimizer`` is given. The model trains as before, with bitwise the same gradients.
    Call it under the same autocast and train/eval state as training.

    Args:
        model: a module; or, with ``step``, a schedule of `torch.distributed.pipelining` over this rank's stages, whose
            modules are planned together.
        batch: one training batch, ``model(**batch)`` or ``model(*batch)``.
        memory_budget: ``"8GiB"`` (text needs a unit) or a whole number of bytes; ``"auto"``, what the device has left
            for this process less a margin; ``"90%"`` of what it has left. Of ranks that plan together the smallest
            counts.
        optimizer: whose state and step count as well; several as ``(first, second)``, which step one after the other
            behind all forwards and backwards.
        holds_output: the loop still holds the model's output (logits and all) while it runs backward and the
            optimizer, as ``out = model(**batch); out.loss.backward()`` does. False for
            ``model(**batch).loss.backward()``, which frees it.
        check: as in `apply`.
        gradients_held: parameters have their gradients already when a forward begins: several backwards add up before
            the optimizer's step, or the loop calls ``zero_grad(set_to_none=False)``. By default as it is now. With
            ``step``: when the step begins.
        step: forwards and backwards of one training step as your loop has them, ``step(model, batch)``: several
            forwards before a backward, accumulation, autocast, a scaler, a loss outside of the model. It is run on
            copies without memory. What it returns is taken to be held while the optimizer steps.
        models: all models that the step runs, where there are several, ``model`` among them: ``step(*models, batch)``.
            Those that are called with gradients are planned together.
        shapes: other batches that the run has (lengths, padding buckets, the last rows of an epoch), with or without
            values (``meta``). The budget holds for each of them; what is planned for the largest is followed by all.
        reserved: hold the budget against what the caching allocator reserves on a CUDA device, not against what its
            tensors take. An allowance for fragments is taken off first; what they really are is looked at in every
            step, and planned for.
        compile: ``"blocks"``: each block runs compiled by Inductor, which saves for backward what the plan says; what
            is around the blocks runs op by op. Blocks on which ``block.compile()`` was called do so without a word.
        offload: tensors may also wait on the host, where that is faster than computing them again: `host_budget` bounds
            what pinned memory takes there (left out: what the host has), `hardware`, or its name, states how fast the
            link is. On CUDA the link is measured where no hardware is given.
        chunked_loss: where logits take 4 MiB or more, ``torch.nn.functional.cross_entropy`` of classes goes over chunks
            of rows as long as the plan is on: the same bits from one or two copies of the logits where torch holds
            three. What is not that function, as one that was imported by name before, is left as it is; so are losses
            whose logits the step writes to in place before its backward.
        group: as in `apply`. Its first rank plans for all: what ops cost is measured, and never twice the same.
        plan: a file that keeps the plan, or a folder for the plans of many calls. A plan that was made for the same
            model, shapes, step, versions and hardware is reused; otherwise the first difference is logged, and the new
            plan replaces the file. Each rank that plans has a file of its own; either all ranks reuse their plans, or
            none does. `jettison.Plan.from_json` reads the file.
        progress: called with the current work; by default the logger ``jettison`` and a terminal show it.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` says what would.
        PlanMismatch: the ranks of the group do not have the same plan; see `apply`.
        TraceError: the model cannot be recorded, or there is no scalar loss.
        UnsupportedModule: the model is compiled as a whole, scripted, planned already, or checkpoints by itself; blocks
            are to be compiled, and Inductor cannot work here.
        HostBudgetExceeded: what moves to the host needs more of its memory than there is by then.
        UsageError: a budget cannot be read; the optimizer is not one that a step of can be dry-run; nobody states the
            link to the host; the file of ``plan`` is there and no such plan.
    """
    if not (isinstance(model, nn.Module) or is_schedule(model)):
        expect_module(model)
    asked = AskedBudget.of(memory_budget)
    options = {
        "budget": str(asked if asked.nbytes is None else asked.nbytes),
        "reserved": reserved,
        "offload": f"{offload}, host budget {host_budget}, hardware {hardware if offload else None}",
    }
    models = _sequence("models", models)
    given = models or (model,)
    if isinstance(shapes, Iterator):
        shapes = tuple(shapes)

    def made(losses: Hold | None, batches: Sequence[Any], asked: AskedBudget, plan: Any) -> Applied:
        with together(given, group) as ranks, seldom_collected():
            steps = as_one(optimizer)
            how = check_of(check)
            modules = modules_of([model])
            for one in modules:
                check_model(one)
            check_optimizer(steps, nn.ModuleList(modules_of(given)))
            settings = compile_settings(compile, modules)
            device = hardware_of(hardware)
            host = host_of(offload, host_budget, device, place_of(nn.ModuleList(modules)))
            budget = budget_of(asked, modules_of(given), batches[0], steps)
            if reserved:
                budget = of_reserved(budget, nn.ModuleList(modules))
            if budget.words:
                progress(f"budget {budget.words}")
            keeping = None if plan is None else Keeping(where=plan, asked=asked, options=options)
            if isinstance(model, nn.Module):  # stages of a pipeline exchange tensors of one shape
                batches = alike(batches, ranks.sharing)
            plain = isinstance(model, nn.Module) and step is None and not models and not is_wrapped(model)
            if not plain or len(batches) > 1:
                whole = checked_step(step, models, model, regions=regions, loss_fn=loss_fn, holds_output=holds_output)
                applied = auto_checkpoint_step(
                    whole,
                    given,
                    batches,
                    budget,
                    optimizer=steps,
                    regions=regions,
                    how=how,
                    gradients_held=gradients_held,
                    compiling=settings,
                    ranks=ranks,
                    hardware=device,
                    host=host,
                    losses=losses,
                    progress=progress,
                    plain=step is None,
                    keeping=keeping,
                )
                return thawing(applied, ranks, budget, batches)
            now = any(p.grad is not None for p in model.parameters())
            loop = Loop(
                holds_output=holds_output,
                gradients_held=now if gradients_held is None else gradients_held,
                check=how,
                elsewhere_bytes=elsewhere_bytes(model, batches[0], steps),
                compile=settings,
            )
            applied = _auto_checkpoint(
                model,
                batches[0],
                budget,
                optimizer=steps,
                loss_fn=loss_fn,
                regions=regions,
                loop=loop,
                ranks=ranks,
                hardware=device,
                host=host,
                losses=losses,
                progress=progress,
                keeping=keeping,
            )
            return thawing(applied, ranks, budget, batches)

    def again(batches: Sequence[Any], budget_bytes: int | None) -> Applied:
        less = asked if budget_bytes is None else AskedBudget.of(budget_bytes)
        return with_losses(lambda losses: made(losses, batches, less, None), chunked=chunked_loss)

    def thawing(applied: Applied, ranks: Together, budget: Budget, batches: Sequence[Any]) -> Applied:
        """A handle that plans again with the other ranks where this one cannot plan by itself."""
        if applied.batches is None:
            applied._again = Thawing(
                modules=modules_of(given),
                stages=[one.ranks for one in ranks.stages.rounds],
                shapes=[BatchShape.of((one,)) for one in batches] if ranks.sharing.rounds else [],
                budget_bytes=budget.nbytes,
                make=again,
                progress=progress,
            ).meet
        return applied

    with reported(progress, f"planning {type(model).__name__} under a budget of {asked}") as done:
        batches = [batch, *_sequence("shapes", shapes)]
        try:
            applied = with_losses(lambda losses: made(losses, batches, asked, plan), chunked=chunked_loss)
        except StaleTensor as error:  # of a dry run
            raise TraceError(
                f"a forward of {type(model).__name__}, or its step, writes in place to a tensor that autograd has "
                "saved for backward: plain autograd refuses that, too. Write to a clone "
                "(allow_mutation_on_saved_tensors lets it through, and models run without a plan there)"
            ) from error
        done(f"planned {type(model).__name__}: {figures(applied)}")
    return applied


def _auto_checkpoint(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: LossFn | None,
    regions: Iterable[str] | None,
    loop: Loop,
    ranks: Together,
    hardware: Hardware | None,
    host: Host | None,
    losses: Hold | None,
    progress: Progress,
    keeping: Keeping | None,
) -> Applied:
    """See `auto_checkpoint`: a model whose step is a forward on the batch, and a backward."""
    began = time.perf_counter()
    budget = budget.with_least(ranks.least(budget.nbytes))
    progress("tracing")
    traced = traced_forward(model, batch, loss_fn=loss_fn, regions=regions, loop=loop)
    note_losses([traced], losses)
    budget = budget.with_least(ranks.with_traced([traced], budget.nbytes))
    one = OneModel(model=model, traced=traced, optimizer=optimizer, progress=progress, hardware=hardware, host=host)

    kept = None
    if keeping is not None:
        kept = keeping.opened(budget, [traced], [model], batch, optimizer, [loss_fn], progress)
    follows = ranks.follow(kept)

    def make() -> Applied:
        if kept is not None and follows:
            room = None if host is None else host.budget_bytes
            applied = apply_plan(model, traced, kept.followed()[0], check_of(loop.check), room)
            assert applied.plan is not None
            expect_loop(applied.regions, traced, applied.plan)
            return applied
        found = one.planner.plan(budget.nbytes)
        applied = apply_candidate(model, one.planner, found, budget.nbytes, check_of(loop.check))
        if kept is not None and applied.plan is not None:
            state_bytes = bytes_of_state(one.mirrored)
            kept.write([applied.plan], state_bytes=state_bytes, planning_seconds=time.perf_counter() - began)
        return applied

    applied = ranks.sharing.first(make, lambda made: json.dumps([made.plan_text(), likeness(traced)]))
    if isinstance(applied, str):
        plan_text, like = json.loads(applied)
        room = None if host is None else host.budget_bytes
        applied = apply_from_another_rank(model, traced, Plan.from_json(plan_text), like, check_of(loop.check), room)
        assert applied.plan is not None
        expect_loop(applied.regions, traced, applied.plan)
    applied = agreed(replace(applied, budget=budget.words), ranks.sharing)
    plans = None
    if not ranks.sharing.rounds:
        assert applied.plan is not None
        names = list(dict.fromkeys(call.name for call in traced.calls))
        seconds = kept.planning_seconds if kept is not None and follows else time.perf_counter() - began

        def describe(batch: Any) -> OneModel:
            again = traced_forward(model, batch, loss_fn=loss_fn, regions=names, loop=loop)
            note_losses([again], losses)
            return replace(one, traced=again)

        plans = BatchPlans(
            regions=[applied.regions],
            describe=describe,
            shape_of=lambda batch: BatchShape.of(*as_call(batch)),
            budget_bytes=budget.nbytes,
            planning_seconds=seconds,
            progress=progress,
            host_budget_bytes=None if host is None else host.budget_bytes,
        )
        plans.begin(one.calls[0], one.traces, [applied.plan])
    alone = plans is not None
    follow_loop(
        applied,
        budget,
        optimizer,
        plans=plans,
        by_itself=alone,
        elsewhere_bytes=loop.elsewhere_bytes,
        together=not alone,
    )
    return applied


def _sequence(name: str, given: Any) -> tuple[Any, ...]:
    """Several of something.

    Raises:
        UsageError: it is one of them, or none.
    """
    if given is None:
        return ()
    if isinstance(given, nn.Module | torch.Tensor | dict | str) or not isinstance(given, Iterable):
        raise UsageError(f"{name}= is a {type(given).__name__}; expected a list of them, even of one")
    return tuple(given)


# Plans made anew by several ranks together, when parameters are trained that were frozen ------------------------------
#
# A rank cannot plan by itself where it shares parameters with others, or runs a stage of a pipeline: ranks compare what
# they will recompute, and stages tell each other what they return. So all of them take the old plan off and plan again,
# as in the first call of `auto_checkpoint`, before the step in which it matters begins (`Applied.expect`).
#
# Ranks that share parameters see the same change by themselves. Stages of a pipeline have parameters of their own: they
# ask each other in every call.


@dataclass(kw_only=True, eq=False)
class Thawing:
    """When a handle's plan is made anew, and how.

    Args:
        modules: that are planned.
        stages: groups of ranks that run other stages.
        shapes: of batches that were planned for, where ranks share parameters.
        make: plans for these batches, under another budget where one is given.
    """

    modules: Sequence[nn.Module]
    stages: Sequence[tuple[int, ...]]
    shapes: Sequence[BatchShape]
    budget_bytes: int
    make: Callable[[Sequence[Any], int | None], Applied]
    progress: Progress
    frozen: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.frozen = [p for one in self.modules for p in one.parameters() if not p.requires_grad]

    def meet(self, handle: Applied, batch: Any) -> None:
        """Plan again, on all ranks, where some parameter is trained that the plan takes to be frozen.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        thawed = sum(p.requires_grad for p in self.frozen)
        with Agreement(self.stages) as stages:
            if stages.least(int(not thawed)):
                return
        batches = [batch, *(stretched(batch, shape) for shape in self.shapes)]
        handle.remove()
        least_bytes: int | None = None
        with reported(self.progress, f"planning again, {thawed} more parameters are trained") as done:
            try:
                made = self.make(batches, None)
            except Infeasible as error:
                made = self.make(batches, least_bytes := error.minimum_budget_bytes)
            done(f"planned again: {figures(made)}")
        handle._become(made)
        if least_bytes is not None:
            warnings.warn(
                f"the step with {thawed} more parameters trained does not fit into {format_bytes(self.budget_bytes)}: "
                f"the smallest plan for it needs {format_bytes(least_bytes)}, and is what it runs "
                "under. Use a smaller batch, or a larger budget",
                stacklevel=3,
            )
