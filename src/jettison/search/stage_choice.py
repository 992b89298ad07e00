"""Plan of one pipeline stage: options of its layers, and the fastest choice that fits.

NOTE [ A stage as a step problem ]
The solver of a single step (`solve.solver`) counts each region's kept bytes once. A stage with n micro-batches in
flight keeps n times as much at the start of a backward, so the solver gets n times the bytes. That is exact for the
last region's backward, where the peak mostly is, and too little for earlier ones, while later regions still keep n - 1
of them. The stage's timeline then gives the real peak of a choice (`solve.solver`).

Offloaded tensors are n times on the host, and once on the device: a stage runs one pass of one micro-batch at a time,
and only copies of neighbours overlap with it (NOTE [ Offloaded bytes in flight ] in `solve.problem`). The last layer of
each chunk offloads nothing: it is followed by the head, another micro-batch's pass, or its own backward.

NOTE [ Which segments ]
Consecutive layers may form a segment, which saves only the first one's input. It may begin at any layer of a chunk. Its
backward peak grows with its length, so that for each beginning lengths from 2 on are options as long as the segment
alone fits the smallest budget that single layers fit: a longer one cannot lower it. Lengths end at `LONGEST`: a segment
of k layers saves k - 1 of k inputs, and beyond 16 another layer saves less than a sixteenth of an input a layer. There
are no segments if inputs can be offloaded within the host's budget and behind single layers' compute: then single
layers save nothing on the device and recompute less. Segments of one length throughout a stage, as in a recompute mode,
are tried at every length. If the host's budget binds, segments are tried only if single layers do not fit:
plans near the relaxation's vertex (`solve.host_budget`) have none.

NOTE [ Mask of packed documents ]
All layers share one mask of packed documents, which is freed after the forward if no layer recomputes an op that reads
it. The solver has no price that layers share. So the stage is solved twice, with the mask and without it, where layers
have only options that do not read it, and the better answer counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final

from jettison.core.units import MIB
from jettison.cost.collective import host_seconds
from jettison.cost.region import PriceModel
from jettison.formula.region import HEAD, Region
from jettison.memory.stage_unit import Unit
from jettison.memory.step import Event
from jettison.predict.forecast import Stage, stage_sizes
from jettison.predict.fsdp import FsdpGroups, GroupPlace
from jettison.predict.stage_buffers import document_mask, reads_mask
from jettison.predict.stage_units import unit_within
from jettison.predict.stages import FULL, KeptBuffers, RegionGroup, StageRegion, kept_by, planned_program
from jettison.predict.time import Timing
from jettison.solve.frontier import FrontierPoint, pareto_frontier, plain_point
from jettison.solve.offload_options import action_points
from jettison.solve.problem import Choice, Link, ProblemRegion, RegionOption, RootOption, SegmentOption, StepProblem
from jettison.solve.solver import Offer, fastest, refine
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

LEAST_MOVED: Final = 1 * MIB
"""Smaller tensors are not offloaded: a copy's latency is worth as many bytes."""
LONGEST: Final = 16
HELD, SENT = "segment", "segment-sent"
"""Keys of segments: the input is kept on the device, or offloaded."""

