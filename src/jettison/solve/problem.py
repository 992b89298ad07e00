"""The choice over a step as an optimization problem: bytes and seconds of every option of every region.

NOTE [ The step's levels ]
A training step runs the root (embedding, head, loss) around a chain of regions r = 0 .. R-1. `static` are the bytes
allocated throughout (parameters, buffers, optimizer state, batch). With one option for each region and for the root,
the allocated bytes peak at the largest of

    forward of r    static + root.held_forward[r]  + sum_{q<r} resident_q + forward_peak_r
    loss            static + root.loss_peak        + sum_q resident_q
    backward of r   static + root.held_backward[r] + sum_{q<=r} resident_q + sum_{q>r} gradient_q + backward_peak_r
    tail            static + root.tail_peak        + sum_q gradient_q
    optimizer       static + optimizer_peak        (all gradients included)

`forward_peak` counts the region's input and output; `resident` counts the input only if the region holds it;
`backward_peak` counts the incoming gradient, recomputed tensors, and this region's own parameter gradients.
The root's figures contain its own parameters' gradients. All bytes are integers.

A segment's regions share one `resident`, which counts from its first region on; its `forward_peak` applies to each of
them on top of the bytes held by regions before the *segment*, so it includes the segment's own input.

NOTE [ Offloaded bytes in flight ]
Offloaded bytes are in no region's `resident`. The runtime (NOTE [ When sources are freed, and when fetches start ])
frees a region's sources when the next region's forward is over, and prefetches them when the next region's backward
begins; tensors of the last region never move. With offloaded_r counted once for all copies in flight, the levels have

    forward of r    + offloaded_{r-1}                 its own is part of its forward_peak
    backward of r   + offloaded_r + offloaded_{r-1}
    loss, tail      nothing

A copy takes offloaded / link seconds each way and overlaps with one pass of the next region:

    stall of r-1    max(0, offloaded_{r-1} / link - forward_seconds_r)
                    + max(0, offloaded_{r-1} / link - backward_seconds_r - recompute_seconds_r)

A segment is one region here: bytes offloaded by the region before it stay during all of it, and return after all of
its backward; in forward the copy is assumed to overlap with the segment's first region only. The segment itself
offloads its input, which counts as its last region's. A pipeline's micro-batches take turns on the link: a stage runs
one pass of one micro-batch at a time, the first region has nothing before it and the last offloads nothing, so no copy
reaches into another pass. Their bytes add up on the host, which is a second budget:

    sum_r copies_r * offloaded_r <= host budget
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedTensor:
    """One offloaded tensor: whether it is an argument or a result of its region, if either, and its position there."""

    nbytes: int
    place: tuple[bool, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionOption:
    """One option of one region. ``key`` names it within its class; seconds are recomputation added to a step.

    ``offloaded_bytes`` are of one micro-batch; ``resident_bytes`` exclude them, both peaks include them. ``sent``:
    these bytes tensor by tensor, in order, for a stand-in that has to offload them.
    """

    key: str
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float
    offloaded_bytes: int = 0
    lasting_bytes: int = 0  # part of ``resident_bytes`` that its backward does not free
    sent: tuple[OffloadedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRegion:
    """One region of the chain. Regions with equal ``class_key`` have options of the same keys, and may exchange them.

    ``forward_seconds`` and ``backward_seconds`` are of its passes without recomputation; copies of the region before
    overlap with them. ``copies``: micro-batches whose offloaded bytes are on the host at once.
    """

    name: str
    class_key: str
    options: tuple[RegionOption, ...]
    gradient_bytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    copies: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of the link to the host, and the host bytes for a step; None: no limit is set. ``hides``: copies
    overlap with the device's work.
    """

    bytes_per_second: float
    host_budget_bytes: int | None = None
    hides: bool = True

    def stall(self, nbytes: int, overlap: float) -> float:
        """Seconds of waiting for a copy one way, if it overlaps with so many seconds of work."""
        return max(0.0, nbytes / self.bytes_per_second - (overlap if self.hides else 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentOption:
    """One checkpoint segment over regions ``start .. stop-1``: only the first one's input is held.

    ``backward_peak_bytes[i]`` belongs to region ``start + i`` and counts the segment's recomputed tensors that are
    still live. ``offloaded_bytes`` as in `RegionOption`.
    """

    key: str
    start: int
    stop: int
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: tuple[int, ...]
    seconds: float
    offloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RootOption:
    """One option of the part around the regions; tuples have one figure for each region."""

    key: str
    held_forward_bytes: tuple[int, ...]
    held_backward_bytes: tuple[int, ...]
    loss_peak_bytes: int
    tail_peak_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProblem:
    """Problem of NOTE [ The step's levels ]. ``optimizer_peak_bytes`` is 0 without an optimizer."""

    static_bytes: int
    optimizer_peak_bytes: int
    regions: tuple[ProblemRegion, ...]
    root: tuple[RootOption, ...]
    segments: tuple[SegmentOption, ...] = field(default=())
    plain_seconds: float = 0.0  # a step without recompute, for the overhead fraction; 0 if unknown
    link: Link | None = None

    def __post_init__(self) -> None:
        sending = [r for r, region in enumerate(self.regions) if any(o.offloaded_bytes for o in region.options)]
        sending += [s.stop - 1 for s in self.segments if s.offloaded_bytes]
        assert not sending or self.link is not None, "there is no link to offload over"
        assert all(r + 1 < len(self.regions) for r in sending), "what the last region saves never moves"


# A choice over a step, and the replay of all its levels: an independent check of the solver ---------------------------


class LevelPhase(StrEnum):
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    TAIL = "tail"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Option keys of the root and of each region; ``segments``: (start, stop), where regions have the segment's key."""

    root: str
    regions: tuple[str, ...]
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Peak bytes allocated during one phase; ``region`` is the region's index, or None while the root runs."""

    phase: LevelPhase
    region: int | None
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceLevels:
    """Every level of a step in order, and the seconds that recomputation and stalls add to it."""

    levels: tuple[Level, ...]
    seconds: float
    resident_bytes: int  # bytes that all regions hold when the loss is computed
    stalled_seconds: float = 0.0  # part of the seconds that wait for copies
    host_bytes: int = 0  # of all micro-batches in flight

    @property
    def peak(self) -> Level:
        return max(self.levels, key=lambda level: level.nbytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.nbytes


def evaluate(problem: StepProblem, choice: Choice) -> ChoiceLevels:
    """Replay NOTE [ The step's levels ] and NOTE [ Offloaded bytes in flight ] for one choice."""
    root = next(option for option in problem.root if option.key == choice.root)
    covers = tuple(chosen_options(problem, choice))
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
    return ChoiceLevels(
        levels=tuple(Level(phase=p, region=r, nbytes=n) for p, r, n in levels),
        seconds=root.seconds + sum(c.seconds for r, c in enumerate(covers) if r == c.start) + stalled,
        resident_bytes=resident,
        stalled_seconds=stalled,
        host_bytes=sum(region.copies * nbytes for region, nbytes in zip(problem.regions, moved, strict=True)),
    )


def _stalled(problem: StepProblem, covers: Sequence[SegmentOption], moved: Sequence[int]) -> float:
    link, regions, total = problem.link, problem.regions, 0.0
    for r, nbytes in enumerate(moved):
        if nbytes:
            assert link is not None, "a problem without a link offloads nothing"
            after = covers[r + 1]
            backward = sum(region.backward_seconds for region in regions[after.start : after.stop])
            total += link.stall(nbytes, regions[r + 1].forward_seconds)
            total += link.stall(nbytes, backward + after.seconds)
    return total


def chosen_options(problem: StepProblem, choice: Choice) -> Iterator[SegmentOption]:
    """The option of each region; a single region's option as a segment of one."""
    stops, r = dict(choice.segments), 0
    while r < len(problem.regions):
        key = choice.regions[r]
        if r in stops:
            option = next(s for s in problem.segments if (s.start, s.stop, s.key) == (r, stops[r], key))
        else:
            o = next(o for o in problem.regions[r].options if o.key == key)
            option = SegmentOption(
                key=key,
                start=r,
                stop=r + 1,
                resident_bytes=o.resident_bytes,
                forward_peak_bytes=o.forward_peak_bytes,
                backward_peak_bytes=(o.backward_peak_bytes,),
                seconds=o.seconds,
                offloaded_bytes=o.offloaded_bytes,
            )
        yield from [option] * (option.stop - option.start)
        r = option.stop
