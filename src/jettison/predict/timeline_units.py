"""The units that a stage's timeline consists of: what each region holds, and how high its passes rise.

NOTE [ Segments ]
`every:K` holds the input of the first of K layers, and so may a planner's choice for any run of layers of a chunk.
Backward runs the K forwards again, keeping everything, and then their backwards. So within a segment the replay of no
recompute holds, on top of one input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.liveness import Passes
from jettison.formula.region import EMBEDDING, HEAD
from jettison.memory.unit import Unit
from jettison.predict.frozen_models import highest_forward
from jettison.predict.fsdp_groups import Place, has_outer_ends
from jettison.predict.gathered import beside, with_shards
from jettison.predict.halves import splits, with_halves
from jettison.predict.held_beside import with_names
from jettison.predict.passes import cached_bytes, caches_copies, named_passes, passes_of, sums_apart, tied_table
from jettison.predict.stage_buffers import mask_bytes, with_ends, without_masks
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion, kept_by, names_of, sent_by
from jettison.spec.precision import GradientRule, Gradients
from jettison.spec.recompute import Mode
from jettison.spec.run import Run
from jettison.spec.tuning import When


def units(run: Run, groups: Sequence[RegionGroup], neighbours: tuple[bool, bool] = (False, False)) -> tuple[Unit, ...]:
    """The units of one chunk, in order; none of a stage without layers.

    Args:
        neighbours: are the chunks before it and behind it on the same device?
    """
    if not groups:
        return ()
    made: Sequence[Unit] = list(_made(run, groups))
    before, behind = neighbours
    made = list(with_ends(run, groups, made, handed_on=behind)) if run.layout.pp > 1 else made
    made = without_masks(run, made) if run.layout.pp == 1 else made
    made = with_names(run, groups, made)
    made = list(_with_output(groups, made)) if run.holds_output else made
    made = with_shards(run, groups, made)
    made = list(_with_copies(run, groups, made)) if run.recompute.to_host else made
    made = list(with_halves(run, groups, made, handed_back=before)) if splits(run) else made
    return tuple(map(_with_frozen, made) if run.frozen else made)


def _with_output(groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[Unit]:
    """With the logits beside every backward behind the head's: they go when the loop has no name for them any more."""
    head = groups[-1].part
    held = head.region.program.kept_bytes(head.held)
    for unit in made:
        more = 0 if unit.is_loss else held
        yield replace(unit, backward_peak=unit.backward_peak + more, adding_peak=unit.adding_peak + more)


def _made(run: Run, groups: Sequence[RegionGroup]) -> Sequence[Unit] | Iterator[Unit]:
    size = run.recompute.number if run.recompute.mode is Mode.EVERY else 1
    if size > 1 or any(group.part.segment > 1 for group in groups):
        return _segments(run, groups, size)
    how = _How.of(run)
    return [_unit(run, group, how) for group in groups]


@dataclass(frozen=True, slots=True)
class _How:
    """What `_unit` asks of a run, asked once: `Run.frees_gradients`, `Run.gradients_come_whole`, `Run.gradient_rule`;
    whether a table is tied and no group of its own; `Run.autocast`.
    """

    frees: bool
    whole: bool
    rule: GradientRule
    tied: bool
    autocast: bool

    @classmethod
    def of(cls, run: Run) -> _How:
        tied = run.model.tied_embeddings and run.layout.pp == 1 and not has_outer_ends(run)
        return cls(run.frees_gradients, run.gradients_come_whole, run.gradient_rule, tied, caches_copies(run))


