"""What every candidate must take, in seconds and in bytes, so that most of them need not be worked out.

NOTE [ What may be left out ]
A candidate is left out of a search only where one of these proves that it cannot be asked for. S is a setup, r a plan.

1. time(S, r) >= time(S, none). A plan adds to backwards, and offloading to both passes; nothing gets shorter. The
   makespan of fixed orders is a longest path, and grows with every step. A reduction of gradients may hide behind what
   is computed again, but each second of it is a second of the same stage's last backward, after which nothing but its
   own weight steps comes: its end moves by as much. With virtual stages backwards of other chunks lie between, and a
   wait may swallow what the reduction gains: there a stage's forward, which takes no less than all that could be
   computed again of it, comes off what of its reduction a longer backward could hide.
2. Stage i cannot begin before the first i places have passed a micro-batch forwards, and after its last backward they
   pass that micro-batch backwards, the first stage at the end. So the first stage ends no sooner than ramp(i) + n w(i),
   where w(i) is a micro-batch's work on stage i. Two of these are worked out: the last stage's, from the cheapest
   layer, and the mean of all, in which w is a p-th of the whole model's W. Where a schedule splits backwards, ramps
   have forwards only. To W and w come sends that both sides wait for, and what a transfer of ZeRO costs beside a layer
   at least: what is longer than the longest work, and what it slows the device down while it hides. The first stage's
   end is followed by what of its reduction and gathering cannot hide behind anything, and by the longest optimizer
   step. Segments of several layers compute no less again than `full`; W, w depend on t, sp, cp, ep, b and r alone.
3. peak(S, r) >= parameters + state + gradients of the largest stage, which are there together in the optimizer's step
   whatever r is; and that is at least a p-th of what they are without a pipeline, at the same dp, cp and ZeRO stage.
4. peak(S, r) >= what the layers of the first stage have of these before a backward, and what r holds of them for as
   many micro-batches as the schedule has in flight there; gradients are not there yet in the only backward of a step.
5. If none fits, a planner that minimises seconds answers none. If it does not, see NOTE [ What a planner cannot do ] in
   `planner_time_bound`; of one that may offload nothing but rule 1 is known.

Arithmetic in floating point: bounds are shaved by `SHAVED` of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from jettison.cost.execution import execution_of
from jettison.ledger.schedule import stage_occupancies
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.stage_time import Item, Timing
from jettison.predict.stages import Chunk, kept_by, outline
from jettison.predict.time import Estimate
from jettison.search.space import Setup
from jettison.search.time_bound import Ends, PassSeconds, Pipeline, Sends, ShardSeconds
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Schedule
from jettison.spec.run import Gradients, Mode, Recompute, Run

SHAVED: Final = 1e-6
_TREATMENTS: Final = (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE, Mode.FULL)
"""Plans that do the same with every layer."""
_SEGMENTS: Final = frozenset((*_TREATMENTS, Mode.EVERY))
"""Plans that hold no less of each segment of layers than the least layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBound:
    """Of one stage of ZeRO.

    Args:
        static_bytes: without a pipeline.
        layer_bytes: the same of the layer that has least, gradients aside.
        layer_gradients: and its gradients.
    """

    seconds: ShardSeconds
    static_bytes: int
    layer_bytes: int
    layer_gradients: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBound:
    """Of all setups that share a batch and all axes but virtual stages, and whose plans that is.

    Args:
        plans: by what happens to a layer.
        shards: by ZeRO stage.
        upfront: gradients are there from the start.
        hidden: share of the device that a transfer takes while it hides.
    """

    plans: dict[Mode, PassSeconds]
    shards: tuple[ShardBound, ...]
    sends: Sends
    upfront: bool
    hidden: float

    def rough(self, setup: Setup) -> tuple[float, int]:
        """Seconds and bytes of any plan of a setup; `least` is never below."""
        layout = setup.layout
        whole = self.plans[Mode.NONE].whole
        return setup.micro_batches * whole / layout.pp, self.shards[layout.zero].static_bytes // layout.pp

    def least(self, setup: Setup, depth: int, plans: Sequence[Recompute]) -> list[tuple[float, int]]:
        """Seconds and bytes of plans of a setup of a model of so many layers."""
        layout, count = setup.layout, setup.micro_batches
        sizes = layout.layers_per_chunk(depth)
        pipeline = Pipeline(layout=layout, sizes=sizes, count=count, hidden=self.hidden, sends=self.sends)
        shard = self.shards[layout.zero]
        static = shard.static_bytes // layout.pp
        there = shard.layer_bytes + (shard.layer_gradients if self.upfront or count > 1 else 0)
        first = sizes[:: layout.pp]
        there *= sum(first)
        seconds: dict[Mode, float] = {}
        found = []
        for plan in plans:
            treated = _treated(plan)
            timed = Mode.NONE if plan.whole else treated
            if timed not in seconds:
                seconds[timed] = pipeline.least_seconds(self.plans[timed], shard.seconds)
            nbytes = static
            if plan.mode in _SEGMENTS and not plan.offload:
                held = min(self.plans[timed].held, self.plans[treated].held)  # of micro-batches kept whole or not
                held *= _in_flight(setup, first, plan.number if plan.mode is Mode.EVERY else 1)
                nbytes = max(nbytes, there + held)
            found.append((seconds[timed], max(nbytes, there)))
        return found

    def seconds(self, setup: Setup, depth: int, plan: Recompute) -> float:
        """Of one plan: rules 1 and 2."""
        return self.least(setup, depth, (plan,))[0][0]

    def nbytes(self, setup: Setup, depth: int, plan: Recompute) -> int:
        """Of one plan: rules 3 and 4."""
        return self.least(setup, depth, (plan,))[0][1]


