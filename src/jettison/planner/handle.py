"""The handle of an applied plan: reports, requests, and removal."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from textwrap import shorten
from types import TracebackType
from typing import Any, Final, overload

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jettison.capture.model_trace import ModelTrace, as_batch
from jettison.capture.randomness import Streams
from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.units import format_bytes, format_percent
from jettison.planner.batch_plans import BatchPlans, ShapeReport
from jettison.planner.budget import Budget
from jettison.planner.peak_watch import PLANNING, CudaPeaks, MemoryReport, OptimizerWatch, PeakWatch, phase_hooks
from jettison.runtime.chunked_loss import ChunkedLossPatch, holding
from jettison.runtime.offload import OffloadEngine
from jettison.runtime.planned_forward import PendingCalls, PlannedForward, RegionReport
from jettison.runtime.witness import tell_replays
from jettison.solve.plan import Plan
from jettison.spec.device_allowance import FRAGMENTS


@dataclass(kw_only=True)
class Applied:
    """A plan applied to a model. `remove()` restores the model.

    Args:
        plans: of each model, in the order of the step's, if there are several; ``plan`` is the first of them.
        budget: origin of the budget as text, if it was not given in bytes.
        losses: keeps losses chunked, if they are.
        batches: plans by batch, if later batches are planned for when they occur.
        _again: plans again with other ranks, if they must do it together and more is trained or unsharded.
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
            self.losses.release()

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

        Only needed on such ranks, and with ``step=`` in a loop that does not call that very function: otherwise a
        forward that begins shows its batch.

        Raises:
            PlanMismatch: such a rank failed, or did not arrive in time.
        """
        if self._again is not None and not self._removed:
            self._again(self, batch)
        if self.batches is not None:
            self._plan(self.batches.meet, batch)

    def _plan(self, meets: Callable[..., None], *batch: Any) -> None:
        if self.watch is not None:
            self.watch.enter(PLANNING)  # planning runs kernels, which take memory, too
        meets(*batch)

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
        losses.release()
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
        if (plans := self.handle.batches) is not None:
            self.handle._plan(plans.call_begins, as_batch(args, kwargs) if self.by_itself else None, (args, kwargs))
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
        alike = groupby(self.regions, key=lambda region: (bool(region.name), region.fallback, _row([region])[1:]))
        rows = [_row(list(group)) for _, group in alike]
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
            yield f"without a recording: {names[0]}{others}: {shorten(reason, LONGEST_NOTE, placeholder=' ...')}"
        rounded = sum(region.rounded for region in self.regions)
        if rounded:
            yield f"{rounded:,} tensors came back with other last bits"


def _name(region: RegionReport) -> str:
    return region.name or "the rest"


def _row(group: list[RegionReport]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    names = _name(first) if len(group) == 1 else f"{_name(first)} to {last.name.rpartition('.')[2]} ({len(group)})"
    slots = (first.slots_kept, first.slots_dropped, first.slots_offloaded, first.slots_packed)
    counts = [str(first.calls), str(first.recordings), *map(str, slots)]
    return (names, first.word, *counts, format_bytes(first.kept_bytes), format_bytes(first.host_bytes))


# recovery from out-of-memory errors ----------------------------------------------------------------------------------

_ON_CPU = "can't allocate memory"  # message of torch's CPU allocator, in a RuntimeError
ONE_PLAN = (
    "no other plan can be made here; ranks that share parameters would have to make it together, stages of a pipeline "
    "too, and a policy is what it is"
)
LESS = 0.9
"""Share of the predicted peak to plan for next, if the device's memory is unknown."""


