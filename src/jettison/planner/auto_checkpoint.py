"""`trace`, `plan` and `auto_checkpoint`: from a live model and a budget to an applied plan."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.fsdp2 import sharded_modules, states, stay_unsharded
from jettison.capture.model_trace import Loop, LossFn, ModelTrace, call_model, expect_module, expect_trace, loss_of
from jettison.core.errors import Infeasible, StaleTensor, TooMuchMemory, TraceError, UnsupportedModule, UsageError, warn
from jettison.core.parse_units import parse_bytes
from jettison.core.process import seldom_collected
from jettison.core.progress import Progress, on_terminal, reported, shown
from jettison.core.units import format_bytes
from jettison.dryrun.counter import elsewhere_bytes
from jettison.dryrun.user_step import Scheduled, Step, is_schedule, modules_of, stages_of
from jettison.parallel.fake_ranks import held_by_ddp, inside_of_ddp
from jettison.parallel.recompute_agreement import Agreement, BudgetVerdict, Group, groups_for, ranks_in, talking_groups
from jettison.planner.apply import agreed, apply_from_another_rank, apply_plan, expect_loop, likeness
from jettison.planner.batch_plans import BatchPlans, alike, padded_batch
from jettison.planner.budget import AskedBudget, Budget, budget_of, of_reserved
from jettison.planner.cpu_offload import Host, hardware_of, host_of
from jettison.planner.handle import Applied, figures, follow_loop, note_losses, with_losses
from jettison.planner.kept_plans import Keeping, KeptPlans, bytes_of_state
from jettison.planner.planner import make_planner
from jettison.planner.readiness import Optimizers, as_one, check_model, check_optimizer, check_states, compile_settings
from jettison.planner.readiness import traced as traced_forward
from jettison.planner.step_description import Described, OwnStep, Part, describe_step, nbytes_of
from jettison.runtime.chunked_loss import ChunkedLossPatch
from jettison.runtime.loop_assumptions import BatchShape
from jettison.runtime.offload import place_of
from jettison.runtime.planned_forward import PlannedForward
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
        loss_fn: computes the scalar loss from the output, if the output is not the loss and has no ``.loss``.
        regions: names of the modules to plan separately; by default the model's repeated blocks.
        compile: as in `auto_checkpoint`.

    Raises:
        TraceError: the forward cannot run on tensors without values, or there is no scalar loss.
        UnsupportedModule: blocks are to be compiled, and Inductor cannot work here.
        UsageError: weights without a size (a lazy module), or only some of them on ``meta``.
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
    gradients_preallocated: bool = False,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    progress: Progress = shown,
) -> Plan:
    """Return the fastest plan that keeps a step of the traced model under ``memory_budget`` (peak allocated bytes).

    Args:
        memory_budget: ``"8GiB"`` (text needs a unit), or a whole number of bytes.
        optimizer: over the fake copy's parameters; its state and its step count towards the peak.
        measure: measure the time of ops by running them here; otherwise estimate it from FLOPs and bytes, and ignore
            memory that kernels allocate inside.
        hardware: rates for ops that are not run, and the link to the host; by default `usual_hardware`'s.
        gradients_preallocated, offload, host_budget, progress: as in `auto_checkpoint`.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` is the smallest budget that does.
        UsageError: an invalid budget, or an unknown link to the host.
    """
    (found,) = sweep(
        traced,
        [memory_budget],
        optimizer=optimizer,
        measure=measure,
        hardware=hardware,
        gradients_preallocated=gradients_preallocated,
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
    gradients_preallocated: bool = False,
    offload: bool = False,
    host_budget: str | SupportsIndex | None = None,
    progress: Progress = shown,
) -> list[Plan | Infeasible]:
    """Return a plan for each of several budgets, in their order: step time as a function of memory.

    Options are computed once, and every choice is dry-run once. For a budget without a plan the list has the error that
    `plan` would raise. Arguments are those of `plan`.

    Raises:
        UsageError: an invalid budget, or none.
    """
    expect_trace(traced)
    if isinstance(memory_budgets, str):
        raise UsageError(
            f"got the text {memory_budgets!r} as memory budgets; expected a list, as in [{memory_budgets!r}]"
        )
    budgets = [parse_bytes(budget) for budget in memory_budgets]
    if not budgets:
        raise UsageError("got no memory budgets; expected at least one, as in sweep(traced, ['8GiB', '6GiB'])")
    elsewhere = elsewhere_bytes(traced.real, traced.batch, optimizer) if traced.real is not None else 0
    loop = replace(traced.loop, gradients_preallocated=gradients_preallocated, elsewhere_bytes=elsewhere)
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
            found.append(error.with_traceback(None))
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
    keep_output: bool = True,
    check: str | Check = Check.ALWAYS,
    gradients_preallocated: bool | None = None,
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
    the optimizer's state if ``optimizer`` is given. The model trains as before, with bitwise identical gradients.
    Call it under the same autocast and train/eval state as training.

    Args:
        model: a module; or, with ``step``, a schedule of `torch.distributed.pipelining` over this rank's stages, whose
            modules are planned together.
        batch: one training batch, ``model(**batch)`` or ``model(*batch)``.
        memory_budget: ``"8GiB"`` (text needs a unit) or a whole number of bytes; ``"auto"``, the memory that the device
            has left for this process less a margin; ``"90%"`` of that memory. For ranks that plan together the smallest
            budget applies.
        optimizer: its state and its step count as well; several as ``(first, second)``, which step in this order
            after all forwards and backwards.
        keep_output: the loop still references the model's output (with logits) during backward and the optimizer's
            step, as ``out = model(**batch); out.loss.backward()`` does. False for
            ``model(**batch).loss.backward()``, which frees it.
        check: as in `apply`.
        gradients_preallocated: gradients exist when a forward begins: gradient accumulation, or
            ``zero_grad(set_to_none=False)``. By default the parameters' state now or, with ``step``, when it begins.
        step: forwards and backwards of one training step of your loop, ``step(model, batch)``: several forwards before
            a backward, accumulation, autocast, a scaler, a loss outside of the model. It is run on copies without
            memory. Its return value is assumed to be referenced while the optimizer steps.
        models: all models that the step runs, if there are several, ``model`` among them: ``step(*models, batch)``.
            Those that run with gradients are planned together.
        shapes: other batches of the run (lengths, padding buckets, the last rows of an epoch), with or without
            values (``meta``). The budget holds for each of them; all follow the plan for the largest.
        reserved: apply the budget to memory reserved by the CUDA caching allocator, not to allocated tensors. An
            allowance for fragmentation is deducted first; real fragmentation is measured in every step.
        compile: ``"blocks"``: each block runs compiled by Inductor, which saves the tensors of the plan for backward;
            the part around the blocks runs eagerly. Not needed for blocks on which ``block.compile()`` was called.
        offload: tensors may also be offloaded to CPU, where that is faster than recomputation: ``host_budget`` limits
            pinned memory (by default what the host has), ``hardware``, or its name, gives the speed of the link. On
            CUDA the link is measured if no hardware is given.
        chunked_loss: if logits take 4 MiB or more, ``torch.nn.functional.cross_entropy`` with class targets runs over
            chunks of rows as long as the plan is applied: bitwise identical, with one or two copies of the logits where
            torch holds three. Other functions, such as one imported by name before, stay as they are; so do losses
            whose logits the step modifies in place before its backward.
        group: as in `apply`. Its first rank plans for all, since measured times of ops vary.
        plan: a file that keeps the plan, or a folder for the plans of many calls. A plan that was made for the same
            model, shapes, step, versions and hardware is reused; otherwise the first difference is logged, and the new
            plan replaces the file. Each rank that plans has a file of its own; either all ranks reuse their plans, or
            none does. `jettison.Plan.from_json` reads the file.
        progress: called with the current work; by default the logger ``jettison`` and a terminal show it.

    Raises:
        Infeasible: no plan fits; ``minimum_budget_bytes`` says what would.
        PlanMismatch: the ranks of the group do not have the same plan; see `apply`.
        TraceError: the model cannot be recorded, or there is no scalar loss.
        UnsupportedModule: the model is compiled as a whole, scripted, planned already, or uses checkpointing; blocks
            are to be compiled, and Inductor cannot work here.
        HostBudgetExceeded: offloading needs more host memory than there is at that time.
        UsageError: an invalid budget; an optimizer whose step cannot be dry-run; an unknown link to the host; a file
            for ``plan`` that is no kept plan.
    """
    if not (isinstance(model, nn.Module) or is_schedule(model)):
        expect_module(model)
    ask = _Request(
        model=model,
        models=_sequence("models", models),
        asked=AskedBudget.of(memory_budget),
        optimizer=optimizer,
        loss_fn=loss_fn,
        regions=regions,
        keep_output=keep_output,
        check=check,
        gradients_preallocated=gradients_preallocated,
        step=step,
        reserved=reserved,
        compile=compile,
        offload=offload,
        host_budget=host_budget,
        hardware=hardware,
        group=group,
        chunked_loss=chunked_loss,
        progress=progress,
    )
    with reported(progress, f"planning {type(model).__name__} under a budget of {ask.asked}") as done:
        batches = [batch, *_sequence("shapes", shapes)]
        try:
            applied = ask.applied(batches, ask.asked, plan)
        except StaleTensor as error:  # raised in a dry run
            raise TraceError(
                f"a forward of {type(model).__name__}, or its step, writes in place to a tensor that autograd has "
                "saved for backward: plain autograd refuses that, too. Write to a clone "
                "(allow_mutation_on_saved_tensors lets it through, and models run without a plan there)"
            ) from error
        done(f"planned {type(model).__name__}: {figures(applied)}")
    return applied


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One call of `auto_checkpoint`; fields are its arguments."""

    model: nn.Module | Scheduled
    models: tuple[Any, ...]
    asked: AskedBudget
    optimizer: Optimizers
    loss_fn: LossFn | None
    regions: Iterable[str] | None
    keep_output: bool
    check: str | Check
    gradients_preallocated: bool | None
    step: Step | None
    reserved: bool
    compile: str | None
    offload: bool
    host_budget: str | SupportsIndex | None
    hardware: Hardware | str | None
    group: Group | None
    chunked_loss: bool
    progress: Progress

    @property
    def given(self) -> tuple[Any, ...]:
        return self.models or (self.model,)

    def applied(self, batches: Sequence[Any], asked: AskedBudget, plan: str | os.PathLike[str] | None) -> Applied:
        try:
            return with_losses(lambda losses: self._applied(losses, batches, asked, plan), chunked=self.chunked_loss)
        except TooMuchMemory as error:  # a trace in its frames has device memory, and the caller may plan again
            raise error.with_traceback(None) from None

    def _applied(
        self,
        losses: ChunkedLossPatch | None,
        batches: Sequence[Any],
        asked: AskedBudget,
        plan: str | os.PathLike[str] | None,
    ) -> Applied:
        with together(self.given, self.group) as ranks, seldom_collected():
            steps, how = as_one(self.optimizer), check_of(self.check)
            modules = modules_of([self.model])
            for one in modules:
                check_model(one)
            check_optimizer(steps, nn.ModuleList(modules_of(self.given)))
            device = hardware_of(self.hardware)
            host = host_of(self.offload, self.host_budget, device, place_of(nn.ModuleList(modules)))
            budget = budget_of(asked, modules_of(self.given), batches[0], steps)
            if self.reserved:
                budget = of_reserved(budget, nn.ModuleList(modules))
            if budget.words:
                self.progress(f"budget {budget.words}")
            if isinstance(self.model, nn.Module):  # stages of a pipeline exchange tensors of one shape
                batches = alike(batches, ranks.sharing)
            planning = _Planning(
                ask=self,
                batches=batches,
                optimizer=steps,
                step=self._whole_step(len(batches)),
                loop=self._loop(batches, steps, how),
                budget=budget.with_least(ranks.least(budget.nbytes)),
                ranks=ranks,
                hardware=device,
                host=host,
                losses=losses,
            )
            return planning.applied(self._keeping(asked, plan))

    def _keeping(self, asked: AskedBudget, plan: str | os.PathLike[str] | None) -> Keeping | None:
        options = {
            "budget": str(self.asked if self.asked.nbytes is None else self.asked.nbytes),
            "reserved": self.reserved,
            "offload": f"{self.offload}, host budget {self.host_budget}, "
            f"hardware {self.hardware if self.offload else None}",
        }
        return None if plan is None else Keeping(where=plan, asked=asked, options=options)

    def _loop(self, batches: Sequence[Any], steps: torch.optim.Optimizer | None, how: Check) -> Loop:
        modules = modules_of(self.given)
        now = any(p.grad is not None for one in modules for p in one.parameters())
        elsewhere = elsewhere_bytes(nn.ModuleList(modules), max(batches, key=nbytes_of), steps)
        return Loop(
            keep_output=self.keep_output,
            gradients_preallocated=now if self.gradients_preallocated is None else self.gradients_preallocated,
            check=how,
            elsewhere_bytes=elsewhere + sum(map(held_by_ddp, modules)),
            compile=compile_settings(self.compile, modules_of([self.model])),
        )

    def _whole_step(self, batches: int) -> Step | None:
        """The given step, or a forward and a backward if these must be run as one; None: neither. Raise
        `UnsupportedModule` for a model that cannot be dry-run inside of a step, `UsageError` for conflicting arguments.
        """
        model = self.model
        wrapped = isinstance(model, DistributedDataParallel) or (
            isinstance(model, nn.Module) and bool(sharded_modules(model))
        )
        if isinstance(model, nn.Module) and self.step is None and not self.models and not wrapped and batches == 1:
            return None
        self._check_arguments()
        for one in modules_of(self.given):
            check_model(one)
            check_states(one)
            if any(p.is_meta for p in one.parameters()):
                raise UnsupportedModule(
                    f"{type(one).__name__} is on meta, and a step is dry-run where its models are; move it to its "
                    "device first (to_empty), or plan without step="
                )
        if batches > 1 and any(not isinstance(one, nn.Module) for one in self.given):
            raise UsageError("got shapes= with a pipeline; its stages exchange tensors of one shape: give one batch")

        def whole(model: nn.Module, batch: Any) -> Any:
            output = call_model(model, batch)
            loss = loss_of(output, self.loss_fn)
            if not self.keep_output:
                output = None
            loss.backward()
            return output

        return self.step or whole

    def _check_arguments(self) -> None:
        models, step = self.models, self.step
        for one in models:
            if not (isinstance(one, nn.Module) or is_schedule(one)):
                raise UsageError(
                    f"models= has a {type(one).__name__}; expected modules, as in models=(policy, reference)"
                )
        modules = modules_of(models)
        for number, one in enumerate(modules):
            inside = [other for other in modules[:number] if set(one.modules()) & set(other.modules())]
            if inside:
                raise UsageError(
                    f"models= has {type(one).__name__}, which shares modules with {type(inside[0]).__name__}; give the "
                    "outermost module once"
                )
        if step is None and not isinstance(self.model, nn.Module):
            raise UsageError(
                f"got a {type(self.model).__name__} without step=; expected step(schedule, batch) that calls "
                "schedule.step(...) as this rank's loop does"
            )
        if step is None and models:
            raise UsageError(
                "got models= without step=; expected step(*models, batch) that runs forwards and backwards"
            )
        if models and not any(one is self.model for one in models):
            raise UsageError("models= leaves out the model itself; expected all models of the step, in its order")
        if self.regions is not None and len(modules) > 1:
            raise UsageError("got regions= with several models; mark blocks with jettison.checkpointable instead")
        if step is not None and self.loss_fn is not None:
            raise UsageError("got loss_fn= and step=; the step computes its loss itself: drop loss_fn=")
        if step is not None and not callable(step):
            raise UsageError(
                f"step= is {step!r}; expected a function step(model, batch) that runs forwards and backwards"
            )


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """From a request to applied plans, together with the ranks that plan together. ``step`` is dry-run as a whole;
    None: a forward and a backward of the only model. ``losses`` keeps losses chunked, if they are.
    """

    ask: _Request
    batches: Sequence[Any]
    optimizer: torch.optim.Optimizer | None
    loop: Loop
    step: Step | None
    budget: Budget
    ranks: PlanningRanks
    hardware: Hardware | None
    host: Host | None
    losses: ChunkedLossPatch | None

    def described(
        self,
        batches: Sequence[Any],
        blocks: Mapping[int, Sequence[str]] = MappingProxyType({}),
        reached: Collection[str] | None = None,
        stages: Agreement | None = None,
    ) -> Described:
        """Describe the step on these batches. ``blocks``: by model; ``reached``: by all ranks; None: exchange them."""
        ask, found = self.ask, None
        if self.step is None:
            ask.progress("tracing")
            regions = blocks.get(0, ask.regions)
            trace = traced_forward(ask.model, batches[0], loss_fn=ask.loss_fn, regions=regions, loop=self.loop)
            found = Described(
                parts=[Part(model=ask.model, trace=trace)], optimizer=self.optimizer, progress=ask.progress
            )
        else:
            regions, loop = None if blocks else ask.regions, replace(self.loop, keep_output=True)
            own = describe_step(
                self.step, ask.given, batches, self.optimizer, blocks, regions, loop, ask.progress, stages
            )
            found = own.with_reached(self.ranks.reached(own.reached) if reached is None else reached)
        note_losses(found.traces, self.losses)
        return replace(found, hardware=self.hardware, host=self.host)

    def applied(self, keeping: Keeping | None) -> Applied:
        """Apply a plan to every model; new plans are made for batches that it does not cover."""
        began, ask, ranks = time.perf_counter(), self.ask, self.ranks
        one = self.described(self.batches, stages=ranks.stages)
        # ranks with which the models communicate by themselves join
        budget = self.budget.with_least(ranks.sharing.also(talking_groups(one.traces), self.budget.nbytes))
        kept = None
        if keeping is not None:
            functions = [ask.loss_fn] if self.step is None else [] if ask.step is None else [ask.step]
            models = [ask.model] if self.step is None else modules_of(ask.given)
            more = {"reached": " ".join(sorted(one.reached_anywhere))} if isinstance(one, OwnStep) else {}
            levels = None if one.counted is None else one.counted.levels
            kept = keeping.opened(
                budget, one.traces, models, self.batches, self.optimizer, functions, ask.progress, levels, more
            )
        follows = ranks.follow(kept)
        pipelined = any(not isinstance(each, nn.Module) for each in ask.given)

        def plans() -> list[Plan]:
            if kept is not None and follows and kept.plans:
                return kept.followed()
            made = one.planner.plans(budget.nbytes)
            if kept is not None:
                state_bytes = bytes_of_state(one.dry_step.optimizer)
                kept.write(made, state_bytes=state_bytes, planning_seconds=time.perf_counter() - began)
            return made

        def make() -> Applied:
            made = ranks.plans(plans, one.traces)
            return agreed(replace(self._under(one.parts, made, pipelined), budget=budget.words), ranks.sharing)

        applied = ranks.settled(make)
        batch_plans = None
        if not (pipelined or ranks.sharing.rounds):
            blocks = {part.number: part.blocks for part in one.parts}
            reached = one.reached_anywhere if isinstance(one, OwnStep) else None
            seconds, loop = time.perf_counter() - began, self.loop
            batch_plans = BatchPlans(
                regions=_by_model(applied.regions),
                describe=lambda batch, there: replace(
                    self, loop=replace(loop, gradients_preallocated=loop.gradients_preallocated or there)
                ).described([batch], blocks, reached),
                step=ask.step,
                models=len(ask.given),
                budget_bytes=budget.nbytes,
                planning_seconds=kept.planning_seconds if kept is not None and follows else seconds,
                progress=ask.progress,
                host_budget_bytes=None if self.host is None else self.host.shared(len(one.parts)).budget_bytes,
            )
            batch_plans.begin(self.batches, one.traces, applied.plans)
        by_itself = ask.step is None and not any(map(sharded_modules, modules_of(ask.given)))
        follow_loop(
            applied,
            budget,
            self.optimizer,
            plans=batch_plans,
            by_itself=by_itself and batch_plans is not None,
            elsewhere_bytes=self.loop.elsewhere_bytes,
        )
        if batch_plans is None:
            applied._again = self._thawing(budget.nbytes)
        return applied

    def _under(self, parts: Sequence[Part], made: list[Plan] | str, probed: bool) -> Applied:
        """Apply a plan to every model; of another rank's plans, received as text, the decisions.

        Args:
            probed: models are pipeline stages. Before their first step torch runs one forward through each, and
                computes the gradients of its inputs only (``_backward_metadata_inference`` in
                torch/distributed/pipelining/stage.py). That needs less than one micro-batch, so it is not reported.
        """
        likes: list[str] | None = None
        if isinstance(made, str):
            texts, likes = json.loads(made)
            made = [Plan.from_json(text) for text in texts]
        how = check_of(self.loop.check)
        room = None if self.host is None else self.host.shared(len(parts)).budget_bytes
        replicas = [inside_of_ddp(one) for one in self.ask.given if isinstance(one, DistributedDataParallel)]
        regions: list[PlannedForward] = []
        try:
            for number, (part, plan) in enumerate(zip(parts, made, strict=True)):
                for text in part.trace.warnings:
                    warn(text)
                found = (
                    apply_plan(part.model, part.trace, plan, how, room)
                    if likes is None
                    else apply_from_another_rank(part.model, part.trace, plan, likes[number], how, room)
                )
                # with one model its own list, in which replacements of planned blocks are entered
                regions = found.regions if len(parts) == 1 else [*regions, *found.regions]
                replicated = any(part.model is one for one in replicas)
                own = {"returns_loss": self.ask.step is None and self.ask.loss_fn is None, "replicated": replicated}
                expect_loop(found.regions, part.trace, plan, part.use, probed=probed, **own)
        except BaseException:
            Applied(regions=regions).remove()
            raise
        return Applied(regions=regions, plan=made[0], plans=tuple(made))

    def _thawing(self, budget_bytes: int) -> Callable[[Applied, Any], None]:
        """Return a function that plans again, on all ranks, before a step that trains a parameter planned as frozen or
        whose FSDP modules stay unsharded after their forwards (`stay_unsharded`).

        A rank cannot plan alone if it shares parameters with others, or runs a pipeline stage: ranks compare what they
        recompute, and stages exchange what they return. So all of them remove the old plan and plan again. Ranks that
        share parameters see the same change. Pipeline stages have their own parameters: they exchange it in every call.
        """
        ask = self.ask
        frozen = [p for one in modules_of(ask.given) for p in one.parameters() if not p.requires_grad]
        shards = [state for one in modules_of(ask.given) for state in states(one)]
        whole = stay_unsharded(shards)
        groups = [one.ranks for one in self.ranks.stages.rounds]
        shapes = [BatchShape.of((one,)) for one in self.batches] if self.ranks.sharing.rounds else []

        def meet(handle: Applied, batch: Any) -> None:
            more = sum(p.requires_grad for p in frozen) + sum(map(operator.gt, stay_unsharded(shards), whole))
            with Agreement(groups) as stages:
                if stages.least(int(not more)):
                    return
            what = f"{more} more parameters trained or unsharded"
            own = {BatchShape.of((batch,)): batch} if shapes else {}
            batches = [batch, *(padded_batch(own, shape) for shape in shapes)]
            handle.remove()
            least_bytes: int | None = None
            with reported(ask.progress, f"planning again, with {what}") as done:
                try:
                    made = ask.applied(batches, ask.asked, None)
                except Infeasible as error:
                    least_bytes = error.minimum_budget_bytes
                    made = ask.applied(batches, AskedBudget.of(least_bytes), None)
                done(f"planned again: {figures(made)}")
            handle._become(made)
            if least_bytes is not None:
                warn(
                    f"the step with {what} does not fit into {format_bytes(budget_bytes)}: "
                    f"the smallest plan for it needs {format_bytes(least_bytes)} and is applied. Use a smaller batch, "
                    "or a larger budget"
                )

        return meet


def _by_model(regions: Sequence[PlannedForward]) -> list[list[PlannedForward]]:
    """Regions of each model, the root last."""
    found: list[list[PlannedForward]] = [[]]
    for region in regions:
        found[-1].append(region)
        if region.is_root:
            found.append([])
    return found[:-1]


def _sequence(name: str, given: Any) -> tuple[Any, ...]:
    """Return the elements of an argument that takes several. Raise `UsageError` for a single element."""
    if given is None:
        return ()
    if isinstance(given, nn.Module | torch.Tensor | dict | str) or not isinstance(given, Iterable):
        raise UsageError(f"{name}= is a {type(given).__name__}; expected a list of them, even of one")
    return tuple(given)


# ranks that plan a step together: their groups, and one outcome for all of them ---------------------------------------
#
# Ranks that share parameters follow one plan (NOTE [ Agreement ]). Pipeline stages have their own plans, and so may
# replicas, which only average their gradients; but none of them may begin while another has no plan.


@dataclass(frozen=True, kw_only=True)
class PlanningRanks:
    """Exchanges of one call of `auto_checkpoint`, with ranks that share parameters and follow one plan, that average
    gradients, and that run other stages of its pipelines. Nothing waits before the first. Each raises `PlanMismatch` if
    a rank failed, or did not arrive in time.
    """

    sharing: Agreement
    replicas: Agreement
    stages: Agreement

    def least(self, budget_bytes: int) -> int:
        """The smallest budget of ranks with a common or an equal plan. When it returns, all ranks are ready to plan."""
        self.stages.least(0)
        return self.sharing.least(self.replicas.least(budget_bytes))

    def reached(self, names: Collection[str]) -> set[str]:
        """Parameters that the step of any rank reaches, among ranks that average gradients."""
        return set(self.sharing.union(self.replicas.union(names)))

    def follow(self, kept: KeptPlans | None) -> bool:
        """Whether all ranks reuse kept plans; all call this. One that is sent its plan can, unless it kept its own."""
        makes = self.sharing.leads and self.replicas.leads  # its own plans, or plans for others
        here = not makes if kept is None else bool(kept.plans) or not (makes or kept.file.exists())
        number = self.replicas.least(self.stages.least(int(here)))
        return bool(self.sharing.least(number))

    def plans(self, make: Callable[[], list[Plan]], traces: Sequence[ModelTrace]) -> list[Plan] | str:
        """Plans of this rank, or the text of another rank's plans for the same step. A replica may have another batch,
        and then plans for itself. Raise `Infeasible` on all ranks that would have followed them if there are none.
        """

        def tell(made: list[Plan] | str) -> str:
            if isinstance(made, str):
                return made
            return json.dumps([[plan.to_json() for plan in made], [likeness(trace) for trace in traces]])

        def from_a_replica() -> list[Plan] | str:
            said = self.replicas.first(make, tell)
            if isinstance(said, str) and json.loads(said)[1] != [likeness(trace) for trace in traces]:
                return make()
            return said

        return self.sharing.first(from_a_replica, tell)

    def settled(self, make: Callable[[], Applied]) -> Applied:
        """Apply the plans once all ranks have some: NOTE [ One refusal ]. Raise `Infeasible` if a rank has none."""
        applied: Applied | None = None
        try:
            applied = make()
            verdict = BudgetVerdict.fits(plan.minimum_budget_bytes for plan in applied.plans)
        except Infeasible as error:
            if not (self.replicas.rounds or self.stages.rounds):
                raise
            verdict = BudgetVerdict.refuses(error, distributed.get_rank())
        try:
            verdict = self.stages.settled(self.replicas.settled(verdict))
            if verdict.error is not None:
                raise verdict.error
        except BaseException:
            if applied is not None:
                applied.remove()
            raise
        assert applied is not None
        return applied


@contextlib.contextmanager
def together(models: Sequence[nn.Module | Scheduled], group: Group | None) -> Iterator[PlanningRanks]:
    """Context in which a failure of this rank is sent to the others, so that they do not wait. ``group``: ranks that
    follow one plan, if the models do not show it. `UnsupportedModule` for stages other than `PipelineStage`.
    """
    schedules = [stages_of(one) for one in models if not isinstance(one, nn.Module)]
    modules = [one for one in models if isinstance(one, nn.Module)]
    modules += [stage.submod for stages in schedules for stage in stages]
    sharing = {ranks for one in modules for ranks in groups_for(one, group)}
    copies = {ranks_in(one.process_group) for one in modules if isinstance(one, DistributedDataParallel)}
    pipelines = {ranks_in(stages[0].group or distributed.group.WORLD) for stages in schedules if stages}
    with (
        Agreement(_outermost(pipelines)) as stages,
        Agreement(_outermost(copies, sharing)) as replicas,
        Agreement(_outermost(sharing)) as shared,
    ):
        yield PlanningRanks(sharing=shared, replicas=replicas, stages=stages)


def _outermost(groups: set[tuple[int, ...]], others: Collection[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Groups of more than one rank that no larger group, nor one of ``others``, contains."""
    return [
        ranks
        for ranks in groups
        if len(ranks) > 1
        and not any(set(ranks) < set(other) for other in groups)
        and not any(set(ranks) <= set(other) for other in others)
    ]
