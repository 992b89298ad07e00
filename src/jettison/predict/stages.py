"""What runs where: the regions of every stage of a run, walked through once for bytes and for seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby

from jettison.formula.region import EMBEDDING, HEAD, Region, embedding_region, head_region, layer_region
from jettison.formula.static import Static, static
from jettison.solve.policy import policy_named
from jettison.spec.layout import Layout
from jettison.spec.model import Layer
from jettison.spec.precision import Optimizer, Precision
from jettison.spec.run import Mode, Run

NONE, FULL, MIXED = "none", "full", "mixed"


@dataclass(frozen=True, slots=True)
class Staying:
    """Buffers of a layer that a planner lets stay between its passes; those that are ``moved`` are on the host."""

    buffers: frozenset[int]
    moved: frozenset[int] = frozenset()


Chosen = Sequence[Staying | None]
"""By layer, what a planner lets stay; None where the run's recompute mode decides."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRegion:
    """A region of a stage and how backward gets what it needs of it. One walk makes one of each kind.

    Args:
        layer: of the model; None: the embedding or the head.
        policy: the policy's word.
        chosen: what a planner lets stay instead, for the policy "mixed".
    """

    name: str
    region: Region
    policy: str
    static: Static
    layer: Layer | None = None
    chosen: Staying | None = None

    @property
    def is_layer(self) -> bool:
        """Neither the embedding nor the head."""
        return self.layer is not None

    @property
    def kept(self) -> frozenset[int]:
        """Buffers that stay of it between forward and backward."""
        return kept_by(self.region, self.policy) if self.chosen is None else self.chosen.buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionGroup:
    """Neighbouring regions that are alike but for their names; ``part`` is any of that kind, by whatever name."""

    part: StageRegion
    names: tuple[str, ...]

    def parts(self) -> Iterator[StageRegion]:
        """All of them."""
        return (replace(self.part, name=name) for name in self.names)


Chunk = tuple[RegionGroup, ...]
"""What a micro-batch passes on one visit to a stage, in the order of the forward."""


@lru_cache(maxsize=65536)
def kept_by(region: Region, policy: str) -> frozenset[int]:
    """Buffers that a named policy keeps."""
    return policy_named(policy).kept(region.program)


def walk(run: Run, chosen: Chosen | None = None) -> tuple[tuple[Chunk, ...], ...]:
    """By stage and by virtual stage, the regions that a rank runs.

    Raises:
        UsageError: layers do not divide over the stages.
    """
    layout, sizes = run.layout, run.layout.layers_per_chunk(run.model.depth)
    starts = [0, *accumulate(sizes)]
    known: dict[tuple[object, ...], StageRegion] = {}
    stages = []
    for index in range(layout.pp):
        chunks = []
        position = 0
        for place in range(index, len(sizes), layout.pp):
            groups = [_embedding(run)] if place == 0 else []
            groups += _layers(run, starts[place], starts[place + 1], position, chosen, known)
            groups += [_head(run)] if place == len(sizes) - 1 else []
            position += sizes[place]
            chunks.append(tuple(groups))
        stages.append(tuple(chunks))
    return tuple(stages)


def _policy(run: Run, position: int) -> str:
    """The policy of the layer at ``position`` of its stage; segments are full."""
    mode, number = run.recompute.mode, run.recompute.number
    match mode:
        case Mode.EVERY:
            return FULL
        case Mode.BLOCK:
            return FULL if position < number else NONE
        case Mode.INTERVAL:
            return FULL if position % number == 0 else NONE
        case Mode.AUTO:
            return NONE
        case _:
            return str(mode)


def _layers(
    run: Run, start: int, stop: int, position: int, chosen: Chosen | None, known: dict[tuple[object, ...], StageRegion]
) -> Iterator[RegionGroup]:
    """Layers ``start .. stop - 1`` of the model, the first of them at ``position`` of its stage.

    Args:
        known: what other stages had, by kind of layer and policy; finding it again costs a hash of the run.
    """
    names = run.model.layer_names
    for kind, indices in _alike(run, start, stop, position, chosen):
        number, policy, picked = kind
        alike = names[indices.start : indices.stop]
        if kind not in known:
            layer = run.model.kinds[number]
            region = layer_region(run.scene, layer)
            held = _static(region, run.precision, run.optimizer, run.layout.sharding, True, True)
            known[kind] = StageRegion(
                name=alike[0], region=region, policy=policy, static=held, layer=layer, chosen=picked
            )
        yield RegionGroup(part=known[kind], names=alike)


def _alike(
    run: Run, start: int, stop: int, position: int, chosen: Chosen | None
) -> Iterator[tuple[tuple[int, str, Staying | None], range]]:
    """Runs of neighbours that are treated alike: ((number of their kind, policy, what a planner keeps), which)."""
    if chosen is None and run.recompute.mode not in (Mode.BLOCK, Mode.INTERVAL):
        policy = _policy(run, position)
        for number, first, last in run.model.stretches:
            if max(first, start) < min(last, stop):
                yield (number, policy, None), range(max(first, start), min(last, stop))
        return
    numbers = run.model.kind_numbers

    def key(index: int) -> tuple[int, str, Staying | None]:
        picked = None if chosen is None else chosen[index]
        return numbers[index], _policy(run, position + index - start) if picked is None else MIXED, picked

    for kind, same in groupby(range(start, stop), key):
        members = list(same)
        yield kind, range(members[0], members[-1] + 1)


def _embedding(run: Run) -> RegionGroup:
    region = embedding_region(run.scene)
    held = _static(region, run.precision, run.optimizer, run.layout.sharding, False, True)
    return RegionGroup(part=StageRegion(name=EMBEDDING, region=region, policy=NONE, static=held), names=(EMBEDDING,))


def _head(run: Run) -> RegionGroup:
    """Final norm, head and loss. A tied weight is held a second time on another stage than the embedding's."""
    region = head_region(run.scene)
    held = _static(region, run.precision, run.optimizer, run.layout.sharding, False, run.layout.pp > 1)
    return RegionGroup(part=StageRegion(name=HEAD, region=region, policy=NONE, static=held), names=(HEAD,))


@lru_cache(maxsize=65536)
def _static(
    region: Region, precision: Precision, optimizer: Optimizer, layout: Layout, in_layer: bool, tied: bool
) -> Static:
    weights = [w for w in region.weights if tied or not w.tied]
    return static(weights, precision=precision, optimizer=optimizer, layout=layout, in_layer=in_layer)
