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
4. peak(S, r) >= what the first stage has of these before any backward (gradients of the chunks that have learned, where
   they appear one by one), what r holds of its layers for as many micro-batches as the schedule has in flight there,
   and how far the backward that comes next rises above that: it begins with the last layer, or the last segment, of
   its chunk, and finds that chunk's gradients there or not.
5. If none fits, a planner that minimises seconds answers none. If it does not, see NOTE [ What a planner cannot do ] in
   `planner_time_bound`; of one that may offload nothing but rule 1 is known.

Arithmetic in floating point: bounds are shaved by `SHAVED` of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from jettison.cost.execution import execution_of
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.fsdp2 import own_experts
from jettison.predict.passes import passes_of
from jettison.predict.stage_time import Timing
from jettison.predict.stages import FULL, Chunk, kept_by, outline
from jettison.predict.time import Estimate
from jettison.search.memory_bound import LayerBytes, Parts, ShardBytes, in_flight
from jettison.search.space import Setup
from jettison.search.time_bound import PassSeconds, Pipeline, Sends, ShardSeconds, pass_seconds, shard_seconds
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Schedule
from jettison.spec.precision import GradientRule, Gradients
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

SHAVED: Final = 1e-6
_TREATMENTS: Final = (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE, Mode.FULL)
"""Plans that do the same with every layer."""
_SEGMENTS: Final = frozenset((*_TREATMENTS, Mode.EVERY))
"""Plans that hold no less of each segment of layers than the least layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBound:
    """Of one plan.

    Args:
        held: of a micro-batch, by the layer that holds least, in bytes.
        rise: of the layer whose backward rises least above what is held before it, where gradients are there.
    """

    seconds: PassSeconds
    held: int
    rise: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBound:
    """Of one stage of ZeRO."""

    seconds: ShardSeconds
    nbytes: ShardBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBackward:
    """What is worked out where a fullest state comes before it, and not again behind it.

    Args:
        inner: as `_inner` has it.
        adds: it finds gradients there, or goes as one that does.
    """

    inner: Run
    rule: GradientRule
    adds: bool

    def rise(self, mode: Mode) -> int:
        """As `PlanBound.rise`."""
        return _least_rise(self.inner, mode, self.rule, self.adds)

    @property
    def plain(self) -> LayerBytes:
        """As `Bounds.plain`."""
        return _layer_bytes(self.inner, self.rule, self.adds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Of all setups that share a batch and all axes but virtual stages.

    Args:
        plans: by what happens to a layer.
        plain: a layer of which everything stays, and whose gradients are there.
        first: of a chunk's first backward, in which they may appear.
        upfront: gradients are there from the start.
        hidden: share of the device that a transfer takes while it hides.
    """

    plans: dict[Mode, PlanBound]
    plain: LayerBytes
    first: FirstBackward
    shard: ShardBound
    sends: Sends
    upfront: bool
    hidden: float

    def of_any(self, setup: Setup, depth: int) -> tuple[float, int]:
        """Seconds and bytes of every plan of a setup of a model of so many layers."""
        seconds = self._pipeline(setup, depth).least_seconds(self.plans[Mode.NONE].seconds, self.shard.seconds)
        return seconds, self._base(setup, depth)

    def least(self, setup: Setup, depth: int, plans: Sequence[Recompute]) -> list[tuple[float, int]]:
        """Seconds and bytes of each of these plans."""
        pipeline, base = self._pipeline(setup, depth), self._base(setup, depth)
        first, alone, own = pipeline.sizes[:: setup.layout.pp], setup.layout.pp == 1, self.shard.nbytes
        always = own.settled.of(sum(first), alone=alone) + (own.gathered if all(first) else 0)
        entrance = own.gradients.of(0, alone=alone)
        seconds: dict[Mode, float] = {}
        found = []
        for plan in plans:
            treated = _treated(plan)
            timed = Mode.NONE if plan.whole else treated
            if timed not in seconds:
                seconds[timed] = pipeline.least_seconds(self.plans[timed].seconds, self.shard.seconds)
            nbytes = base
            if plan.mode in _SEGMENTS and not plan.offload:
                nbytes = max(base, always + self._in_backwards(setup, first, plan, treated, entrance))
            found.append((seconds[timed], nbytes))
        return found

    def _pipeline(self, setup: Setup, depth: int) -> Pipeline:
        return Pipeline(
            layout=setup.layout,
            sizes=setup.layout.layers_per_chunk(depth),
            count=setup.micro_batches,
            hidden=self.hidden,
            sends=self.sends,
        )

    def _base(self, setup: Setup, depth: int) -> int:
        """Rule 3, of the largest stage and of the first."""
        layout = setup.layout
        first = sum(layout.layers_per_chunk(depth)[:: layout.pp])
        nbytes = self.shard.nbytes
        return max(nbytes.everything // layout.pp, nbytes.first_stage(first, alone=layout.pp == 1))

    def _in_backwards(self, setup: Setup, first: tuple[int, ...], plan: Recompute, treated: Mode, entrance: int) -> int:
        """Rule 4, beside what is always there.

        Args:
            first: layers of the first stage's chunks.
            treated: what the plan does to a layer.
            entrance: gradients of an embedding, and of a head behind it.
        """
        held, gradients = self.plans[treated].held, self.shard.nbytes.gradients.layer
        if plan.whole:
            held = min(held, self.plans[Mode.NONE].held)
        rises: dict[bool, int] = {}
        most = 0
        for state in in_flight(setup, first, plan.number if plan.mode is Mode.EVERY else 1, upfront=self.upfront):
            if state.adds not in rises:
                rises[state.adds] = self._rise(plan, first, treated, state.adds)
            found = held * state.segments + gradients * state.learned + rises[state.adds]
            found += entrance if state.entrance else 0
            most = found if found > most else most
        return most

    def _rise(self, plan: Recompute, first: tuple[int, ...], treated: Mode, adds: bool) -> int:
        """Of the last layer's backward, or the last segment's; of micro-batches that are kept whole, or not."""
        if not all(first):
            return 0
        if plan.mode is Mode.EVERY and plan.number > 1:
            plain = self.plain if adds else self.first.plain
            rise = plain.segment(min(1 + (n - 1) % plan.number for n in first))
        else:
            rise = self.plans[treated].rise if adds else self.first.rise(treated)
        if not plan.whole:
            return rise
        return min(rise, self.plans[Mode.NONE].rise if adds else self.first.rise(Mode.NONE))

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


def treatments(plans: Iterable[Recompute]) -> tuple[Mode, ...]:
    """What bounds are needed for."""
    asked = {_treated(plan) for plan in plans}
    return tuple(mode for mode in _TREATMENTS if mode in asked or mode is Mode.NONE)


def bound(run: Run, hardware: Hardware, modes: tuple[Mode, ...] = _TREATMENTS) -> Bounds:
    """Of the setups that are like a run in all but m, the schedule and layers by stage.

    Args:
        modes: what happens to layers under the plans that are asked for.
    """
    alone = replace(run.layout, pp=1, virtual_stages=1, stage_layers=(), schedule=Schedule.ONE_F_ONE_B)
    inner, upfront = _inner(run), run.gradients is Gradients.UPFRONT
    adds = not run.gradients_come_whole
    rule, execution = run.gradient_rule, execution_of(run)
    return Bounds(
        plans={mode: _plan_bound(inner, mode, rule, adds, hardware) for mode in modes},
        plain=_layer_bytes(inner, rule, adds),
        first=FirstBackward(inner=inner, rule=rule, adds=adds and (upfront or run.frees_gradients)),
        shard=_shard_bound(replace(run, layout=alone, recompute=Recompute()), hardware),
        sends=Sends(
            seconds=Timing(run=run, hardware=hardware, execution=execution).sending(), waited=not execution.hides_stages
        ),
        upfront=upfront,
        hidden=hardware.reached.shared if execution.hides_data else 1.0,
    )


def _shard_bound(run: Run, hardware: Hardware) -> ShardBound:
    """Args: run: on one stage, with nothing computed again."""
    (chunk,) = outline(run)[0]
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    statics = [(group.part.is_layer, group.part.static) for group in chunk]
    stays = run.gradients is not Gradients.ADDED
    return ShardBound(
        seconds=shard_seconds(timing, chunk),
        nbytes=ShardBytes(
            everything=_everything(chunk, stays=stays),
            settled=_parts([(layer, s.parameters + s.state) for layer, s in statics]),
            gradients=_parts([(layer, s.gradients if stays else 0) for layer, s in statics]),
            gathered=_least_gathered(run, [g.part.static.gathered - own_experts(run, g.part).gathered for g in chunk]),
        ),
    )


def _least_gathered(run: Run, gathered: Sequence[int]) -> int:
    """Whole weights beside any layer's backward, at least: its own, and a neighbour's.

    Experts that are a group of their own are not whole all through it: NOTE [ Experts within a layer ] in
    `predict.fsdp2`.
    """
    if not run.layout.resharded:
        return 0
    return min(gathered[1:-1]) + min(gathered)


def _parts(nbytes: Sequence[tuple[bool, int]]) -> Parts:
    """Args: nbytes: of the regions of a model, and are they layers?"""
    return Parts(layer=min(n for layer, n in nbytes if layer), first=nbytes[0][1], last=nbytes[-1][1])


def whole_seconds(run: Run, hardware: Hardware) -> float:
    """W of rule 2 without recompute."""
    return _pass_seconds(_inner(run), hardware).whole


def whole_static_bytes(run: Run) -> int:
    """Parameters, state and gradients on one rank of a run without a pipeline."""
    return _everything(outline(run)[0][0], stays=run.gradients is not Gradients.ADDED)


def _everything(chunk: Chunk, *, stays: bool) -> int:
    """Args: stays: gradients outlive their backward."""
    counted = [(len(group.names), group.part.static) for group in chunk]
    return sum(n * (s.parameters + s.state + (s.gradients if stays else 0)) for n, s in counted)


def _inner(run: Run) -> Run:
    """What the seconds of its regions depend on: no replicas, no ZeRO, no pipeline, no recompute."""
    return replace(run, layout=run.layout.within_stage, micro_batches=1, recompute=Recompute())


@lru_cache(maxsize=4096)
def _pass_seconds(run: Run, hardware: Hardware) -> PassSeconds:
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    return pass_seconds(timing.items(outline(run)[0][0]))


@lru_cache(maxsize=4096)
def _plan_bound(inner: Run, mode: Mode, rule: GradientRule, adds: bool, hardware: Hardware) -> PlanBound:
    """Args: rule: of gradients, which ZeRO decides as well; adds: backwards find gradients there, which they add to."""
    run = replace(inner, recompute=Recompute(mode=mode))
    layers = [group.part for group in outline(run)[0][0] if group.part.is_layer]
    return PlanBound(
        seconds=_pass_seconds(run, hardware),
        held=min(part.region.program.kept_bytes(part.kept) for part in layers),
        rise=min(passes_of(part, rule, accumulates=adds).backward_peak for part in layers),
    )


@lru_cache(maxsize=4096)
def _least_rise(inner: Run, mode: Mode, rule: GradientRule, adds: bool) -> int:
    """`PlanBound.rise` alone."""
    layers = [g.part for g in outline(replace(inner, recompute=Recompute(mode=mode)))[0][0] if g.part.is_layer]
    return min(passes_of(part, rule, accumulates=adds).backward_peak for part in layers)


@lru_cache(maxsize=4096)
def _layer_bytes(run: Run, rule: GradientRule, adds: bool) -> LayerBytes:
    """Args: run: with nothing computed again; adds: as `_plan_bound` has it."""
    layers = [group.part for group in outline(run)[0][0] if group.part.is_layer]
    passes = [passes_of(part, rule, accumulates=adds) for part in layers]
    return LayerBytes(
        resident=min(p.resident for p in passes),
        forward=min(p.forward_peak for p in passes),
        backward=min(p.backward_peak for p in passes),
        output=min(p.output for p in passes),
        shared=max(part.region.program.kept_bytes(kept_by(part.region, FULL) & part.kept) for part in layers),
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
