"""The slices of a described step: which device does what when.

NOTE [ Slices ]
Passes are the schedule's, at the seconds that `estimate` gives each stage. Within a pass come its regions in order
(second halves in that of `memory.unit`), with what is computed again before each backward, and at the end what the
pass waits for beside them: a transfer to
the next stage, ZeRO's gatherings, copies. Between passes a device waits for other stages. Behind the last, gradients
are reduced, then the optimizer steps. All is cut in whole nanoseconds, so that the slices of a device tile the step.
Where only some micro-batches compute again, each pass has their share of it, as in `estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from jettison.core.errors import UsageError
from jettison.cost.layer import NOTHING
from jettison.cost.pipeline import MOST_EVENTS, TimedPass, timed_passes
from jettison.memory.schedule import ScheduledPass, Work
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stage_items import Item
from jettison.predict.stage_time import StageSeconds, Timing
from jettison.predict.stages import Chunk
from jettison.predict.time import Estimate, recomputing, works
from jettison.spec.layout import Schedule
from jettison.spec.recompute import Mode
from jettison.spec.run import Run


class Kind(StrEnum):
    """Kinds of a device's time slices."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    TRANSFER = "transfer"  # waited for, at the end of a pass
    REDUCE = "reduction of gradients"
    OPTIMIZER = "optimizer"
    WAIT = "waiting for other stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of a device's time. ``step`` is the pass that it is of."""

    kind: Kind
    name: str
    begin_ns: int
    end_ns: int
    step: ScheduledPass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSlices:
    """One pass and the slices that tile it; ``step`` is None behind the last pass of a step."""

    step: ScheduledPass | None
    begin_ns: int
    end_ns: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Seconds of one region under its name; ``inputs`` and ``weights`` are the halves of its backward.

    Args:
        again: computed before the first half; ``repeated``: before the second one.
        groups: as `Item` has them.
    """

    name: str
    forward: float
    again: float
    inputs: float
    weights: float
    repeated: float = 0.0
    groups: int = 0


def nanoseconds(seconds: float) -> int:
    """Whole ones."""
    return round(seconds * 1e9)


def step_slices(memory: Forecast, found: Estimate) -> tuple[tuple[PassSlices, ...], ...]:
    """By stage, a step cut into passes and what comes after them. See NOTE [ Slices ].

    Raises:
        UsageError: so many micro-batches that nobody could look at them.
    """
    run, layout = found.run, found.run.layout
    passes = run.micro_batches * layout.virtual_stages * layout.pp * 3
    if passes > MOST_EVENTS:
        raise UsageError(f"got {run.micro_batches} micro-batches on {layout.pp} stages; a timeline is of fewer: say 64")
    planned = any(part.chosen is not None for part in memory.parts)
    timing = Timing(run=run, hardware=found.hardware, execution=found.execution, planned=planned)
    played = _played(found, timing)
    over = max(own[-1].end + stage.end for own, stage in zip(played, found.stages, strict=True))
    ends = nanoseconds(over), nanoseconds(found.step_seconds)
    return tuple(
        tuple(_device(run, timing, stage, found.stages[stage.index], played[stage.index], ends))
        for stage in memory.stages
    )


def _played(found: Estimate, timing: Timing) -> tuple[tuple[TimedPass, ...], ...]:
    layout = found.run.layout
    forward, backward, weights = works(found.run, found.stages)
    lag = timing.sending() if timing.execution.hides_stages and layout.pp > 1 else 0.0
    schedule = layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B
    return timed_passes(
        schedule,
        found.run.micro_batches,
        forward,
        backward,
        weights,
        transfer=lag,
        group=found.run.layout.micro_batch_group,
    )


def _device(
    run: Run, timing: Timing, stage: Stage, seconds: StageSeconds, played: Sequence[TimedPass], ends: tuple[int, int]
) -> Iterator[PassSlices]:
    """One stage's passes and what follows them.

    Args:
        ends: of all reductions, and of the step.
    """
    share = recomputing(run, stage.index)
    regions = [list(_regions(run, timing, chunk, share)) for chunk in stage.groups]
    if seconds.late:
        both = zip(regions, seconds.late, strict=True)
        regions = [list(_late(own) if late else _repeating(own, _segment(run))) for own, late in both]
    split = any(one.step.work is Work.WEIGHT for one in played)
    halved = [any(unit.halves for unit in units) for units in stage.load.chunks]
    now = 0
    for one in played:
        begin, end = max(now, nanoseconds(one.start)), nanoseconds(one.end)
        waited = (_slice(Kind.WAIT, "waiting for other stages", now, begin),) if begin > now else ()
        if waited:
            yield PassSlices(step=None, begin_ns=now, end_ns=begin, slices=waited)
        onwards = one.step.work is Work.FORWARD or (one.step.work is Work.WEIGHT and halved[one.step.chunk])
        in_turn = regions[one.step.chunk] if onwards else regions[one.step.chunk][::-1]
        slices = tuple(_pass(one.step, in_turn, split, begin, end))
        yield PassSlices(step=one.step, begin_ns=begin, end_ns=end, slices=slices)
        now = end
    yield PassSlices(step=None, begin_ns=now, end_ns=ends[1], slices=tuple(_last(now, played[-1], seconds, ends)))


def _last(now: int, played: TimedPass, seconds: StageSeconds, ends: tuple[int, int]) -> Iterator[Slice]:
    over, end = ends
    optimizer = min(end, over + nanoseconds(seconds.optimizer))
    reduced = min(over, nanoseconds(played.end + seconds.end))
    for kind, name, until in (
        (Kind.REDUCE, "reduction of gradients", reduced),
        (Kind.WAIT, "waiting for other stages", over),
        (Kind.OPTIMIZER, "optimizer step", optimizer),
        (Kind.WAIT, "waiting for other stages", end),
    ):
        if until > now or kind is Kind.OPTIMIZER:
            yield _slice(kind, name, now, max(now, until))
        now = max(now, until)


def _slice(kind: Kind, name: str, begin: int, end: int, step: ScheduledPass | None = None) -> Slice:
    return Slice(kind=kind, name=name, begin_ns=begin, end_ns=end, step=step)


def _pass(step: ScheduledPass, regions: Sequence[_Region], split: bool, begin: int, end: int) -> Iterator[Slice]:
    """The slices of one pass, in whole nanoseconds from its begin to its end; ``regions``: in their turn."""
    at, elapsed = begin, 0.0
    for kind, name, seconds in _works(step.work, regions, split):
        elapsed += seconds
        until = min(end, begin + nanoseconds(elapsed))
        if until > at or kind is not Kind.RECOMPUTE:
            yield _slice(kind, name, at, until, step)
        at = until
    if at < end:
        yield _slice(Kind.TRANSFER, "transfers waited for", at, end, step)


def _works(work: Work, regions: Sequence[_Region], split: bool) -> Iterator[tuple[Kind, str, float]]:
    if work is Work.FORWARD:
        yield from ((Kind.FORWARD, region.name, region.forward) for region in regions)
        return
    for region in regions:
        if work is Work.WEIGHT:
            if region.repeated:
                yield Kind.RECOMPUTE, region.name, region.repeated
            yield Kind.BACKWARD, region.name, region.weights
            continue
        if region.again:
            yield Kind.RECOMPUTE, region.name, region.again
        yield Kind.BACKWARD, region.name, region.inputs + (0.0 if split else region.weights)


def _regions(run: Run, timing: Timing, chunk: Chunk, share: float) -> Iterator[_Region]:
    """A chunk's regions in order, by name."""
    segment = _segment(run)
    for group in chunk:
        items = timing.items((group,))
        for position, name in enumerate(group.names):
            item = _item_at(items, position, segment, len(group.names))
            seconds = NOTHING if item is None else item.seconds
            yield _Region(
                name=name,
                forward=seconds.forward.seconds,
                again=seconds.again.seconds * share,
                inputs=seconds.inputs.seconds,
                weights=seconds.weights.seconds,
                groups=0 if item is None else item.groups,
            )


def _segment(run: Run) -> int:
    return run.recompute.number if run.recompute.mode is Mode.EVERY else 1


def _late(regions: Sequence[_Region]) -> Iterator[_Region]:
    """Regions of a chunk whose first half does nothing: see `StageSeconds.late`."""
    for one in regions:
        yield replace(one, again=0.0, inputs=0.0, weights=one.inputs + one.weights, repeated=one.again)


def _repeating(regions: Sequence[_Region], size: int) -> Iterator[_Region]:
    """Add the recomputation of checkpoints over ``size`` layers, for each group of weights."""
    layers = [one for one in regions if one.groups]
    cut = [layers[at : at + size] for at in range(0, len(layers), size)]
    again = {one.name: sum(each.again for each in own) for own in cut for one in own}
    for one in regions:
        yield replace(one, repeated=one.groups * again[one.name]) if one.groups else one


def _item_at(items: Sequence[Item], position: int, segment: int, count: int) -> Item | None:
    """Which of a group's items a position is of: of a segment, all but the last are computed again whole."""
    if len(items) < 2:
        return items[0] if items else None
    inner, last = items
    is_last = position % segment == segment - 1 and position < count
    return last if is_last else inner
