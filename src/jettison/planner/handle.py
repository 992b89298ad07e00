"""The handle of a plan that is at work: what it says, what it is told, and how it goes away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from jettison.capture.model_trace import ModelTrace, as_batch
from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.units import format_bytes, format_percent
from jettison.planner.batches import BatchPlans, ShapeReport
from jettison.planner.budget import Budget
from jettison.planner.guard import Attempt, attempts
from jettison.planner.handle_report import HandleReport
from jettison.planner.watch import PLANNING, CudaPeaks, MemoryReport, Meter, OptimizerWatch, PeakWatch, phase_hooks
from jettison.runtime.chunked_loss import Hold, holding
from jettison.runtime.offload import OffloadEngine
from jettison.runtime.planned import PlannedForward
from jettison.runtime.report import Live
from jettison.runtime.witness import tell_replays
from jettison.solve.plan import Plan


@dataclass(kw_only=True)
class Applied:
    """A plan at work on a model. `remove()` gives the model back as it was.

    Args:
        plans: of each model, in the order of the step's, where there are several; ``plan`` is the first of them.
        budget: where the budget comes from, in words, if it was not given in bytes.
        losses: that they are computed in chunks, where they are.
        batches: plans by batch, where other batches than the first are planned for when they come.
        _again: plans anew with other ranks, where they have to do it together and more parameters are trained.
    """

    regions: list[PlannedForward]
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()
    budget: str = ""
    batches: BatchPlans | None = None
    _again: Callable[[Applied, Any], None] | None = None
    watch: PeakWatch | None = None
    hooks: list[Any] = field(default_factory=list)
    losses: Hold | None = None

    def __repr__(self) -> str:
        return summary(self, f"{'removed; ' if self._removed else ''}{figures(self)}")

    @property
    def _removed(self) -> bool:
        """Whether the plan is taken off."""
        return all(region.retired for region in self.regions if region.is_root)

    def remove(self) -> None:
        """Every module runs its own forward again."""
        for region in reversed(self.regions):
            region.remove()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self.losses is not None:
            self.losses.let_go()

    def _become(self, other: Applied) -> None:
        """This handle stands for another one, of a plan for the same step, from now on."""
        vars(self).update(vars(other))
        for region in self.regions:
            if isinstance(region.listener, _LoopListener):
                region.listener.handle = self

    def report(self) -> HandleReport:
        """What every region did so far: slots kept, dropped, recomputed ops, fallbacks. Prints as a table.

        Raises:
            WrongValue: a step was captured as a CUDA graph, and a replay recomputed a wrong value. After a captured
                step this waits for the device.
        """
        tell_replays()
        return HandleReport(tuple(region.report() for region in self.regions))

    def source(self, region: str) -> str:
        """Python that recomputes what a region dropped: one function for each saved tensor that backward asks for, in
        the order in which it did. Empty where nothing is recomputed.

        Raises:
            UsageError: there is no region of that name ("" is what is around the blocks).
        """
        found = next((one for one in self.regions if one.name == region), None)
        if found is None:
            names = ", ".join(repr(one.name) for one in self.regions)
            raise UsageError(f"source: got region {region!r}; expected one of {names}")
        return found.source()

    def expect(self, batch: Any) -> None:
        """The next step is on this batch. Where no plan covers it, one is made now.

        Ranks that share parameters, and stages of a pipeline, all call this before a step: where parameters are trained
        that were frozen, they plan again together. They plan for no batch that is larger.

        Only for loops that gave ``step=``, and for such ranks: else the model sees its batch by itself.

        Raises:
            PlanMismatch: such a rank failed, or did not come in time.
        """
        if self._again is not None and not self._removed:
            self._again(self, batch)
        if self.batches is None:
            return
        if self.watch is not None:
            self.watch.enter(PLANNING)  # it tries kernels, which take memory, too
        self.batches.meet(batch)

    def shapes(self) -> list[ShapeReport]:
        """Batches that came, by shape (padding buckets), with the plan that each runs under; most frequent first."""
        return self.batches.report() if self.batches is not None else []

    def guard(self, batch: Any = None) -> Iterator[Attempt]:
        """``for attempt in handle.guard():`` and in it ``with attempt:`` around the forwards and backwards of a step.

        An attempt that runs out of memory is undone (gradients, buffers, random streams), what remains to be done is
        planned for less, and a second attempt follows. Gradients that are there already are copied to the host. The
        batch is taken before: what a data loader gave to the first attempt is gone in the second.

        Args:
            batch: of the step, where ``step=`` was given.

        Raises:
            torch.OutOfMemoryError: the second attempt ran out of memory too; an optimizer had stepped; or there are
                other ranks, which wait inside of the step; the plan was removed; or what is neither of the models nor
                of the optimizer has gradients, which would be added twice.
            UsageError: one attempt is entered twice.
        """
        roots = [region for region in self.regions if region.is_root]
        watch = next((hook for hook in self.hooks if isinstance(hook, OptimizerWatch)), None)
        return attempts(
            self.batches,
            [root.module for root in roots],
            batch,
            optimizers=() if watch is None else watch.planned(),
            removed=self._removed,
        )

    def memory(self) -> MemoryReport | None:
        """What the device took in the steps so far, reserved memory and what of it was fragments; None on the CPU."""
        return self.watch.report() if self.watch is not None else None

    def look_at(
        self, meter: Meter, optimizer: torch.optim.Optimizer | None, predicted_bytes: int, budget: Budget
    ) -> None:
        """Hold a device's peaks against the plan, from now on."""

        def exceeded(nbytes: int) -> bool:
            if self.batches is not None:
                self.batches.restrict(self.batches.budget_bytes - nbytes)
            return self.batches is not None

        self.watch = PeakWatch(
            meter=meter,
            predicted=_predicted(self.batches, predicted_bytes),
            budget_bytes=budget.nbytes,
            exceeded=exceeded,
            sees_steps=optimizer is not None,
            reserved_budget_bytes=budget.reserved_bytes,
        )
        self.hooks += phase_hooks(self.watch, optimizer) if optimizer is not None else []
        self.watch.begin()

    @property
    def offload(self) -> OffloadEngine | None:
        """What moves tensors to the host, with its copies so far and what it took of the host; None: nothing moves."""
        return next((region.offload for region in self.regions if region.offload is not None), None)

    def plan_text(self) -> str:
        """The plan as JSON; empty where a policy was applied."""
        return "" if self.plan is None else self.plan.to_json()

    def live(self) -> dict[str, Live]:
        """Calls between their forward and their backward now, by region. Regions that keep everything are counted
        after the first call of this.
        """
        return {region.name: region.live() for region in self.regions}

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def figures(applied: Applied) -> str:
    """A plan in a few figures; of a policy, what it is."""
    if applied.plan is None:
        words = sorted({region.report().word for region in applied.regions[:-1]})
        return f"policy {', '.join(words)}, {len(applied.regions) - 1} blocks"
    made = [plan.predicted for plan in applied.plans or (applied.plan,)]
    peak_bytes = max(predicted.peak_bytes for predicted in made)
    overhead = max(predicted.overhead_fraction for predicted in made)
    budget, peak = format_bytes(applied.plan.budget_bytes), format_bytes(peak_bytes)
    return f"budget {budget}, predicted peak {peak}, overhead {format_percent(overhead)}"