Points = tuple[FrontierPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """Kept tensors of each part of a stage, None for all of them, and the peak of its timeline.

    ``added_seconds``: recompute and ``stalled_seconds`` of a micro-batch; ``host_bytes``: of all in flight.
    """

    kept_buffers: tuple[KeptBuffers | None, ...]
    needs: int
    level: int
    added_seconds: float
    stalled_seconds: float = 0.0
    host_bytes: int = 0
    gap: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """Planning problem of one stage. See NOTE [ A stage as a step problem ].

    Args:
        host_budget_bytes: for offloaded tensors of the stage's micro-batches in flight; None: no limit.
        mask: layers may recompute ops that read the mask of packed documents.
    """

    run: Run
    stage: Stage
    timing: Timing
    host_budget_bytes: int | None = None
    mask: bool = True

    def solve(self, budget_bytes: int) -> tuple[int, StageOutcome | None]:
        """Return the smallest budget that the stage is known to fit, and the fastest choice within the budget."""
        least = self.least
        found = [least, *refine(self._ask, budget_bytes, self._lowest)]
        other = self._without_mask
        others = [] if other is None else refine(other._ask, budget_bytes, other._lowest)
        bests = [best for each in (found, others) if (best := fastest(each, budget_bytes)) is not None]
        if not bests:
            return least.needs, None  # independent of the budget
        best = min(bests, key=lambda one: one.added_seconds)
        # the slower one's lower bound holds for both
        return min(one.needs for one in (*found, *others)), replace(best, gap=max(one.gap for one in bests))

    @cached_property
    def _link(self) -> Link | None:
        """Link to the host; None without offloading. `UsageError` if the hardware's file has no bandwidth of it."""
        if not self.run.recompute.offload:
            return None
        return Link(
            bytes_per_second=1 / host_seconds(1, self.timing.hardware),
            host_budget_bytes=self.host_budget_bytes,
            hides=self.timing.execution.hides_offload,
        )

    @cached_property
    def _without_mask(self) -> StageChoice | None:
        """The stage without the mask; None: there is none. See NOTE [ Mask of packed documents ]."""
        return replace(self, mask=False) if self.mask and document_mask(self.run) else None

    @cached_property
    def _lowest(self) -> int:
        """Smallest budget for which the solver's problem has a solution."""
        return min(offer.least_bytes for offer in self._offers)

    @cached_property
    def least(self) -> StageOutcome:
        """Choice with the lowest peak of any budget: of the recompute modes' and the solver's smallest."""
        found = [self._fewest, self._ask(self._lowest), *(self._uniform() if self.mask else ())]
        if self._without_mask is not None:
            found.append(self._without_mask.least)
        if self._link is not None:  # an offloaded tensor occupies the device until it is copied
            kept = replace(self, run=replace(self.run, recompute=replace(self.run.recompute, offload=False)))
            found.append(kept._ask(kept._lowest))
        least = min(found, key=lambda one: (one.needs, one.added_seconds))
        step = sum(r.forward_seconds + r.backward_seconds for r in self._problem.regions) + least.added_seconds
        return replace(least, gap=least.added_seconds / step if step else 0.0)  # the lower bound is 0

    @property
    def _fewest(self) -> StageOutcome:
        """Choice with the fewest kept bytes in each layer."""
        ends = [
            min(options, key=lambda o: (o.kept_bytes + o.offloaded_bytes, o.offloaded_bytes)) for options in self.points
        ]
        return self._unasked(Choice(root="", regions=tuple(end.key for end in ends)), sum(end.seconds for end in ends))

    def _uniform(self) -> Iterator[StageOutcome]:
        """Yield equal segments of the length with the lowest peak."""
        size, _ = min(self._equal_segments(), key=lambda pair: pair[1], default=(0, 0))
        if not size:
            return
        ends = [min(options, key=lambda o: (o.kept_bytes + o.offloaded_bytes, o.seconds)) for options in self.points]
        cut = tuple(self._cut(size))
        inside = {r for start, stop in cut for r in range(start, stop)}
        keys = tuple(HELD if r in inside else end.key for r, end in enumerate(ends))
        seconds = sum(end.seconds for r, end in enumerate(ends) if r not in inside)
        seconds += sum(self.segment_seconds(start, stop) for start, stop in cut)
        yield self._unasked(Choice(root="", regions=keys, segments=cut), seconds)

    def _unasked(self, choice: Choice, seconds: float) -> StageOutcome:
        """Outcome of a choice that does not depend on a budget and offloads nothing."""
        needs = self._peak(choice)
        return StageOutcome(kept_buffers=self._kept_buffers(choice), needs=needs, level=needs, added_seconds=seconds)

    def _ask(self, asked: int) -> StageOutcome:
        offer = next(offer for offer in self._offers if offer.least_bytes <= asked)
        found = offer.choose(asked, self._peak)
        return StageOutcome(
            kept_buffers=self._kept_buffers(found.choice),
            needs=self._peak(found.choice),
            level=found.levels.peak_bytes,
            added_seconds=found.levels.seconds,
            stalled_seconds=found.levels.stalled_seconds,
            host_bytes=found.levels.host_bytes,
            gap=found.gap,
        )

    # regions ----------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> list[StageRegion]:
        """All regions in order."""
        return [part for chunk in self.stage.parts for part in chunk]

    @cached_property
    def chunks(self) -> list[tuple[int, FsdpGroups]]:
        """Begin and FSDP groups of each region's chunk."""
        begins = accumulate((len(parts) for parts in self.stage.parts), initial=0)
        found = (
            (at, FsdpGroups.of(self.run, parts)) for at, parts in zip(begins, self.stage.parts, strict=False) if parts
        )
        return [(begin, chunk) for begin, chunk in found for _ in chunk.parts]

    def place(self, start: int, stop: int) -> GroupPlace:
        """Position of consecutive regions in their chunk."""
        begin, chunk = self.chunks[start]
        return GroupPlace.of(chunk, start - begin, stop - begin)

    def unit(self, start: int, stays: Sequence[KeptBuffers | None]) -> Unit:
        """Spans of consecutive regions with these kept tensors; None: those of the run's mode."""
        parts = self.parts[start : start + len(stays)]
        groups = [
            RegionGroup(part=part.under(kept), names=(part.name,)) for part, kept in zip(parts, stays, strict=True)
        ]
        return unit_within(self.run, groups, self.place(start, start + len(stays)))

    # options of parts -------------------------------------------------------------------------------------------------

    @cached_property
    def points(self) -> list[Points]:
        """Options of each part, fewest device bytes first; only layers have several."""
        known: dict[tuple[object, ...], Points] = {}
        found: list[Points] = []
        following = [part for chunk in self.stage.parts if chunk for part in (*chunk[1:], None)]
        for at, (part, after) in enumerate(zip(self.parts, following, strict=True)):
            if not part.is_layer:
                found.append((plain_point(part.program),))
                continue
            after = after if after is not None and after.is_layer else None  # overlaps with its copies
            key = (self.timing.prices(part.layer), part.region, after and after.region)
            if key not in known:
                points, program = self._of_layer(at, after), part.program
                known[key] = points if self.mask else tuple(p for p in points if not reads_mask(program, p.kept))
            found.append(known[key])
        return found

    def _of_layer(self, at: int, following: StageRegion | None) -> Points:
        part = self.parts[at]
        if self._link is None or following is None:
            return layer_points(self.timing.prices(part.layer), part.region, part.policy)
        forward, backward = self._passes(following)
        again = sum(self.timing.prices(following.layer).op_seconds(following.region))
        passes = (forward, backward, backward + again, min(forward, backward) / 2)
        program, seconds = part.program, self.timing.prices(part.layer).op_seconds(part.region)
        return action_points(
            program,
            seconds,
            movable=frozenset(b.index for b in program.buffers if b.nbytes >= LEAST_MOVED),
            kinks=[int(each * self._link.bytes_per_second) for each in passes] if self._link.hides else [],
            peaks=lambda stays: self._peaks(at, stays),
        )

    def _passes(self, part: StageRegion) -> tuple[float, float]:
        """Seconds of a forward, and of a backward without recomputation."""
        seconds = self.timing.item(part).seconds
        return seconds.forward.seconds, seconds.backward_seconds

    # the problem ------------------------------------------------------------------------------------------------------

    @property
    def _fresh(self) -> bool:
        """Whether each backward allocates gradients one by one."""
        load = self.stage.load
        if load.gradients is Gradients.ACCUMULATOR:
            return True
        return load.gradients is not Gradients.UPFRONT and load.micro_batches == 1

    @cached_property
    def _problem(self) -> StepProblem:
        load = self.stage.load
        whole = load.most([load.held(c) if c >= load.order.own else 0 for c in range(load.order.chunks)])
        static = load.fixed + load.state + load.there(Event.BACKWARD) + whole
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

    @cached_property
    def _offers(self) -> tuple[Offer, ...]:
        """Solver for the problem with segments; before it the one without, if the host's budget binds."""
        alone = Offer(self._problem)
        segments = tuple(self._segment_options(self._problem, alone.least_bytes)) if self.mask else ()
        if not segments:
            return (alone,)
        together = Offer(replace(self._problem, segments=segments))
        binds = any(walk.host_budget_bytes is not None for walk in alone.walks)
        return (alone, together) if binds else (together,)

    def _regions(self) -> Iterator[ProblemRegion]:
        """Yield a region for each part; equal ones are computed once."""
        known: dict[tuple[object, ...], ProblemRegion] = {}
        classes: dict[tuple[int, int], str] = {}  # of a chunk, since trainers choose for each of them
        chunks = [chunk for chunk, parts in enumerate(self.stage.parts) for _ in parts]
        for at, (part, chunk, options) in enumerate(zip(self.parts, chunks, self.points, strict=True)):
            copies = self.stage.load.order.most_alive[chunk]
            alike = id(options), copies, part.name == HEAD, self.place(at, at + 1).shards
            if alike not in known:
                known[alike] = self._region(at, options, copies)
            yield replace(known[alike], name=part.name, class_key=classes.setdefault((id(options), chunk), f"{at}"))

    def _region(self, at: int, options: Points, copies: int) -> ProblemRegion:
        plain = self._unit(at, options[-1].kept)
        forward_seconds, backward_seconds = self._passes(self.parts[at])
        return ProblemRegion(
            name="",
            class_key="",
            options=tuple(
                RegionOption(
                    key=point.key,
                    resident_bytes=copies * point.kept_bytes + plain.whole,
                    forward_peak_bytes=forward,
                    backward_peak_bytes=backward,
                    seconds=point.seconds,
                    offloaded_bytes=point.offloaded_bytes,
                )
                for point in options
                for forward, backward in [self._peaks(at, point.kept)]
            ),
            gradient_bytes=plain.gradient if self._fresh else 0,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            copies=copies,
        )

    def _peaks(self, at: int, stays: frozenset[int]) -> tuple[int, int]:
        """Peaks of a part's forward and backward with these kept buffers."""
        unit = self._unit(at, stays)
        return unit.forward_peak, unit.backward_peak if self._fresh else unit.adding_peak

    def _unit(self, at: int, stays: frozenset[int]) -> Unit:
        return self.unit(at, [KeptBuffers(stays) if self.parts[at].is_layer else None])

    def _kept_buffers(self, choice: Choice) -> tuple[KeptBuffers | None, ...]:
        found: list[KeptBuffers | None] = []
        stops = dict(choice.segments)
        while len(found) < len(self.parts):
            at = len(found)
            key = choice.regions[at]
            if at in stops:
                found += self._in_segment(at, stops[at], key)
                continue
            point = next(p for p in self.points[at] if p.key == key)
            found.append(KeptBuffers(point.kept, point.offloaded) if self.parts[at].is_layer else None)
        return tuple(found)

    def _peak(self, choice: Choice) -> int:
        """Peak of the stage's timeline."""
        by_name = {part.name: kept for part, kept in zip(self.parts, self._kept_buffers(choice), strict=True)}
        chosen = [by_name.get(name) for name in self.run.model.layer_names]
        return stage_sizes(self.run, self.stage.index, chosen).peak_bytes

    # segments ---------------------------------------------------------------------------------------------------------

    def _segment_options(self, problem: StepProblem, most_bytes: int) -> Iterator[SegmentOption]:
        """Yield segments as options, by beginning, then by length: NOTE [ Which segments ].

        Args:
            problem: of the stage's single regions.
            most_bytes: the smallest budget that it fits.
        """
        regions = problem.regions
        if self._inputs_go_freely(problem):
            return
        later = list(accumulate((region.gradient_bytes for region in reversed(regions)), initial=0))[::-1]
        for start, end in self._ends.items():
            for stop in range(start + 2, min(start + LONGEST, end) + 1):
                one = self._option(problem, start, stop)
                rise = one.resident_bytes + one.backward_peak_bytes[-1] + later[stop]
                if problem.static_bytes + max(one.forward_peak_bytes, rise) > most_bytes:
                    break
                yield one
                sent = self._sent(start)
                if problem.link is not None and sent >= LEAST_MOVED and stop < end:
                    left = one.resident_bytes - regions[start].copies * sent
                    yield replace(one, key=SENT, resident_bytes=left, offloaded_bytes=sent)

    def _inputs_go_freely(self, problem: StepProblem) -> bool:
        """Whether all inputs can be offloaded within the host's budget and without stalls."""
        link, regions = problem.link, problem.regions
        if link is None:
            return False
        room = link.host_budget_bytes
        if room is not None and sum(regions[r].copies * self._sent(r) for r in self._ends) > room:
            return False
        pairs = [(self._sent(r), regions[r + 1]) for r, end in self._ends.items() if r + 1 < end]
        return not any(link.stall(sent, min(o.forward_seconds, o.backward_seconds)) for sent, o in pairs)

    def _in_segment(self, start: int, stop: int, key: str) -> Iterator[KeptBuffers]:
        """Yield the kept tensors of each layer of a segment."""
        for place, part in enumerate(self.parts[start:stop]):
            kept = kept_by(part.region, FULL)
            moved = kept if key == SENT and place == 0 else frozenset[int]()
            yield KeptBuffers(kept, moved, place, stop - start)

    def _equal_segments(self) -> Iterator[tuple[int, int]]:
        """Yield lengths of equal segments with their peaks, as long as longer ones may have a lower peak."""
        best = None
        longest = max((end - start for start, end in self._ends.items()), default=0)
        for size in range(2, longest + 1):
            mode = Recompute(mode=Mode.EVERY, number=size, whole=self.run.recompute.whole)
            stage = stage_sizes(replace(self.run, recompute=mode), self.stage.index)
            load, needs = stage.load, stage.peak_bytes
            yield size, needs
            best = needs if best is None else min(best, needs)
            if (
                needs - load.most([load.held(chunk) for chunk in range(len(load.chunks))]) >= best
            ):  # the backward's peak grows with the length
                return

    def _cut(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of segments of ``size`` layers, the last of each chunk shorter; at least two layers."""
        for start, end in self._ends.items():
            if start == 0 or self._ends.get(start - 1) != end:  # the first layer of its chunk
                yield from ((at, min(at + size, end)) for at in range(start, end, size) if end - at > 1)

    def segment_seconds(self, start: int, stop: int) -> float:
        """Seconds of recomputing a segment: all of its layers but the last are fully recomputed."""
        parts = self.parts[start:stop]
        spent = sum(sum(self._op_seconds(part)) for part in parts[:-1])
        own = self._op_seconds(parts[-1])
        return spent + sum(own[o] for o in parts[-1].program.recompute_set(kept_by(parts[-1].region, FULL)))

    @cached_property
    def _ends(self) -> dict[int, int]:
        """One past the last layer of its chunk, by layer's position in the stage."""
        found: dict[int, int] = {}
        at = 0
        for chunk in self.stage.parts:
            layers = [at + i for i, part in enumerate(chunk) if part.is_layer]
            found |= dict.fromkeys(layers, layers[-1] + 1 if layers else 0)
            at += len(chunk)
        return found

    @cached_property
    def _kinds(self) -> list[int]:
        """Numbers of the regions; equal ones have the same number."""
        numbers: dict[object, int] = {}
        return [numbers.setdefault((part.layer, part.region), len(numbers)) for part in self.parts]

    def _option(self, problem: StepProblem, start: int, stop: int) -> SegmentOption:
        kinds = (*self._kinds[start:stop], self.place(start, stop).shards)
        if kinds not in self._known_segments:
            unit = self.unit(start, list(self._in_segment(start, stop, HELD)))
            self._known_segments[kinds] = unit, self.segment_seconds(start, stop)
        unit, seconds = self._known_segments[kinds]
        return SegmentOption(
            key=HELD,
            start=start,
            stop=stop,
            resident_bytes=problem.regions[start].copies * unit.resident,
            forward_peak_bytes=unit.forward_peak,
            # the unit's peak counts its own layers' gradients, so it belongs where none of them is allocated yet
            backward_peak_bytes=(*(0,) * (stop - start - 1), unit.backward_peak if self._fresh else unit.adding_peak),
            seconds=seconds,
        )

    def _sent(self, start: int) -> int:
        region = self.parts[start].region
        return region.program.kept_bytes(kept_by(region, FULL))

    def _op_seconds(self, part: StageRegion) -> Sequence[float]:
        return self.timing.prices(part.layer).op_seconds(part.region)

    @cached_property
    def _known_segments(self) -> dict[tuple[object, ...], tuple[Unit, float]]:
        return {}


@lru_cache(maxsize=4096)
def layer_points(prices: PriceModel, region: Region, policy: str) -> Points:
    """Options of a layer without offloading; ``policy``: without a checkpoint."""
    return pareto_frontier(planned_program(region, policy), prices.op_seconds(region))
