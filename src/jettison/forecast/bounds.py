"""What every plan of a setup must take, in seconds and in bytes, so that most of them need not be worked out.

NOTE [ What may be left out ]
A candidate is left out of a search only where one of these proves that it cannot be asked for. S is a setup, r a plan.

1. time(S, r) >= time(S, none). A plan adds to backwards, and offloading to both passes; nothing gets shorter. The makespan
   of fixed orders is a longest path, and grows with every step. A reduction of gradients may hide behind what is
   computed again, but each second of it is a second of the same stage's last backward, after which nothing but its own
   weight steps comes: its end moves by as much. With virtual stages backwards of other chunks lie between, and a wait
   may swallow what the reduction gains; there the makespan and the optimizer, without the reduction, are the bound.
2. Let W be one micro-batch's forward and backward through the whole model, w that through its cheapest layer. The busiest
   of p stages works at least as long as their mean: time(S, none) >= n W / p. And the last stage cannot begin before
   the first p - 1 places have done a forward, nor can a step end before they have done a backward after its last:
   time(S, none) >= w (n x layers of the last stage + layers of these places). Where a schedule splits backwards, only
   their forwards count. What ZeRO and sending add is not negative. W and w depend on t, sp, cp, ep and b alone.
3. peak(S, r) >= parameters + state + gradients of the largest stage, which are there together in the optimizer's step
   whatever r is; and that is at least a p-th of what they are without a pipeline, at the same dp, cp and ZeRO stage.
4. A planner holds of each layer no less than the fewest bytes from which backward can be computed again. With these, and
   with nothing for what passes are busy with, a stage's timeline never rises above that of any plan.
5. If none fits, a planner that minimises seconds answers none.

Arithmetic in floating point: bounds are shaved by `SHAVED` of themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from jettison.cost.execution import execution_of
from jettison.forecast.run import Forecast, Stage, forecast
from jettison.forecast.space import Setup
from jettison.forecast.stage_time import Timing
from jettison.forecast.time import Estimate
from jettison.forecast.units import Group
from jettison.formula.region import Region
from jettison.ledger.timeline import Unit, peak
from jettison.plan.frontier import pareto_frontier
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Schedule
from jettison.spec.run import Run

SHAVED: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Of all setups that share a micro-batch and the axes that shard tensors and weights.

    Args:
        whole: W, in seconds.
        forward, backward: w, by pass.
        static_bytes: without a pipeline, by ZeRO stage.
    """

    whole: float
    forward: float
    backward: float
    static_bytes: tuple[int, ...]

    def seconds(self, setup: Setup, depth: int) -> float:
        """Of any plan of a setup of a model of so many layers: rule 2."""
        layout, count = setup.layout, setup.micro_batches
        sizes = layout.layers_per_chunk(depth)
        last, before = sum(sizes[layout.pp - 1 :: layout.pp]), sum(sizes[: layout.pp - 1])
        drained = 0.0 if layout.schedule is Schedule.ZERO_BUBBLE else self.backward
        in_line = count * last * (self.forward + self.backward) + before * (self.forward + drained)
        return max(count * self.whole / layout.pp, in_line)

    def nbytes(self, setup: Setup) -> int:
        """Of any plan of a setup: rule 3."""
        return self.static_bytes[setup.layout.zero] // setup.layout.pp


def bound(run: Run, hardware: Hardware) -> Bound:
    """Of the setups that are like a run in all but p, m, n and ZeRO."""
    alone = replace(run.layout, pp=1, virtual_stages=1, schedule=Schedule.ONE_F_ONE_B, zero=0)
    single = replace(run, layout=alone, micro_batches=1)
    timing = Timing(run=single, hardware=hardware, execution=execution_of(run))
    items = timing.items(0, run.model.depth, 0, None, first=True, last=True)
    layers = [item.seconds for item in items if item.in_layer]
    return Bound(
        whole=sum(item.count * (item.seconds.forward.seconds + item.seconds.backward.seconds) for item in items),
        forward=min(seconds.forward.seconds for seconds in layers),
        backward=min(seconds.backward.seconds for seconds in layers),
        static_bytes=tuple(
            static_bytes(forecast(replace(single, layout=replace(alone, zero=zero)))) for zero in range(4)
        ),
    )  # fmt: skip


def least_seconds(plain: Estimate) -> float:
    """Of any plan of a setup, from the estimate of none: rule 1."""
    if plain.run.layout.virtual_stages == 1:
        return plain.step_seconds
    return plain.replay.makespan + max(stage.optimizer for stage in plain.stages)


def static_bytes(found: Forecast) -> int:
    """Of any plan of a setup, from a forecast of one: rule 3."""
    return max(_static(stage) for stage in found.stages)


def _static(stage: Stage) -> int:
    load = stage.load
    return load.fixed + load.state + load.gradient_bytes


def planner_bytes(plain: Forecast) -> int:
    """Of any choice of a planner, from the forecast of none: rule 4."""
    floors = (
        peak(replace(s.load, chunks=tuple(tuple(_least(g, u) for g, u in _pairs(s, i)) for i in range(len(s.groups)))))
        for s in plain.stages
    )
    return max(moment.nbytes for moment in floors)


def _pairs(stage: Stage, chunk: int) -> list[tuple[Group, Unit]]:
    return list(zip(stage.groups[chunk], stage.load.chunks[chunk], strict=True))


def _least(group: Group, unit: Unit) -> Unit:
    held = _fewest_bytes(group.part.region) if group.part.is_layer else unit.resident
    return replace(unit, resident=held, forward_peak=0, backward_peak=0, adding_peak=0)


@lru_cache(maxsize=4096)
def _fewest_bytes(region: Region) -> int:
    return pareto_frontier(region.program, [1.0] * len(region.program.ops), max_points=2)[0].kept_bytes
