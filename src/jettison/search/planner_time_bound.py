"""Lower bound on the step time of a planner's choice, from the setup without recomputation: planners are slow.

NOTE [ Least seconds of a planner ]
At the pipeline state with the highest peak, a stage exceeds its limit by some bytes. The last layer of the chunk whose
backward comes next takes one of the few policies that a planner chooses from, each with its seconds, freed bytes and
rise of the backward. The other layers free bytes for seconds, too: the hull of `solve.frontier`, with the planner's
seconds per op, is the least recomputation for the bytes that a region keeps. Layers that may free any fraction of a
tensor, the cheapest bytes first, take no longer than layers that choose policies. In a segment, layers also free their
inputs, except the first one's, and all but the last are recomputed entirely: the same as if each freed a fraction of
its input for that fraction of the seconds that full recomputation takes beyond recomputation from its input. This
holds for equal layers; with different layers inputs are free of cost here. The last layer may end a segment, whose
backward rises by at least its saved bytes. The minimum over that layer's policies is r_i, the seconds of recomputation
in one micro-batch's backward on stage i. If ZeRO's collectives overlap with backwards, the idle time that more compute
would hide is subtracted.

With one virtual stage the schedule is simulated with r_i added to each stage's backward. With several it is unknown how
a planner would divide r_i among chunks. Then, for each device: its first backward waits for a micro-batch's forward
through all places and its backward through all later places; until then the device has run only the forwards that its
order puts first. All its other work comes later, r_i of each micro-batch included; after its last backward come those
of earlier places. Recomputation beyond r_i delays the device's end by as much per micro-batch once that end is later
than without recomputation, and hides no more of the reduction than its own length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from operator import mul

from jettison.core.objects import OnDemand
from jettison.cost.execution import execution_of
from jettison.cost.pipeline import schedule_seconds
from jettison.cost.region import Item, PriceModel
from jettison.formula.region import Region
from jettison.memory.schedule import Occupancy, PipelineShape, Work
from jettison.memory.stage_unit import Unit
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.fsdp import FsdpGroups, GroupPlace, behind_experts, own_experts
from jettison.predict.stages import FULL, Chunk, RegionGroup, chosen_passes, kept_by, pipeline_shape, planned_program
from jettison.predict.time import Estimate, Timing, works
from jettison.search.bounds import least_seconds, with_ends
from jettison.search.stage_choice import layer_points
from jettison.solve.frontier import pareto_frontier
from jettison.spec.layout import Schedule
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run

Segments = tuple[tuple[int, float], ...]
"""Bytes that a layer can free and the seconds that they cost, the cheapest first."""
LayerOption = tuple[int, int, float]
"""A layer's policy: rise of its backward, bytes that it frees, and seconds."""
ChunkRise = tuple[int, tuple[LayerOption, ...]]
"""Least rise of a chunk's backward, and the policies of its last layer, if there is one."""
ALL_POINTS = 1 << 20


def planner_seconds(plain: Forecast, timed: Estimate, limit_bytes: int) -> float | None:
    """Least seconds of a step under any choice that fits; None if no choice fits.

    Args:
        plain, timed: of the setup without recomputation.
    """
    run = plain.run
    timing = Timing(run=run, hardware=timed.hardware, execution=execution_of(run))
    chunks = {id(chunk): chunk for stage in plain.stages for chunk in stage.groups}
    items = {each: timing.items(chunk) for each, chunk in chunks.items()}
    alike = len(run.model.kinds) == 1
    parts = [group.part for chunk in chunks.values() for group in chunk if group.part.is_layer]
    hulls = {part.region: _segments(timing.prices(part.layer), part.region, part.policy, alike) for part in parts}
    waits = {each: _hideable(timing, own) for each, own in items.items()}
    again, hiding = [], []
    known: dict[tuple[int, bool], ChunkRise] = {}
    for stage in plain.stages:
        repeated = _recompute(timing, stage, limit_bytes, hulls, known)
        if repeated is None:
            return None
        again.append(max(0.0, repeated - sum(waits[id(chunk)] for chunk in stage.groups)))
        hiding.append(repeated)
    if run.layout.virtual_stages == 1:
        return max(least_seconds(timed), with_ends(timed, _played(timed, again), hiding))
    lines = [_line_ends(timed, i, again[i]) for i in range(run.layout.pp)]
    first = with_ends(timed, [max(ends for _, ends in lines)], [sum(timed.stages[0].forward)])
    own = [_interleaved(timed, i, lines[i][0], hiding[i]) for i in range(run.layout.pp)]
    return max(least_seconds(timed), first, max(own) + max(stage.optimizer for stage in timed.stages))


def _interleaved(timed: Estimate, device: int, line: float, hiding: float) -> float:
    """End of a device and of its reduction: NOTE [ Least seconds of a planner ], second paragraph.

    Args:
        line: end of its last backward by `_line_ends`, with recomputation in each micro-batch.
        hiding: recomputation of a micro-batch, including the part that idle time hides.
    """
    stage, end, count = timed.stages[device], timed.replay.ends[device], timed.run.micro_batches
    more = max(0.0, end - line) / count  # with this much more recomputation the line decides
    return max(end, line) + stage.end - min(stage.hideable, hiding + more)


