"""A step played through on the clock: when each pass of each stage runs, and what the stage holds meanwhile.

NOTE [ Bytes on the clock ]
`memory.step` adds up a stage's passes, since a peak is all that it is asked for. Here every pass of the schedule is
played in its order, at the seconds of `predict.time`, unit by unit: a unit is given its share of the pass
by its regions' seconds, and has the bytes of its worst moment throughout. The sum is NOTE [ What is there when ] of
`memory.step`, so that the highest bytes are the ledger's peak, to the byte. What chunks without a micro-batch hold
of the last one (`StageLoad.received`) is not played. A backward that is split is two passes. Where it is not known what
its first half leaves for its second (`Unit.halves`), each takes what the whole does, and nothing goes before both are
over.

What a layer sends to the host leaves when it has run, beside the next unit's forward, and comes back beside the next
unit's backward. What copies take longer than that is in the pass already; a copy is shown from where it may begin, for
as long as the link takes, behind those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from jettison.core.errors import UsageError
from jettison.cost.collective import host_seconds
from jettison.cost.pipeline import TimedPass, timed_passes
from jettison.memory.schedule import ScheduledPass, Work
from jettison.memory.span import Phase
from jettison.memory.step import Event, StageLoad
from jettison.memory.unit import Unit
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stage_time import StageSeconds, Timing
from jettison.predict.stages import Chunk, RegionGroup
from jettison.predict.time import Estimate, in_halves, works
from jettison.predict.timeline_units import moved_bytes
from jettison.spec.hardware import Hardware
from jettison.spec.precision import Gradients
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPass:
    """One unit's part of a pass, in the order in which a pass goes through them.

    Args:
        share: where it ends, as a share of the pass.
        held: bytes kept for backward, above what the stage held when the pass began; what is being let go of included.
        gradients: the same of gradients that wait for the optimizer.
        transient: above both, at the worst moment.
        moved: bytes that a forward sends to the host when this is over, or that a backward had fetched before it.
    """

    where: str
    phase: Phase
    share: float
    held: int
    gradients: int
    transient: int
    moved: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassProfile:
    """What every pass of one kind through a chunk does: ``kept`` is what it leaves behind, or lets go of if negative.

    ``made`` are gradients that it leaves behind. ``again``: the share of a backward that computes again.
    """

    units: tuple[UnitPass, ...]
    kept: int
    made: int
    moved: int
    again: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedPass:
    """A pass on the clock. ``profile`` is its number among the stage's; ``held`` and ``gradients`` are there before."""

    timed: TimedPass
    profile: int
    held: int
    gradients: int
    host: int


