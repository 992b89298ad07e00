"""One pipeline stage as a problem for the solver: what its layers can do, and the fastest choice that fits.

NOTE [ A stage as a step problem ]
The planner of a single step (`solve.chain`) counts each region's held bytes once. A stage with n micro-batches in
flight holds them n times at the start of a backward, so they are given n times. That is exact for the last region's
backward, where the peak mostly is, and too little for earlier ones, whose successors still hold n - 1 of them. The
choice is therefore played through the stage's real timeline, which is the judge (`solve.refine`).

What is offloaded is on the host n times, and on the device once: a stage does one pass of one micro-batch at a time,
and only neighbours' copies stand beside it (NOTE [ What is on its way ] in `solve.problem`). Of each chunk the last
layer sends nothing: what comes after it is the head, another micro-batch's pass, or its own backward at once.

Runs of layers may be segments (NOTE [ Which segments ] in `stage_segments`). Where the host's budget binds, they are
only asked for where layers by themselves do not fit: plans near the relaxation's vertex (`solve.rounding`) have none.

NOTE [ A mask that nobody reads again ]
The mask of packed documents is one for all layers, and goes with the forward where none of them computes again what
reads it. The solver has no price that many layers share. So the stage is solved twice: with the mask in place, and
without it, where layers choose among what does not read it, and the better answer is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from jettison.core.units import MIB
from jettison.cost.collective import host_seconds
from jettison.cost.layer import PriceModel
from jettison.formula.region import HEAD, Region
from jettison.memory.step import Event
from jettison.memory.unit import Unit
from jettison.predict.forecast import Stage, stage_sizes
from jettison.predict.fsdp2 import FsdpGroups, GroupPlace
from jettison.predict.stage_buffers import document_mask, reads_mask
from jettison.predict.stage_segments import HELD, StageSegments
from jettison.predict.stage_time import Timing
from jettison.predict.stages import MIXED, RegionGroup, StageRegion, Staying
from jettison.predict.units import unit_within
from jettison.solve.actions import ActionPoint, action_points, kept_points
from jettison.solve.chain import choose as choose_options
from jettison.solve.frontier import pareto_frontier, plain_point
from jettison.solve.levels import Choice
from jettison.solve.moves import Walk, least_of, walks
from jettison.solve.problem import Link, ProblemRegion, RegionOption, RootOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.spec.precision import Gradients
from jettison.spec.run import Run

LEAST_MOVED: Final = 1 * MIB
"""Smaller tensors stay: what a copy costs beside its bytes is as much as these."""

Points = tuple[ActionPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """By part of the stage what stays of it, or None for everything; and the peak by its timeline.

    ``added_seconds`` of a micro-batch are recompute and ``stalled_seconds``; ``host_bytes`` of all in flight.
    """

    staying: tuple[Staying | None, ...]
    needs: int
    level: int
    added_seconds: float
    stalled_seconds: float
    host_bytes: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A problem as paths, and the smallest budget that one of them fits."""

    problem: StepProblem
    walks: tuple[Walk, ...]
    least_bytes: int

    @classmethod
    def of(cls, problem: StepProblem) -> _Way:
        found = walks(problem)
        return cls(problem=problem, walks=found, least_bytes=least_of(found))


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """One stage's problem. See NOTE [ A stage as a step problem ].

    Args:
        host_budget_bytes: for what the stage's micro-batches in flight offload; None: no limit.
        mask: may layers compute again what reads the mask of packed documents?
    """

    run: Run
    stage: Stage
    timing: Timing
    host_budget_bytes: int | None = None
    mask: bool = True

    @cached_property
    def parts(self) -> list[StageRegion]:
        """The stage's regions, chunk by chunk."""
        return [part for chunk in self.stage.parts for part in chunk]

    @cached_property
    def _link(self) -> Link | None:
        """The way to the host, where the run may use it.

        Raises:
            UsageError: the hardware's file does not state it.
        """
        if not self.run.recompute.offload:
            return None
        return Link(
            bytes_per_second=1 / host_seconds(1, self.timing.hardware),
            host_budget_bytes=self.host_budget_bytes,
            hides=self.timing.execution.hides_offload,
        )

    def solve(self, budget_bytes: int) -> tuple[int, Answer | None]:
        """The fewest bytes that the stage is known to fit, and the fastest answer that fits."""
        least = self._least
        found = [least, *refine(self._ask, budget_bytes, self._lowest)]
        other = self._without_mask
        others = [] if other is None else refine(other._ask, budget_bytes, other._lowest)
        fewest = min(one.needs for one in (*found, *others))
        if fewest > budget_bytes:
            return least.needs, None  # the answer that any budget leads to
        bests = [fastest(each, budget_bytes) for each in (found, others) if any(o.needs <= budget_bytes for o in each)]
        best = min(bests, key=lambda one: one.added_seconds)
        return fewest, replace(best, gap=max(one.gap for one in bests))  # the slower one's is of a lower bound as well

    @cached_property
    def _without_mask(self) -> StageChoice | None:
        """See NOTE [ A mask that nobody reads again ]."""
        return replace(self, mask=False) if self.mask and document_mask(self.run) else None

    @property
    def smallest_budget_bytes(self) -> int:
        """The fewest bytes that some answer is known to fit."""
        return self._least.needs

    @cached_property
    def _lowest(self) -> int:
        """A budget below which the problem, as the solver sees it, has no answer."""
        return min(way.least_bytes for way in self._ways)

    @cached_property
    def _least(self) -> Answer:
        """Of answers that hold little the one with the lowest peak by the timeline, the same whatever the budget.

        They are what recompute modes say, and what the solver has for the smallest budget that it sees.
        """
        found = [self._fewest, self._ask(self._lowest), *(self._uniform() if self.mask else ())]
        if self._without_mask is not None:
            found.append(self._without_mask._least)
        least = min(found, key=lambda one: (one.needs, one.added_seconds))
        plain = sum(r.forward_seconds + r.backward_seconds for r in self._problem.regions)
        step = plain + least.added_seconds
        return replace(least, gap=least.added_seconds / step if step else 0.0)  # a better one may add nothing

    @property
    def _fewest(self) -> Answer:
        """Each layer by itself holds what it must."""
        ends = [
            min(options, key=lambda o: (o.kept_bytes + o.offloaded_bytes, o.offloaded_bytes)) for options in self.points
        ]
        return self._unasked(Choice(root="", regions=tuple(end.key for end in ends)), sum(end.seconds for end in ends))

    def _uniform(self) -> Iterator[Answer]:
        """Segments of one length, of which the peak is lowest."""
        size, _ = min(self._segments.uniform(), key=lambda pair: pair[1], default=(0, 0))
        if not size:
            return
        ends = [min(options, key=lambda o: (o.kept_bytes + o.offloaded_bytes, o.seconds)) for options in self.points]
        cut = tuple(self._segments.cut(size))
        inside = {r for start, stop in cut for r in range(start, stop)}
        keys = tuple(HELD if r in inside else end.key for r, end in enumerate(ends))
        seconds = sum(end.seconds for r, end in enumerate(ends) if r not in inside)
        seconds += sum(self._segments.seconds(start, stop) for start, stop in cut)
        yield self._unasked(Choice(root="", regions=keys, segments=cut), seconds)

    def _unasked(self, choice: Choice, seconds: float) -> Answer:
        """What holds little, whatever the budget is, and sends nothing."""
        staying = self._staying(choice)
        needs = self._peak(staying)
        return Answer(
            staying=staying, needs=needs, level=needs, added_seconds=seconds, stalled_seconds=0.0, host_bytes=0, gap=1.0
        )

    def _ask(self, asked: int) -> Answer:
        way = next(way for way in self._ways if way.least_bytes <= asked)
        found = choose_options(way.problem, asked, known=way.walks)
        staying = self._staying(found.choice)
        return Answer(
            staying=staying,
            needs=self._peak(staying),
            level=found.levels.peak_bytes,
            added_seconds=found.certificate.objective_seconds,
            stalled_seconds=found.levels.stalled_seconds,
            host_bytes=found.levels.host_bytes,
            gap=found.certificate.gap,
        )

    # what each part can do --------------------------------------------------------------------------------------------

    @cached_property
    def points(self) -> list[Points]:
        """What each part can do, fewest bytes of the device first; only layers have a choice."""
        known: dict[tuple[object, ...], Points] = {}
        found = []
        for part, following in zip(self.parts, self._following, strict=True):
            if not part.is_layer:
                found.append(kept_points([plain_point(part.region.program)]))
                continue
            key = (self.timing.prices(part.layer), part.region, following and following.region)
            if key not in known:
                points, program = self._of_layer(part, following), part.region.program
                known[key] = points if self.mask else tuple(p for p in points if not reads_mask(program, p.stays))
            found.append(known[key])
        return found

    @cached_property
    def _following(self) -> list[StageRegion | None]:
        """By part, the next layer of its chunk, beside which what it sends is on its way."""
        found = [part for chunk in self.stage.parts if chunk for part in (*chunk[1:], None)]
        return [part if part is not None and part.is_layer else None for part in found]

    def _of_layer(self, part: StageRegion, following: StageRegion | None) -> Points:
        if self._link is None or following is None:
            return layer_points(self.timing.prices(part.layer), part.region)
        forward, backward = self._passes(following)
        again = sum(self.timing.prices(following.layer).op_seconds(following.region))
        beside = (forward, backward, backward + again, min(forward, backward) / 2)
        program, seconds = part.region.program, self.timing.prices(part.layer).op_seconds(part.region)
        return action_points(
            program,
            seconds,
            movable=frozenset(b.index for b in program.buffers if b.nbytes >= LEAST_MOVED),
            kinks=[int(each * self._link.bytes_per_second) for each in beside] if self._link.hides else [],
            peaks=lambda stays: self._peaks(part, stays),
        )

    def _passes(self, part: StageRegion) -> tuple[float, float]:
        """Seconds of a forward, and of a backward that computes nothing again."""
        plain = self.timing.items([RegionGroup(part=replace(part, chosen=None, policy="none"), names=(part.name,))])
        return plain[0].seconds.forward.seconds, plain[0].seconds.backward_seconds

    # the problem ------------------------------------------------------------------------------------------------------

    @property
    def _fresh(self) -> bool:
        """Do gradients appear one by one in the only backward of a step, or in each?"""
        load = self.stage.load
        if load.gradients is Gradients.ADDED:
            return True
        return load.gradients is not Gradients.UPFRONT and load.micro_batches == 1

    @cached_property
    def _problem(self) -> StepProblem:
        load = self.stage.load
        static = load.fixed + load.state + load.there(Event.BACKWARD) + self._whole_bytes
        static -= 0 if self.mask else document_mask(self.run)
        static += 0 if self._fresh else load.gradient_bytes
        regions = tuple(self._regions())
        nothing = (0,) * len(regions)
        root = RootOption(
            key="",
            held_forward_bytes=nothing,
            held_backward_bytes=nothing,
            loss_peak_bytes=0,
            tail_peak_bytes=0,
            seconds=0.0,
        )
        optimizer = load.gradient_bytes if self._fresh else 0
        return StepProblem(
            static_bytes=static,
            optimizer_peak_bytes=optimizer + load.optimizer_transient,
            regions=regions,
            root=(root,),
            plain_seconds=0.0 if self._link is None else sum(r.forward_seconds + r.backward_seconds for r in regions),
            link=self._link,
        )

    @property
    def _whole_bytes(self) -> int:
        """Of micro-batches that are kept whole, at most."""
        load = self.stage.load
        held = {chunk: load.held(chunk) for chunk in range(load.order.own, load.order.chunks)}
        return max(sum(state.alive[c] * nbytes for c, nbytes in held.items()) for state in load.occupancies)

    @cached_property
    def _ways(self) -> tuple[_Way, ...]:
        """The problem with segments; before it without, where the host's budget binds."""
        alone = _Way.of(self._problem)
        segments = tuple(self._segments.options(self._problem, alone.least_bytes)) if self.mask else ()
        if not segments:
            return (alone,)
        together = _Way.of(replace(self._problem, segments=segments))
        binds = any(walk.host_budget_bytes is not None for walk in alone.walks)
        return (alone, together) if binds else (together,)

    @cached_property
    def _segments(self) -> StageSegments:
        return StageSegments(
            run=self.run, stage=self.stage, timing=self.timing, fresh=self._fresh, least_moved=LEAST_MOVED
        )

    def _regions(self) -> Iterator[ProblemRegion]:
        """One a part; what is alike is worked out once."""
        known: dict[tuple[object, ...], ProblemRegion] = {}
        points = iter(self.points)
        for chunk, parts in enumerate(self.stage.parts):
            copies = self.stage.load.order.most_alive[chunk]
            for part in parts:
                options = next(points)
                alike = id(options), copies, part.name == HEAD, self._places[part.name].shards
                if alike not in known:
                    known[alike] = self._region(part, options, copies)
                yield replace(known[alike], name=part.name, class_key=part.name)

    def _region(self, part: StageRegion, options: Points, copies: int) -> ProblemRegion:
        made = []
        whole = self._unit(part, options[-1].stays).whole
        for point in options:
            forward, backward = self._peaks(part, point.stays)
            made.append(
                RegionOption(
                    key=point.key,
                    resident_bytes=copies * point.kept_bytes + whole,
                    forward_peak_bytes=forward,
                    backward_peak_bytes=backward,
                    seconds=point.seconds,
                    offloaded_bytes=point.offloaded_bytes,
                )
            )
        forward_seconds, backward_seconds = self._passes(part)
        return ProblemRegion(
            name=part.name,
            class_key=part.name,
            options=tuple(made),
            gradient_bytes=self._unit(part, options[-1].stays).gradient if self._fresh else 0,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            copies=copies,
        )

    def _peaks(self, part: StageRegion, stays: frozenset[int]) -> tuple[int, int]:
        """Of both passes with these buffers staying."""
        unit = self._unit(part, stays)
        return unit.forward_peak, unit.backward_peak if self._fresh else unit.adding_peak

    def _unit(self, part: StageRegion, stays: frozenset[int]) -> Unit:
        alone = replace(part, policy=MIXED, chosen=Staying(stays)) if part.is_layer else part
        return unit_within(self.run, [RegionGroup(part=alone, names=(part.name,))], self._places[part.name])

    @cached_property
    def _places(self) -> dict[str, GroupPlace]:
        """By region, where it is in its chunk."""
        chunks = (FsdpGroups.of(self.run, parts) for parts in self.stage.parts if parts)
        return {part.name: GroupPlace.of(chunk, at, at + 1) for chunk in chunks for at, part in enumerate(chunk.parts)}

    def _staying(self, choice: Choice) -> tuple[Staying | None, ...]:
        found: list[Staying | None] = []
        stops = dict(choice.segments)
        while len(found) < len(self.parts):
            at = len(found)
            key = choice.regions[at]
            if at in stops:
                found += self._segments.staying(at, stops[at], key)
                continue
            point = next(p for p in self.points[at] if p.key == key)
            found.append(Staying(point.stays, point.offloaded) if self.parts[at].is_layer else None)
        return tuple(found)

    def _peak(self, staying: Sequence[Staying | None]) -> int:
        """Of the stage, by its timeline."""
        by_name = {part.name: buffers for part, buffers in zip(self.parts, staying, strict=True)}
        chosen = [by_name.get(name) for name in self.run.model.layer_names]
        return stage_sizes(self.run, self.stage.index, chosen).peak_bytes


@lru_cache(maxsize=4096)
def layer_points(prices: PriceModel, region: Region) -> Points:
    """What a layer can do without a link."""
    return kept_points(pareto_frontier(region.program, prices.op_seconds(region)))
