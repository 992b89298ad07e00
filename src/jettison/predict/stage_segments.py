"""Segments of a stage: runs of its layers that hold the first one's input alone, as options of its problem.

NOTE [ Which segments ]
A run of layers may begin at any layer of a chunk. Its backward rises with its length, so that for each beginning the
lengths are taken from 2 on as long as the run would fit, alone, into the smallest budget that layers by themselves fit:
a longer one cannot lower it. Above `LONGEST` none is offered: what k layers together let go of beyond k layers alone is
k - 1 inputs of k, and from 16 on a longer run adds less than a sixteenth of an input a layer. Where inputs may go to
the host, there is room for them, and their copies hide behind single layers, none is offered: each layer by itself then
holds nothing and computes less again. Where all segments of a
stage are of one length, as a recompute mode has them, every length is looked at: `uniform`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Final

from jettison.cost.flops import everything, repeated
from jettison.memory.unit import Unit
from jettison.predict.forecast import Stage, stage_sizes
from jettison.predict.fsdp2 import FsdpGroups, GroupPlace
from jettison.predict.stage_time import Timing
from jettison.predict.stages import FULL, MIXED, RegionGroup, StageRegion, Staying, kept_by
from jettison.predict.units import unit_within
from jettison.solve.problem import SegmentOption, StepProblem
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

LONGEST: Final = 16
HELD, SENT = "segment", "segment-sent"
"""Keys: the input is on the device, or on the host."""


@dataclass(frozen=True, kw_only=True)
class StageSegments:
    """What may stand in a stage's problem beside the options of its layers; see NOTE [ Which segments ].

    Args:
        fresh: gradients appear one by one in the only backward of a step.
        least_moved: smaller inputs are not sent.
    """

    run: Run
    stage: Stage
    timing: Timing
    fresh: bool
    least_moved: int

    def options(self, problem: StepProblem, most_bytes: int) -> Iterator[SegmentOption]:
        """By beginning, and then by length.

        Args:
            problem: of the stage's regions, one by one.
            most_bytes: the smallest budget that it fits.
        """
        regions = problem.regions
        if self._inputs_go_freely(problem):
            return
        later = list(accumulate((region.gradient_bytes for region in reversed(regions)), initial=0))[::-1]
        for start, longest in self._beginnings:
            for size in range(2, longest + 1):
                stop = start + size
                one = self._option(problem, start, stop)
                rise = one.resident_bytes + one.backward_peak_bytes[-1] + later[stop]
                if problem.static_bytes + max(one.forward_peak_bytes, rise) > most_bytes:
                    break
                yield one
                sent = self._sent(start)
                if problem.link is not None and sent >= self.least_moved and stop < self._ends[start]:
                    left = one.resident_bytes - regions[start].copies * sent
                    yield replace(one, key=SENT, resident_bytes=left, offloaded_bytes=sent)

    def _inputs_go_freely(self, problem: StepProblem) -> bool:
        """To the host, in all of its room, and without waiting."""
        link, regions = problem.link, problem.regions
        if link is None:
            return False
        layers = [start for start, _ in self._beginnings]
        room = link.host_budget_bytes
        if room is not None and sum(regions[r].copies * self._sent(r) for r in layers) > room:
            return False
        beside = [(self._sent(r), regions[r + 1]) for r in layers if r + 1 < self._ends[r]]
        return not any(link.stall(sent, min(o.forward_seconds, o.backward_seconds)) for sent, o in beside)

    def staying(self, start: int, stop: int, key: str) -> Iterator[Staying]:
        """What a planner lets stay of each layer of a segment."""
        for place, part in enumerate(self._parts[start:stop]):
            kept = kept_by(part.region, FULL)
            moved = kept if key == SENT and place == 0 else frozenset[int]()
            yield Staying(kept, moved, place, stop - start)

    def uniform(self) -> Iterator[tuple[int, int]]:
        """Lengths of segments that are all alike, each with its peak, as long as a longer one may need less."""
        best = None
        longest = max((self._ends[start] - start for start, _ in self._beginnings), default=0)
        for size in range(2, longest + 1):
            mode = Recompute(mode=Mode.EVERY, number=size, whole=self.run.recompute.whole)
            stage = stage_sizes(replace(self.run, recompute=mode), self.stage.index)
            load, needs = stage.load, stage.peak_bytes
            yield size, needs
            best = needs if best is None else min(best, needs)
            each = [load.held(chunk) for chunk in range(len(load.chunks))]
            held = max(sum(map(mul, state.alive, each)) for state in load.occupancies)
            if needs - held >= best:  # how far backwards rise grows with the length
                return

    def cut(self, size: int) -> Iterator[tuple[int, int]]:
        """Beginnings and ends of segments of so many layers, the last of each chunk shorter; none of a single layer."""
        for start, _ in self._beginnings:
            end = self._ends[start]
            first = start if start == 0 or self._ends.get(start - 1) != end else None
            if first is not None:
                yield from ((at, min(at + size, end)) for at in range(first, end, size) if end - at > 1)

    def seconds(self, start: int, stop: int) -> float:
        """Of computing a segment again: all but the last layer run through to their outputs."""
        parts = self._parts[start:stop]
        spent = sum(sum(self._op_seconds(part)) for part in parts[:-1])
        own = self._op_seconds(parts[-1])
        return spent + sum(own[o] for o in repeated(parts[-1].region, kept_by(parts[-1].region, FULL)))

    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> list[StageRegion]:
        return [part for chunk in self.stage.parts for part in chunk]

    @cached_property
    def _ends(self) -> dict[int, int]:
        """By layer's place in the stage, one past the last layer of its chunk."""
        found: dict[int, int] = {}
        at = 0
        for chunk in self.stage.parts:
            layers = [at + i for i, part in enumerate(chunk) if part.is_layer]
            found |= dict.fromkeys(layers, layers[-1] + 1 if layers else 0)
            at += len(chunk)
        return found

    @cached_property
    def _chunks(self) -> list[tuple[int, FsdpGroups]]:
        """By region's place in the stage, where its chunk begins, and the regions of that."""
        begins = accumulate((len(parts) for parts in self.stage.parts), initial=0)
        chunks = zip(begins, self.stage.parts, strict=False)
        found = ((begin, FsdpGroups.of(self.run, parts)) for begin, parts in chunks if parts)
        return [(begin, chunk) for begin, chunk in found for _ in chunk.parts]

    @property
    def _beginnings(self) -> Iterator[tuple[int, int]]:
        """Layers, and how many a segment may have that begins there."""
        yield from ((start, min(LONGEST, end - start)) for start, end in self._ends.items())

    @cached_property
    def _kinds(self) -> list[int]:
        """Layers with one number are alike."""
        numbers: dict[object, int] = {}
        return [numbers.setdefault((part.layer, part.region), len(numbers)) for part in self._parts]

    @cached_property
    def _known(self) -> dict[tuple[object, ...], tuple[Unit, float]]:
        return {}

    def _option(self, problem: StepProblem, start: int, stop: int) -> SegmentOption:
        place = self._place(start, stop)
        kinds = (*self._kinds[start:stop], place.shards)
        if kinds not in self._known:
            self._known[kinds] = self._unit(start, stop), self.seconds(start, stop)
        unit, seconds = self._known[kinds]
        backward = unit.backward_peak if self.fresh else unit.adding_peak
        return SegmentOption(
            key=HELD,
            start=start,
            stop=stop,
            resident_bytes=problem.regions[start].copies * unit.resident,
            forward_peak_bytes=unit.forward_peak,
            # the unit's peak counts gradients of its own layers: it is told where none of them is there yet
            backward_peak_bytes=(*(0,) * (stop - start - 1), backward),
            seconds=seconds,
        )

    def _unit(self, start: int, stop: int) -> Unit:
        layers = zip(self._parts[start:stop], self.staying(start, stop, HELD), strict=True)
        groups = [
            RegionGroup(part=replace(part, policy=MIXED, chosen=chosen), names=(part.name,)) for part, chosen in layers
        ]
        return unit_within(self.run, groups, self._place(start, stop))

    def _place(self, start: int, stop: int) -> GroupPlace:
        begin, chunk = self._chunks[start]
        return GroupPlace.of(chunk, start - begin, stop - begin)

    def _sent(self, start: int) -> int:
        region = self._parts[start].region
        return region.program.kept_bytes(kept_by(region, FULL))

    def _op_seconds(self, part: StageRegion) -> Sequence[float]:
        assert len(everything(part.region)) == len(part.region.program.ops)
        return self.timing.prices(part.layer).op_seconds(part.region)
