"""Timeline of a described step: time slices of each device.

NOTE [ Slices ]
Passes have the schedule's order and `estimate`'s seconds of each stage. A pass consists of its regions in order (weight
gradients in that of `memory.stage_unit`), with recomputation before each backward, and at its end exposed transfers: to
the next stage, ZeRO's all-gathers, copies. Between passes a device waits for other stages. After the last pass
gradients are reduced, then the optimizer steps. Times are integer nanoseconds, so that the slices of a device tile the
step. If only some micro-batches recompute, each pass has the average recomputation, as in `estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from jettison.core.errors import UsageError
from jettison.cost.collective import host_seconds
from jettison.cost.pipeline import MOST_EVENTS, TimedPass, timed_passes
from jettison.memory.schedule import ScheduledPass, Work
from jettison.memory.stage_unit import Unit
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stages import Chunk, pipeline_shape
from jettison.predict.time import Estimate, StageSeconds, Timing, recomputing, works
from jettison.spec.hardware import Hardware
from jettison.spec.run import Run


class SliceKind(StrEnum):
    """Kinds of a device's time slices."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    TRANSFER = "transfer"  # exposed, at the end of a pass
    REDUCE = "reduction of gradients"
    OPTIMIZER = "optimizer"
    WAIT = "waiting for other stages"


class Slice(NamedTuple):
    """Time slice of a device."""

    kind: SliceKind
    name: str
    begin_ns: int
    end_ns: int


