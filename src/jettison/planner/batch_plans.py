"""Selection of the plan that a batch runs under.

A plan is made for a batch, and covers every batch that is not longer in any dim (`BatchShape.covers`): recipes apply
the same decisions to smaller tensors. For a batch that no plan covers, the step is dry-run under the existing plans,
and a new plan is made if it fits under none. A small batch under the plan of a large one recomputes more than it needs.
Once that has cost as much time as planning, it gets its own plan.

Where a tensor decides which ops a forward runs, batches in which all its values are equal (a padding mask of ones,
which transformers leaves out) and others do not cover each other. Whether gradients are there already, and what a step
computes for its model from the batch, is known when a forward begins.
"""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jettison.capture.model_trace import ModelTrace, as_call
from jettison.capture.signature import call_signature
from jettison.core.errors import Infeasible, JettisonError, PlanMismatch, warn
from jettison.core.progress import Progress, reported
from jettison.core.units import format_bytes
from jettison.dryrun.step import ModulePolicy
from jettison.dryrun.user_step import Step
from jettison.parallel.recompute_agreement import Agreement
from jettison.planner.planner import UNSEEN_BYTES, module_policy
from jettison.planner.step_description import Described
from jettison.runtime.callers import argument_of
from jettison.runtime.cuda_graphs import is_capturing, refuse_capture
from jettison.runtime.install import adopt_more, follow, install_more
from jettison.runtime.loop_assumptions import BatchShape, map_tensors, tensors_by_path
from jettison.runtime.planned_forward import PlannedForward
from jettison.solve.plan import Plan