def _predicted(batches: BatchPlans | None, first_bytes: int) -> Callable[[], int]:
    """The peak of the plan that holds when it is asked for.

    Args:
        first_bytes: of the plan that was made first, where others are not made.
    """
    return lambda: first_bytes if batches is None or batches.now is None else batches.now.peak_bytes


WRITTEN_TO: Final = "modified by an inplace operation"
"""How autograd says it (torch/csrc/autograd/saved_variable.cpp)."""


def with_losses(make: Callable[[Hold | None], Applied], *, chunked: bool) -> Applied:
    """A plan whose losses go over chunks, if that is wanted and the step has such; else by torch's own function.

    torch saves a log-softmax, which the step does not know of; chunks save the logits. Where the step writes to those
    in place, losses stay as they are.
    """
    try:
        with holding(chunked) as losses:
            applied = make(losses)
    except Exception as error:
        if not chunked or WRITTEN_TO not in str(error):
            raise
        return make(None)
    if losses is not None and losses.used:
        keep_losses(applied, losses)
    elif losses is not None:
        losses.let_go()
    return applied


def keep_losses(applied: Applied, losses: Hold) -> None:
    """They go over chunks as long as the plan is on, or its model there."""
    applied.losses = losses
    losses.until_gone(next(region.module for region in applied.regions if region.is_root))


def note_losses(traces: Iterable[ModelTrace], losses: Hold | None) -> None:
    """What was traced says whether its losses went over chunks."""
    for traced in traces:
        traced.loop = replace(traced.loop, chunked_loss=losses is not None and losses.used)


class _LoopListener:
    """What the first model of a step tells its handle; see `CallListener`.

    Args:
        by_itself: its arguments are the batch.
    """

    def __init__(self, handle: Applied, *, by_itself: bool) -> None:
        self.handle, self.by_itself = handle, by_itself

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.by_itself:
            self.handle.expect(as_batch(args, kwargs))
        if self.handle.watch is not None:
            self.handle.watch.enter("forward")

    def ends(self, _returned: Sequence[Any]) -> None:
        if self.handle.watch is not None:
            self.handle.watch.enter("backward")


def follow_loop(
    applied: Applied,
    budget: Budget,
    optimizer: torch.optim.Optimizer | None,
    *,
    plans: BatchPlans | None,
    by_itself: bool,
    elsewhere_bytes: int,
) -> None:
    """From now on batches that no plan covers are planned for when they come, and real peaks are looked at.

    Args:
        elsewhere_bytes: see `Loop`.
        plans: None on ranks that share parameters: there one plans again with the others, when parameters thaw.
        by_itself: the model's own arguments are the batch.
    """
    made = applied.plans or ((applied.plan,) if applied.plan is not None else ())
    applied.batches = plans
    predicted_bytes = max(plan.predicted.peak_bytes for plan in made)
    roots = [region for region in applied.regions if region.is_root]
    for one in roots:
        if one.assumptions is not None:
            one.assumptions.expects = plans is not None and not by_itself
            one.assumptions.thaws = one.assumptions.expects or plans is None
    root = roots[0]
    device = next((p.device for p in root.module.parameters() if p.device.type == "cuda"), None)
    if device is not None:
        applied.look_at(CudaPeaks(device=device), optimizer, predicted_bytes, budget)
    applied.hooks.append(
        OptimizerWatch(
            [one.module for one in roots],
            optimizer,
            budget_bytes=budget.nbytes,
            predicted=_predicted(plans, predicted_bytes),
            elsewhere_bytes=elsewhere_bytes,
            plan=lambda: None if plans is None else plans.now,
            again=(lambda: plans.restrict(plans.budget_bytes)) if plans is not None and by_itself else None,
        )
    )
    root.listener = _LoopListener(applied, by_itself=by_itself)
