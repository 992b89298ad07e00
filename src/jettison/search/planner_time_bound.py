"""What a planner's choice must take at least, from what a setup takes without recompute: asking it is dear.

NOTE [ What a planner cannot do ]
In the state of the pipeline that holds most, a stage has too many bytes by so many. Each layer can let go of some, for
seconds: for a region, the least that must run again for the bytes that stay, op by op, is the hull of `solve.frontier`,
with the seconds that the planner takes, too. Layers that may let go of any part of any byte, the cheapest bytes first,
take no longer than those that choose: that is r_i, seconds of recompute in one micro-batch's backward on stage i. Where
ZeRO moves weights and gradients beside backwards, what it waited for without recompute comes off: it may hide behind
r_i.

One virtual stage: the schedule is played with each stage's backward longer by r_i. With several it is not known among
which chunks a planner would share r_i. Then, for each device: its first backward waits for a micro-batch's forward
through all places and its backward through all that lie behind, until which the device has done only the forwards that
its order puts before; all else of its work comes later, r_i of each micro-batch included; and after its last backward
come those of the places before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise, takewhile

from jettison.cost.execution import execution_of
from jettison.cost.layer import PriceModel
from jettison.cost.pipeline import schedule_seconds
from jettison.formula.region import Region
from jettison.ledger.schedule import ScheduledPass, Work, order
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stage_time import StageSeconds, Timing
from jettison.predict.time import Estimate
from jettison.search.bounds import least_seconds, with_ends
from jettison.solve.frontier import pareto_frontier
from jettison.spec.layout import Schedule
from jettison.spec.run import Gradients

Segments = tuple[tuple[int, float], ...]
"""Bytes that a layer can let go of and the seconds that they cost, the cheapest first."""
ALL_POINTS = 1 << 20


def planner_seconds(plain: Forecast, timed: Estimate, limit_bytes: int) -> float | None:
    """Of a step under any choice that fits, at least; None: no choice fits.

    Args:
        plain, timed: of the setup without recompute.
    """
    run = plain.run
    timing = Timing(run=run, hardware=timed.hardware, execution=execution_of(run))
    items = timing.items([group for stage in plain.stages for chunk in stage.groups for group in chunk])
    hulls = {item.region: _segments(item.prices, item.region) for item in items if item.in_layer}
    backward = {item.region: item.seconds.backward.seconds for item in items}
    again = []
    for stage, seconds in zip(plain.stages, timed.stages, strict=True):
        repeated = _recompute(stage, limit_bytes, hulls)
        if repeated is None:
            return None
        alone = sum(len(g.names) * backward[g.part.region] for chunk in stage.groups for g in chunk)
        waited = seconds.total.backward.seconds - alone
        again.append(max(0.0, repeated - waited))
    layout = run.layout
    if layout.virtual_stages == 1:
        ends = _played(timed, again)
    else:
        ends = (max(_in_line(timed, i, again[i]) for i in range(layout.pp)),)
    return max(least_seconds(timed), with_ends(timed, ends))


def _played(timed: Estimate, again: list[float]) -> tuple[float, ...]:
    layout, stages = timed.run.layout, timed.stages
    if layout.pp == 1:
        return (timed.run.micro_batches * (sum(stages[0].forward) + sum(stages[0].backward) + again[0]),)
    halves = layout.schedule is Schedule.ZERO_BUBBLE
    backward = [[s.backward[0] - (s.weights[0] if halves else 0.0) + r] for s, r in zip(stages, again, strict=True)]
    weights = [s.weights for s in stages] if halves else None
    forward = [s.forward for s in stages]
    return schedule_seconds(layout.schedule, timed.run.micro_batches, forward, backward, weights).ends


def _in_line(timed: Estimate, device: int, again: float) -> float:
    """The end of an interleaved schedule's first device, by what one device waits for and what it has to do."""
    run, stages = timed.run, timed.stages
    pp, chunks = run.layout.pp, run.layout.virtual_stages
    warm_up = _warm_up(device, pp, min(run.micro_batches, 3 * pp), chunks)
    first = (chunks - 1) * pp + device
    behind = sum(_at(stages, place).backward[place // pp] for place in range(first + 1, pp * chunks))
    start = sum(sum(stage.forward) for stage in stages) + behind
    own = stages[device]
    rest = run.micro_batches * (sum(own.forward) + sum(own.backward) + again) - sum(own.forward[c] for c in warm_up)
    return start + rest + sum(stage.backward[0] for stage in stages[:device])


def _at(stages: tuple[StageSeconds, ...], place: int) -> StageSeconds:
    return stages[place % len(stages)]


@lru_cache(maxsize=4096)
def _warm_up(device: int, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """The chunks of the forwards that come before a device's first backward."""
    steps = order(Schedule.ONE_F_ONE_B, stage=device, stages=stages, micro_batches=micro_batches, virtual_stages=chunks)

    def is_forward(step: ScheduledPass) -> bool:
        return step.work is Work.FORWARD

    return tuple(step.chunk for step in takewhile(is_forward, steps))


def _recompute(stage: Stage, limit_bytes: int, hulls: Mapping[Region, Segments]) -> float | None:
    """r_i; None where everything that layers can let go of is not enough."""
    load = stage.load
    there = load.gradients is Gradients.UPFRONT or load.micro_batches > 1
    base = load.fixed + load.state + (load.gradient_bytes if there else 0) - limit_bytes
    held = [load.held(chunk) for chunk in range(len(load.chunks))]
    states = [[f + w for f, w in zip(o.forward, o.weight, strict=True)] for o in load.occupancies]

    def excess(alive: list[int]) -> int:
        return base + sum(n * (nbytes + load.sent) for n, nbytes in zip(alive, held, strict=True))

    alive = max(states, key=excess)
    missing = excess(alive)
    offers = []
    for count, groups in zip(alive, stage.groups, strict=True):
        for group in groups:
            if count and group.part.is_layer:
                for nbytes, seconds in hulls[group.part.region]:
                    offers.append((seconds / (nbytes * count), nbytes * count * len(group.names)))
    total = 0.0
    for price, nbytes in sorted(offers):
        if missing <= 0:
            break
        total += price * min(nbytes, missing)
        missing -= nbytes
    return total if missing <= 0 else None


@lru_cache(maxsize=1024)
def _segments(prices: PriceModel, region: Region) -> Segments:
    """The hull, from plain autograd on."""
    points = pareto_frontier(region.program, prices.op_seconds(region), max_points=ALL_POINTS)[::-1]
    return tuple((more.kept_bytes - less.kept_bytes, less.seconds - more.seconds) for more, less in pairwise(points))