class PassSlices(NamedTuple):
    """One pass and the slices that tile it; ``step`` is None between passes and after a step's last one."""

    step: ScheduledPass | None
    begin_ns: int
    end_ns: int
    slices: tuple[Slice, ...]

    def times(self, units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
        """Return begin and end of each unit of a chunk: from its regions' first slice to their last."""
        slices = [one for one in self.slices if one.kind is not SliceKind.TRANSFER]
        names = list(dict.fromkeys(one.name for one in slices))
        work = None if self.step is None else self.step.work
        if work is Work.BACKWARD or (work is Work.WEIGHT and not any(unit.halves for unit in units)):
            names.reverse()
        in_order = iter(names)
        owner = {next(in_order): name for unit in units for name in unit.names for _ in range(unit.regions)}
        found: dict[str, tuple[int, int]] = {}
        for one in slices:
            name = owner[one.name]
            found[name] = found.get(name, (one.begin_ns, 0))[0], one.end_ns
        return found


_Works = Mapping[Work, Sequence[tuple[SliceKind, float]]]
"""Seconds of a region in each pass, in order."""


def nanoseconds(seconds: float) -> int:
    """Round seconds to integer nanoseconds."""
    return round(seconds * 1e9)


def step_slices(memory: Forecast, found: Estimate) -> tuple[tuple[PassSlices, ...], ...]:
    """Return the passes of a step and its end, by stage. See NOTE [ Slices ]. Raise `UsageError` for too many
    micro-batches for a readable timeline.

    Args:
        memory, found: of the same run and plan.
    """
    run, layout = found.run, found.run.layout
    if run.micro_batches * layout.virtual_stages * layout.pp * 3 > MOST_EVENTS:
        raise UsageError(f"got {run.micro_batches} micro-batches on {layout.pp} stages; give fewer, such as 64")
    planned = any(part.chosen is not None for part in memory.parts)
    timing = Timing(run=run, hardware=found.hardware, execution=found.execution, planned=planned)
    lag = timing.sending() if timing.execution.hides_stages else 0.0
    played = timed_passes(pipeline_shape(run), *works(run, found.stages), transfer=lag)
    over = max(own[-1].end + stage.end for own, stage in zip(played, found.stages, strict=True))
    ends = nanoseconds(over), nanoseconds(found.step_seconds)
    return tuple(
        tuple(_device(run, timing, stage, found.stages[stage.index], played[stage.index], ends))
        for stage in memory.stages
    )


def _device(
    run: Run, timing: Timing, stage: Stage, seconds: StageSeconds, played: Sequence[TimedPass], ends: tuple[int, int]
) -> Iterator[PassSlices]:
    """Passes of one stage and the end of the step.

    Args:
        ends: of all reductions, and of the step.
    """
    share, split = recomputing(run, stage.index), any(one.step.work is Work.WEIGHT for one in played)
    found = zip(stage.groups, seconds.late, strict=True)
    regions = [list(_regions(timing, chunk, share, split=split, late=late)) for chunk, late in found]
    halved = [any(unit.halves for unit in units) for units in stage.load.chunks]
    now = 0
    for one in played:
        begin, end = max(now, nanoseconds(one.start)), nanoseconds(one.end)
        if begin > now:
            yield PassSlices(None, now, begin, (Slice(SliceKind.WAIT, str(SliceKind.WAIT), now, begin),))
        onwards = one.step.work is Work.FORWARD or (one.step.work is Work.WEIGHT and halved[one.step.chunk])
        in_turn = regions[one.step.chunk] if onwards else regions[one.step.chunk][::-1]
        yield PassSlices(one.step, begin, end, tuple(_pass(in_turn, one.step.work, begin, end)))
        now = end
    yield PassSlices(None, now, ends[1], tuple(_last(now, played[-1], seconds, ends)))


def _last(now: int, played: TimedPass, seconds: StageSeconds, ends: tuple[int, int]) -> Iterator[Slice]:
    over, end = ends
    for kind, until in (
        (SliceKind.REDUCE, min(over, nanoseconds(played.end + seconds.end))),
        (SliceKind.WAIT, over),
        (SliceKind.OPTIMIZER, min(end, over + nanoseconds(seconds.optimizer))),
        (SliceKind.WAIT, end),
    ):
        if until > now or kind is SliceKind.OPTIMIZER:
            yield Slice(kind, "optimizer step" if kind is SliceKind.OPTIMIZER else str(kind), now, max(now, until))
        now = max(now, until)


def _pass(regions: Sequence[tuple[str, _Works]], work: Work, begin: int, end: int) -> Iterator[Slice]:
    at, elapsed = begin, 0.0
    for kind, name, seconds in ((kind, name, seconds) for name, own in regions for kind, seconds in own[work]):
        elapsed += seconds
        until = min(end, begin + nanoseconds(elapsed))
        if until > at or kind is not SliceKind.RECOMPUTE:
            yield Slice(kind, name, at, until)
        at = until
    if at < end:
        yield Slice(SliceKind.TRANSFER, "transfers waited for", at, end)


def _regions(timing: Timing, chunk: Chunk, share: float, *, split: bool, late: bool) -> Iterator[tuple[str, _Works]]:
    """Yield names and seconds of a chunk's regions.

    Args:
        split: passes for gradients of weights are separate; ``late``: they have all of the backward, see
            `StageSeconds.late`. Otherwise each group of weights recomputes its checkpoint.
    """
    items, size, at = [item for item in timing.items(chunk) for _ in range(item.count)], timing.run.recompute.segment, 0
    again = [item.seconds.again.seconds * share for item in items if item.groups]
    for name, item in zip((name for group in chunk for name in group.names), items, strict=True):
        forward, ahead, inputs, weights = (each.seconds for each in item.seconds)
        first, second = ahead * share, 0.0
        if late:
            first, second, inputs, weights = 0.0, first, 0.0, inputs + weights
        elif item.groups:
            begin = at - at % size
            second, at = item.groups * sum(again[begin : begin + size]), at + 1
        backward = inputs if split else inputs + weights
        yield (
            name,
            {
                Work.FORWARD: [(SliceKind.FORWARD, forward)],
                Work.BACKWARD: [(SliceKind.RECOMPUTE, first), (SliceKind.BACKWARD, backward)],
                Work.WEIGHT: [(SliceKind.RECOMPUTE, second), (SliceKind.BACKWARD, weights)],
            },
        )


# copies to the host ---------------------------------------------------------------------------------------------------


class HostCopy(NamedTuple):
    """Copy of a unit's bytes to the host, or back."""

    name: str
    micro_batch: int
    to_host: bool
    begin_ns: int
    end_ns: int
    nbytes: int


def host_copies(
    stage: Stage, passes: Sequence[PassSlices], sent: Sequence[Mapping[str, int]], hardware: Hardware
) -> Iterator[HostCopy]:
    """Yield a stage's copies in a step; each direction is a queue.

    A unit's bytes are sent after its forward, and prefetched during the backward before its own.

    Args:
        sent: `units.sent_to_host` of each chunk.
    """
    free = {True: 0, False: 0}
    for played in passes:
        step = played.step
        if step is None or step.work is Work.WEIGHT or not sent[step.chunk]:
            continue
        to_host = step.work is Work.FORWARD
        ready = played.begin_ns
        for name, (begin, end) in played.times(stage.load.chunks[step.chunk]).items():
            if nbytes := sent[step.chunk].get(name, 0):
                start = max(free[to_host], end if to_host else ready)
                free[to_host] = start + nanoseconds(host_seconds(nbytes, hardware))
                yield HostCopy(name, step.micro_batch, to_host, start, free[to_host], nbytes)
            ready = begin