def _unit(run: Run, group: RegionGroup, how: _How) -> Unit:
    part, rule, dtype = group.part, how.rule, run.precision.gradient
    passes = passes_of(part, rule)
    adding = passes if how.whole else passes_of(part, rule, accumulates=True)
    gradient, backward, pending = part.static.gradients, passes.backward_peak, 0
    added = adding.backward_peak
    if how.frees:  # it goes as one that is added to others does
        gradient, backward = _left(run, [part]), adding.backward_peak
    if how.tied:
        if part.name == HEAD:
            pending = sum(w.numel for w in part.region.weights if w.tied and not w.frozen) * DTYPE_BYTES[dtype]
            gradient += pending
        if part.name == EMBEDDING:  # the head's backward made it already
            table, beside = tied_table(part.region, DTYPE_BYTES[dtype])
            gradient -= table
            summed = table // DTYPE_BYTES[dtype] * DTYPE_BYTES[rule.added]
            both = 2 * summed if sums_apart(run) else summed  # the engine's sum beside what it adds to the head's
            backward, added = max(adding.backward_peak, beside + both), max(adding.backward_peak, both)
            if run.model.source is not None:  # the decoder's rows came before: `held_beside`
                again = 0 if run.model.source.sound else beside + summed
                backward, added = max(passes.backward_peak - table, again), adding.backward_peak
    mask = mask_bytes(run) if part.name == EMBEDDING else 0
    return Unit(
        names=group.names,
        resident=passes.resident + mask,
        forward_peak=passes.forward_peak + mask,
        backward_peak=backward,
        adding_peak=added,
        gradient=gradient,
        pending=pending,
        is_loss=part.name == HEAD,
        frozen=_frozen(run, part.name) if run.frozen else 0,
        cached=cached_bytes(part.region, part.kept) if how.autocast else 0,
    )


def _left(run: Run, parts: Sequence[StageRegion]) -> int:
    """Gradients that a backward leaves behind; of those that go to the host, `formula.static` has none."""
    return 0 if run.gradients is Gradients.IN_BACKWARD else sum(part.static.gradients for part in parts)


def _frozen(run: Run, name: str) -> int:
    """Of frozen models, what runs before the first region's forward, or before the last one's backward."""
    when = {EMBEDDING: When.BEFORE, HEAD: When.AFTER}.get(name)
    return 0 if when is None else highest_forward(run, when)


def _with_frozen(unit: Unit) -> Unit:
    """With its peaks no lower than the forward of a frozen model that stands beside it."""
    if not unit.frozen:
        return unit
    if not unit.is_loss:
        return replace(unit, forward_peak=max(unit.forward_peak, unit.frozen))
    peaks = max(unit.backward_peak, unit.frozen), max(unit.adding_peak, unit.frozen)
    return replace(unit, backward_peak=peaks[0], adding_peak=peaks[1])


def _segments(run: Run, groups: Sequence[RegionGroup], size: int) -> Iterator[Unit]:
    """One unit for each run of equal segments. See NOTE [ Segments ].

    Args:
        size: of every segment; 1: as a planner has cut them, and layers that it has left alone are units of their own.
    """
    how = _How.of(run)
    for is_own, run_of_groups in groupby(groups, lambda group: _is_own_layer(group.part)):
        if not is_own:
            yield from (_unit(run, group, how) for group in run_of_groups)
            continue
        parts = [(group.part, name) for group in run_of_groups for name in group.names]
        for _, same in groupby(_cut(parts, size), lambda segment: [part for part, _name in segment]):
            segments = list(same)
            names = tuple(s[0][1] if len(s) == 1 else f"{s[0][1]} to {s[-1][1]}" for s in segments)
            first = segments[0][0][0]
            if size == 1 and first.segment == 1:
                yield _unit(run, RegionGroup(part=first, names=names), how)
            else:
                yield _segment(run, [part for part, _ in segments[0]], names)


def _is_own_layer(part: StageRegion) -> bool:
    """Is it one of the model's own layers? Those for further tokens are checkpoints of their own."""
    return part.layer is not None and not part.layer.ahead


_Named = tuple[StageRegion, str]


def _cut(parts: Sequence[_Named], size: int) -> Iterator[Sequence[_Named]]:
    at = 0
    while at < len(parts):
        length = size if size > 1 else parts[at][0].segment
        yield parts[at : at + length]
        at += length