@dataclass(frozen=True, kw_only=True)
class PlayedStage:
    """One stage over a step.

    Args:
        fixed: parameters, and what a framework sets aside; ``state`` is the optimizer's, there from its first step on.
        optimizer: when the optimizer begins and ends; before it, from the last pass on, gradients are reduced.
        optimizer_transient: bytes that the optimizer's own arithmetic takes.
        gradient_bytes: of all gradients.
        left: bytes that a split backward leaves until the next step.
    """

    index: int
    fixed: int
    state: int
    gradient_bytes: int
    optimizer_transient: int
    upfront: bool
    profiles: tuple[PassProfile, ...]
    passes: tuple[PlayedPass, ...]
    optimizer: tuple[float, float]
    left: int = 0

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """Every unit of every pass, and the optimizer."""
        return tuple(self._instants())

    def _instants(self) -> Iterator[Instant]:
        for played in self.passes:
            begin, length = played.timed.start, played.timed.end - played.timed.start
            before = 0.0
            for unit in self.profiles[played.profile].units:
                yield Instant(
                    start=begin + before * length,
                    end=begin + unit.share * length,
                    where=unit.where,
                    phase=unit.phase,
                    micro_batch=played.timed.step.micro_batch,
                    gradients=played.gradients + unit.gradients,
                    held=played.held + unit.held,
                    transient=unit.transient,
                    fixed=self.fixed,
                    state=self.state,
                )
                before = unit.share
        yield Instant(
            start=self.optimizer[0],
            end=self.optimizer[1],
            where="",
            phase=Phase.OPTIMIZER,
            micro_batch=-1,
            gradients=self.gradient_bytes,
            held=self.left,
            transient=self.optimizer_transient,
            fixed=self.fixed,
            state=self.state,
        )

    @property
    def peak(self) -> Instant:
        """The first of the highest, from the second step on."""
        return max(self.instants, key=lambda instant: instant.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """A stretch of time in which a stage's bytes are those of one unit's worst moment."""

    start: float
    end: float
    where: str
    phase: Phase
    micro_batch: int
    fixed: int
    state: int
    gradients: int
    held: int
    transient: int

    @property
    def nbytes(self) -> int:
        """Altogether."""
        return self.fixed + self.state + self.gradients + self.held + self.transient


def play(memory: Forecast, time: Estimate) -> tuple[PlayedStage, ...]:
    """Every stage of a run on the clock; see NOTE [ Bytes on the clock ].

    Args:
        memory, time: of the same run, under the same choice.

    Raises:
        UsageError: micro-batches that are kept whole beside others.
    """
    run = memory.run
    if run.recompute.whole:
        raise UsageError("a step is played with micro-batches that are all alike; got some that are kept whole")
    timing = Timing(run=run, hardware=time.hardware, execution=time.execution, planned=_planned(memory))
    forward, backward, weights = works(run, time.stages)
    lag = timing.sending() if timing.execution.hides_stages and run.layout.pp > 1 else 0.0
    timed = timed_passes(
        run.layout.schedule,
        run.micro_batches,
        forward,
        backward,
        weights,
        transfer=lag,
        group=run.layout.micro_batch_group,
    )
    begins = time.step_seconds - max(stage.optimizer for stage in time.stages)
    return tuple(
        _stage(stage, own, _profiles(run, stage, timing, seconds), (begins, begins + seconds.optimizer))
        for stage, own, seconds in zip(memory.stages, timed, time.stages, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Bytes of one unit on their way to the host, or back."""

    where: str
    micro_batch: int
    to_host: bool
    start: float
    end: float
    nbytes: int


def copies(stage: PlayedStage, hardware: Hardware) -> Iterator[Copy]:
    """What a stage moves over a step, in the order in which it begins; each way has a link of its own."""
    free = {True: 0.0, False: 0.0}
    for played in stage.passes:
        step, begin = played.timed.step, played.timed.start
        length = played.timed.end - begin
        to_host = step.work is Work.FORWARD
        units = stage.profiles[played.profile].units
        for at, unit in enumerate(units):
            if unit.moved:
                beside = unit.share if to_host else (units[at - 2].share if at > 1 else 0.0)
                start = max(free[to_host], begin + beside * length)
                free[to_host] = start + host_seconds(unit.moved, hardware)
                yield Copy(
                    where=unit.where,
                    micro_batch=step.micro_batch,
                    to_host=to_host,
                    start=start,
                    end=free[to_host],
                    nbytes=unit.moved,
                )


def _planned(memory: Forecast) -> bool:
    return any(part.chosen is not None for part in memory.parts)


# profiles of passes ---------------------------------------------------------------------------------------------------

FORWARD, FIRST_BACKWARD, BACKWARD = range(3)
"""Kinds of passes; a chunk's profiles stand in this order, chunk after chunk. In a split backward the last two are its
second halves, and a fourth and a fifth the first halves before and after there are gradients."""
KINDS, SPLIT_KINDS = 3, 5


def _profiles(run: Run, stage: Stage, timing: Timing, seconds: StageSeconds) -> tuple[PassProfile, ...]:
    found: list[PassProfile] = []
    upfront = stage.load.gradients is Gradients.UPFRONT
    shares = list(_again(run, seconds))
    for chunk, units, (first, second) in zip(stage.groups, stage.load.chunks, shares, strict=True):
        rows = list(_by_unit(run, chunk, units, timing))
        halved = any(unit.halves for unit in units)
        found.append(_forward(rows))
        brought = [(*row[:4], 0) for row in rows] if in_halves(run) else rows  # the first half has had it fetched
        for fresh in (not upfront, False):
            found.append(_second_half(rows, fresh, second) if halved else _backward(brought, fresh=fresh, again=second))
        if in_halves(run):
            for fresh in (not upfront, False):
                whole = replace(_backward(rows, fresh=fresh, again=first), kept=0, made=0)
                found.append(_first_half(rows, first) if halved else whole)
    return tuple(found)


def _again(run: Run, seconds: StageSeconds) -> Iterator[tuple[float, float]]:
    """By chunk, the shares of a first half and of a second one that compute again; of a backward, twice its own."""
    if not in_halves(run):
        for chunk, backward in zip(seconds.chunks, seconds.backward, strict=True):
            yield (_share(chunk.again.seconds, backward),) * 2
        return
    late = seconds.late or (False,) * len(seconds.chunks)
    every = zip(seconds.chunks, seconds.again, seconds.inputs, seconds.weights, late, strict=True)
    for chunk, again, inputs, weights, all_late in every:
        first = 0.0 if all_late else chunk.again.seconds
        yield _share(first, inputs), _share(again.seconds - first, weights)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_Row = tuple[str, Unit, float, float, int]  # name, unit, seconds of its forward and its backward, bytes to the host


def _by_unit(run: Run, chunk: Chunk, units: Sequence[Unit], timing: Timing) -> Iterator[_Row]:
    """One row for each name of a unit; a segment of several regions takes their seconds together."""
    regions = [
        (name, *_seconds(group, timing), moved_bytes(run, group.part)) for group in chunk for name in group.names
    ]
    layers = [i for i, group in enumerate(g for g in chunk for _ in g.names) if group.part.is_layer]
    at = 0
    for unit in units:
        for name in unit.names:
            last = name.rpartition(" to ")[2]
            forward = backward = 0.0
            moved = regions[at][3]  # of a segment, what its first layer holds
            while True:
                region, f, b, _ = regions[at]
                forward, backward = forward + f, backward + b
                moved = 0 if layers and at == layers[-1] else moved
                at += 1
                if region == last:
                    break
            yield name, unit, forward, backward, moved


def _seconds(group: RegionGroup, timing: Timing) -> tuple[float, float]:
    """Of each of a group's regions, the mean where segments treat them differently."""
    items, count = timing.items([group]), len(group.names)
    return (
        sum(item.count * item.seconds.forward.seconds for item in items) / count,
        sum(item.count * item.seconds.backward_seconds for item in items) / count,
    )


def _shares(seconds: Sequence[float]) -> list[float]:
    ends = list(accumulate(seconds))
    return [end / ends[-1] for end in ends[:-1]] + [1.0] if ends else []


def _forward(rows: Sequence[_Row]) -> PassProfile:
    units, level, cached = [], 0, 0
    shares = _shares([forward for _, _, forward, _, _ in rows])
    for (name, unit, _, _, moved), share in zip(rows, shares, strict=True):
        units.append(
            UnitPass(
                where=name,
                phase=Phase.LOSS if unit.is_loss else Phase.FORWARD,
                share=share,
                held=level,
                gradients=0,
                transient=unit.forward_peak + cached,
                moved=moved,
            )
        )
        level += unit.resident
        cached += unit.cached
    return PassProfile(units=tuple(units), kept=level, made=0, moved=sum(row[4] for row in rows), again=0.0)


def _backward(rows: Sequence[_Row], *, fresh: bool, again: float) -> PassProfile:
    units, level, made = [], 0, 0
    shares = _shares([backward for _, _, _, backward, _ in reversed(rows)])
    for (name, unit, _, _, moved), share in zip(reversed(rows), shares, strict=True):
        units.append(
            UnitPass(
                where=name,
                phase=Phase.BACKWARD,
                share=share,
                held=level,
                gradients=made,
                transient=unit.backward_peak if fresh else unit.adding_peak,
                moved=moved,
            )
        )
        level -= unit.resident
        made += unit.gradient if fresh else unit.pending
    left = made if fresh else 0
    return PassProfile(units=tuple(units), kept=level, made=left, moved=-sum(row[4] for row in rows), again=again)


def _first_half(rows: Sequence[_Row], again: float) -> PassProfile:
    """As `memory.unit` has it: nothing is freed before all units are over."""
    units, level = [], 0
    shares = _shares([backward for _, _, _, backward, _ in reversed(rows)])
    for (name, unit, _, _, moved), share in zip(reversed(rows), shares, strict=True):
        assert unit.halves is not None
        rise = unit.halves.input_peak
        units.append(_half_unit(name, share, held=level, made=0, rise=rise, moved=moved))
        level += unit.halves.waiting
    detached = sum(unit.halves.detached for _, unit, _, _, _ in rows if unit.halves is not None)
    sent = -sum(row[4] for row in rows)
    return PassProfile(units=tuple(units), kept=level - detached, made=0, moved=sent, again=again)


def _second_half(rows: Sequence[_Row], fresh: bool, again: float) -> PassProfile:
    """From the first unit to the last; of each one's steps, the highest."""
    units, level, made, named = [], 0, 0, 0
    for (name, unit, _, _, _), share in zip(rows, _shares([row[3] for row in rows]), strict=True):
        assert unit.halves is not None
        held, there, rise = level, made, 0
        for step in unit.halves.steps:
            own = step.made if fresh else step.added
            rise = max(rise, level - held + made - there + step.rise + own + named)
            level += step.change
            made += own if fresh else 0
            named = 0 if fresh else own
        units.append(_half_unit(name, share, held=held, made=there, rise=rise))
    half = sum(unit.half for _, unit, _, _, _ in rows)
    return PassProfile(units=tuple(units), kept=-half, made=made, moved=0, again=again)


def _half_unit(name: str, share: float, *, held: int, made: int, rise: int, moved: int = 0) -> UnitPass:
    return UnitPass(
        where=name, phase=Phase.BACKWARD, share=share, held=held, gradients=made, transient=rise, moved=moved
    )


# passes on the clock --------------------------------------------------------------------------------------------------


def _stage(
    stage: Stage, timed: Sequence[TimedPass], profiles: tuple[PassProfile, ...], optimizer: tuple[float, float]
) -> PlayedStage:
    load: StageLoad = stage.load
    upfront = load.gradients is Gradients.UPFRONT
    held, host = load.there(Event.FORWARD), 0
    gradients = load.gradient_bytes if upfront else 0
    added = load.gradients is Gradients.ADDED  # none outlives its backward
    learned: set[int] = set()
    kinds = len(profiles) // len(load.chunks)
    last = Work.WEIGHT if kinds == SPLIT_KINDS else Work.BACKWARD
    passes = []
    for each in timed:
        step = each.step
        kind = _kind(step, step.chunk in learned, last)
        more = load.there(Event.BACKWARD) - load.there(Event.FORWARD) if step.work is last and not learned else 0
        if step.work is last and not added:
            learned.add(step.chunk)
        number = kinds * step.chunk + kind
        profile = profiles[number]
        passes.append(PlayedPass(timed=each, profile=number, held=held, gradients=gradients, host=host))
        sent = {Work.FORWARD: load.sent, last: -load.sent}.get(step.work, 0)
        held += profile.kept + sent + more
        if load.transfers and step.work is last:
            held += load.transfers[step.chunk]
        gradients += 0 if added else profile.made
        host += profile.moved
    return PlayedStage(
        index=stage.index,
        fixed=load.fixed,
        state=load.state,
        gradient_bytes=load.gradient_bytes,
        optimizer_transient=load.optimizer_transient,
        upfront=upfront,
        profiles=profiles,
        passes=tuple(passes),
        optimizer=optimizer,
        left=load.there(Event.STEP),
    )


def _kind(step: ScheduledPass, learned: bool, last: Work) -> int:
    """Of a pass: its number among its chunk's profiles. ``last``: what a micro-batch leaves a chunk with."""
    if step.work is Work.FORWARD:
        return FORWARD
    return (FIRST_BACKWARD if step.work is last else KINDS) + learned
