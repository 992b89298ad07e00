"""What a recompute mode makes of a stage's layers: which buffers stay, and the units that its timeline consists of.

NOTE [ Segments ]
`every:K` holds the input of the first of K layers. Backward runs the K forwards again, keeping everything, and then
their backwards. So within a segment the replay of no recompute holds, on top of one input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.region import EMBEDDING, HEAD, Region, embedding_region, head_region, layer_region
from jettison.formula.replay import Passes, replay
from jettison.formula.static import Static, static
from jettison.ledger.timeline import Unit
from jettison.plan.treatment import treatment
from jettison.spec.run import Mode, Run

NONE, FULL = "none", "full"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One region of a stage: a layer, the embedding or the head.

    ``policy`` is the treatment's word; ``kept`` overrides it with a planner's choice.
    """

    name: str
    region: Region
    policy: str
    static: Static
    kept: frozenset[int] | None = None
    is_layer: bool = True

    def passes(self, gradient_dtype: str, *, accumulates: bool = False) -> Passes:
        """Its replay under its policy."""
        if self.kept is not None:
            return replay(self.region, self.kept, gradient_dtype, accumulates=accumulates)
        return _passes(self.region, self.policy, gradient_dtype, accumulates)

    def kept_buffers(self) -> frozenset[int]:
        """What stays of it between forward and backward."""
        return kept_by(self.region, self.policy) if self.kept is None else self.kept


@lru_cache(maxsize=65536)
def kept_by(region: Region, policy: str) -> frozenset[int]:
    """Buffers that a named treatment keeps."""
    return treatment(policy).kept(region.program)


@lru_cache(maxsize=65536)
def _passes(region: Region, policy: str, gradient_dtype: str, accumulates: bool) -> Passes:
    return replay(region, kept_by(region, policy), gradient_dtype, accumulates=accumulates)


def policy_of(run: Run, position: int) -> str:
    """The treatment of the layer at ``position`` of its stage; segments are full."""
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


@lru_cache(maxsize=65536)
def _static(region: Region, run_key: tuple[object, ...], in_layer: bool, with_tied: bool) -> Static:
    precision, optimizer, layout = run_key
    weights = [w for w in region.weights if with_tied or not w.tied]
    return static(weights, precision=precision, optimizer=optimizer, layout=layout, in_layer=in_layer)  # type: ignore[arg-type]


def layer_part(run: Run, index: int, position: int) -> Part:
    """Layer ``index`` of the model, at ``position`` of its stage."""
    region = layer_region(run.scene, run.model.layers[index])
    return Part(
        name=f"layers.{index}", region=region, policy=policy_of(run, position),
        static=_static(region, _key(run), True, True),
    )  # fmt: skip


def embedding_part(run: Run) -> Part:
    """The embedding."""
    region = embedding_region(run.scene)
    return Part(
        name=EMBEDDING, region=region, policy=NONE, static=_static(region, _key(run), False, True), is_layer=False
    )


def head_part(run: Run) -> Part:
    """Final norm, head and loss. A tied weight is held a second time on another stage than the embedding's."""
    region = head_region(run.scene)
    return Part(
        name=HEAD, region=region, policy=NONE, static=_static(region, _key(run), False, run.layout.pp > 1),
        is_layer=False,
    )  # fmt: skip


def _key(run: Run) -> tuple[object, ...]:
    return run.precision, run.optimizer, run.layout.sharding


def units(run: Run, parts: Sequence[Part]) -> tuple[Unit, ...]:
    """The units of one chunk, in order."""
    made: list[Unit] = []
    group: list[Part] = []
    size = run.recompute.number if run.recompute.mode is Mode.EVERY else 1
    for part in parts:
        if part.is_layer and size > 1:
            group.append(part)
            if len(group) == size:
                made.append(_segment(run, group))
                group = []
            continue
        if group:
            made.append(_segment(run, group))
            group = []
        made.append(_unit(run, part))
    if group:
        made.append(_segment(run, group))
    return tuple(_sharded(run, list(parts), made))


def _unit(run: Run, part: Part) -> Unit:
    dtype = run.precision.gradient
    passes = part.passes(dtype)
    adding = part.passes(dtype, accumulates=True)
    tied_here = run.model.tied_embeddings and run.layout.pp == 1
    gradient, backward = part.static.gradients, passes.backward_peak
    pending = _tied_bytes(part.region, dtype) if tied_here and part.name == HEAD else 0
    gradient += pending
    if tied_here and part.name == EMBEDDING:  # the head's backward made it already
        gradient -= max((w.numel for w in part.region.weights), default=0) * DTYPE_BYTES[dtype]
        backward = adding.backward_peak
    return Unit(
        name=part.name, resident=passes.resident, forward_peak=passes.forward_peak, backward_peak=backward,
        adding_peak=adding.backward_peak, gradient=gradient, pending=pending, is_loss=part.name == HEAD,
    )  # fmt: skip


def _tied_bytes(region: Region, dtype: str) -> int:
    return sum(w.numel for w in region.weights if w.tied) * DTYPE_BYTES[dtype]


def _segment(run: Run, parts: Sequence[Part]) -> Unit:
    """See NOTE [ Segments ]."""
    dtype = run.precision.gradient
    full = [part.passes(dtype) for part in parts]
    plain = [_passes(part.region, NONE, dtype, False) for part in parts]
    adding = [_passes(part.region, NONE, dtype, True) for part in parts]
    held = full[0].resident
    first = parts[0].region
    shared = first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))
    forward = max(p.forward_peak + (held if i else 0) for i, p in enumerate(full))
    return Unit(
        name=parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}",
        resident=held, forward_peak=forward,
        backward_peak=_segment_backward(plain, [p.static.gradients for p in parts], shared),
        adding_peak=_segment_backward(adding, [0] * len(parts), shared),
        gradient=sum(part.static.gradients for part in parts),
    )  # fmt: skip


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


def _sharded(run: Run, parts: Sequence[Part], made: Sequence[Unit]) -> Iterator[Unit]:
    """With what ZeRO and offloading add to each unit's transients.

    ZeRO 3 gathers a region while it runs and prefetches the next one; ZeRO 2 and 3 hold a region's whole gradients
    until they have been reduced, which the next region's overlap with.
    """
    widest = max((part.static.gathered for part in parts), default=0)
    reducing = max((part.static.reduced for part in parts), default=0)
    before = 0
    for unit in made:
        extra = 2 * widest if run.layout.resharded else 0
        more = extra + reducing
        moved = unit.resident if run.recompute.offload else 0
        yield replace(
            unit,
            resident=unit.resident - moved,
            forward_peak=unit.forward_peak + extra + (before if moved else 0),
            backward_peak=unit.backward_peak + more + moved + (before if moved else 0),
            adding_peak=unit.adding_peak + more + moved + (before if moved else 0),
        )
        before = moved