MOST_PLANS = 16
"""Most plans; beyond it small batches get none of their own, large ones always do."""
MOST_TRIED = 3
"""Most existing plans that are tried on a batch before a new one is made."""
MOST_SHAPES = 4096
"""Most shapes that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeReport:
    """Batches of one shape (a padding bucket, say).

    Args:
        shape: as text, ``4 x 512 (input_ids, labels)``.
        steps: number of steps with it.
        planned_for: shape that the plan of its last step was made for.
        peak_bytes: predicted upper limit.
        recompute_seconds: predicted recomputation in a step of the shape planned for.
    """

    shape: str
    steps: int
    planned_for: str
    peak_bytes: int
    recompute_seconds: float


@dataclass(frozen=True, kw_only=True)
class InstalledPlan:
    """Plans that are installed under one number. ``trained``: of each model, `Assumptions.trained`; then again, 1
    for what ever was; and one byte that is 1 if gradients are there when the step begins. ``ops``: names of the ops of
    each forward. ``policies``: for each model, of another trace with the same policies.
    """

    number: int
    shape: BatchShape
    trained: bytes
    ops: Set[tuple[str, ...]]
    policies: Sequence[Callable[..., ModulePolicy]]
    peak_bytes: int
    added_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cover:
    """A plan that covers batches that are not longer than this one, with no more trained parameters. ``peak_bytes`` are
    of a step on this batch: the plan may have been made for another one with a lower peak.
    """

    shape: BatchShape
    trained: bytes
    treatment: InstalledPlan
    peak_bytes: int

    def covers(self, shape: BatchShape, trained: bytes) -> bool:
        """Whether a step on such a batch needs no more memory."""
        return self.shape.covers(shape) and _is_within(trained, self.trained)


@dataclass(kw_only=True)
class _SeenShape:
    cover: Cover | None = None
    steps: int = 0
    rent_seconds: float = 0.0


@dataclass(kw_only=True, eq=False)
class BatchPlans:
    """Plans by batch of one applied handle: the ``regions`` of each planned model. ``describe``: describes a step on
    another batch, with or without gradients when it begins. ``step``: of ``models`` models and a batch; None: the batch
    is the arguments of the model. ``planning_seconds``: of the first planning. ``host_budget_bytes``: limit of pinned
    memory for each model; None: what the host has.
    """

    regions: Sequence[Sequence[PlannedForward]]
    describe: Callable[[Any, bool], Described]
    step: Step | None
    models: int
    budget_bytes: int
    planning_seconds: float
    progress: Progress
    host_budget_bytes: int | None = None
    treatments: list[InstalledPlan] = field(default_factory=list)
    covers: list[Cover] = field(default_factory=list)
    now: Cover | None = None
    _decisive: set[str] = field(default_factory=set)
    _ever: bytes = b""
    _announced: Any = None  # batch of a step whose first forward has not begun
    _latest: weakref.ref[Tensor] | None = None  # a tensor of the running step's batch
    _seen: OrderedDict[tuple[BatchShape, bytes], _SeenShape] = field(default_factory=OrderedDict)

    def begin(self, batches: Sequence[Any], traces: Sequence[ModelTrace], plans: Sequence[Plan]) -> None:
        """Register the installed plans and the batches that they were made for."""
        self._note_decisive(traces)
        shapes = self._shapes(batches[0], traces) if len(batches) == 1 else [self._shape(batch) for batch in batches]
        parts = [module_policy(trace, plan) for trace, plan in zip(traces, plans, strict=True)]
        trained = self._trained(False)
        made = self._treatment(0, max(shapes, key=lambda shape: shape.nbytes), trained, parts, plans)
        self.covers += [
            Cover(shape=shape, trained=trained, treatment=made, peak_bytes=made.peak_bytes) for shape in shapes
        ]
        self.now = self.covers[0]

    def meet(self, batch: Any, call: tuple[Any, Any] | None = None, *, is_new: bool = True) -> None:
        """Install the plan for the next step's batch, making one if needed; or for a ``call`` in its step that begins.
        ``is_new``: the step is counted.
        """
        shape, trained = self._shape(batch, call), self._trained(call is not None)
        if not is_new and self.now is not None and self.now.covers(shape, trained):
            return
        if (shape, trained) not in self._seen and len(self._seen) >= MOST_SHAPES:
            self._seen.popitem(last=False)
        seen = self._seen.setdefault((shape, trained), _SeenShape())
        if seen.cover is None:
            found = [cover for cover in self.covers if cover.covers(shape, trained)]
            fastest = min(found, key=lambda one: one.treatment.added_seconds, default=None)
            seen.cover = fastest or self._make(shape, trained, batch, call)
        seen.steps += is_new
        self._follow(seen.cover)
        if is_new:
            self._pay_rent(shape, trained, seen, batch)
        if call is None:
            self._announced = batch
        self._latest = next(map(weakref.ref, tensors_by_path((batch,)).values()), None)

    def call_begins(self, batch: Any, call: tuple[Any, Any]) -> None:
        """Install the plan for a forward that begins. Of a step's batch it is known what was announced, or what the
        running step was called with.
        """
        announced, self._announced = self._announced, None
        if batch is not None:
            self.meet(batch, call)
        elif is_capturing():
            return
        elif announced is not None:
            self.meet(announced, call, is_new=False)
        elif self.step is not None:
            tensors = tensors_by_path((batch := argument_of(self.step, self.models),))
            # the step is running, and has given the batch's name to nothing else
            if dict(self.treatments[0].shape.sizes).keys() & tensors.keys():
                is_new = self._latest is None or self._latest() is not next(iter(tensors.values()))
                self.meet(batch, call, is_new=is_new)

    def restrict(self, budget_bytes: int) -> None:
        """Set a new budget; no existing plan is assumed to fit it."""
        self.budget_bytes = budget_bytes
        self.covers.clear()
        for seen in self._seen.values():
            seen.cover, seen.rent_seconds = None, 0.0

    def report(self) -> list[ShapeReport]:
        found = [
            ShapeReport(
                shape=str(shape),
                steps=seen.steps,
                planned_for=str(seen.cover.treatment.shape),
                peak_bytes=seen.cover.peak_bytes,
                recompute_seconds=seen.cover.treatment.added_seconds,
            )
            for (shape, _), seen in self._seen.items()
            if seen.cover is not None and seen.steps
        ]
        return sorted(found, key=lambda one: -one.steps)

    def _shape(self, batch: Any, call: tuple[Any, Any] | None = None) -> BatchShape:
        """The batch's shape, and of a call in its step what decides which ops run and is not of the batch."""
        arguments = as_call(batch) if self.step is None else ((batch,), {})
        shape = BatchShape.of(*arguments, decisive=self._decisive)
        if call is None or self.step is None:
            return shape
        computed = BatchShape.of(*call, decisive=self._decisive).sizes
        more = tuple((f"call.{path}", replace(size, nbytes=0)) for path, size in computed if size.uniform is not None)
        return BatchShape(shape.sizes + more)

    def _shapes(self, batch: Any, traces: Sequence[ModelTrace]) -> list[BatchShape]:
        """Shapes of a batch for each of the calls in its step."""
        calls = [as_call(one.batch) for trace in traces for one in (trace, *trace.more)]
        return list(dict.fromkeys(self._shape(batch, call) for call in calls))

    def _note_decisive(self, traces: Sequence[ModelTrace]) -> None:
        """Note which tensors decide which ops run, by their names in the calls of the models."""
        for one in [each for trace in traces for each in (trace, *trace.more)]:
            leaves = call_signature(*as_call(one.batch))[0]
            read = {id(leaves[position]) for position in one.root.decisive_arguments()}
            found = tensors_by_path(*as_call(one.batch)).items()
            self._decisive |= {path.rpartition(".")[2] for path, tensor in found if id(tensor) in read}

    def _trained(self, begins: bool) -> bytes:
        """Flags of parameters trained now, and of those ever trained: an optimizer keeps their state. Then whether
        gradients are there that the first plan did not count, if a forward ``begins``.
        """
        known = [regions[-1].assumptions for regions in self.regions if regions[-1].assumptions is not None]
        now = b"".join(one.trained() for one in known)
        if len(self._ever) != len(now):
            self._ever = bytes(len(now))
        self._ever = bytes(map(operator.or_, self._ever, now))
        begins = begins and not is_capturing()  # no plan can be made then, and gradients may be zeroed in the graph
        return now + self._ever + bytes([begins and max((one.has_gradients() for one in known), default=False)])

    def _make(self, shape: BatchShape, trained: bytes, batch: Any, call: tuple[Any, Any] | None) -> Cover:
        """Return a plan under which this batch fits; if there is none, the one with the lowest peak."""
        what = self._named(shape, trained)
        refuse_capture(f"no plan covers {what}")
        self.progress(f"no plan covers {what}")
        try:
            described = self.describe(batch, bool(trained[-1]))
            self._note_decisive(described.traces)
            shape = self._shape(batch, call)
            made = self._tried(shape, trained, described) or self._planned(shape, trained, described)
        except JettisonError as error:
            frugal = max(self.treatments, key=lambda one: one.added_seconds)
            warn(
                f"{what} cannot be planned for ({error}). It runs under the plan for {frugal.shape}, and "
                "its peak may be above the budget (gradients are not affected)"
            )
            return Cover(shape=frugal.shape, trained=trained, treatment=frugal, peak_bytes=frugal.peak_bytes)
        finally:
            for regions in self.regions:
                if regions[-1].assumptions is not None:
                    regions[-1].assumptions.follow()
        for known in (shape, *self._shapes(batch, described.traces)):
            self._cover(replace(made, shape=known))
        for regions, part in zip(self.regions, described.parts, strict=True):
            if (assumptions := regions[-1].assumptions) is not None:
                assumptions.planned += part.shapes
        return made

    def _named(self, shape: BatchShape, trained: bytes) -> str:
        """The batch as text, with the parameters that are trained beyond those of any plan."""
        if any(_is_within(trained[:-1], one.trained[:-1]) for one in self.treatments):
            return f"a batch of {shape}{' with gradients of an earlier backward' * trained[-1]}"
        count = len(trained) // 2
        known = [one.trained[:count] for one in self.treatments]
        more = min(sum(map(operator.gt, trained[:count], then)) for then in known)
        return f"a batch of {shape} with {more} more parameters trained or unsharded"

    def _tried(self, shape: BatchShape, trained: bytes, described: Described) -> Cover | None:
        """An existing plan of the same ops under which this batch fits; none for models with opaque blocks."""
        if any(cls.stood_in for trace in described.traces for cls in trace.classes.values()):
            return None
        ops = _ops(described.traces)
        alike = [one for one in self.treatments if one.trained == trained and ops <= one.ops]
        for treatment in sorted(alike, key=lambda one: one.added_seconds)[:MOST_TRIED]:
            parts = [of(trace=trace) for trace, of in zip(described.traces, treatment.policies, strict=True)]
            peak_bytes = described.peak_bytes(parts)
            if peak_bytes + UNSEEN_BYTES <= self.budget_bytes:
                for regions, trace in zip(self.regions, described.traces, strict=True):
                    adopt_more(regions, trace, treatment.number, self.host_budget_bytes)
                return Cover(shape=shape, trained=trained, treatment=treatment, peak_bytes=peak_bytes)
        return None

    def _planned(self, shape: BatchShape, trained: bytes, described: Described) -> Cover:
        began = time.perf_counter()
        try:
            plans = described.planner.plans(self.budget_bytes)
        except Infeasible as error:
            plans = described.planner.plans(error.minimum_budget_bytes)
            warn(
                f"{self._named(shape, trained)} does not fit into {format_bytes(self.budget_bytes)}: the smallest plan "
                f"for it needs {format_bytes(error.minimum_budget_bytes)} and is applied. Use a smaller batch "
                "or a larger budget"
            )
        parts = [module_policy(trace, plan) for trace, plan in zip(described.traces, plans, strict=True)]
        numbers = {
            install_more(
                regions, part.trace, part.policies, part.root, part.segments, host_budget_bytes=self.host_budget_bytes
            )
            for regions, part in zip(self.regions, parts, strict=True)
        }
        self.planning_seconds = time.perf_counter() - began
        (number,) = numbers  # all models get their plans together
        made = self._treatment(number, shape, trained, parts, plans)
        return Cover(shape=shape, trained=trained, treatment=made, peak_bytes=made.peak_bytes)

    def _treatment(
        self, number: int, shape: BatchShape, trained: bytes, parts: Sequence[ModulePolicy], plans: Sequence[Plan]
    ) -> InstalledPlan:
        like = [(part.policies, part.root, part.segments) for part in parts]  # without their traces, which hold a batch
        made = InstalledPlan(
            number=number,
            shape=shape,
            trained=trained,
            ops=_ops([part.trace for part in parts]),
            policies=[functools.partial(ModulePolicy, policies=p, root=root, segments=s) for p, root, s in like],
            peak_bytes=max(plan.predicted.peak_bytes for plan in plans),
            added_seconds=sum(plan.predicted.added_seconds for plan in plans),
        )
        self.treatments.append(made)
        return made

    def _cover(self, made: Cover) -> None:
        others = (c for c in self.covers if c.treatment is not made.treatment or not made.covers(c.shape, c.trained))
        self.covers = [*others, made]

    def _pay_rent(self, shape: BatchShape, trained: bytes, seen: _SeenShape, batch: Any) -> None:
        """Count the recomputation of this step; plan for its shape once that equals the cost of planning."""
        assert seen.cover is not None
        treatment = seen.cover.treatment
        if treatment.shape.nbytes <= shape.nbytes or treatment.added_seconds <= 0.0 or is_capturing():
            return
        seen.rent_seconds += treatment.added_seconds * shape.nbytes / treatment.shape.nbytes
        if seen.rent_seconds < self.planning_seconds or len(self.treatments) >= MOST_PLANS:
            return
        seen.rent_seconds = float("-inf")  # only once
        try:
            with reported(self.progress, f"planning for batches of {shape} after {seen.steps} steps") as done:
                own = self._planned(shape, trained, self.describe(batch, bool(trained[-1])))
                done(f"planned for batches of {shape}: predicted peak {format_bytes(own.peak_bytes)}")
        except JettisonError:
            return  # it keeps its plan
        seen.cover = own
        self._cover(own)
        self._follow(own)

    def _follow(self, cover: Cover) -> None:
        before, self.now = self.now, cover
        if before is None or cover.treatment is not before.treatment:
            for regions in self.regions:
                follow(regions, cover.treatment.number)