def _played(timed: Estimate, again: list[float]) -> tuple[float, ...]:
    run, stages = timed.run, timed.stages
    if run.layout.pp == 1:
        return (run.micro_batches * (sum(stages[0].forward) + sum(stages[0].backward) + again[0]),)
    forward, backward, *weights = works(run, stages)
    for stage, own in enumerate(stages):
        longer = weights[0] if weights and any(own.late) else backward
        longer[stage] = [longer[stage][0] + again[stage]]
    return schedule_seconds(pipeline_shape(run), forward, backward, *weights).ends


def _line_ends(timed: Estimate, device: int, again: float) -> tuple[float, float]:
    """Ends of a device of an interleaved schedule and of the first device, by the device's waiting time and work."""
    run, stages = timed.run, timed.stages
    pp, chunks = run.layout.pp, run.layout.virtual_stages
    warm_up = _warm_up(device, pp, min(run.micro_batches, 3 * pp), chunks)
    first = (chunks - 1) * pp + device
    behind = sum(stages[place % pp].backward[place // pp] for place in range(first + 1, pp * chunks))
    start = sum(sum(stage.forward) for stage in stages) + behind
    own = stages[device]
    rest = run.micro_batches * (sum(own.forward) + sum(own.backward) + again) - sum(own.forward[c] for c in warm_up)
    return start + rest, start + rest + sum(stage.backward[0] for stage in stages[:device])


@lru_cache(maxsize=4096)
def _warm_up(device: int, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Chunks of the forwards before a device's first backward."""
    shape = PipelineShape(Schedule.ONE_F_ONE_B, stages=stages, micro_batches=micro_batches, virtual_stages=chunks)
    return tuple(step.chunk for step in takewhile(lambda step: step.work is Work.FORWARD, shape.order(device)))


def _recompute(
    timing: Timing,
    stage: Stage,
    limit_bytes: int,
    hulls: Mapping[Region, Segments],
    known: dict[tuple[int, bool], ChunkRise],
) -> float | None:
    """Return r_i in seconds; None if layers cannot free enough bytes.

    Args:
        known: cache of `_chunk_rise`, by the chunk's id and whether its gradients exist.
    """
    load = stage.load
    held = [min(load.held(chunk), load.held_half(chunk)) + load.sent for chunk in range(len(load.chunks))]
    above: dict[tuple[int, bool], ChunkRise] = {}
    least: dict[tuple[int, bool], int] = {}
    gradients = OnDemand[tuple[tuple[int, ...], tuple[int, ...]], int](lambda marks: load.learned_bytes(*marks))
    states = []
    for state in load.occupancies:
        if state.step.work is Work.FORWARD:
            continue
        at_work = state.step.chunk, load.adds(state)  # chunk of the next backward, and does it have gradients yet?
        states.append((state, at_work, gradients[state.learned, state.reduced]))
        if at_work not in above:
            chunk, adds = at_work
            key = id(stage.groups[chunk]), adds
            if key not in known:
                finds = adds or timing.run.frees_gradients
                halved = any(unit.halves for unit in load.chunks[chunk])  # neither half rises as the full backward does
                known[key] = (0, ()) if halved else _chunk_rise(timing, stage.groups[chunk], load.chunks[chunk], finds)
            lowest, ways = above[at_work] = known[key]
            least[at_work] = max(lowest, min((rise for rise, _, _ in ways), default=0))

    def level(one: tuple[Occupancy, tuple[int, bool], int]) -> int:
        state, at_work, there = one
        return least[at_work] + there + sum(map(mul, state.alive, held))

    worst, (chunk, adds), learned = max(states, key=level)
    excess = load.fixed + load.state + learned - limit_bytes + sum(map(mul, worst.alive, held))
    lowest, ways = above[chunk, adds]
    cheapest = _cheapest(sorted(_offers(stage, worst.alive, hulls, without=chunk if ways else -1)))
    if not ways:
        return cheapest(excess + lowest)
    found = [
        (seconds, cheapest(excess + max(lowest, rise) - worst.alive[chunk] * released))
        for rise, released, seconds in ways
    ]
    return min((seconds + rest for seconds, rest in found if rest is not None), default=None)


def _chunk_rise(timing: Timing, groups: Chunk, chunk_units: Sequence[Unit], there: bool) -> ChunkRise:
    """Rise of a chunk's backward above the bytes before it.

    Args:
        there: the chunk has gradients already.
    """
    run, level, lowest, units = timing.run, 0, 0, list(chunk_units)
    for at in reversed(range(len(groups))):
        part = groups[at].part
        if part.is_layer:
            floor = level + _fsdp_bytes_of_last(run, groups, at)
            ways = _layer_options(timing.prices(part.layer), part.region, part.policy, run.gradient_rule, there)
            return lowest, tuple((floor + rise, released, seconds) for rise, released, seconds in ways)
        unit = units.pop()  # ends of a model are units of their own
        lowest = max(lowest, level + (unit.adding_peak if there else unit.backward_peak))
        level += (unit.pending if there else unit.gradient) - unit.resident
    return lowest, ()


@lru_cache(maxsize=1024)
def _layer_options(
    prices: PriceModel, region: Region, policy: str, rule: GradientRule, there: bool
) -> tuple[LayerOption, ...]:
    """Policies that a planner chooses from, without the transients of ZeRO; ``policy``: without a checkpoint."""
    program, whole = planned_program(region, policy), kept_by(region, policy)
    everything = chosen_passes(region, whole, rule, False).resident
    found = []
    for point in layer_points(prices, region, policy):
        passes = chosen_passes(region, point.kept, rule, there)
        found.append((passes.backward_peak, everything - passes.resident, point.seconds))
    plain = chosen_passes(region, whole, rule, there)
    again = sum(map(prices.op_seconds(region).__getitem__, program.recompute_set(kept_by(region, FULL))))
    found.append((plain.resident + plain.backward_peak, everything, again))  # it ends a segment
    return tuple(found)


def _offers(
    stage: Stage, alive: Sequence[int], hulls: Mapping[Region, Segments], *, without: int
) -> Iterator[tuple[float, int]]:
    """Offers of all layers but the last one of a chunk: seconds per byte, and bytes."""
    for number, (count, groups) in enumerate(zip(alive, stage.groups, strict=True)):
        chosen = number == without
        for group in reversed([group for group in groups if group.part.is_layer]):
            layers, chosen = len(group.names) - chosen, False
            if count and layers:
                for nbytes, seconds in hulls[group.part.region]:
                    yield seconds / (nbytes * count), nbytes * count * layers


def _cheapest(offers: Sequence[tuple[float, int]]) -> Callable[[int], float | None]:
    """Return a function from bytes to the least seconds that free them, taking any part of each offer.

    It returns None if all offers together are too few bytes.

    Args:
        offers: seconds per byte, and bytes, the cheapest first.
    """
    nbytes = tuple(accumulate((n for _, n in offers), initial=0))
    seconds = tuple(accumulate((price * n for price, n in offers), initial=0.0))

    def cheapest(missing: int) -> float | None:
        if missing <= 0:
            return 0.0
        if missing > nbytes[-1]:
            return None
        at = bisect_left(nbytes, missing) - 1
        return seconds[at] + offers[at][0] * (missing - nbytes[at])

    return cheapest


@lru_cache(maxsize=1024)
def _segments(prices: PriceModel, region: Region, policy: str, alike: bool) -> Segments:
    """Segments of the convex hull, from a layer without a checkpoint to one that keeps nothing.

    Args:
        policy: without a checkpoint.
        alike: all layers of the model are equal.
    """
    spent, program = prices.op_seconds(region), planned_program(region, policy)
    points = pareto_frontier(program, spent, max_points=ALL_POINTS)[::-1]
    hull = [(points[0].kept_bytes - point.kept_bytes, point.seconds) for point in points]
    again = sum(spent) if alike else sum(spent[o] for o in program.recompute_set(kept_by(region, FULL)))
    nothing = points[0].kept_bytes, max(again, hull[-1][1]) if alike else again
    while hull and (hull[-1][0] >= nothing[0] or (len(hull) > 1 and _on_or_above(hull[-2], hull[-1], nothing))):
        hull.pop()
    hull.append(nothing)
    return tuple((more - less, after - before) for (less, before), (more, after) in pairwise(hull))


def _on_or_above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Whether the point in the middle is on or above the line through the others."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])


def _fsdp_bytes_of_last(run: Run, groups: Sequence[RegionGroup], at: int) -> int:
    """Return the least bytes of weights and gradients during the backward of a group's last region."""
    chunk = FsdpGroups.of(run, [group.part for group in groups for _ in group.names])
    stop = sum(len(group.names) for group in groups[: at + 1])
    place = GroupPlace.of(chunk, stop - 1, stop)
    if place.live:
        return place.live[0][1]
    part, behind = place.own[0], 0 if place.behind is None else place.behind.static.reduced
    behind = 0 if run.keeps_unsharded_gradients else behind
    shard = chunk.left(part) if chunk.ranks else 0
    there, ahead = chunk.again(part), chunk.again(place.before)
    if run.layout.flat_parameters:  # a lower bound: reentrant checkpoints prefetch nothing
        return there
    own = own_experts(run, part)
    if own.gathered:
        ahead -= own_experts(run, place.before).gathered if ahead else 0
        after = behind_experts(run, own) - own.gathered
        return there + min(behind, ahead + behind, ahead + after) - shard
    return behind - shard + there + ahead


def _hideable(timing: Timing, items: Sequence[Item]) -> float:
    """Exposed ZeRO transfers of a chunk's backward that more compute would hide."""
    layout = timing.run.layout
    alone = layout.shards == 1 and not timing.run.gathers_parameters
    if not items or layout.zero < 2 or alone or not timing.execution.hides_data:
        return 0.0
    gathers, reduces = layout.zero == 3 and layout.resharded, timing.execution.reduces_each
    waited, _ = timing.loads(items[::-1], gathers=gathers, reduces=reduces, forward=False)
    return waited * (1 - timing.hardware.reached.shared)
