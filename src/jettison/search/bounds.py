"""What every candidate must take, in seconds and in bytes, so that most of them need not be worked out.

NOTE [ What may be left out ]
A candidate is left out of a search only where one of these proves that it cannot be asked for. S is a setup, r a plan.

1. time(S, r) >= time(S, none). A plan adds to backwards, and offloading to both passes; nothing gets shorter. The
   makespan of fixed orders is a longest path, and grows with every step. A reduction of gradients may hide behind what
   is computed again, but each second of it is a second of the same stage's last backward, after which nothing but its
   own weight steps comes: its end moves by as much. With virtual stages backwards of other chunks lie between, and a
   wait may swallow what the reduction gains: there a stage's forward, which takes no less than all that could be
   computed again of it, comes off what of its reduction a longer backward could hide.
2. Let W be one micro-batch's forward and backward through the whole model under r, w that through its cheapest layer.
   The busiest of p stages works at least as long as their mean: time(S, r) >= n W / p. And the last stage cannot begin
   before the first p - 1 places have done a forward, nor can a step end before they have done a backward after its
   last: time(S, r) >= w (n x layers of the last stage + layers of these places). Where a schedule splits backwards,
   only their forwards count. What ZeRO, offloading and sending add is not negative. W and w depend on t, sp, cp, ep, b
   and r alone; segments of several layers compute no less again than `full`.
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
from jettison.predict.forecast import Forecast, Stage, forecast_sizes
from jettison.predict.stage_time import Timing
from jettison.predict.stages import kept_by, outline
from jettison.predict.time import Estimate
from jettison.search.space import Setup
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Schedule
from jettison.spec.run import Gradients, Mode, Recompute, Run

SHAVED: Final = 1e-6
_TREATMENTS: Final = (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE, Mode.FULL)
"""Plans that do the same with every layer."""
_SEGMENTS: Final = frozenset((*_TREATMENTS, Mode.EVERY))
"""Plans that hold no less of each segment of layers than the least layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBound:
    """Of one plan.

    Args:
        whole: W, in seconds.
        forward, backward: w, by pass.
        held: of a micro-batch, by the layer that holds least, in bytes.
    """

    whole: float
    forward: float
    backward: float
    held: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBound:
    """Of all setups that share a micro-batch and the axes that shard tensors and weights.

    Args:
        plans: by what happens to a layer.
        static_bytes: without a pipeline, by ZeRO stage.
        layer_bytes: the same of the layer that has least, gradients aside.
        layer_gradients: and its gradients.
        upfront: gradients are there from the start.
    """

    plans: dict[Mode, PlanBound]
    static_bytes: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    layer_gradients: tuple[int, ...]
    upfront: bool

    def least(self, setup: Setup, depth: int, plans: Sequence[Recompute]) -> list[tuple[float, int]]:
        """Seconds and bytes of plans of a setup of a model of so many layers."""
        layout, count = setup.layout, setup.micro_batches
        sizes = layout.layers_per_chunk(depth)
        last, before = sum(sizes[layout.pp - 1 :: layout.pp]), sum(sizes[: layout.pp - 1])
        drains = layout.schedule is not Schedule.ZERO_BUBBLE
        static = self.static_bytes[layout.zero] // layout.pp
        there = self.layer_bytes[layout.zero]
        if self.upfront or count > 1:
            there += self.layer_gradients[layout.zero]
        first = sizes[:: layout.pp]
        there *= sum(first)
        found = []
        for plan in plans:
            of_plan = self.plans[Mode.NONE if plan.whole else _treated(plan)]
            in_line = count * last * (of_plan.forward + of_plan.backward)
            in_line += before * (of_plan.forward + (of_plan.backward if drains else 0.0))
            nbytes = static
            if plan.mode in _SEGMENTS and not plan.offload:
                held = min(of_plan.held, self.plans[_treated(plan)].held)  # of micro-batches kept whole or not
                held *= _in_flight(setup, first, plan.number if plan.mode is Mode.EVERY else 1)
                nbytes = max(nbytes, there + held)
            found.append((max(count * of_plan.whole / layout.pp, in_line), max(nbytes, there)))
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
    """Of the setups that are like a run in all but p, m, n and ZeRO."""
    alone = replace(run.layout, pp=1, virtual_stages=1, stage_layers=(), schedule=Schedule.ONE_F_ONE_B, zero=0)
    single = replace(run, layout=alone, micro_batches=1)
    found = [forecast_sizes(replace(single, layout=replace(alone, zero=zero))) for zero in range(4)]
    layers = [[group.part.static for group in f.stages[0].groups[0] if group.part.is_layer] for f in found]
    return TimeBound(
        plans=_plan_bounds(replace(single, layout=run.layout.within_stage), hardware),
        static_bytes=tuple(static_bytes(f) for f in found),
        layer_bytes=tuple(min(s.parameters + s.state for s in each) for each in layers),
        layer_gradients=tuple(min(s.gradients for s in each) for each in layers),
        upfront=run.gradients is Gradients.UPFRONT,
    )


@lru_cache(maxsize=4096)
def _plan_bounds(run: Run, hardware: Hardware) -> dict[Mode, PlanBound]:
    """By what happens to a layer; replicas and ZeRO do not matter, nor does a pipeline."""
    return {mode: _plan_bound(replace(run, recompute=Recompute(mode=mode)), hardware) for mode in _TREATMENTS}


def _plan_bound(run: Run, hardware: Hardware) -> PlanBound:
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    items = timing.items(outline(run)[0][0])
    layers = [item for item in items if item.in_layer]
    return PlanBound(
        whole=sum(item.count * (item.seconds.forward.seconds + item.seconds.backward.seconds) for item in items),
        forward=min(item.seconds.forward.seconds for item in layers),
        backward=min(item.seconds.backward.seconds for item in layers),
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
