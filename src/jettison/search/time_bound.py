"""What a step must take at least, by what a layer and a place of the pipeline take: rules 1 and 2 of `bounds`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from jettison.predict.stage_time import Item, Timing
from jettison.predict.stages import Chunk
from jettison.spec.layout import Layout, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Of the same quantity: a layer's, what the first stage has beside layers, what the last one has."""

    layer: float
    first: float
    last: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds:
    """Of one plan, a micro-batch through the whole model, the cheapest layer, and what else the last stage does.

    Args:
        longest: the work that hides most of a transfer, by pass.
    """

    whole: float
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    longest: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSeconds:
    """What the ranks that share weights add to any plan, at one stage of ZeRO; of a layer the least.

    Args:
        gathered: of a region beside its forward, and again beside its backward.
        reduced: of a region beside its backward.
        added: to add a weight's gradients to those of earlier micro-batches; ``added_whole``: of the whole model.
        longest_added: of one region.
        end: behind the last backward.
        optimizer: of the optimizer's step.
    """

    gathered: float
    reduced: float
    added: Ends
    added_whole: float
    longest_added: float
    end: Ends
    optimizer: Ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Sends:
    """Between stages: ``waited`` for by both devices, or else on the way while they go on."""

    seconds: float
    waited: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tally:
    """Of some places, each counted so many times.

    Args:
        layers: altogether.
        opened: places with layers in front of which no other region is, so that nothing hides their first gathering.
        pairs: places with two layers or more, and ``inner`` those of their layers with one on both sides.
    """

    layers: int
    opened: int
    pairs: int
    inner: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A pipeline's places. ``ramp``: those before the last stage; ``ramps``: the same of every stage, together."""

    every: _Tally
    last: _Tally
    ramp: _Tally
    ramps: _Tally
    most: int
    first_layers: int
    last_layers: int


@lru_cache(maxsize=65536)
def _shape(sizes: tuple[int, ...], stages: int) -> _Shape:
    """Args: sizes: layers by place."""
    own = [sum(sizes[i::stages]) for i in range(stages)]
    return _Shape(
        every=_tally((n, 1, place) for place, n in enumerate(sizes)),
        last=_tally((n, 1, place) for place, n in enumerate(sizes) if place % stages == stages - 1),
        ramp=_tally((n, 1, place) for place, n in enumerate(sizes[: stages - 1])),
        ramps=_tally((n, stages - 1 - place, place) for place, n in enumerate(sizes[: stages - 1])),
        most=max(own),
        first_layers=own[0],
        last_layers=own[-1],
    )


def _tally(places: Iterable[tuple[int, int, int]]) -> _Tally:
    """Args: places: layers of each, how often it counts, and its number."""
    layers = opened = pairs = inner = 0
    for n, times, place in places:
        layers += n * times
        opened += times if n and place else 0
        pairs += times if n >= 2 else 0
        inner += max(0, n - 2) * times
    return _Tally(layers=layers, opened=opened, pairs=pairs, inner=inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A setup's places and schedule.

    Args:
        count: micro-batches.
        hidden: share of the device that a transfer takes while it hides; 1: nothing hides.
    """

    layout: Layout
    sizes: tuple[int, ...]
    count: int
    hidden: float
    sends: Sends

    def least_seconds(self, plan: PassSeconds, shard: ShardSeconds) -> float:
        """Of a step."""
        shape, stages = _shape(self.sizes, self.layout.pp), self.layout.pp
        drains = self.layout.schedule is not Schedule.ZERO_BUBBLE
        costs = self._costs(plan, shard)
        send, hops = self.sends.seconds, self.layout.virtual_stages * stages - 1
        waited = send if self.sends.waited else 0.0
        every = plan.whole + shard.added_whole + costs.beside(shape.every) + 2 * hops * waited
        last = costs.both(shape.last) + plan.head_forward + plan.head_backward + shard.added.last
        last += (2 * self.layout.virtual_stages - 1) * waited
        if stages == 1:
            ended = self.count * every
        else:
            # a stage that waits for a send has the last one of its ramp in its own work
            less = 1 if self.sends.waited and drains else 0
            sides = 2 if drains else 1
            ramp = costs.ramp(shape.ramp, drains) + (sides * (stages - 1) - less) * send
            ramps = costs.ramp(shape.ramps, drains) + (stages - 1) * (sides * stages / 2 - less) * send
            ended = max(self.count * every + ramps, stages * (self.count * last + ramp)) / stages
        end = shard.end.first + shape.first_layers * shard.end.layer if drains else 0.0
        return ended + end + _optimizer(shard.optimizer, shape, stages)

    def _costs(self, plan: PassSeconds, shard: ShardSeconds) -> _Costs:
        forward, backward = plan.longest
        gathered = self._beside(shard.gathered, forward)
        backward += shard.longest_added
        return _Costs(
            forward=plan.forward,
            backward=plan.backward + shard.added.layer,
            gathered=gathered,
            opening=shard.gathered - gathered,
            pair=self._beside(shard.gathered, backward) + self._beside(shard.reduced, backward),
            inner=self._beside(shard.gathered + shard.reduced, backward),
        )

    def _beside(self, transfer: float, work: float) -> float:
        """What a transfer adds to the work beside it: what is longer than that, and what the rest slows it down."""
        over = max(0.0, transfer - work)
        return over + (transfer - over) * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class _Costs:
    """Seconds of what a `_Tally` counts."""

    forward: float
    backward: float
    gathered: float
    opening: float
    pair: float
    inner: float

    def ahead(self, tally: _Tally) -> float:
        """What comes beside forwards."""
        return tally.layers * self.gathered + tally.opened * self.opening

    def beside(self, tally: _Tally) -> float:
        """And beside backwards."""
        return self.ahead(tally) + tally.pairs * self.pair + tally.inner * self.inner

    def both(self, tally: _Tally) -> float:
        """Forwards and backwards with what comes beside them."""
        return tally.layers * (self.forward + self.backward) + self.beside(tally)

    def ramp(self, tally: _Tally, drains: bool) -> float:
        """What others do before a stage begins, and after it ends where backwards are whole."""
        return self.both(tally) if drains else tally.layers * self.forward + self.ahead(tally)


def _optimizer(seconds: Ends, shape: _Shape, stages: int) -> float:
    """Of the stage whose step takes longest."""
    if stages == 1:
        return seconds.first + shape.most * seconds.layer + seconds.last
    first = seconds.first + shape.first_layers * seconds.layer
    return max(first, shape.most * seconds.layer, seconds.last + shape.last_layers * seconds.layer)


def pass_seconds(items: Sequence[Item]) -> PassSeconds:
    """Args: items: of the whole model."""
    layers = [item for item in items if item.in_layer]
    passes = [(item.seconds.forward.seconds, item.seconds.backward_seconds) for item in items]
    return PassSeconds(
        whole=sum(item.count * (forward + backward) for item, (forward, backward) in zip(items, passes, strict=True)),
        forward=min(item.seconds.forward.seconds for item in layers),
        backward=min(item.seconds.backward_seconds for item in layers),
        head_forward=passes[-1][0],
        head_backward=passes[-1][1],
        longest=(max(forward for forward, _ in passes), max(backward for _, backward in passes)),
    )


def shard_seconds(timing: Timing, chunk: Chunk) -> ShardSeconds:
    """Args: chunk: the whole model, with nothing computed again."""
    layout, execution = timing.run.layout, timing.execution
    items = timing.items(chunk)
    layers = [item for item in items if item.in_layer]
    steps = [timing.optimizer((item,), least=True) / item.count for item in items]
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