def _ops(traces: Sequence[ModelTrace]) -> Set[tuple[str, ...]]:
    return {tuple(op.name for op in one.root.program.ops) for trace in traces for one in (trace, *trace.more)}


def _is_within(trained: bytes, most: bytes) -> bool:
    """Whether all trained parameters are among the others. A model with other parameters is reported elsewhere."""
    return trained == most or len(trained) != len(most) or all(map(operator.le, trained, most))


# ranks that share parameters ------------------------------------------------------------------------------------------
#
# These ranks follow one plan, and are compared op by op. Each reads its own shard of the data, so its first batch may
# be longer or shorter than another rank's. They exchange shapes, and plan for those that no other shape covers. A
# rank without a batch of such a shape pads one of its own by repetition.

MOST_RANK_SHAPES = 4
"""Most shapes that are planned one by one; beyond it one shape that covers all is planned."""


def alike(batches: Sequence[Any], sharing: Agreement) -> list[Any]:
    """Return batches of one shape on all ranks, in one order. Raise `PlanMismatch` if ranks have other tensors."""
    if not sharing.rounds:
        return list(batches)
    own = {BatchShape.of((batch,)): batch for batch in reversed(batches)}
    told = sharing.union(own)
    wanted = [one for one in told if not any(other is not one and other.covers(one) for other in told)]
    wanted.sort(key=lambda shape: (shape.nbytes, str(shape)))  # the largest last
    if len(wanted) > MOST_RANK_SHAPES:
        wanted = [functools.reduce(BatchShape.around, wanted)]
    return [own[shape] if shape in own else padded_batch(own, shape) for shape in wanted]


def padded_batch(own: Mapping[BatchShape, Any], shape: BatchShape) -> Any:
    """Pad a batch of this rank (one of ``own``, by shape) to another shape by repeating its last rows and columns, so
    that values stay valid. Raise `PlanMismatch` if the batches have other tensors.
    """
    base = next((one for one in own if one.can_become(shape)), None)
    if base is None:
        raise PlanMismatch(
            f"ranks that share parameters have batches of other tensors: one has {shape}, this one has "
            f"{'; '.join(map(str, own))}. They follow one plan: give all of them a batch with the same tensors "
            f"({', '.join(where for where, _ in shape.sizes)}), of the same types and numbers of dims"
        )

    def grown(where: str, tensor: Tensor) -> Tensor:
        for dim, size in enumerate(dict(shape.sizes)[where].dims):
            if tensor.shape[dim] != size:
                index = torch.arange(size, device=tensor.device).clamp(max=max(0, tensor.shape[dim] - 1))
                tensor = tensor.index_select(dim, index)
        return tensor

    return map_tensors(grown, own[base], "0")
