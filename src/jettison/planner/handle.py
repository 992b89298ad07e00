"""The handle of an applied plan: reports, requests, and removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Final, overload

import torch

from jettison.capture.model_trace import ModelTrace, as_batch
from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.units import format_bytes, format_percent
from jettison.planner.batches import BatchPlans, ShapeReport
from jettison.planner.budget import Budget
from jettison.planner.oom_recovery import ONE_PLAN, Attempt
from jettison.planner.watch import PLANNING, CudaPeaks, MemoryReport, OptimizerWatch, PeakWatch, phase_hooks
from jettison.runtime.chunked_loss import ChunkedLossPatch, holding
from jettison.runtime.offload import OffloadEngine
from jettison.runtime.planned import PendingCalls, PlannedForward, RegionReport
from jettison.runtime.witness import tell_replays
from jettison.solve.plan import Plan


@dataclass(kw_only=True)
class Applied:
    """A plan applied to a model. `remove()` restores the model.

    Args:
        plans: of each model, in the order of the step's, if there are several; ``plan`` is the first of them.
        budget: origin of the budget as text, if it was not given in bytes.
        losses: keeps losses chunked, if they are.
        batches: plans by batch, if later batches are planned for when they occur.
        _again: plans again with other ranks, if they must do it together and more parameters are trained.
    """

    regions: list[PlannedForward]
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()
    budget: str = ""
    batches: BatchPlans | None = None
    _again: Callable[[Applied, Any], None] | None = None
    watch: PeakWatch | None = None
    hooks: list[Any] = field(default_factory=list)
    losses: ChunkedLossPatch | None = None

    def __repr__(self) -> str:
        return summary(self, f"{'removed; ' if self._removed else ''}{figures(self)}")

    @property
    def _removed(self) -> bool:
        return all(region.retired for region in self.regions if region.is_root)

    def remove(self) -> None:
        """Restore every module's own forward."""
        for region in reversed(self.regions):
            region.remove()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self.losses is not None:
            self.losses.let_go()

    def _become(self, other: Applied) -> None:
        vars(self).update(vars(other))
        for region in self.regions:
            if isinstance(region.listener, _LoopListener):
                region.listener.handle = self

    def report(self) -> HandleReport:
        """Statistics of every region so far: slots kept, dropped, recomputed ops, fallbacks. Prints as a table.

        Raises:
            WrongValue: a step was captured as a CUDA graph, and a replay recomputed a wrong value. After a captured
                step this waits for the device.
        """
        tell_replays()
        return HandleReport(tuple(region.report() for region in self.regions))

    def source(self, region: str) -> str:
        """Python that recomputes a region's dropped tensors: one function for each saved tensor that backward reads, in
        that order. Empty if nothing is recomputed.

        Raises:
            UsageError: no region has that name ("" is the part around the blocks).
        """
        found = next((one for one in self.regions if one.name == region), None)
        if found is None:
            names = ", ".join(repr(one.name) for one in self.regions)
            raise UsageError(f"source: got region {region!r}; expected one of {names}")
        return found.source()

    def expect(self, batch: Any) -> None:
        """Announce the next step's batch. If no plan covers it, one is made now.

        Ranks that share parameters, and pipeline stages, must all call this before a step: if parameters are trained
        that were frozen, they plan again together. They do not plan for larger batches.

        Only needed with ``step=``, and on such ranks: otherwise the model receives its batch itself.

        Raises:
            PlanMismatch: such a rank failed, or did not arrive in time.
        """
        if self._again is not None and not self._removed:
            self._again(self, batch)
        if self.batches is None:
            return
        if self.watch is not None:
            self.watch.enter(PLANNING)  # planning runs kernels, which take memory, too
        self.batches.meet(batch)

    def shapes(self) -> list[ShapeReport]:
        """Batches so far by shape (padding buckets), with the plan that each runs under; most frequent first."""
        return self.batches.report() if self.batches is not None else []

    def guard(self, batch: Any = None) -> Iterator[Attempt]:
        """Use as ``for attempt in handle.guard():`` with ``with attempt:`` around a step's forwards and backwards.

        An attempt that runs out of memory is undone (gradients, buffers, random streams), a plan with less memory is
        made, and a second attempt follows. Existing gradients are copied to the host. Fetch the batch before the loop:
        a batch that the first attempt takes from a data loader is gone in the second.

        Args:
            batch: of the step, if ``step=`` was given.

        Raises:
            torch.OutOfMemoryError: the second attempt ran out of memory too; an optimizer had stepped; other ranks wait
                inside of the step; the plan was removed; or tensors outside the models and the optimizer have
                gradients, which would be added twice.
            UsageError: one attempt is entered twice.
        """
        models = [region.module for region in self.regions if region.is_root]
        optimizers = [one for hook in self.hooks if isinstance(hook, OptimizerWatch) for one in hook.planned()]
        why_last = "the plan has been removed" if self._removed else "" if self.batches else ONE_PLAN
        first = Attempt(None if why_last else self.batches, models, batch, optimizers, why_last)
        yield first
        if first.failed:
            yield Attempt(None, models)

    def memory(self) -> MemoryReport | None:
        """Device memory of the steps so far: allocated, reserved and fragmented; None on the CPU."""
        return self.watch.report() if self.watch is not None else None

    def look_at(
        self, meter: CudaPeaks, optimizer: torch.optim.Optimizer | None, predicted_bytes: int, budget: Budget
    ) -> None:
        """Compare the device's peaks with the plan from now on."""

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
        """The offload engine, with its host memory; None if nothing is offloaded."""
        return next((region.offload for region in self.regions if region.offload is not None), None)

    def live(self) -> dict[str, PendingCalls]:
        """Calls between forward and backward, by region. Regions that keep everything count from this first call on."""
        return {region.name: region.live() for region in self.regions}

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def figures(applied: Applied) -> str:
    """Key figures of a plan; the name of a policy."""
    if applied.plan is None:
        words = sorted({region.report().word for region in applied.regions[:-1]})
        return f"policy {', '.join(words)}, {len(applied.regions) - 1} blocks"
    made = [plan.predicted for plan in applied.plans or (applied.plan,)]
    peak_bytes = max(predicted.peak_bytes for predicted in made)
    overhead = max(predicted.overhead_fraction for predicted in made)
    budget, peak = format_bytes(applied.plan.budget_bytes), format_bytes(peak_bytes)
    return f"budget {budget}, predicted peak {peak}, overhead {format_percent(overhead)}"