def _segment(run: Run, parts: Sequence[StageRegion], names: tuple[str, ...]) -> Unit:
    rule = run.gradient_rule
    full = [passes_of(part, rule) for part in parts]
    plain = [named_passes(part.region, NONE, rule, False) for part in parts]
    adding = plain if run.gradients_come_whole else [named_passes(part.region, NONE, rule, True) for part in parts]
    held = full[0].resident
    first = parts[0].region
    shared = first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))
    passing, freed = _segment_backward(adding, [0] * len(parts), shared), run.frees_gradients
    return Unit(
        names=names,
        resident=held,
        forward_peak=max(p.forward_peak + (held if i else 0) for i, p in enumerate(full)),
        backward_peak=passing if freed else _segment_backward(plain, [p.static.gradients for p in parts], shared),
        adding_peak=passing,
        gradient=_left(run, parts),
        cached=sum(cached_bytes(p.region, p.kept if i == 0 else frozenset()) for i, p in enumerate(parts))
        if caches_copies(run)
        else 0,
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


def sent_to_host(run: Run, groups: Sequence[RegionGroup]) -> dict[str, int]:
    """Bytes that units of a chunk send to the host in a forward, by their names; those that send none are left out."""
    if not (groups and run.recompute.to_host):
        return {}
    made: Sequence[Unit] = list(_made(run, groups))
    return {name: moved for unit, moved, _ in _sending(run, groups, made) for name in unit.names if moved}


def _with_copies(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[Unit]:
    """With what offloading adds: what is on its way beside the next unit's passes.

    See NOTE [ What is on its way ] in `solve.problem`.
    """
    for unit, moved, before in _sending(run, groups, made):
        yield replace(
            unit,
            resident=unit.resident - moved,
            forward_peak=unit.forward_peak + before,
            backward_peak=unit.backward_peak + moved + before,
            adding_peak=unit.adding_peak + moved + before,
        )


def unit_within(run: Run, groups: Sequence[RegionGroup], place: Place) -> Unit:
    """What some neighbours of a chunk are together, with the transients that they have there, and nothing sent."""
    (unit,) = _made(run, groups)
    return _with_frozen(beside(run, unit, place, groups[0].part))


def _sending(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[tuple[Unit, int, int]]:
    """Units, the bytes that each sends, and those of the one before; only layers send, and of a chunk not the last.

    Under lists of modules the last layer of other chunks than the model's last sends as well: Megatron keeps what the
    backward that comes next would fetch at once (``fine_grained_activation_offload.py``, ``should_bulk_offload``).
    """
    if not run.recompute.to_host:
        yield from ((unit, 0, 0) for unit in made)
        return
    parts = {name: group.part for group in groups for name in group.names}
    each = [(unit, name, _moved(run, parts, unit, name)) for unit in made for name in unit.names]
    layers = [i for i, (_, name, _) in enumerate(each) if name not in parts or parts[name].is_layer]
    last = max(layers, default=-1)  # a stage may have no layers
    if run.recompute.sent and HEAD not in groups[-1].names:
        last = -1
    each = [(unit, name, 0 if i == last else moved) for i, (unit, name, moved) in enumerate(each)]
    before = [0, *(moved for _, _, moved in each)]
    alike = groupby(zip(each, before, strict=False), lambda pair: (id(pair[0][0]), pair[0][2], pair[1]))
    for (_, moved, ahead), pairs in alike:
        found = [entry for entry, _ in pairs]
        yield replace(found[0][0], names=tuple(name for _, name, _ in found)), moved, ahead


def _moved(run: Run, parts: Mapping[str, StageRegion], unit: Unit, name: str) -> int:
    """What a unit sends: all that it holds, or what a planner says; a segment is named after its first and last."""
    if name not in parts and run.recompute.mode is Mode.EVERY:
        return unit.resident
    return moved_bytes(run, parts[name.partition(" to ")[0]])


def moved_bytes(run: Run, part: StageRegion) -> int:
    """What a region sends to the host, of what stays of it."""
    if not (run.recompute.to_host and part.is_layer and part.first):
        return 0
    if run.recompute.sent:
        return part.region.program.kept_bytes(sent_by(part.region, part.policy, names_of(run, run.recompute.sent)))
    moved = frozenset[int]() if run.recompute.mode is Mode.AUTO else part.kept
    return part.region.program.kept_bytes(moved if part.chosen is None else part.chosen.moved)
