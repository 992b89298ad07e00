"""Lower bounds on the seconds and bytes of candidates, which spare most of them an evaluation.

NOTE [ Pruning rules ]
A search skips a candidate only if one of these rules proves that it cannot be in the answer. S is a setup, r a plan.

1. time(S, r) >= time(S, none). A plan lengthens backwards, and offloading both passes; nothing gets shorter. The
   makespan of fixed orders is a longest path, and grows with every pass. A gradient reduction may overlap with
   recomputation, but each second of that lengthens the same stage's last backward, which only its own weight passes
   follow: the stage's end moves by as much. With virtual stages backwards of other chunks lie between, and idle time
   may absorb what the reduction gains: there the bound subtracts, from the part of the reduction that a longer backward
   could hide, the stage's forward, which takes no less than its entire recomputation.
2. Stage i cannot begin before the first i places have run a micro-batch's forward, and after its last backward they run
   that micro-batch's backward, the first stage at the end. So the first stage ends no sooner than ramp(i) + n w(i),
   with w(i) a micro-batch's work on stage i. Two of these bounds are computed: the last stage's, from the cheapest
   layer, and the mean of all, in which w is a p-th of the model's W. If a schedule splits backwards, ramps have
   forwards only. W and w include sends that both sides wait for, and the least cost of a ZeRO collective that overlaps
   with a layer: what exceeds the longest compute, and the slowdown of the device meanwhile. After the first stage's end
   come the exposed part of its reduction and all-gather, and the longest optimizer step. Segments of several layers
   recompute no less than `full`; W and w depend on t, sp, cp, ep, b and r alone.
3. peak(S, r) >= parameters + optimizer state + gradients of the largest stage, all alive in the optimizer step whatever
   r is; that is at least a p-th of their sum without a pipeline, at the same dp, cp and ZeRO stage.
4. peak(S, r) >= those of the first stage before any backward (gradients of chunks that have had a backward, if
   gradients appear one by one) + activations that r keeps of its layers, for every micro-batch in flight there + the
   rise of the next backward: of the last layer or segment of its chunk, with or without that chunk's gradients.
5. If none fits, a planner that minimises seconds chooses none. If not, see NOTE [ Least seconds of a planner ] in
   `planner_time_bound`; for one that may offload only rule 1 holds.

Bounds are lowered by `SHAVED` of themselves, for rounding in floating point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import ge, mul
from typing import Final, Generic, NamedTuple, TypeVar

from jettison.core.objects import OnDemand
from jettison.cost.execution import execution_of
from jettison.cost.region import Item
from jettison.memory.schedule import OrderOptions, PipelineShape, Work, device_order
from jettison.predict.forecast import Forecast
from jettison.predict.fsdp import own_experts
from jettison.predict.stages import FULL, Chunk, StageRegion, kept_by, outline, passes_of
from jettison.predict.time import Estimate, Timing
from jettison.search.space import Setup
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Schedule
from jettison.spec.precision import GradientRule, Gradients
from jettison.spec.recompute import UNIFORM_MODES, Mode, Recompute
from jettison.spec.run import Run

SHAVED: Final = 1e-6
_SEGMENTS: Final = frozenset((*UNIFORM_MODES, Mode.EVERY))
"""Plans that keep, for each segment of layers, no less than the smallest layer's kept tensors."""
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends(Generic[_N]):
    """One quantity: the least of any layer, and the additions of the first and the last stage."""

    layer: _N
    first: _N
    last: _N

    def of_first(self, layers: int, *, alone: bool) -> _N:
        """Return the first stage's quantity with this many layers; with ``alone`` it has the head, too."""
        return self.first + layers * self.layer + (self.last if alone else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBound:
    """Bounds of one plan: seconds of a micro-batch through the model, through the cheapest layer and the head.

    Args:
        longest: seconds of the region that can hide most of a transfer, by pass.
        held: bytes that a micro-batch keeps in the layer that keeps least.
    """

    whole: float
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    longest: tuple[float, float]
    held: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBound:
    """Bounds that data parallelism adds to any plan, at one ZeRO stage; of layers the least.

    Args:
        gathered: seconds of a region's all-gather, in forward and once more in backward.
        reduced: seconds of a region's gradient reduction.
        added: seconds of accumulating gradients and of FSDP's copies; ``added_whole``: of the entire model.
        longest_added: seconds of the region that takes longest to accumulate.
        end: seconds after the last backward.
        optimizer: seconds of the optimizer step.
        everything: bytes of parameters, optimizer state and gradients of the entire model.
        settled: bytes of parameters and optimizer state.
        gathered_bytes: bytes of unsharded parameters during any pass of a layer.
    """

    gathered: float
    reduced: float
    added: Ends[float]
    added_whole: float
    longest_added: float
    end: Ends[float]
    optimizer: Ends[float]
    everything: int
    settled: Ends[int]
    gradients: Ends[int]
    gathered_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupBounds:
    """Bounds of all setups that share a batch and all axes but virtual stages.

    Args:
        plans: by the policy of a layer.
        inner: the run of `_inner`.
        adds: does a backward accumulate into existing gradients? A chunk's first backward, and later ones.
        send: seconds of a send between stages; ``waited``: it is exposed on both devices.
        upfront: gradients are allocated before the first backward.
        hidden: share of the device that an overlapped transfer takes; 1: nothing overlaps.
        rises: results of `_rise`.
    """

    plans: dict[Mode, PlanBound]
    shard: ShardBound
    inner: Run
    rule: GradientRule
    adds: tuple[bool, bool]
    send: float
    waited: bool
    upfront: bool
    hidden: float
    rises: dict[tuple[Mode | int, bool], int] = field(default_factory=dict)

    def least(self, setup: Setup, depth: int, plans: Sequence[Recompute]) -> list[tuple[float, int]]:
        """Return the least seconds and bytes of each of these plans, for a model of ``depth`` layers.

        Those of a planner's choice hold for any plan.
        """
        sizes, own, alone = setup.layout.layers_per_chunk(depth), self.shard, setup.layout.pp == 1
        first, base = sizes[:: setup.layout.pp], self._base(setup, sizes)
        always = own.settled.of_first(sum(first), alone=alone) + (own.gathered_bytes if all(first) else 0)
        entrance = own.gradients.of_first(0, alone=alone)
        seconds = OnDemand[Mode, float](lambda mode: self._seconds(setup, sizes, mode))
        found = []
        for plan in plans:
            treated = _layer_mode(plan)
            nbytes = base
            if plan.mode in _SEGMENTS and not plan.offload:
                nbytes = max(base, always + self._in_backwards(setup, first, plan, treated, entrance))
            found.append((seconds[Mode.NONE if plan.whole else treated], nbytes))
        return found

    # seconds: rules 1 and 2 -------------------------------------------------------------------------------------------

    def _seconds(self, setup: Setup, sizes: tuple[int, ...], mode: Mode) -> float:
        """Args: sizes: layers by place."""
        layout, plan, shard = setup.layout, self.plans[mode], self.shard
        stages, shape = layout.pp, _shape(sizes, layout.pp)
        drains = layout.schedule is not Schedule.ZERO_BUBBLE  # backwards are whole
        hiding, hiding_back = plan.longest[0], plan.longest[1] + shard.longest_added
        backward, gathered = plan.backward + shard.added.layer, self._overlap_cost(shard.gathered, hiding)
        opening = shard.gathered - gathered
        pair = self._overlap_cost(shard.gathered, hiding_back) + self._overlap_cost(shard.reduced, hiding_back)
        inner = self._overlap_cost(shard.gathered + shard.reduced, hiding_back)

        def ahead(tally: _PlaceCounts) -> float:
            return tally.layers * gathered + tally.opened * opening

        def overlapped(tally: _PlaceCounts) -> float:
            return ahead(tally) + tally.pairs * pair + tally.inner * inner

        def both(tally: _PlaceCounts) -> float:
            return tally.layers * (plan.forward + backward) + overlapped(tally)

        def before_and_after(tally: _PlaceCounts) -> float:
            return both(tally) if drains else tally.layers * plan.forward + ahead(tally)

        waited, hops = self.send if self.waited else 0.0, layout.virtual_stages * stages - 1
        every = plan.whole + shard.added_whole + overlapped(shape.every) + 2 * hops * waited
        last = both(shape.last) + plan.head_forward + plan.head_backward + shard.added.last
        last += (2 * layout.virtual_stages - 1) * waited
        ended = setup.micro_batches * every
        if stages > 1:
            # a stage that waits for a send has the last one of its ramp in its own work
            less, sides = (1 if self.waited and drains else 0), (2 if drains else 1)
            ramp = before_and_after(shape.ramp) + (sides * (stages - 1) - less) * self.send
            ramps = before_and_after(shape.ramps) + (stages - 1) * (sides * stages / 2 - less) * self.send
            ended = max(ended + ramps, stages * (setup.micro_batches * last + ramp)) / stages
        end = shard.end.first + shape.first_layers * shard.end.layer if drains else 0.0
        return ended + end + _optimizer(shard.optimizer, shape, stages)

    def _overlap_cost(self, transfer: float, work: float) -> float:
        """Seconds that a transfer adds to overlapping compute: its exposed part, and the slowdown by the rest."""
        over = max(0.0, transfer - work)
        return over + (transfer - over) * self.hidden

    # bytes: rules 3 and 4 ---------------------------------------------------------------------------------------------

    def _base(self, setup: Setup, sizes: tuple[int, ...]) -> int:
        """Bytes by rule 3, of the largest stage and of the first in its optimizer step."""
        layout, own = setup.layout, self.shard
        first, alone = sum(sizes[:: layout.pp]), layout.pp == 1
        steps = own.settled.of_first(first, alone=alone) + own.gradients.of_first(first, alone=alone)
        return max(own.everything // layout.pp, steps)

    def _in_backwards(self, setup: Setup, first: tuple[int, ...], plan: Recompute, treated: Mode, entrance: int) -> int:
        """Bytes by rule 4, without parameters and optimizer state.

        Args:
            first: layers of the first stage's chunks.
            treated: policy of a layer under the plan.
            entrance: bytes of gradients of the embedding, and of a head on the same stage.
        """
        layout, gradients = setup.layout, self.shard.gradients.layer
        held = self.plans[treated].held
        if plan.whole:
            held = min(held, self.plans[Mode.NONE].held)
        shape = PipelineShape(
            layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
            stages=layout.pp,
            micro_batches=setup.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
        states = _in_flight(shape, first, plan.number if plan.mode is Mode.EVERY else 1, self.upfront)
        most = 0
        for state in states:
            found = held * state.segments + gradients * state.learned + self._rise(plan, first, treated, state.adds)
            found += entrance if state.entrance else 0
            most = found if found > most else most
        return most

    def _rise(self, plan: Recompute, first: tuple[int, ...], treated: Mode, adds: bool) -> int:
        """Rise of the last layer's or segment's backward, of micro-batches with or without checkpointing."""
        if not all(first):
            return 0
        what: Mode | int = treated
        if plan.mode is Mode.EVERY and plan.number > 1:
            what = min(1 + (n - 1) % plan.number for n in first)
        for each in (what, Mode.NONE):
            if (each, adds) not in self.rises:
                self.rises[each, adds] = _least_rise(self.inner, each, self.rule, self.adds[adds])
        return min(self.rises[what, adds], self.rises[Mode.NONE, adds]) if plan.whole else self.rises[what, adds]


def _layer_mode(plan: Recompute) -> Mode:
    """Return a plan whose layers take no longer: full for segments, none for plans with different layers."""
    if plan.mode is Mode.EVERY:
        return Mode.FULL
    return plan.mode if plan.mode in UNIFORM_MODES else Mode.NONE


def layer_modes(plans: Iterable[Recompute]) -> tuple[Mode, ...]:
    """Layer policies that need bounds."""
    asked = {_layer_mode(plan) for plan in plans}
    return tuple(mode for mode in UNIFORM_MODES if mode in asked or mode is Mode.NONE)


def _optimizer(seconds: Ends[float], shape: _Shape, stages: int) -> float:
    """Seconds of the longest optimizer step of any stage."""
    if stages == 1:
        return seconds.first + shape.most * seconds.layer + seconds.last
    first = seconds.first + shape.first_layers * seconds.layer
    return max(first, shape.most * seconds.layer, seconds.last + shape.last_layers * seconds.layer)


# places of a pipeline, and micro-batches in flight --------------------------------------------------------------------


class _PlaceCounts(NamedTuple):
    """Counts over weighted places of a pipeline.

    Args:
        layers: all layers.
        opened: places that begin with a layer, whose first all-gather overlaps with nothing.
        pairs: places with two layers or more.
        inner: layers between two others of their place.
    """

    layers: int
    opened: int
    pairs: int
    inner: int

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, int]]) -> _PlaceCounts:
        """Args: places: layers of each, its weight, and its number."""
        layers = opened = pairs = inner = 0
        for n, times, place in places:
            layers += n * times
            opened += times if n and place else 0
            pairs += times if n >= 2 else 0
            inner += max(0, n - 2) * times
        return cls(layers, opened, pairs, inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A pipeline's places. ``ramp``: those before the last stage; ``ramps``: those before each stage, summed."""

    every: _PlaceCounts
    last: _PlaceCounts
    ramp: _PlaceCounts
    ramps: _PlaceCounts
    most: int
    first_layers: int
    last_layers: int


@lru_cache(maxsize=65536)
def _shape(sizes: tuple[int, ...], stages: int) -> _Shape:
    """Args: sizes: layers by place."""
    own = [sum(sizes[i::stages]) for i in range(stages)]
    return _Shape(
        every=_PlaceCounts.of((n, 1, place) for place, n in enumerate(sizes)),
        last=_PlaceCounts.of((n, 1, place) for place, n in enumerate(sizes) if place % stages == stages - 1),
        ramp=_PlaceCounts.of((n, 1, place) for place, n in enumerate(sizes[: stages - 1])),
        ramps=_PlaceCounts.of((n, stages - 1 - place, place) for place, n in enumerate(sizes[: stages - 1])),
        most=max(own),
        first_layers=own[0],
        last_layers=own[-1],
    )


class _BackwardState(NamedTuple):
    """Tensors of the first stage before a backward.

    Args:
        segments: of layers, times micro-batches.
        learned: layers that have gradients; ``entrance``: the first chunk and the embedding are among them.
        adds: the backward accumulates into its chunk's gradients. A bound leaves out that new ones may rise higher.
    """

    segments: int
    learned: int
    entrance: bool
    adds: bool


@lru_cache(maxsize=65536)
def _in_flight(
    shape: PipelineShape, layers: tuple[int, ...], segment: int, upfront: bool
) -> tuple[_BackwardState, ...]:
    """Return the states with most bytes.

    Args:
        layers: of each chunk of the first stage; ``segment``: layers of one segment.
        upfront: gradients are allocated before the first backward.
    """
    order = device_order(shape, 0, walk=OrderOptions(learning=not upfront))
    counts = [-(-n // segment) for n in layers]
    found = []
    for state in order.fullest.values():
        if state.step.work is not Work.FORWARD:
            learned = state.learned or (1,) * len(layers)
            segments, layers_learned = sum(map(mul, state.alive, counts)), sum(map(mul, learned, layers))
            found.append(_BackwardState(segments, layers_learned, bool(learned[0]), bool(learned[state.step.chunk])))
    kept: list[_BackwardState] = []
    for each in sorted(found, reverse=True):
        if not any(all(map(ge, other, each)) for other in kept):
            kept.append(each)
    return tuple(kept)


# bounds of a run ------------------------------------------------------------------------------------------------------


def bound(run: Run, hardware: Hardware, modes: tuple[Mode, ...] = UNIFORM_MODES) -> SetupBounds:
    """Bounds of all setups that differ from a run only in virtual stages, schedule and layers by stage.

    Args:
        modes: policies of layers to bound.
    """
    alone = replace(run.layout, pp=1, virtual_stages=1, stage_layers=(), schedule=Schedule.ONE_F_ONE_B)
    inner, upfront = _inner(run), run.gradients is Gradients.UPFRONT
    adds, execution = not run.gradients_coexist, execution_of(run)
    return SetupBounds(
        plans={mode: _plan_bound(inner, mode, hardware) for mode in modes},
        shard=_shard_bound(replace(run, layout=alone, recompute=Recompute()), hardware),
        inner=inner,
        rule=run.gradient_rule,
        adds=(adds and (upfront or run.frees_gradients), adds),
        send=Timing(run=run, hardware=hardware, execution=execution).sending(),
        waited=not execution.hides_stages,
        upfront=upfront,
        hidden=hardware.reached.shared if execution.hides_data else 1.0,
    )


def whole_seconds(run: Run, hardware: Hardware) -> float:
    """Seconds W of rule 2 without recomputation."""
    return _plan_bound(_inner(run), Mode.NONE, hardware).whole


def whole_static_bytes(run: Run) -> int:
    """Bytes of parameters, optimizer state and gradients on one rank of a run without a pipeline."""
    return _all_static(outline(run)[0][0], stays=run.gradients is not Gradients.ACCUMULATOR)


def _inner(run: Run) -> Run:
    """Return the part of a run that regions' seconds depend on: no replicas, ZeRO, pipeline or recomputation."""
    parameter = run.precision.compute if run.gathers_parameters else run.precision.parameter  # FSDP casts itself
    precision = replace(run.precision, reduced=None, parameter=parameter)
    return replace(run, layout=run.layout.within_stage, precision=precision, micro_batches=1, recompute=Recompute())


def _layers(inner: Run, mode: Mode) -> tuple[Run, Chunk, list[StageRegion]]:
    """Return a run with this policy for layers, all its regions, and its layers."""
    run = replace(inner, recompute=Recompute(mode=mode))
    chunk = outline(run)[0][0]
    return run, chunk, [group.part for group in chunk if group.part.is_layer]


@lru_cache(maxsize=4096)
def _plan_bound(inner: Run, mode: Mode, hardware: Hardware) -> PlanBound:
    _, _, parts = _layers(inner, mode)
    run, chunk, _ = _layers(replace(inner, compiled=False), mode)  # as `estimate` prices compiled layers
    items = Timing(run=run, hardware=hardware, execution=execution_of(inner)).items(chunk)
    layers = [item for item in items if item.in_layer]
    passes = [(item.seconds.forward.seconds, item.seconds.backward_seconds) for item in items]
    return PlanBound(
        whole=sum(item.count * (forward + backward) for item, (forward, backward) in zip(items, passes, strict=True)),
        forward=min(item.seconds.forward.seconds for item in layers),
        backward=min(item.seconds.backward_seconds for item in layers),
        head_forward=passes[-1][0],
        head_backward=passes[-1][1],
        longest=(max(forward for forward, _ in passes), max(backward for _, backward in passes)),
        held=min(part.region.program.kept_bytes(part.kept) for part in parts),
    )


@lru_cache(maxsize=4096)
def _least_rise(inner: Run, what: Mode | int, rule: GradientRule, adds: bool) -> int:
    """Least bytes by which a backward rises above its start: of a layer under a mode, or of a segment, which keeps its
    input and recomputes this many layers.

    Args:
        rule: of gradients, which also depends on ZeRO.
        adds: it accumulates into existing gradients.
    """
    _, _, parts = _layers(inner, what if isinstance(what, Mode) else Mode.NONE)
    passes = [passes_of(part, rule, accumulates=adds) for part in parts]
    backward = min(p.backward_peak for p in passes)
    if isinstance(what, Mode):
        return backward
    resident = min(p.resident for p in passes)
    again = min(p.output for p in passes) + (what - 1) * resident + min(p.forward_peak for p in passes)
    shared = max(part.region.program.kept_bytes(kept_by(part.region, FULL) & part.kept) for part in parts)
    return max(again, what * resident + backward) - shared


def _shard_bound(run: Run, hardware: Hardware) -> ShardBound:
    """Args: run: on one stage, without recomputation."""
    execution, run = execution_of(run), replace(run, compiled=False)
    layout, (chunk,) = run.layout, outline(run)[0]
    timing = Timing(run=run, hardware=hardware, execution=execution)
    items = timing.items(chunk)
    in_layer = [item.in_layer for item in items]
    layers = [item for item in items if item.in_layer]
    added = [item.added for item in items]
    shards = layout.zero >= 2 and layout.shards > 1
    stays = run.gradients is not Gradients.ACCUMULATOR
    statics, is_layer = [group.part.static for group in chunk], [group.part.is_layer for group in chunk]
    # experts in a group of their own are not unsharded throughout: NOTE [ Experts within a layer ] in `predict.fsdp`
    gathered = [g.part.static.gathered - own_experts(run, g.part).gathered for g in chunk]
    return ShardBound(
        gathered=min(i.gathered for i in layers) if shards and layout.zero == 3 and layout.resharded else 0.0,
        reduced=min(i.reduced for i in layers) if shards and timing.execution.reduces_each else 0.0,
        added=_ends(in_layer, added),
        added_whole=sum(seconds * item.count for seconds, item in zip(added, items, strict=True)),
        longest_added=max(added),
        end=_after_backward(timing, items),
        optimizer=_ends(in_layer, [timing.optimizer((item,), least=True) / item.count for item in items]),
        everything=_all_static(chunk, stays=stays),
        settled=_ends(is_layer, [s.parameters + s.state for s in statics]),
        gradients=_ends(is_layer, [s.gradients if stays else 0 for s in statics]),
        gathered_bytes=min(gathered[1:-1]) + min(gathered) if layout.resharded else 0,  # a layer's and a neighbour's
    )


def _ends(is_layer: Sequence[bool], each: Sequence[_N]) -> Ends[_N]:
    """Args: each: quantity of each region, from the embedding to the head."""
    return Ends(layer=min(n for n, layer in zip(each, is_layer, strict=True) if layer), first=each[0], last=each[-1])


def _after_backward(timing: Timing, items: Sequence[Item]) -> Ends[float]:
    """Least exposed seconds of collectives after the last backward."""
    layout, in_layer = timing.run.layout, [item.in_layer for item in items]
    if layout.shards == 1:
        return Ends(layer=0.0, first=0.0, last=0.0)
    after = [item.gathered if timing.gathers_after else 0.0 for item in items]
    if layout.zero >= 2 and timing.execution.reduces_each:
        gathered = _ends(in_layer, after)  # the last reduction is the first region's
        return replace(gathered, first=gathered.first + items[0].reduced)
    shared = timing.hardware.reached.shared if timing.execution.hides_data else 1.0
    return _ends(in_layer, [item.reduced * shared + each for item, each in zip(items, after, strict=True)])


def _all_static(chunk: Chunk, *, stays: bool) -> int:
    """Args: stays: gradients outlive their backward."""
    counted = [(len(group.names), group.part.static) for group in chunk]
    return sum(n * (s.parameters + s.state + (s.gradients if stays else 0)) for n, s in counted)


# bounds from a setup's plan without recomputation ---------------------------------------------------------------------


def least_seconds(plain: Estimate) -> float:
    """Least seconds of any plan of a setup, from the estimate of none: rule 1."""
    if plain.run.layout.virtual_stages == 1:
        return plain.step_seconds
    return with_ends(plain, plain.replay.ends, [sum(stage.forward) for stage in plain.stages])


def with_ends(plain: Estimate, ends: Sequence[float], hiding: Sequence[float]) -> float:
    """Least seconds of a step whose first stages end their backwards no sooner than ``ends``.

    Args:
        hiding: seconds of recomputation on each stage, which may hide the end of its reduction.
    """
    stages = plain.stages
    reduced = (end + s.end - min(s.hideable, most) for end, s, most in zip(ends, stages, hiding, strict=False))
    return max(reduced) + max(stage.optimizer for stage in stages)


def static_bytes(found: Forecast) -> int:
    """Least bytes of any plan of a setup, from a forecast of one: rule 3."""
    loads = [stage.load for stage in found.stages]
    return max(load.fixed + load.state + load.gradient_bytes for load in loads)