def _predicted(batches: BatchPlans | None, first_bytes: int) -> Callable[[], int]:
    """Peak of the current plan, when called; ``first_bytes`` if no others are made."""
    return lambda: first_bytes if batches is None or batches.now is None else batches.now.peak_bytes


WRITTEN_TO: Final = "modified by an inplace operation"
"""Autograd's error message (torch/csrc/autograd/saved_variable.cpp)."""


def with_losses(make: Callable[[ChunkedLossPatch | None], Applied], *, chunked: bool) -> Applied:
    """Apply a plan with chunked losses if requested and present in the step; else with torch's own function.

    torch saves a log-softmax, which the step cannot access; chunks save the logits. If the step writes to these in
    place, losses stay unchunked.
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


def keep_losses(applied: Applied, losses: ChunkedLossPatch) -> None:
    """Keep losses chunked as long as the plan is applied and its model exists."""
    applied.losses = losses
    losses.until_gone(next(region.module for region in applied.regions if region.is_root))


def note_losses(traces: Iterable[ModelTrace], losses: ChunkedLossPatch | None) -> None:
    """Set ``losses`` from traces, which show whether their losses were chunked."""
    for traced in traces:
        traced.loop = replace(traced.loop, chunked_loss=losses is not None and losses.used)


class _LoopListener:
    """`CallListener` of a step's first model for its handle; ``by_itself``: the model's arguments are the batch."""

    def __init__(self, handle: Applied, *, by_itself: bool) -> None:
        self.handle, self.by_itself = handle, by_itself

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.by_itself:
            self.handle.expect(as_batch(args, kwargs))
        if self.handle.watch is not None:
            self.handle.watch.enter("forward")

    def ends(self) -> None:
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
    """From now on plan for batches that no plan covers when they occur, and compare real peaks. ``plans`` is None on
    ranks that share parameters: these plan again together when parameters are unfrozen. ``by_itself``: the model's
    arguments are the batch.
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


