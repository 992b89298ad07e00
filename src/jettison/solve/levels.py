"""A choice over a step, and the replay of every level of it: the independent check of whatever chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from jettison.solve.problem import ProblemRegion, RegionOption, RootOption, SegmentOption, StepProblem


class LevelPhase(StrEnum):
    """Where in a step a level stands."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    TAIL = "tail"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One option key for the root and one a region; ``segments`` are the ``(start, stop)`` that are treated as one.

    Inside a segment the region's key is the segment's.
    """

    root: str
    regions: tuple[str, ...]
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Peak bytes allocated during one phase; ``region`` is the region's index, or None where the root runs."""

    phase: LevelPhase
    region: int | None
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Every level of a step in the order in which they happen, and the seconds that recompute and stalls add to it."""

    levels: tuple[Level, ...]
    seconds: float
    resident_bytes: int  # what all regions hold when the loss is computed
    stalled_seconds: float = 0.0  # of the seconds, those that copies are waited for
    host_bytes: int = 0  # of all micro-batches in flight

    @property
    def peak(self) -> Level:
        """The first of the highest levels."""
        return max(self.levels, key=lambda level: level.nbytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the highest level."""
        return self.peak.nbytes


def evaluate(problem: StepProblem, choice: Choice) -> Levels:
    """Replay NOTE [ The step's levels ] and NOTE [ What is on its way ] for one choice.

    Raises:
        ValueError: the choice does not cover the regions once each, or names an option that is not there.
    """
    root = _root_option(problem, choice.root)
    covers = tuple(_covers(problem, choice))
    moved = [cover.offloaded_bytes if r == cover.stop - 1 else 0 for r, cover in enumerate(covers)]
    stalled = _stalled(problem, covers, moved)
    static, count = problem.static_bytes, len(problem.regions)
    levels: list[tuple[LevelPhase, int | None, int]] = []
    held = 0
    for r, cover in enumerate(covers):
        before = held - (cover.resident_bytes if r > cover.start else 0)
        before += moved[cover.start - 1] if cover.start else 0
        levels.append((LevelPhase.FORWARD, r, static + root.held_forward_bytes[r] + before + cover.forward_peak_bytes))
        held += cover.resident_bytes if r == cover.start else 0
    resident = held
    levels.append((LevelPhase.LOSS, None, static + root.loss_peak_bytes + held))
    gradients = 0
    for r in reversed(range(count)):
        cover = covers[r]
        peak = cover.backward_peak_bytes[r - cover.start] + moved[cover.stop - 1]
        peak += moved[cover.start - 1] if cover.start else 0
        levels.append((LevelPhase.BACKWARD, r, static + root.held_backward_bytes[r] + held + gradients + peak))
        held -= cover.resident_bytes if r == cover.start else 0
        gradients += problem.regions[r].gradient_bytes
    levels.append((LevelPhase.TAIL, None, static + root.tail_peak_bytes + gradients))
    levels.append((LevelPhase.OPTIMIZER, None, static + problem.optimizer_peak_bytes))
    return Levels(
        levels=tuple(Level(phase=p, region=r, nbytes=n) for p, r, n in levels),
        seconds=root.seconds + sum(c.seconds for r, c in enumerate(covers) if r == c.start) + stalled,
        resident_bytes=resident,
        stalled_seconds=stalled,
        host_bytes=sum(region.copies * nbytes for region, nbytes in zip(problem.regions, moved, strict=True)),
    )


def _stalled(problem: StepProblem, covers: Sequence[SegmentOption], moved: Sequence[int]) -> float:
    """Seconds that copies are waited for."""
    link, regions, total = problem.link, problem.regions, 0.0
    for r, nbytes in enumerate(moved):
        if nbytes:
            assert link is not None, "a problem without a link offloads nothing"
            after = covers[r + 1]
            backward = sum(region.backward_seconds for region in regions[after.start : after.stop])
            total += link.stall(nbytes, regions[r + 1].forward_seconds)
            total += link.stall(nbytes, backward + after.seconds)
    return total


def _root_option(problem: StepProblem, key: str) -> RootOption:
    by_key: Mapping[str, RootOption] = {option.key: option for option in problem.root}
    if key not in by_key:
        raise ValueError(f"the root has no option {key!r}; it has {sorted(by_key)}")
    return by_key[key]


def _covers(problem: StepProblem, choice: Choice) -> Iterator[SegmentOption]:
    """For each region what it runs under; a single region's option as a segment of one."""
    count = len(problem.regions)
    if len(choice.regions) != count:
        raise ValueError(f"the choice has {len(choice.regions)} regions, the problem {count}")
    stops = dict(choice.segments)
    if len(stops) != len(choice.segments):
        raise ValueError(f"two segments start at the same region: {choice.segments}")
    r = 0
    while r < count:
        key = choice.regions[r]
        if r in stops:
            cover = _segment(problem, r, stops.pop(r), key)
            if set(choice.regions[r : cover.stop]) != {key}:
                raise ValueError(f"segment {key!r} covers regions {r} .. {cover.stop - 1}, which name other options")
        else:
            cover = _single(r, problem.regions[r], key)
        yield from [cover] * (cover.stop - cover.start)
        r = cover.stop
    if stops:
        raise ValueError(f"segments overlap or lie outside the {count} regions: {choice.segments}")


def _segment(problem: StepProblem, start: int, stop: int, key: str) -> SegmentOption:
    for segment in problem.segments:
        if (segment.start, segment.stop, segment.key) == (start, stop, key):
            return segment
    raise ValueError(f"there is no segment {key!r} over regions {start} .. {stop - 1}")


def _single(index: int, region: ProblemRegion, key: str) -> SegmentOption:
    options: Mapping[str, RegionOption] = {option.key: option for option in region.options}
    if key not in options:
        raise ValueError(f"region {region.name!r} has no option {key!r}; it has {sorted(options)}")
    option = options[key]
    return SegmentOption(
        key=key,
        start=index,
        stop=index + 1,
        resident_bytes=option.resident_bytes,
        forward_peak_bytes=option.forward_peak_bytes,
        backward_peak_bytes=(option.backward_peak_bytes,),
        seconds=option.seconds,
        offloaded_bytes=option.offloaded_bytes,
    )
