"""One pipeline stage as a problem for the solver: what its layers can do, and the fastest choice that fits.

NOTE [ A stage as a step problem ]
The planner of a single step (`solve.chain`) counts each region's held bytes once. A stage with n micro-batches in
flight holds them n times at the start of a backward, so they are given n times. That is exact for the last region's
backward, where the peak mostly is, and too little for earlier ones, whose successors still hold n - 1 of them. The
choice is therefore played through the stage's real timeline, which is the judge (`solve.refine`).

What is offloaded is on the host n times, and on the device once: a stage does one pass of one micro-batch at a time,
and only neighbours' copies stand beside it (NOTE [ What is on its way ] in `solve.problem`). Of each chunk the last
layer sends nothing: what comes after it is the head, another micro-batch's pass, or its own backward at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from jettison.cost.collective import host_seconds
from jettison.cost.layer import PriceModel
from jettison.formula.region import Region
from jettison.ledger.timeline import Unit
from jettison.predict.forecast import Stage, stage_sizes
from jettison.predict.peak import stage_peak_bytes
from jettison.predict.stage_time import Timing
from jettison.predict.stages import MIXED, RegionGroup, StageRegion, Staying
from jettison.predict.timeline_units import units
from jettison.solve.actions import ActionPoint, action_points, kept_points
from jettison.solve.chain import choose as choose_options
from jettison.solve.frontier import pareto_frontier, plain_point
from jettison.solve.moves import Walk, least_of, walks
from jettison.solve.problem import Link, ProblemRegion, RegionOption, RootOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.spec.run import Gradients, Run
from jettison.units import MIB

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
class StageChoice:
    """One stage's problem. See NOTE [ A stage as a step problem ].

    Args:
        host_budget_bytes: for what the stage's micro-batches in flight offload; None: no limit.
    """

    run: Run
    stage: Stage
    timing: Timing
    host_budget_bytes: int | None = None

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
        lowest, least = self._lowest, self._least
        found = [least, *refine(self._ask, budget_bytes, lowest)]
        if all(one.needs > budget_bytes for one in found):
            return least.needs, None  # the answer that any budget leads to
        best = fastest(found, budget_bytes)
        return min(least.needs, best.needs), best

    @cached_property
    def _lowest(self) -> int:
        """A budget below which the problem, as the solver sees it, has no answer."""
        return least_of(self._walks)

    @cached_property
    def _least(self) -> Answer:
        """The answer with the lower peak by the timeline of two, the same whatever the budget.

        Without a link it is that of the fewest bytes that stay; with one, fewer bytes that stay are more on their way.
        """
        ends = [
            min(options, key=lambda o: (o.kept_bytes + o.offloaded_bytes, o.offloaded_bytes)) for options in self.points
        ]
        staying = self._staying(tuple(end.key for end in ends))
        needs = self._peak(staying)
        fewest = Answer(
            staying=staying,
            needs=needs,
            level=needs,
            added_seconds=sum(end.seconds for end in ends),
            stalled_seconds=0.0,
            host_bytes=0,
            gap=1.0,
        )
        if self._link is None:
            return fewest
        lean = replace(self._ask(self._lowest), gap=1.0)
        return min(fewest, lean, key=lambda one: (one.needs, one.added_seconds))

    def _ask(self, asked: int) -> Answer:
        found = choose_options(self._problem, asked, known=self._walks)
        staying = self._staying(found.choice.regions)
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
                known[key] = self._of_layer(part, following)
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
        """Do gradients appear one by one in the only backward of a step?"""
        load = self.stage.load
        return load.gradients is Gradients.ONE_BY_ONE and load.micro_batches == 1

    @cached_property
    def _problem(self) -> StepProblem:
        load = self.stage.load
        static = load.fixed + load.state + load.around + self._whole_bytes
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
        if not load.twins:
            return 0
        whole = range(len(load.chunks) // 2, len(load.chunks))
        held = {chunk: load.held(chunk) for chunk in whole}
        return max(sum((o.forward[c] + o.weight[c]) * held[c] for c in whole) for o in load.occupancies)

    @cached_property
    def _walks(self) -> tuple[Walk, ...]:
        return walks(self._problem)

    def _regions(self) -> Iterator[ProblemRegion]:
        """One a part; what is alike is worked out once."""
        known: dict[tuple[int, int], ProblemRegion] = {}
        points = iter(self.points)
        for chunk, parts in enumerate(self.stage.parts):
            copies = max(o.forward[chunk] + o.weight[chunk] for o in self.stage.load.occupancies)
            for part in parts:
                options = next(points)
                alike = id(options), copies
                if alike not in known:
                    known[alike] = self._region(part, options, copies)
                yield replace(known[alike], name=part.name, class_key=part.name)

    def _region(self, part: StageRegion, options: Points, copies: int) -> ProblemRegion:
        made = []
        for point in options:
            forward, backward = self._peaks(part, point.stays)
            made.append(
                RegionOption(
                    key=point.key,
                    resident_bytes=copies * point.kept_bytes,
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
        return units(self.run, [RegionGroup(part=alone, names=(part.name,))])[0]

    def _staying(self, keys: Sequence[str]) -> tuple[Staying | None, ...]:
        found = [next(p for p in options if p.key == key) for options, key in zip(self.points, keys, strict=True)]
        return tuple(
            Staying(point.stays, point.offloaded) if part.is_layer else None
            for part, point in zip(self.parts, found, strict=True)
        )

    def _peak(self, staying: Sequence[Staying | None]) -> int:
        """Of the stage, by its timeline."""
        by_name = {part.name: buffers for part, buffers in zip(self.parts, staying, strict=True)}
        chosen = [by_name.get(name) for name in self.run.model.layer_names]
        return stage_peak_bytes(stage_sizes(self.run, self.stage.index, chosen).load)


@lru_cache(maxsize=4096)
def layer_points(prices: PriceModel, region: Region) -> Points:
    """What a layer can do without a link."""
    return kept_points(pareto_frontier(region.program, prices.op_seconds(region)))