# reports on regions ---------------------------------------------------------------------------------------------------


SCHEMA: Final = "jettison.applied/1"
MOST_ROWS: Final = 30
"""Most rows of the table; the document has all regions."""
COUNTS: Final = ("calls", "traces", "kept", "recomputed", "offloaded", "packed")
HEADS: Final = ("region", "policy", *COUNTS, "kept bytes", "CPU bytes")
LONGEST_NOTE: Final = 66


@dataclass(frozen=True)
class HandleReport(Sequence[RegionReport]):
    """Statistics of every region so far, in the order of the model; the last one is the part around the blocks.

    Prints as a table in which equal neighbours share one row. A sequence of `RegionReport`, with saved tensors.
    """

    regions: tuple[RegionReport, ...]

    @overload
    def __getitem__(self, index: int) -> RegionReport: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RegionReport, ...]: ...
    def __getitem__(self, index: int | slice) -> RegionReport | tuple[RegionReport, ...]:
        return self.regions[index]

    def __len__(self) -> int:
        return len(self.regions)

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.applied/1``: every region with its saved tensors."""
        return {"schema": SCHEMA, "regions": [asdict(one) | {"policy": one.word} for one in self.regions]}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [HEADS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
        lines = []
        for row in rows:
            texts = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
            figures = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([*texts, *figures]).rstrip())
        return "\n".join([*lines, *self._notes()])

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [_row(list(group)) for _, group in groupby(self.regions, key=_did)]
        if len(rows) <= MOST_ROWS:
            return rows
        left_out = (f"... {len(rows) - MOST_ROWS + 1} more", *[""] * (len(HEADS) - 1))
        return [*rows[: MOST_ROWS // 2], left_out, *rows[len(rows) - MOST_ROWS // 2 + 1 :]]

    def _notes(self) -> Iterator[str]:
        """Reasons why regions run without their recording, and tensors that came back with other last bits."""
        reasons: dict[str, list[str]] = {}
        for region in self.regions:
            if region.fallback:
                reasons.setdefault(region.fallback, []).append(_name(region))
        for reason, names in reasons.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = " ".join(reason.split())
            short = text if len(text) <= LONGEST_NOTE else f"{text[: LONGEST_NOTE - 4]} ..."
            yield f"without a recording: {names[0]}{others}: {short}"
        rounded = sum(region.rounded for region in self.regions)
        if rounded:
            yield f"{rounded:,} tensors came back with other last bits"


def _name(region: RegionReport) -> str:
    return region.name or "the rest"


def _did(region: RegionReport) -> tuple[object, ...]:
    """Fields that neighbours in one row have in common."""
    slots = (region.slots_kept, region.slots_dropped, region.slots_offloaded, region.slots_packed)
    held = (region.kept_bytes, region.host_bytes)
    return bool(region.name), region.word, region.calls, region.recordings, region.fallback, *slots, *held


def _row(group: list[RegionReport]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    names = _name(first) if len(group) == 1 else f"{_name(first)} to {last.name.rpartition('.')[2]} ({len(group)})"
    slots = (first.slots_kept, first.slots_dropped, first.slots_offloaded, first.slots_packed)
    counts = [str(first.calls), str(first.recordings), *map(str, slots)]
    return (names, first.word, *counts, format_bytes(first.kept_bytes), format_bytes(first.host_bytes))
