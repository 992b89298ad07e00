"""What a recompute mode makes of a stage's layers: which buffers stay, and the units that its timeline consists of.

NOTE [ Segments ]
`every:K` holds the input of the first of K layers. Backward runs the K forwards again, keeping everything, and then
their backwards. So within a segment the replay of no recompute holds, on top of one input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.region import EMBEDDING, HEAD, Region, embedding_region, head_region, layer_region
from jettison.formula.replay import Passes, replay
from jettison.formula.static import Static, static
from jettison.ledger.timeline import Unit
from jettison.solve.policy import policy_named
from jettison.spec.layout import Layout
from jettison.spec.model import Layer
from jettison.spec.precision import Optimizer, Precision
from jettison.spec.run import Mode, Run

NONE, FULL, MIXED = "none", "full", "mixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayer:
    """A region of a stage: a layer, the embedding or the head.

    ``policy`` is the policy's word; ``chosen`` is what a planner keeps instead, for the policy "mixed".
    """

    name: str
    region: Region
    policy: str
    static: Static
    chosen: frozenset[int] | None = None
    is_layer: bool = True

    @property
    def kept(self) -> frozenset[int]:
        """Buffers that stay of it between forward and backward."""
        return kept_by(self.region, self.policy) if self.chosen is None else self.chosen

    def passes(self, gradient_dtype: str, *, accumulates: bool = False) -> Passes:
        """Its replay under its policy."""
        if self.chosen is None:
            return _passes(self.region, self.policy, gradient_dtype, accumulates)
        return _chosen_passes(self.region, self.chosen, gradient_dtype, accumulates)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Neighbouring parts that are alike but for their names; ``part`` is any of that kind, by whatever name."""

    part: StageLayer
    names: tuple[str, ...]

    def parts(self) -> Iterator[StageLayer]:
        """All of them."""
        return (replace(self.part, name=name) for name in self.names)


@lru_cache(maxsize=65536)
def kept_by(region: Region, policy: str) -> frozenset[int]:
    """Buffers that a named policy keeps."""
    return policy_named(policy).kept(region.program)


@lru_cache(maxsize=65536)
def _passes(region: Region, policy: str, gradient_dtype: str, accumulates: bool) -> Passes:
    return replay(region, kept_by(region, policy), gradient_dtype, accumulates=accumulates)


@lru_cache(maxsize=4096)
def _chosen_passes(region: Region, kept: frozenset[int], gradient_dtype: str, accumulates: bool) -> Passes:
    return replay(region, kept, gradient_dtype, accumulates=accumulates)


@lru_cache(maxsize=65536)
def _static(
    region: Region, precision: Precision, optimizer: Optimizer, layout: Layout, in_layer: bool, tied: bool
) -> Static:
    weights = [w for w in region.weights if tied or not w.tied]
    return static(weights, precision=precision, optimizer=optimizer, layout=layout, in_layer=in_layer)


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


def layer_groups(
    run: Run,
    start: int,
    stop: int,
    position: int,
    chosen: Sequence[frozenset[int] | None] | None,
    known: dict[tuple[int, str], StageLayer] | None = None,
) -> Iterator[LayerGroup]:
    """Layers ``start .. stop - 1`` of the model, the first of them at ``position`` of its stage.

    Args:
        known: parts of this run that other stages had, by layer and policy; finding them again costs a hash of the run.
    """
    names = run.model.layer_names
    known = {} if known is None else known
    if chosen is None and run.recompute.mode not in (Mode.BLOCK, Mode.INTERVAL):
        policy = _policy(run, position)
        for layer, first, last in run.model.stretches:
            if first < stop and start < last:
                alike = names[max(first, start) : min(last, stop)]
                part = known.get((id(layer), policy))
                if part is None:
                    part = known[id(layer), policy] = _layer_part(run, layer, alike[0], policy, None)
                yield LayerGroup(part=part, names=alike)
        return
    layers = run.model.layers

    def key(index: int) -> tuple[int, str, frozenset[int] | None]:
        picked = None if chosen is None else chosen[index]
        policy = _policy(run, position + index - start) if picked is None else MIXED
        return id(layers[index]), policy, picked

    for (_, policy, picked), indices in groupby(range(start, stop), key):
        members = list(indices)
        alike = tuple(names[index] for index in members)
        yield LayerGroup(part=_layer_part(run, layers[members[0]], alike[0], policy, picked), names=alike)


def _layer_part(run: Run, layer: Layer, name: str, policy: str, chosen: frozenset[int] | None) -> StageLayer:
    region = layer_region(run.scene, layer)
    held = _static(region, run.precision, run.optimizer, run.layout.sharding, True, True)
    return StageLayer(name=name, region=region, policy=policy, static=held, chosen=chosen)


def embedding_group(run: Run) -> LayerGroup:
    """The embedding."""
    region = embedding_region(run.scene)
    held = _static(region, run.precision, run.optimizer, run.layout.sharding, False, True)
    part = StageLayer(name=EMBEDDING, region=region, policy=NONE, static=held, is_layer=False)
    return LayerGroup(part=part, names=(EMBEDDING,))