@dataclass(eq=False)
class Attempt:
    """``with attempt:`` around one step. ``failed``: it ran out of memory and is to be repeated.

    Args:
        plans: of the handle; None if no other plan can be made, and no error is caught.
        batch: of the step, if the model does not receive it directly.
        optimizers: that were planned with; other tensors that they train are restored as well.
        why_last: why no other attempt follows the first.
    """

    plans: BatchPlans | None
    models: Sequence[nn.Module]
    batch: Any = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    why_last: str = ""
    failed: bool = field(default=False, init=False)
    entered: bool = field(default=False, init=False)

    def __enter__(self) -> Attempt:
        if self.entered:
            raise UsageError(
                "got one attempt for two with blocks; expected one around all forwards and backwards of a step: what "
                "the first has added to gradients would stay when the second is repeated"
            )
        self.entered = True
        if self.plans is None:
            return self
        if self.batch is not None:
            self.plans.meet(self.batch)
        self._stepped = False
        self._streams = Streams.now()
        self._gradients = [(p, _aside(p.grad)) for p in self._trained()]
        self._buffers = [
            (module._buffers, name, buffer, _aside(buffer))
            for model in self.models
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._elsewhere = {id(leaf): _mark(leaf) for leaf in _known_leaves(self.plans)}
        self._hook = register_optimizer_step_pre_hook(self._note_step)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> bool:
        if self.plans is None:
            if self.why_last and error is not None and is_out_of_memory(error):
                error.add_note(f"not repeated: {self.why_last}")
            return False
        self._hook.remove()
        if error is not None and is_out_of_memory(error):
            if why_not := self._why_not(error):
                error.add_note(f"not repeated: {why_not}")
            else:
                self._undo()
                self.failed = True
                self.plans.restrict(_what_is_left(self.models, self.plans))
        self._gradients, self._buffers = [], []
        return self.failed

    def _trained(self) -> list[Tensor]:
        """Parameters of the models, and other tensors that the optimizers train; each once."""
        of_models = [p for model in self.models for p in model.parameters()]
        groups = [group for one in self.optimizers for group in one.param_groups]
        return list({id(p): p for p in (*of_models, *(p for group in groups for p in group["params"]))}.values())

    def _why_not(self, error: BaseException) -> str:
        """Reason against a second attempt; empty if there is none."""
        if self._stepped:
            return "an optimizer had stepped already"
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            return "other ranks wait inside of this step"
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        gc.collect()
        known = {id(p) for p, _ in self._gradients}
        others = sum(
            leaf.grad is not None and id(leaf) not in known and self._elsewhere.get(id(leaf)) != _mark(leaf)
            for leaf in _leaves()
        )
        if not others:
            return ""
        return (
            f"{others} tensors outside the planned models got gradients, which a second attempt would add to; "
            "plan all that is trained together, with models=, give optimizer= for it, or free those gradients before "
            "the step"
        )

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _undo(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        with torch.no_grad():
            for table, name, buffer, value in self._buffers:
                table[name] = buffer  # a forward may have replaced it
                if buffer is not None:
                    buffer.copy_(value)
        self._streams.restore()
        self._gradients, self._buffers = [], []
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ON_CPU in str(error)
    )


_KNOWN: weakref.WeakKeyDictionary[BatchPlans, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def _known_leaves(plans: BatchPlans) -> list[Tensor]:
    """Leaf tensors that existed when the first step of a plan was guarded; a scan of all objects (370,000 of
    a process with transformers) takes 80 ms.

    A later leaf with a gradient is assumed to have got it from this attempt.
    """
    if plans not in _KNOWN:
        _KNOWN[plans] = [weakref.ref(leaf) for leaf in _leaves()]
    return [leaf for leaf in (known() for known in _KNOWN[plans]) if leaf is not None]


def _leaves() -> Iterator[Tensor]:
    """Yield all tensors that can have a gradient."""
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and not isinstance(one, FakeTensor) and one.is_leaf and one.requires_grad:
            yield one


def _mark(leaf: Tensor) -> tuple[int, int] | None:
    """Identity and version of a gradient, which change once a backward has added to it."""
    return None if leaf.grad is None else (leaf.grad._cdata, leaf.grad._version)


def _aside(tensor: Tensor | None) -> Tensor | None:
    """A copy that uses no accelerator memory."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _what_is_left(models: Sequence[nn.Module], plans: BatchPlans) -> int:
    """Budget of the second attempt: below the first's, and below the device's memory."""
    assert plans.now is not None
    budget = min(plans.budget_bytes, int(LESS * plans.now.peak_bytes))
    device = next((p.device for model in models for p in model.parameters() if p.device.type == "cuda"), None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        budget = min(budget, int((free + torch.cuda.memory_reserved(device)) * (1 - FRAGMENTS[2])))
    plans.progress(f"out of memory; planning for {format_bytes(budget)} instead")
    return budget