def _treated(plan: Recompute) -> Mode:
    """The plan whose layers take no longer: full for segments, none for what treats layers differently."""
    if plan.mode is Mode.EVERY:
        return Mode.FULL
    return plan.mode if plan.mode in _TREATMENTS else Mode.NONE


def _in_flight(setup: Setup, layers: tuple[int, ...], segment: int) -> int:
    """Args: layers: of each chunk of the first stage."""
    layout = setup.layout
    return _segments_in_flight(
        layout.schedule, layout.pp, setup.micro_batches if layout.pp > 1 else 1, layout.virtual_stages, layers, segment
    )


@lru_cache(maxsize=65536)
def _segments_in_flight(
    schedule: Schedule, stages: int, micro_batches: int, virtual_stages: int, layers: tuple[int, ...], segment: int
) -> int:
    """The most segments of layers, times micro-batches, that the first stage holds before a backward."""
    states = stage_occupancies(
        schedule, stage=0, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    counts = [-(-n // segment) for n in layers]
    return max(sum((f + w) * n for f, w, n in zip(s.forward, s.weight, counts, strict=True)) for s in states)


def bound(run: Run, hardware: Hardware) -> TimeBound:
    """Of the setups that are like a run in all but m, the schedule, layers by stage, and ZeRO."""
    alone = replace(run.layout, pp=1, virtual_stages=1, stage_layers=(), schedule=Schedule.ONE_F_ONE_B, zero=0)
    plain = replace(run, layout=alone, recompute=Recompute())
    stages = range(4) if alone.shards > 1 else (0,)  # alone, none of them shards
    shards = [_shard_bound(replace(plain, layout=replace(alone, zero=zero)), hardware) for zero in stages]
    execution = execution_of(run)
    return TimeBound(
        plans=_plan_bounds(replace(plain, layout=run.layout.within_stage, micro_batches=1), hardware),
        shards=tuple(shards) if len(shards) > 1 else tuple(shards) * 4,
        sends=Sends(
            seconds=Timing(run=run, hardware=hardware, execution=execution).sending(), waited=not execution.hides_stages
        ),
        upfront=run.gradients is Gradients.UPFRONT,
        hidden=hardware.reached.shared if execution.hides_data else 1.0,
    )


def _shard_bound(run: Run, hardware: Hardware) -> ShardBound:
    """Args: run: on one stage, with nothing computed again."""
    (chunk,) = outline(run)[0]
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    layers = [group.part.static for group in chunk if group.part.is_layer]
    total = [(len(group.names), group.part.static) for group in chunk]
    return ShardBound(
        seconds=_shard_seconds(timing, chunk),
        static_bytes=sum(n * (s.parameters + s.state + s.gradients) for n, s in total),
        layer_bytes=min(s.parameters + s.state for s in layers),
        layer_gradients=min(s.gradients for s in layers),
    )


def _shard_seconds(timing: Timing, chunk: Chunk) -> ShardSeconds:
    layout, execution = timing.run.layout, timing.execution
    items = timing.items(chunk)
    layers = [item for item in items if item.in_layer]
    steps = [timing.optimizer((item,)) / item.count for item in items]
    added = [timing.adding(item.region) for item in items]
    shards = layout.zero >= 2 and layout.shards > 1
    return ShardSeconds(
        gathered=min(i.gathered for i in layers) if shards and layout.zero == 3 and layout.resharded else 0.0,
        reduced=min(i.reduced for i in layers) if shards and execution.reduces_each else 0.0,
        added=_ends(items, added),
        added_whole=sum(seconds * item.count for seconds, item in zip(added, items, strict=True)),
        longest_added=max(added),
        end=_behind(timing, items),
        optimizer=_ends(items, steps),
    )


def _ends(items: Sequence[Item], seconds: Sequence[float]) -> Ends:
    """Args: seconds: of each item, of one of those that it stands for."""
    layers = [each for item, each in zip(items, seconds, strict=True) if item.in_layer]
    return Ends(layer=min(layers), first=seconds[0], last=seconds[-1])


def _behind(timing: Timing, items: Sequence[Item]) -> Ends:
    """What is left behind the last backward, whatever hides."""
    layout = timing.run.layout
    if layout.shards == 1:
        return Ends(layer=0.0, first=0.0, last=0.0)
    after = [item.gathered if timing.gathers_after else 0.0 for item in items]
    if layout.zero >= 2 and timing.execution.reduces_each:
        gathered = _ends(items, after)  # and the reduction of the first region is the last
        return replace(gathered, first=gathered.first + items[0].reduced)
    shared = timing.hardware.reached.shared if timing.execution.hides_data else 1.0
    return _ends(items, [item.reduced * shared + each for item, each in zip(items, after, strict=True)])


@lru_cache(maxsize=4096)
def _plan_bounds(run: Run, hardware: Hardware) -> dict[Mode, PassSeconds]:
    """By what happens to a layer; replicas and ZeRO do not matter, nor does a pipeline."""
    return {mode: _plan_bound(replace(run, recompute=Recompute(mode=mode)), hardware) for mode in _TREATMENTS}


def _plan_bound(run: Run, hardware: Hardware) -> PassSeconds:
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    items = timing.items(outline(run)[0][0])
    layers = [item for item in items if item.in_layer]
    passes = [(item.seconds.forward.seconds, item.seconds.backward.seconds) for item in items]
    return PassSeconds(
        whole=sum(item.count * (forward + backward) for item, (forward, backward) in zip(items, passes, strict=True)),
        forward=min(item.seconds.forward.seconds for item in layers),
        backward=min(item.seconds.backward.seconds for item in layers),
        head_forward=passes[-1][0],
        head_backward=passes[-1][1],
        longest=(max(forward for forward, _ in passes), max(backward for _, backward in passes)),
        held=min(i.region.program.kept_bytes(kept_by(i.region, str(run.recompute.mode))) for i in layers),
    )


def least_seconds(plain: Estimate) -> float:
    """Of any plan of a setup, from the estimate of none: rule 1."""
    if plain.run.layout.virtual_stages == 1:
        return plain.step_seconds
    return with_ends(plain, plain.replay.ends, [sum(stage.forward) for stage in plain.stages])


def with_ends(plain: Estimate, ends: Sequence[float], hiding: Sequence[float]) -> float:
    """The same, where backwards are known to end no sooner than so on the first stages.

    Args:
        hiding: seconds of recompute on each stage, behind which the end of its reduction may hide.
    """
    stages = plain.stages
    reduced = (end + s.end - min(s.hideable, most) for end, s, most in zip(ends, stages, hiding, strict=False))
    return max(reduced) + max(stage.optimizer for stage in stages)


def static_bytes(found: Forecast) -> int:
    """Of any plan of a setup, from a forecast of one: rule 3."""
    return max(_static(stage) for stage in found.stages)


def _static(stage: Stage) -> int:
    load = stage.load
    return load.fixed + load.state + load.gradient_bytes