def head_group(run: Run) -> LayerGroup:
    """Final norm, head and loss. A tied weight is held a second time on another stage than the embedding's."""
    region = head_region(run.scene)
    held = _static(region, run.precision, run.optimizer, run.layout.sharding, False, run.layout.pp > 1)
    part = StageLayer(name=HEAD, region=region, policy=NONE, static=held, is_layer=False)
    return LayerGroup(part=part, names=(HEAD,))


def units(run: Run, groups: Sequence[LayerGroup]) -> tuple[Unit, ...]:
    """The units of one chunk, in order."""
    size = run.recompute.number if run.recompute.mode is Mode.EVERY else 1
    made = _segments(run, groups, size) if size > 1 else [_unit(run, group) for group in groups]
    return tuple(_with_transients(run, groups, made))


def _unit(run: Run, group: LayerGroup) -> Unit:
    part, dtype = group.part, run.precision.gradient
    passes, adding = part.passes(dtype), part.passes(dtype, accumulates=True)
    gradient, backward, pending = part.static.gradients, passes.backward_peak, 0
    if run.model.tied_embeddings and run.layout.pp == 1:
        if part.name == HEAD:
            pending = sum(w.numel for w in part.region.weights if w.tied) * DTYPE_BYTES[dtype]
            gradient += pending
        if part.name == EMBEDDING:  # the head's backward made it already
            gradient -= max((w.numel for w in part.region.weights), default=0) * DTYPE_BYTES[dtype]
            backward = adding.backward_peak
    return Unit(
        names=group.names,
        resident=passes.resident,
        forward_peak=passes.forward_peak,
        backward_peak=backward,
        adding_peak=adding.backward_peak,
        gradient=gradient,
        pending=pending,
        is_loss=part.name == HEAD,
    )


def _segments(run: Run, groups: Sequence[LayerGroup], size: int) -> Iterator[Unit]:
    """One unit for each run of equal segments. See NOTE [ Segments ]."""
    for is_layer, run_of_groups in groupby(groups, lambda group: group.part.is_layer):
        if not is_layer:
            yield from (_unit(run, group) for group in run_of_groups)
            continue
        parts = [(group.part, name) for group in run_of_groups for name in group.names]
        cut = [parts[i : i + size] for i in range(0, len(parts), size)]
        for _, same in groupby(cut, lambda segment: [id(part) for part, _name in segment]):
            segments = list(same)
            names = tuple(s[0][1] if len(s) == 1 else f"{s[0][1]} to {s[-1][1]}" for s in segments)
            yield _segment(run, [part for part, _ in segments[0]], names)


def _segment(run: Run, parts: Sequence[StageLayer], names: tuple[str, ...]) -> Unit:
    dtype = run.precision.gradient
    full = [part.passes(dtype) for part in parts]
    plain = [_passes(part.region, NONE, dtype, False) for part in parts]
    adding = [_passes(part.region, NONE, dtype, True) for part in parts]
    held = full[0].resident
    first = parts[0].region
    shared = first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))
    return Unit(
        names=names,
        resident=held,
        forward_peak=max(p.forward_peak + (held if i else 0) for i, p in enumerate(full)),
        backward_peak=_segment_backward(plain, [p.static.gradients for p in parts], shared),
        adding_peak=_segment_backward(adding, [0] * len(parts), shared),
        gradient=sum(part.static.gradients for part in parts),
    )


def _segment_backward(plain: Sequence[Passes], gradients: Sequence[int], shared: int) -> int:
    """Peak of a segment's backward above what the segment holds: its input, of which ``shared`` bytes stay anyway."""
    incoming = plain[-1].output
    peak = 0
    level = -shared
    for p in plain:
        peak = max(peak, incoming + level + p.forward_peak)
        level += p.resident
    there = 0
    for p, gradient in zip(reversed(plain), reversed(gradients), strict=True):
        peak = max(peak, level + there + p.backward_peak)
        level -= p.resident
        there += gradient
    return peak


def _with_transients(run: Run, groups: Sequence[LayerGroup], made: Sequence[Unit] | Iterator[Unit]) -> Iterator[Unit]:
    """With what ZeRO and offloading add to each unit's transients.

    ZeRO 3 gathers a region while it runs and prefetches the next one; ZeRO 2 and 3 hold a region's whole gradients
    until they have been reduced, which overlaps with the backward of the region before it: the last one finds none
    that wait. Offloading holds a unit's bytes beside the next unit's while they are on their way.
    """
    gathered = 2 * max(group.part.static.gathered for group in groups) if run.layout.resharded else 0
    reduced = max(group.part.static.reduced for group in groups)
    if not (gathered or reduced or run.recompute.offload):
        yield from made
        return
    before = 0
    made = tuple(made)
    for unit in made:
        waiting = 0 if unit is made[-1] and len(unit.names) == 1 else reduced
        moved = unit.resident if run.recompute.offload else 0
        between = max(before, moved) if len(unit.names) > 1 else before
        yield replace(
            unit,
            resident=unit.resident - moved,
            forward_peak=unit.forward_peak + gathered + between,
            backward_peak=unit.backward_peak + gathered + waiting + moved + between,
            adding_peak=unit.adding_peak + gathered + waiting + moved + between,
        )
        before = moved
